// The squared length of each unit's numbers, in float64 throughout: a square of a float32 is exact there.
#include "doubles.h"

namespace {

constexpr int64_t ENOUGH = 1 << 16;  // numbers; below this, waking another thread takes longer than the work
constexpr int APART = 4;             // sums side by side: one alone waits for its last addition

typedef float f4_unaligned __attribute__((vector_size(16), aligned(4)));

double squares_of(const float* x, int64_t count) {
    d4 sums[APART] = {};
    int64_t i = 0;
    for (; i + APART * DOUBLES <= count; i += APART * DOUBLES)
        for (int s = 0; s < APART; s++) {
            const d4 v = __builtin_convertvector(*reinterpret_cast<const f4_unaligned*>(x + i + s * DOUBLES), d4);
            sums[s] += v * v;
        }
    double rest = 0;
    for (; i < count; i++) rest += double(x[i]) * x[i];
    const d4 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return ((all[0] + all[1]) + (all[2] + all[3])) + rest;
}

}  // namespace

extern "C" void dpvision_unit_squares(int64_t units, int64_t entries, const float* x_UD, double* squares_U,
                                      int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (units * entries >= ENOUGH)
    for (int64_t u = 0; u < units; u++) squares_U[u] = squares_of(x_UD + u * entries, entries);
}
