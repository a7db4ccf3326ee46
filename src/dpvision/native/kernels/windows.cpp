// Weight gradients of every privacy unit, for convolutions of any kernel and stride.
//
// The windows of one unit are laid out as a matrix (positions, kernel · channels), which stays in the second cache, and
// multiplied by the unit's output gradients. A block of the product is added up in registers over all positions.
#include <algorithm>

#include "scratch.h"
#include "winograd.h"

namespace {

// What a block of the product has: as many sums of 16 entries as fit the 32 wide or 16 narrow registers.
#if defined(__AVX512F__)
constexpr int WIDE = 4, OUTPUTS = 6;
#else
constexpr int WIDE = 2, OUTPUTS = 3;
#endif
constexpr int64_t BLOCK = WIDE * PANEL;

int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

}  // namespace

// Sizes of the padded input, of the output and of the kernel. Strides of the input are in floats; its channels lie
// together, and so do its columns.
struct Windows {
    int64_t rows_per_unit, row_stride, line_stride, channels;
    int64_t height, width, outputs;
    int64_t kernel_height, kernel_width, stride_height, stride_width;

    int64_t positions() const { return rows_per_unit * height * width; }
    int64_t depth() const { return kernel_height * kernel_width * channels; }
};

namespace {

// (positions, padded depth), zeros behind each window.
void lay_out(const Windows& sizes, const float* x, float* matrix, int64_t stride) {
    const int64_t run = sizes.kernel_width * sizes.channels, depth = sizes.depth();
    for (int64_t row = 0; row < sizes.rows_per_unit; row++)
        for (int64_t i = 0; i < sizes.height; i++)
            for (int64_t j = 0; j < sizes.width; j++, matrix += stride) {
                const float* corner = x + row * sizes.row_stride + i * sizes.stride_height * sizes.line_stride +
                                      j * sizes.stride_width * sizes.channels;
                for (int64_t k = 0; k < sizes.kernel_height; k++)
                    std::copy_n(corner + k * sizes.line_stride, run, matrix + k * run);
                std::fill(matrix + depth, matrix + stride, 0.f);
            }
}

// Output gradients (positions, padded outputs), zeros behind each position's.
void lay_out_gradients(const Windows& sizes, const float* dy, float* matrix, int64_t stride) {
    for (int64_t t = 0; t < sizes.positions(); t++, matrix += stride) {
        std::copy_n(dy + t * sizes.outputs, sizes.outputs, matrix);
        std::fill(matrix + sizes.outputs, matrix + stride, 0.f);
    }
}

struct Matrix {
    const float* values;
    int64_t stride;
};

// A block of OUTPUTS × BLOCK entries, and the sum of their squares. All loops over sums are unrolled, for only then
// does the compiler keep them in registers.
double multiply(const Matrix& a, const Matrix& g, int64_t positions, float* block) {
    v16 sum[OUTPUTS][WIDE];
#pragma GCC unroll 16
    for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 16
        for (int v = 0; v < WIDE; v++) sum[o][v] = v16{};
    const float *row = a.values, *weights = g.values;
    for (int64_t t = 0; t < positions; t++, row += a.stride, weights += g.stride) {
        v16 entries[WIDE];
#pragma GCC unroll 16
        for (int v = 0; v < WIDE; v++) entries[v] = panel_at(row + v * PANEL);
#pragma GCC unroll 16
        for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 16
            for (int v = 0; v < WIDE; v++) sum[o][v] = weights[o] * entries[v] + sum[o][v];
    }
    v16 squares = {};  // 24 terms a lane at most, then double
#pragma GCC unroll 16
    for (int o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 16
        for (int v = 0; v < WIDE; v++) {
            panel_at(block + (o * WIDE + v) * PANEL) = sum[o][v];
            squares = sum[o][v] * sum[o][v] + squares;
        }
    double total = 0;
    for (int lane = 0; lane < PANEL; lane++) total += squares[lane];
    return total;
}

// One unit's gradient (outputs, depth), and the square of its length.
double unit_gradient(const Windows& sizes, const float* x, const float* dy, float* gradient) {
    static thread_local Scratch a_memory, g_memory;
    const int64_t positions = sizes.positions(), depth = sizes.depth();
    const int64_t a_stride = rounded_up(depth, BLOCK), g_stride = rounded_up(sizes.outputs, OUTPUTS);
    float *a = a_memory.floats(positions * a_stride), *g = g_memory.floats(positions * g_stride);
    lay_out(sizes, x, a, a_stride);
    lay_out_gradients(sizes, dy, g, g_stride);
    alignas(64) float block[OUTPUTS * BLOCK];
    double squares = 0;
    for (int64_t d = 0; d < depth; d += BLOCK)
        for (int64_t o = 0; o < sizes.outputs; o += OUTPUTS) {
            squares += multiply({a + d, a_stride}, {g + o, g_stride}, positions, block);
            const int64_t count = std::min(BLOCK, depth - d), rows = std::min<int64_t>(OUTPUTS, sizes.outputs - o);
            for (int64_t r = 0; r < rows; r++) std::copy_n(block + r * BLOCK, count, gradient + (o + r) * depth + d);
        }
    return squares;
}

}  // namespace

// The gradients (units, outputs, kernel height · kernel width · channels) and their squared lengths.
extern "C" void dpvision_window_gradients(const Windows* sizes, int64_t units, const float* x, const float* dy,
                                          float* gradients, double* squares, int threads) {
    const int64_t entries = sizes->outputs * sizes->depth();
#pragma omp parallel for num_threads(threads) schedule(static) if (units > 1)
    for (int64_t u = 0; u < units; u++)
        squares[u] = unit_gradient(*sizes, x + u * sizes->rows_per_unit * sizes->row_stride,
                                   dy + u * sizes->positions() * sizes->outputs, gradients + u * entries);
}
