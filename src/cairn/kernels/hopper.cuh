// Wrappers for instructions of compute capability 9.0 that C++ has no name for.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
  u64 words[16];
};

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

DEVICE float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

DEVICE float log2_fast(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Convert two numbers and pack them, the first in the low half.
DEVICE u32 pack_halves(float low, float high) {
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

DEVICE u32 pack_bfloats(float low, float high) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// A float16 number, whatever the model's type is.
DEVICE float from_half(u16 number) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(number));
  return result;
}

// The same in the model's type.
DEVICE u32 pack(float low, float high) {
  return HALF ? pack_halves(low, high) : pack_bfloats(low, high);
}

DEVICE void unpack(u32 both, float& low, float& high) {
#if HALF
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
      : "=f"(low), "=f"(high)
      : "r"(both));
#else
  low = __uint_as_float(both << 16);
  high = __uint_as_float(both & 0xffff0000u);
#endif
}

// c += a @ b, where a is 16 x 16 and b is 16 x 8.
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a @ b, where a is 16 x 32 bytes and b is 32 x 8 signed ones.
DEVICE void multiply_bytes(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The larger one, or NaN if one is NaN.
DEVICE float largest(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Load four 8 x 8 matrices; lanes 8 i .. 8 i + 7 give the addresses of the rows of matrix i.
DEVICE void load_matrices(u32 (&result)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(address)
               : "memory");
}

DEVICE void load_transposed(u32 (&result)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(address)
               : "memory");
}

DEVICE void barrier_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Make the barrier's only arrival; its phase ends once `bytes` bytes have been copied.
DEVICE void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

DEVICE void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Wait for the end of a barrier's phase; phases are numbered 0, 1, 0, 1, ...
DEVICE void barrier_wait(u64* barrier, u32 phase = 0) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

// Make ordinary writes to shared memory, and initialised barriers, visible to copies.
DEVICE void fence_for_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Copy the map's box at (column, row) to shared memory, swizzled: within each row of 128 bytes, the
// index of a 16-byte chunk is xored with the row index modulo 8.
DEVICE void copy_box(u32 target, const TensorMap* map, int column, int row, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(target),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}

// Copy bytes to shared memory; their number and both addresses are multiples of 16.
DEVICE void copy_bytes(u32 target, const void* source, u32 bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          target),
      "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Decrement `left` and return its old value. The warp's earlier reads are ordered before it.
DEVICE int take_one(int* left) {
  int before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.s32 %0, [%1], -1;"
               : "=r"(before)
               : "r"(shared_address(left))
               : "memory");
  return before;
}

// The blocks of a cluster: how many there are, which one this is, and memory of another one.
DEVICE u32 cluster_size() {
  u32 result;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(result));
  return result;
}

DEVICE u32 cluster_rank() {
  u32 result;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(result));
  return result;
}

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

DEVICE u8* own_memory(u8* shared) { return shared; }

DEVICE u32 remote_address(const void* own, u32 rank) {
  u32 result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared_address(own)), "r"(rank));
  return result;
}

// What another block has where this one has `own`.
DEVICE uint4 load_four_remote(const void* own, u32 rank) {
  uint4 result;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
               : "r"(remote_address(own, rank))
               : "memory");
  return result;
}

DEVICE u32 load_remote(const u32* own, u32 rank) {
  u32 result;
  asm volatile("ld.shared::cluster.u32 %0, [%1];"
               : "=r"(result)
               : "r"(remote_address(own, rank))
               : "memory");
  return result;
}

DEVICE float load_remote(const float* own, u32 rank) {
  float result;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(result)
               : "r"(remote_address(own, rank))
               : "memory");
  return result;
}

DEVICE u64 load_remote(const u64* own, u32 rank) {
  u64 result;
  asm volatile("ld.shared::cluster.u64 %0, [%1];"
               : "=l"(result)
               : "r"(remote_address(own, rank))
               : "memory");
  return result;
}

// Programmatic dependent launch (pdl.py); nothing happens if the host did not ask for it.
DEVICE void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Named barriers of a block, of some of its threads.
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
DEVICE u64 by_row(u32 address) { return operand(address, 64 * 128, 1024); }

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

// Copy 16 bytes, or clear them if there is nothing to copy.
DEVICE void gather(u32 target, const void* source, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(there ? 16 : 0)
               : "memory");
}

// Arrive at a barrier once the thread's gathering copies are done.
DEVICE void arrive_after_gathering(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   shared_address(barrier))
               : "memory");
}

DEVICE void wait_for_gathering() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Give registers of a warpgroup back, or take more.
template <int COUNT>
DEVICE void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DEVICE void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Arithmetic on two numbers of the model's type at once.
#if HALF
#define PAIR "f16x2"
#else
#define PAIR "bf16x2"
#endif
DEVICE u32 add_pairs(u32 a, u32 b) {
  u32 result;
  asm("add.rn." PAIR " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

DEVICE u32 multiply_pairs(u32 a, u32 b) {
  u32 result;
  asm("mul.rn." PAIR " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

DEVICE u32 fma_pairs(u32 a, u32 b, u32 c) {
  u32 result;
  asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// bits & mask | more, in one instruction.
DEVICE u32 masked_or(u32 bits, u32 mask, u32 more) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "r"(mask), "r"(more));
  return result;
}

// Four FP8 numbers (e4m3) as float16.
DEVICE void widen_fp8(u32 four, u32& first, u32& second) {
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
      "cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(first), "=r"(second)
      : "r"(four));
}

// Load 16 bytes that are read only once.
DEVICE void load_once(u32 (&result)[4], const void* from) {
  asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
      : "l"(from));
}
