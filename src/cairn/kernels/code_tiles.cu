// Products x @ W.T of up to 64 rows with a matrix of codes of 4 or 8 bits; code_row.cu has one row, if it
// can.
//
// `prepare_codes` scales each row of x by a power of two, makes it float16, and sorts its columns as
// tensor cores take them. In `code_tiles` a block has a tile of OUTPUTS outputs. If there are few tiles,
// the blocks of a cluster share the columns of one. A warp has 32 outputs of the tile and every WARPS_K-th
// chunk of columns. It loads codes DEPTH chunks ahead, to registers, where they become float16: the left
// operand of products. The rows of x are the right one. They are copied to shared memory for all warps
// of the block, to one of X_DEPTH slots with WARPS_K chunks each.
//
// GATED: the matrix has the outputs of gate, then those of up, and a tile as many of each. The result
// is silu(gate) * up.
//
// The host defines X_HALF, GATED, BITS, SHIFT, SUBS, MINIMUM, SUB_SCALE and SUB_MINIMUM (what the matrix has:
// see packed_layout.py; 2^SHIFT blocks of 32 columns have one scale), EIGHTS (of rows), WARPS_OUT, WARPS_K,
// DEPTH, X_DEPTH and BLOCKS, which is how many blocks a multiprocessor runs at once.

constexpr int WARPS = WARPS_OUT * WARPS_K;
constexpr int THREADS = 32 * WARPS;
constexpr int PREPARE_THREADS = 512;
constexpr int OUTPUTS = WARPS_OUT * 32;
constexpr int ROWS = EIGHTS * 8;
constexpr int CHUNK = 512 / BITS;            // columns of 64 bytes
constexpr int UNITS = CHUNK / 32;            // of 8 inputs per lane and chunk, and blocks of 32 columns
constexpr int SLICE = EIGHTS * UNITS * 512;  // bytes of x for a chunk
constexpr int SLOT = WARPS_K * SLICE;
constexpr int STRIDE = OUTPUTS + 4;  // floats from a row's sums to the next
constexpr int OUTER = 1 + MINIMUM;   // scale, then minimum
constexpr int INNER = (SUB_SCALE + SUB_MINIMUM) * SUBS;  // scales, then minima
constexpr u32 MAGIC = 0x64006400u;  // two times 1024 in float16: mantissas end with the ones' place

struct PrepareArguments {
  Rows rows;
  u8* inputs;      // [chunks, SLICE]
  float* factors;  // [ROWS]
  int count;       // of rows of x
};

struct Arguments {
  const u8* inputs;
  const float* factors;
  const u8* words;
  const u8* scale;  // [outputs / 8, scales, 8, OUTER] float16
  const u8* inner;  // [outputs / 8, blocks, 8, INNER]
  u16* out;         // [rows, outputs]
  int count;        // of rows
  int chunks;
  int outputs;  // without those of up
  int offset;   // of codes
  int add;      // to what out has
};

// Load a block of 32 columns, as pairs of numbers; zeros if it is not there.
DEVICE void load_block(u32 (&pairs)[16], const Rows& given, int row, int block, bool there) {
#pragma unroll
  for (int i = 0; i < 16; ++i) pairs[i] = 0;
  if (!there) return;
  const u16* from = given.x + (long long)row * given.width + block * 32;
#pragma unroll
  for (int i = 0; i < 16; i += 4) copy_16(pairs + i, from + 2 * i);
}

// The largest exponent of a block's numbers, as floats have it: 255 if one is not finite.
DEVICE int largest_exponent(const u32 (&pairs)[16]) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float low = wide_of(u16(pairs[i])), high = wide_of(u16(pairs[i] >> 16));
    most = max(most, max(__float_as_uint(low) & 0x7fffffffu, __float_as_uint(high) & 0x7fffffffu));
  }
  return most >> 23;
}

// The exponent that the numbers of a row are divided by, so that the largest is below 256. What is not
// finite stays so.
DEVICE int divisor_of(int exponent) { return min(max(exponent, 8), 254) - 7; }

// Scale a block, which becomes float16.
DEVICE void scale_block(u32 (&pairs)[16], int divisor) {
  const float scale = __uint_as_float(u32(254 - divisor) << 23);
#pragma unroll
  for (int i = 0; i < 16; ++i)
    pairs[i] = pack_halves(wide_of(u16(pairs[i])) * scale, wide_of(u16(pairs[i] >> 16)) * scale);
}

// Store block number `block` of a row's chunk in its slice.
DEVICE void store_block(const u32 (&pairs)[16], u8* slice, int row, int block) {
  constexpr int QUADS = 4 / UNITS;  // lanes with columns of one block
#pragma unroll
  for (int part = 0; part < QUADS * UNITS; ++part) {
    const int quad = part / UNITS, unit = part % UNITS;
    alignas(16) u32 sorted[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Code i of word j is column 4 i + j or 8 i + j. Codes i and i + 4 of a word come out together, or
      // i and i + 1.
      const int first = BITS == 4 ? unit + i * 4 : quad * 4 + unit * 2 + i / 2 + i % 2 * 16;
      const int second = first + (BITS == 4 ? 16 : 8);
      sorted[i] = __byte_perm(pairs[first / 2], pairs[second / 2], first % 2 ? 0x7632 : 0x5410);
    }
    const int lane = row % 8 * 4 + block * QUADS + quad;
    copy_16(slice + ((row / 8 * UNITS + unit) * 32 + lane) * 16, sorted);
  }
}

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_codes(const __grid_constant__ PrepareArguments given) {
  extern __shared__ __align__(1024) u8 ring[];
  int* of_warps = reinterpret_cast<int*>(ring);  // [PREPARE_THREADS / 32]
  const int row = blockIdx.x, blocks = given.rows.width / 32;
  const bool there = row < given.count;
  let_successor_start();
  wait_for_predecessor();
  int exponent = 0;
  u32 pairs[16];
  for (int block = threadIdx.x; block < blocks; block += PREPARE_THREADS) {
    load_block(pairs, given.rows, row, block, there);
    exponent = max(exponent, largest_exponent(pairs));
  }
  for (int mask = 16; mask > 0; mask /= 2)
    exponent = max(exponent, __shfl_xor_sync(0xffffffff, exponent, mask));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = exponent;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < PREPARE_THREADS / 32; ++i) exponent = max(exponent, of_warps[i]);
  const int divisor = divisor_of(exponent);
  if (threadIdx.x == 0) given.factors[row] = 0.125f * __uint_as_float(u32(divisor) << 23);
  for (int block = threadIdx.x; block < blocks; block += PREPARE_THREADS) {
    // A thread with one block has it already.
    if (blocks > PREPARE_THREADS) load_block(pairs, given.rows, row, block, there);
    scale_block(pairs, divisor);
    store_block(pairs, given.inputs + (u64)(block / UNITS) * SLICE, row, block % UNITS);
  }
}

// A lane's part of a chunk: of rows lane / 4 and lane / 4 + 8 of two tiles of 16 outputs.
struct Step {
  u32 words[4][4];
  u32 outer[4], inner[4];
};

// Where a lane reads its four rows from.
struct Source {
  const u8 *words[4], *scale[4], *inner[4];

  DEVICE Source(const Arguments& given, int tile, int first) {
    const int lane = threadIdx.x % 32, most = (given.outputs + 7) / 8 - 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // A tile that is not whole loads eights that it has no results of.
      const u64 eight = GATED ? min(tile * (OUTPUTS / 16) + first + i / 2, most) + i % 2 * (most + 1)
                              : min(tile * (OUTPUTS / 8) + first * 2 + i, most);
      const u64 chunk = eight * given.chunks, block = chunk * UNITS;
      words[i] = given.words + chunk * 512 + lane * 16;
      scale[i] = given.scale + (block >> SHIFT) * (16 * OUTER) + lane / 4 * (2 * OUTER);
      inner[i] = given.inner + block * (8 * INNER) + lane / 4 * INNER;
    }
  }
  DEVICE void load(Step& step, int chunk) const {
    const u32 block = chunk * UNITS + threadIdx.x % 4 * UNITS / 4;
    const u32 outer = (block >> SHIFT) * (16 * OUTER);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_once(step.words[i], words[i] + (u32)chunk * 512);
      step.outer[i] = load_few<2 * OUTER>(scale[i] + outer);
      if (INNER) step.inner[i] = load_few<INNER ? INNER : 1>(inner[i] + block * (8 * INNER));
    }
  }
};

DEVICE u32 in_both(float number) { return pack_halves(number, number); }

// What makes weights of codes: float16 numbers for both halves of a block.
struct Widening {
  u32 scale, minimum;

  DEVICE Widening(u32 outer, u32 inner) {
    float scales[2], minima[2] = {};
#pragma unroll
    for (int sub = 0; sub < 2; ++sub) {
      const int place = 8 * (SUBS == 2 ? sub : 0);
      scales[sub] = from_half(outer);
      if (SUB_SCALE) scales[sub] *= signed_byte(inner >> place);
      if (MINIMUM) minima[sub] = from_half(outer >> 16);
      if (SUB_MINIMUM) minima[sub] *= signed_byte(inner >> (SUB_SCALE ? 8 * SUBS : 0) + place);
    }
    // Eight times as large, so that weights are no smaller than what float16 has exactly.
    scale = pack_halves(8 * scales[0], 8 * scales[1]);
    minimum = pack_halves(8 * minima[0], 8 * minima[1]);
  }
  DEVICE static u32 weights(u32 codes, u32 scale, u32 minimum) {
    return MINIMUM ? fma_pairs(codes, scale, minimum) : multiply_pairs(codes, scale);
  }
};

// The left operands of the products of a unit, of one of two rows.
DEVICE void widen_unit(u32 (&left)[2][4], const u32 (&words)[4], const Widening& own, int unit, int half,
                       int offset) {
  const u32 minus = in_both(-(1024 + offset));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if BITS == 4
    const u32 codes = add_pairs(masked_or(words[unit] >> 4 * i, 0x000f000fu, MAGIC), minus);
    left[i / 2][i % 2 * 2 + half] = Widening::weights(codes, own.scale, own.minimum);
#else
    const u32 two = __byte_perm(words[2 * unit + i / 2], MAGIC, i % 2 ? 0x5352 : 0x5150);
    const u32 selector = i % 2 ? 0x3232 : 0x1010;  // what one half of the block has
    const u32 scale = __byte_perm(own.scale, 0, selector);
    left[i / 2][i % 2 * 2 + half] =
        Widening::weights(add_pairs(two, minus), scale, __byte_perm(own.minimum, 0, selector));
#endif
  }
}

// sums += the products of a chunk; `x` has its slice.
DEVICE void multiply_step(const Step& step, const u8* x, int offset, float (&sums)[2][EIGHTS][4]) {
  const Widening own[4] = {{step.outer[0], step.inner[0]},
                           {step.outer[1], step.inner[1]},
                           {step.outer[2], step.inner[2]},
                           {step.outer[3], step.inner[3]}};
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    u32 left[2][2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) widen_unit(left[i / 2], step.words[i], own[i], unit, i % 2, offset);
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
      alignas(16) u32 right[4];
      copy_16(right, x + ((eight * UNITS + unit) * 32 + threadIdx.x % 32) * 16);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        multiply(sums[tile][eight], left[tile][0], right[0], right[1]);
        multiply(sums[tile][eight], left[tile][1], right[2], right[3]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    code_tiles(const __grid_constant__ Arguments given) {
  extern __shared__ __align__(1024) u8 ring[];
  u8* const memory = own_memory(ring);
  u64* full = reinterpret_cast<u64*>(memory + max(X_DEPTH * SLOT, WARPS_K * ROWS * STRIDE * 4));
  int* left = reinterpret_cast<int*>(full + X_DEPTH);
  const int lane = threadIdx.x % 32, warp_out = threadIdx.x / 32 % WARPS_OUT;
  const int warp_k = threadIdx.x / 32 / WARPS_OUT;
  const int parts = cluster_size(), part = cluster_rank(), tile = blockIdx.x / parts;
  const int begin = given.chunks * part / parts, end = given.chunks * (part + 1) / parts;
  const int steps = (end - begin + WARPS_K - 1) / WARPS_K;
  const Source source(given, tile, warp_out * 2);
  let_successor_start();
  Step ahead[DEPTH];
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) {
    const int chunk = begin + i * WARPS_K + warp_k;
    if (chunk < end) source.load(ahead[i], chunk);
  }
  auto fetch = [&](int step) {
    const int slot = step % X_DEPTH, first = begin + step * WARPS_K;
    const u32 bytes = min(WARPS_K, end - first) * SLICE;
    left[slot] = WARPS;
    barrier_expect(full + slot, bytes);
    copy_bytes(shared_address(memory + slot * SLOT), given.inputs + (u64)first * SLICE, bytes,
               full + slot);
  };
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < X_DEPTH; ++slot) barrier_init(full + slot, 1);
    fence_for_copies();
  }
  wait_for_predecessor();
  if (threadIdx.x == 0)
    for (int step = 0; step < min(steps, X_DEPTH); ++step) fetch(step);
  __syncthreads();
  float sums[2][EIGHTS][4] = {};
  for (int first = 0; first < steps; first += DEPTH) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int step = first + i, slot = step % X_DEPTH, chunk = begin + step * WARPS_K + warp_k;
      if (step >= steps) break;
      barrier_wait(full + slot, step / X_DEPTH % 2);
      if (chunk < end)
        multiply_step(ahead[i], memory + slot * SLOT + warp_k * SLICE, given.offset, sums);
      const int next = chunk + DEPTH * WARPS_K;
      if (next < end) source.load(ahead[i], next);
      __syncwarp();
      if (lane == 0 && take_one(left + slot) == 1 && step + X_DEPTH < steps) fetch(step + X_DEPTH);
    }
  }
  __syncthreads();
  float* gathered = reinterpret_cast<float*>(memory);  // [WARPS_K, ROWS, STRIDE]
#pragma unroll
  for (int i = 0; i < 2 * EIGHTS * 4; ++i) {
    const int own = warp_out * 2 + i / (EIGHTS * 4), eight = i / 4 % EIGHTS, half = i / 2 % 2;
    const int output = GATED ? half * (OUTPUTS / 2) + own * 8 : own * 16 + half * 8;
    const int row = eight * 8 + lane % 4 * 2 + i % 2;
    gathered[(warp_k * ROWS + row) * STRIDE + output + lane / 4] = sums[i / (EIGHTS * 4)][eight][i % 4];
  }
  __syncthreads();
  for (int at = threadIdx.x; at < ROWS * OUTPUTS; at += THREADS) {
    float* sum = gathered + at / OUTPUTS * STRIDE + at % OUTPUTS;
    float total = *sum;
#pragma unroll
    for (int i = 1; i < WARPS_K; ++i) total += sum[i * ROWS * STRIDE];
    *sum = total;
  }
  if (parts > 1) cluster_arrive(), cluster_wait();
  if (parts == 1) __syncthreads();
  constexpr int RESULTS = GATED ? OUTPUTS / 2 : OUTPUTS;
  for (int at = part * THREADS + threadIdx.x; at < given.count * RESULTS; at += parts * THREADS) {
    const int row = at / RESULTS, output = tile * RESULTS + at % RESULTS;
    if (output >= given.outputs) continue;
    const float* sum = gathered + row * STRIDE + at % RESULTS;
    float total = 0, up = 0;
    for (int rank = 0; rank < parts; ++rank) {
      total += parts > 1 ? load_remote(sum, rank) : *sum;
      if (GATED) up += parts > 1 ? load_remote(sum + RESULTS, rank) : sum[RESULTS];
    }
    const float factor = given.factors[row];
    total *= factor;
    if (GATED) total = silu_of(total) * up * factor;
    u16* place = given.out + (long long)row * given.outputs + output;
    if (!GATED && given.add) total += wide_of(*place);
    *place = narrow_of(total);
  }
  if (parts > 1) cluster_arrive(), cluster_wait();  // no block ends while others read its sums
}
