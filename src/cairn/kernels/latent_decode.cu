// Decode over a paged cache of latent rows [LATENT | ROPE], which all heads read as keys and values.
//
// A block computes 64 heads over its share of the pages (latent.py plans the shares), as
// latent_tiles.cuh describes. One thread copies tiles. The stored log-sum-exp is in base e.
//
// The host defines HEADS (a multiple of 64), PAGE_SIZE (a multiple of 64), MAX_SEQS and HALF.

constexpr int TILES_PER_PAGE = PAGE_SIZE / 64;
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

// A part of a sequence that the block reads.
struct Segment {
  int row, first_tile, tiles, end;  // of the query; of the sequence; rows of the sequence
  bool whole, begins;
  const int* table;
};

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

// The copying thread: queries and tiles of all segments, in order.
DEVICE void copy_all(const Arguments& p, Shared& s, int first_seq, int last_seq, int first,
                     int last) {
  u32 segments = 0, used[2] = {0, 0};
  for (int seq = first_seq; seq <= last_seq; ++seq) {
    Segment own;
    if (!find(p, seq, last_seq, first, last, own)) continue;
    if (segments > 0) barrier_wait(&s.query_empty, (segments - 1) & 1);
    ++segments;
    const int head = own.row * HEADS + blockIdx.x * 64;
    copy_boxes(&p.queries, head, s.query, 0, BOXES, &s.query_full);
    int page = own.table[own.first_tile / TILES_PER_PAGE];
    for (int i = 0; i < own.tiles; ++i) {
      const int buffer = i & 1, tile = own.first_tile + i;
      const int row = (page * TILES_PER_PAGE + tile % TILES_PER_PAGE) * 64;
      if (i + 1 < own.tiles) page = own.table[(tile + 1) / TILES_PER_PAGE];
      for (int piece = 0; piece < 2; ++piece) {
        if (used[buffer] > 0) barrier_wait(&s.empty[buffer][piece], (used[buffer] - 1) & 1);
        copy_boxes(&p.tiles, row, s.tile[buffer], first_box(piece), end_box(piece),
                   &s.full[buffer][piece]);
      }
      ++used[buffer];
    }
  }
}

// The rows of a tile before the end of the sequence. Those behind it are not the sequence's: they are
// cleared, since they may hold NaN.
struct Rows {
  u8* tile;
  int count, group;

  DEVICE void arrived(int piece) {
    if (count >= 64) return;
    const int thread = threadIdx.x % 128, words = (64 - count) * 8;
    for (int box = first_box(piece); box < end_box(piece); ++box) {
      uint4* rows = reinterpret_cast<uint4*>(tile + box * BOX_BYTES + count * 128);
      for (int i = thread; i < words; i += 128) rows[i] = make_uint4(0, 0, 0, 0);
    }
    fence_for_copies();
    sync_threads(OWN + group, 128);
  }

  DEVICE bool there(int eighth, int pair, int i) const { return eighth + pair + i < count; }
};

// One segment, by the even (0) or odd (1) warpgroup.
template <int GROUP>
DEVICE void attend(const Arguments& p, Shared& s, const Segment& seg, u32 (&used)[2],
                   u32 query_phase) {
  Heads own;
  barrier_wait(&s.query_full, query_phase);
  const int rows = seg.end - seg.first_tile * 64;
  attend_tiles<GROUP>(own, s, seg.tiles, used, p.scale, [&](int tile, int buffer) {
    return Rows{s.tile[buffer], min(64, rows - tile * 64), GROUP};
  });
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
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
  if (threadIdx.x == 0) init_barriers(s, 1, 1);
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == 2) {
    shrink_registers<40>();
    if (threadIdx.x == 256) copy_all(p, s, first_seq, last_seq, first, last);
    return;
  }
  grow_registers<232>();
  if (group == 0)
    attend_all<0>(p, s, first_seq, last_seq, first, last);
  else
    attend_all<1>(p, s, first_seq, last_seq, first, last);
}
