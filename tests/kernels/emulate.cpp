// A launch of attention over unions on the CPU, as a library; constants are defined as for a GPU.

#include "emulated.hpp"

#include "union_attention.cu"

// 0, or 1 if a block came to a standstill, or 2 if the shared memory that is asked for is not what
// the source needs.
extern "C" int launch(const Arguments* arguments, int arguments_bytes, int blocks, int shared) {
  if (arguments_bytes != sizeof(Arguments)) return 3;
  if (shared != int(STAGES * STAGE_BYTES + sizeof(Union)) || shared > int(BLOCK_BYTES)) return 2;
  for (blockIdx.y = 0; blockIdx.y < KV_HEADS; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
      if (!run_block<const Arguments, union_attention>(*arguments, THREADS)) return 1;
  return 0;
}
