// Input and output rows of a product, and what is done to input rows first: a norm, or an activation.

#pragma once

#include "cpu_vectors.h"

namespace {

struct Input {
    const float* x;     // [rows, columns], or [rows, 2 * columns] with silu
    int64_t stride;     // from one row to the next
    int rows;
    const float* norm;  // weight of an RMS norm that comes first, or null
    float eps;
    bool silu;          // the input is silu(first half) * second half
};

struct Output {
    float* out;  // [rows, outputs]
    int64_t stride;
    bool add;  // to what is there
};

inline f32x16 load_some(const float* from, int64_t count) {
    if (count >= kLanes) return load<f32x16>(from);
    f32x16 some{};
    std::memcpy(&some, from, count * sizeof(float));
    return some;
}

inline float norm_factor(const Input& input, const float* x, int64_t columns) {
    if (!input.norm) return 1;
    f32x16 squares{};
    for (int64_t i = 0; i < columns; i += kLanes) {
        const f32x16 v = load_some(x + i, columns - i);
        squares += v * v;
    }
    return 1.0f / std::sqrt(total(squares) / columns + input.eps);
}

// columns `at` to `at` + 15 of the row x, after activation and norm; zeros after the last column
inline f32x16 sixteen(const Input& input, const float* x, int64_t at, int64_t columns, float factor) {
    f32x16 v = load_some(x + at, columns - at);
    if (input.silu) v = v / (1.0f + exp16(-v)) * load_some(x + columns + at, columns - at);
    if (input.norm) v = v * factor * load_some(input.norm + at, columns - at);
    return v;
}

}  // namespace
