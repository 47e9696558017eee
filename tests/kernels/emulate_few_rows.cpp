// Launches of products of few rows on the CPU, as a library; constants are defined as for a GPU.

#include "emulated.hpp"

#include "product_rows.cuh"
#include "few_rows.cu"

#if ROWS > 1
extern "C" int prepare_all(const RowArguments* given, int bytes, int blocks, int shared) {
  return run_all<RowArguments, prepare_rows>(given, bytes, blocks, shared, THREADS);
}
#endif

extern "C" int multiply_all(const Arguments* given, int bytes, int blocks, int shared) {
  return run_all<Arguments, few_rows>(given, bytes, blocks, shared, THREADS);
}
