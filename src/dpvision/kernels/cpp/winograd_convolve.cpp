// The convolution itself, and with turned and swapped filters its input gradient; filters are transformed beforehand.
#include "winograd_convolve.h"

namespace {

void multiply_block(const Packed& packed, const float* filters, const Products& products, int64_t tiles) {
    for (int64_t point = 0; point < POINTS; point++)
        for (int64_t panel = 0; panel < products.panels; panel++, filters += packed.channels * PANEL)
            for (int64_t tile = 0; tile < tiles; tile += GROUP)
                multiply_some(std::min<int64_t>(GROUP, tiles - tile), packed.group(point, tile / GROUP), filters,
                              packed.channels, false, products.at(point, panel, tile));
}

void unpack_tile(const Products& products, int64_t slot, const float* bias, float* y, const Shape& shape,
                 int64_t tile) {
    const Outputs outputs(y, shape, tile);
    for_panels(shape.out_channels, [&](auto panel, int64_t c) {
        write_outputs(panel, products.at(0, c / PANEL, slot), products.point_stride(), bias, outputs.at, c);
    });
}

// Tiles that are transformed, multiplied and transformed back before the next ones: few, so that their operands and the
// filters stay in the cache; more where the filters are too large for it and must be read again each time.
int64_t block_size(const Shape& shape, int64_t threads) {
    constexpr int64_t FEW = (16 + GROUP - 1) / GROUP * GROUP, LARGE = 48 * 1024;
    const int64_t wanted = shape.in_channels * shape.out_channels > LARGE ? 2 * FEW : FEW;
    const int64_t share = (shape.rows * shape.tiles() + threads - 1) / threads;
    return std::max<int64_t>(1, std::min(share, wanted));
}

}  // namespace

// Filters (out, in, 3, 3) to (points, panels, channels, 16); a last panel is filled up with zeros.
extern "C" void dpvision_winograd_filters(int64_t out_channels, int64_t in_channels, int64_t backward,
                                          const float* values, float* out, int threads) {
    const Weight weight{values, out_channels, in_channels, backward != 0};
    const int64_t channels = weight.channels(), panels = panels_of(weight.columns());
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t c = 0; c < channels; c++)
            weight.transform(panel, c, out + (panel * channels + c) * PANEL, panels * channels * PANEL);
}

// y = convolution of x with the filters, plus the bias if there is one.
extern "C" void dpvision_winograd_convolve(int64_t rows, int64_t height, int64_t width, int64_t in_channels,
                                           int64_t out_channels, const float* x, const float* filters,
                                           const float* bias, float* y, int threads) {
    const Shape shape{rows, height, width, in_channels, out_channels};
    const int64_t all_tiles = shape.rows * shape.tiles(), size = block_size(shape, threads);
    const int64_t blocks = (all_tiles + size - 1) / size;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        static thread_local Scratch packed_memory, product_memory;
        Packed packed{nullptr, shape.in_channels, groups_of(size)};
        Products products{nullptr, panels_of(shape.out_channels), size};
        packed.values = packed_memory.floats(packed.size());
        products.values = product_memory.floats(products.size());
        const int64_t first = block * size, count = std::min(size, all_tiles - first);
        pack_block(x, shape, first, count, packed);
        multiply_block(packed, filters, products, count);
        for (int64_t t = 0; t < count; t++) unpack_tile(products, t, bias, y, shape, first + t);
    }
}
