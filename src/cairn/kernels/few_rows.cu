// Products x @ W.T of few rows with a matrix of FP8 numbers, at the speed at which the matrix can be
// read.
//
// A block has one tile of 16 outputs after the other, and its warps share the columns. The matrix is
// the left operand of tensor-core products, so a warp reads 64 bytes of each output of a tile at
// once, a step; DEPTH steps are on their way at the same time, also those of the next tile. They
// begin before the kernel waits for the one that makes x. FP8 numbers become float16 without their
// scale, which is multiplied to sums.
//
// x becomes float16, each chunk of it scaled so that its largest number is below 256: exact for
// whatever is not 2^32 times smaller than that. With one row every warp prepares its own chunks, in
// shared memory. For more rows `prepare_rows` does.
//
// GATED: the matrix has the outputs of gate, then those of up, and a tile 8 of each. The result is
// silu(gate) * up.
//
// The host defines ROWS (of a block: 1 or 8), X_HALF, GROUPED (scales change within the columns), GATED,
// WARPS and DEPTH, and BLOCKS, which is how many blocks a multiprocessor runs at once.

constexpr int THREADS = 32 * WARPS;
constexpr int CHUNK = 64;          // columns of a step
constexpr int UNITS = CHUNK / 32;  // of 8 inputs per lane and step
constexpr int STRIDE = ROWS == 1 ? 1 : ROWS + 1;  // floats from an output's sums to the next

struct RowArguments {
  Rows rows;
  u16* inputs;     // [rows, width]
  float* factors;  // [chunks, ROWS]
  float* squares;  // [rows, WARPS]
};

struct Arguments {
  RowArguments made;    // what prepare_rows made, unless ROWS is 1
  const u8* weight;     // [outputs, width]
  const float* scale;   // [outputs, scales]
  u16* out;             // [rows, outputs]
  int count;            // of rows, at most ROWS
  int tiles;
  int outputs;  // without those of up
  int scales;
  int shift;  // 2^shift chunks have one scale
  int add;    // to what out has
};

struct Step {
  u32 words[2][4];  // of two outputs: 16 bytes of each
  float scales[2];
};

// The shared memory of a block.
struct Memory {
  float* gathered;  // [2, WARPS, 16, STRIDE]
  float* squares;   // [WARPS], if ROWS is 1, as what follows
  float* factors;   // [chunks]
  u16* inputs;      // [width]
};

DEVICE Memory divided(u8* all, int chunks) {
  Memory own;
  own.gathered = reinterpret_cast<float*>(all);
  own.squares = own.gathered + 2 * WARPS * 16 * STRIDE;
  own.factors = own.squares + (WARPS + 3) / 4 * 4;
  own.inputs = reinterpret_cast<u16*>(own.factors + (chunks + 3) / 4 * 4);
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

// Prepare the chunks of this warp, sorted by unit, then by lane, in runs of 8; and their factors, which
// are `apart` from the next. Returns the sum of squares.
DEVICE float prepare(const Rows& given, int row, u16* inputs, float* factors, int apart) {
  const int piece = threadIdx.x % 8, chunks = given.width / CHUNK;
  float squares = 0;
  for (int first = threadIdx.x / 32; first < chunks; first += 4 * WARPS) {
    const int chunk = first + threadIdx.x % 32 / 8 * WARPS;
    const bool there = chunk < chunks;
    float numbers[8] = {}, most = 0;
    if (there) load_inputs(given, row, chunk * CHUNK + piece * 8, numbers, squares);
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(numbers[i]));
    for (int mask = 4; mask > 0; mask /= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, mask));
    // The exponent of the largest number; fmaxf drops NaN, which the products keep.
    const int exponent = min(max(int(__float_as_uint(most) >> 23), 8), 254);
    const float scale = __uint_as_float(u32(261 - exponent) << 23);
    if (!there) continue;
    if (piece == 0) factors[chunk * apart] = __uint_as_float(u32(exponent - 7) << 23);
    alignas(16) u32 halves[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      halves[i] = pack_halves(numbers[2 * i] * scale, numbers[2 * i + 1] * scale);
    copy_16(inputs + chunk * CHUNK + piece % 2 * 32 + piece / 2 * 8, halves);
  }
  return summed(squares, 32);
}

#if ROWS > 1
extern "C" __global__ void __launch_bounds__(THREADS)
    prepare_rows(const __grid_constant__ RowArguments given) {
  const int row = blockIdx.x;
  let_successor_start();
  wait_for_predecessor();
  u16* inputs = given.inputs + row * given.rows.width;
  const float squares = prepare(given.rows, row, inputs, given.factors + row, ROWS);
  if (threadIdx.x % 32 == 0) given.squares[row * WARPS + threadIdx.x / 32] = squares;
}
#endif

// Load a lane's part of a chunk: of rows lane / 4 and lane / 4 + 8 of the tile.
DEVICE void load_step(const Arguments& given, Step& step, const Cursor& at) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = row_of(at.tile) + lane / 4 + half * (GATED ? given.outputs : 8);
    if (!GATED) row = min(row, given.outputs - 1);
    const u32 place = at.chunk * 64 + lane % 4 * 16;
    load_once(step.words[half], given.weight + (u64)row * given.made.rows.width + place);
    if (GROUPED) step.scales[half] = given.scale[row * given.scales + (at.chunk >> given.shift)];
  }
}

// sums += the products of a step; `x` has this lane's inputs, `factors` those of the chunk.
DEVICE void multiply_step(const Step& step, const u16* x, const float* factors, float (&sums)[4]) {
  const int lane = threadIdx.x % 32;
  float parts[2][4] = {};  // sums that do not wait for each other
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    u32 left[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32(&words)[4] = step.words[half];
      widen_fp8(words[2 * unit], left[0][half], left[0][2 + half]);
      widen_fp8(words[2 * unit + 1], left[1][half], left[1][2 + half]);
    }
    alignas(16) u32 right[4];
    copy_16(right, x + unit * 32);
    multiply(parts[0], left[0], right[0], right[1]);
    multiply(parts[1], left[1], right[2], right[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float factor = factors[ROWS == 1 ? 0 : lane % 4 * 2 + i % 2];
    if (GROUPED) factor *= step.scales[i / 2];
    sums[i] += (parts[0][i] + parts[1][i]) * factor;
  }
}

// What a thread adds to sums, and multiplies them by, to have its result of a tile.
struct Result {
  float factor, before;
  long long place;  // -1 if it has none
};

DEVICE Result result_of(const Arguments& given, int tile) {
  Result own{1, 0, -1};
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
  if (!GROUPED) own.factor = given.scale[matrix_row];
  return own;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    few_rows(const __grid_constant__ Arguments given) {
  extern __shared__ __align__(1024) u8 ring[];
  const Rows& rows = given.made.rows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = rows.width / CHUNK;
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
  wait_for_predecessor();
  const u16* x = memory.inputs + lane % 4 * 8;
  const float *factors = memory.factors, *squares = memory.squares;
  if (ROWS == 1) {
    const float own_squares = prepare(rows, 0, memory.inputs, memory.factors, 1);
    if (lane == 0) memory.squares[warp] = own_squares;
    __syncwarp();
  } else {
    x = given.made.inputs + lane / 4 * rows.width + lane % 4 * 8;
    factors = given.made.factors;
    squares = given.made.squares + threadIdx.x / 16 % ROWS * WARPS;
  }
  Result result = result_of(given, now.tile);
  float sums[4] = {}, norm = rows.norm_weight == nullptr ? 1 : 0;
  int turn = 0;
  while (now.tile < given.tiles) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (now.tile >= given.tiles) break;
      multiply_step(steps[i], x + now.chunk * CHUNK, factors + now.chunk * ROWS, sums);
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
        norm = rsqrtf(all / rows.width + rows.eps);
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
