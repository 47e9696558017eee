// Runs a kernel that is written against hopper.cuh on the CPU: a fiber for every thread of a block.
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

using std::min;

alignas(1024) u8 ring[232448];  // the shared memory of a block

struct Index {
  int x, y;
};
static Index threadIdx, blockIdx;

struct Meeting {
  int size, arrived = 0, round = 0;
  std::vector<void*> brought;
  explicit Meeting(int size) : size(size), brought(size) {}
};
struct Copy {
  u32 target;
  const TensorMap* map;
  int column, row;
  u64* barrier;
};
static std::vector<Meeting> warps, blocks;
static std::vector<Copy> copies;
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::mt19937 chance;

inline void yield_fiber() { swapcontext(&fibers[threadIdx.x], &scheduler); }

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
  meet(warps[threadIdx.x / 32], threadIdx.x % 32, brought, work);
}

inline void __syncthreads() { meet(blocks[0], threadIdx.x, nullptr, [](auto&) {}); }
inline void __syncwarp() { meet_warp(nullptr, [](auto&) {}); }

inline float shuffle(float value, int source) {
  struct Brought {
    float value;
    int source;
    float result;
  } own{value, source, 0};
  meet_warp(&own, [](auto& all) {
    for (void* each : all) {
      auto* lane = static_cast<Brought*>(each);
      lane->result = static_cast<Brought*>(all[lane->source])->value;
    }
  });
  return own.result;
}
inline float __shfl_sync(u32, float value, int source) { return shuffle(value, source); }
inline float __shfl_xor_sync(u32, float value, int mask) {
  return shuffle(value, threadIdx.x % 32 ^ mask);
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
inline int take_one(int* left) { return (*left)--; }

inline float wide(u16 x) {
  if (HALF) {
    _Float16 half;
    std::memcpy(&half, &x, 2);
    return half;
  }
  const u32 bits = u32(x) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
inline u16 narrow(float x) {
  if (HALF) {
    const _Float16 half = x;
    u16 result;
    std::memcpy(&result, &half, 2);
    return result;
  }
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack(float low, float high) { return u32(narrow(high)) << 16 | narrow(low); }
inline void unpack(u32 both, float& low, float& high) {
  low = wide(both & 0xffff);
  high = wide(both >> 16);
}

inline u32 shared_address(const void* pointer) { return static_cast<const u8*>(pointer) - ring; }

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
        std::memcpy(rows[row], ring + from, 16);
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

// A barrier counts arrivals in its upper half and bytes in its lower one; it is done at zero.
inline void barrier_init(u64* barrier, u32 arrivals) { *barrier = u64(arrivals) << 32; }
inline void barrier_expect(u64* barrier, u32 bytes) { *barrier += bytes - (1ull << 32); }
inline void barrier_wait(u64* barrier) {
  while (*barrier != 0) yield_fiber();
}
inline void fence_for_copies() {}

inline void copy_now(const Copy& copy, bool poison) {
  const u64* map = copy.map->words;
  for (u64 row = 0; row < map[3]; ++row) {
    for (u64 chunk = 0; chunk < map[2] / 8; ++chunk) {
      u32 to = copy.target + row * 128 + chunk * 16;
      to ^= (to >> 7 & 7) << 4;
      const u64 from = ((copy.row + row) * map[1] + copy.column + chunk * 8) * 2;
      if (poison)
        std::memset(ring + to, 0xff, 16);
      else if (copy.row + row < map[4])
        std::memcpy(ring + to, reinterpret_cast<const u8*>(map[0]) + from, 16);
    }
  }
  if (!poison) *copy.barrier -= map[2] * map[3] * 2;
}
inline void copy_box(u32 target, const TensorMap* map, int column, int row, u64* barrier) {
  if (target % 1024 || map->words[2] != 64) abort();
  copies.push_back({target, map, column, row, barrier});
  copy_now(copies.back(), true);
}

template <typename Arguments>
void (*kernel_of)(Arguments);
static const void* arguments;
static std::vector<bool> running;

// Threads take turns in an order that changes; returns false if none of them gets any further.
template <typename Arguments, void (*KERNEL)(Arguments)>
bool run_block(const Arguments& given, int threads) {
  constexpr size_t STACK = 1 << 18;
  static std::vector<std::vector<char>> stacks;
  stacks.resize(threads, std::vector<char>(STACK));
  fibers.assign(threads, ucontext_t{});
  running.assign(threads, true);
  warps.assign(threads / 32, Meeting(32));
  blocks.assign(1, Meeting(threads));
  copies.clear();
  std::memset(ring, 0xff, sizeof ring);
  arguments = &given;
  for (int i = 0; i < threads; ++i) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks[i].data();
    fibers[i].uc_stack.ss_size = STACK;
    fibers[i].uc_link = &scheduler;
    void (*entry)() = [] {
      KERNEL(*static_cast<const Arguments*>(arguments));
      running[threadIdx.x] = false;
    };
    makecontext(&fibers[i], entry, 0);
  }
  int left = threads;
  for (long turn = 0; left > 0; ++turn) {
    if (turn > 2000000) return false;
    const int first = chance() % (threads / 32);
    left = 0;
    for (int warp = 0; warp < threads / 32; ++warp) {
      for (int lane = 0; lane < 32; ++lane) {
        threadIdx.x = (first + warp) % (threads / 32) * 32 + lane;
        if (!running[threadIdx.x]) continue;
        swapcontext(&scheduler, &fibers[threadIdx.x]);
        left += running[threadIdx.x];
      }
    }
    if (!copies.empty() && chance() % 4 == 0) {
      const size_t which = chance() % copies.size();
      copy_now(copies[which], false);
      copies.erase(copies.begin() + which);
    }
  }
  return true;
}
