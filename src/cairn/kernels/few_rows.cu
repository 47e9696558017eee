// Products x @ W.T of few rows with a matrix of FP8 numbers, or of codes of 4 or 8 bits, at the speed
// at which the matrix can be read.
//
// A block has one tile of 16 outputs after the other, and its warps share the columns. The matrix is
// the left operand of tensor-core products, so a warp reads 64 bytes of each output of a tile at
// once, a step; DEPTH steps are on their way at the same time, also those of the next tile. They
// begin before the kernel waits for the one that makes x (see few_rows_inputs.cuh). FP8 numbers become
// float16 without their scale, which is multiplied to sums.
//
// Codes are multiplied in one of three ways:
//
// - WHOLE_NUMBERS: x has one row, which becomes whole numbers of 15 bits, and blocks of 32 columns have
//   one scale. Codes are the bytes of the left operand. The eight columns of the right one have the
//   inputs of each lane of a quad, in two columns: their high bytes and their low ones, and zeros in
//   the rows of other lanes. So each lane gets the sum of its own columns, which have one scale.
// - WHOLE: a step has one scale, and no minimum. Codes are the last bits of float16 numbers 1024 + code,
//   or the middle bits of 1024 + 16 * code, which are multiplied themselves, the latter with inputs
//   made as much smaller. What that adds to the sum of a step depends on x alone, and is subtracted.
// - Neither: one instruction makes code * scale of two such numbers. What a weight has beside that,
//   which is the same for all columns of a block, is multiplied by the sum of their inputs.
//
// GATED: the matrix has the outputs of gate, then those of up, and a tile 8 of each. The result is
// silu(gate) * up.
//
// The host defines ROWS (of a block: 1 or 8), X_HALF (x and out are float16, not bfloat16), FP8,
// GROUPED (FP8 with scales that change within the columns), GATED, and for codes BITS, SUBS
// (scales of a block of 32 columns), WHOLE, MINIMUM, SUB_SCALE and SUB_MINIMUM, which say what a
// matrix has: see packed_layout.py. WARPS and DEPTH are as above, BLOCKS is how many blocks a
// multiprocessor runs at once.

struct Arguments {
  Rows rows;
  const u16* inputs;  // those that prepare_rows made, unless ROWS is 1
  const float* floats;
  const float* squares;
  const u8* weight;
  const void* scale;  // [outputs, scales] float if FP8, else [outputs / 8, scales, 8, OUTER] float16
  const u8* inner;    // [outputs / 8, blocks, 8, INNER]
  u16* out;   // [rows, outputs]
  int count;  // of rows, at most ROWS
  int tiles;
  int outputs;  // without those of up
  int scales;
  int shift;  // 2^shift chunks (FP8) or blocks of 32 columns (codes) have one scale
  int add;    // to what out has
};

constexpr int OUTER = 1 + MINIMUM;  // scale, then minimum
constexpr int INNER = (SUB_SCALE + SUB_MINIMUM) * SUBS;  // scales, then minima

struct Scales {
#if FP8
  float scale;
#else
  u32 outer, inner;

  DEVICE u32 scale() const { return outer & 0xffff; }
  DEVICE u32 minimum() const { return outer >> 16; }
  DEVICE u32 sub_scale() const { return inner; }
  DEVICE u32 sub_minimum() const { return SUB_SCALE ? inner >> 8 * SUBS : inner; }
#endif
};

struct Step {
  u32 words[2][4];  // of two outputs: 16 bytes of each
  Scales scales[2];
};

// The shared memory of a block.
struct Memory {
  float* gathered;  // [2, WARPS, 16, STRIDE]
  float* squares;   // [WARPS], if ROWS is 1, as what follows
  float* floats;    // [chunks, FLOATS]
  u16* inputs;      // [width]
  u16* weight;      // [width]: of the norm, if WHOLE_NUMBERS
};

DEVICE Memory divided(u8* all, int chunks) {
  Memory own;
  own.gathered = reinterpret_cast<float*>(all);
  own.squares = own.gathered + 2 * WARPS * 16 * STRIDE;
  own.floats = own.squares + (WARPS + 3) / 4 * 4;
  own.inputs = reinterpret_cast<u16*>(own.floats + (chunks * FLOATS + 3) / 4 * 4);
  own.weight = own.inputs + chunks * CHUNK;
  return own;
}

// What a warp loads or multiplies next.
struct Cursor {
  int tile, chunk;
};

// The first row of a tile in the matrix.
DEVICE int row_of(int tile) { return tile * (GATED ? 8 : 16); }

DEVICE void advance(Cursor& at, int chunks) {
  at.chunk += WARPS;
  if (at.chunk < chunks) return;
  at.chunk = threadIdx.x / 32;
  at.tile += gridDim.x;
}

DEVICE u32 in_both(u32 half) { return half | half << 16; }

// Load some bytes: 1, 2 or 4.
template <int BYTES>
DEVICE u32 load_few(const u8* from) {
  if (BYTES == 4) return *reinterpret_cast<const u32*>(from);
  return BYTES == 2 ? *reinterpret_cast<const u16*>(from) : *from;
}

// Load a lane's part of a chunk: of rows lane / 4 and lane / 4 + 8 of the tile.
DEVICE void load_step(const Arguments& given, Step& step, const Cursor& at) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Scales& own = step.scales[half];
#if FP8
    int row = row_of(at.tile) + lane / 4 + half * (GATED ? given.outputs : 8);
    if (!GATED) row = min(row, given.outputs - 1);
    const u32 place = at.chunk * 64 + lane % 4 * 16;
    load_once(step.words[half], given.weight + (u64)row * given.rows.width + place);
    const u32 first = row * given.scales;
    if (GROUPED)
      own.scale = static_cast<const float*>(given.scale)[first + (at.chunk >> given.shift)];
#else
    // Chunks and blocks of all outputs are numbered through, eight outputs after the other.
    const u32 eight = GATED ? at.tile + half * (given.outputs / 8) : at.tile * 2 + half;
    const u32 chunk = eight * (given.rows.width / CHUNK) + at.chunk;
    const u32 block = chunk * (CHUNK / 32) + lane % 4 * (CHUNK / 32) / 4;
    load_once(step.words[half], given.weight + lane * 16 + (u64)chunk * 512);
    const u8* scale = static_cast<const u8*>(given.scale) + lane / 4 * (2 * OUTER);
    own.outer = load_few<2 * OUTER>(scale + (u64)(block >> given.shift) * (16 * OUTER));
    const u8* inner = given.inner + lane / 4 * INNER;
    if (INNER) own.inner = load_few<INNER ? INNER : 1>(inner + (u64)block * (8 * INNER));
#endif
  }
}

DEVICE float signed_byte(u32 last) { return float(int(last << 24) >> 24); }

#if !FP8 && !WHOLE_NUMBERS
// The scales of a block, or its minima, in float16: those of both halves of the block.
DEVICE u32 combined(u32 outer, u32 inner, bool has_inner) {
  if (!has_inner) return in_both(outer);
  float scale, unused;
  unpack(outer, scale, unused);
  const float first = scale * signed_byte(inner);
  return pack_halves(first, SUBS == 2 ? scale * signed_byte(inner >> 8) : first);
}

// Eight times code * scale of two codes: numbers are 1024 + code, or 1024 + 16 * code if `high`.
struct Widening {
  u32 scale, minus;

  DEVICE Widening() {}
  DEVICE Widening(u32 given, bool high)
      : scale(multiply_halves(given, high ? 0x38003800u : 0x48004800u)),
        minus(multiply_halves(given, high ? 0xe000e000u : 0xf000f000u)) {}
  DEVICE u32 of(u32 numbers) const { return fma_halves(numbers, scale, minus); }
};
#endif

#if WHOLE_NUMBERS
// sums += the products of a step; `x` has this lane's inputs, if `has` any, `floats` those of the
// chunk.
DEVICE void multiply_step(const Step& step, int offset, const u16* x, bool has, const float* floats,
                          float (&sums)[4]) {
  constexpr int LAYERS = 8 / BITS;  // of 4 words: codes of 4 bits are bits 0 to 3, or 4 to 7 of bytes
  int parts[LAYERS][4] = {};
#pragma unroll
  for (int layer = 0; layer < LAYERS; ++layer) {
    constexpr u32 ALL = 0xffffffffu, LOW = 0x0f0f0f0fu;
    const u32 mask = BITS == 8 ? ALL : layer == 0 ? LOW : ~LOW;
    alignas(16) u32 right[4] = {};
    if (has) copy_16(right, x + layer * UNIT);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const u32(&first)[4] = step.words[0], (&second)[4] = step.words[1];
      const u32 left[4] = {first[i] & mask, second[i] & mask, first[i + 1] & mask,
                           second[i + 1] & mask};
      multiply_bytes(parts[layer], left, right[i], right[i + 1]);
    }
  }
  const float2 of_lane = reinterpret_cast<const float2*>(floats)[threadIdx.x % 4];
  const float factor = of_lane.x;
  const int total = int(__float_as_uint(of_lane.y));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int high = parts[0][2 * half], low = parts[0][2 * half + 1];
    if (BITS == 4) high = high * 16 + parts[LAYERS - 1][2 * half];
    if (BITS == 4) low = low * 16 + parts[LAYERS - 1][2 * half + 1];
    const Scales& own = step.scales[half];
    float scale = half_of(own.scale());
    if (SUB_SCALE) scale *= signed_byte(own.sub_scale());
    float part = float(high * 256 + low - offset * total) * scale;
    if (MINIMUM) {
      float least = half_of(own.minimum());
      if (SUB_MINIMUM) least *= signed_byte(own.sub_minimum());
      part += float(total) * least;
    }
    sums[2 * half] += part * factor;
  }
}
#else
// sums += the products of a step; `x` has this lane's inputs, `floats` those of the chunk.
DEVICE void multiply_step(const Step& step, int offset, const u16* x, const float* floats,
                          float (&sums)[4]) {
  const int lane = threadIdx.x % 32;
  const float* over = floats + ROWS;
  float parts[2][4] = {};  // sums that do not wait for each other
#if !FP8
  Widening plain[2][2], high[2];  // of two outputs; plain ones of both halves of a block
  if (!WHOLE) {
    float added[2][2];  // eight times what is added to code * scale
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Scales& own = step.scales[half];
      const u32 scale = combined(own.scale(), own.sub_scale(), SUB_SCALE);
      if (BITS == 4) {
        plain[half][0] = Widening(scale, false);
        high[half] = Widening(scale, true);
      } else {
        plain[half][0] = Widening(in_both(scale & 0xffff), false);
        plain[half][1] = SUBS == 2 ? Widening(in_both(scale >> 16), false) : plain[half][0];
      }
      float each[2];
      unpack(scale, each[0], each[1]);
#pragma unroll
      for (int sub = 0; sub < SUBS; ++sub) {
        float least = 0;
        if (MINIMUM) least = half_of(own.minimum());
        if (SUB_MINIMUM) least *= signed_byte(own.sub_minimum() >> 8 * sub);
        added[half][sub] = 8 * (least - offset * each[sub]);
      }
    }
#pragma unroll
    for (int sub = 0; sub < SUBS; ++sub) {
      const int place = (lane % 4 * SUBS + sub) * ROWS + (ROWS == 1 ? 0 : lane / 4);
      multiply_four(parts[0], to_tf32(added[0][sub]), to_tf32(added[1][sub]), over[place]);
    }
  }
#endif
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    u32 left[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32(&words)[4] = step.words[half];
#if FP8
      widen_fp8(words[2 * unit], left[0][half], left[0][2 + half]);
      widen_fp8(words[2 * unit + 1], left[1][half], left[1][2 + half]);
#elif BITS == 4
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 from = i == 0 ? words[unit] : words[unit] >> 8;
        const u32 low_codes = masked_or(from, 0x000f000fu, MAGIC);
        const u32 high_codes = masked_or(from, 0x00f000f0u, MAGIC);
        left[i][half] = WHOLE ? low_codes : plain[half][0].of(low_codes);
        left[i][2 + half] = WHOLE ? high_codes : high[half].of(high_codes);
      }
#else
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 codes = __byte_perm(words[2 * unit + i / 2], MAGIC, i % 2 ? 0x5352 : 0x5150);
        left[i / 2][i % 2 * 2 + half] = WHOLE ? codes : plain[half][i % 2].of(codes);
      }
#endif
    }
    alignas(16) u32 right[4];
    copy_16(right, x + unit * 32);
    multiply(parts[0], left[0], right[0], right[1]);
    multiply(parts[1], left[1], right[2], right[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int column = ROWS == 1 ? 0 : lane % 4 * 2 + i % 2;
    float factor = floats[column], part = parts[0][i] + parts[1][i];
#if FP8
    if (GROUPED) factor *= step.scales[i / 2].scale;
#else
    if (WHOLE) part -= over[column];
    if (WHOLE) factor *= half_of(step.scales[i / 2].scale());
#endif
    sums[i] += part * factor;
  }
}

#endif

// What a thread adds to sums, and multiplies them by, to have its result of a tile.
struct Result {
  float factor, before;
  long long place;  // -1 if it has none
};

DEVICE Result result_of(const Arguments& given, int tile) {
  Result own{FP8 || WHOLE || WHOLE_NUMBERS ? 1 : 0.125f, 0, -1};
  const int thread = threadIdx.x, row = thread / 16;
  if (row >= given.count || tile >= given.tiles) return own;
  int matrix_row = row_of(tile) + thread % 16;
  if (GATED) {
    const int output = row_of(tile) + thread % 8;
    matrix_row = output + thread / 8 % 2 * given.outputs;
    own.place = (long long)row * given.outputs + output;
  } else {
    if (matrix_row >= given.outputs) return own;
    own.place = (long long)row * given.outputs + matrix_row;
    if (given.add) own.before = wide_of(given.out[own.place]);
  }
  if (FP8 && !GROUPED) own.factor *= static_cast<const float*>(given.scale)[matrix_row];
  return own;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    few_rows(const __grid_constant__ Arguments given) {
  extern __shared__ __align__(1024) u8 ring[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunks = given.rows.width / CHUNK;
  const Memory memory = divided(ring, chunks);
  Cursor ahead{int(blockIdx.x), warp};
  let_successor_start();
  Cursor now = ahead;
  Step steps[DEPTH];
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) {
    if (ahead.tile < given.tiles) {
      load_step(given, steps[i], ahead);
      advance(ahead, chunks);
    }
  }
#if WHOLE_NUMBERS
  const int width = given.rows.width;
  if (given.rows.norm_weight != nullptr)
    gather_chunks(memory.weight, given.rows.norm_weight, width);
  wait_for_predecessor();
  gather_chunks(memory.inputs, given.rows.x, width);
  wait_for_gathering();
  __syncwarp();
  // High bytes of a unit, then low ones.
  const u16* x = memory.inputs + lane % 4 * (CHUNK / 4) + lane / 4 % 2 * (UNIT / 2);
  const float own_squares = prepare(given.rows, memory.inputs, memory.weight, memory.floats);
#else
  wait_for_predecessor();
  const u16* x = memory.inputs + lane % 4 * 8;
#endif
  const float *floats = memory.floats, *squares = memory.squares;
  if (ROWS == 1) {
#if !WHOLE_NUMBERS
    const float own_squares = prepare(given.rows, 0, memory.inputs, memory.floats, 1);
#endif
    if (lane == 0) memory.squares[warp] = own_squares;
    __syncwarp();
  } else {
    x = given.inputs + lane / 4 * given.rows.width + lane % 4 * 8;
    floats = given.floats;
    squares = given.squares + threadIdx.x / 16 % ROWS * WARPS;
  }
  Result result = result_of(given, now.tile);
  float sums[4] = {}, norm = given.rows.norm_weight == nullptr ? 1 : 0;
  int turn = 0;
  while (now.tile < given.tiles) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (now.tile >= given.tiles) break;
      const float* own_floats = floats + now.chunk * FLOATS * ROWS;
      const u16* own_x = x + now.chunk * CHUNK;
#if WHOLE_NUMBERS
      multiply_step(steps[i], given.rows.offset, own_x, lane / 8 == lane % 4, own_floats, sums);
#else
      multiply_step(steps[i], given.rows.offset, own_x, own_floats, sums);
#endif
      if (ahead.tile < given.tiles) {
        load_step(given, steps[i], ahead);
        advance(ahead, chunks);
      }
      const int before = now.tile;
      advance(now, chunks);
      if (now.tile == before) continue;
      // Memory of a turn is written again after another barrier, when all have read it.
      float* gathered = memory.gathered + turn * WARPS * 16 * STRIDE;
      turn ^= 1;
      if (WHOLE_NUMBERS) sums[0] = summed(sums[0], 4), sums[2] = summed(sums[2], 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = lane % 4 * 2 + j % 2;
        if (column < ROWS)
          gathered[(warp * 16 + lane / 4 + j / 2 * 8) * STRIDE + column] = sums[j];
        sums[j] = 0;
      }
      __syncthreads();
      if (warp >= (16 * ROWS + 31) / 32) continue;
      float total = 0;
#pragma unroll
      for (int each = 0; each < WARPS; ++each)
        total += gathered[(each * 16 + threadIdx.x % 16) * STRIDE + threadIdx.x / 16 % ROWS];
      if (norm == 0) {  // the first time
        float all = 0;
        for (int each = 0; each < WARPS; ++each) all += squares[each];
        norm = rsqrtf(all / given.rows.width + given.rows.eps);
      }
      total = total * norm * result.factor + result.before;
      if (GATED) {
        const float up = __shfl_xor_sync(0xffffffff, total, 8);
        if (result.place >= 0 && threadIdx.x % 16 < 8)
          given.out[result.place] = narrow_of(silu_of(total) * up);
      } else if (result.place >= 0) {
        given.out[result.place] = narrow_of(total);
      }
      result = result_of(given, now.tile);
    }
  }
}
