// Products with matrices of floats of 32, 16 or 8 bits, or of whole numbers of 8 bits, on a CPU. models/narrow.py defines the
// layout and has the same product in torch.
//
// Lane i of every vector belongs to output i of a group of 16. An output adds up its columns in their order, for `span` columns
// at a time, so a row's result does not depend on the other rows or on the number of threads.

#include <vector>

#include "cpu_rows.h"

namespace {

enum Kind { kFloat, kHalf, kBrain, kEight, kWhole };  // float32, float16, bfloat16, float8_e4m3fn, int8

#ifdef __AVX512F__
constexpr int kMostRows = 8;  // input rows and groups that a kernel multiplies at once: their sums fit the registers
constexpr int kMostGroups = 2;
#else
constexpr int kMostRows = 4;
constexpr int kMostGroups = 1;
#endif
constexpr int kTileRows = 128;  // input rows that stay in the cache while all groups pass

}  // namespace

extern "C" {

struct Floats {
    const void* values;  // [groups, columns, 16]
    const float* scale;  // [groups, spans, 16], or null
    int32_t outputs, columns;
    int32_t span;        // columns that share a scale
    int32_t kind;
};

}  // extern "C"

namespace {

template <int kind>
inline f32x16 widened(const void* values, size_t at) {
    typedef int16_t i16x16 __attribute__((vector_size(32)));
    at *= kLanes;
    if constexpr (kind == kFloat) return load<f32x16>((const float*)values + at);
    if constexpr (kind == kHalf) return from_half(load<u16x16>((const uint16_t*)values + at));
    if constexpr (kind == kBrain) {
        return (f32x16)(__builtin_convertvector(load<u16x16>((const uint16_t*)values + at), u32x16) << 16);
    }
    if constexpr (kind == kEight) {
        // Seen as float16, with sign and exponent where they belong, it is 256 times too small.
        const i16x16 wide = __builtin_convertvector(load<i8x16>((const int8_t*)values + at), i16x16);
        return from_half((u16x16)(wide << 7) & 0xbfff);
    }
    return from_bytes((const int8_t*)values + at);
}

// Input rows, each of them in one piece.
struct Rows {
    const float* x;
    int64_t stride;
    const int32_t* order;  // numbers of the rows, or null for all in their order

    const float* row(int i) const { return x + (order ? order[i] : i) * stride; }
};

// `rows` input rows from row `first` with `groups` groups of outputs
template <int kind, int rows, int groups>
void multiply(const Floats& m, int group, const Rows& x, int first, const Output& output) {
    f32x16 sums[rows][groups] = {};
    const float* own[rows];
    for (int row = 0; row < rows; row++) own[row] = x.row(first + row);
    const int columns = m.columns, spans = (columns + m.span - 1) / m.span;
    for (int span = 0; span < spans; span++) {
        const int begin = span * m.span, end = begin + m.span < columns ? begin + m.span : columns;
        f32x16 inner[rows][groups] = {};
        for (int column = begin; column < end; column++) {
            f32x16 weights[groups];
            for (int g = 0; g < groups; g++) weights[g] = widened<kind>(m.values, (size_t)(group + g) * columns + column);
            for (int row = 0; row < rows; row++) {
                const f32x16 input = spread(own[row][column]);
                for (int g = 0; g < groups; g++) inner[row][g] = fused(weights[g], input, inner[row][g]);
            }
        }
        for (int g = 0; g < groups; g++) {
            f32x16 scale = spread(kind == kEight ? 256.0f : 1.0f);
            if (m.scale) scale *= load<f32x16>(m.scale + ((size_t)(group + g) * spans + span) * kLanes);
            for (int row = 0; row < rows; row++) sums[row][g] += inner[row][g] * scale;
        }
    }
    for (int g = 0; g < groups; g++) {
        const int begin = (group + g) * kLanes, count = m.outputs - begin < kLanes ? m.outputs - begin : kLanes;
        for (int row = 0; row < rows; row++) {
            float* out = output.out + (first + row) * output.stride + begin;
            const f32x16 result = output.add ? load_some(out, count) + sums[row][g] : sums[row][g];
            std::memcpy(out, &result, count * sizeof(float));
        }
    }
}

template <int kind, int groups>
void multiply_rows(const Floats& m, int group, const Rows& x, int first, int last, const Output& output) {
    for (; last - first >= kMostRows; first += kMostRows) multiply<kind, kMostRows, groups>(m, group, x, first, output);
    if (last - first >= 4) multiply<kind, 4, groups>(m, group, x, first, output), first += 4;
    if (last - first >= 2) multiply<kind, 2, groups>(m, group, x, first, output), first += 2;
    if (last > first) multiply<kind, 1, groups>(m, group, x, first, output);
}

// Rows `first` to `last` with groups `begin` to `end`.
template <int kind>
void multiply_all(const Floats& m, int begin, int end, const Rows& x, int first, int last, const Output& output) {
    int group = begin;
    if (last - first == 1) {  // several sums, which need not wait for each other
        for (; end - group >= 4; group += 4) multiply<kind, 1, 4>(m, group, x, first, output);
    }
    for (; end - group >= kMostGroups; group += kMostGroups) multiply_rows<kind, kMostGroups>(m, group, x, first, last, output);
    for (; group < end; group++) multiply_rows<kind, 1>(m, group, x, first, last, output);
}

typedef void (*Multiply)(const Floats&, int, int, const Rows&, int, int, const Output&);

Multiply multiply_for(int kind) {
    static const Multiply all[] = {
        multiply_all<kFloat>, multiply_all<kHalf>, multiply_all<kBrain>, multiply_all<kEight>, multiply_all<kWhole>};
    return all[kind];
}

void prepare_row(const Input& input, int row, int64_t columns, float* out) {
    const float* x = input.x + row * input.stride;
    const float factor = norm_factor(input, x, columns);
    for (int64_t at = 0; at < columns; at += kLanes) {
        const f32x16 v = sixteen(input, x, at, columns, factor);
        std::memcpy(out + at, &v, (columns - at < kLanes ? columns - at : kLanes) * sizeof(float));
    }
}

}  // namespace

extern "C" void cairn_float_product(
    const Floats* matrix, const float* x, int64_t x_stride, int32_t rows, const float* norm, float eps, int32_t silu,
    float* out, int64_t out_stride, int32_t add, int32_t threads
) {
    const Floats& m = *matrix;
    const Input input{x, x_stride, rows, norm, eps, silu != 0};
    const Output output{out, out_stride, add != 0};
    const bool changed = norm || silu, few = rows < 2 * threads;
    std::vector<float> ready(changed ? (size_t)rows * m.columns : 0);
    const Rows given{changed ? ready.data() : x, changed ? m.columns : x_stride, nullptr};
    for (int row = 0; changed && few && row < rows; row++) prepare_row(input, row, m.columns, &ready[(size_t)row * m.columns]);
    const int groups = (m.outputs + kLanes - 1) / kLanes, tiles = (rows + kTileRows - 1) / kTileRows;
    const int pieces = 8 * threads < groups ? 8 * threads : groups;
    const Multiply run = multiply_for(m.kind);
#pragma omp parallel num_threads(threads)
    {
        if (changed && !few) {
#pragma omp for schedule(dynamic, 4)
            for (int row = 0; row < rows; row++) prepare_row(input, row, m.columns, &ready[(size_t)row * m.columns]);
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int item = 0; item < tiles * pieces; item++) {
            const int tile = item / pieces, piece = item % pieces;
            const int first = tile * kTileRows, last = first + kTileRows < rows ? first + kTileRows : rows;
            run(m, (int64_t)groups * piece / pieces, (int64_t)groups * (piece + 1) / pieces, given, first, last, output);
        }
    }
}

// The chosen experts of each row: down(silu(gate) * up), weighted and added up. Each expert is read once for all its rows.
extern "C" void cairn_experts(
    const Floats* gate_up, const Floats* down, int32_t experts, const float* x, int64_t x_stride, int32_t rows,
    const int32_t* ids, const float* weights, int32_t per_row, float* out, int64_t out_stride, int32_t threads
) {
    // Pairs of a row and an expert, in the order of experts; `place` is where a pair went.
    const int pairs = rows * per_row, inter = down->columns, hidden = down->outputs;
    std::vector<int32_t> begin(experts + 1), order(pairs), place(pairs, -1), used;
    for (int pair = 0; pair < pairs; pair++) {
        if (ids[pair] >= 0) begin[ids[pair] + 1]++;
    }
    for (int expert = 0; expert < experts; expert++) {
        if (begin[expert + 1]) used.push_back(expert);
        begin[expert + 1] += begin[expert];
    }
    std::vector<int32_t> next(begin.begin(), begin.end() - 1);
    for (int pair = 0; pair < pairs; pair++) {
        if (ids[pair] < 0) continue;
        place[pair] = next[ids[pair]]++;
        order[place[pair]] = pair / per_row;
    }
    const int chosen = begin[experts], count = used.size();
    std::vector<float> both((size_t)chosen * 2 * inter), inner((size_t)chosen * inter), results((size_t)chosen * hidden);
    const Input activation{both.data(), 2 * inter, chosen, nullptr, 0, true};
    const int wanted = count ? (8 * threads + count - 1) / count : 0;
    // One expert's rows with one of `pieces` shares of a matrix's outputs.
    const auto run = [&](const Floats* matrices, int item, int pieces, const float* from, int64_t stride, bool by_row, float* to) {
        const int expert = used[item / pieces], piece = item % pieces, first = begin[expert];
        const Floats& m = matrices[expert];
        const int64_t groups = (m.outputs + kLanes - 1) / kLanes;
        const Rows given{by_row ? from : from + first * stride, stride, by_row ? &order[first] : nullptr};
        const Output output{to + (int64_t)first * m.outputs, m.outputs, false};
        const int last = begin[expert + 1] - first;
        multiply_for(m.kind)(m, groups * piece / pieces, groups * (piece + 1) / pieces, given, 0, last, output);
    };
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int item = 0; item < count * wanted; item++) run(gate_up, item, wanted, x, x_stride, true, both.data());
#pragma omp for schedule(dynamic, 4)
        for (int pair = 0; pair < chosen; pair++) prepare_row(activation, pair, inter, &inner[(size_t)pair * inter]);
#pragma omp for schedule(dynamic, 1)
        for (int item = 0; item < count * wanted; item++) run(down, item, wanted, inner.data(), inter, false, results.data());
#pragma omp for schedule(dynamic, 1) nowait
        for (int row = 0; row < rows; row++) {
            float* own = out + row * out_stride;
            for (int column = 0; column < hidden; column++) own[column] = 0;
            for (int slot = 0; slot < per_row; slot++) {
                const int pair = row * per_row + slot;
                if (place[pair] < 0) continue;
                const float* result = &results[(size_t)place[pair] * hidden];
                for (int column = 0; column < hidden; column++) own[column] += weights[pair] * result[column];
            }
        }
    }
}
