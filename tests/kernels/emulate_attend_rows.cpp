// A launch of attention over chosen rows on the CPU, as a library; constants are defined as for a GPU.

#include "emulated.hpp"

#include "latent_tiles.cuh"

#include "attend_rows.cu"

// 0, or 1 if a cluster came to a standstill, or 2 if the shared memory that is asked for is not what
// the source needs.
extern "C" int launch(const Arguments* arguments, int arguments_bytes, int queries, int parts,
                      int shared) {
  if (arguments_bytes != sizeof(Arguments)) return 3;
  if (shared != int(sizeof(Gathered) + 1024) || shared > int(BLOCK_BYTES)) return 2;
  gridDim = {parts, HEADS / 64, queries};
  for (blockIdx.z = 0; blockIdx.z < queries; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < HEADS / 64; ++blockIdx.y) {
      blockIdx.x = 0;
      if (!run_block<const Arguments, attend_rows>(*arguments, THREADS, parts)) return 1;
    }
  return 0;
}
