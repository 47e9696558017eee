// The product x @ W.T of one row with a matrix of codes of 4 or 8 bits, at the speed at which the
// matrix can be read.
//
// A block has one tile of 16 outputs after the other, which are two runs of 8 outputs in memory
// (packed_layout.py). STAGE chunks of both are copied to shared memory at a time, a stage, to one of DEPTH
// slots. Every STAGE warps are a group. Groups take stages in turn, each warp a chunk. Each group has a
// warp of its own that copies its stages, without waiting for the kernel that makes x.
//
// x becomes whole numbers of 15 bits, and tensor cores multiply bytes. Codes are the left operand. The
// eight columns of the right one have the inputs of each lane of a quad, in two columns: their high
// bytes and their low ones, and zeros in the rows of other lanes. So each lane gets the sum of its own
// columns, which have one scale.
//
// GATED: the matrix has the outputs of gate, then those of up, and a tile 8 of each. The result is
// silu(gate) * up.
//
// The host defines X_HALF, GATED, BITS, SHIFT, MINIMUM, SUB_SCALE and SUB_MINIMUM (what the matrix has:
// see packed_layout.py; 2^SHIFT blocks of 32 columns have one scale, each has one inner one), GROUPS and
// DEPTH, a multiple of GROUPS.

constexpr int STAGE = 8;
constexpr int WARPS = GROUPS * STAGE;
constexpr int MULTIPLYING = 32 * WARPS;  // threads
constexpr int THREADS = MULTIPLYING + 32 * GROUPS;
constexpr int CHUNK = 512 / BITS;  // columns of 64 bytes
constexpr int PER_CHUNK = CHUNK / 32;
constexpr int UNIT = 16;   // columns that a lane prepares at once
constexpr int FLOATS = 8;  // of a chunk: factor and sum of inputs for each lane of a quad
constexpr int KEPT = 4;    // tiles whose sums are added up together
constexpr int OUTER = 1 + MINIMUM;                  // scale, then minimum
constexpr int INNER = SUB_SCALE + SUB_MINIMUM;      // the same
constexpr int CODE_BYTES = STAGE * 512;             // of 8 outputs and a stage, as the next ones
constexpr int SCALE_BYTES = ((STAGE * PER_CHUNK - 1 >> SHIFT) + 1) * 16 * OUTER;
constexpr int INNER_BYTES = STAGE * PER_CHUNK * 8 * INNER;
constexpr int HALF_SLOT = CODE_BYTES + SCALE_BYTES + INNER_BYTES;

struct Arguments {
  Rows rows;
  const u8* words;
  const u8* scale;  // [outputs / 8, scales, 8, OUTER] float16
  const u8* inner;  // [outputs / 8, blocks, 8, INNER]
  u16* out;         // [outputs]
  int tiles;
  int outputs;  // without those of up
  int offset;   // that codes have
  int add;      // to what out has
};

// The shared memory of a block.
struct Memory {
  u8* slots;        // [DEPTH, 2, HALF_SLOT]
  u64* full;        // [DEPTH]: the slot's stage has arrived
  u64* empty;       // [DEPTH]: all warps of its group have taken their chunks
  float* gathered;  // [KEPT, WARPS, 16]
  float* squares;   // [WARPS]
  float* floats;    // [chunks, FLOATS]
  u16* inputs;      // [width]
  u16* weight;      // [width]: of the norm, if there is one
};

DEVICE Memory divided(u8* all, int chunks) {
  Memory own;
  own.slots = all;
  own.full = reinterpret_cast<u64*>(all + DEPTH * 2 * HALF_SLOT);
  own.empty = own.full + DEPTH;
  own.gathered = reinterpret_cast<float*>(own.empty + DEPTH);
  own.squares = own.gathered + KEPT * WARPS * 16;
  own.floats = own.squares + (WARPS + 3) / 4 * 4;
  own.inputs = reinterpret_cast<u16*>(own.floats + chunks * FLOATS);
  own.weight = own.inputs + chunks * CHUNK;
  return own;
}

// The tiles of this block, and how they are cut.
struct Work {
  int chunks;  // of a tile
  int stages;  // of a tile
  int tiles;   // of this block

  DEVICE explicit Work(const Arguments& given)
      : chunks(given.rows.width / CHUNK),
        stages((chunks + STAGE - 1) / STAGE),
        tiles((given.tiles - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x)) {}
  DEVICE static int tile(int turn) { return blockIdx.x + turn * gridDim.x; }
};

// Where a group is in its slots.
struct Slot {
  int at;
  u32 phase;

  DEVICE explicit Slot(int group) : at(group), phase(0) {}
  DEVICE void advance() {
    at += GROUPS;
    if (at >= DEPTH) at -= DEPTH, phase ^= 1;
  }
};

// Copy all stages of a group, one after the other, as slots become empty.
DEVICE void copy_stages(const Arguments& given, const Memory& memory, const Work& work, int group) {
  Slot slot(group);
  int part = group;  // stage of a tile
  for (int turn = 0; turn < work.tiles; ++turn, part -= work.stages) {
    const int tile = Work::tile(turn);
    for (; part < work.stages; part += GROUPS, slot.advance()) {
      const int first = part * STAGE, count = min(STAGE, work.chunks - first);
      const int blocks = count * PER_CHUNK;
      const u32 scales = ((blocks - 1 >> SHIFT) + 1) * (16 * OUTER);
      u64* full = memory.full + slot.at;
      barrier_wait(memory.empty + slot.at, slot.phase ^ 1);  // at once the first time
      barrier_expect(full, 2 * (count * 512 + scales + blocks * 8 * INNER));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int eight = GATED ? tile + half * (given.outputs / 8) : tile * 2 + half;
        const u64 chunk = u64(eight) * work.chunks + first, block = chunk * PER_CHUNK;
        const u32 target = shared_address(memory.slots + (slot.at * 2 + half) * HALF_SLOT);
        copy_bytes(target, given.words + chunk * 512, count * 512, full);
        const u8* scale = given.scale + (block >> SHIFT) * (16 * OUTER);
        copy_bytes(target + CODE_BYTES, scale, scales, full);
        if (INNER) {
          const u8* inner = given.inner + block * (8 * INNER);
          copy_bytes(target + CODE_BYTES + SCALE_BYTES, inner, blocks * 8 * INNER, full);
        }
      }
    }
  }
}

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
//
// Every 32 columns are scaled by a power of two so that their largest number is below 2^14, and
// rounded. A unit is 16 columns, 4 * r + 8 * i + j of a block for unit r. It has four words of high
// bytes, and four of low ones (signed too): byte i of word j.
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

// A lane's part of a chunk: of rows lane / 4 and lane / 4 + 8 of the tile.
struct Step {
  u32 words[2][4];
  u32 outer[2], inner[2];
};

// Read this warp's chunk of a stage.
DEVICE void read_step(Step& step, const u8* slot) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % STAGE;
  const u32 block = warp * PER_CHUNK + lane % 4 * PER_CHUNK / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u8* own = slot + half * HALF_SLOT;
    copy_16(step.words[half], own + warp * 512 + lane * 16);
    const u8* scale = own + CODE_BYTES + (block >> SHIFT) * (16 * OUTER);
    step.outer[half] = load_few<2 * OUTER>(scale + lane / 4 * (2 * OUTER));
    const u8* inner = own + CODE_BYTES + SCALE_BYTES + block * (8 * INNER);
    if (INNER) step.inner[half] = load_few<INNER ? INNER : 1>(inner + lane / 4 * INNER);
  }
}

// sums += the products of a step; `x` has this lane's inputs, if `has` any, `floats` those of the
// chunk.
DEVICE void multiply_step(const Step& step, int offset, const u16* x, bool has, const float* floats,
                          float (&sums)[2]) {
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
    float scale = from_half(step.outer[half]);
    if (SUB_SCALE) scale *= signed_byte(step.inner[half]);
    float part = float(high * 256 + low - offset * total) * scale;
    if (MINIMUM) {
      float least = from_half(step.outer[half] >> 16);
      if (SUB_MINIMUM) least *= signed_byte(SUB_SCALE ? step.inner[half] >> 8 : step.inner[half]);
      part += float(total) * least;
    }
    sums[half] += part * factor;
  }
}

// The place of a thread's result of KEPT tiles from `turn` on, and what is added to it.
struct Result {
  float before;
  int place;  // -1 if it has none

  DEVICE Result(const Arguments& given, const Work& work, int turn) : before(0), place(-1) {
    turn += threadIdx.x / 16;
    if (threadIdx.x >= KEPT * 16 || turn >= work.tiles) return;
    place = GATED ? Work::tile(turn) * 8 + threadIdx.x % 8 : Work::tile(turn) * 16 + threadIdx.x % 16;
    if (place >= given.outputs) place = -1;
    if (!GATED && given.add && place >= 0) before = wide_of(given.out[place]);
  }
};

// Add up the sums of all warps, of KEPT tiles, and store results.
DEVICE void finish(const Arguments& given, const Memory& memory, const Result& result) {
  if (threadIdx.x >= KEPT * 16) return;
  const float* sums = memory.gathered + threadIdx.x / 16 * (WARPS * 16) + threadIdx.x % 16;
  float total = 0, norm = 1;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) total += sums[warp * 16];
  if (given.rows.norm_weight != nullptr) {
    float all = 0;
    for (int warp = 0; warp < WARPS; ++warp) all += memory.squares[warp];
    norm = rsqrtf(all / given.rows.width + given.rows.eps);
  }
  total = total * norm + result.before;
  if (GATED) {
    const float up = __shfl_xor_sync(0xffffffff, total, 8);
    total = silu_of(total) * up;
  }
  if (result.place >= 0 && (!GATED || threadIdx.x % 16 < 8)) given.out[result.place] = narrow_of(total);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    code_row(const __grid_constant__ Arguments given) {
  extern __shared__ __align__(1024) u8 ring[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = given.rows.width;
  const Work work(given);
  const Memory memory = divided(ring, work.chunks);
  let_successor_start();
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < DEPTH; ++slot) {
      barrier_init(memory.full + slot, 1);
      barrier_init(memory.empty + slot, STAGE);
    }
    fence_for_copies();
  }
  __syncthreads();
  if (warp >= WARPS) {
    if (lane == 0) copy_stages(given, memory, work, warp - WARPS);
    return;
  }
  if (given.rows.norm_weight != nullptr)
    gather_chunks(memory.weight, given.rows.norm_weight, width);
  wait_for_predecessor();
  gather_chunks(memory.inputs, given.rows.x, width);
  Result result(given, work, 0);
  wait_for_gathering();
  __syncwarp();
  const float squares = prepare(given.rows, memory.inputs, memory.weight, memory.floats);
  if (lane == 0) memory.squares[warp] = squares;
  sync_threads(1, MULTIPLYING);
  // High bytes of a unit, then low ones.
  const u16* x = memory.inputs + lane % 4 * (CHUNK / 4) + lane / 4 % 2 * (UNIT / 2);
  Slot slot(warp / STAGE);
  int part = warp / STAGE;
  for (int turn = 0; turn < work.tiles; ++turn, part -= work.stages) {
    float sums[2] = {};
    for (; part < work.stages; part += GROUPS, slot.advance()) {
      barrier_wait(memory.full + slot.at, slot.phase);
      Step step;
      read_step(step, memory.slots + slot.at * 2 * HALF_SLOT);
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.empty + slot.at);
      const int chunk = part * STAGE + warp % STAGE;
      if (chunk >= work.chunks) continue;  // of a stage that is not whole
      const float* floats = memory.floats + chunk * FLOATS;
      multiply_step(step, given.offset, x + chunk * CHUNK, lane / 8 == lane % 4, floats, sums);
    }
    float* gathered = memory.gathered + (turn % KEPT * WARPS + warp) * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = summed(sums[half], 4);
      if (lane % 4 == 0) gathered[half * 8] = sum;
    }
    const bool last = turn + 1 == work.tiles;
    if ((turn + 1) % KEPT != 0 && !last) continue;
    sync_threads(1, MULTIPLYING);
    finish(given, memory, result);
    if (last) break;
    result = Result(given, work, turn + 1);
    sync_threads(1, MULTIPLYING);  // sums have been read
  }
}
