// The factors that clip units, from the squared norms of their gradient's parts; privacy/clipping.py defines them.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

// Each unit's squared norm is the sum of `parts`. Returns how many units have one that is negative or not finite; if
// any, the factors must not be used. `added` is added to a norm before it divides; `most` may be infinity.
extern "C" int64_t dpvision_clip_factors(int64_t units, int64_t parts, double below, double added, double most,
                                         double least, const double* const* norms_sq_PU, const uint8_t* real_U,
                                         double* factor_U, int) {
    std::fill_n(factor_U, units, 0.0);
    for (int64_t p = 0; p < parts; p++)
        for (int64_t u = 0; u < units; u++) factor_U[u] += norms_sq_PU[p][u];
    int64_t finite = 0;
    // Without branches, so that several square roots and divisions are computed at once.
    for (int64_t u = 0; u < units; u++) {
        finite += (factor_U[u] >= 0) & (factor_U[u] <= DBL_MAX);
        const double factor = below / (std::sqrt(factor_U[u]) + added);
        const double bounded = factor < most ? factor : most;
        factor_U[u] = real_U[u] & (bounded >= least) ? bounded : 0.0;
    }
    return units - finite;
}
