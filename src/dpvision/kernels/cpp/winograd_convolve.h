// What the two forms of the convolution share: with filters that were transformed before, and with filters that are
// transformed while they are used. Both add up the same products in the same order, so that their results are equal.
#pragma once
#include <algorithm>
#include <vector>

#include "winograd.h"

// Tiles that are multiplied at once: as many as have sums in the 32 wide or 16 narrow registers there are.
#if defined(__AVX512F__)
constexpr int GROUP = 16;
#else
constexpr int GROUP = 6;
#endif

static inline int64_t groups_of(int64_t tiles) { return (tiles + GROUP - 1) / GROUP; }

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

// COUNT tiles of a group times one panel of filters (channels, 16), perhaps added to what is there. All loops over sums
// are unrolled, for only then does the compiler keep the sums in registers from beginning to end.
template <int COUNT>
static inline void multiply(const float* group, const float* filters, int64_t channels, bool add, float* out) {
    v16 sum[COUNT];
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; r++) sum[r] = v16{};
    if (add)
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++) sum[r] = panel_at(out + r * PANEL);
    const auto add_lane = [&](int64_t lane) {
        const v16 column = panel_at(filters);
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++) sum[r] = group[r * PANEL + lane] * column + sum[r];
        filters += PANEL;
    };
    for (; channels >= PANEL; channels -= PANEL, group += GROUP * PANEL)
        for (int lane = 0; lane < PANEL; lane++) add_lane(lane);
    for (int64_t lane = 0; lane < channels; lane++) add_lane(lane);
#pragma GCC unroll 16
    for (int r = 0; r < COUNT; r++) panel_at(out + r * PANEL) = sum[r];
}

// The same for a number of tiles that is known only now.
template <int COUNT = GROUP>
static inline void multiply_some(int64_t count, const float* group, const float* filters, int64_t channels, bool add,
                                 float* out) {
    if constexpr (COUNT > 0) {
        if (count == COUNT) return multiply<COUNT>(group, filters, channels, add, out);
        multiply_some<COUNT - 1>(count, group, filters, channels, add, out);
    }
}

// Transforms some tiles, from number `first` of all tiles on, into the groups from the packed block's beginning on.
static inline void pack_block(const float* x, const Shape& shape, int64_t first, int64_t tiles, const Packed& packed) {
    static thread_local std::vector<Inputs> inputs;
    inputs.resize(tiles);
    for (int64_t t = 0; t < tiles; t++) {
        const float* image = x + (first + t) / shape.tiles() * shape.positions() * shape.in_channels;
        locate_inputs(image, shape, (first + t) % shape.tiles(), zeros(shape.in_channels), inputs[t].at);
    }
    for (int64_t t = 0; t < tiles; t++) {
        float* out = packed.group(0, t / GROUP) + t % GROUP * PANEL;
        const Inputs& next = inputs[std::min(t + 1, tiles - 1)];
        for_panels(packed.channels, [&](auto panel, int64_t c) {
            pack_inputs(panel, inputs[t], next, c, out + c * GROUP, packed.point_stride());
        });
    }
}

// AᵀmA for one panel of a tile, plus the bias.
template <class Panel>
static inline void write_outputs(Panel panel, const float* products, int64_t stride, const float* bias,
                                 float* const* at, int64_t channel) {
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

// Where a tile's outputs go, by its number among all tiles of all rows.
struct Outputs {
    float* at[TILE * TILE];

    Outputs(float* y, const Shape& shape, int64_t tile) {
        static thread_local Scratch unused_memory;
        float* image = y + tile / shape.tiles() * shape.positions() * shape.out_channels;
        locate_outputs(image, shape, tile % shape.tiles(), unused_memory.floats(shape.out_channels), at);
    }
};

// The filters of a weight (out, in, 3, 3) for the forward pass; backward, they are turned by 180°, in and out swapped.
struct Weight {
    const float* values;
    int64_t out_channels, in_channels;
    bool backward;

    int64_t columns() const { return backward ? in_channels : out_channels; }
    int64_t channels() const { return backward ? out_channels : in_channels; }
    int64_t column_stride() const { return 9 * (backward ? 1 : in_channels); }
    int64_t channel_stride() const { return 9 * (backward ? in_channels : 1); }

    // GwGᵀ for one channel and a panel of columns, filled up with zeros: point e goes to `out + e * stride`.
    void transform(int64_t panel, int64_t channel, float* out, int64_t stride) const {
        const float* filters = values + panel * PANEL * column_stride() + channel * channel_stride();
        const int64_t lanes = std::min<int64_t>(PANEL, columns() - panel * PANEL);
        float taps[9 * PANEL] = {};
        for (int64_t lane = 0; lane < lanes; lane++)
            for (int tap = 0; tap < 9; tap++)
                taps[(backward ? 8 - tap : tap) * PANEL + lane] = filters[lane * column_stride() + tap];
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
};
