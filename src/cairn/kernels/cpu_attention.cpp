// What lies between the products of a decode step: rotation and storing of new rows, and attention over the pages of a cache.
//
// Every query is computed on its own, in a fixed order, so that its result depends neither on the batch nor on the number of threads.

#include <vector>

#include "cpu_cache.h"

namespace {

// to = x normed, if there is a weight, and rotated: dimensions i and i + dim / 2 form a pair
void rotate(const float* x, const float* weight, float eps, const float* cos, const float* sin, int dim, float* to) {
    float factor = 1;
    if (weight) {
        f32x16 squares{};
        for (int i = 0; i < dim; i += kLanes) squares += load<f32x16>(x + i) * load<f32x16>(x + i);
        factor = 1.0f / std::sqrt(total(squares) / dim + eps);
    }
    const int half = dim / 2;
    for (int i = 0; i < half; i += kLanes) {
        f32x16 first = load<f32x16>(x + i), second = load<f32x16>(x + half + i);
        if (weight) {
            first = first * factor * load<f32x16>(weight + i);
            second = second * factor * load<f32x16>(weight + half + i);
        }
        store(to + i, first * load<f32x16>(cos + i) + second * load<f32x16>(sin + i));
        store(to + half + i, second * load<f32x16>(cos + half + i) + first * load<f32x16>(sin + half + i));
    }
}

template <int chunks>
void attend(const float* query, const Cache& cache, int head, const int32_t* pages, int64_t first, int64_t last, float scale, float* out) {
    const int64_t keys = last - first;
    std::vector<float> weights(padded(keys), -INFINITY);
    f32x16 q[chunks], sum[chunks] = {};
    for (int c = 0; c < chunks; c++) q[c] = load<f32x16>(query + c * kLanes) * scale;
    for (int64_t i = 0; i < keys; i++) {
        const float* key = cache.at(pages[(first + i) / cache.page_size], head, (first + i) % cache.page_size);
        f32x16 product = q[0] * load<f32x16>(key);
        for (int c = 1; c < chunks; c++) product += q[c] * load<f32x16>(key + c * kLanes);
        weights[i] = total(product);
    }
    const float sum_of_weights = exponentials(weights.data(), weights.size(), largest(weights.data(), weights.size()), weights.data());
    for (int64_t i = 0; i < keys; i++) {
        const int64_t row = first + i;
        const float* value = cache.at(pages[row / cache.page_size], cache.kv_heads + head, row % cache.page_size);
        for (int c = 0; c < chunks; c++) sum[c] += weights[i] * load<f32x16>(value + c * kLanes);
    }
    const float inverse = 1.0f / sum_of_weights;
    for (int c = 0; c < chunks; c++) store(out + c * kLanes, sum[c] * inverse);
}

}  // namespace

// Heads of qkv: queries to `query` [rows, heads, dim], keys and values to the cache. `cos` and `sin` are [rows, dim].
extern "C" void cairn_rotate_and_store(
    const float* qkv, int64_t stride, int32_t rows, int32_t heads, const float* cos, const float* sin, const float* q_norm,
    const float* k_norm, float eps, float* cache_rows, int32_t kv_heads, int32_t page_size, int32_t dim, const int32_t* pages,
    const int32_t* offsets, float* query, int32_t threads
) {
    const Cache cache{cache_rows, kv_heads, page_size, dim};
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * stride > kSerial)
    for (int row = 0; row < rows; row++) {
        const float* x = qkv + row * stride;
        for (int head = 0; head < heads; head++)
            rotate(x + head * dim, q_norm, eps, cos + row * dim, sin + row * dim, dim, query + ((int64_t)row * heads + head) * dim);
        for (int head = 0; head < kv_heads; head++) {
            const float* key = x + (heads + head) * dim;
            rotate(key, k_norm, eps, cos + row * dim, sin + row * dim, dim, cache.at(pages[row], head, offsets[row]));
            std::memcpy(cache.at(pages[row], kv_heads + head, offsets[row]), key + kv_heads * dim, dim * sizeof(float));
        }
    }
}

// One query row per sequence over rows [first, last) of its pages.
extern "C" void cairn_attend(
    const float* query, int32_t seqs, int32_t heads, float* cache_rows, int32_t kv_heads, int32_t page_size, int32_t dim,
    const int32_t* table, int64_t table_stride, const int64_t* first, const int64_t* last, float scale, float* out, int32_t threads
) {
    const Cache cache{cache_rows, kv_heads, page_size, dim};
    const auto run = dim == 32 ? attend<2> : dim == 64 ? attend<4> : dim == 96 ? attend<6> : dim == 128 ? attend<8> : attend<16>;
    int64_t read = 0;
    for (int seq = 0; seq < seqs; seq++) read += (last[seq] - first[seq]) * heads * dim;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (read > kSerial)
    for (int item = 0; item < seqs * heads; item++) {
        const int seq = item / heads, head = item % heads;
        const int64_t place = (int64_t)item * dim;
        run(query + place, cache, head / (heads / kv_heads), table + seq * table_stride, first[seq], last[seq], scale, out + place);
    }
}
