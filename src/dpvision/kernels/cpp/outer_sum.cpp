// The weight gradient of a linear layer with few outputs, summed over rows with a factor each: Σ_n factor_n · g_n aᵀ_n.
//
// Reading a is what takes the time, so it is read once. A run of rows is added up in registers, in float32, for two
// vectors of columns and five outputs at a time; the runs are added up in float64.
#include <algorithm>
#include <vector>

#include "channels.h"

namespace {

constexpr int64_t RUN = 32;
constexpr int64_t ENOUGH = 1 << 19;  // products; below this, waking another thread takes longer than the work
constexpr int OUTPUTS = 5;
constexpr int WIDE = 2;

// The rows whose factor is not zero, and their factor · g, five outputs after five outputs, filled up with zeros.
struct Scaled {
    std::vector<int64_t> rows;
    std::vector<float> g;
    int64_t groups;

    Scaled(int64_t count, int64_t outputs, const float* g_NO, const double* factor_N)
        : groups((outputs + OUTPUTS - 1) / OUTPUTS) {
        for (int64_t n = 0; n < count; n++)
            if (factor_N[n] != 0) rows.push_back(n);
        g.assign(groups * rows.size() * OUTPUTS, 0.0f);
        for (size_t r = 0; r < rows.size(); r++)
            for (int64_t o = 0; o < outputs; o++)
                of(o / OUTPUTS, r)[o % OUTPUTS] = float(factor_N[rows[r]] * g_NO[rows[r] * outputs + o]);
    }
    float* of(int64_t group, int64_t row) { return g.data() + (group * rows.size() + row) * OUTPUTS; }
    const float* of(int64_t group, int64_t row) const { return g.data() + (group * rows.size() + row) * OUTPUTS; }
};

// One run of rows, for one block of columns (from `a` on) and one group of outputs. `totals` has `padded` columns.
template <class Block>
void add_run(const Block& block, const float* a, int64_t columns, const int64_t* rows, int64_t run, const float* g,
             double* totals, int64_t stride) {
    v8 sums[OUTPUTS][Block::VECTORS] = {};
    for (int64_t r = 0; r < run; r++) {
        v8 x[Block::VECTORS];
        for (int v = 0; v < Block::VECTORS; v++) x[v] = block.get(a + rows[r] * columns, v);
        for (int o = 0; o < OUTPUTS; o++)
            for (int v = 0; v < Block::VECTORS; v++) sums[o][v] += x[v] * g[r * OUTPUTS + o];
    }
    for (int o = 0; o < OUTPUTS; o++)
        for (int v = 0; v < Block::VECTORS; v++) add_to(totals + o * stride + v * LANES, sums[o][v]);
}

// The next run of rows is prefetched into the second cache while this one is computed: a row's columns are too few, and
// the next row too far away, for the processor to do so by itself.
void prefetch(const float* a, int64_t columns, const int64_t* rows, int64_t run) {
    for (int64_t r = 0; r < run; r++) __builtin_prefetch(a + rows[r] * columns, 0, 2);
}

// The columns from `first` to `last`: sums_OI there. `totals` has room for all groups of outputs.
void sum_columns(const float* a, int64_t columns, int64_t first, int64_t last, const Scaled& scaled, double* totals) {
    const int64_t stride = padded(last - first), count = scaled.rows.size();
    for (int64_t r = 0; r < count; r += RUN) {
        const int64_t run = std::min(RUN, count - r), next = std::max<int64_t>(0, std::min(RUN, count - r - RUN));
        const int64_t* rows = scaled.rows.data() + r;
        const auto visit = [&](const auto& block, int64_t c) {
            prefetch(a + c, columns, rows + run, next);
            for (int64_t group = 0; group < scaled.groups; group++)
                add_run(block, a + c, columns, rows, run, scaled.of(group, r),
                        totals + group * OUTPUTS * stride + c - first, stride);
        };
        int64_t c = first;
        for (; c + WIDE * LANES <= last; c += WIDE * LANES) visit(WholeVectors<WIDE>{}, c);
        for (; c + LANES <= last; c += LANES) visit(WholeVectors<1>{}, c);
        if (c < last) visit(PartVector{int(last - c)}, c);
    }
}

}  // namespace

extern "C" void dpvision_outer_sum(int64_t count, int64_t columns, int64_t outputs, const float* a_NI,
                                   const float* g_NO, const double* factor_N, double* sum_OI, int threads) {
    constexpr int64_t SHARE = 512;  // columns; few enough for the totals of ten outputs to stay in the second cache
    const Scaled scaled(count, outputs, g_NO, factor_N);
#pragma omp parallel for num_threads(threads) schedule(static) if (count * columns * outputs >= ENOUGH)
    for (int64_t first = 0; first < columns; first += SHARE) {
        const int64_t last = std::min(columns, first + SHARE), stride = padded(last - first);
        std::vector<double> totals(scaled.groups * OUTPUTS * stride, 0.0);
        sum_columns(a_NI, columns, first, last, scaled, totals.data());
        for (int64_t o = 0; o < outputs; o++)
            std::copy_n(totals.data() + o * stride, last - first, sum_OI + o * columns + first);
    }
}
