// The k best of many scores of each row, exactly: ties go to the lower position.
//
// The blocks of a cluster share a row, in equal parts. They find the k-th best by its bits: a
// histogram of the upper 11 bits of all scores says which value of these bits it has, one of the
// next 11 bits of the scores with that value narrows it down, and one of the last 10 ends it. Scores
// with the same upper bits are listed in shared memory, or read again if there are too many of them.
// Chosen positions are bits of a map, which gives them in ascending order.
//
// The host defines THREADS and MOST_LISTED, the scores that a block lists.

constexpr int WARPS = THREADS / 32;
constexpr int BINS = 2048;
constexpr int BINS_PER_THREAD = BINS / THREADS;
constexpr int AT_ONCE = 8;          // loads in flight
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
  u32 bins[3][BINS];  // of each digit; later the chosen places
  Entry listed[MOST_LISTED];
  u64 sums[WARPS];
  u64 total;  // chosen for sure in the upper half, candidates in the lower one
  u32 filled;
  u32 digit, wanted, members;
};

// A key as an unsigned number of the same order; both zeros have the same.
DEVICE u32 key_of(float score) {
  u32 bits = __float_as_uint(score);
  if (bits << 1 == 0) bits = 0;
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// What the block does not read of a row counts as -inf.
struct Part {
  const float* scores;  // of the row, from the first of this part
  int count, words;
};

// Call `use(key, word)` for every score, by whole warps: the lanes have the scores of one word.
template <typename Use>
DEVICE void for_all(const Part& part, Use use) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = warp; first < part.words; first += WARPS * AT_ONCE) {
    float score[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int place = (first + i * WARPS) * 32 + lane;
      score[i] = place < part.count ? part.scores[place] : -__int_as_float(0x7f800000);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * WARPS < part.words) use(key_of(score[i]), first + i * WARPS);
  }
}

// Sums of `own` of all threads before this one, and of all threads; `sums` is free afterwards.
DEVICE u64 sum_before(u64 own, Shared& s, u64& all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u64 upto = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u64 other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) s.sums[warp] = upto;
  __syncthreads();
  u64 before = 0;
  all = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    const u64 each = s.sums[i];
    if (i < warp) before += each;
    all += each;
  }
  __syncthreads();
  return before + upto - own;
}

DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The digit of the wanted-th best, by the bins of all blocks. Sets s.digit, s.wanted (how many of
// that digit are wanted) and s.members (how many there are); s.wanted is 0 if there is no score.
DEVICE void find_digit(Shared& s, int level, u32 wanted) {
  const int first = BINS - (threadIdx.x + 1) * BINS_PER_THREAD;  // the highest go to thread 0
  u32 count[BINS_PER_THREAD] = {};
  cluster_sync();
  for (u32 block = 0; block < cluster_size(); ++block)
#pragma unroll
    for (int i = 0; i < BINS_PER_THREAD; i += 4) {
      const uint4 four = load_four_remote(&s.bins[level][first + i], block);
      count[i] += four.x;
      count[i + 1] += four.y;
      count[i + 2] += four.z;
      count[i + 3] += four.w;
    }
  u64 own = 0, all;
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) own += count[i];
  u64 before = sum_before(own, s, all);
  wanted = wanted < all ? wanted : (u32)all;
  if (threadIdx.x == 0 && wanted == 0) s.wanted = 0;
  if (before < wanted && before + own >= wanted) {
#pragma unroll
    for (int i = BINS_PER_THREAD - 1; i >= 0; --i) {
      if (before < wanted && before + count[i] >= wanted) {
        s.digit = first + i;
        s.wanted = wanted - (u32)before;
        s.members = count[i];
      }
      before += count[i];
    }
  }
  __syncthreads();
}

DEVICE void add_one(u32* bin) { atomicAdd(bin, 1u); }

// Write all positions of a row that has no more than k.
DEVICE void take_all(const Arguments& p, int count, const int* table, int* positions, int* slots) {
  const int step = THREADS * cluster_size();
  for (int i = cluster_rank() * THREADS + threadIdx.x; i < p.k; i += step) {
    positions[i] = i < count ? i : -1;
    slots[i] = i < count ? table[i / p.page_size] * p.page_size + i % p.page_size : -1;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    choose_rows(const __grid_constant__ Arguments p) {
  let_successor_start();
  wait_for_predecessor();
  extern __shared__ __align__(16) u8 ring[];
  u8* memory = own_memory(ring);
  Shared& s = *reinterpret_cast<Shared*>(memory);
  u32* above = reinterpret_cast<u32*>(memory + sizeof(Shared));  // maps: better than the k-th,
  u32* equal = above + p.words;                                  // and as good, or not yet decided
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x / cluster_size(), rank = cluster_rank();
  const int count = p.limits[row];
  const int* table = p.page_table + p.seqs[row] * p.table_stride;
  int* positions = p.positions + (long long)row * p.k;
  int* slots = p.slots + (long long)row * p.k;
  if (count <= p.k) {
    take_all(p, count, table, positions, slots);
    return;
  }
  Part part;
  part.words = ((count + 31) / 32 + cluster_size() - 1) / cluster_size();
  const int begin = rank * part.words * 32;
  part.scores = p.scores + row * p.score_stride + begin;
  part.count = min(part.words * 32, count - begin);  // not positive where nothing is left

  for (int i = threadIdx.x; i < 3 * BINS; i += THREADS) s.bins[0][i] = 0;
  if (threadIdx.x == 0) s.filled = 0;
  __syncthreads();
  for_all(part, [&](u32 key, int) {
    if (key > LEAST) add_one(&s.bins[0][key >> 21]);
  });
  find_digit(s, 0, p.k);
  u32 wanted = s.wanted;
  if (wanted == 0) {  // all scores are -inf
    for (int i = rank * THREADS + threadIdx.x; i < p.k; i += THREADS * cluster_size())
      positions[i] = slots[i] = -1;
    cluster_sync();  // others may still read my bins
    return;
  }
  // Scores whose key, shifted, exceeds `prefix` are chosen; `wanted` of those that equal it are.
  u32 prefix = s.digit, shift = 21;
  const bool fits = s.bins[0][prefix] <= MOST_LISTED;
  bool lists = false;
  if (s.members != wanted) {
    lists = fits;
    for_all(part, [&](u32 key, int word) {
      const u32 better = __ballot_sync(0xffffffffu, key >> 21 > prefix);
      const bool mine = key >> 21 == prefix;
      if (mine) add_one(&s.bins[1][key >> 10 & 2047]);
      if (!fits) return;
      if (lane == 0) {
        above[word] = better;
        equal[word] = 0;
      }
      const u32 same = __ballot_sync(0xffffffffu, mine);
      if (same == 0) return;
      u32 place = 0;
      if (lane == 0) place = atomicAdd(&s.filled, (u32)__popc(same));
      place = __shfl_sync(0xffffffffu, place, 0) + __popc(same & ((1u << lane) - 1));
      if (mine) s.listed[place] = {key, word * 32 + lane};
    });
    find_digit(s, 1, wanted);
    prefix = prefix << 11 | s.digit;
    wanted = s.wanted;
    shift = 10;
    if (s.members != wanted) {
      if (lists) {
        for (int i = threadIdx.x; i < s.filled; i += THREADS) {
          const u32 key = s.listed[i].key;
          if (key >> 10 == prefix) add_one(&s.bins[2][key & 1023]);
        }
      } else {
        for_all(part, [&](u32 key, int) {
          if (key >> 10 == prefix) add_one(&s.bins[2][key & 1023]);
        });
      }
      find_digit(s, 2, wanted);
      prefix = prefix << 10 | s.digit;
      wanted = s.wanted;
      shift = 0;
    }
  }
  if (lists) {
    for (int i = threadIdx.x; i < s.filled; i += THREADS) {
      const Entry entry = s.listed[i];
      const u32 bit = 1u << entry.place % 32;
      if (entry.key >> shift > prefix) atomicOr(above + entry.place / 32, bit);
      if (entry.key >> shift == prefix) atomicOr(equal + entry.place / 32, bit);
    }
  } else {
    for_all(part, [&](u32 key, int word) {
      const u32 better = __ballot_sync(0xffffffffu, key >> shift > prefix);
      const u32 same = __ballot_sync(0xffffffffu, key >> shift == prefix);
      if (lane == 0) {
        above[word] = better;
        equal[word] = same;
      }
    });
  }
  __syncthreads();

  // Each thread has consecutive words. Of equal scores, the first `wanted` of the row are chosen.
  const int per = (part.words + THREADS - 1) / THREADS;
  const int first = min((int)threadIdx.x * per, part.words), last = min(first + per, part.words);
  u64 own = 0, all;
  for (int word = first; word < last; ++word)
    own += (u64)__popc(above[word]) << 32 | (u64)__popc(equal[word]);
  u64 before = sum_before(own, s, all);
  if (threadIdx.x == 0) s.total = all;
  cluster_sync();
  u64 earlier = 0;  // of blocks before this one
  for (int block = 0; block < rank; ++block) earlier += load_remote(&s.total, block);
  cluster_arrive();
  int* chosen = reinterpret_cast<int*>(s.bins);
  const u32 earlier_equal = min((u32)earlier, wanted);
  const u32 offset = (u32)(earlier >> 32) + earlier_equal;
  const u32 room = min((u32)all, wanted - earlier_equal);  // equal scores that this block chooses
  u32 equals = (u32)before, place = (u32)(before >> 32) + min(equals, room);
  for (int word = first; word < last; ++word) {
    u32 ties = equal[word], bits = above[word];
    for (; ties != 0 && equals < room; ++equals) {
      bits |= ties & -ties;
      ties &= ties - 1;
    }
    for (; bits != 0; bits &= bits - 1) chosen[place++] = word * 32 + __ffs(bits) - 1;
  }
  __syncthreads();
  const u32 mine = (u32)(all >> 32) + room;
  for (u32 i = threadIdx.x; i < mine; i += THREADS) {
    const int position = begin + chosen[i];
    positions[offset + i] = position;
    slots[offset + i] = table[position / p.page_size] * p.page_size + position % p.page_size;
  }
  if (rank == cluster_size() - 1)
    for (u32 i = offset + mine + threadIdx.x; i < p.k; i += THREADS) positions[i] = slots[i] = -1;
  cluster_wait();  // others may still read my total
}
