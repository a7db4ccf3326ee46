// A linear layer with few outputs, y = x wᵀ + bias, and each row's ‖x‖² from the same look at x.
//
// Reading x is what takes the time, so it is read once: two rows and five outputs at a time, the columns in chunks that
// stay in the first cache for all outputs.
#include <algorithm>

#include "channels.h"
#include "squares.h"

namespace {

constexpr int64_t CHUNK = 512;
constexpr int64_t ENOUGH = 1 << 19;  // products; below this, waking another thread takes longer than the work
constexpr int OUTPUTS = 5;

struct Layer {
    int64_t columns, outputs;
    const float *w_OI, *bias_O;
};

float sum_of(v8 v) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += v[lane];
    return total;
}

// For ROWS rows from x on, the part of their outputs that `count` columns give: added to y.
template <int ROWS, int OUT>
void add_products(const Layer& layer, const float* x, const float* w, int64_t count, float* y) {
    v8 sums[ROWS][OUT] = {};
    const auto add = [&](int64_t c, int lanes) {
        v8 values[ROWS];
        for (int r = 0; r < ROWS; r++)
            values[r] = lanes == LANES ? load(x + r * layer.columns + c) : load_some(x + r * layer.columns + c, lanes);
        for (int o = 0; o < OUT; o++) {
            const v8 weight =
                lanes == LANES ? load(w + o * layer.columns + c) : load_some(w + o * layer.columns + c, lanes);
            for (int r = 0; r < ROWS; r++) sums[r][o] += values[r] * weight;
        }
    };
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) add(c, LANES);
    if (c < count) add(c, int(count - c));
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < OUT; o++) y[r * layer.outputs + o] += sum_of(sums[r][o]);
}

template <int ROWS>
void some_rows(const Layer& layer, const float* x, float* y, double* squares) {
    for (int r = 0; r < ROWS; r++) {
        squares[r] = 0;
        for (int64_t o = 0; o < layer.outputs; o++) y[r * layer.outputs + o] = layer.bias_O ? layer.bias_O[o] : 0.f;
    }
    for (int64_t first = 0; first < layer.columns; first += CHUNK) {
        const int64_t count = std::min(CHUNK, layer.columns - first);
        for (int r = 0; r < ROWS; r++) squares[r] += squares_of(x + r * layer.columns + first, count);
        int64_t o = 0;
        for (; o + OUTPUTS <= layer.outputs; o += OUTPUTS)
            add_products<ROWS, OUTPUTS>(layer, x + first, layer.w_OI + o * layer.columns + first, count, y + o);
        for (; o < layer.outputs; o++)
            add_products<ROWS, 1>(layer, x + first, layer.w_OI + o * layer.columns + first, count, y + o);
    }
}

}  // namespace

extern "C" void dpvision_narrow_linear(int64_t count, int64_t columns, int64_t outputs, const float* x_NI,
                                        const float* w_OI, const float* bias_O, float* y_NO, double* squares_N,
                                        int threads) {
    const Layer layer{columns, outputs, w_OI, bias_O};
#pragma omp parallel for num_threads(threads) schedule(static) if (count * columns * outputs >= ENOUGH)
    for (int64_t pair = 0; pair < (count + 1) / 2; pair++) {
        const int64_t n = 2 * pair;
        const float* x = x_NI + n * columns;
        if (n + 1 < count)
            some_rows<2>(layer, x, y_NO + n * outputs, squares_N + n);
        else
            some_rows<1>(layer, x, y_NO + n * outputs, squares_N + n);
    }
}
