// What a convolution's windows are, for kernels that give every unit's weight gradient.
#pragma once
#include <cstdint>

// Sizes of the padded input, of the output and of the kernel. Strides of the input are in floats; its channels lie
// together, and so do its columns.
struct Windows {
    int64_t rows_per_unit, row_stride, line_stride, channels;
    int64_t height, width, outputs;
    int64_t kernel_height, kernel_width, stride_height, stride_width;

    int64_t positions() const { return rows_per_unit * height * width; }
    int64_t run() const { return kernel_width * channels; }
    int64_t depth() const { return kernel_height * run(); }
};
