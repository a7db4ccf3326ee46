// The forward pass of norm_act.h. A row takes two passes: measure each channel, then normalise.
#include <cmath>

#include "norm_act.h"

namespace {

// Mean and sum of squared deviations of every channel, put together run by run (Chan, Golub and LeVeque 1983):
// each run's deviations are taken from its own mean, so that a large offset costs no digits.
struct Spread {
    double *mean, *squares;
    double count = 0;

    static constexpr int64_t DOUBLES = 2;
    Spread(double* memory, int64_t channels) : mean(memory), squares(memory + padded(channels)) {
        std::memset(memory, 0, sizeof(double) * DOUBLES * padded(channels));
    }
    // `centre` is nearly the run's mean; `rest` and `squared` are the sums of the deviations from it, and of their
    // squares.
    void merge(int64_t c, double run, v8 centre, v8 rest, v8 squared) {
        d8_unaligned& old = *reinterpret_cast<d8_unaligned*>(mean + c);
        const d8 off = __builtin_convertvector(centre, d8) + __builtin_convertvector(rest, d8) * (1 / run) - old;
        const double share = run / (count + run);
        old += off * share;
        *reinterpret_cast<d8_unaligned*>(squares + c) +=
            __builtin_convertvector(squared, d8) + off * off * (count * share);
    }
};

// Measures act(x), and writes it down if KEEP: then the second pass need not compute it again.
template <class Act, bool KEEP>
void measure(const NormTask& task, const float* x, float* kept, Spread& spread) {
    const int64_t C = task.channels;
    for_runs(task.positions(), run_length(C), [&](int64_t first, int64_t run) {
        for_channel_blocks(C, [&](auto block, int64_t c) {
            constexpr int V = decltype(block)::VECTORS;
            const int64_t begin = first * C + c, end = (first + run) * C;
            v8 centre[V] = {}, rest[V] = {}, squared[V] = {};
            for (int64_t at = begin; at < end; at += C)
                for (int v = 0; v < V; v++) {
                    v8 a = Act::value(block.get(x + at, v));
                    if (KEEP) block.put(kept + at, v, a);
                    centre[v] += a;
                }
            for (int v = 0; v < V; v++) centre[v] *= 1.0f / run;
            for (int64_t at = begin; at < end; at += C)
                for (int v = 0; v < V; v++) {
                    v8 off = (KEEP ? block.get(kept + at, v) : Act::value(block.get(x + at, v))) - centre[v];
                    rest[v] += off;
                    squared[v] += off * off;
                }
            for (int v = 0; v < V; v++) spread.merge(c + v * LANES, run, centre[v], rest[v], squared[v]);
        });
        spread.count += run;
    });
}

void statistics_of_groups(const NormTask& task, const Spread& spread, float* mean_G, float* rstd_G) {
    const int64_t each = task.channels / task.groups;
    for (int64_t g = 0; g < task.groups; g++) {
        const double *means = spread.mean + g * each, *squares = spread.squares + g * each;
        double mean = 0, sum = 0;
        for (int64_t k = 0; k < each; k++) mean += means[k] / each;
        for (int64_t k = 0; k < each; k++) sum += squares[k] + spread.count * (means[k] - mean) * (means[k] - mean);
        mean_G[g] = mean;
        rstd_G[g] = 1 / std::sqrt(sum / (spread.count * each) + task.eps);
    }
}

// Before is what is done to a value that is read, After what is done to one that was normalised.
template <class Before, class After>
void normalise(const NormTask& task, const float* x, const ChannelTable& table, const float* residual, float* y) {
    const int64_t C = task.channels;
    for_runs(task.positions(), run_length(C), [&](int64_t first, int64_t run) {
        for_channel_blocks(C, [&](auto block, int64_t c) {
            constexpr int V = decltype(block)::VECTORS;
            ChannelVector channel[V];
            for (int v = 0; v < V; v++) channel[v] = table.at(c + v * LANES);
            for (int64_t at = first * C + c; at < (first + run) * C; at += C)
                for (int v = 0; v < V; v++) {
                    v8 normed = channel[v].normed(Before::value(block.get(x + at, v)));
                    v8 out = After::value(channel[v].affine(normed));
                    if (residual) out += block.get(residual + at, v);
                    block.put(y + at, v, out);
                }
        });
    });
}

template <class Before, class After>
void normalise_and_pool(const NormTask& task, const float* x, const ChannelTable& table, const float* residual,
                        float* y) {
    const int64_t C = task.channels;
    const Window window(task.width, C);
    for_window_runs(task, [&](int64_t first, int64_t pooled, int64_t run) {
        for_channel_blocks(C, [&](auto block, int64_t c) {
            for (int64_t k = 0; k < run; k++)
                for (int v = 0; v < decltype(block)::VECTORS; v++) {
                    const ChannelVector channel = table.at(c + v * LANES);
                    const int64_t from = first + 2 * k * C + c, to = pooled + k * C + c;
                    v8 o[4];
                    for (int q = 0; q < 4; q++) {
                        const v8 normed = channel.normed(Before::value(block.get(x + from + window.offset[q], v)));
                        o[q] = After::value(channel.affine(normed));
                    }
                    v8 out = Winner(o[0], o[1], o[2], o[3]).value;
                    if (residual) out += block.get(residual + to, v);
                    block.put(y + to, v, out);
                }
        });
    });
}

template <class Before, class After>
void finish(const NormTask& task, const float* x, const ChannelTable& table, const float* residual, float* y) {
    if (task.pool)
        normalise_and_pool<Before, After>(task, x, table, residual, y);
    else
        normalise<Before, After>(task, x, table, residual, y);
}

struct Row {
    const float *x, *gamma_C, *beta_C, *residual;
    float *y, *mean_G, *rstd_G;
};

template <class Act>
void forward_row(const NormTask& task, const Row& row) {
    static thread_local Scratch tables, doubles, activations;
    const int64_t C = padded(task.channels);
    ChannelTable table(tables.floats(ChannelTable::TABLES * C), task.channels);
    Spread spread(reinterpret_cast<double*>(doubles.floats(2 * Spread::DOUBLES * C)), task.channels);
    const bool keep = !task.norm_first && !Act::CHEAP;
    float* kept = !keep ? nullptr : task.pool ? activations.floats(task.row_floats()) : row.y;
    if (task.norm_first)
        measure<Identity, false>(task, row.x, nullptr, spread);
    else
        measure<Act, !Act::CHEAP>(task, row.x, kept, spread);
    statistics_of_groups(task, spread, row.mean_G, row.rstd_G);
    table.fill(task, row.mean_G, row.rstd_G, row.gamma_C, row.beta_C);
    if (task.norm_first)
        finish<Identity, Act>(task, row.x, table, row.residual, row.y);
    else if (keep)
        finish<Identity, Identity>(task, kept, table, row.residual, row.y);
    else if constexpr (Act::CHEAP)
        finish<Act, Identity>(task, row.x, table, row.residual, row.y);
}

}  // namespace

extern "C" void dpvision_norm_act_forward(int64_t rows, int64_t channels, int64_t height, int64_t width,
                                          int64_t groups, int64_t activation, int64_t norm_first, int64_t pool,
                                          double eps, const float* x, const float* gamma_C, const float* beta_C,
                                          const float* residual, float* y, float* mean_NG, float* rstd_NG,
                                          int threads) {
    const NormTask task{rows, channels, height, width, groups, eps, norm_first != 0, pool != 0};
    const int64_t in = task.row_floats(), out = task.pooled_row_floats();
    with_activation(int(activation), [&](auto act) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t n = 0; n < rows; n++)
            forward_row<decltype(act)>(task, {x + n * in, gamma_C, beta_C, residual ? residual + n * out : nullptr,
                                               y + n * out, mean_NG + n * groups, rstd_NG + n * groups});
    });
}
