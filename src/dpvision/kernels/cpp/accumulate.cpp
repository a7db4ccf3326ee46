// Running float64 sums of per-unit gradients with a factor each, in one pass over the memory; their order of entries.
#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t PIECE = 16384;     // entries whose running sums stay in the second cache; long enough for prefetching
constexpr int64_t ENOUGH = 1 << 17;  // products; below this, waking another thread takes longer than the work
constexpr int64_t LEAST = 64;        // entries of a thread's share: eight cache lines of sums
constexpr int TOGETHER = 8;          // units that are added while an entry is in a register

// The units whose factor is not zero: whatever the others hold is not looked at.
struct Live {
    std::vector<const float*> parts;
    std::vector<double> factors;
    Live(int64_t units, int64_t entries, const float* parts_UD, const double* factor_U) {
        for (int64_t u = 0; u < units; u++)
            if (factor_U[u] != 0) {
                parts.push_back(parts_UD + u * entries);
                factors.push_back(factor_U[u]);
            }
    }
};

// COUNT units into the entries from `first` to `last`, unit after unit.
template <int COUNT>
void add(double* total, int64_t first, int64_t last, const float* const* parts, const double* factors) {
    for (int64_t d = first; d < last; d++) {
        double sum = total[d];
        for (int u = 0; u < COUNT; u++) sum += factors[u] * double(parts[u][d]);
        total[d] = sum;
    }
}

}  // namespace

extern "C" void dpvision_add_weighted(int64_t units, int64_t entries, double* total_D, const float* parts_UD,
                                      const double* factor_U, int threads) {
    const Live live(units, entries, parts_UD, factor_U);
    const int64_t count = live.factors.size(), share = (entries + threads - 1) / threads;
    const int64_t piece = std::min(PIECE, std::max<int64_t>(LEAST, share));
#pragma omp parallel for num_threads(threads) schedule(static) if (count * entries >= ENOUGH)
    for (int64_t first = 0; first < entries; first += piece) {
        const int64_t last = std::min(entries, first + piece);
        int64_t u = 0;
        for (; u + TOGETHER <= count; u += TOGETHER)
            add<TOGETHER>(total_D, first, last, live.parts.data() + u, live.factors.data() + u);
        for (; u < count; u++) add<1>(total_D, first, last, live.parts.data() + u, live.factors.data() + u);
    }
}

// From (taps, in, out), the order in which gradients of filters are added, to (out, in, taps), that of a weight.
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
