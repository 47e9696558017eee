// Decode over a paged cache of latent rows [LATENT | ROPE], which all heads read as keys and values.
//
// A block computes 64 heads over its share of the pages (latent.py plans the shares). Two
// warpgroups each own half of the output's columns. They take turns: one computes the scores and
// shares of an even tile of 64 rows, the other of an odd one, and both add both tiles to their
// columns. So one warpgroup's softmax runs beside the other's products. Another warp copies tiles
// into two buffers. The shares of a tile overwrite its rotated columns, which are no longer needed.
// All logarithms and exponentials are in base 2, but for the stored log-sum-exp.
//
// The host defines HEADS (a multiple of 64), PAGE_SIZE (a multiple of 64), MAX_SEQS and HALF.

constexpr int LATENT = 512;
constexpr int ROPE = 64;
constexpr int BOXES = (LATENT + ROPE) / 64;
constexpr int BOX_BYTES = 64 * 128;  // 64 rows by 64 columns
constexpr int TILE_BYTES = BOXES * BOX_BYTES;
constexpr int TILES_PER_PAGE = PAGE_SIZE / 64;
constexpr int THREADS = 384;  // two warpgroups that compute, and one of which a thread copies
constexpr float NOTHING = -3e38f;
constexpr float LN2 = 0.6931471805599453f;

struct Arguments {
  TensorMap queries;  // as [-1, LATENT + ROPE], in boxes of 64 rows by 64 columns
  TensorMap tiles;    // the pool, likewise
  const int* page_table;
  const int* kv_lens;
  const int* rows;   // [seqs] query row of each sequence
  const int* pages;  // the plan: [MAX_SEQS + 2]
  u16* out;          // [rows, HEADS, LATENT]
  float* partial;    // [2 * programs, HEADS, LATENT]
  float* partial_lse;
  long long table_stride;
  float scale;  // of scores, in base 2
};

struct Shared {
  u8 query[TILE_BYTES];
  u8 tile[2][TILE_BYTES];
  float most[64];      // maximum of each head's scores, after the newest tile
  float total[2][64];  // sums of shares, by warpgroup
  u64 query_full, query_empty;
  u64 full[2];
  u64 empty[2];
};

// A part of a sequence that the block reads.
struct Segment {
  int row, first_tile, tiles, end;  // of the query; of the sequence; rows of the sequence
  bool whole, begins;
  const int* table;
};

enum Barrier { EVEN_READY = 1, ODD_READY = 2, BOTH = 3, OWN = 4 };

DEVICE void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

DEVICE void arrive_threads(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

DEVICE u64 operand(u32 address, u32 leading, u32 stride) {
  return (u64)(address >> 4 & 0x3fff) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 |
         1ull << 62;  // swizzled within 128 bytes
}

// Operand whose products sum over its columns: 8 rows are 1,024 bytes apart from the next 8.
DEVICE u64 by_column(u32 address) { return operand(address, 16, 1024); }

// Operand whose products sum over its rows: 64 columns are a box apart from the next 64.
DEVICE u64 by_row(u32 address) { return operand(address, BOX_BYTES, 1024); }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Keep the compiler from moving accesses to registers of running products.
template <int COUNT>
DEVICE void hold(float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

#if HALF
#define TYPES "f32.f16.f16"
#else
#define TYPES "f32.bf16.bf16"
#endif
#define R8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define R32(d, i) R8(d, i), R8(d, i + 8), R8(d, i + 16), R8(d, i + 24)
#define N8(a, b, c, d, e, f, g, h) \
  "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h

// c [64, 64] += a @ b.T, or = if not ADD; a and b by column.
template <bool ADD>
DEVICE void score_step(float (&c)[32], u64 a, u64 b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16." TYPES " {" N8(0, 1, 2, 3, 4, 5, 6, 7) ", "
      N8(8, 9, 10, 11, 12, 13, 14, 15) ", " N8(16, 17, 18, 19, 20, 21, 22, 23) ", "
      N8(24, 25, 26, 27, 28, 29, 30, 31) "}, %32, %33, p, 1, 1, 0, 0;}\n"
      : R32(c, 0)
      : "l"(a), "l"(b), "n"((int)ADD));
}

// c [64, 256] += a @ b; a by column, b by row.
DEVICE void value_step(float (&c)[128], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16." TYPES " {" N8(0, 1, 2, 3, 4, 5, 6, 7) ", "
      N8(8, 9, 10, 11, 12, 13, 14, 15) ", " N8(16, 17, 18, 19, 20, 21, 22, 23) ", "
      N8(24, 25, 26, 27, 28, 29, 30, 31) ", " N8(32, 33, 34, 35, 36, 37, 38, 39) ", "
      N8(40, 41, 42, 43, 44, 45, 46, 47) ", " N8(48, 49, 50, 51, 52, 53, 54, 55) ", "
      N8(56, 57, 58, 59, 60, 61, 62, 63) ", " N8(64, 65, 66, 67, 68, 69, 70, 71) ", "
      N8(72, 73, 74, 75, 76, 77, 78, 79) ", " N8(80, 81, 82, 83, 84, 85, 86, 87) ", "
      N8(88, 89, 90, 91, 92, 93, 94, 95) ", " N8(96, 97, 98, 99, 100, 101, 102, 103) ", "
      N8(104, 105, 106, 107, 108, 109, 110, 111) ", " N8(112, 113, 114, 115, 116, 117, 118, 119)
      ", " N8(120, 121, 122, 123, 124, 125, 126, 127) "}, %128, %129, 1, 1, 1, 0, 1;\n"
      : R32(c, 0), R32(c, 32), R32(c, 64), R32(c, 96)
      : "l"(a), "l"(b));
}

// Find the n-th segment of a share [first, last) of all pages; false if there are fewer.
DEVICE bool find(const Arguments& p, int seq, int last_seq, int first, int last, Segment& found) {
  const int begin = p.pages[seq], end = p.pages[seq + 1];
  if (seq > last_seq || end <= begin) return false;
  const int own = max(first, begin) - begin, stop = min(last, end) - begin;
  found.row = p.rows[seq];
  found.first_tile = own * TILES_PER_PAGE;
  found.end = min(stop * PAGE_SIZE, p.kv_lens[seq]);
  found.tiles = (found.end + 63) / 64 - found.first_tile;
  found.begins = begin >= first;
  found.whole = found.begins && end <= last;
  found.table = p.page_table + seq * p.table_stride;
  return true;
}

DEVICE void copy_tile(const TensorMap* map, int row, u8* target, u64* full) {
  barrier_expect(full, TILE_BYTES);
  for (int box = 0; box < BOXES; ++box)
    copy_box(shared_address(target) + box * BOX_BYTES, map, box * 64, row, full);
}

// The copying thread: queries and tiles of all segments, in order.
DEVICE void copy_all(const Arguments& p, Shared& s, int first_seq, int last_seq, int first,
                     int last) {
  u32 segments = 0, used[2] = {0, 0};
  for (int seq = first_seq; seq <= last_seq; ++seq) {
    Segment own;
    if (!find(p, seq, last_seq, first, last, own)) continue;
    if (segments > 0) barrier_wait(&s.query_empty, (segments - 1) & 1);
    ++segments;
    copy_tile(&p.queries, own.row * HEADS + blockIdx.x * 64, s.query, &s.query_full);
    int page = own.table[own.first_tile / TILES_PER_PAGE];
    for (int i = 0; i < own.tiles; ++i) {
      const int buffer = i & 1, tile = own.first_tile + i;
      const int row = (page * TILES_PER_PAGE + tile % TILES_PER_PAGE) * 64;
      if (i + 1 < own.tiles) page = own.table[(tile + 1) / TILES_PER_PAGE];
      if (used[buffer] > 0) barrier_wait(s.empty + buffer, (used[buffer] - 1) & 1);
      ++used[buffer];
      copy_tile(&p.tiles, row, s.tile[buffer], s.full + buffer);
    }
  }
}

// A thread's view of its warpgroup's heads: rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Heads {
  float acc[128];   // half of the columns
  float most[2];    // that `acc` is relative to
  float total[2];   // of the tiles that this warpgroup scored,
  float scored[2];  // relative to this maximum
};

// Issue the products of all heads with one tile. A short tile's last rows are not the sequence's:
// they are cleared first, since they may hold NaN.
DEVICE void score(float (&scores)[32], Shared& s, int buffer, u32 phase, int valid, int group) {
  const u32 query = shared_address(s.query), tile = shared_address(s.tile[buffer]);
  barrier_wait(s.full + buffer, phase);
  if (valid < 64) {
    const int thread = threadIdx.x % 128, words = (64 - valid) * 8;
    for (int box = 0; box < BOXES; ++box) {
      uint4* rows = reinterpret_cast<uint4*>(s.tile[buffer] + box * BOX_BYTES + valid * 128);
      for (int i = thread; i < words; i += 128) rows[i] = make_uint4(0, 0, 0, 0);
    }
    fence_for_copies();
    sync_threads(OWN + group, 128);
  }
  hold(scores);
  products_begin();
#pragma unroll
  for (int box = 0; box < BOXES; ++box) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const u64 a = by_column(query + box * BOX_BYTES + step * 32);
      const u64 b = by_column(tile + box * BOX_BYTES + step * 32);
      if (box == 0 && step == 0)
        score_step<false>(scores, a, b);
      else
        score_step<true>(scores, a, b);
    }
  }
  products_commit();
}

// Turn the scores of one tile into shares, and store them where its rotated columns were.
// `before`: the maximum so far. Sets s.most to the new one.
DEVICE void share(float (&scores)[32], Heads& own, Shared& s, int buffer, const float (&before)[2],
                  int valid, float scale, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  u8* target = s.tile[buffer] + (BOXES - 1) * BOX_BYTES;
  sync_threads(OWN + group, 128);  // all warps have read the rotated columns
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = before[half];
#pragma unroll
    for (int keys = 0; keys < 8; ++keys) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = scores[4 * keys + 2 * half + i];
        x = keys * 8 + lane % 4 * 2 + i < valid ? x * scale : NOTHING;
        most = fmaxf(most, x);
      }
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const int row = warp * 16 + lane / 4 + 8 * half;
    float sum = 0.0f;
#pragma unroll
    for (int keys = 0; keys < 8; ++keys) {
      const float low = exp2_fast(scores[4 * keys + 2 * half] - most);
      const float high = exp2_fast(scores[4 * keys + 2 * half + 1] - most);
      sum += low + high;
      *reinterpret_cast<u32*>(target + row * 128 + ((keys ^ row % 8) * 16) + lane % 4 * 4) =
          pack(low, high);
    }
    own.total[half] = own.total[half] * exp2_fast(own.scored[half] - most) + sum;
    own.scored[half] = most;
    if (lane % 4 == 0) s.most[row] = most;
  }
  fence_for_copies();
  sync_threads(OWN + group, 128);
}

DEVICE void load_most(const Shared& s, float (&most)[2]) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  most[0] = s.most[row];
  most[1] = s.most[row + 8];
}

// Issue the product of a tile's shares with this warpgroup's half of its columns.
DEVICE void add(Heads& own, Shared& s, int buffer, const float (&most)[2], int group) {
  float fade[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    fade[half] = exp2_fast(own.most[half] - most[half]);
    own.most[half] = most[half];
  }
#pragma unroll
  for (int i = 0; i < 128; ++i) own.acc[i] *= fade[i / 2 % 2];
  const u32 tile = shared_address(s.tile[buffer]);
  hold(own.acc);
  products_begin();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    value_step(own.acc, by_column(tile + (BOXES - 1) * BOX_BYTES + step * 32),
               by_row(tile + group * 4 * BOX_BYTES + step * 2048));
  products_commit();
}

DEVICE void release(u64* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// One segment, by the even (0) or odd (1) warpgroup. `used`: how often each buffer was filled.
template <int GROUP>
DEVICE void attend(const Arguments& p, Shared& s, const Segment& seg, u32 (&used)[2],
                   u32 query_phase) {
  Heads own;
#pragma unroll
  for (int i = 0; i < 128; ++i) own.acc[i] = 0.0f;
  own.most[0] = own.most[1] = own.scored[0] = own.scored[1] = NOTHING;
  own.total[0] = own.total[1] = 0.0f;
  float scores[32], most[2] = {NOTHING, NOTHING};
  barrier_wait(&s.query_full, query_phase);
  const int rows = seg.end - seg.first_tile * 64;
  int done = 0;  // tiles
  for (; done + 2 <= seg.tiles; done += 2) {
    const int valid = min(64, rows - (done + GROUP) * 64);
    const bool last = done + 2 + GROUP >= seg.tiles;  // no tile of mine comes after this one
    if (GROUP == 0) {
      score(scores, s, 0, used[0] & 1, valid, GROUP);
      products_wait();
      hold(scores);
      if (last) release(&s.query_empty);
      share(scores, own, s, 0, most, valid, p.scale, GROUP);
      arrive_threads(EVEN_READY, 256);
      add(own, s, 0, own.scored, GROUP);
      sync_threads(ODD_READY, 256);
      load_most(s, most);
      products_wait();
      hold(own.acc);
      release(s.empty + 0);
      add(own, s, 1, most, GROUP);
    } else {
      score(scores, s, 1, used[1] & 1, valid, GROUP);
      sync_threads(EVEN_READY, 256);
      load_most(s, most);
      products_wait();
      hold(scores);
      add(own, s, 0, most, GROUP);
      if (last) release(&s.query_empty);
      share(scores, own, s, 1, most, valid, p.scale, GROUP);
      arrive_threads(ODD_READY, 256);
      products_wait();
      hold(own.acc);
      release(s.empty + 0);
      add(own, s, 1, own.scored, GROUP);
    }
    products_wait();
    hold(own.acc);
    release(s.empty + 1);
    ++used[0];
    ++used[1];
  }
  if (done < seg.tiles) {
    if (GROUP == 0) {
      const int valid = min(64, rows - done * 64);
      score(scores, s, 0, used[0] & 1, valid, GROUP);
      products_wait();
      hold(scores);
      release(&s.query_empty);
      share(scores, own, s, 0, most, valid, p.scale, GROUP);
      arrive_threads(EVEN_READY, 256);
      add(own, s, 0, own.scored, GROUP);
    } else {
      if (done == 0) release(&s.query_empty);
      sync_threads(EVEN_READY, 256);
      load_most(s, most);
      add(own, s, 0, most, GROUP);
    }
    products_wait();
    hold(own.acc);
    release(s.empty + 0);
    ++used[0];
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = own.total[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    sum *= exp2_fast(own.scored[half] - own.most[half]);
    if (lane % 4 == 0) s.total[GROUP][warp * 16 + lane / 4 + 8 * half] = sum;
  }
  sync_threads(BOTH, 256);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + lane / 4 + 8 * half, head = blockIdx.x * 64 + row;
    const float total = s.total[0][row] + s.total[1][row];
    const float part = 1.0f / total;
    const int column = GROUP * 256 + lane % 4 * 2;
    if (seg.whole) {
      u16* target = p.out + ((long long)seg.row * HEADS + head) * LATENT + column;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        *reinterpret_cast<u32*>(target + i * 8) =
            pack(own.acc[4 * i + 2 * half] * part, own.acc[4 * i + 2 * half + 1] * part);
    } else {
      const int at = (2 * blockIdx.y + seg.begins) * HEADS + head;
      float* target = p.partial + (long long)at * LATENT + column;
#pragma unroll
      for (int i = 0; i < 32; ++i)
        *reinterpret_cast<float2*>(target + i * 8) = make_float2(
            own.acc[4 * i + 2 * half] * part, own.acc[4 * i + 2 * half + 1] * part);
      if (GROUP == 0 && lane % 4 == 0)
        p.partial_lse[at] = (own.most[half] + log2_fast(total)) * LN2;
    }
  }
  sync_threads(BOTH, 256);  // the next segment writes s.total and s.most
}

template <int GROUP>
DEVICE void attend_all(const Arguments& p, Shared& s, int first_seq, int last_seq, int first,
                       int last) {
  u32 segments = 0, used[2] = {0, 0};
  for (int seq = first_seq; seq <= last_seq; ++seq) {
    Segment own;
    if (!find(p, seq, last_seq, first, last, own)) continue;
    attend<GROUP>(p, s, own, used, segments++ & 1);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    latent_decode(const __grid_constant__ Arguments p) {
  extern __shared__ u8 memory[];
  // Swizzled tiles begin at multiples of 1,024 bytes.
  Shared& s = *reinterpret_cast<Shared*>(memory + ((1024 - shared_address(memory) % 1024) % 1024));
  const int total = p.pages[MAX_SEQS], share = p.pages[MAX_SEQS + 1];
  const int first = blockIdx.y * share, last = min(first + share, total);
  if (first >= total) return;
  int first_seq = 0, last_seq = 0;
  for (int base = 0; base < MAX_SEQS; base += THREADS) {
    const int seq = base + threadIdx.x;
    const int end = seq < MAX_SEQS ? p.pages[seq + 1] : 0x7fffffff;
    first_seq += __syncthreads_count(end <= first);
    last_seq += __syncthreads_count(end < last);
  }
  if (threadIdx.x == 0) {
    barrier_init(&s.query_full, 1);
    barrier_init(&s.query_empty, 8);
    for (int buffer = 0; buffer < 2; ++buffer) {
      barrier_init(s.empty + buffer, 8);
      barrier_init(s.full + buffer, 1);
    }
    fence_for_copies();
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) copy_all(p, s, first_seq, last_seq, first, last);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  if (group == 0)
    attend_all<0>(p, s, first_seq, last_seq, first, last);
  else
    attend_all<1>(p, s, first_seq, last_seq, first, last);
}
