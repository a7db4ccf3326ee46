// Weight gradients: of every privacy unit, or of all rows together with a factor each.
#include <algorithm>
#include <vector>

#include "winograd.h"

namespace {

constexpr int POINT_SIZE = PANEL * PANEL + GAP;
constexpr int BLOCK_SIZE = POINTS * POINT_SIZE;   // products of 16 input with 16 output channels
constexpr int64_t CHUNK = 64;                        // tiles that are transformed, then multiplied, at a time

// Rows of the register block: two vectors of sums per row, of the 32 or 16 vector registers there are.
#if defined(__AVX512VL__)
constexpr int BLOCK_ROWS = 8;
#else
constexpr int BLOCK_ROWS = 4;
#endif

// Some rows of a batch, whose gradients are added up with a factor each; no factors means one for all.
struct Rows {
    const float *x, *dy, *factors;
    Shape shape;
};

// Where the result goes: a gradient (3, 3, in, out), and per output channel its squares and, if there is a `z` of the
// gradient's shape, its sum and its inner product with z. No moments are wanted where `moments` is null.
struct Result {
    float* gradient;
    double* moments;
    const float* z;

    int64_t kinds() const { return z ? 3 : 1; }
};

// A transformed operand: (panels, points, tiles, 16 channels).
struct Panels {
    float* values;
    int64_t tiles;

    float* at(int64_t panel, int64_t point, int64_t tile) const {
        return values + (panel * POINTS + point) * point_stride() + tile * PANEL;
    }
    int64_t point_stride() const { return tiles * PANEL + GAP; }
};

// A row with factor zero takes no part: not even its NaNs and infinities.
std::vector<int64_t> rows_that_count(const Rows& rows) {
    std::vector<int64_t> chosen;
    for (int64_t row = 0; row < rows.shape.rows; row++)
        if (!rows.factors || rows.factors[row] != 0.f) chosen.push_back(row);
    return chosen;
}

void pack_x(const Rows& rows, int64_t row, int64_t tile, const Panels& packed, int64_t slot) {
    const int64_t channels = rows.shape.in_channels;
    const float* at[POINTS];
    locate_inputs(rows.x + row * rows.shape.positions() * channels, rows.shape, channels, tile, at);
    for (int64_t c = 0; c < channels; c += LANES)
        pack_inputs(at, c, packed.at(c / PANEL, 0, slot) + c % PANEL, packed.point_stride());
}

// A dy Aᵀ for eight channels of a tile.
void pack_outputs(const float* const* at, int64_t channel, v8 factor, float* out, int64_t stride) {
    v8 y[TILE * TILE], half[TILE * PATCH], column[PATCH];
    for (int p = 0; p < TILE * TILE; p++) y[p] = factor * load(at[p] + channel);
    for (int i = 0; i < TILE; i++) gradient_to_points(y + i * TILE, 1, half + i * PATCH, 1);
    for (int j = 0; j < PATCH; j++) {
        gradient_to_points(half + j, PATCH, column, 1);
        for (int i = 0; i < PATCH; i++) store(out + (i * PATCH + j) * stride, column[i]);
    }
}

void pack_dy(const Rows& rows, int64_t row, int64_t tile, const Panels& packed, int64_t slot) {
    const Shape& shape = rows.shape;
    const int64_t channels = shape.out_channels, across = shape.tiles_across();
    const float* at[TILE * TILE];
    locate<TILE>(rows.dy + row * shape.positions() * channels, shape, channels, tile / across * TILE,
                 tile % across * TILE, zeros(channels), at);
    const v8 factor = all(rows.factors ? rows.factors[row] : 1.f);
    for (int64_t c = 0; c < channels; c += LANES)
        pack_outputs(at, c, factor, packed.at(c / PANEL, 0, slot) + c % PANEL, packed.point_stride());
}

// BLOCK_ROWS input channels times 16 output channels, summed over tiles and added to what is there.
void multiply(const float* x, const float* dy, int64_t tiles, bool add, float* out) {
    v8 sum[BLOCK_ROWS][2] = {};
    for (int64_t t = 0; t < tiles; t++, x += PANEL, dy += PANEL) {
        const v8 left = load(dy), right = load(dy + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < BLOCK_ROWS; r++) {
            const v8 value = all(x[r]);
            sum[r][0] = value * left + sum[r][0];
            sum[r][1] = value * right + sum[r][1];
        }
    }
    for (int r = 0; r < BLOCK_ROWS; r++)
        for (int half = 0; half < 2; half++) {
            float* to = out + r * PANEL + half * LANES;
            store(to, add ? load(to) + sum[r][half] : sum[r][half]);
        }
}

// Products (points, 16 in, 16 out) of a pair of panels.
void multiply_pair(const Panels& x, int64_t in_panel, const Panels& dy, int64_t out_panel, int64_t tiles, bool add,
                   float* products) {
    for (int point = 0; point < POINTS; point++)
        for (int r = 0; r < PANEL; r += BLOCK_ROWS)
            multiply(x.at(in_panel, point, 0) + r, dy.at(out_panel, point, 0), tiles, add,
                     products + point * POINT_SIZE + r * PANEL);
}

// Sums of at most 16 · 9 terms in float32, which are then added up in float64.
struct Run {
    v8 squares = {}, entries = {}, inner = {};
};

static inline void add_lanes(v8 values, double* to) {
    for (int lane = 0; lane < LANES; lane++) to[lane] += values[lane];
}

// GᵀqG for one input and eight output channels.
template <bool WITH_Z> void finish(const float* products, float* gradient, const float* z, int64_t tap_stride, Run& run) {
    v8 q[PATCH], half[3 * PATCH], taps[3];
    for (int j = 0; j < PATCH; j++) {
        for (int i = 0; i < PATCH; i++) q[i] = load(products + (i * PATCH + j) * POINT_SIZE);
        to_taps(q, 1, half + j, PATCH);
    }
    for (int i = 0; i < 3; i++) {
        to_taps(half + i * PATCH, 1, taps, 1);
        for (int j = 0; j < 3; j++) {
            const int64_t offset = (i * 3 + j) * tap_stride;
            store(gradient + offset, taps[j]);
            run.squares = taps[j] * taps[j] + run.squares;
            if constexpr (WITH_Z) {
                run.entries = run.entries + taps[j];
                run.inner = taps[j] * load(z + offset) + run.inner;
            }
        }
    }
}

// Writes the gradient of a pair of panels; `moments` (kinds, out channels) are those of this input panel.
template <bool WITH_Z>
void finish_pair(const float* products, const Result& result, const Shape& shape, int64_t in_panel, int64_t out_panel,
                 double* moments) {
    const int64_t tap_stride = shape.in_channels * shape.out_channels;
    for (int half = 0; half < 2; half++) {
        const int64_t column = out_panel * PANEL + half * LANES;
        Run run;
        for (int r = 0; r < PANEL; r++) {
            const int64_t offset = (in_panel * PANEL + r) * shape.out_channels + column;
            finish<WITH_Z>(products + r * PANEL + half * LANES, result.gradient + offset,
                           WITH_Z ? result.z + offset : nullptr, tap_stride, run);
        }
        if (!moments) continue;
        add_lanes(run.squares, moments + column);
        if constexpr (WITH_Z) {
            add_lanes(run.entries, moments + shape.out_channels + column);
            add_lanes(run.inner, moments + 2 * shape.out_channels + column);
        }
    }
}

// One input panel against all output panels, for one chunk of tiles.
void multiply_panel(const Panels& x, const Panels& dy, int64_t in_panel, int64_t tiles, bool add, bool last, float* kept,
                    const Result& result, const Shape& shape, double* moments) {
    static thread_local Scratch block_memory;
    const int64_t out_panels = shape.out_channels / PANEL;
    for (int64_t out_panel = 0; out_panel < out_panels; out_panel++) {
        float* products = kept ? kept + (in_panel * out_panels + out_panel) * BLOCK_SIZE : block_memory.floats(BLOCK_SIZE);
        multiply_pair(x, in_panel, dy, out_panel, tiles, add, products);
        if (last && result.z) finish_pair<true>(products, result, shape, in_panel, out_panel, moments);
        if (last && !result.z) finish_pair<false>(products, result, shape, in_panel, out_panel, moments);
    }
}

// The moments of the input panels, added up in their order, whoever computed them.
void add_moments(const std::vector<double>& by_panel, const Result& result, int64_t count) {
    std::fill(result.moments, result.moments + count, 0.0);
    for (size_t i = 0; i < by_panel.size(); i++) result.moments[i % count] += by_panel[i];
}

void add_gradients(const Rows& rows, const Result& result, int threads) {
    static thread_local Scratch x_memory, dy_memory, kept_memory;
    const Shape& shape = rows.shape;
    const std::vector<int64_t> chosen = rows_that_count(rows);
    const int64_t tiles = shape.tiles(), all_tiles = tiles * static_cast<int64_t>(chosen.size());
    const int64_t in_panels = shape.in_channels / PANEL, entries = shape.in_channels * shape.out_channels;
    const int64_t moment_count = result.moments ? result.kinds() * shape.out_channels : 0;
    std::vector<double> by_panel(in_panels * moment_count, 0.0);
    if (all_tiles == 0) std::fill(result.gradient, result.gradient + 9 * entries, 0.f);

    const int64_t size = std::min(CHUNK, all_tiles);
    const Panels x{x_memory.floats(POINTS * (size + 1) * shape.in_channels), size};
    const Panels dy{dy_memory.floats(POINTS * (size + 1) * shape.out_channels), size};
    float* kept = all_tiles > size ? kept_memory.floats(entries / (PANEL * PANEL) * BLOCK_SIZE) : nullptr;
    for (int64_t first = 0; first < all_tiles; first += size) {
        const int64_t count = std::min(size, all_tiles - first);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t t = 0; t < count; t++) {
            const int64_t row = chosen[(first + t) / tiles], tile = (first + t) % tiles;
            pack_x(rows, row, tile, x, t);
            pack_dy(rows, row, tile, dy, t);
        }
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
        for (int64_t panel = 0; panel < in_panels; panel++)
            multiply_panel(x, dy, panel, count, first > 0, first + count == all_tiles, kept, result, shape,
                           moment_count ? by_panel.data() + panel * moment_count : nullptr);
    }
    if (moment_count) add_moments(by_panel, result, moment_count);
}

}  // namespace

// The gradients of `units` units of consecutive rows: (units, 3, 3, in, out), and their moments (units, kinds, out).
extern "C" void dpvision_winograd_units(const float* x, const float* dy, const float* z, int64_t units, float* gradients,
                                        double* moments, const Shape* sizes, int threads) {
    Shape shape = *sizes;
    shape.rows /= units;
    const int64_t entries = 9 * shape.in_channels * shape.out_channels, places = shape.rows * shape.positions();
    const int outside = units < threads ? 1 : threads, inside = units < threads ? threads : 1;
#pragma omp parallel for num_threads(outside) schedule(static) if (outside > 1)
    for (int64_t unit = 0; unit < units; unit++) {
        const Rows rows{x + unit * places * shape.in_channels, dy + unit * places * shape.out_channels, nullptr, shape};
        Result result{gradients + unit * entries, nullptr, z};
        result.moments = moments + unit * result.kinds() * shape.out_channels;
        add_gradients(rows, result, inside);
    }
}

// Σ factor · gradient over all rows: (3, 3, in, out).
extern "C" void dpvision_winograd_sum(const float* x, const float* dy, const float* factors, float* gradient,
                                      const Shape* sizes, int threads) {
    add_gradients({x, dy, factors, *sizes}, {gradient, nullptr, nullptr}, threads);
}
