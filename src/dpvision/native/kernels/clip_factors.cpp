// The factors that clip units, from the squared norms of their gradient's parts: see grads/clip.py for what they must be.
#include <cmath>
#include <cstdint>

// Each unit's squared norm is the sum of `parts`. Returns how many units have one that is not finite; the factors are
// good for nothing then. `added` is what goes onto a norm before it divides; without a `most`, give infinity.
extern "C" int64_t dpvision_clip_factors(int64_t units, int64_t parts, const double* const* norms_sq_PU,
                                         const bool* real_U, double below, double added, double most,
                                         double* factor_U) {
    int64_t broken = 0;
    for (int64_t u = 0; u < units; u++) {
        double norm_sq = 0;
        for (int64_t p = 0; p < parts; p++) norm_sq += norms_sq_PU[p][u];
        broken += !std::isfinite(norm_sq);
        const double factor = below / (std::sqrt(norm_sq) + added);
        factor_U[u] = !real_U[u] ? 0.0 : factor < most ? factor : most;
    }
    return broken;
}
