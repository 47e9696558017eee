// Attention over window and selected pages, for blocks of neighbouring rows of one sequence.
//
// A block builds the union of the pages that its rows selected and reads each page once, into a
// ring in shared memory. A warp computes 16 * TILES product rows: for one row after another, all
// query heads of a kv head. It skips pages, and tiles within a page, that none of its rows
// selected. The last warp to finish a page starts the copy of the page that replaces it in the
// ring. All logarithms and exponentials are in base 2.
//
// The host defines HEADS, KV_HEADS, DIM, WIDTH, OF_KV (landmarks per kv head), TOPK, ROWS (per
// block, at most 32), TILES, STAGES, BLOCKS_PER_SM, HIDE_LAST, BY_LSE, HAS_BIAS, NULL_SPLIT,
// BOUNDED (`normalizer` bounds the mass of every page and window) and HALF (float16, not bfloat16).

constexpr int PAGE_SIZE = 64;
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int TILE_ROWS = 16 / GROUP;
constexpr int WARP_ROWS = TILE_ROWS * TILES;
constexpr int WARPS = ROWS / WARP_ROWS;
constexpr int THREADS = 32 * WARPS;
constexpr int ENTRIES = ROWS * TOPK;
constexpr int PASSES = (ENTRIES + THREADS - 1) / THREADS;
constexpr int HALF_TILE = PAGE_SIZE * 128;  // bytes of 64 columns of a page's keys
constexpr int TILE_BYTES = HALF_TILE * (DIM / 64);
constexpr int LANDMARK_HALF = 1024;
constexpr int LANDMARK_BYTES = BY_LSE ? 0 : LANDMARK_HALF * (WIDTH / 64);
constexpr int STAGE_BYTES = 2 * TILE_BYTES + LANDMARK_BYTES;
constexpr int PAGE_BYTES = 2 * TILE_BYTES + (BY_LSE ? 0 : OF_KV * WIDTH * 2);  // copied per page
constexpr int SCORED = BY_LSE ? 16 : WIDTH;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NOTHING = -3e38f;  // logarithm of a zero weight
constexpr u32 ONES = HALF ? 0x3c003c00u : 0x3f803f80u;  // two packed ones

__device__ constexpr int table_bits(int bits) {
  return (1 << bits) >= 2 * ENTRIES ? bits : table_bits(bits + 1);
}
constexpr int TABLE_BITS = table_bits(1);
constexpr int TABLE = 1 << TABLE_BITS;
static_assert(TABLE * 8 <= STAGES * STAGE_BYTES, "the table lies where pages will");
static_assert(ROWS <= 32 && WARPS >= 1 && GROUP <= 8 && WARP_ROWS * WARPS == ROWS, "rows");

struct Arguments {
  TensorMap tiles;      // the pool as [-1, DIM], in boxes of one page by 64 columns
  TensorMap landmarks;  // vectors as [-1, WIDTH], in boxes of OF_KV landmarks by 64 columns
  const u16* query;     // [rows, HEADS, DIM]
  const u16* scoring;   // [rows, HEADS, WIDTH]
  const float* bias;    // [pages, KV_HEADS * OF_KV]
  const int* selected;  // [rows, KV_HEADS, TOPK], places in the sequence; negative for none
  const int* page_table;
  const int* cu_query;
  const int* block_seq;
  const int* block_begin;
  const u16* window_out;  // [rows, HEADS, DIM]
  const float* window_lse;
  const float* normalizer;
  u16* out;
  int* counts;  // [blocks, KV_HEADS] number of pages in the union
  long long query_stride;
  long long scoring_stride;
  long long table_stride;
  float scale;  // of logits and scores, in base 2
};

// The data behind the ring in shared memory.
struct Union {
  u64 full[ENTRIES];  // one barrier per page, used once, so warps may be any distance apart
  int pages[ENTRIES];
  u32 readers[ENTRIES];  // bit r is set if row r of the block reads the page
  int left[ENTRIES];     // warps that have yet to read the page
  int found[PASSES * WARPS];
};

DEVICE u32 ones(int bits) { return 0xffffffffu >> (32 - bits); }

// Build the union of the pages in `selected` with an open-addressing hash table; return its size.
// The order alternates between rows, so that every warp always finds pages of its own.
DEVICE int unite(const Arguments& p, int seq, int first, int rows, int kv_head, u8* ring,
                 Union* all) {
  int* keys = reinterpret_cast<int*>(ring);
  u32* readers = reinterpret_cast<u32*>(ring) + TABLE;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  for (int i = thread; i < TABLE; i += THREADS) {
    keys[i] = -1;
    readers[i] = 0;
  }
  int index[PASSES], place[PASSES];
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int entry = pass * THREADS + thread, row = entry % ROWS, slot = entry / ROWS;
    index[pass] = -1;
    if (slot < TOPK && row < rows)
      index[pass] = p.selected[((long long)(first + row) * KV_HEADS + kv_head) * TOPK + slot];
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = (pass * THREADS + thread) % ROWS;
    if (index[pass] < 0) continue;
    u32 at = (index[pass] * 2654435769u) >> (32 - TABLE_BITS);
    while (true) {
      const int before = atomicCAS(keys + at, -1, index[pass]);
      if (before == -1 || before == index[pass]) break;
      at = (at + 1) % TABLE;
    }
    atomicOr(readers + at, 1u << row);
    place[pass] = at;
  }
  __syncthreads();
  u32 reads[PASSES], seen[PASSES];  // seen: lanes that are the first to list their page
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    const int row = (pass * THREADS + thread) % ROWS;
    reads[pass] = index[pass] < 0 ? 0 : readers[place[pass]];
    const bool is_first = index[pass] >= 0 && (reads[pass] & ((1u << row) - 1)) == 0;
    seen[pass] = __ballot_sync(0xffffffffu, is_first);
    if (lane == 0) all->found[pass * WARPS + warp] = __popc(seen[pass]);
  }
  __syncthreads();
  int count = 0;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass) {
    int before = count;
    for (int other = 0; other < WARPS; ++other) {
      const int found = all->found[pass * WARPS + other];
      before += other < warp ? found : 0;
      count += found;
    }
    if ((seen[pass] >> lane & 1) == 0) continue;
    const int i = before + __popc(seen[pass] & ((1u << lane) - 1));
    int left = 0;
    for (int other = 0; other < WARPS; ++other)
      left += (reads[pass] >> (other * WARP_ROWS) & ones(WARP_ROWS)) != 0;
    all->pages[i] = p.page_table[seq * p.table_stride + index[pass]];
    all->readers[i] = reads[pass];
    all->left[i] = left;
    barrier_init(all->full + i, 1);
  }
  fence_for_copies();
  __syncthreads();
  return count;
}

DEVICE void copy_page(const Arguments& p, int kv_head, u32 ring, Union* all, int i) {
  const u32 target = ring + i % STAGES * STAGE_BYTES;
  const int page = all->pages[i];
  u64* full = all->full + i;
  barrier_expect(full, PAGE_BYTES);
  if (!BY_LSE) {
    const int row = (page * KV_HEADS + kv_head) * OF_KV;
    for (int half = 0; half < WIDTH / 64; ++half)
      copy_box(target + 2 * TILE_BYTES + half * LANDMARK_HALF, &p.landmarks, half * 64, row, full);
  }
  const int row = (page * (2 * KV_HEADS) + kv_head) * PAGE_SIZE;
  for (int half = 0; half < DIM / 64; ++half)
    copy_box(target + half * HALF_TILE, &p.tiles, half * 64, row, full);
  for (int half = 0; half < DIM / 64; ++half)
    copy_box(target + TILE_BYTES + half * HALF_TILE, &p.tiles, half * 64,
             row + KV_HEADS * PAGE_SIZE, full);
}

// A lane's part of its warp's tiles: rows lane / 4 and lane / 4 + 8 of each, as in mma operands.
struct Tiles {
  u32 query[TILES][DIM / 16][4];
  u32 scoring[TILES][SCORED / 16][4];
  float acc[TILES][DIM / 8][4];
  float most[TILES][2];
  float total[TILES][2];
};

// Load the left operand of products. `upper` and `lower` point to the lane's part of its two rows;
// null gives zeros.
template <int STEPS>
DEVICE void load_left(u32 (&result)[STEPS][4], const u16* upper, const u16* lower) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const u16* from = part % 2 ? lower : upper;
      result[step][part] =
          from ? *reinterpret_cast<const u32*>(from + step * 16 + part / 2 * 8) : 0u;
    }
  }
}

// Add one page to tiles FIRST to LAST - 1. `mine`: bits of the readers, from the lane's first row
// on; `more`: the landmark's bias.
template <int FIRST, int LAST>
DEVICE void attend(Tiles& own, u32 stage, u32 mine, float more, float scale) {
  const int lane = threadIdx.x % 32;
  float mass[TILES][2];
  if (!BY_LSE) {
    // Multiply every row with all landmarks of the kv head, then pick its own head's.
    float scores[TILES][4] = {};
    const int landmark = lane % 8 % OF_KV;
    const u32 from = stage + 2 * TILE_BYTES + landmark * 128 + (lane / 8 ^ landmark) * 16;
#pragma unroll
    for (int pair = 0; pair < SCORED / 32; ++pair) {
      u32 b[4];
      load_matrices(b, (from ^ pair % 2 * 64) + pair / 2 * LANDMARK_HALF);
#pragma unroll
      for (int tile = FIRST; tile < LAST; ++tile) {
        multiply(scores[tile], own.scoring[tile][2 * pair], b[0], b[1]);
        multiply(scores[tile], own.scoring[tile][2 * pair + 1], b[2], b[3]);
      }
    }
    const int column = lane / 4 % GROUP / (GROUP / OF_KV);
#pragma unroll
    for (int tile = FIRST; tile < LAST; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float score = column % 2 ? scores[tile][2 * half + 1] : scores[tile][2 * half];
        mass[tile][half] = more + scale * __shfl_sync(0xffffffffu, score, (lane & ~3) | column / 2);
      }
    }
  }
  float shares[TILES][8][4];
  {
    const u32 from = stage + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
#pragma unroll
    for (int keys = 0; keys < 8; ++keys) {
#pragma unroll
      for (int tile = FIRST; tile < LAST; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) shares[tile][keys][i] = 0.0f;
#pragma unroll
      for (int pair = 0; pair < DIM / 32; ++pair) {
        u32 b[4];
        load_matrices(b, (from ^ pair % 2 * 64) + pair / 2 * HALF_TILE + keys * 1024);
#pragma unroll
        for (int tile = FIRST; tile < LAST; ++tile) {
          multiply(shares[tile][keys], own.query[tile][2 * pair], b[0], b[1]);
          multiply(shares[tile][keys], own.query[tile][2 * pair + 1], b[2], b[3]);
        }
      }
    }
  }
  u32 left[TILES][4][4];  // left operand of the product with values
  float factor[TILES][2], fade[TILES][2];
#pragma unroll
  for (int tile = FIRST; tile < LAST; ++tile) {
    float (&logits)[8][4] = shares[tile];
    if (HIDE_LAST && lane % 4 == 3) logits[7][1] = logits[7][3] = NOTHING;
    float inside_most[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = fmaxf(logits[0][2 * half], logits[0][2 * half + 1]);
#pragma unroll
      for (int keys = 1; keys < 8; ++keys)
        best = fmaxf(best, fmaxf(logits[keys][2 * half], logits[keys][2 * half + 1]));
      best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
      best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
      inside_most[half] = best * scale;
    }
    float sums[4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float (&two)[4] = logits[2 * step + part / 2];
        const int half = part % 2;
        left[tile][step][part] = pack(exp2_fast(two[2 * half] * scale - inside_most[half]),
                                      exp2_fast(two[2 * half + 1] * scale - inside_most[half]));
      }
      // A product with ones sums the shares of a row and gives the sum to all its lanes.
      multiply(sums, left[tile][step], ONES, ONES);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sums[2 * half];
      const bool reads = mine >> (tile * TILE_ROWS + half * (8 / GROUP)) & 1;
      float weighs = BY_LSE ? inside_most[half] + log2_fast(sum) : mass[tile][half];
      weighs = reads ? weighs : NOTHING;
      if (!BOUNDED) {
        const float most = fmaxf(own.most[tile][half], weighs);
        fade[tile][half] = exp2_fast(own.most[tile][half] - most);
        own.most[tile][half] = most;
        own.total[tile][half] *= fade[tile][half];
      }
      const float weight = exp2_fast(weighs - own.most[tile][half]);
      own.total[tile][half] += weight;
      factor[tile][half] = __fdividef(weight, sum);
    }
  }
  const u32 from = stage + TILE_BYTES + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
  for (int columns = 0; columns < DIM / 16; ++columns) {
    float page[TILES][2][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      u32 b[4];
      load_transposed(b, (from ^ columns % 4 * 32) + columns / 4 * HALF_TILE + step * 2048);
#pragma unroll
      for (int tile = FIRST; tile < LAST; ++tile) {
        multiply(page[tile][0], left[tile][step], b[0], b[1]);
        multiply(page[tile][1], left[tile][step], b[2], b[3]);
      }
    }
#pragma unroll
    for (int tile = FIRST; tile < LAST; ++tile) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& acc = own.acc[tile][2 * columns + i / 4][i % 4];
        const int half = i % 4 / 2;
        if (!BOUNDED) acc *= fade[tile][half];
        acc += page[tile][i / 4][i % 4] * factor[tile][half];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    union_attention(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) u8 ring[];
  Union* all = reinterpret_cast<Union*>(ring + STAGES * STAGE_BYTES);
  const int block = blockIdx.x, kv_head = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int seq = p.block_seq[block], begin = p.block_begin[block];
  if (begin < 0) {  // a surplus block
    if (threadIdx.x == 0) p.counts[block * KV_HEADS + kv_head] = 0;
    return;
  }
  const int first = p.cu_query[seq] + begin;
  const int rows = min(p.cu_query[seq + 1] - first, ROWS);
  const int head = kv_head * GROUP + lane / 4 % GROUP;
  const int warp_row = warp * WARP_ROWS + lane / 4 / GROUP;  // the lane's first row

  const int count = unite(p, seq, first, rows, kv_head, ring, all);
  if (threadIdx.x == 0) p.counts[block * KV_HEADS + kv_head] = count;
  if (threadIdx.x < STAGES && threadIdx.x < count)
    copy_page(p, kv_head, shared_address(ring), all, threadIdx.x);

  // Start with the window and the null split.
  Tiles own;
  const int pair = lane % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const u16 *query[2], *scoring[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + tile * TILE_ROWS + half * (8 / GROUP);
      const bool real = row < rows;
      const long long at = (long long)(first + row) * HEADS + head;
      query[half] = real ? p.query + (first + row) * p.query_stride + head * DIM + pair : nullptr;
      scoring[half] =
          real ? p.scoring + (first + row) * p.scoring_stride + head * WIDTH + pair : nullptr;
      const float window = real ? p.window_lse[at] * LOG2E : 0.0f;
      float most = window;
      if (BOUNDED) most = real ? p.normalizer[at] * LOG2E : 0.0f;
      if (NULL_SPLIT) most = fmaxf(most, 0.0f);
      const float weight = exp2_fast(window - most);
      own.most[tile][half] = most;
      own.total[tile][half] = NULL_SPLIT ? weight + exp2_fast(-most) : weight;
#pragma unroll
      for (int columns = 0; columns < DIM / 8; ++columns) {
        const u16* from = p.window_out + at * DIM + columns * 8 + pair;
        float low = 0.0f, high = 0.0f;
        if (real) unpack(*reinterpret_cast<const u32*>(from), low, high);
        own.acc[tile][columns][2 * half] = low * weight;
        own.acc[tile][columns][2 * half + 1] = high * weight;
      }
    }
    load_left(own.query[tile], query[0], query[1]);
    if (!BY_LSE) load_left(own.scoring[tile], scoring[0], scoring[1]);
  }

  const int landmark = kv_head * OF_KV + lane / 4 % GROUP / (GROUP / OF_KV);
  auto bias_of = [&](int i) {
    if (!HAS_BIAS || BY_LSE || i >= count) return 0.0f;
    return p.bias[(long long)all->pages[i] * (KV_HEADS * OF_KV) + landmark] * LOG2E;
  };
  // `wanted` marks which of 32 pages the warp has yet to read; `base` is the first page after them.
  u32 wanted = 0;
  int base = 0;
  auto next = [&] {
    while (wanted == 0) {
      if (base >= count) return count;
      const u32 readers = base + lane < count ? all->readers[base + lane] : 0;
      wanted = __ballot_sync(0xffffffffu, readers >> (warp * WARP_ROWS) & ones(WARP_ROWS));
      base += 32;
    }
    const int i = base - 33 + __ffs(wanted);
    wanted &= wanted - 1;
    return i;
  };
  int i = next();
  float more = bias_of(i);
  while (i < count) {
    const u32 readers = all->readers[i];
    const u32 mine = readers >> warp_row;
    const u32 stage = shared_address(ring) + i % STAGES * STAGE_BYTES;
    const int following = next();
    // Look up the bias one page ahead: the load takes as long as a page.
    const float following_more = bias_of(following);
    barrier_wait(all->full + i);
#if TILES == 1
    attend<0, 1>(own, stage, mine, more, p.scale);
#else
    const bool upper = readers >> (warp * WARP_ROWS) & ones(TILE_ROWS);
    const bool lower = readers >> (warp * WARP_ROWS + TILE_ROWS) & ones(TILE_ROWS);
    if (upper && lower)
      attend<0, 2>(own, stage, mine, more, p.scale);
    else if (upper)
      attend<0, 1>(own, stage, mine, more, p.scale);
    else
      attend<1, 2>(own, stage, mine, more, p.scale);
#endif
    __syncwarp();
    if (lane == 0 && take_one(all->left + i) == 1 && i + STAGES < count)
      copy_page(p, kv_head, shared_address(ring), all, i + STAGES);
    i = following;
    more = following_more;
  }

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + tile * TILE_ROWS + half * (8 / GROUP);
      if (row >= rows) continue;
      const float inverse = 1.0f / own.total[tile][half];
      u16* to = p.out + ((long long)(first + row) * HEADS + head) * DIM + pair;
#pragma unroll
      for (int columns = 0; columns < DIM / 8; ++columns) {
        const float (&acc)[4] = own.acc[tile][columns];
        *reinterpret_cast<u32*>(to + columns * 8) =
            pack(acc[2 * half] * inverse, acc[2 * half + 1] * inverse);
      }
    }
  }
}
