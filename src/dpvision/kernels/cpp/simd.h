// Eight floats at a time, in the compiler's own vector type: operators work lane by lane on any processor.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX__
#include <immintrin.h>
#endif

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
#ifdef __AVX__
static inline v8 at_most(v8 x, float bound) { return _mm256_min_ps(all(bound), x); }
static inline v8 at_least(v8 x, float bound) { return _mm256_max_ps(all(bound), x); }
#else
static inline v8 at_most(v8 x, float bound) { return x > bound ? all(bound) : x; }
static inline v8 at_least(v8 x, float bound) { return x < bound ? all(bound) : x; }
#endif

// e^x = scale · (1 + tail) with |tail| < 0.42: what exp and expm1 share. For x <= 88; below -87.7 the scale is zero.
struct Reduced {
    v8 scale, tail;
};

static inline Reduced reduce(v8 x) {
    x = at_least(x, -88.0f);
    // Adding 1.5 · 2^23 rounds x / ln 2 to a whole number n, which is then in the last bits of the sum.
    const v8 shift = all(12582912.0f);
    const v8 shifted = x * 1.44269504f + shift, n = shifted - shift;
    const v8 scale = (v8)(((i8x32)shifted << 23) + (127 << 23));  // 2^n: n + 127 where a float has its exponent
    // ln 2 in two parts, the first short enough for n times it to be exact.
    const v8 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    // (e^r - 1 - r) / r², the polynomial with the smallest largest relative error of e^r - 1 (1.4e-8).
    v8 q = r * 0x1.6d995cp-10f + 0x1.122838p-7f;
    q = q * r + 0x1.555486p-5f;
    q = q * r + 0x1.5554b0p-3f;
    q = q * r + 0.5f;
    return {scale, q * (r * r) + r};
}

// e^x for x <= 88; zero below -87.7, where a float has no full precision; NaN for NaN.
static inline v8 exp(v8 x) {
    const Reduced e = reduce(x);
    return e.scale * e.tail + e.scale;
}

// e^x - 1 for x <= 88, with a small relative error also near zero.
static inline v8 expm1(v8 x) {
    const Reduced e = reduce(x);
    return e.scale * e.tail + (e.scale - 1);
}
