// Weight gradients: of every privacy unit, or of all rows together with a factor each.
#include <algorithm>
#include <type_traits>
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
constexpr int BLOCK_ROWS = 6;
#endif

// Some rows of a batch, whose gradients are added up with a factor each; no factors means one for all.
struct Rows {
    const float *x, *dy, *factors;
    Shape shape;
};

// Where the result goes: a gradient (3, 3, in, out), and per output channel its squares and, if there is a `z` of the
// gradient's shape, its sum and its inner product with z. Or, instead of all that, it is added to a `total`.
struct Result {
    float* gradient = nullptr;
    double* moments = nullptr;
    const float* z = nullptr;
    double* total = nullptr;
    bool streams = false;  // whether the gradient is written past the caches, because it is not read soon

    int64_t kinds() const { return z ? 3 : 1; }
};

// A transformed operand: (panels, points, tiles, 16 channels).
struct Panels {
    float* values;
    int64_t tiles;

    float* at(int64_t panel, int64_t point) const { return values + (panel * POINTS + point) * point_stride(); }
    int64_t point_stride() const { return tiles * PANEL + GAP; }
    static size_t size(int64_t tiles, int64_t panels) { return POINTS * (tiles * PANEL + GAP) * panels; }
};

// A tile: where its pixels lie in x and dy, and what its gradient is multiplied by.
struct Tile {
    Inputs inputs;
    const float* outputs[TILE * TILE];
    float factor;
};

// The tiles in work, with their transformed output gradients. If there are more to come, the products of all
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

// A dy Aᵀ for one panel of a tile, while the tile after it is prefetched.
template <class Panel>
void pack_outputs(Panel panel, const Tile& tile, const Tile& next, int64_t channel, float* out, int64_t stride) {
    v16 y[TILE], half[TILE * PATCH], column[PATCH];
    for (int i = 0; i < TILE; i++) {
        for (int j = 0; j < TILE; j++) {
            panel.get(tile.outputs[i * TILE + j] + channel, y[j]);
            y[j] = tile.factor * y[j];
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
    for_panels(channels, [&](auto panel, int64_t c) {
        pack_outputs(panel, chunk.tile[t], chunk.after(t), c, chunk.dy.at(c / PANEL, 0) + t * PANEL,
                     chunk.dy.point_stride());
    });
}

// ROWS input channels times 16 output channels, summed over tiles and perhaps added to what is there. All loops over
// sums are unrolled, for only then does the compiler keep the sums in registers from beginning to end.
template <int ROWS> static inline void multiply(const float* x, const float* dy, int64_t tiles, bool add, float* out) {
    v16 sum[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) sum[r] = v16{};
    for (int64_t t = 0; t < tiles; t++, x += PANEL, dy += PANEL) {
        const v16 row = panel_at(dy);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) sum[r] = x[r] * row + sum[r];
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) panel_at(out + r * PANEL) = add ? sum[r] + panel_at(out + r * PANEL) : sum[r];
}

// The same for a number of input channels that is known only now, at least one.
template <int ROWS = BLOCK_ROWS>
static inline void multiply_some(int rows, const float* x, const float* dy, int64_t tiles, bool add, float* out) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return multiply_some<ROWS - 1>(rows, x, dy, tiles, add, out);
    multiply<ROWS>(x, dy, tiles, add, out);
}

// Products of a pair of panels at column j of the points.
template <class In>
void multiply_column(In in, const Panels& x, const Chunk& chunk, int64_t out_panel, int j, float* products) {
    for (int i = 0; i < PATCH; i++)
        for (int r = 0; r < in.count(); r += BLOCK_ROWS)
            multiply_some(std::min(BLOCK_ROWS, in.count() - r), x.at(0, i * PATCH + j) + r,
                          chunk.dy.at(out_panel, i * PATCH + j), chunk.tiles, !chunk.first,
                          products + i * POINT_SIZE + r * PANEL);
}

// Sums of at most 16 · 9 terms in float32, which are then added up in float64.
struct Run {
    v16 squares = {}, entries = {}, inner = {};
};

// Gᵀq for column j of the points: half-way to the gradient, (16 in, 3, 6, 16 out) for all columns.
template <class In> void finish_column(In in, const float* products, int j, float* half) {
    for (int r = 0; r < in.count(); r++) {
        v16 q[PATCH], taps[3];
        for (int i = 0; i < PATCH; i++) q[i] = panel_at(products + i * POINT_SIZE + r * PANEL);
        to_taps(q, 1, taps, 1);
        for (int i = 0; i < 3; i++) panel_at(half + ((r * 3 + i) * PATCH + j) * PANEL) = taps[i];
    }
}

// (Gᵀq)G for one input channel and a panel of output channels.
template <bool WITH_Z, class Out, class Number>
static inline void finish_row(Out out, const float* half, Number* gradient, const float* z, int64_t tap_stride,
                              Run& run) {
    for (int i = 0; i < 3; i++) {
        v16 q[PATCH], taps[3];
        for (int j = 0; j < PATCH; j++) q[j] = panel_at(half + (i * PATCH + j) * PANEL);
        to_taps(q, 1, taps, 1);
        for (int j = 0; j < 3; j++) {
            const int64_t offset = (i * 3 + j) * tap_stride;
            out.put(gradient + offset, taps[j]);
            run.squares = taps[j] * taps[j] + run.squares;
            if constexpr (WITH_Z) {
                v16 other;
                out.get(z + offset, other);
                run.entries = run.entries + taps[j];
                run.inner = taps[j] * other + run.inner;
            }
        }
    }
}

void add_lanes(const v16& values, int lanes, double* to) {
    for (int lane = 0; lane < lanes; lane++) to[lane] += values[lane];
}

// Writes the gradient of a pair of panels, which begin at input channel `row` and output channel `column`; `moments`
// (kinds, out channels) are those of this input panel. A function of its own, or it would compete for registers with
// what it is called from.
template <bool WITH_Z, class In, class Out, class Number>
__attribute__((noinline)) void finish_pair(In in, int64_t row, Out out, int64_t column, const float* half,
                                           Number* gradient, const float* z, const Shape& shape, double* moments) {
    const int64_t tap_stride = shape.in_channels * shape.out_channels;
    Run run;
    for (int r = 0; r < in.count(); r++) {
        const int64_t offset = (row + r) * shape.out_channels + column;
        finish_row<WITH_Z>(out, half + r * 3 * PATCH * PANEL, gradient + offset, WITH_Z ? z + offset : nullptr,
                           tap_stride, run);
    }
    if (!moments) return;
    add_lanes(run.squares, out.count(), moments + column);
    if constexpr (WITH_Z) {
        add_lanes(run.entries, out.count(), moments + shape.out_channels + column);
        add_lanes(run.inner, out.count(), moments + 2 * shape.out_channels + column);
    }
}

// Written past the caches, a line needs not be read first. Lines must begin where the gradient's panels begin.
struct StreamedPanel : WholePanel {
    void put(float* p, const v16& values) const {
#if defined(__AVX512F__)
        _mm512_stream_ps(p, values);
#elif defined(__AVX__)
        __m256 halves[2];
        std::memcpy(halves, &values, sizeof values);
        _mm256_stream_ps(p, halves[0]);
        _mm256_stream_ps(p + PANEL / 2, halves[1]);
#else
        panel_at(p) = values;
#endif
    }
};

// Others see what was streamed only after this.
void end_stream() {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

// Added to a running sum in float64.
template <class Panel> struct AddedPanel : Panel {
    void put(double* p, const v16& values) const {
        float single[PANEL];
        panel_at(single) = values;
        for (int lane = 0; lane < this->count(); lane++) p[lane] += single[lane];
    }
};

template <class In, class Out>
void finish(In in, int64_t row, Out out, int64_t column, const float* half, const Result& result, const Shape& shape,
            double* moments) {
    const auto finish_with = [&](auto panel, auto* gradient) {
        if (result.z) return finish_pair<true>(in, row, panel, column, half, gradient, result.z, shape, moments);
        finish_pair<false>(in, row, panel, column, half, gradient, nullptr, shape, moments);
    };
    if (result.total) return finish_with(AddedPanel<Out>{out}, result.total);
    if constexpr (std::is_same_v<Out, WholePanel>)
        if (result.streams) return finish_with(StreamedPanel{}, result.gradient);
    finish_with(out, result.gradient);
}

// One pair of panels, column by column, so that little memory lies between the two halves of the inverse transform.
template <class In>
void multiply_pair(In in, const Panels& x, const Chunk& chunk, int64_t out_panel, float* kept, float* half) {
    static thread_local Scratch column_memory;
    float* column = column_memory.floats(COLUMN_SIZE);
    for (int j = 0; j < PATCH; j++) {
        float* products = kept ? kept + j * COLUMN_SIZE : column;
        multiply_column(in, x, chunk, out_panel, j, products);
        if (chunk.last) finish_column(in, products, j, half);
    }
}

// Prefetches a pair's part of the total: it lies in many places, which the processor does not predict.
template <class In>
void prefetch_total(In in, int64_t row, int64_t column, const Result& result, const Shape& shape) {
    constexpr int64_t LINE = 8;
    for (int64_t tap = 0; tap < 9; tap++)
        for (int r = 0; r < in.count(); r++) {
            const double* at = result.total + (tap * shape.in_channels + row + r) * shape.out_channels + column;
            __builtin_prefetch(at, 1);
            __builtin_prefetch(at + LINE, 1);
        }
}

// One input panel, from channel `row` on, transformed here, against all output panels.
template <class In>
void multiply_panel(In in, int64_t row, const Chunk& chunk, const Result& result, const Shape& shape,
                    double* moments) {
    static thread_local Scratch x_memory, half_memory;
    const Panels x{x_memory.floats(Panels::size(chunk.dy.tiles, 1)), chunk.dy.tiles};
    for (int64_t t = 0; t < chunk.tiles; t++)
        pack_inputs(in, chunk.tile[t].inputs, chunk.after(t).inputs, row, x.at(0, 0) + t * PANEL, x.point_stride());
    float* half = half_memory.floats(3 * PATCH * PANEL * PANEL);
    const int64_t first_pair = row / PANEL * panels_of(shape.out_channels);
    for_panels(shape.out_channels, [&](auto out, int64_t column) {
        const int64_t out_panel = column / PANEL;
        float* kept = chunk.kept ? chunk.kept + (first_pair + out_panel) * BLOCK_SIZE : nullptr;
        if (chunk.last && result.total) prefetch_total(in, row, column, result, shape);
        multiply_pair(in, x, chunk, out_panel, kept, half);
        if (chunk.last) finish(in, row, out, column, half, result, shape, moments);
    });
    if (result.streams) end_stream();
}

// The moments of the input panels, added in their order, whichever thread computed them.
void add_moments(const std::vector<double>& by_panel, double* moments, int64_t count) {
    std::fill(moments, moments + count, 0.0);
    for (size_t i = 0; i < by_panel.size(); i++) moments[i % count] += by_panel[i];
}

void multiply_chunk(const Chunk& chunk, const Result& result, const Shape& shape, std::vector<double>& by_panel,
                    int threads) {
    const int64_t panels = panels_of(shape.in_channels), moments = static_cast<int64_t>(by_panel.size()) / panels;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t t = 0; t < chunk.tiles; t++) pack_dy(chunk, t, shape.out_channels);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t panel = 0; panel < panels; panel++)
        for_panel(panel, shape.in_channels, [&](auto in, int64_t row) {
            multiply_panel(in, row, chunk, result, shape, moments ? by_panel.data() + panel * moments : nullptr);
        });
}

void add_gradients(const Rows& rows, const Result& result, int threads) {
    static thread_local Scratch dy_memory, kept_memory;
    static thread_local std::vector<Tile> tile;
    const Shape& shape = rows.shape;
    const std::vector<int64_t> chosen = rows_that_count(rows);
    const int64_t tiles = shape.tiles(), all_tiles = tiles * static_cast<int64_t>(chosen.size());
    const int64_t entries = shape.in_channels * shape.out_channels, size = std::min(CHUNK, all_tiles);
    const int64_t in_panels = panels_of(shape.in_channels), out_panels = panels_of(shape.out_channels);
    const int64_t moments = result.moments ? result.kinds() * shape.out_channels : 0;
    std::vector<double> by_panel(in_panels * moments, 0.0);
    if (all_tiles == 0 && result.gradient) std::fill(result.gradient, result.gradient + 9 * entries, 0.f);

    const float* outside = zeros(std::max(shape.in_channels, shape.out_channels));
    tile.resize(size);
    Chunk chunk{tile, {dy_memory.floats(Panels::size(size, out_panels)), size}, nullptr};
    if (all_tiles > size) chunk.kept = kept_memory.floats(in_panels * out_panels * BLOCK_SIZE);
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
extern "C" void dpvision_winograd_units(int64_t all_rows, int64_t height, int64_t width, int64_t in_channels,
                                        int64_t out_channels, int64_t units, const float* x, const float* dy,
                                        const float* z, float* gradients, double* moments, int threads) {
    Shape shape{all_rows, height, width, in_channels, out_channels};
    shape.rows /= units;
    const int64_t entries = 9 * shape.in_channels * shape.out_channels, places = shape.rows * shape.positions();
    const auto one_unit = [&](int64_t unit, int inside) {
        const Rows rows{x + unit * places * shape.in_channels, dy + unit * places * shape.out_channels, nullptr, shape};
        Result result{gradients + unit * entries, nullptr, z, nullptr};
        result.moments = moments + unit * result.kinds() * shape.out_channels;
        result.streams = shape.out_channels % PANEL == 0 && reinterpret_cast<uintptr_t>(gradients) % 64 == 0;
        add_gradients(rows, result, inside);
    };
    // Fewer units than threads share the threads one by one. Not inside a parallel region, not even one of a single
    // thread: threads of a nested region are created again each time.
    if (units < threads)
        for (int64_t unit = 0; unit < units; unit++) one_unit(unit, threads);
    else
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t unit = 0; unit < units; unit++) one_unit(unit, 1);
}

// total += Σ factor · gradient over all rows: (3, 3, in, out).
extern "C" void dpvision_winograd_sum(int64_t rows, int64_t height, int64_t width, int64_t in_channels,
                                      int64_t out_channels, const float* x, const float* dy, const float* factors,
                                      double* total, int threads) {
    const Shape shape{rows, height, width, in_channels, out_channels};
    add_gradients({x, dy, factors, shape}, {nullptr, nullptr, nullptr, total}, threads);
}
