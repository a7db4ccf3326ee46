// The squared length of each unit's numbers.
#include "squares.h"

constexpr int64_t ENOUGH = 1 << 16;  // numbers; below this, waking another thread takes longer than the work

extern "C" void dpvision_unit_squares(int64_t units, int64_t entries, const float* x_UD, double* squares_U,
                                      int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (units * entries >= ENOUGH)
    for (int64_t u = 0; u < units; u++) squares_U[u] = squares_of(x_UD + u * entries, entries);
}
