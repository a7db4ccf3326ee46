// The same convolution for raw filters, which are not kept in transformed form. A few channels of one panel of filters at a time are transformed
// in the cache and multiplied with many tiles there: the transformed filters, four times as large as the weight, are
// never written to memory, nor read from it.
#include "winograd_convolve.h"

namespace {

constexpr int64_t MANY = 96;      // tiles that share a transformation, so that it costs little for each
constexpr int64_t CHANNELS = 64;  // whose filters, at all points, fill a part of the second cache

// All channels of one panel of output channels, for all tiles of a block.
void multiply_panel(const Packed& packed, const Weight& weight, int64_t panel, const Products& products,
                    int64_t tiles) {
    static thread_local Scratch memory;
    constexpr int64_t STRIDE = CHANNELS * PANEL + GAP;
    float* filters = memory.floats(POINTS * STRIDE);
    for (int64_t begin = 0; begin < packed.channels; begin += CHANNELS) {
        const int64_t count = std::min(CHANNELS, packed.channels - begin);
        for (int64_t c = 0; c < count; c++) weight.transform(panel, begin + c, filters + c * PANEL, STRIDE);
        for (int64_t point = 0; point < POINTS; point++)
            for (int64_t tile = 0; tile < tiles; tile += GROUP)
                multiply_some(std::min<int64_t>(GROUP, tiles - tile),
                              packed.group(point, tile / GROUP) + begin * GROUP, filters + point * STRIDE, count,
                              begin > 0, products.at(point, 0, tile));
    }
}

}  // namespace

// y = convolution of x with the filters of the weight, plus the bias if there is one.
extern "C" void dpvision_winograd_convolve_raw(int64_t rows, int64_t height, int64_t width, int64_t in_channels,
                                               int64_t out_channels, int64_t backward, const float* x,
                                               const float* values, const float* bias, float* y, int threads) {
    const Shape shape{rows, height, width, in_channels, out_channels};
    const Weight weight{values, backward ? in_channels : out_channels, backward ? out_channels : in_channels,
                        backward != 0};
    const int64_t all_tiles = shape.rows * shape.tiles(), blocks = (all_tiles + MANY - 1) / MANY;
    const int64_t size = (all_tiles + blocks - 1) / blocks, panels = panels_of(shape.out_channels);
    static thread_local Scratch packed_memory;
    Packed packed{nullptr, shape.in_channels, groups_of(size)};
    packed.values = packed_memory.floats(packed.size());
    for (int64_t first = 0; first < all_tiles; first += size) {
        const int64_t tiles = std::min(size, all_tiles - first), groups = groups_of(tiles);
#pragma omp parallel num_threads(threads)
        {
            static thread_local Scratch product_memory;
            const Products products{product_memory.floats(Products{nullptr, 1, size}.size()), 1, size};
#pragma omp for schedule(static)
            for (int64_t group = 0; group < groups; group++) {
                const Packed part{packed.group(0, group), packed.channels, packed.groups};
                pack_block(x, shape, first + group * GROUP, std::min<int64_t>(GROUP, tiles - group * GROUP), part);
            }
#pragma omp for schedule(static)
            for (int64_t panel = 0; panel < panels; panel++) {
                multiply_panel(packed, weight, panel, products, tiles);
                for_panel(panel, shape.out_channels, [&](auto lanes, int64_t channel) {
                    for (int64_t t = 0; t < tiles; t++)
                        write_outputs(lanes, products.at(0, 0, t), products.point_stride(), bias,
                                      Outputs(y, shape, first + t).at, channel);
                });
            }
        }
    }
}
