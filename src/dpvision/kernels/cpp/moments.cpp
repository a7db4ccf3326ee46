// Sums over the positions of an image, one for every channel, of a convolution's output and its gradient.
#include <cmath>

#include "channels.h"

namespace {

constexpr int MOMENTS = 4;

// The moments of one row, as moments_MC: Σ dy, Σ dy·y, Σ dy·box, Σ |dy·y|, in tables of `padded` channels.
void moments_of_row(int64_t channels, int64_t positions, const float* dy, const float* y, const float* box,
                    double* totals) {
    const int64_t stride = padded(channels);
    for_runs(positions, run_length(channels), [&](int64_t first, int64_t run) {
        for_channel_blocks(channels, [&](auto block, int64_t c) {
            for (int v = 0; v < decltype(block)::VECTORS; v++) {
                v8 sums[MOMENTS] = {};
                for (int64_t t = first; t < first + run; t++) {
                    const v8 g = block.get(dy + t * channels + c, v), product = g * block.get(y + t * channels + c, v);
                    sums[0] += g;
                    sums[1] += product;
                    sums[2] += g * box[t];
                    sums[3] += magnitude(product);
                }
                for (int m = 0; m < MOMENTS; m++) add_to(totals + m * stride + c + v * LANES, sums[m]);
            }
        });
    });
}

void sums_of_row(int64_t channels, int64_t positions, const float* dy, double* totals) {
    for_runs(positions, run_length(channels), [&](int64_t first, int64_t run) {
        for_channel_blocks(channels, [&](auto block, int64_t c) {
            constexpr int V = decltype(block)::VECTORS;
            v8 sum[V] = {};
            for (int64_t t = first; t < first + run; t++)
                for (int v = 0; v < V; v++) sum[v] += block.get(dy + t * channels + c, v);
            for (int v = 0; v < V; v++) add_to(totals + c + v * LANES, sum[v]);
        });
    });
}

double* zeroed_doubles(int64_t count) {
    static thread_local Scratch memory;
    auto totals = reinterpret_cast<double*>(memory.floats(2 * count));
    std::memset(totals, 0, sizeof(double) * count);
    return totals;
}

}  // namespace

extern "C" void dpvision_convolution_moments(int64_t rows, int64_t channels, int64_t positions, const float* dy,
                                             const float* y, const float* box, double* sums_NMO, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        double* totals = zeroed_doubles(MOMENTS * padded(channels));
        const int64_t at = n * positions * channels;
        moments_of_row(channels, positions, dy + at, y + at, box + n * positions, totals);
        for (int m = 0; m < MOMENTS; m++)
            std::memcpy(sums_NMO + (n * MOMENTS + m) * channels, totals + m * padded(channels),
                        sizeof(double) * channels);
    }
}

extern "C" void dpvision_channel_sums(int64_t rows, int64_t channels, int64_t positions, const float* dy,
                                      float* sums_NC, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        double* totals = zeroed_doubles(padded(channels));
        sums_of_row(channels, positions, dy + n * positions * channels, totals);
        for (int64_t c = 0; c < channels; c++) sums_NC[n * channels + c] = totals[c];
    }
}
