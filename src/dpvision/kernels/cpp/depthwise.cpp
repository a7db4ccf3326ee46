// Weight gradients of every privacy unit, for convolutions in which every channel has a kernel of its own.
//
// Two vectors of channels at a time. A line of outputs adds to the sums of one line of the kernel while these are in
// registers; a few lines, or a part of a long one, are added up in float32, those sums in double.
#include <algorithm>

#include "channels.h"
#include "windows.h"

namespace {

constexpr int WIDE = 2;
constexpr int64_t RUN = 128;  // positions that are added up in float32, and at most as many more

// `count` outputs of a line against what one line of the kernel sees of the input. TAPS is the kernel's width.
template <int TAPS, class Block>
void add_line(const Block& block, const Windows& sizes, const float* x, const float* dy, int64_t count, float* sums) {
    v8 sum[TAPS][Block::VECTORS];
    for (int k = 0; k < TAPS; k++)
        for (int v = 0; v < Block::VECTORS; v++) sum[k][v] = load(sums + (k * WIDE + v) * LANES);
    for (int64_t j = 0; j < count; j++) {
        for (int v = 0; v < Block::VECTORS; v++) {
            const v8 g = block.get(dy, v);
            for (int k = 0; k < TAPS; k++) sum[k][v] += block.get(x + k * sizes.channels, v) * g;
        }
        x += sizes.stride_width * sizes.channels;
        dy += sizes.channels;
    }
    for (int k = 0; k < TAPS; k++)
        for (int v = 0; v < Block::VECTORS; v++) store(sums + (k * WIDE + v) * LANES, sum[k][v]);
}

void flush(int64_t taps, float* sums, double* totals) {
    for (int64_t i = 0; i < taps * WIDE * LANES; i += LANES) {
        add_to(totals + i, load(sums + i));
        store(sums + i, all(0));
    }
}

// The gradients of a block of channels, from `x` and `dy` on, in `totals` (taps, channels of a block).
template <int TAPS, class Block>
void sum_block(const Block& block, const Windows& sizes, const float* x, const float* dy, float* sums, double* totals) {
    const int64_t taps = sizes.kernel_height * TAPS;
    std::fill_n(sums, taps * WIDE * LANES, 0.f);
    std::fill_n(totals, taps * WIDE * LANES, 0.0);
    int64_t run = 0;
    for (int64_t row = 0; row < sizes.rows_per_unit; row++)
        for (int64_t i = 0; i < sizes.height; i++) {
            const float* line = x + row * sizes.row_stride + i * sizes.stride_height * sizes.line_stride;
            const float* outputs = dy + (row * sizes.height + i) * sizes.width * sizes.channels;
            for (int64_t j = 0; j < sizes.width; j += RUN) {
                const int64_t count = std::min(RUN, sizes.width - j);
                const float* seen = line + j * sizes.stride_width * sizes.channels;
                for (int64_t k = 0; k < sizes.kernel_height; k++)
                    add_line<TAPS>(block, sizes, seen + k * sizes.line_stride, outputs + j * sizes.channels, count,
                                   sums + k * TAPS * WIDE * LANES);
                run += count;
                if (run >= RUN) {
                    flush(taps, sums, totals);
                    run = 0;
                }
            }
        }
    flush(taps, sums, totals);
}

// One unit's gradient (channels, taps), and the square of its length.
template <int TAPS>
double unit_gradient(const Windows& sizes, const float* x, const float* dy, float* gradient) {
    static thread_local Scratch memory;
    const int64_t taps = sizes.kernel_height * TAPS, numbers = taps * WIDE * LANES;
    float* sums = memory.floats(3 * numbers);
    double* totals = reinterpret_cast<double*>(sums + numbers);
    double squares = 0;
    const auto visit = [&](const auto& block, int64_t first, int64_t count) {
        sum_block<TAPS>(block, sizes, x + first, dy + first, sums, totals);
        for (int64_t c = 0; c < count; c++)
            for (int64_t k = 0; k < taps; k++) {
                const float entry = float(totals[k * WIDE * LANES + c]);
                gradient[(first + c) * taps + k] = entry;
                squares += double(entry) * double(entry);
            }
    };
    int64_t c = 0;
    for (; c + WIDE * LANES <= sizes.channels; c += WIDE * LANES) visit(WholeVectors<WIDE>{}, c, WIDE * LANES);
    for (; c + LANES <= sizes.channels; c += LANES) visit(WholeVectors<1>{}, c, LANES);
    if (c < sizes.channels) visit(PartVector{int(sizes.channels - c)}, c, sizes.channels - c);
    return squares;
}

}  // namespace

// The gradients (units, channels, kernel height · kernel width) and their squared lengths. The kernel is 3, 5 or 7 wide.
extern "C" void dpvision_depthwise_gradients(int64_t units, int64_t rows_per_unit, int64_t row_stride,
                                             int64_t line_stride, int64_t channels, int64_t height, int64_t width,
                                             int64_t outputs, int64_t kernel_height, int64_t kernel_width,
                                             int64_t stride_height, int64_t stride_width, const float* x,
                                             const float* dy, float* gradients, double* squares, int threads) {
    const Windows sizes{rows_per_unit, row_stride, line_stride, channels, height, width, outputs,
                        kernel_height, kernel_width, stride_height, stride_width};
    const auto gradient_of = sizes.kernel_width == 3   ? unit_gradient<3>
                             : sizes.kernel_width == 5 ? unit_gradient<5>
                                                        : unit_gradient<7>;
    const int64_t entries = sizes.channels * sizes.kernel_height * sizes.kernel_width;
#pragma omp parallel for num_threads(threads) schedule(static) if (units > 1)
    for (int64_t u = 0; u < units; u++)
        squares[u] = gradient_of(sizes, x + u * sizes.rows_per_unit * sizes.row_stride,
                                 dy + u * sizes.positions() * sizes.channels, gradients + u * entries);
}
