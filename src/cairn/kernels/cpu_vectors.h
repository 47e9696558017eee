// Vectors of 16 lanes, which compilers map to the registers that the CPU has.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;

typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

template <typename V>
inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

template <typename V>
inline void store(void* to, V value) {
    std::memcpy(to, &value, sizeof(V));
}

inline f32x16 spread(float value) { return f32x16{} + value; }

inline f32x16 from_half(u16x16 half) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
    __m128i parts[2];
    std::memcpy(parts, &half, 32);
    const __m256 wide[2] = {_mm256_cvtph_ps(parts[0]), _mm256_cvtph_ps(parts[1])};
    return load<f32x16>(wide);
#else
    const u32x16 bits = __builtin_convertvector(half, u32x16);
    const f32x16 size = (f32x16)((bits & 0x7fff) << 13) * 0x1p112f;
    const u32x16 wrong = (u32x16)((bits & 0x7c00) == 0x7c00) & 0x7f800000u;  // infinite, or not a number
    return (f32x16)((u32x16)size | wrong | (bits & 0x8000) << 16);
#endif
}

inline f32x16 from_bytes(const int8_t* from) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    __m256 wide[2];
    for (int i = 0; i < 2; i++) wide[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * i))));
    return load<f32x16>(wide);
#else
    return __builtin_convertvector(load<i8x16>(from), f32x16);
#endif
}

// a * b + c, rounded once where the CPU can do that
inline f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, 64);
    std::memcpy(y, &b, 64);
    std::memcpy(z, &c, 64);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    return load<f32x16>(z);
#else
    return a * b + c;
#endif
}

// the sum of all lanes, in an order that does not depend on the CPU
inline float total(f32x16 values) {
    typedef float f32x8 __attribute__((vector_size(32)));
    typedef float f32x4 __attribute__((vector_size(16)));
    f32x8 halves[2];
    std::memcpy(halves, &values, 64);
    const f32x8 eight = halves[0] + halves[1];
    f32x4 quarters[2];
    std::memcpy(quarters, &eight, 32);
    const f32x4 four = quarters[0] + quarters[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// e to the x within 2 units of the last place; x is clipped to what float32 has an exponent for
inline f32x16 exp16(f32x16 x) {
    x = x < -87.0f ? spread(-87.0f) : x;
    x = x > 88.0f ? spread(88.0f) : x;
    const f32x16 magic = spread(12582912.0f);  // adding it rounds to a whole number
    const f32x16 whole = (x * 1.44269504f + magic) - magic;
    const f32x16 rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    f32x16 sum = spread(1.9875691500e-4f);
    for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = sum * rest + factor;
    sum = sum * rest * rest + rest + 1.0f;
    return (f32x16)((i32x16)sum + (__builtin_convertvector(whole, i32x16) << 23));
}

}  // namespace
