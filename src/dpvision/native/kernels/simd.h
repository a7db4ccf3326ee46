// Eight floats at a time, in the compiler's own vector type: operators work lane by lane on any processor.
#pragma once
#include <cstdint>
#include <cstring>

typedef float v8 __attribute__((vector_size(32)));
typedef float v8_unaligned __attribute__((vector_size(32), aligned(4)));
typedef double d8 __attribute__((vector_size(64)));
typedef double d8_unaligned __attribute__((vector_size(64), aligned(8)));
typedef int32_t i8x32 __attribute__((vector_size(32)));
constexpr int LANES = 8;

static inline v8 load(const float* p) { return *reinterpret_cast<const v8_unaligned*>(p); }
static inline void store(float* p, v8 v) { *reinterpret_cast<v8_unaligned*>(p) = v; }
static inline v8 all(float x) { return v8{x, x, x, x, x, x, x, x}; }
static inline v8 larger(v8 a, v8 b) { return a > b ? a : b; }
static inline v8 smaller(v8 a, v8 b) { return a < b ? a : b; }

// The first `count` lanes, the others zero: for what is left over at the end of a row.
static inline v8 load_some(const float* p, int count) {
    v8 v = {};
    std::memcpy(&v, p, sizeof(float) * count);
    return v;
}
static inline void store_some(float* p, v8 v, int count) { std::memcpy(p, &v, sizeof(float) * count); }

// `mask ? a : b` picks lane by lane; a comparison with NaN says no.
static inline v8 magnitude(v8 x) { return x < 0 ? -x : x; }
// At most / at least a bound; unlike smaller() and larger(), NaN stays NaN.
static inline v8 at_most(v8 x, float bound) { return x > bound ? all(bound) : x; }
static inline v8 at_least(v8 x, float bound) { return x < bound ? all(bound) : x; }

// e^x = (1 + tail) · 2^power with |tail| < 0.42: what exp and expm1 share. For |x| < 10^4.
struct Reduced {
    v8 tail;
    i8x32 power;
};

static inline Reduced reduce(v8 x) {
    const v8 shift = all(12582912.0f);  // 1.5 · 2^23: adding it rounds to a whole number
    v8 n = (x * 1.44269504f + shift) - shift;
    // ln 2 in two parts, the first short enough for n times it to be exact.
    v8 r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    // e^r - 1 - r over r², the polynomial with the smallest largest relative error of e^r - 1 (1.4e-8).
    v8 q = r * 0x1.6d995cp-10f + 0x1.122838p-7f;
    q = q * r + 0x1.555486p-5f;
    q = q * r + 0x1.5554b0p-3f;
    q = q * r + 0.5f;
    return {q * (r * r) + r, __builtin_convertvector(n, i8x32)};
}

// 2^n for -126 <= n <= 127.
static inline v8 power_of_two(i8x32 n) { return (v8)((n + 127) << 23); }

// e^x over the full range: infinity above 88.7, denormal numbers and then zero below -87.3, NaN for NaN.
static inline v8 exp(v8 x) {
    Reduced e = reduce(at_least(at_most(x, 89.0f), -104.0f));
    i8x32 half = e.power >> 1;  // in two steps, since 2^-150 and 2^128 are no floats
    return (1 + e.tail) * power_of_two(half) * power_of_two(e.power - half);
}

// e^x - 1 for x <= 88, with a small relative error also near zero.
static inline v8 expm1(v8 x) {
    Reduced e = reduce(at_least(x, -87.0f));
    v8 scale = power_of_two(e.power);
    return scale * e.tail + (scale - 1);
}
