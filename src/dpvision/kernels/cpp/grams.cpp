// The squared norm of a 3×3 convolution's weight gradient (stride 1, padding 1) from two Gram matrices.
//
// Two windows, around positions t and t', have the inner product Σ_d x_gram[t + d, t' + d] over the nine shifts d that
// keep both inside the image. It is added up in two steps, first the vertical shifts, then the horizontal ones.
#include <cmath>

#include "scratch.h"
#include "simd.h"

namespace {

// A square matrix with zeros before and after every row, so that a vector may be read one entry off its place.
struct PaddedRows {
    float* first;
    int64_t stride;
    static int64_t stride_of(int64_t size) { return (size + LANES - 1) / LANES * LANES + LANES; }
    static int64_t floats(int64_t size) { return LANES + size * stride_of(size); }
    PaddedRows(float* memory, int64_t size) : first(memory + LANES), stride(stride_of(size)) {
        std::memset(memory, 0, sizeof(float) * floats(size));
    }
    float* row(int64_t t) const { return first + t * stride; }
};

void add_vertical_shifts(const float* gram, int64_t size, int64_t width, const PaddedRows& sums) {
    for (int64_t t = 0; t < size; t++) {
        float* sum = sums.row(t);
        std::memcpy(sum, gram + t * size, sizeof(float) * size);
        if (t + width < size) {
            const float* below = gram + (t + width) * size + width;
            for (int64_t s = 0; s < size - width; s++) sum[s] += below[s];
        }
        if (t >= width) {
            const float* above = gram + (t - width) * size;
            for (int64_t s = width; s < size; s++) sum[s] += above[s - width];
        }
    }
}

// Which positions have a neighbour to the right and to the left: 1 or 0.
struct Neighbours {
    float *right, *left;
    Neighbours(float* memory, int64_t size, int64_t width) : right(memory), left(memory + PaddedRows::stride_of(size)) {
        std::memset(memory, 0, sizeof(float) * 2 * PaddedRows::stride_of(size));
        for (int64_t t = 0; t < size; t++) {
            right[t] = t % width + 1 < width;
            left[t] = t % width > 0;
        }
    }
};

// One row of the windows' Gram matrix, eight entries from s on. The products with zeros are no trap for infinities:
// a Gram matrix that is not finite makes the result so in any case, through the shift by nothing.
v8 windows(const PaddedRows& sums, const Neighbours& has, int64_t t, int64_t s) {
    return load(sums.row(t) + s) + (has.right[t] ? load(has.right + s) * load(sums.row(t + 1) + s + 1) : all(0)) +
           (has.left[t] ? load(has.left + s) * load(sums.row(t - 1) + s - 1) : all(0));
}

double sum_of_lanes(v8 x) {
    double sum = 0;
    for (int k = 0; k < LANES; k++) sum += x[k];
    return sum;
}

double row_product(const PaddedRows& sums, const Neighbours& has, const float* dy, int64_t size, int64_t t) {
    constexpr int64_t RUN = 32 * LANES;
    double total = 0;
    for (int64_t first = 0; first < size; first += RUN) {
        const int64_t end = first + RUN < size ? first + RUN : size;
        v8 sum = {};
        int64_t s = first;
        for (; s + LANES <= end; s += LANES) sum += windows(sums, has, t, s) * load(dy + s);
        if (s < end) sum += windows(sums, has, t, s) * load_some(dy + s, int(end - s));
        total += sum_of_lanes(sum);
    }
    return total;
}

double norm_sq(const float* x_gram, const float* dy_gram, int64_t height, int64_t width) {
    static thread_local Scratch rows, marks;
    constexpr double EPSILON = 0x1p-23;
    const int64_t size = height * width;
    const PaddedRows sums(rows.floats(PaddedRows::floats(size)), size);
    const Neighbours has(marks.floats(2 * PaddedRows::stride_of(size)), size, width);
    add_vertical_shifts(x_gram, size, width, sums);
    double total = 0, diagonal = 0;
    for (int64_t t = 0; t < size; t++) {
        total += row_product(sums, has, dy_gram + t * size, size, t);
        diagonal += double(windows(sums, has, t, t)[0]) * dy_gram[t * size + t];
    }
    // A negative sum is rounding and nothing more; but minus infinity is an overflow, and must not become 0.
    if (!std::isfinite(total)) return std::fabs(total);
    return (total < 0 ? 0 : total) + 16 * EPSILON * diagonal;
}

}  // namespace

extern "C" void dpvision_gram_norms_sq(int64_t units, int64_t height, int64_t width, const float* x_gram_UTT,
                                       const float* dy_gram_UTT, double* norms_sq_U, int threads) {
    const int64_t entries = height * width * height * width;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t u = 0; u < units; u++)
        norms_sq_U[u] = norm_sq(x_gram_UTT + u * entries, dy_gram_UTT + u * entries, height, width);
}
