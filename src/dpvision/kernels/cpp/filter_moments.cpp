// Of each unit's gradient e of each filter: its squared length, its sum and its inner product with the filter's z.
// In float64 throughout, where the product of two float32 is exact.
#include "squares.h"

namespace {

constexpr int64_t ENOUGH = 1 << 16;  // numbers; below this, waking another thread takes longer than the work
constexpr int MOMENTS = 3;

struct Moments {
    d4 squares = {}, sum = {}, inner = {};

    void add(const float* e, const float* z) {
        const d4 gradient = __builtin_convertvector(*reinterpret_cast<const f4_unaligned*>(e), d4);
        const d4 direction = __builtin_convertvector(*reinterpret_cast<const f4_unaligned*>(z), d4);
        squares += gradient * gradient;
        sum += gradient;
        inner += gradient * direction;
    }

    void add(const Moments& other) {
        squares += other.squares;
        sum += other.sum;
        inner += other.inner;
    }
};

// What is left over at the end of a row, with zeros behind it.
void add_some(Moments& moments, const float* e, const float* z, int64_t count) {
    float last_e[DOUBLES] = {}, last_z[DOUBLES] = {};
    for (int64_t i = 0; i < count; i++) last_e[i] = e[i], last_z[i] = z[i];
    moments.add(last_e, last_z);
}

Moments moments_of(const float* e, const float* z, int64_t count) {
    constexpr int APART = 4;  // sums side by side: one alone waits for its last addition
    Moments sums[APART];
    int64_t i = 0;
    for (; i + APART * DOUBLES <= count; i += APART * DOUBLES)
        for (int s = 0; s < APART; s++) sums[s].add(e + i + s * DOUBLES, z + i + s * DOUBLES);
    for (; i + DOUBLES <= count; i += DOUBLES) sums[0].add(e + i, z + i);
    add_some(sums[1], e + i, z + i, count - i);
    sums[0].add(sums[1]);
    sums[2].add(sums[3]);
    sums[0].add(sums[2]);
    return sums[0];
}

double total(const d4& x) { return (x[0] + x[1]) + (x[2] + x[3]); }

}  // namespace

extern "C" void dpvision_filter_moments(int64_t units, int64_t outputs, int64_t depth, const float* e_UOD,
                                        const float* z_OD, double* moments_UMO, int threads) {
    // Filter after filter, so that a filter's z stays in the cache for all units.
#pragma omp parallel for num_threads(threads) schedule(static) if (units * outputs * depth >= ENOUGH)
    for (int64_t row = 0; row < units * outputs; row++) {
        const int64_t u = row % units, o = row / units;
        const Moments found = moments_of(e_UOD + (u * outputs + o) * depth, z_OD + o * depth, depth);
        double* moments_O = moments_UMO + u * MOMENTS * outputs + o;
        moments_O[0] = total(found.squares);
        moments_O[outputs] = total(found.sum);
        moments_O[2 * outputs] = total(found.inner);
    }
}
