// GroupNorm with an activation: y = pool(act(gamma · norm(x) + beta)), or y = pool(gamma · norm(act(x)) + beta).
#pragma once
#include "activations.h"
#include "channels.h"

// Sizes of the images, and the order of the operations.
struct NormTask {
    int64_t rows, channels, height, width, groups;
    double eps;
    bool norm_first, pool;

    int64_t positions() const { return height * width; }
    int64_t row_floats() const { return channels * positions(); }
    int64_t pooled_height() const { return pool ? height / 2 : height; }
    int64_t pooled_width() const { return pool ? width / 2 : width; }
    int64_t pooled_row_floats() const { return channels * pooled_height() * pooled_width(); }
};

// What one vector of channels is normalised with.
struct ChannelVector {
    v8 mean, rstd, gamma, beta;
    v8 normed(v8 x) const { return (x - mean) * rstd; }
    v8 affine(v8 normed) const { return normed * gamma + beta; }
};

// The same for all channels of one row, in tables that are padded to whole vectors.
struct ChannelTable {
    float *mean, *rstd, *gamma, *beta;

    static constexpr int64_t TABLES = 4;
    ChannelTable(float* memory, int64_t channels)
        : mean(memory), rstd(mean + padded(channels)), gamma(rstd + padded(channels)), beta(gamma + padded(channels)) {
        std::memset(memory, 0, sizeof(float) * TABLES * padded(channels));
    }
    void fill(const NormTask& task, const float* mean_G, const float* rstd_G, const float* gamma_C,
              const float* beta_C) {
        const int64_t each = task.channels / task.groups;
        for (int64_t g = 0, c = 0; g < task.groups; g++)
            for (int64_t k = 0; k < each; k++, c++) {
                mean[c] = mean_G[g];
                rstd[c] = rstd_G[g];
                gamma[c] = gamma_C ? gamma_C[c] : 1;
                beta[c] = beta_C ? beta_C[c] : 0;
            }
    }
    ChannelVector at(int64_t c) const { return {load(mean + c), load(rstd + c), load(gamma + c), load(beta + c)}; }
};

// The four positions of a 2×2 window, as offsets from its first.
struct Window {
    int64_t offset[4];
    Window(int64_t width, int64_t channels) : offset{0, channels, width * channels, (width + 1) * channels} {}
};

// The largest of a window's four values and which one it is: the first of equals. NaN wins, the last of several. (It
// would lose to a number after it, but after a normalisation all values of a channel are NaN or none is.)
struct Winner {
    v8 value;
    i8x32 index;
    Winner(v8 first, v8 second, v8 third, v8 fourth) : value(first), index{} {
        challenge(second, 1);
        challenge(third, 2);
        challenge(fourth, 3);
    }
    void challenge(v8 x, int k) {
        const i8x32 wins = !(x <= value);
        value = wins ? x : value;
        index = wins ? i8x32{} + k : index;
    }
    v8 share(v8 gradient, int k) const { return index == k ? gradient : all(0); }
};

// Calls `visit(where the first window begins, where its output is, windows)`, for windows side by side in one row.
template <class Visit>
static inline void for_window_runs(const NormTask& task, Visit&& visit) {
    const int64_t C = task.channels, W = task.width, length = run_length(C) / 4;
    for (int64_t i = 0; i < task.height / 2; i++)
        for_runs(W / 2, length, [&](int64_t j, int64_t run) {
            visit((2 * i * W + 2 * j) * C, (i * (W / 2) + j) * C, run);
        });
}

// Calls `visit(first position, positions)` for what an odd height or width leaves outside all windows.
template <class Visit>
static inline void for_leftovers(const NormTask& task, Visit&& visit) {
    const int64_t windowed = task.height / 2 * 2;
    if (task.width % 2)
        for (int64_t i = 0; i < windowed; i++) visit(i * task.width + task.width - 1, 1);
    if (task.height % 2) visit(windowed * task.width, task.width);
}
