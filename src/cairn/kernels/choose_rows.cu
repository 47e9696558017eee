// The k best of many scores of each row, exactly: ties go to the lower position.
//
// The blocks of a cluster share a row, in equal parts. They find the k-th best by its bits: a
// histogram of the upper 11 bits of all scores says which value of these bits it has, one of the
// next 11 bits of the candidates, which have that value, narrows it down, and one of the last 10 ends
// it. Few candidates are listed in shared memory, and every block reads those of all others; many
// are read again with all scores. Chosen positions are bits of a map, which gives them in ascending
// order.
//
// The host defines THREADS and MOST_LISTED, the candidates that are listed.

constexpr int WARPS = THREADS / 32;
constexpr int BINS = 2048;
constexpr int BINS_PER_THREAD = BINS / THREADS;
constexpr int QUADS = 4;            // of scores of a thread that are loaded at once
constexpr int MOST_BLOCKS = 8;      // of a cluster
constexpr int TIES = 19;            // bits of a block's ties, where these and others are counted at once
constexpr u32 LEAST = 0x007fffffu;  // key of -inf, which is never chosen; no other has its digit

struct Arguments {
  const float* scores;    // [rows, score_stride]
  const int* limits;      // [rows] scores of each row
  const int* seqs;        // [rows] row of the page table
  const int* page_table;  // [seqs, table_stride]
  int* positions;         // [rows, k] ascending, padded with -1
  int* slots;             // [rows, k] where these rows are in the pool
  long long score_stride, table_stride;
  int k, page_size;
  int words;  // room for so many words in each map
};

struct Entry {
  u32 key;
  int place;  // in the block's part
};

struct Shared {
  u32 bins[3 * BINS];  // of each digit; later the chosen places
  Entry listed[MOST_LISTED];
  u32 keys[MOST_LISTED];  // of candidates of all blocks
  u32 sums[WARPS];
  u64 counts;  // better scores of this block in the upper half, candidates in the lower one
  u32 filled, better;
  u32 earlier;  // candidates of earlier blocks that are better than the k-th, and ties
  u32 digit, wanted, members;
};

// A score, given by its bits, as an unsigned number of the same order; both zeros have the same.
DEVICE u32 key_of(u32 bits) {
  if (bits << 1 == 0) bits = 0;
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The block's part of a row. Threads have four consecutive scores at a time.
struct Part {
  const float* scores;
  int count, words;
  u32 held[QUADS][4];  // keys of the thread's first scores

  DEVICE void load(int first) {
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int place = 4 * (first + i * THREADS + threadIdx.x);
      uint4 bits = {0, 0, 0, 0};
      if (place < count) bits = *reinterpret_cast<const uint4*>(scores + place);
      held[i][0] = place < count ? key_of(bits.x) : LEAST;
      held[i][1] = place + 1 < count ? key_of(bits.y) : LEAST;
      held[i][2] = place + 2 < count ? key_of(bits.z) : LEAST;
      held[i][3] = place + 3 < count ? key_of(bits.w) : LEAST;
    }
  }

  // Call `use(first)` for all scores, QUADS times four of each thread; these are held then.
  template <typename Use>
  DEVICE void for_held(Use use) {
    for (int first = 0; first < 8 * words; first += QUADS * THREADS) {
      if (8 * words > QUADS * THREADS) load(first);
      use(first);
    }
  }

  // Call `use(key)` for every score.
  template <typename Use>
  DEVICE void for_all(Use use) {
    for_held([&](int) {
#pragma unroll
      for (int i = 0; i < QUADS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) use(held[i][j]);
    });
  }
};

// Sums of `own` of the lanes up to this one.
DEVICE u32 sum_upto(u32 own) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(0xffffffffu, own, step);
    if (threadIdx.x % 32 >= step) own += other;
  }
  return own;
}

// Sums of `own` of all threads before this one, and of all threads.
DEVICE u32 sum_before(u32 own, Shared& s, u32& all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 upto = sum_upto(own);
  if (lane == 31) s.sums[warp] = upto;
  __syncthreads();
  const u32 warps = sum_upto(lane < WARPS ? s.sums[lane] : 0);
  const u32 before = __shfl_sync(0xffffffffu, warps, max(warp - 1, 0));
  all = __shfl_sync(0xffffffffu, warps, 31);
  return (warp ? before : 0) + upto - own;
}

DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

DEVICE void add_one(u32* bin) { atomicAdd(bin, 1u); }

// The digit of the wanted-th best, by the bins of all blocks or of this one, which has them all. Sets
// s.digit, s.wanted (how many of that digit are wanted) and s.members (how many there are); s.wanted
// is 0 if there is no score.
template <bool ALL_BLOCKS>
DEVICE void find_digit(Shared& s, int level, u32 wanted) {
  const int first = BINS - (threadIdx.x + 1) * BINS_PER_THREAD;  // the highest go to thread 0
  const u32* bins = s.bins + level * BINS + first;
  u32 count[BINS_PER_THREAD] = {};
  if (ALL_BLOCKS) {
    cluster_sync();
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; i += 2) {
      const u64* pair = reinterpret_cast<const u64*>(bins + i);
      u64 both = 0;
#pragma unroll
      for (u32 first = 0; first < MOST_BLOCKS; first += 4) {
        u64 two[4];  // all are loaded before one is needed
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
          two[j] = first + j < cluster_size() ? load_remote(pair, first + j) : 0;
        both += two[0] + two[1] + two[2] + two[3];
      }
      count[i] = (u32)both;
      count[i + 1] = (u32)(both >> 32);
    }
  } else {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; ++i) count[i] = bins[i];
  }
  u32 own = 0, all;
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) own += count[i];
  u32 before = sum_before(own, s, all);
  wanted = min(wanted, all);
  if (threadIdx.x == 0 && wanted == 0) s.wanted = 0;
  if (before < wanted && before + own >= wanted) {
#pragma unroll
    for (int i = BINS_PER_THREAD - 1; i >= 0; --i) {
      if (before < wanted && before + count[i] >= wanted) {
        s.digit = first + i;
        s.wanted = wanted - before;
        s.members = count[i];
      }
      before += count[i];
    }
  }
  __syncthreads();
}

// Scores whose key, shifted, exceeds `prefix` are chosen; `wanted` of those that equal it are.
struct Bound {
  u32 prefix, shift, wanted;

  DEVICE bool better(u32 key) const { return key >> shift > prefix; }
  DEVICE bool ties(u32 key) const { return key >> shift == prefix; }
  // The same for four keys, as bits.
  DEVICE u32 four_better(const u32 (&keys)[4]) const {
    return better(keys[0]) | better(keys[1]) << 1 | better(keys[2]) << 2 | better(keys[3]) << 3;
  }
  DEVICE u32 four_ties(const u32 (&keys)[4]) const {
    return ties(keys[0]) | ties(keys[1]) << 1 | ties(keys[2]) << 2 | ties(keys[3]) << 3;
  }
  DEVICE void narrow(const Shared& s, int bits) {
    prefix = prefix << bits | s.digit;
    shift -= bits;
    wanted = s.wanted;
  }
};

// Candidates share their upper bits with `bound`, and all blocks together can list them. Narrows the
// bound, writes the maps, and returns what earlier blocks choose and their ties, in halves.
DEVICE u64 choose_listed(Shared& s, Part& part, Bound& bound, u32 members, u32* above, u32* equal) {
  const int lane = threadIdx.x % 32;
  const u32 rank = cluster_rank();
  u32 better = 0;
  part.for_held([&](int first) {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int quad = first + i * THREADS + threadIdx.x;
      const u32 higher = bound.four_better(part.held[i]);
      better += __popc(higher);
      if (higher) atomicOr(above + quad / 8, higher << quad % 8 * 4);
      found += __popc(bound.four_ties(part.held[i]));
    }
    const u32 upto = sum_upto(found), all = __shfl_sync(0xffffffffu, upto, 31);
    if (all == 0) return;
    u32 place = 0;
    if (lane == 0) place = atomicAdd(&s.filled, all);
    place = __shfl_sync(0xffffffffu, place, 0) + upto - found;
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (bound.ties(part.held[i][j]))
          s.listed[place++] = {part.held[i][j], 4 * (first + i * THREADS + (int)threadIdx.x) + j};
  });
  better = __reduce_add_sync(0xffffffffu, better);
  if (lane == 0) atomicAdd(&s.better, better);
  __syncthreads();
  if (threadIdx.x == 0) s.counts = (u64)s.better << 32 | s.filled;
  cluster_sync();
  u32 begin[MOST_BLOCKS], all = 0, own = 0;  // first candidate of each block
  u64 chosen = 0;
#pragma unroll
  for (u32 block = 0; block < MOST_BLOCKS; ++block) {
    const u64 counts = block < cluster_size() ? load_remote(&s.counts, block) : 0;
    begin[block] = all;
    if (block < rank) chosen += counts >> 32 << 32;
    if (block == rank) own = all;
    all += (u32)counts;
  }
  for (u32 i = threadIdx.x; i < members; i += THREADS) {
    u32 block = 0, first = 0;
#pragma unroll
    for (u32 b = 1; b < MOST_BLOCKS; ++b)
      if (b < cluster_size() && i >= begin[b]) {
        block = b;
        first = begin[b];
      }
    const u32 key = load_remote(&s.listed[i - first].key, block);
    s.keys[i] = key;
    add_one(s.bins + BINS + (key >> 10 & 2047));
  }
  cluster_arrive();
  if (members != bound.wanted) {
    find_digit<false>(s, 1, bound.wanted);
    bound.narrow(s, 11);
    if (s.members != bound.wanted) {
      for (u32 i = threadIdx.x; i < members; i += THREADS)
        if (bound.ties(s.keys[i])) add_one(s.bins + 2 * BINS + (s.keys[i] & 1023));
      find_digit<false>(s, 2, bound.wanted);
      bound.narrow(s, 10);
    }
  }
  for (u32 i = threadIdx.x; i < s.filled; i += THREADS) {
    const Entry entry = s.listed[i];
    const u32 bit = 1u << entry.place % 32;
    if (bound.better(entry.key)) atomicOr(above + entry.place / 32, bit);
    if (bound.ties(entry.key)) atomicOr(equal + entry.place / 32, bit);
  }
  u32 earlier = 0;
  for (u32 i = threadIdx.x; i < own; i += THREADS)
    earlier += bound.better(s.keys[i]) ? 1u << TIES : bound.ties(s.keys[i]) ? 1u : 0u;
  earlier = __reduce_add_sync(0xffffffffu, earlier);
  if (lane == 0 && earlier != 0) atomicAdd(&s.earlier, earlier);
  __syncthreads();
  return chosen + ((u64)(s.earlier >> TIES) << 32 | (s.earlier & ((1u << TIES) - 1)));
}

// The same for any number of candidates; what earlier blocks choose is not known yet.
DEVICE void choose_any(Shared& s, Part& part, Bound& bound, u32 members, u32* above, u32* equal) {
  if (members != bound.wanted) {
    part.for_all([&](u32 key) {
      if (bound.ties(key)) add_one(s.bins + BINS + (key >> 10 & 2047));
    });
    find_digit<true>(s, 1, bound.wanted);
    bound.narrow(s, 11);
    if (s.members != bound.wanted) {
      part.for_all([&](u32 key) {
        if (bound.ties(key)) add_one(s.bins + 2 * BINS + (key & 1023));
      });
      find_digit<true>(s, 2, bound.wanted);
      bound.narrow(s, 10);
    }
  }
  part.for_held([&](int first) {
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int quad = first + i * THREADS + threadIdx.x;
      const u32 higher = bound.four_better(part.held[i]), same = bound.four_ties(part.held[i]);
      if (higher) atomicOr(above + quad / 8, higher << quad % 8 * 4);
      if (same) atomicOr(equal + quad / 8, same << quad % 8 * 4);
    }
  });
  __syncthreads();
}

// Write all positions of a row that has no more than k, or none.
DEVICE void take_first(const Arguments& p, int count, const int* table, int* positions,
                       int* slots) {
  const int step = THREADS * cluster_size();
  for (int i = cluster_rank() * THREADS + threadIdx.x; i < p.k; i += step) {
    positions[i] = i < count ? i : -1;
    slots[i] = i < count ? table[i / p.page_size] * p.page_size + i % p.page_size : -1;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    choose_rows(const __grid_constant__ Arguments p) {
  let_successor_start();
  extern __shared__ __align__(16) u8 ring[];
  u8* memory = own_memory(ring);
  Shared& s = *reinterpret_cast<Shared*>(memory);
  u32* above = reinterpret_cast<u32*>(memory + sizeof(Shared));  // maps: better than the k-th,
  u32* equal = above + p.words;                                  // and as good
  for (int i = threadIdx.x; i < 3 * BINS; i += THREADS) s.bins[i] = 0;
  for (int i = threadIdx.x; i < 2 * p.words; i += THREADS) above[i] = 0;  // both maps
  if (threadIdx.x == 0) s.filled = s.better = s.earlier = 0;
  wait_for_predecessor();
  const int row = blockIdx.x / cluster_size(), rank = cluster_rank();
  const int count = p.limits[row];
  const int* table = p.page_table + p.seqs[row] * p.table_stride;
  int* positions = p.positions + (long long)row * p.k;
  int* slots = p.slots + (long long)row * p.k;
  if (count <= p.k) {
    take_first(p, count, table, positions, slots);
    return;
  }
  Part part;
  part.words = ((count + 31) / 32 + cluster_size() - 1) / cluster_size();
  const int begin = rank * part.words * 32;
  part.scores = p.scores + row * p.score_stride + begin;
  part.count = min(part.words * 32, count - begin);  // not positive where nothing is left
  part.load(0);
  __syncthreads();
  part.for_all([&](u32 key) {
    if (key > LEAST) add_one(s.bins + (key >> 21));
  });
  find_digit<true>(s, 0, p.k);
  if (s.wanted == 0) {  // all scores are -inf
    take_first(p, 0, table, positions, slots);
    cluster_sync();  // others may still read my bins
    return;
  }
  Bound bound = {s.digit, 21, s.wanted};
  const u32 members = s.members;
  const bool lists = members <= MOST_LISTED;
  u64 earlier = 0;
  if (lists)
    earlier = choose_listed(s, part, bound, members, above, equal);
  else
    choose_any(s, part, bound, members, above, equal);

  // Each thread has consecutive words. Of equal scores, the first `wanted` of the row are chosen.
  const int per = (part.words + THREADS - 1) / THREADS;
  const int first = min((int)threadIdx.x * per, part.words), last = min(first + per, part.words);
  u32 own = 0, all;
  for (int word = first; word < last; ++word)
    own += (u32)__popc(above[word]) << TIES | (u32)__popc(equal[word]);
  const u32 before = sum_before(own, s, all), ties = all & ((1u << TIES) - 1);
  if (!lists) {
    if (threadIdx.x == 0) s.counts = (u64)(all >> TIES) << 32 | ties;
    cluster_sync();
    for (int block = 0; block < rank; ++block) earlier += load_remote(&s.counts, block);
    cluster_arrive();
  }
  int* chosen = reinterpret_cast<int*>(s.bins);
  const u32 earlier_ties = min((u32)earlier, bound.wanted);
  const u32 offset = (u32)(earlier >> 32) + earlier_ties;
  const u32 room = min(ties, bound.wanted - earlier_ties);  // ties that this block chooses
  u32 tie = before & ((1u << TIES) - 1), place = (before >> TIES) + min(tie, room);
  for (int word = first; word < last; ++word) {
    u32 bits = above[word];
    for (u32 same = equal[word]; same != 0 && tie < room; same &= same - 1, ++tie)
      bits |= same & -same;
    for (; bits != 0; bits &= bits - 1) chosen[place++] = word * 32 + __ffs(bits) - 1;
  }
  __syncthreads();
  const u32 mine = (all >> TIES) + room;
  for (u32 i = threadIdx.x; i < mine; i += THREADS) {
    const int position = begin + chosen[i];
    positions[offset + i] = position;
    slots[offset + i] = table[position / p.page_size] * p.page_size + position % p.page_size;
  }
  if (rank == cluster_size() - 1)
    for (u32 i = offset + mine + threadIdx.x; i < p.k; i += THREADS) positions[i] = slots[i] = -1;
  cluster_wait();  // others may still read my memory
}
