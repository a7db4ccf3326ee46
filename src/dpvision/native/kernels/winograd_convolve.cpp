// The convolution itself, and with turned and swapped filters its input gradient.
#include <algorithm>
#include <vector>

#include "winograd.h"

namespace {

// Tiles that are multiplied at once: as many as have sums in the 32 wide or 16 narrow registers there are.
#if defined(__AVX512F__)
constexpr int GROUP = 16;
#else
constexpr int GROUP = 6;
#endif

// Transformed inputs of a block of tiles: (points, groups of tiles, panels, GROUP tiles, 16 channels).
// A group's tiles lie side by side, so the product below reads its whole operand through one moving pointer.
struct Packed {
    float* values;
    int64_t channels, groups;

    float* group(int64_t point, int64_t index) const {
        return values + point * point_stride() + index * group_size();
    }
    int64_t point_stride() const { return groups * group_size() + GAP; }
    int64_t group_size() const { return panels_of(channels) * PANEL * GROUP; }
    size_t size() const { return POINTS * point_stride(); }
};

// Products of a block of tiles: (points, panels of output channels, tiles, 16 channels).
struct Products {
    float* values;
    int64_t panels, tiles;

    float* at(int64_t point, int64_t panel, int64_t tile) const {
        return values + point * point_stride() + (panel * tiles + tile) * PANEL;
    }
    int64_t point_stride() const { return panels * tiles * PANEL + GAP; }
    size_t size() const { return POINTS * point_stride(); }
};

// COUNT tiles of a group times one panel of filters (channels, 16). All loops over sums are unrolled, for only then
// does the compiler keep the sums in registers from beginning to end.
template <int COUNT> void multiply(const float* group, const float* filters, int64_t channels, float* out) {
    v16 sum[COUNT];
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; r++) sum[r] = v16{};
    const auto add = [&](int64_t lane) {
        const v16 column = panel_at(filters);
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++) sum[r] = group[r * PANEL + lane] * column + sum[r];
        filters += PANEL;
    };
    for (; channels >= PANEL; channels -= PANEL, group += GROUP * PANEL)
        for (int lane = 0; lane < PANEL; lane++) add(lane);
    for (int64_t lane = 0; lane < channels; lane++) add(lane);
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; r++) panel_at(out + r * PANEL) = sum[r];
}

// The same for a number of tiles that is known only now.
template <int COUNT = GROUP>
void multiply_some(int64_t count, const float* group, const float* filters, int64_t channels, float* out) {
    if constexpr (COUNT > 0) {
        if (count == COUNT) return multiply<COUNT>(group, filters, channels, out);
        multiply_some<COUNT - 1>(count, group, filters, channels, out);
    }
}

void pack_block(const float* x, const Shape& shape, int64_t first, int64_t tiles, const Packed& packed) {
    static thread_local std::vector<Inputs> inputs;
    inputs.resize(tiles);
    for (int64_t t = 0; t < tiles; t++) {
        const float* picture = x + (first + t) / shape.tiles() * shape.positions() * shape.in_channels;
        locate_inputs(picture, shape, (first + t) % shape.tiles(), zeros(shape.in_channels), inputs[t].at);
    }
    for (int64_t t = 0; t < tiles; t++) {
        float* out = packed.group(0, t / GROUP) + t % GROUP * PANEL;
        const Inputs& next = inputs[std::min(t + 1, tiles - 1)];
        for_panels(packed.channels, [&](auto panel, int64_t c) {
            pack_inputs(panel, inputs[t], next, c, out + c * GROUP, packed.point_stride());
        });
    }
}

void multiply_block(const Packed& packed, const float* filters, const Products& products, int64_t tiles) {
    for (int64_t point = 0; point < POINTS; point++)
        for (int64_t panel = 0; panel < products.panels; panel++, filters += packed.channels * PANEL)
            for (int64_t tile = 0; tile < tiles; tile += GROUP) {
                const int64_t count = std::min<int64_t>(GROUP, tiles - tile);
                multiply_some(count, packed.group(point, tile / GROUP), filters, packed.channels,
                              products.at(point, panel, tile));
            }
}

// AᵀmA for one panel of a tile, plus the bias.
template <class Panel>
void write_outputs(Panel panel, const float* products, int64_t stride, const float* bias, float* const* at,
                   int64_t channel) {
    v16 m[PATCH], half[TILE * PATCH], y[TILE], shift = {};
    if (bias) panel.get(bias + channel, shift);
    for (int j = 0; j < PATCH; j++) {
        for (int i = 0; i < PATCH; i++) m[i] = panel_at(products + (i * PATCH + j) * stride);
        to_outputs(m, 1, half + j, PATCH);
    }
    for (int i = 0; i < TILE; i++) {
        to_outputs(half + i * PATCH, 1, y, 1);
        for (int j = 0; j < TILE; j++) panel.put(at[i * TILE + j] + channel, y[j] + shift);
    }
}

void unpack_tile(const Products& products, int64_t slot, const float* bias, float* y, const Shape& shape,
                 int64_t tile) {
    static thread_local Scratch void_memory;
    float* at[TILE * TILE];
    float* picture = y + tile / shape.tiles() * shape.positions() * shape.out_channels;
    locate_outputs(picture, shape, tile % shape.tiles(), void_memory.floats(shape.out_channels), at);
    for_panels(shape.out_channels, [&](auto panel, int64_t c) {
        write_outputs(panel, products.at(0, c / PANEL, slot), products.point_stride(), bias, at, c);
    });
}

// GwGᵀ for one input channel and a panel of output channels: point e goes to `out + e * stride`.
void transform_filter(const float* taps, float* out, int64_t stride) {
    v16 w[3], half[PATCH * 3], row[PATCH];
    for (int j = 0; j < 3; j++) {
        for (int i = 0; i < 3; i++) w[i] = panel_at(taps + (i * 3 + j) * PANEL);
        filter_to_points(w, 1, half + j, 3);
    }
    for (int i = 0; i < PATCH; i++) {
        filter_to_points(half + i * 3, 1, row, 1);
        for (int j = 0; j < PATCH; j++) panel_at(out + (i * PATCH + j) * stride) = row[j];
    }
}

// Tiles that are transformed, multiplied and transformed back before the next ones: few, so that their operands and the
// filters stay in the cache; more where the filters are too large for it and must be read anew each time.
int64_t block_size(const Shape& shape, int64_t threads) {
    constexpr int64_t FEW = (16 + GROUP - 1) / GROUP * GROUP, LARGE = 48 * 1024;
    const int64_t wanted = shape.in_channels * shape.out_channels > LARGE ? 2 * FEW : FEW;
    const int64_t share = (shape.rows * shape.tiles() + threads - 1) / threads;
    return std::max<int64_t>(1, std::min(share, wanted));
}

}  // namespace

// Filters (out, in, 3, 3) to (points, panels, channels, 16); a last panel is filled up with zeros. Backward: turned by
// 180°, in and out swapped.
extern "C" void dpvision_winograd_filters(const float* weight, int64_t out_channels, int64_t in_channels, int backward,
                                          float* out, int threads) {
    const int64_t columns = backward ? in_channels : out_channels, channels = backward ? out_channels : in_channels;
    const int64_t column_stride = 9 * (backward ? 1 : in_channels), channel_stride = 9 * (backward ? in_channels : 1);
    const int64_t panels = panels_of(columns), point_stride = panels * channels * PANEL;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t c = 0; c < channels; c++) {
            const float* filters = weight + panel * PANEL * column_stride + c * channel_stride;
            const int64_t lanes = std::min<int64_t>(PANEL, columns - panel * PANEL);
            float taps[9 * PANEL] = {};
            for (int64_t lane = 0; lane < lanes; lane++)
                for (int tap = 0; tap < 9; tap++)
                    taps[(backward ? 8 - tap : tap) * PANEL + lane] = filters[lane * column_stride + tap];
            transform_filter(taps, out + (panel * channels + c) * PANEL, point_stride);
        }
}

// y = convolution of x with the filters, plus the bias if there is one.
extern "C" void dpvision_winograd_convolve(const float* x, const float* filters, const float* bias, float* y,
                                           const Shape* sizes, int threads) {
    const Shape shape = *sizes;
    const int64_t all_tiles = shape.rows * shape.tiles(), size = block_size(shape, threads);
    const int64_t blocks = (all_tiles + size - 1) / size, groups = (size + GROUP - 1) / GROUP;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        static thread_local Scratch packed_memory, product_memory;
        Packed packed{nullptr, shape.in_channels, groups};
        Products products{nullptr, panels_of(shape.out_channels), size};
        packed.values = packed_memory.floats(packed.size());
        products.values = product_memory.floats(products.size());
        const int64_t first = block * size, count = std::min(size, all_tiles - first);
        pack_block(x, shape, first, count, packed);
        multiply_block(packed, filters, products, count);
        for (int64_t t = 0; t < count; t++) unpack_tile(products, t, bias, y, shape, first + t);
    }
}
