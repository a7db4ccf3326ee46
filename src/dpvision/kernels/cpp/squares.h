// The squared length of a row of numbers, in float64 throughout: a square of a float32 is exact there, and never underflows.
#pragma once
#include "doubles.h"

typedef float f4_unaligned __attribute__((vector_size(16), aligned(4)));

static inline d4 four_squares(const float* x) {
    const d4 v = __builtin_convertvector(*reinterpret_cast<const f4_unaligned*>(x), d4);
    return v * v;
}

static inline double squares_of(const float* x, int64_t count) {
    constexpr int APART = 4;  // sums side by side: one alone waits for its last addition
    d4 sums[APART] = {};
    int64_t i = 0;
    for (; i + APART * DOUBLES <= count; i += APART * DOUBLES)
        for (int s = 0; s < APART; s++) sums[s] += four_squares(x + i + s * DOUBLES);
    for (; i + DOUBLES <= count; i += DOUBLES) sums[0] += four_squares(x + i);
    double rest = 0;
    for (; i < count; i++) rest += double(x[i]) * x[i];
    const d4 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return ((all[0] + all[1]) + (all[2] + all[3])) + rest;
}
