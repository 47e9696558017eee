// Products with quantised matrices on a CPU. models/blocks.py defines the layout and has the same arithmetic in torch.
//
// A matrix is cut into groups of 16 output rows and blocks of 32 columns. Lane i of every vector belongs to output row i of
// a group, so sums need no reduction across lanes. An input row is rounded to 15 bits for each block, in two parts: 128 * high
// + low, because instructions multiply 8 bits. The result for an input row does not depend on the other rows, on the number of
// threads, or on the width of this CPU's vectors.

#include <vector>

#include "cpu_rows.h"

namespace {

constexpr int kBlock = 32;
constexpr float kLargest = 127 * 128;  // of the whole numbers to which an input is rounded
constexpr int kMostRows = 8;     // input rows that a kernel multiplies at once
constexpr int kTileRows = 128;   // input rows that stay in the cache while all groups pass

// sum[i] += the dot product of bytes 4i to 4i + 3 of `codes`, unsigned, with the four signed bytes of x
inline i32x16 dot4(i32x16 sum, u8x64 codes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    const __m256i bytes = _mm256_set1_epi32(x), low = _mm256_set1_epi16(255);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
    __m256i half[2], total[2];
    std::memcpy(half, &codes, 64);
    std::memcpy(total, &sum, 64);
    for (int i = 0; i < 2; i++) {
        const __m256i a = _mm256_madd_epi16(_mm256_and_si256(half[i], low), even);
        const __m256i b = _mm256_madd_epi16(_mm256_srli_epi16(half[i], 8), odd);
        total[i] = _mm256_add_epi32(total[i], _mm256_add_epi32(a, b));
    }
    return load<i32x16>(total);
#else
    const u32x16 words = (u32x16)codes;
    for (int i = 0; i < 4; i++) sum += (i32x16)((words >> (8 * i)) & 255) * (int32_t)(int8_t)(x >> (8 * i));
    return sum;
#endif
}

}  // namespace

extern "C" {

// Shapes as in models/blocks.py. Pointers that a format does not need are null.
struct Matrix {
    const uint8_t* codes;      // [groups, blocks, bits, 16, 4]
    const uint16_t* scale;     // float16 [groups, supers, 16]
    const uint16_t* minimum;   // float16 [groups, supers, 16]
    const int8_t* sub_scale;   // [groups, blocks, subs, 16]
    const int8_t* sub_minimum; // [groups, blocks, subs, 16]
    int32_t outputs, blocks;
    int32_t bits;    // of a code: 4 or 8
    int32_t subs;    // parts of a block with a scale of their own: 1 or 2
    int32_t super;   // blocks that share a `scale` and a `minimum`
    int32_t offset;  // what is subtracted from every code
};

}  // extern "C"

namespace {

// Input rows rounded to whole numbers: x is about scale * (128 * high + low) in each block.
struct Rounded {
    int blocks;
    std::vector<int8_t> codes;   // [rows, blocks, 2, 32], high and low
    std::vector<float> scale;    // [rows, blocks]
    std::vector<int32_t> sums;   // [rows, blocks, 2] of each half of a block

    Rounded(int rows, int blocks)
        : blocks(blocks), codes((size_t)rows * blocks * 2 * kBlock), scale((size_t)rows * blocks), sums((size_t)rows * blocks * 2) {}
};

void round_row(const Input& input, int row, Rounded& into) {
    const int blocks = into.blocks;
    const int64_t columns = (int64_t)blocks * kBlock;
    const float* x = input.x + row * input.stride;
    const float factor = norm_factor(input, x, columns);
    for (int block = 0; block < blocks; block++) {
        f32x16 v[2], most{}, wrong{};
        for (int half = 0; half < 2; half++) {
            const int64_t at = block * kBlock + half * kLanes;
            v[half] = sixteen(input, x, at, columns, factor);
            const f32x16 size = (f32x16)((u32x16)v[half] & 0x7fffffffu);
            most = size > most ? size : most;
            wrong += v[half] * 0.0f;  // NaN if the input is not finite
        }
        float largest = 0;
        for (int i = 0; i < kLanes; i++) largest = most[i] > largest ? most[i] : largest;
        const float inverse = largest > 0 ? kLargest / largest : 0.0f;
        const size_t at = (size_t)row * blocks + block;
        into.scale[at] = largest / kLargest + total(wrong);
        const f32x16 magic = spread(12582912.0f);
        for (int half = 0; half < 2; half++) {
            const i32x16 whole = __builtin_convertvector((v[half] * inverse + magic) - magic, i32x16);
            const i32x16 high = (whole + 64) >> 7, low = whole - (high << 7);
            int8_t* codes = &into.codes[at * 2 * kBlock + half * kLanes];
            store(codes, __builtin_convertvector(high, i8x16));
            store(codes + kBlock, __builtin_convertvector(low, i8x16));
            int32_t sum = 0;
            for (int i = 0; i < kLanes; i++) sum += whole[i];
            into.sums[2 * at + half] = sum;
        }
    }
}

template <int bits>
inline void unpack(const uint8_t* from, u8x64* codes) {
    for (int i = 0; i < bits; i++) {
        const u8x64 bytes = load<u8x64>(from + 64 * i);
        if (bits == 8) {
            codes[i] = bytes;
        } else {
            codes[i] = bytes & 15;
            codes[i + 4] = (u8x64)((u32x16)bytes >> 4) & 15;
        }
    }
}

// `rows` input rows with one group of outputs
template <int bits, int subs, int rows>
void multiply(const Matrix& m, int group, const Rounded& x, int first, const Output& output) {
    f32x16 sums[rows] = {};
    f32x16 scale[subs], minimum[subs], outer{}, outer_minimum{};
    const int blocks = m.blocks, supers = (blocks + m.super - 1) / m.super;
    for (int block = 0; block < blocks; block++) {
        const size_t place = (size_t)group * blocks + block;
        u8x64 codes[8];
        unpack<bits>(m.codes + place * bits * 64, codes);
        if (block % m.super == 0) {
            const size_t at = ((size_t)group * supers + block / m.super) * kLanes;
            outer = from_half(load<u16x16>(m.scale + at));
            if (m.minimum) outer_minimum = from_half(load<u16x16>(m.minimum + at));
        }
        for (int sub = 0; sub < subs; sub++) {
            const size_t at = (place * subs + sub) * kLanes;
            scale[sub] = m.sub_scale ? outer * from_bytes(m.sub_scale + at) : outer;
            minimum[sub] = m.sub_minimum ? outer_minimum * from_bytes(m.sub_minimum + at) : outer_minimum;
        }
        for (int row = 0; row < rows; row++) {
            const size_t at = (size_t)(first + row) * blocks + block;
            const int8_t* own = &x.codes[at * 2 * kBlock];
            const float x_scale = x.scale[at];
            for (int sub = 0; sub < subs; sub++) {
                const int32_t sum = subs == 2 ? x.sums[2 * at + sub] : x.sums[2 * at] + x.sums[2 * at + 1];
                i32x16 high{}, low = i32x16{} - m.offset * sum;
                for (int i = sub * 4; i < (subs == 2 ? sub * 4 + 4 : 8); i++) {
                    high = dot4(high, codes[i], load<int32_t>(own + 4 * i));
                    low = dot4(low, codes[i], load<int32_t>(own + kBlock + 4 * i));
                }
                const i32x16 dot = (high << 7) + low;
                sums[row] += scale[sub] * x_scale * __builtin_convertvector(dot, f32x16);
                if (m.minimum) sums[row] += minimum[sub] * (x_scale * (float)sum);
            }
        }
    }
    const int begin = group * kLanes, count = m.outputs - begin < kLanes ? m.outputs - begin : kLanes;
    for (int row = 0; row < rows; row++) {
        float* out = output.out + (first + row) * output.stride + begin;
        if (count == kLanes) {
            store(out, output.add ? load<f32x16>(out) + sums[row] : sums[row]);
        } else {
            for (int i = 0; i < count; i++) out[i] = output.add ? out[i] + sums[row][i] : sums[row][i];
        }
    }
}

template <int bits, int subs>
void multiply_rows(const Matrix& m, int group, const Rounded& x, int first, int last, const Output& output) {
    for (; last - first >= kMostRows; first += kMostRows) multiply<bits, subs, kMostRows>(m, group, x, first, output);
    if (last - first >= 4) multiply<bits, subs, 4>(m, group, x, first, output), first += 4;
    if (last - first >= 2) multiply<bits, subs, 2>(m, group, x, first, output), first += 2;
    if (last > first) multiply<bits, subs, 1>(m, group, x, first, output);
}

}  // namespace

extern "C" void cairn_product(
    const Matrix* matrix, const float* x, int64_t x_stride, int32_t rows, const float* norm, float eps, int32_t silu,
    float* out, int64_t out_stride, int32_t add, int32_t threads
) {
    const Matrix& m = *matrix;
    const Input input{x, x_stride, rows, norm, eps, silu != 0};
    const Output output{out, out_stride, add != 0};
    const int groups = (m.outputs + kLanes - 1) / kLanes, tiles = (rows + kTileRows - 1) / kTileRows;
    const auto run = m.bits == 4 ? (m.subs == 1 ? multiply_rows<4, 1> : multiply_rows<4, 2>)
                                 : (m.subs == 1 ? multiply_rows<8, 1> : multiply_rows<8, 2>);
    Rounded rounded(rows, m.blocks);
    const bool few = rows < 2 * threads;
    for (int row = 0; few && row < rows; row++) round_row(input, row, rounded);
    // Threads take pieces as they get to them, so that one that must wait for its core does not hold up the others.
    const int pieces = 8 * threads < groups ? 8 * threads : groups;
#pragma omp parallel num_threads(threads)
    {
        if (!few) {
#pragma omp for schedule(dynamic, 4)
            for (int row = 0; row < rows; row++) round_row(input, row, rounded);
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (int item = 0; item < tiles * pieces; item++) {
            const int tile = item / pieces, piece = item % pieces;
            const int first = tile * kTileRows, last = first + kTileRows < rows ? first + kTileRows : rows;
            const int end = (int64_t)groups * (piece + 1) / pieces;
            for (int group = (int64_t)groups * piece / pieces; group < end; group++) run(m, group, rounded, first, last, output);
        }
    }
}
