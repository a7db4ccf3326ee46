// Four float64 at a time, and the 64-bit words that they are made from. Functions are accurate to about a unit in the
// last place; polynomials interpolate at Chebyshev's points, with relative errors below 2^-55.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX__
#include <immintrin.h>
#endif

typedef double d4 __attribute__((vector_size(32)));
typedef uint64_t u4 __attribute__((vector_size(32)));
constexpr int DOUBLES = 4;

// The first `count` lanes; the others are zero. Memory may hold words now and doubles later, so it is copied.
static inline u4 load_words(const void* p, int count) {
    u4 words = {};
    std::memcpy(&words, p, sizeof(uint64_t) * count);
    return words;
}
static inline d4 load_doubles(const double* p, int count) { return (d4)load_words(p, count); }
static inline void store_doubles(void* p, d4 x, int count) { std::memcpy(p, &x, sizeof(double) * count); }

// Calls `visit(i, lanes)` for vectors of whole lanes, whose copies are then single instructions, and once for the rest.
template <class Visit>
static inline void for_vectors(int64_t first, int64_t last, Visit&& visit) {
    int64_t i = first;
    for (; i + DOUBLES <= last; i += DOUBLES) visit(i, DOUBLES);
    if (i < last) visit(i, int(last - i));
}

#ifdef __AVX__
static inline d4 square_root(d4 x) { return _mm256_sqrt_pd(x); }
#else
static inline d4 square_root(d4 x) { return d4{std::sqrt(x[0]), std::sqrt(x[1]), std::sqrt(x[2]), std::sqrt(x[3])}; }
#endif

// The nearest double to each word. Its halves become the low bits of 2^84 and 2^52; only the last sum rounds.
static inline d4 from_unsigned(u4 words) {
    const d4 high = (d4)((words >> 32) | 0x4530000000000000), low = (d4)((words & 0xffffffff) | 0x4330000000000000);
    return (high - (0x1p84 + 0x1p52)) + low;
}
// The same for words that are two's complements: the sign bit is flipped, which adds 2^63.
static inline d4 from_signed(u4 words) {
    const d4 high = (d4)((words >> 32) ^ 0x4530000080000000), low = (d4)((words & 0xffffffff) | 0x4330000000000000);
    return (high - (0x1p84 + 0x1p63 + 0x1p52)) + low;
}

// log(1 + f) for 1 + f between √½ and √2, plus `more`, which is small. A series in s = f / (2 + f), written so that f,
// the largest term, is added last.
static inline d4 log1p_near_one(d4 f, d4 more) {
    const d4 s = f / (f + 2), z = s * s, half_square = f * f * 0.5;
    d4 p = z * 0x1.2b5900de53b32p-3 + 0x1.39fe51a7c18f9p-3;
    p = p * z + 0x1.7462b51cb66b1p-3;
    p = p * z + 0x1.c71c62e3f11e6p-3;
    p = p * z + 0x1.2492492df281ap-2;
    p = p * z + 0x1.99999999952d7p-2;
    p = p * z + 0x1.5555555555558p-1;
    return f - (half_square - (s * (half_square + p * z) + more));
}

// log(1 - x) for 0 <= x < 1, with a small relative error also near zero.
static inline d4 log_of_rest(d4 x) {
    constexpr uint64_t BITS_OF_ONE = 0x3ff0000000000000, BITS_OF_ROOT_HALF = 0x3fe6a09e667f3bcd;
    const d4 rest = 1 - x;
    // rest = 2^k · m with m between √½ and √2. The exponent field of rest / √½ is k + 1023.
    const u4 bits = (u4)rest, exponent = (bits + (BITS_OF_ONE - BITS_OF_ROOT_HALF)) >> 52;
    const d4 k = (d4)(exponent | 0x4330000000000000) - (0x1p52 + 1023);
    const d4 m = (d4)(bits - (exponent << 52) + BITS_OF_ONE);
    const d4 f = k == 0 ? -x : m - 1;  // near one nothing may be lost to the rounding of 1 - x
    // ln 2 in two parts, the first short enough for k times it to be exact.
    return k * 0x1.62e42fefa38p-1 + log1p_near_one(f, k * 0x1.ef35793c7673p-45);
}

struct Circle {
    d4 cosine, sine;
};

// Cosine and sine of 2π · w / 2^64. The word's distance to the nearest quarter turn is exact, so both keep their full
// relative precision also next to their zeros.
static inline Circle circle(u4 words) {
    const u4 quarter = (words + (1ull << 61)) >> 62;
    const d4 angle = from_signed(words - (quarter << 62)) * (0x1.921fb54442d18p+2 * 0x1p-64), z = angle * angle;
    d4 p = z * 0x1.5e0b05bff20f2p-33 - 0x1.ae600aca92c64p-26;
    p = p * z + 0x1.71de379654304p-19;
    p = p * z - 0x1.a01a019e83816p-13;
    p = p * z + 0x1.1111111110bb2p-7;
    p = p * z - 0x1.5555555555555p-3;
    const d4 sine = p * z * angle + angle;
    d4 q = z * -0x1.907d8f29fe831p-37 + 0x1.1eeb68cd22f56p-29;
    q = q * z - 0x1.27e4fa17bf139p-22;
    q = q * z + 0x1.a01a019f4e9b4p-16;
    q = q * z - 0x1.6c16c16c16967p-10;
    q = q * z + 0x1.5555555555555p-5;
    const d4 cosine = 1 - (z * 0.5 - q * (z * z));
    // A quarter turn takes (cos, sin) to (−sin, cos).
    const u4 odd = quarter & 1, cosine_sign = ((quarter + 1) & 2) << 62, sine_sign = (quarter & 2) << 62;
    return {(d4)((u4)(odd ? sine : cosine) ^ cosine_sign), (d4)((u4)(odd ? cosine : sine) ^ sine_sign)};
}
