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
