// Weight gradients of every privacy unit, for convolutions of any kernel and stride.
//
// A unit's gradient is the product of its output gradients and its windows, a matrix (positions, kernel · channels). Where
// the lines of a window are made of whole vectors, these are read from the input itself; else the matrix is laid out, and
// stays in the second cache. A block of the product is added up in registers over all positions.
#include <algorithm>
#include <vector>

#include "panel.h"
#include "scratch.h"
#include "windows.h"

namespace {

// What a block of the product has: as many sums of 16 entries as fit the 32 wide or 16 narrow registers. Fewer outputs
// where they come out even.
#if defined(__AVX512F__)
constexpr int WIDE = 4, MANY = 6, FEWER = 4;
#else
constexpr int WIDE = 2, MANY = 3, FEWER = 2;
#endif
constexpr int64_t BLOCK = WIDE * PANEL;

// Two pieces of eight as one panel.
void join(const float* first, const float* second, v16& panel) {
#if defined(__AVX512F__)
    panel = (v16)_mm512_mask_loadu_ps(_mm512_maskz_loadu_ps(0x00ff, first), 0xff00, second - LANES);
#else
    panel = {load(first), load(second)};
#endif
}

int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Where each window begins, in the input of a unit.
std::vector<int64_t> corners(const Windows& sizes) {
    std::vector<int64_t> found;
    found.reserve(sizes.positions());
    for (int64_t row = 0; row < sizes.rows_per_unit; row++)
        for (int64_t i = 0; i < sizes.height; i++)
            for (int64_t j = 0; j < sizes.width; j++)
                found.push_back(row * sizes.row_stride + i * sizes.stride_height * sizes.line_stride +
                                j * sizes.stride_width * sizes.channels);
    return found;
}

// How a unit's windows are read: window t is made of pieces at `starts[t] + pieces[0]`, `starts[t] + pieces[1]` and so on.
struct Reading {
    bool direct, halves;  // from the input itself; in pieces of half a panel
    std::vector<int64_t> corners, starts, pieces;

    explicit Reading(const Windows& sizes) : corners(::corners(sizes)) {
        const int64_t run = sizes.run(), depth = sizes.depth(), length = run % PANEL ? LANES : PANEL;
        direct = run % LANES == 0 && depth % BLOCK == 0;
        halves = direct && length == LANES;
        if (direct) {
            starts = corners;
            for (int64_t d = 0; d < depth; d += length) pieces.push_back(d / run * sizes.line_stride + d % run);
            return;
        }
        const int64_t stride = rounded_up(depth, BLOCK);
        for (int64_t t = 0; t < sizes.positions(); t++) starts.push_back(t * stride);
        for (int64_t d = 0; d < stride; d += PANEL) pieces.push_back(d);
    }
};

// (positions, padded depth), zeros behind each window.
void lay_out(const Windows& sizes, const Reading& reading, const float* x, float* matrix) {
    const int64_t run = sizes.run(), depth = sizes.depth(), stride = rounded_up(depth, BLOCK);
    for (const int64_t corner : reading.corners) {
        for (int64_t k = 0; k < sizes.kernel_height; k++)
            std::copy_n(x + corner + k * sizes.line_stride, run, matrix + k * run);
        std::fill(matrix + depth, matrix + stride, 0.f);
        matrix += stride;
    }
}

struct Gradients {
    const float* values;
    int64_t stride;
};

// Output gradients (positions, padded outputs), zeros behind each position's; as they are where they come out even.
Gradients laid_out_gradients(const Windows& sizes, const float* dy, int64_t stride) {
    if (stride == sizes.outputs) return {dy, stride};
    static thread_local Scratch memory;
    float* matrix = memory.floats(sizes.positions() * stride);
    for (int64_t t = 0; t < sizes.positions(); t++) {
        std::copy_n(dy + t * sizes.outputs, sizes.outputs, matrix + t * stride);
        std::fill(matrix + t * stride + sizes.outputs, matrix + (t + 1) * stride, 0.f);
    }
    return {matrix, stride};
}

template <bool HALVES>
void read_entries(const float* window, const int64_t* pieces, int v, v16& entries) {
    if constexpr (HALVES)
        join(window + pieces[2 * v], window + pieces[2 * v + 1], entries);
    else
        entries = panel_at(window + pieces[v]);
}

// A block of OUTPUTS × BLOCK entries, its lines `stride` apart, and the sum of their squares. All loops over sums are
// unrolled, for only then does the compiler keep them in registers.
template <int OUTPUTS, bool HALVES>
double multiply(const float* a, const std::vector<int64_t>& starts, const int64_t* pieces, const Gradients& g,
                float* block, int64_t stride) {
    v16 sum[OUTPUTS][WIDE];
#pragma GCC unroll 16
    for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 16
        for (int v = 0; v < WIDE; v++) sum[o][v] = v16{};
    const float* weights = g.values;
    for (const int64_t start : starts) {
        v16 entries[WIDE];
#pragma GCC unroll 16
        for (int v = 0; v < WIDE; v++) read_entries<HALVES>(a + start, pieces, v, entries[v]);
#pragma GCC unroll 16
        for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 16
            for (int v = 0; v < WIDE; v++) sum[o][v] = weights[o] * entries[v] + sum[o][v];
        weights += g.stride;
    }
    v16 squares = {};  // 24 terms a lane at most, then double
#pragma GCC unroll 16
    for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 16
        for (int v = 0; v < WIDE; v++) {
            panel_at(block + o * stride + v * PANEL) = sum[o][v];
            squares = sum[o][v] * sum[o][v] + squares;
        }
    double total = 0;
    for (int lane = 0; lane < PANEL; lane++) total += squares[lane];
    return total;
}

// One unit's gradient (outputs, depth), and the square of its length.
template <int OUTPUTS, bool HALVES>
double unit_gradient(const Windows& sizes, const Reading& reading, const float* x, const float* dy, float* gradient) {
    static thread_local Scratch memory;
    const int64_t depth = sizes.depth(), per_block = BLOCK / (HALVES ? LANES : PANEL);
    const float* a = x;
    if (!reading.direct) {
        float* matrix = memory.floats(sizes.positions() * rounded_up(depth, BLOCK));
        lay_out(sizes, reading, x, matrix);
        a = matrix;
    }
    const Gradients g = laid_out_gradients(sizes, dy, rounded_up(sizes.outputs, OUTPUTS));
    alignas(64) float block[OUTPUTS * BLOCK];
    double squares = 0;
    for (int64_t d = 0; d < depth; d += BLOCK)
        for (int64_t o = 0; o < sizes.outputs; o += OUTPUTS) {
            const int64_t count = std::min(BLOCK, depth - d), rows = std::min<int64_t>(OUTPUTS, sizes.outputs - o);
            float* place = gradient + o * depth + d;
            const bool whole = count == BLOCK && rows == OUTPUTS;
            squares += multiply<OUTPUTS, HALVES>(a, reading.starts, &reading.pieces[d / BLOCK * per_block],
                                                 {g.values + o, g.stride}, whole ? place : block, whole ? depth : BLOCK);
            for (int64_t r = 0; r < rows && !whole; r++) std::copy_n(block + r * BLOCK, count, place + r * depth);
        }
    return squares;
}

template <int OUTPUTS>
double unit_gradient(const Windows& sizes, const Reading& reading, const float* x, const float* dy, float* gradient) {
    return reading.halves ? unit_gradient<OUTPUTS, true>(sizes, reading, x, dy, gradient)
                          : unit_gradient<OUTPUTS, false>(sizes, reading, x, dy, gradient);
}

}  // namespace

// The gradients (units, outputs, kernel height · kernel width · channels) and their squared lengths.
extern "C" void dpvision_window_gradients(int64_t units, int64_t rows_per_unit, int64_t row_stride,
                                          int64_t line_stride, int64_t channels, int64_t height, int64_t width,
                                          int64_t outputs, int64_t kernel_height, int64_t kernel_width,
                                          int64_t stride_height, int64_t stride_width, const float* x,
                                          const float* dy, float* gradients, double* squares, int threads) {
    const Windows sizes{rows_per_unit, row_stride, line_stride, channels, height, width, outputs,
                        kernel_height, kernel_width, stride_height, stride_width};
    const Reading reading(sizes);
    const int64_t entries = sizes.outputs * sizes.depth();
    const bool fewer = rounded_up(sizes.outputs, FEWER) < rounded_up(sizes.outputs, MANY);
    const auto gradient_of = fewer ? unit_gradient<FEWER> : unit_gradient<MANY>;
#pragma omp parallel for num_threads(threads) schedule(static) if (units > 1)
    for (int64_t u = 0; u < units; u++)
        squares[u] = gradient_of(sizes, reading, x + u * sizes.rows_per_unit * sizes.row_stride,
                                 dy + u * sizes.positions() * sizes.outputs, gradients + u * entries);
}
