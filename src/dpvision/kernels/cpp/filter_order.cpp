// From (taps, in, out), the order in which gradients of filters are added up, to (out, in, taps), that of a weight.
#include <algorithm>
#include <cstdint>

// Eight outputs are a line of the cache, which is read once; their filters are written one behind the other.
extern "C" void dpvision_filter_order(int64_t taps, int64_t inputs, int64_t outputs, const double* sums_KIO,
                                      double* weight_OIK, int threads) {
    constexpr int64_t LINE = 8;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < outputs; first += LINE)
        for (int64_t i = 0; i < inputs; i++)
            for (int64_t k = 0; k < taps; k++) {
                const double* from = sums_KIO + (k * inputs + i) * outputs;
                for (int64_t o = first; o < std::min(outputs, first + LINE); o++)
                    weight_OIK[(o * inputs + i) * taps + k] = from[o];
            }
}
