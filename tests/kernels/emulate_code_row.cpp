// A launch of the product of one row with codes on the CPU, as a library; constants are defined as for
// a GPU.

#include "emulated.hpp"

#include "product_rows.cuh"
#include "code_row.cu"

extern "C" int multiply_all(const Arguments* given, int bytes, int blocks, int shared) {
  return run_all<Arguments, code_row>(given, bytes, blocks, shared, THREADS);
}
