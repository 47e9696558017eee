// Sparse attention of decode rows: the window of a row, and the units that its query selects. `attention/hsa/torch_sparse.py` and
// `sparsity/selection.py` define it.
//
// A row's query heads of one kv head are computed together, on their own and in a fixed order, so that the result depends neither on
// the batch nor on the number of threads.

#include <algorithm>
#include <functional>
#include <vector>

#include "cpu_cache.h"

namespace {

constexpr int64_t kFetched = 1024;  // numbers of a unit to ask for
constexpr int64_t kAhead = 4;       // landmarks to ask for

enum Strategy { kGroup, kHead, kSoftmaxHead };

struct Step {
    const float* query;    // [rows of the step, heads, dim]
    const float* mapped;   // [rows, heads, width] queries that landmarks are scored with
    const int64_t* rows;   // [rows] of the step
    int32_t count, heads;
    const int64_t* positions;                  // [rows] place of each row in its sequence
    const int64_t* limits;                     // [rows] units before this place are candidates, later ones are the window
    const int64_t* window;                     // [rows, window_stride] ids of the window's units
    int64_t window_stride;
    const int64_t* table;                      // [rows, candidates] ids of units
    const int32_t* generations;                // [rows, candidates]
    int64_t candidates;
    const float* landmarks;                    // [units of the pool, landmark_heads, width]
    const float* bias;                         // [units of the pool, landmark_heads], or null
    const int32_t* sealed;                     // [units of the pool] generation of each landmark
    int32_t landmark_heads, width;
    float scale, score_scale, reach;
    int32_t strategy, sinks, topk;
    float* out;      // [rows of the step, heads, dim]
    int64_t* index;  // [rows, kv_heads, topk] places of the selected units, ascending, padded with -1
};

struct Units {
    Cache cache;
    int each;  // units of a page

    int size() const { return cache.page_size / each; }
    const float* at(int64_t unit, int head) const { return cache.at(unit / each, head, unit % each * size()); }
};

// Ask for numbers that will be read soon. The CPU itself foresees only what goes on for long.
void fetch(const float* from, int64_t count) {
    for (int64_t i = 0; i < std::min<int64_t>(count, kFetched); i += kLanes) __builtin_prefetch(from + i);
}

float product(const float* a, const float* b, int count) {
    f32x16 sum{};
    for (int i = 0; i < count; i += kLanes) sum += load<f32x16>(a + i) * load<f32x16>(b + i);
    return total(sum);
}

float log_sum_exp(const float* scores, int64_t count) {
    const float most = largest(scores, count);
    return most == -INFINITY ? most : most + std::log(exponentials(scores, count, most, nullptr));
}

float log_add_exp(float a, float b) {
    const float more = a > b ? a : b, less = a > b ? b : a;
    return less == -INFINITY ? more : more + std::log1p(std::exp(less - more));
}

// Landmark scores of the heads of a kv head for the candidates of a row, those of a head `stride` after the last. The scores of units
// that must not be read are left as they are.
void score(const Step& step, int row, int first_head, int group, float* scores, int64_t stride) {
    const int shared = step.heads / step.landmark_heads, half = step.reach ? step.width / 2 : step.width;
    const float* queries = step.mapped + ((int64_t)row * step.heads + first_head) * step.width;
    const int64_t limit = step.limits[row], *table = step.table + row * step.candidates;
    for (int64_t place = 0; place < limit; place++) {
        if (place + kAhead < limit) fetch(step.landmarks + (table[place + kAhead] * step.landmark_heads + first_head / shared) * step.width, step.width);
        const int64_t unit = table[place];
        if (step.sealed[unit] != step.generations[row * step.candidates + place]) continue;
        for (int head = 0; head < group; head++) {
            const int64_t own = unit * step.landmark_heads + (first_head + head) / shared;
            const float *query = queries + head * step.width, *landmark = step.landmarks + own * step.width;
            float found = product(query, landmark, half) * step.score_scale;
            if (step.reach) found += step.reach * std::sqrt(product(query + half, landmark + half, half));
            if (step.bias) found += step.bias[own];
            scores[head * stride + place] = found;
        }
    }
}

// Places of the largest ranks above -inf, ascending. Of equal ranks the earlier place wins.
std::vector<int64_t> best(const std::vector<float>& ranks, size_t topk) {
    std::vector<float> finite;
    for (const float rank : ranks)
        if (rank > -INFINITY) finite.push_back(rank);
    float least = -INFINITY;
    int64_t ties = 0;  // places of rank `least` to take
    if (finite.size() > topk) {
        std::nth_element(finite.begin(), finite.begin() + (topk - 1), finite.end(), std::greater<float>());
        least = finite[topk - 1];
        ties = topk - std::count_if(finite.begin(), finite.end(), [least](float rank) { return rank > least; });
    }
    std::vector<int64_t> places;
    for (size_t place = 0; place < ranks.size(); place++)
        if (ranks[place] > least || (ranks[place] == least && ties-- > 0)) places.push_back(place);
    return places;
}

// Places of the units that the heads of a kv head select. Their `visible` scores of the window are at `window`, those of a head
// `stride` after the last.
std::vector<int64_t> choose(const Step& step, int row, int first_head, int group, const float* window, int64_t stride, int64_t visible) {
    const int64_t limit = step.limits[row], wide = padded(limit);
    if (!limit || !step.topk) return {};
    std::vector<float> scores(group * wide, -INFINITY), ranks(limit, step.strategy == kGroup ? 0.0f : -INFINITY);
    score(step, row, first_head, group, scores.data(), wide);
    for (int head = 0; head < group; head++) {
        const float* own = &scores[head * wide];
        float normalizer = 0;
        if (step.strategy == kSoftmaxHead && group > 1)
            normalizer = log_add_exp(log_sum_exp(window + head * stride, visible), log_sum_exp(own, wide));
        for (int64_t place = 0; place < limit; place++) {
            const float rank = own[place] - normalizer;
            ranks[place] = step.strategy == kGroup ? ranks[place] + rank : rank > ranks[place] ? rank : ranks[place];
        }
    }
    for (int64_t place = 0; place < limit && place < step.sinks; place++)
        if (ranks[place] > -INFINITY) ranks[place] = INFINITY;
    return best(ranks, step.topk);
}

template <int chunks>
void attend(const Step& step, const Units& units, int row, int kv_head) {
    constexpr int dim = chunks * kLanes;
    const int kv_heads = units.cache.kv_heads, group = step.heads / kv_heads, first_head = kv_head * group, size = units.size();
    const int64_t visible = step.positions[row] + 1 - step.limits[row] * size;  // rows of the window
    const int64_t windows = (visible + size - 1) / size;                        // units of the window
    const int64_t stride = padded((windows + step.topk) * size);
    const int64_t from = (step.rows[row] * step.heads + first_head) * dim;
    std::vector<int64_t> read(step.window + row * step.window_stride, step.window + row * step.window_stride + windows);
    std::vector<float> query(group * dim), weights(group * stride, -INFINITY), sums(group * dim);
    for (int i = 0; i < group * dim; i++) query[i] = step.query[from + i] * step.scale;

    // Heads take turns at a unit while it is close to the CPU.
    const auto in_units = [&](size_t first, int slices, const auto& act) {
        for (size_t i = first; i < read.size(); i++) {
            if (i + 1 < read.size()) fetch(units.at(read[i + 1], slices + kv_head), (int64_t)size * dim);
            const int rows = std::min<int64_t>(size, i < (size_t)windows ? visible - i * size : size);
            for (int head = 0; head < group; head++) act(head, units.at(read[i], slices + kv_head), rows, &weights[head * stride + i * size]);
        }
    };
    const auto multiply = [&](int head, const float* keys, int rows, float* scores) {
        f32x16 q[chunks];
        for (int c = 0; c < chunks; c++) q[c] = load<f32x16>(&query[head * dim + c * kLanes]);
        for (int i = 0; i < rows; i++) {
            f32x16 product = q[0] * load<f32x16>(keys + i * dim);
            for (int c = 1; c < chunks; c++) product += q[c] * load<f32x16>(keys + i * dim + c * kLanes);
            scores[i] = total(product);
        }
    };
    const auto add = [&](int head, const float* values, int rows, const float* own) {
        f32x16 sum[chunks];
        for (int c = 0; c < chunks; c++) sum[c] = load<f32x16>(&sums[head * dim + c * kLanes]);
        for (int i = 0; i < rows; i++)
            for (int c = 0; c < chunks; c++) sum[c] += own[i] * load<f32x16>(values + i * dim + c * kLanes);
        for (int c = 0; c < chunks; c++) store(&sums[head * dim + c * kLanes], sum[c]);
    };
    in_units(0, 0, multiply);
    const std::vector<int64_t> chosen = choose(step, row, first_head, group, weights.data(), stride, padded(visible));
    for (const int64_t place : chosen) read.push_back(step.table[row * step.candidates + place]);
    in_units(windows, 0, multiply);
    std::vector<float> inverse(group);
    for (int head = 0; head < group; head++) {
        float* own = &weights[head * stride];
        inverse[head] = 1.0f / exponentials(own, stride, largest(own, stride), own);
    }
    in_units(0, kv_heads, add);
    for (int i = 0; i < group * dim; i++) step.out[from + i] = sums[i] * inverse[i / dim];
    int64_t* index = step.index + ((int64_t)row * kv_heads + kv_head) * step.topk;
    std::fill(std::copy(chosen.begin(), chosen.end(), index), index + step.topk, -1);
}

}  // namespace

extern "C" void cairn_attend_sparse(const Step* step, float* cache_rows, int32_t kv_heads, int32_t page_size, int32_t dim, int32_t units, int32_t threads) {
    const Units all{Cache{cache_rows, kv_heads, page_size, dim}, units};
    const auto run = dim == 32 ? attend<2> : dim == 64 ? attend<4> : dim == 96 ? attend<6> : dim == 128 ? attend<8> : attend<16>;
    int64_t read = 0;
    for (int row = 0; row < step->count; row++)
        read += (step->positions[row] + 1 - step->limits[row] * all.size() + step->topk * all.size()) * step->heads * dim;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (read > kSerial)
    for (int item = 0; item < step->count * kv_heads; item++) run(*step, all, item / kv_heads, item % kv_heads);
}
