// What the kernels that multiply few rows share: numbers of x, and results.
//
// The host defines X_HALF: x and out are float16, not bfloat16.

struct Rows {
  const u16* x;            // [rows, width]
  const u16* norm_weight;  // [width], or null: apply RMS norm to x
  int width;
  float eps;
};

struct alignas(16) Sixteen {
  u64 words[2];
};

// Copy 16 bytes at once; both addresses are multiples of 16.
DEVICE void copy_16(void* target, const void* from) {
  *static_cast<Sixteen*>(target) = *static_cast<const Sixteen*>(from);
}

DEVICE float wide_of(u16 number) {
  return X_HALF ? from_half(number) : __uint_as_float(u32(number) << 16);
}

DEVICE u16 narrow_of(float number) {
  return X_HALF ? pack_halves(number, 0) : pack_bfloats(number, 0);
}

DEVICE float silu_of(float x) { return __fdividef(x, 1 + exp2_fast(-1.4426950408889634f * x)); }

DEVICE float signed_byte(u32 last) { return float(int(last << 24) >> 24); }

DEVICE float summed(float x, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffff, x, mask);
  return x;
}

// Load some bytes: 1, 2 or 4.
template <int BYTES>
DEVICE u32 load_few(const u8* from) {
  if (BYTES == 4) return *reinterpret_cast<const u32*>(from);
  return BYTES == 2 ? *reinterpret_cast<const u16*>(from) : *from;
}
