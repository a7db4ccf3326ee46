// Weight gradients: of every privacy unit, or of all rows together with a factor each.
#include <algorithm>
#include <vector>

#include "winograd.h"

namespace {

constexpr int64_t CHUNK = 64;                        // tiles that are transformed, then multiplied, at a time
constexpr int POINT_SIZE = PANEL * PANEL + GAP;      // products of a pair of panels at a point: (16 in, 16 out)
constexpr int COLUMN_SIZE = PATCH * POINT_SIZE;      // at a column of points
constexpr int BLOCK_SIZE = PATCH * COLUMN_SIZE;      // at all points

// Input channels that are multiplied at once: as many as have sums in the 32 wide or 16 narrow registers there are.
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 16;
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

    float* at(int64_t panel, int64_t point) const { return values + (panel * POINTS + point) * point_stride(); }
    int64_t point_stride() const { return tiles * PANEL + GAP; }
    static size_t size(int64_t tiles, int64_t channels) { return POINTS * (tiles * PANEL + GAP) * (channels / PANEL); }
};

// A tile: where its pixels lie in x and dy, and what its gradient is multiplied by.
struct Tile {
    Inputs inputs;
    const float* outputs[TILE * TILE];
    float factor;
};

// Some tiles on their way, with their transformed output gradients. If there are more to come, the products of all
// panels are kept.
struct Chunk {
    std::vector<Tile>& tile;
    Panels dy;
    float* kept;
    int64_t tiles = 0;
    bool first = true, last = false;

    const Tile& after(int64_t t) const { return tile[std::min(t + 1, tiles - 1)]; }
};

// A row with factor zero takes no part: not even its NaNs and infinities.
std::vector<int64_t> rows_that_count(const Rows& rows) {
    std::vector<int64_t> chosen;
    for (int64_t row = 0; row < rows.shape.rows; row++)
        if (!rows.factors || rows.factors[row] != 0.f) chosen.push_back(row);
    return chosen;
}

Tile locate_tile(const Rows& rows, int64_t row, int64_t index, const float* outside) {
    const Shape& shape = rows.shape;
    Tile tile;
    locate_inputs(rows.x + row * shape.positions() * shape.in_channels, shape, index, outside, tile.inputs.at);
    locate_outputs(rows.dy + row * shape.positions() * shape.out_channels, shape, index, outside, tile.outputs);
    tile.factor = rows.factors ? rows.factors[row] : 1.f;
    return tile;
}

// A dy Aᵀ for one panel of a tile, while the tile after it is called into the cache.
void pack_outputs(const Tile& tile, const Tile& next, int64_t channel, float* out, int64_t stride) {
    v16 y[TILE], half[TILE * PATCH], column[PATCH];
    for (int i = 0; i < TILE; i++) {
        for (int j = 0; j < TILE; j++) {
            y[j] = tile.factor * panel_at(tile.outputs[i * TILE + j] + channel);
            __builtin_prefetch(next.outputs[i * TILE + j] + channel);
        }
        gradient_to_points(y, 1, half + i * PATCH, 1);
    }
    for (int j = 0; j < PATCH; j++) {
        gradient_to_points(half + j, PATCH, column, 1);
        for (int i = 0; i < PATCH; i++) panel_at(out + (i * PATCH + j) * stride) = column[i];
    }
}

void pack_dy(const Chunk& chunk, int64_t t, int64_t channels) {
    for (int64_t panel = 0; panel < channels / PANEL; panel++)
        pack_outputs(chunk.tile[t], chunk.after(t), panel * PANEL, chunk.dy.at(panel, 0) + t * PANEL,
                     chunk.dy.point_stride());
}

// BLOCK_ROWS input channels times 16 output channels, summed over tiles and perhaps added to what is there. All loops
// over sums are unrolled, for only then does the compiler keep the sums in registers from beginning to end.
static inline void multiply(const float* x, const float* dy, int64_t tiles, bool add, float* out) {
    v16 sum[BLOCK_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < BLOCK_ROWS; r++) sum[r] = v16{};
    for (int64_t t = 0; t < tiles; t++, x += PANEL, dy += PANEL) {
        const v16 row = panel_at(dy);
#pragma GCC unroll 16
        for (int r = 0; r < BLOCK_ROWS; r++) sum[r] = x[r] * row + sum[r];
    }
#pragma GCC unroll 16
    for (int r = 0; r < BLOCK_ROWS; r++) panel_at(out + r * PANEL) = add ? sum[r] + panel_at(out + r * PANEL) : sum[r];
}

// Products of a pair of panels at column j of the points.
void multiply_column(const Panels& x, const Chunk& chunk, int64_t out_panel, int j, float* products) {
    for (int i = 0; i < PATCH; i++)
        for (int r = 0; r < PANEL; r += BLOCK_ROWS)
            multiply(x.at(0, i * PATCH + j) + r, chunk.dy.at(out_panel, i * PATCH + j), chunk.tiles, !chunk.first,
                     products + i * POINT_SIZE + r * PANEL);
}

// Sums of at most 16 · 9 terms in float32, which are then added up in float64.
struct Run {
    v16 squares = {}, entries = {}, inner = {};
};

// Gᵀq for column j of the points: half-way to the gradient, (16 in, 3, 6, 16 out) for all columns.
void finish_column(const float* products, int j, float* half) {
    for (int r = 0; r < PANEL; r++) {
        v16 q[PATCH], taps[3];
        for (int i = 0; i < PATCH; i++) q[i] = panel_at(products + i * POINT_SIZE + r * PANEL);
        to_taps(q, 1, taps, 1);
        for (int i = 0; i < 3; i++) panel_at(half + ((r * 3 + i) * PATCH + j) * PANEL) = taps[i];
    }
}

// (Gᵀq)G for one input channel and a panel of output channels.
template <bool WITH_Z>
static inline void finish_row(const float* half, float* gradient, const float* z, int64_t tap_stride, Run& run) {
    for (int i = 0; i < 3; i++) {
        v16 q[PATCH], taps[3];
        for (int j = 0; j < PATCH; j++) q[j] = panel_at(half + (i * PATCH + j) * PANEL);
        to_taps(q, 1, taps, 1);
        for (int j = 0; j < 3; j++) {
            const int64_t offset = (i * 3 + j) * tap_stride;
            panel_at(gradient + offset) = taps[j];
            run.squares = taps[j] * taps[j] + run.squares;
            if constexpr (WITH_Z) {
                run.entries = run.entries + taps[j];
                run.inner = taps[j] * panel_at(z + offset) + run.inner;
            }
        }
    }
}

void add_lanes(const v16& values, double* to) {
    for (int lane = 0; lane < PANEL; lane++) to[lane] += values[lane];
}

// Writes the gradient of a pair of panels; `moments` (kinds, out channels) are those of this input panel.
template <bool WITH_Z>
void finish_pair(const float* half, const Result& result, const Shape& shape, int64_t in_panel, int64_t out_panel,
                 double* moments) {
    const int64_t tap_stride = shape.in_channels * shape.out_channels, column = out_panel * PANEL;
    Run run;
    for (int r = 0; r < PANEL; r++) {
        const int64_t offset = (in_panel * PANEL + r) * shape.out_channels + column;
        finish_row<WITH_Z>(half + r * 3 * PATCH * PANEL, result.gradient + offset,
                           WITH_Z ? result.z + offset : nullptr, tap_stride, run);
    }
    if (!moments) return;
    add_lanes(run.squares, moments + column);
    if constexpr (WITH_Z) {
        add_lanes(run.entries, moments + shape.out_channels + column);
        add_lanes(run.inner, moments + 2 * shape.out_channels + column);
    }
}

// One pair of panels. Column by column, so that little lies between the two halves of the way back.
void multiply_pair(const Panels& x, const Chunk& chunk, int64_t out_panel, float* kept, float* half) {
    static thread_local Scratch column_memory;
    float* column = column_memory.floats(COLUMN_SIZE);
    for (int j = 0; j < PATCH; j++) {
        float* products = kept ? kept + j * COLUMN_SIZE : column;
        multiply_column(x, chunk, out_panel, j, products);
        if (chunk.last) finish_column(products, j, half);
    }
}

// One input panel, transformed here, against all output panels.
void multiply_panel(int64_t in_panel, const Chunk& chunk, const Result& result, const Shape& shape, double* moments) {
    static thread_local Scratch x_memory, half_memory;
    const Panels x{x_memory.floats(Panels::size(chunk.dy.tiles, PANEL)), chunk.dy.tiles};
    for (int64_t t = 0; t < chunk.tiles; t++)
        pack_inputs(chunk.tile[t].inputs, chunk.after(t).inputs, in_panel * PANEL, x.at(0, 0) + t * PANEL,
                    x.point_stride());
    float* half = half_memory.floats(3 * PATCH * PANEL * PANEL);
    const int64_t out_panels = shape.out_channels / PANEL;
    for (int64_t out_panel = 0; out_panel < out_panels; out_panel++) {
        float* kept = chunk.kept ? chunk.kept + (in_panel * out_panels + out_panel) * BLOCK_SIZE : nullptr;
        multiply_pair(x, chunk, out_panel, kept, half);
        if (chunk.last && result.z) finish_pair<true>(half, result, shape, in_panel, out_panel, moments);
        if (chunk.last && !result.z) finish_pair<false>(half, result, shape, in_panel, out_panel, moments);
    }
}

// The moments of the input panels, added up in their order, whoever computed them.
void add_moments(const std::vector<double>& by_panel, double* moments, int64_t count) {
    std::fill(moments, moments + count, 0.0);
    for (size_t i = 0; i < by_panel.size(); i++) moments[i % count] += by_panel[i];
}

void multiply_chunk(const Chunk& chunk, const Result& result, const Shape& shape, std::vector<double>& by_panel,
                    int threads) {
    const int64_t in_panels = shape.in_channels / PANEL, moments = static_cast<int64_t>(by_panel.size()) / in_panels;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t t = 0; t < chunk.tiles; t++) pack_dy(chunk, t, shape.out_channels);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t panel = 0; panel < in_panels; panel++)
        multiply_panel(panel, chunk, result, shape, moments ? by_panel.data() + panel * moments : nullptr);
}

void add_gradients(const Rows& rows, const Result& result, int threads) {
    static thread_local Scratch dy_memory, kept_memory;
    static thread_local std::vector<Tile> tile;
    const Shape& shape = rows.shape;
    const std::vector<int64_t> chosen = rows_that_count(rows);
    const int64_t tiles = shape.tiles(), all_tiles = tiles * static_cast<int64_t>(chosen.size());
    const int64_t entries = shape.in_channels * shape.out_channels, size = std::min(CHUNK, all_tiles);
    const int64_t moments = result.moments ? result.kinds() * shape.out_channels : 0;
    std::vector<double> by_panel(shape.in_channels / PANEL * moments, 0.0);
    if (all_tiles == 0) std::fill(result.gradient, result.gradient + 9 * entries, 0.f);

    const float* outside = zeros(std::max(shape.in_channels, shape.out_channels));
    tile.resize(size);
    Chunk chunk{tile, {dy_memory.floats(Panels::size(size, shape.out_channels)), size}, nullptr};
    if (all_tiles > size) chunk.kept = kept_memory.floats(entries / (PANEL * PANEL) * BLOCK_SIZE);
    for (int64_t begin = 0; begin < all_tiles; begin += size) {
        chunk.tiles = std::min(size, all_tiles - begin);
        chunk.first = begin == 0;
        chunk.last = begin + chunk.tiles == all_tiles;
        for (int64_t t = 0; t < chunk.tiles; t++)
            tile[t] = locate_tile(rows, chosen[(begin + t) / tiles], (begin + t) % tiles, outside);
        multiply_chunk(chunk, result, shape, by_panel, threads);
    }
    if (moments) add_moments(by_panel, result.moments, moments);
}

}  // namespace

// The gradients of `units` units of consecutive rows: (units, 3, 3, in, out), and their moments (units, kinds, out).
extern "C" void dpvision_winograd_units(const float* x, const float* dy, const float* z, int64_t units,
                                        float* gradients, double* moments, const Shape* sizes, int threads) {
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
