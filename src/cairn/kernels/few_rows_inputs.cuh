// The rows of x for few_rows.cu, which says what the host defines.
//
// With one row every warp of few_rows prepares its own chunks, in shared memory. For more rows
// `prepare_rows` does.
//
// WHOLE_NUMBERS: every 32 columns are scaled by a power of two so that their largest number is below
// 2^14, and rounded. A unit is 16 columns, 4 * r + 8 * i + j of a block for unit r. It has four words of
// high bytes, and four of low ones (signed too): byte i of word j.
//
// Otherwise x becomes float16, each chunk of it scaled so that its largest number is below 256: exact
// for whatever is not 2^32 times smaller than that.

constexpr int THREADS = 32 * WARPS;
constexpr int CHUNK = 512 / BITS;  // columns of a step
constexpr int UNITS = CHUNK / 32;  // of 8 inputs per lane and step
constexpr int STRIDE = ROWS == 1 ? 1 : ROWS + 1;  // floats from an output's sums to the next
constexpr u32 MAGIC = 0x64006400u;  // two times 1024 in float16: mantissas end with the ones' place
constexpr int PIECE = CHUNK / 8;   // columns that a lane prepares at once
#define WHOLE_NUMBERS (ROWS == 1 && !FP8 && SUBS == 1)
constexpr int UNIT = 16;  // columns that a lane prepares at once, if WHOLE_NUMBERS
// Of a chunk: factor and sum of inputs of each lane, or a factor and sums of inputs.
constexpr int FLOATS = WHOLE_NUMBERS ? 8 : 1 + (FP8 ? 0 : WHOLE ? 1 : 4 * SUBS);

struct Rows {
  const u16* x;            // [rows, width]
  const u16* norm_weight;  // [width], or null: apply RMS norm to x
  int width;
  int offset;  // that codes have
  float eps;
};

struct RowArguments {
  Rows rows;
  u16* inputs;     // [rows, width]
  float* floats;   // [chunks, FLOATS, ROWS]
  float* squares;  // [rows, WARPS]
};

struct alignas(16) Sixteen {
  u64 words[2];
};

// Copy 16 bytes at once; both addresses are multiples of 16.
DEVICE void copy_16(void* target, const void* from) {
  *static_cast<Sixteen*>(target) = *static_cast<const Sixteen*>(from);
}

DEVICE float half_of(u16 number) {
  float low, high;
  unpack(number, low, high);
  return low;
}

DEVICE float wide_of(u16 number) {
  return X_HALF ? half_of(number) : __uint_as_float(u32(number) << 16);
}

DEVICE u16 narrow_of(float number) {
  return X_HALF ? pack_halves(number, 0) : pack_bfloats(number, 0);
}

DEVICE float silu_of(float x) { return __fdividef(x, 1 + exp2_fast(-1.4426950408889634f * x)); }

// The inputs of 8 columns, before RMS norm divides them; adds to its squares.
DEVICE void load_inputs(const Rows& given, int row, int column, float* numbers, float& squares) {
  alignas(16) u16 own[8], weight[8];
  copy_16(own, given.x + (long long)row * given.width + column);
#pragma unroll
  for (int i = 0; i < 8; ++i) numbers[i] = wide_of(own[i]);
  if (given.norm_weight == nullptr) return;
  copy_16(weight, given.norm_weight + column);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    squares += numbers[i] * numbers[i];
    numbers[i] *= wide_of(weight[i]);
  }
}

DEVICE float summed(float x, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffff, x, mask);
  return x;
}

#if WHOLE_NUMBERS
// Begin to copy the chunks of this warp to shared memory.
DEVICE void gather_chunks(u16* target, const u16* from, int width) {
  constexpr int LANES = CHUNK / 8;  // of a chunk; each copies 8 columns
  const int first = threadIdx.x / 32 + threadIdx.x % 32 / LANES * WARPS;
  for (int chunk = first; chunk * CHUNK < width; chunk += 32 / LANES * WARPS) {
    const int column = chunk * CHUNK + threadIdx.x % LANES * 8;
    gather(shared_address(target + column), from + column, true);
  }
}

// Prepare the chunks of this warp: inputs, which are there as x has them, and floats. `weight` is that
// of the norm. Returns the sum of squares.
DEVICE float prepare(const Rows& given, u16* inputs, const u16* weight, float* floats) {
  constexpr int CHUNK_UNITS = CHUNK / UNIT;
  const int lane = threadIdx.x % 32, unit = lane % CHUNK_UNITS, chunks = given.width / CHUNK;
  float squares = 0;
  for (int first = threadIdx.x / 32; first < chunks; first += 32 / CHUNK_UNITS * WARPS) {
    const int chunk = first + lane / CHUNK_UNITS * WARPS;
    const int block = chunk * CHUNK + unit / 2 * 32;
    float numbers[UNIT] = {}, most = 0;  // [i, j]
    if (chunk < chunks) {
#pragma unroll
      for (int i = 0; i < UNIT; i += 4) {
        const int column = block + unit % 2 * 4 + i * 2;
        const u64 four = *reinterpret_cast<const u64*>(inputs + column);
#pragma unroll
        for (int j = 0; j < 4; ++j) numbers[i + j] = wide_of(u16(four >> j * 16));
        if (given.norm_weight == nullptr) continue;
        const u64 factors = *reinterpret_cast<const u64*>(weight + column);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          squares += numbers[i + j] * numbers[i + j];
          numbers[i + j] *= wide_of(u16(factors >> j * 16));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < UNIT; ++i) most = largest(most, fabsf(numbers[i]));
    // Afterwards both units of a block have been read, and can be written.
    most = largest(most, __shfl_xor_sync(0xffffffff, most, 1));
    const int exponent = int(__float_as_uint(most) >> 23), used = max(exponent, 20);
    const float scale = __uint_as_float(u32(267 - used) << 23);
    // 1.5 * 2^23 makes the last bits of a float those of a whole number. Low bytes are rounded
    // to the nearest by 128, and lack it.
    constexpr u32 BASE = 0x4b400080u;
    alignas(16) u32 high[4], low[4];
    u32 bits[UNIT], total = 0;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
      bits[i] = __float_as_uint(fmaf(numbers[i], scale, __uint_as_float(BASE)));
      total += bits[i];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 front = __byte_perm(bits[j], bits[4 + j], 0x5140);
      const u32 back = __byte_perm(bits[8 + j], bits[12 + j], 0x5140);
      low[j] = __byte_perm(front, back, 0x5410) ^ 0x80808080u;
      high[j] = __byte_perm(front, back, 0x7632);
    }
    total -= UNIT * BASE;
    if (BITS == 4) total = 16 * (total + __shfl_xor_sync(0xffffffff, total, 1));
    if (chunk >= chunks) continue;
    u16* target = inputs + block + unit % 2 * UNIT;
    copy_16(target, high);
    copy_16(target + UNIT / 2, low);
    float* own = floats + chunk * FLOATS + unit * 2 / (8 / BITS);
    if (BITS == 4 && unit % 2) continue;
    // Codes of 4 bits count 16 times. Whatever is not finite makes all outputs NaN.
    own[0] = __uint_as_float(exponent < 255 ? u32(used - (BITS == 4 ? 17 : 13)) << 23 : 0x7fc00000u);
    own[1] = __uint_as_float(total);
  }
  return summed(squares, 32);
}
#else
// Store a piece of a chunk as steps read it, sorted by unit, then by lane, in runs of 8; and sums.
DEVICE void store_piece(float (&numbers)[PIECE], u16* inputs, float* sums, int apart, int offset,
                        bool there) {
  const int piece = threadIdx.x % 8;
#if FP8
  alignas(16) u32 halves[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) halves[i] = pack_halves(numbers[2 * i], numbers[2 * i + 1]);
  if (there) copy_16(inputs + piece % 2 * 32 + piece / 2 * 8, halves);
#else
  float over[2] = {}, low, high;
#if BITS == 4
  // Code i of word j is column 4 i + j; i and i + 4 come out of a word together. Half a block has
  // two such pairs of each word; those of odd i are the middle bits of a number.
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    u32 pairs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float times = WHOLE && i == 1 ? 0.0625f : 1;
      pairs[i] = pack_halves(numbers[4 * i + word] * times, numbers[8 + 4 * i + word] * times);
      unpack(pairs[i], low, high);
      over[0] += low * (WHOLE ? 1024 + offset * (i == 1 ? 16 : 1) : 1);
      over[1] += high * (WHOLE ? 1024 + offset * (i == 1 ? 16 : 1) : 1);
    }
    u64* target = reinterpret_cast<u64*>(inputs + word * 32 + piece * 4);
    if (there) *target = u64(pairs[1]) << 32 | pairs[0];
  }
#else
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // code i of word j is column 8 i + j
    const u32 half = pack_halves(numbers[i], 0);
    unpack(half, low, high);
    over[i / 4] += low;
    const int lane = piece / 4 * 2 + i / 4;
    if (there) inputs[i / 2 % 2 * 32 + lane * 8 + piece % 4 + i % 2 * 4] = u16(half);
  }
#endif
  if (WHOLE) {
    const float all = summed(over[0] + over[1], 8);
    if (there && piece == 0) *sums = all;
    return;
  }
  // Sums of a lane's columns, or of the first and last half of its blocks.
  if (BITS == 4 && SUBS == 1) over[0] += over[1];
  constexpr int LANES = BITS == 4 ? 2 : 4 / SUBS;
  const int first = BITS == 4 ? piece / 2 * SUBS : piece / 4 * 2 * SUBS + piece % 4 / LANES;
#pragma unroll
  for (int i = 0; i < (BITS == 4 ? SUBS : 2); ++i) {
    const float all = to_tf32(summed(over[i], LANES));
    const int place = first + i * (BITS == 4 ? 1 : SUBS);
    if (there && piece % LANES == 0) sums[place * apart] = all;
  }
#endif
}

// Prepare the chunks of this warp: inputs, and floats, which are `apart` from the next. Returns the
// sum of squares.
DEVICE float prepare(const Rows& given, int row, u16* inputs, float* floats, int apart) {
  const int piece = threadIdx.x % 8, chunks = given.width / CHUNK;
  float squares = 0;
  for (int first = threadIdx.x / 32; first < chunks; first += 4 * WARPS) {
    const int chunk = first + threadIdx.x % 32 / 8 * WARPS;
    const bool there = chunk < chunks;
    float numbers[PIECE] = {}, most = 0;
    if (there) {
      const int begin = chunk * CHUNK;
      if (BITS == 4) {
        const int column = begin + piece / 2 * 32 + piece % 2 * 8;
        load_inputs(given, row, column, numbers, squares);
        load_inputs(given, row, column + 16, numbers + PIECE / 2, squares);
      } else {
        load_inputs(given, row, begin + piece * 8, numbers, squares);
      }
#pragma unroll
      for (int i = 0; i < PIECE; ++i) most = fmaxf(most, fabsf(numbers[i]));
    }
    for (int mask = 4; mask > 0; mask /= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, mask));
    // The exponent of the largest number; fmaxf drops NaN, which the products keep.
    const int exponent = min(max(int(__float_as_uint(most) >> 23), 8), 254);
    const float scale = __uint_as_float(u32(261 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < PIECE; ++i) numbers[i] *= scale;
    float* own = floats + (long long)chunk * FLOATS * apart;
    if (there && piece == 0) *own = __uint_as_float(u32(exponent - 7) << 23);
    store_piece(numbers, inputs + chunk * CHUNK, own + apart, apart, given.offset, there);
  }
  return summed(squares, 32);
}
#endif

#if ROWS > 1
extern "C" __global__ void __launch_bounds__(THREADS)
    prepare_rows(const __grid_constant__ RowArguments given) {
  const int row = blockIdx.x;
  let_successor_start();
  wait_for_predecessor();
  u16* inputs = given.inputs + row * given.rows.width;
  const float squares = prepare(given.rows, row, inputs, given.floats + row, ROWS);
  if (threadIdx.x % 32 == 0) given.squares[row * WARPS + threadIdx.x / 32] = squares;
}
#endif
