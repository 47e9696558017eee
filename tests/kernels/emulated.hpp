// Runs a kernel that is written against hopper.cuh on the CPU: a fiber for every thread of a block,
// or of a cluster of blocks.
//
// Instructions of a warp wait for its 32 lanes. Copies arrive late and in any order; until they do
// their target holds NaN, so that a read that did not wait, and a copy that came too early, show.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <ucontext.h>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
  u64 words[16];  // here: address, elements of a row, columns and rows of a box, rows
};

#define DEVICE inline
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __align__(bytes)
#define __launch_bounds__(...)

using std::max;
using std::min;

constexpr u32 BLOCK_BYTES = 232448;
alignas(1024) u8 ring[8 * BLOCK_BYTES];  // the shared memory of a block, or of those of a cluster

struct Index {
  int x, y, z;
};
static Index threadIdx, blockIdx, gridDim;
static int current, block_threads, cluster_blocks = 1;  // fiber; sizes of the launch

struct Meeting {
  int size, arrived = 0, round = 0;
  std::vector<void*> brought;
  explicit Meeting(int size) : size(size), brought(size) {}
};
struct Copy {
  u8* memory;  // of its block
  u32 target;
  const TensorMap* map;  // or null: bytes that follow each other
  int column, row;
  u64* barrier;
  const void* source;
  u32 bytes;
};
static std::vector<Meeting> warps, blocks;
static std::vector<Copy> copies;
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::mt19937 chance;

inline void yield_fiber() { swapcontext(&fibers[current], &scheduler); }

// Everybody brings something; the last one to arrive does the work for all.
template <typename Work>
void meet(Meeting& meeting, int place, void* brought, Work work) {
  const int round = meeting.round;
  meeting.brought[place] = brought;
  if (++meeting.arrived == meeting.size) {
    work(meeting.brought);
    meeting.arrived = 0;
    ++meeting.round;
  } else {
    while (meeting.round == round) yield_fiber();
  }
}

template <typename Work>
void meet_warp(void* brought, Work work) {
  meet(warps[current / 32], threadIdx.x % 32, brought, work);
}

inline void __syncthreads() {
  meet(blocks[current / block_threads], threadIdx.x, nullptr, [](auto&) {});
}
inline void __syncwarp() { meet_warp(nullptr, [](auto&) {}); }

template <typename Value>
Value shuffle(Value value, int source) {
  struct Brought {
    Value value;
    int source;
    Value result;
  } own{value, source, 0};
  meet_warp(&own, [](auto& all) {
    for (void* each : all) {
      auto* lane = static_cast<Brought*>(each);
      lane->result = static_cast<Brought*>(all[lane->source])->value;
    }
  });
  return own.result;
}
template <typename Value>
Value __shfl_sync(u32, Value value, int source) {
  return shuffle(value, source);
}
template <typename Value>
Value __shfl_xor_sync(u32, Value value, int mask) {
  return shuffle(value, threadIdx.x % 32 ^ mask);
}
template <typename Value>
Value __shfl_up_sync(u32, Value value, int step) {
  const int lane = threadIdx.x % 32;
  return shuffle(value, lane < step ? lane : lane - step);
}

inline u32 __ballot_sync(u32, bool vote) {
  struct Brought {
    bool vote;
    u32 result;
  } own{vote, 0};
  meet_warp(&own, [](auto& all) {
    u32 result = 0;
    for (int lane = 0; lane < 32; ++lane)
      result |= u32(static_cast<Brought*>(all[lane])->vote) << lane;
    for (void* each : all) static_cast<Brought*>(each)->result = result;
  });
  return own.result;
}

inline u32 __reduce_add_sync(u32, u32 value) {
  struct Brought {
    u32 value, result;
  } own{value, 0};
  meet_warp(&own, [](auto& all) {
    u32 sum = 0;
    for (void* each : all) sum += static_cast<Brought*>(each)->value;
    for (void* each : all) static_cast<Brought*>(each)->result = sum;
  });
  return own.result;
}

inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(u32 x) { return __builtin_ffs(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float exp2_fast(float x) { return exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }
inline int atomicCAS(int* at, int expected, int value) {
  const int before = *at;
  if (before == expected) *at = value;
  return before;
}
inline void atomicOr(u32* at, u32 value) { *at |= value; }
inline u32 atomicAdd(u32* at, u32 value) { return (*at += value) - value; }
inline u32 __float_as_uint(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline int take_one(int* left) { return (*left)--; }

inline float __uint_as_float(u32 bits) { return __int_as_float(bits); }
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 bytes = u64(high) << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; ++i)
    result |= u32(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

inline float half_to_float(u16 x) {
  _Float16 half;
  std::memcpy(&half, &x, 2);
  return half;
}
inline u16 to_half(double x) {
  const _Float16 half = x;
  u16 result;
  std::memcpy(&result, &half, 2);
  return result;
}
inline u16 to_bfloat(float x) {
  const u32 bits = __float_as_uint(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_halves(float low, float high) { return u32(to_half(high)) << 16 | to_half(low); }
inline u32 pack_bfloats(float low, float high) {
  return u32(to_bfloat(high)) << 16 | to_bfloat(low);
}
inline u32 pack(float low, float high) {
  return HALF ? pack_halves(low, high) : pack_bfloats(low, high);
}
inline float wide(u16 x) { return HALF ? half_to_float(x) : __uint_as_float(u32(x) << 16); }
inline void unpack(u32 both, float& low, float& high) {
  low = wide(both & 0xffff);
  high = wide(both >> 16);
}
inline float from_half(u16 x) { return half_to_float(x); }
inline u32 fma_pairs(u32 a, u32 b, u32 c) {
  float x[6];
  unpack(a, x[0], x[1]);
  unpack(b, x[2], x[3]);
  unpack(c, x[4], x[5]);
  return pack(double(x[0]) * x[2] + x[4], double(x[1]) * x[3] + x[5]);
}
inline u32 masked_or(u32 bits, u32 mask, u32 more) { return bits & mask | more; }
inline u32 multiply_pairs(u32 a, u32 b) { return fma_pairs(a, b, 0); }
inline u32 add_pairs(u32 a, u32 b) {
  const u32 one = pack(1, 1);
  return fma_pairs(a, one, b);
}
inline void widen_fp8(u32 four, u32& first, u32& second) {
  float numbers[4];
  for (int i = 0; i < 4; ++i) {
    const u32 byte = four >> 8 * i & 0xff, exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float most = exponent ? ldexpf(8 + mantissa, int(exponent) - 10) : ldexpf(mantissa, -9);
    numbers[i] = (byte & 0x7f) == 0x7f ? NAN : byte & 0x80 ? -most : most;
  }
  first = pack_halves(numbers[0], numbers[1]);
  second = pack_halves(numbers[2], numbers[3]);
}
inline void load_once(u32 (&result)[4], const void* from) {
  if (reinterpret_cast<u64>(from) % 16) abort();
  std::memcpy(result, from, 16);
}
inline u8* own_memory(u8* shared) { return shared + BLOCK_BYTES * (current / block_threads); }
inline u32 shared_address(const void* pointer) {
  return static_cast<const u8*>(pointer) - own_memory(ring);
}

inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Brought {
    float* c;
    const u32* a;
    u32 b[2];
  } own{c, a, {b0, b1}};
  meet_warp(&own, [](auto& all) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      auto* each = static_cast<Brought*>(all[lane]);
      const int group = lane / 4, pair = lane % 4 * 2;
      for (int part = 0; part < 4; ++part) {
        float* to = &left[group + part % 2 * 8][pair + part / 2 * 8];
        unpack(each->a[part], to[0], to[1]);
      }
      for (int part = 0; part < 2; ++part)
        unpack(each->b[part], right[pair + part * 8][group], right[pair + part * 8 + 1][group]);
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        static_cast<Brought*>(all[lane])->c[i] += sum;
      }
    }
  });
}

inline void multiply_bytes(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Brought {
    int* c;
    const u32* a;
    u32 b[2];
  } own{c, a, {b0, b1}};
  meet_warp(&own, [](auto& all) {
    int left[16][32], right[32][8];
    for (int lane = 0; lane < 32; ++lane) {
      auto* each = static_cast<Brought*>(all[lane]);
      for (int byte = 0; byte < 4; ++byte) {
        const int row = lane / 4, column = lane % 4 * 4 + byte;
        for (int part = 0; part < 4; ++part)
          left[row + part % 2 * 8][column + part / 2 * 16] = each->a[part] >> 8 * byte & 0xff;
        for (int part = 0; part < 2; ++part)
          right[column + part * 16][row] = int8_t(each->b[part] >> 8 * byte);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k)
          static_cast<Brought*>(all[lane])->c[i] += left[row][k] * right[k][column];
      }
    }
  });
}
inline float largest(float a, float b) { return a != a || b != b ? NAN : max(a, b); }

template <bool TRANSPOSED>
void load_four(u32 (&result)[4], u32 address) {
  struct Brought {
    u32* result;
    u32 address;
  } own{result, address};
  meet_warp(&own, [](auto& all) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      u16 rows[8][8];
      for (int row = 0; row < 8; ++row) {
        const u32 from = static_cast<Brought*>(all[matrix * 8 + row])->address;
        if (from % 16) abort();
        std::memcpy(rows[row], own_memory(ring) + from, 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int a = lane / 4, b = lane % 4 * 2;
        const u16 low = TRANSPOSED ? rows[b][a] : rows[a][b];
        const u16 high = TRANSPOSED ? rows[b + 1][a] : rows[a][b + 1];
        static_cast<Brought*>(all[lane])->result[matrix] = u32(high) << 16 | low;
      }
    }
  });
}
inline void load_matrices(u32 (&result)[4], u32 address) { load_four<false>(result, address); }
inline void load_transposed(u32 (&result)[4], u32 address) { load_four<true>(result, address); }

// A barrier: its phase, the arrivals that end one, and what is missing: arrivals and bytes.
struct Phases {
  u64 phase : 1, arrivals : 15, missing : 16;
  int32_t bytes : 32;
};
inline void change_barrier(u64* barrier, int arrivals, int bytes) {
  Phases& own = *reinterpret_cast<Phases*>(barrier);
  own.missing -= arrivals;
  own.bytes += bytes;
  if (own.missing != 0 || own.bytes != 0) return;
  own.phase ^= 1;
  own.missing = own.arrivals;
}
inline void barrier_init(u64* barrier, u32 arrivals) {
  *reinterpret_cast<Phases*>(barrier) = {0, arrivals, arrivals, 0};
}
inline void barrier_expect(u64* barrier, u32 bytes) { change_barrier(barrier, 1, bytes); }
inline void barrier_arrive(u64* barrier) { change_barrier(barrier, 1, 0); }
inline void barrier_wait(u64* barrier, u32 phase = 0) {
  while (reinterpret_cast<Phases*>(barrier)->phase == phase) yield_fiber();
}
inline void fence_for_copies() {}

inline void copy_now(const Copy& copy, bool poison) {
  if (copy.map == nullptr) {
    u8* to = copy.memory + copy.target;
    if (poison) {
      std::memset(to, 0xff, copy.bytes);
    } else {
      std::memcpy(to, copy.source, copy.bytes);
      change_barrier(copy.barrier, 0, -int(copy.bytes));
    }
    return;
  }
  const u64* map = copy.map->words;
  for (u64 row = 0; row < map[3]; ++row) {
    for (u64 chunk = 0; chunk < map[2] / 8; ++chunk) {
      u32 to = copy.target + row * 128 + chunk * 16;
      to ^= (to >> 7 & 7) << 4;
      const u64 from = ((copy.row + row) * map[1] + copy.column + chunk * 8) * 2;
      if (poison)
        std::memset(copy.memory + to, 0xff, 16);
      else if (copy.row + row < map[4])
        std::memcpy(copy.memory + to, reinterpret_cast<const u8*>(map[0]) + from, 16);
    }
  }
  if (!poison) change_barrier(copy.barrier, 0, -int(map[2] * map[3] * 2));
}
inline void copy_box(u32 target, const TensorMap* map, int column, int row, u64* barrier) {
  if (target % 1024 || map->words[2] != 64) abort();
  copies.push_back({own_memory(ring), target, map, column, row, barrier});
  copy_now(copies.back(), true);
}
inline void copy_bytes(u32 target, const void* source, u32 bytes, u64* barrier) {
  if (target % 16 || reinterpret_cast<u64>(source) % 16 || bytes % 16) abort();
  copies.push_back({own_memory(ring), target, nullptr, 0, 0, barrier, source, bytes});
  copy_now(copies.back(), true);
}

struct uint4 {
  u32 x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
struct float2 {
  float x, y;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
static int cluster_arrived, cluster_round;
static std::vector<int> cluster_waits;  // by fiber: the round that it waits for
inline u32 cluster_size() { return cluster_blocks; }
inline u32 cluster_rank() { return current / block_threads; }
inline void cluster_arrive() {
  cluster_waits[current] = cluster_round;
  if (++cluster_arrived == block_threads * cluster_blocks) {
    cluster_arrived = 0;
    ++cluster_round;
  }
}
inline void cluster_wait() {
  while (cluster_round == cluster_waits[current]) yield_fiber();
}
inline const u8* remote(const void* own, u32 rank) {
  return ring + BLOCK_BYTES * rank + shared_address(own);
}
inline uint4 load_four_remote(const void* own, u32 rank) {
  return *reinterpret_cast<const uint4*>(remote(own, rank));
}
template <typename Value>
Value load_remote(const Value* own, u32 rank) {
  return *reinterpret_cast<const Value*>(remote(own, rank));
}
inline void let_successor_start() {}
inline void wait_for_predecessor() {}
template <int>
void shrink_registers() {}
template <int>
void grow_registers() {}

struct Named {
  int arrived = 0, round = 0;
};
static std::vector<Named> named;  // 16 of each block
inline Named& arrive_at(int barrier, int threads) {
  Named& own = named[current / block_threads * 16 + barrier];
  if (++own.arrived == threads) {
    own.arrived = 0;
    ++own.round;
  }
  return own;
}
inline void arrive_threads(int barrier, int threads) { arrive_at(barrier, threads); }
inline void sync_threads(int barrier, int threads) {
  const int round = named[current / block_threads * 16 + barrier].round;
  const Named& own = arrive_at(barrier, threads);
  while (own.round == round) yield_fiber();
}

// Gathering copies of a thread, up to its arrival; like other copies they are done later.
struct Gathering {
  int fiber;
  u64* barrier;
  std::vector<std::pair<u8*, const void*>> copies;
  bool awaited;
};
static std::vector<Gathering> gatherings;  // those with a barrier, and awaited ones, may be done
inline Gathering& own_gathering() {
  for (Gathering& each : gatherings)
    if (each.fiber == current && each.barrier == nullptr) return each;
  gatherings.push_back({current, nullptr, {}, false});
  return gatherings.back();
}
inline void gather(u32 target, const void* source, bool there) {
  if (target % 16) abort();
  u8* to = own_memory(ring) + target;
  std::memset(to, 0xff, 16);
  own_gathering().copies.emplace_back(to, there ? source : nullptr);
}
inline void arrive_after_gathering(u64* barrier) { own_gathering().barrier = barrier; }
inline void gather_now(Gathering& gathering) {
  for (auto [to, from] : gathering.copies) {
    if (from == nullptr)
      std::memset(to, 0, 16);
    else
      std::memcpy(to, from, 16);
  }
  if (gathering.barrier != nullptr) change_barrier(gathering.barrier, 1, 0);
}
inline void wait_for_gathering() {
  for (bool all = false; !all;) {
    all = true;
    for (Gathering& each : gatherings) {
      all &= each.fiber != current;
      each.awaited |= each.fiber == current;
    }
    if (!all) yield_fiber();
  }
}

// Products of a warpgroup, which are done at once. A number of an operand in shared memory:
inline u64 operand(u32 address, u32 leading, u32 stride) {
  return u64(address) | u64(leading) << 20 | u64(stride) << 40;
}
inline u64 by_column(u32 address) { return operand(address, 16, 1024); }
inline u64 by_row(u32 address) { return operand(address, 64 * 128, 1024); }
inline float number_at(u32 address) {
  address ^= (address >> 7 & 7) << 4;
  u16 bits;
  std::memcpy(&bits, own_memory(ring) + address, 2);
  return wide(bits);
}
inline float in_column(u64 a, int row, int column) {
  return number_at((a & 0xfffff) + row / 8 * (a >> 40) + row % 8 * 128 + column * 2);
}
inline float in_row(u64 b, int row, int column) {
  return number_at((b & 0xfffff) + column / 64 * (b >> 20 & 0xfffff) + row / 8 * (b >> 40) +
                   row % 8 * 128 + column % 64 * 2);
}
static std::vector<Meeting> warpgroups;
template <int COLUMNS, bool ADD, bool BY_ROW>
void multiply_together(float* c, u64 a, u64 b) {
  struct Brought {
    float* c;
    u64 a, b;
  } own{c, a, b};
  meet(warpgroups[current / 128], threadIdx.x % 128, &own, [](auto& all) {
    const Brought& one = *static_cast<Brought*>(all[0]);
    static float left[64][16], right[16][COLUMNS];
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < 64; ++row) left[row][k] = in_column(one.a, row, k);
      for (int n = 0; n < COLUMNS; ++n)
        right[k][n] = BY_ROW ? in_row(one.b, k, n) : in_column(one.b, n, k);
    }
    for (int thread = 0; thread < 128; ++thread) {
      const Brought& each = *static_cast<Brought*>(all[thread]);
      if (each.a != one.a || each.b != one.b) abort();
      for (int i = 0; i < COLUMNS / 2; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
        float sum = ADD ? each.c[i] : 0;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        each.c[i] = sum;
      }
    }
  });
}
template <bool ADD>
void score_step(float (&c)[32], u64 a, u64 b) {
  multiply_together<64, ADD, false>(c, a, b);
}
inline void value_step(float (&c)[128], u64 a, u64 b) {
  multiply_together<256, true, true>(c, a, b);
}
inline void products_begin() {}
inline void products_commit() {}
inline void products_wait() {}
template <int COUNT>
void hold(float (&)[COUNT]) {}

static const void* arguments;
static std::vector<bool> running;

// Threads take turns in an order that changes; returns false if none of them gets any further. The
// blocks of a cluster run together, from blockIdx.x on.
template <typename Arguments, void (*KERNEL)(Arguments)>
bool run_block(const Arguments& given, int threads, int together = 1) {
  constexpr size_t STACK = 1 << 18;
  static std::vector<std::vector<char>> stacks;
  const int all = threads * together, first_block = blockIdx.x;
  block_threads = threads;
  cluster_blocks = together;
  stacks.resize(all, std::vector<char>(STACK));
  fibers.assign(all, ucontext_t{});
  running.assign(all, true);
  warps.assign(all / 32, Meeting(32));
  warpgroups.assign((all + 127) / 128, Meeting(128));
  named.assign(16 * together, Named{});
  gatherings.clear();
  blocks.assign(together, Meeting(threads));
  cluster_waits.assign(all, 0);
  cluster_arrived = 0;
  copies.clear();
  std::memset(ring, 0xff, together * BLOCK_BYTES);
  arguments = &given;
  for (int i = 0; i < all; ++i) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks[i].data();
    fibers[i].uc_stack.ss_size = STACK;
    fibers[i].uc_link = &scheduler;
    void (*entry)() = [] {
      KERNEL(*static_cast<const Arguments*>(arguments));
      running[current] = false;
    };
    makecontext(&fibers[i], entry, 0);
  }
  int left = all;
  for (long turn = 0; left > 0; ++turn) {
    if (turn > 2000000) return false;
    const int first = chance() % (all / 32);
    left = 0;
    for (int warp = 0; warp < all / 32; ++warp) {
      for (int lane = 0; lane < 32; ++lane) {
        current = (first + warp) % (all / 32) * 32 + lane;
        if (!running[current]) continue;
        threadIdx.x = current % threads;
        blockIdx.x = first_block + current / threads;
        swapcontext(&scheduler, &fibers[current]);
        left += running[current];
      }
    }
    if (!copies.empty() && chance() % 4 == 0) {
      const size_t which = chance() % copies.size();
      copy_now(copies[which], false);
      copies.erase(copies.begin() + which);
    }
    for (size_t i = gatherings.size(); i-- > 0;) {
      const bool may = gatherings[i].barrier != nullptr || gatherings[i].awaited;
      if (!may || chance() % 4 != 0) continue;
      gather_now(gatherings[i]);
      gatherings.erase(gatherings.begin() + i);
    }
  }
  blockIdx.x = first_block;
  return true;
}

// All blocks of a launch, `together` at a time: 0, or 1 if one came to a standstill, or 2 if the
// arguments have another size, or 3 if one wrote beyond the shared memory it asked for.
template <typename Given, void (*KERNEL)(const Given)>
int run_all(const Given* given, int bytes, int blocks, int shared, int threads, int together = 1) {
  if (bytes != sizeof(Given)) return 2;
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x += together) {
    if (!run_block<const Given, KERNEL>(*given, threads, together)) return 1;
    for (u32 i = 0; i < together * BLOCK_BYTES; ++i)
      if (i % BLOCK_BYTES >= shared && ring[i] != 0xff) return 3;
  }
  return 0;
}
