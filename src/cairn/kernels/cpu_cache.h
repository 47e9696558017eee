// The pages of a cache, and the softmax over scores of its rows.

#pragma once

#include "cpu_vectors.h"

namespace {

constexpr int64_t kSerial = 1 << 15;  // numbers to read below which other threads are not worth waking

// [pages, 2 * kv_heads, page_size, dim] float32, keys first
struct Cache {
    float* rows;
    int kv_heads, page_size, dim;

    float* at(int64_t page, int head, int64_t offset) const {
        return rows + ((page * 2 * kv_heads + head) * page_size + offset) * dim;
    }
};

inline int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

inline float largest(const float* scores, int64_t count) {
    f32x16 most = spread(-INFINITY);
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 own = load<f32x16>(scores + i);
        most = own > most ? own : most;
    }
    float all = most[0];
    for (int i = 1; i < kLanes; i++) all = most[i] > all ? most[i] : all;
    return all;
}

// The sum of e to the (scores - most), which are written to `weights` unless it is null. `count` is padded with -inf.
inline float exponentials(const float* scores, int64_t count, float most, float* weights) {
    f32x16 sum{};
    for (int64_t i = 0; i < count; i += kLanes) {
        const f32x16 own = load<f32x16>(scores + i);
        const f32x16 weight = own == -INFINITY ? f32x16{} : exp16(own - most);
        if (weights) store(weights + i, weight);
        sum += weight;
    }
    return total(sum);
}

}  // namespace
