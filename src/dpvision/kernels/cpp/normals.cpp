// Standard normals by Box–Muller in float64, and their release: rounded to a grid, added to a sum, divided.
#include <algorithm>
#include <cfloat>

#include "doubles.h"

namespace {

constexpr int64_t PIECE = 1024;    // pairs whose radii stay in the first cache
constexpr int64_t ENOUGH = 16384;  // below this, waking another thread takes longer than the work

// √(−2·log(1 − w·2⁻⁶⁴)). Tail words come out coarse or not finite: their radii are put in afterwards.
d4 radius(u4 words) { return square_root(log_of_rest(from_unsigned(words) * 0x1p-64) * -2.0); }

struct Tails {
    const int64_t* places;
    const double* radii;
    int64_t count;
    void overwrite(double* all_radii, int64_t first, int64_t last) const {
        const int64_t* end = places + count;
        for (const int64_t* at = std::lower_bound(places, end, first); at < end && *at < last; at++)
            all_radii[*at - first] = radii[at - places];
    }
};

void piece(char* radius_words, char* angle_words, int64_t first, int64_t last, const Tails& tails) {
    double radii[PIECE];
    for_vectors(first, last, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        store_doubles(radii + (i - first), radius(load_words(radius_words + 8 * i, lanes)), lanes);
    });
    tails.overwrite(radii, first, last);
    for_vectors(first, last, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        const d4 r = load_doubles(radii + (i - first), lanes);
        const Circle point = circle(load_words(angle_words + 8 * i, lanes));
        store_doubles(radius_words + 8 * i, r * point.cosine, lanes);
        store_doubles(angle_words + 8 * i, r * point.sine, lanes);
    });
}

}  // namespace

// `words` holds the words of `pairs` radii, then those of as many angles; normals take their place.
extern "C" void dpvision_normals(int64_t pairs, int64_t tail_count, void* words, const int64_t* tail_places,
                                 const double* tail_radii, int threads) {
    const Tails tails = {tail_places, tail_radii, tail_count};
    char* radius_words = static_cast<char*>(words);
#pragma omp parallel for num_threads(threads) schedule(static) if (pairs >= ENOUGH)
    for (int64_t first = 0; first < pairs; first += PIECE)
        piece(radius_words, radius_words + 8 * pairs, first, std::min(first + PIECE, pairs), tails);
}

// Sum and noise are rounded to whole numbers of grid steps before they are added: see privacy/noise.py. `sums` are
// `parts` rows of `counts` numbers each, overwritten by the means; the normals of all of them lie in one row. Returns
// how many sums are not finite; if any, the means must not be used.
extern "C" int64_t dpvision_release(int64_t parts, double steps_per_sum, double steps_per_normal, double mean_per_step,
                                    const int64_t* counts, double* const* sums, const double* normals, int threads) {
    int64_t broken = 0;
    for (int64_t p = 0; p < parts; p++) {
        double* part = sums[p];
        const int64_t count = counts[p];
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : broken) if (count >= ENOUGH)
        for (int64_t i = 0; i < count; i++) {
            broken += !(std::fabs(part[i]) <= DBL_MAX);
            part[i] = (std::rint(part[i] * steps_per_sum) + std::rint(normals[i] * steps_per_normal)) * mean_per_step;
        }
        normals += count;
    }
    return broken;
}
