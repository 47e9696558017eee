// Attention over chosen latent rows, wherever they are in the pool: each query has its own list.
//
// A block computes 64 heads of a query over a part of its list, as latent_tiles.cuh describes. A
// warpgroup gathers tiles. The blocks of a cluster have the parts of one list; in the end each merges
// what all of them read for some of the heads.
//
// The host defines HEADS (a multiple of 64) and HALF.

constexpr int WIDTH = LATENT + ROPE;
constexpr int PITCH = LATENT + 8;  // floats of a row of results, so that 8 rows use all banks

struct Arguments {
  TensorMap queries;  // as [-1, WIDTH], in boxes of 64 rows by 64 columns
  const u16* pool;    // [slots, WIDTH]
  const int* slots;   // [queries, k], -1 for none
  u16* out;           // [queries, HEADS, LATENT]
  int k;
  int tiles;    // of a part
  float scale;  // of scores, in base 2
};

struct Gathered : Shared {
  u32 there[2][2];  // which rows of a tile are in the list, as bits
  float sums[64];   // of shares of both warpgroups
  float all_most[72], all_sums[72];  // of the heads that this block merges, by part
};

// Results of a part, relative to `most`: they overwrite the tiles.
DEVICE float* results(Shared& s) { return reinterpret_cast<float*>(s.tile[0]); }
static_assert(64 * PITCH * 4 <= 2 * TILE_BYTES, "results fit where tiles were");

// The copying warpgroup. Eight threads copy 128 bytes of a row; each thread has four rows of a tile.
DEVICE void gather_all(const Arguments& p, Gathered& s, int tiles) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int row = thread / 8, chunk = thread % 8;
  const int* listed = p.slots + (long long)blockIdx.z * p.k;
  const int begin = blockIdx.x * p.tiles * 64;
  const u32 target = row * 128 + ((chunk ^ row % 8) * 16);
  int slot[4], bit = -1;
  // Slots are read one tile ahead. The first two warps also tell which rows are there.
  auto look_up = [&](int tile) {
    const int first = begin + tile * 64;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = first + i * 16 + row;
      slot[i] = n < p.k ? listed[n] : -1;
    }
    const int n = first + warp * 32 + lane;
    if (warp < 2) bit = n < p.k ? listed[n] : -1;
  };
  look_up(0);
  for (int tile = 0; tile < tiles; ++tile) {
    const int buffer = tile & 1;
    const u32 to = shared_address(s.tile[buffer]) + target;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      if (tile >= 2) barrier_wait(&s.empty[buffer][piece], (tile / 2 - 1) & 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u16* from = p.pool + (long long)max(slot[i], 0) * WIDTH + chunk * 8;
#pragma unroll
        for (int box = first_box(piece); box < end_box(piece); ++box)
          gather(to + box * BOX_BYTES + i * 2048, from + box * 64, slot[i] >= 0);
      }
      arrive_after_gathering(&s.full[buffer][piece]);
    }
    if (warp < 2) {
      const u32 there = __ballot_sync(0xffffffffu, bit >= 0);
      if (lane == 0) {
        s.there[buffer][warp] = there;
        barrier_arrive(&s.full[buffer][1]);
      }
    }
    if (tile + 1 < tiles) look_up(tile + 1);
  }
}

// Which rows of a gathered tile are in the list.
struct Rows {
  const u32* listed;
  u64 bits;  // from the first row of this thread on

  DEVICE void arrived(int piece) {
    if (piece == 1) bits = (listed[0] | (u64)listed[1] << 32) >> threadIdx.x % 4 * 2;
    fence_for_copies();  // the piece was not written by the copies that products know of
  }

  DEVICE bool there(int eighth, int, int i) const { return bits >> (eighth + i) & 1; }
};

template <int GROUP>
DEVICE void attend(const Arguments& p, Gathered& s, int tiles) {
  Heads own;
  u32 used[2] = {0, 0};
  barrier_wait(&s.query_full);
  attend_tiles<GROUP>(own, s, tiles, used, p.scale, [&](int, int buffer) {
    return Rows{s.there[buffer]};
  });
  sync_threads(BOTH, 256);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const long long first = ((long long)blockIdx.z * HEADS + blockIdx.y * 64) * LATENT;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + lane / 4 + 8 * half, column = GROUP * 256 + lane % 4 * 2;
    const float total = s.total[0][row] + s.total[1][row];
    if (gridDim.x == 1) {
      const float part = 1.0f / total;
      u16* target = p.out + first + row * LATENT + column;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        *reinterpret_cast<u32*>(target + i * 8) =
            pack(own.acc[4 * i + 2 * half] * part, own.acc[4 * i + 2 * half + 1] * part);
    } else {
      float* target = results(s) + row * PITCH + column;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        *reinterpret_cast<float2*>(target + i * 8) =
            make_float2(own.acc[4 * i + 2 * half], own.acc[4 * i + 2 * half + 1]);
      if (GROUP == 0 && lane % 4 == 0) {
        s.most[row] = own.most[half];
        s.sums[row] = total;
      }
    }
  }
}

// Merge the parts of some heads, a warp per head.
DEVICE void merge(const Arguments& p, Gathered& s) {
  const int parts = gridDim.x, heads = (64 + parts - 1) / parts, lane = threadIdx.x % 32;
  const int begin = blockIdx.x * heads, end = min(begin + heads, 64);
  if (threadIdx.x < parts * heads) {
    const int head = min(begin + (int)threadIdx.x % heads, 63), part = threadIdx.x / heads;
    s.all_most[threadIdx.x] = load_remote(s.most + head, part);
    s.all_sums[threadIdx.x] = load_remote(s.sums + head, part);
  }
  sync_threads(BOTH, 256);
  for (int head = begin + threadIdx.x / 32; head < end; head += 8) {
    float most = NOTHING, total = 0.0f, sum[16] = {};
    for (int part = 0; part < parts; ++part)
      most = fmaxf(most, s.all_most[part * heads + head - begin]);
    const float* from = results(s) + head * PITCH + lane * 4;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) {
      const int at = part * heads + head - begin;
      const float weight = exp2_fast(s.all_most[at] - most);
      total += weight * s.all_sums[at];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 four = load_four_remote(from + j * 128, part);
        sum[4 * j] += weight * __uint_as_float(four.x);
        sum[4 * j + 1] += weight * __uint_as_float(four.y);
        sum[4 * j + 2] += weight * __uint_as_float(four.z);
        sum[4 * j + 3] += weight * __uint_as_float(four.w);
      }
    }
    const float scale = 1.0f / total;
    const long long row = (long long)blockIdx.z * HEADS + blockIdx.y * 64 + head;
    u16* target = p.out + row * LATENT + lane * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      *reinterpret_cast<uint2*>(target + j * 128) =
          make_uint2(pack(sum[4 * j] * scale, sum[4 * j + 1] * scale),
                     pack(sum[4 * j + 2] * scale, sum[4 * j + 3] * scale));
  }
}

// The grid is [parts of a list, tiles of heads, queries].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_rows(const __grid_constant__ Arguments p) {
  extern __shared__ u8 ring[];
  u8* memory = own_memory(ring);
  // Swizzled tiles begin at multiples of 1,024 bytes.
  Gathered& s =
      *reinterpret_cast<Gathered*>(memory + ((1024 - shared_address(memory) % 1024) % 1024));
  let_successor_start();
  if (threadIdx.x == 0) init_barriers(s, 128, 128 + 2);
  __syncthreads();
  wait_for_predecessor();
  const int all = (p.k + 63) / 64;
  const int tiles = max(0, min(p.tiles, all - (int)blockIdx.x * p.tiles));
  const int group = threadIdx.x / 128;
  if (group == 2) {
    shrink_registers<40>();
    if (threadIdx.x == 256)
      copy_boxes(&p.queries, blockIdx.z * HEADS + blockIdx.y * 64, s.query, 0, BOXES, &s.query_full);
    __syncwarp();
    gather_all(p, s, tiles);
    wait_for_gathering();
    if (gridDim.x > 1) {
      cluster_arrive();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
    return;
  }
  grow_registers<232>();
  if (group == 0)
    attend<0>(p, s, tiles);
  else
    attend<1>(p, s, tiles);
  if (gridDim.x == 1) return;
  cluster_arrive();
  cluster_wait();
  merge(p, s);
  cluster_arrive();  // others may still read my results
  cluster_wait();
}
