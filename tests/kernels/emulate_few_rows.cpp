// Launches of products of few rows on the CPU, as a library; constants are defined as for a GPU.

#include "emulated.hpp"

#include "few_rows_inputs.cuh"
#include "few_rows.cu"

// 0, or 1 if a block came to a standstill, or 2 if the arguments have another size.
template <typename Given, void (*KERNEL)(const Given)>
int run_all(const Given* given, int bytes, int blocks) {
  if (bytes != sizeof(Given)) return 2;
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    if (!run_block<const Given, KERNEL>(*given, THREADS)) return 1;
  return 0;
}

#if ROWS > 1
extern "C" int prepare_all(const RowArguments* given, int bytes, int blocks) {
  return run_all<RowArguments, prepare_rows>(given, bytes, blocks);
}
#endif

extern "C" int multiply_all(const Arguments* given, int bytes, int blocks) {
  return run_all<Arguments, few_rows>(given, bytes, blocks);
}
