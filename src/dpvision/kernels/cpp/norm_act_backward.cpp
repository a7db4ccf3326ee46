// The backward pass of norm_act.h, with the gradients of gamma and beta of every row.
//
// With g the gradient at the normalisation's output and n = norm(...): dgamma = Σ g·n, dbeta = Σ g, and at its input
// rstd · (gamma·g - mean(gamma·g) - n · mean(gamma·g·n)), means over the group. So a row takes two passes: gather the
// sums, then finish.
#include "norm_act.h"

namespace {

// What the second pass would have to compute again is written down in between, where that is faster.
enum class Keep { NOTHING, GRADIENT, NORMED_AND_SLOPE };

// One vector of the forward pass: the normalised values, what comes out before pooling, the activation's slope.
struct Point {
    v8 normed, out, slope;
};

struct BackwardRow {
    const float *dy, *x;
    float *dx, *normed;  // until it is finished, dx holds the gradients or slopes that are kept
};

// The factors of the second pass: dx = g · gain - offset - normed · pull (· slope).
struct Factors {
    float *gain, *offset, *pull;
    static constexpr int64_t TABLES = 3;
    Factors(float* memory, int64_t channels)
        : gain(memory), offset(memory + padded(channels)), pull(memory + 2 * padded(channels)) {
        std::memset(memory, 0, sizeof(float) * TABLES * padded(channels));
    }
};
struct FactorVector {
    v8 gain, offset, pull;
    FactorVector() = default;
    FactorVector(const Factors& f, int64_t c)
        : gain(load(f.gain + c)), offset(load(f.offset + c)), pull(load(f.pull + c)) {}
};

struct Sums {
    double *dgamma, *dbeta;
    static constexpr int64_t DOUBLES = 2;
    Sums(double* memory, int64_t channels) : dgamma(memory), dbeta(memory + padded(channels)) {
        std::memset(memory, 0, sizeof(double) * DOUBLES * padded(channels));
    }
};

template <class Act, bool NORM_FIRST>
struct Backward {
    static constexpr Keep KEEP = Act::CHEAP ? Keep::NOTHING : NORM_FIRST ? Keep::GRADIENT : Keep::NORMED_AND_SLOPE;

    const NormTask& task;
    const BackwardRow& row;
    const ChannelTable& table;

    // The forward pass once more.
    static Point point(const ChannelVector& channel, v8 x) {
        if (NORM_FIRST) {
            v8 normed = channel.normed(x);
            ValueSlope act = Act::both(channel.affine(normed));
            return {normed, act.value, act.slope};
        }
        ValueSlope act = Act::both(x);
        v8 normed = channel.normed(act.value);
        return {normed, channel.affine(normed), act.slope};
    }

    template <class Block>
    void keep(Block block, int64_t at, int v, const Point& p, v8 g) const {
        if (KEEP == Keep::GRADIENT) block.put(row.dx + at, v, g);
        if (KEEP == Keep::NORMED_AND_SLOPE) {
            block.put(row.normed + at, v, p.normed);
            block.put(row.dx + at, v, p.slope);
        }
    }

    // The same point in the second pass, from what was kept.
    template <class Block>
    Point recall(Block block, int64_t at, int v, const ChannelVector& channel) const {
        if (KEEP == Keep::GRADIENT) return {channel.normed(block.get(row.x + at, v)), all(0), all(0)};
        if (KEEP == Keep::NOTHING) return point(channel, block.get(row.x + at, v));
        v8 normed = block.get(row.normed + at, v);
        return {normed, channel.affine(normed), block.get(row.dx + at, v)};
    }

    static v8 at_norm(const Point& p, v8 g) { return NORM_FIRST ? g * p.slope : g; }

    // dx from the gradient at the normalisation's output.
    static v8 at_input(const Point& p, v8 g, const FactorVector& f) {
        v8 d = g * f.gain - f.offset - p.normed * f.pull;
        return NORM_FIRST ? d : d * p.slope;
    }

    void gather(Sums sums) const {
        const int64_t C = task.channels;
        for_runs(task.positions(), run_length(C), [&](int64_t first, int64_t run) {
            for_channel_blocks(C, [&](auto block, int64_t c) {
                constexpr int V = decltype(block)::VECTORS;
                ChannelVector channel[V];
                v8 dgamma[V] = {}, dbeta[V] = {};
                for (int v = 0; v < V; v++) channel[v] = table.at(c + v * LANES);
                for (int64_t at = first * C + c; at < (first + run) * C; at += C)
                    for (int v = 0; v < V; v++) {
                        Point p = point(channel[v], block.get(row.x + at, v));
                        v8 g = at_norm(p, block.get(row.dy + at, v));
                        keep(block, at, v, p, g);
                        dgamma[v] += g * p.normed;
                        dbeta[v] += g;
                    }
                for (int v = 0; v < V; v++) {
                    add_to(sums.dgamma + c + v * LANES, dgamma[v]);
                    add_to(sums.dbeta + c + v * LANES, dbeta[v]);
                }
            });
        });
    }

    // Before windows are looked at, in the order of memory: faster than both at once.
    void keep_all_points() const {
        const int64_t C = task.channels;
        for_runs(task.positions(), run_length(C), [&](int64_t first, int64_t run) {
            for_channel_blocks(C, [&](auto block, int64_t c) {
                for (int64_t at = first * C + c; at < (first + run) * C; at += C)
                    for (int v = 0; v < decltype(block)::VECTORS; v++)
                        keep(block, at, v, point(table.at(c + v * LANES), block.get(row.x + at, v)), all(0));
            });
        });
    }

    // The sums where each gradient goes to the winner of a window.
    void gather_windows(Sums sums) const {
        const int64_t C = task.channels;
        if (KEEP == Keep::NORMED_AND_SLOPE) keep_all_points();
        for_window_runs(task, [&](int64_t at, int64_t pooled, int64_t run) {
            for_channel_blocks(C, [&](auto block, int64_t c) {
                constexpr int V = decltype(block)::VECTORS;
                v8 dgamma[V] = {}, dbeta[V] = {};
                for (int64_t k = 0; k < run; k++)
                    for (int v = 0; v < V; v++)
                        gather_window(block, v, c, at + 2 * k * C + c, pooled + k * C + c, dgamma[v], dbeta[v]);
                for (int v = 0; v < V; v++) {
                    add_to(sums.dgamma + c + v * LANES, dgamma[v]);
                    add_to(sums.dbeta + c + v * LANES, dbeta[v]);
                }
            });
        });
        if (KEEP == Keep::GRADIENT)
            for_leftovers(task, [&](int64_t first, int64_t count) {
                std::memset(row.dx + first * C, 0, sizeof(float) * count * C);
            });
    }

    template <class Block>
    void gather_window(Block block, int v, int64_t c, int64_t at, int64_t pooled, v8& dgamma, v8& dbeta) const {
        const Window window(task.width, task.channels);
        const ChannelVector channel = table.at(c + v * LANES);
        Point p[4];
        for (int q = 0; q < 4; q++)
            p[q] = KEEP == Keep::NORMED_AND_SLOPE ? recall(block, at + window.offset[q], v, channel)
                                                  : point(channel, block.get(row.x + at + window.offset[q], v));
        const Winner winner(p[0].out, p[1].out, p[2].out, p[3].out);
        const v8 dy = block.get(row.dy + pooled, v);
        for (int q = 0; q < 4; q++) {
            const v8 g = at_norm(p[q], winner.share(dy, q));
            if (KEEP == Keep::GRADIENT) keep(block, at + window.offset[q], v, p[q], g);
            dgamma += g * p[q].normed;
            dbeta += g;
        }
    }

    void finish(const Factors& factors) const {
        const int64_t C = task.channels;
        for_runs(task.positions(), run_length(C), [&](int64_t first, int64_t run) {
            for_channel_blocks(C, [&](auto block, int64_t c) {
                constexpr int V = decltype(block)::VECTORS;
                ChannelVector channel[V];
                FactorVector f[V];
                for (int v = 0; v < V; v++) {
                    channel[v] = table.at(c + v * LANES);
                    f[v] = FactorVector(factors, c + v * LANES);
                }
                for (int64_t at = first * C + c; at < (first + run) * C; at += C)
                    for (int v = 0; v < V; v++) {
                        Point p = recall(block, at, v, channel[v]);
                        const v8 g = KEEP == Keep::GRADIENT ? block.get(row.dx + at, v)
                                                            : at_norm(p, block.get(row.dy + at, v));
                        block.put(row.dx + at, v, at_input(p, g, f[v]));
                    }
            });
        });
    }

    void finish_windows(const Factors& factors) const {
        const int64_t C = task.channels;
        for_window_runs(task, [&](int64_t at, int64_t pooled, int64_t run) {
            for_channel_blocks(C, [&](auto block, int64_t c) {
                for (int64_t k = 0; k < run; k++)
                    for (int v = 0; v < decltype(block)::VECTORS; v++)
                        finish_window(block, v, c, at + 2 * k * C + c, pooled + k * C + c, factors);
            });
        });
        for_leftovers(task, [&](int64_t first, int64_t count) { finish_leftovers(first, count, factors); });
    }

    template <class Block>
    void finish_window(Block block, int v, int64_t c, int64_t at, int64_t pooled, const Factors& factors) const {
        const Window window(task.width, task.channels);
        const ChannelVector channel = table.at(c + v * LANES);
        const FactorVector f(factors, c + v * LANES);
        Point p[4];
        for (int q = 0; q < 4; q++) p[q] = recall(block, at + window.offset[q], v, channel);
        const Winner winner(p[0].out, p[1].out, p[2].out, p[3].out);
        const v8 dy = block.get(row.dy + pooled, v);
        for (int q = 0; q < 4; q++)
            block.put(row.dx + at + window.offset[q], v, at_input(p[q], at_norm(p[q], winner.share(dy, q)), f));
    }

    // Positions outside all windows get no gradient from above, but move the group's mean and variance.
    void finish_leftovers(int64_t first, int64_t count, const Factors& factors) const {
        const int64_t C = task.channels;
        for_channel_blocks(C, [&](auto block, int64_t c) {
            for (int v = 0; v < decltype(block)::VECTORS; v++) {
                const ChannelVector channel = table.at(c + v * LANES);
                const FactorVector f(factors, c + v * LANES);
                for (int64_t at = first * C + c; at < (first + count) * C; at += C)
                    block.put(row.dx + at, v, at_input(point(channel, block.get(row.x + at, v)), all(0), f));
            }
        });
    }
};

void factors_of_groups(const NormTask& task, const ChannelTable& table, const Sums& sums, Factors& factors) {
    const int64_t each = task.channels / task.groups;
    const double members = double(task.positions()) * each;
    for (int64_t first = 0; first < task.channels; first += each) {
        double offset = 0, pull = 0;
        for (int64_t c = first; c < first + each; c++) {
            offset += table.gamma[c] * sums.dbeta[c];
            pull += table.gamma[c] * sums.dgamma[c];
        }
        for (int64_t c = first; c < first + each; c++) {
            factors.gain[c] = table.rstd[c] * table.gamma[c];
            factors.offset[c] = table.rstd[c] * (offset / members);
            factors.pull[c] = table.rstd[c] * (pull / members);
        }
    }
}

struct BackwardJob {
    BackwardRow row;
    const float *gamma_C, *beta_C, *mean_G, *rstd_G;
    float *dgamma_C, *dbeta_C;
};

template <class Act, bool NORM_FIRST>
void backward_row(const NormTask& task, BackwardJob job) {
    static thread_local Scratch tables, doubles, normed;
    using Kernel = Backward<Act, NORM_FIRST>;
    const int64_t C = padded(task.channels);
    float* memory = tables.floats((ChannelTable::TABLES + Factors::TABLES) * C);
    ChannelTable table(memory, task.channels);
    Factors factors(memory + ChannelTable::TABLES * C, task.channels);
    Sums sums(reinterpret_cast<double*>(doubles.floats(2 * Sums::DOUBLES * C)), task.channels);
    if (Kernel::KEEP == Keep::NORMED_AND_SLOPE) job.row.normed = normed.floats(task.row_floats());
    table.fill(task, job.mean_G, job.rstd_G, job.gamma_C, job.beta_C);

    const Kernel kernel{task, job.row, table};
    task.pool ? kernel.gather_windows(sums) : kernel.gather(sums);
    for (int64_t c = 0; c < task.channels; c++) {
        job.dgamma_C[c] = sums.dgamma[c];
        job.dbeta_C[c] = sums.dbeta[c];
    }
    factors_of_groups(task, table, sums, factors);
    task.pool && Kernel::KEEP != Keep::GRADIENT ? kernel.finish_windows(factors) : kernel.finish(factors);
}

template <class Act>
void backward_row_in_order(const NormTask& task, const BackwardJob& job) {
    task.norm_first ? backward_row<Act, true>(task, job) : backward_row<Act, false>(task, job);
}

}  // namespace

extern "C" void dpvision_norm_act_backward(int64_t rows, int64_t channels, int64_t height, int64_t width,
                                           int64_t groups, int64_t activation, int64_t norm_first, int64_t pool,
                                           double eps, const float* dy, const float* x, const float* gamma_C,
                                           const float* beta_C, const float* mean_NG, const float* rstd_NG, float* dx,
                                           float* dgamma_NC, float* dbeta_NC, int threads) {
    const NormTask task{rows, channels, height, width, groups, eps, norm_first != 0, pool != 0};
    const int64_t in = task.row_floats(), out = task.pooled_row_floats(), G = groups, C = channels;
    with_activation(int(activation), [&](auto act) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t n = 0; n < rows; n++)
            backward_row_in_order<decltype(act)>(
                task, {{dy + n * out, x + n * in, dx + n * in, nullptr}, gamma_C, beta_C, mean_NG + n * G,
                        rstd_NG + n * G, dgamma_NC + n * C, dbeta_NC + n * C});
    });
}
