// Sixteen floats, side by side: one line of the cache, one register with AVX-512, two with AVX2.
#pragma once
#include "simd.h"

constexpr int PANEL = 16;

#if defined(__AVX512F__)
typedef float v16 __attribute__((vector_size(64)));
typedef float v16_unaligned __attribute__((vector_size(64), aligned(4)));
#else
// Two registers by name: a vector that is wider than its registers the compiler puts into memory after every operation.
struct v16 {
    v8 low, high;
    float operator[](int lane) const { return lane < LANES ? low[lane] : high[lane - LANES]; }
};
static inline v16 operator+(const v16& a, const v16& b) { return {a.low + b.low, a.high + b.high}; }
static inline v16 operator-(const v16& a, const v16& b) { return {a.low - b.low, a.high - b.high}; }
static inline v16 operator*(const v16& a, const v16& b) { return {a.low * b.low, a.high * b.high}; }
static inline v16 operator*(float a, const v16& b) { return {a * b.low, a * b.high}; }

struct v16_unaligned {
    v8_unaligned low, high;
    operator v16() const { return {low, high}; }
    v16_unaligned& operator=(const v16& values) {
        low = values.low;
        high = values.high;
        return *this;
    }
};
#endif

static inline const v16_unaligned& panel_at(const float* p) { return *reinterpret_cast<const v16_unaligned*>(p); }
static inline v16_unaligned& panel_at(float* p) { return *reinterpret_cast<v16_unaligned*>(p); }
