// Launches of products of few rows with codes on the CPU, as a library; constants are defined as for a
// GPU.

#include "emulated.hpp"

#include "product_rows.cuh"
#include "code_tiles.cu"

extern "C" int prepare_all(const PrepareArguments* given, int bytes, int blocks, int shared) {
  return run_all<PrepareArguments, prepare_codes>(given, bytes, blocks, shared, PREPARE_THREADS);
}

extern "C" int multiply_all(const Arguments* given, int bytes, int blocks, int shared, int together) {
  return run_all<Arguments, code_tiles>(given, bytes, blocks, shared, THREADS, together);
}
