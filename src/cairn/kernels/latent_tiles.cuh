// Attention of 64 heads over tiles of 64 latent rows [LATENT | ROPE] in shared memory, which all heads
// read as keys and values.
//
// Two warpgroups each own half of the output's columns. They take turns: one computes the scores and
// shares of an even tile, the other of an odd one, and both add both tiles to their columns. So one
// warpgroup's softmax runs beside the other's products. Other warps copy tiles into two buffers, each
// in two pieces: the even warpgroup's columns, and the rest. A piece is copied anew as soon as its own
// warpgroup has added it. The shares of a tile overwrite its rotated columns, which are no longer
// needed. All logarithms and exponentials are in base 2.

constexpr int LATENT = 512;
constexpr int ROPE = 64;
constexpr int BOXES = (LATENT + ROPE) / 64;
constexpr int BOX_BYTES = 64 * 128;  // 64 rows by 64 columns
constexpr int PIECE = LATENT / 128;  // boxes of the first piece of a tile; the second has the rest
constexpr int TILE_BYTES = BOXES * BOX_BYTES;
constexpr int THREADS = 384;  // two warpgroups that compute, and one that copies
constexpr float NOTHING = -3e38f;

struct Shared {
  u8 query[TILE_BYTES];
  u8 tile[2][TILE_BYTES];
  float most[64];      // maximum of each head's scores, after the newest tile
  float total[2][64];  // sums of shares, by warpgroup
  u64 query_full, query_empty;
  u64 full[2][2];   // by buffer and piece
  u64 empty[2][2];
};

enum Barrier { EVEN_READY = 1, ODD_READY = 2, BOTH = 3, OWN = 4 };

// Boxes of a piece: its first one, and the one behind it. The last box of a tile can only be copied
// once both warpgroups have read its shares.
DEVICE int first_box(int piece) { return piece * PIECE; }
DEVICE int end_box(int piece) { return piece == 0 ? PIECE : BOXES; }

DEVICE void copy_boxes(const TensorMap* map, int row, u8* target, int first, int end, u64* full) {
  barrier_expect(full, (end - first) * BOX_BYTES);
  for (int box = first; box < end; ++box)
    copy_box(shared_address(target) + box * BOX_BYTES, map, box * 64, row, full);
}

// Initialise all barriers, by one thread. So many arrivals end a phase of a full barrier, of the first
// and of the second piece of a buffer.
DEVICE void init_barriers(Shared& s, int first_arrivals, int second_arrivals) {
  barrier_init(&s.query_full, 1);
  barrier_init(&s.query_empty, 8);
  for (int buffer = 0; buffer < 2; ++buffer) {
    for (int piece = 0; piece < 2; ++piece) barrier_init(&s.empty[buffer][piece], 4);
    barrier_init(&s.full[buffer][0], first_arrivals);
    barrier_init(&s.full[buffer][1], second_arrivals);
  }
  fence_for_copies();
}

// A thread's view of its warpgroup's heads: rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Heads {
  float acc[128];   // half of the columns
  float most[2];    // that `acc` is relative to
  float total[2];   // of the tiles that this warpgroup scored,
  float scored[2];  // relative to this maximum
};

// Issue the products of all heads with one tile, each piece once it is there.
template <typename Rows>
DEVICE void score(float (&scores)[32], Shared& s, int buffer, u32 phase, Rows& rows) {
  const u32 query = shared_address(s.query), tile = shared_address(s.tile[buffer]);
  hold(scores);
#pragma unroll
  for (int box = 0; box < BOXES; ++box) {
    if (box == 0 || box == PIECE) {
      barrier_wait(&s.full[buffer][box != 0], phase);
      rows.arrived(box != 0);
      products_begin();
    }
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
template <typename Rows>
DEVICE void share(float (&scores)[32], Heads& own, Shared& s, int buffer, const float (&before)[2],
                  const Rows& rows, float scale, int group) {
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
        x = rows.there(keys * 8, lane % 4 * 2, i) ? x * scale : NOTHING;
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

// Tell that this warp no longer reads what the barrier is for.
DEVICE void release(u64* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Attention over all tiles of a segment, by the even (0) or odd (1) warpgroup. `used`: how often each
// buffer was filled. `rows_of(i, buffer)` is for tile i in its buffer: its `arrived(piece)` prepares a
// piece, then its `there` knows which rows are read. Sums go to s.total; the caller waits for the other
// warpgroup.
template <int GROUP, typename RowsOf>
DEVICE void attend_tiles(Heads& own, Shared& s, int tiles, u32 (&used)[2], float scale,
                         RowsOf rows_of) {
#pragma unroll
  for (int i = 0; i < 128; ++i) own.acc[i] = 0.0f;
  own.most[0] = own.most[1] = own.scored[0] = own.scored[1] = NOTHING;
  own.total[0] = own.total[1] = 0.0f;
  float scores[32], most[2] = {NOTHING, NOTHING};
  int done = 0;  // tiles
  for (; done + 2 <= tiles; done += 2) {
    const bool last = done + 2 + GROUP >= tiles;  // no tile of mine comes after this one
    if (GROUP == 0) {
      auto rows = rows_of(done, 0);
      score(scores, s, 0, used[0] & 1, rows);
      products_wait();
      hold(scores);
      if (last) release(&s.query_empty);
      share(scores, own, s, 0, most, rows, scale, GROUP);
      arrive_threads(EVEN_READY, 256);
      add(own, s, 0, own.scored, GROUP);
      products_wait();
      hold(own.acc);
      release(&s.empty[0][GROUP]);
      sync_threads(ODD_READY, 256);
      load_most(s, most);
      add(own, s, 1, most, GROUP);
    } else {
      auto rows = rows_of(done + 1, 1);
      score(scores, s, 1, used[1] & 1, rows);
      sync_threads(EVEN_READY, 256);
      load_most(s, most);
      products_wait();
      hold(scores);
      add(own, s, 0, most, GROUP);
      if (last) release(&s.query_empty);
      share(scores, own, s, 1, most, rows, scale, GROUP);
      arrive_threads(ODD_READY, 256);
      products_wait();
      hold(own.acc);
      release(&s.empty[0][GROUP]);
      add(own, s, 1, own.scored, GROUP);
    }
    products_wait();
    hold(own.acc);
    release(&s.empty[1][GROUP]);
    ++used[0];
    ++used[1];
  }
  if (done < tiles) {
    if (GROUP == 0) {
      auto rows = rows_of(done, 0);
      score(scores, s, 0, used[0] & 1, rows);
      products_wait();
      hold(scores);
      release(&s.query_empty);
      share(scores, own, s, 0, most, rows, scale, GROUP);
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
    release(&s.empty[0][GROUP]);
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
}
