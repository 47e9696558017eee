// A launch of the selection of rows on the CPU, as a library; constants are defined as for a GPU.

#include "emulated.hpp"

#include "choose_rows.cu"

// 0, or 1 if a cluster came to a standstill, or 2 if the shared memory that is asked for is not what
// the source needs.
extern "C" int launch(const Arguments* arguments, int arguments_bytes, int rows, int cluster,
                      int shared) {
  if (arguments_bytes != sizeof(Arguments)) return 3;
  if (shared != int(sizeof(Shared) + 8 * arguments->words)) return 2;
  if (shared > int(BLOCK_BYTES)) return 2;
  for (int row = 0; row < rows; ++row) {
    blockIdx.x = row * cluster;
    if (!run_block<const Arguments, choose_rows>(*arguments, THREADS, cluster)) return 1;
  }
  return 0;
}
