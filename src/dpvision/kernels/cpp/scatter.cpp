// Wavelet scattering of order 2, eight planes (a colour of an image each) at a time, one in every lane.
//
// All of a plane's work stays in the cache: transform, filter, transform back, take the modulus, blur; the moduli of
// order 1 go through it once more.
#include <algorithm>
#include <type_traits>

#include "fourier.h"
#include "scratch.h"

namespace {

struct Strides {
    int64_t row, channel, line, column;
};

}  // namespace

// Sizes, in the order in which scatter.py writes them.
struct Sizes {
    int64_t colours, height, width, pad_top, pad_left, padded_height, padded_width, scales, angles;
    Strides x, y;
};

// Sizes and tables. A table of wavelets is (angles, height, width) at its level, one of the blur (outputs, size at its
// level).
struct Scattering : Sizes {
    const float* const* wavelets;  // (scales, scales): of scale j for images subsampled by 2^level
    const float* const* blur_y;    // (scales)
    const float* const* blur_x;

    int64_t outputs(int64_t size) const { return (size >> scales) - 2; }
    int64_t paths() const { return 1 + scales * angles + scales * (scales - 1) / 2 * angles * angles; }
};

namespace {

// Where a coordinate beyond the edge is reflected to; the edge itself is not repeated.
int64_t reflected(int64_t i, int64_t size) { return i < 0 ? -i : i < size ? i : 2 * (size - 1) - i; }

#ifdef __AVX__
v8 root(v8 x) { return _mm256_sqrt_ps(x); }
#else
v8 root(v8 x) {
    v8 y;
    for (int i = 0; i < LANES; i++) y[i] = std::sqrt(x[i]);
    return y;
}
#endif

// The planes in work; a thread uses the same memory for the next ones.
class Planes {
  public:
    Planes(const Scattering& sizes, const std::vector<Fourier>& lines, const std::vector<Fourier>& columns)
        : sizes(sizes), lines(lines), columns(columns) {
        static thread_local Scratch memory;
        lay_out(memory.floats(lay_out(nullptr)));
    }

    // Planes `from` and following, at most eight, from `x` to `y`.
    void scatter(const float* x, float* y, int64_t from, int count) {
        read(x, from, count);
        blur(first, 0, 0);
        to_frequencies(first, image_hat, 0);
        int64_t path = 1 + sizes.scales * sizes.angles;
        for (int64_t j = 0; j < sizes.scales; j++)
            for (int64_t angle = 0; angle < sizes.angles; angle++) {
                modulus(image_hat, 0, j, angle, first);
                blur(first, j, 1 + j * sizes.angles + angle);
                if (j + 1 < sizes.scales) path = second_order(j, path);
            }
        write(y, from, count);
    }

  private:
    // Everything one behind the other from `block` on; returns how many floats that takes.
    size_t lay_out(float* block) {
        const int64_t area = sizes.padded_height * sizes.padded_width;
        const int64_t longest = std::max(sizes.padded_height, sizes.padded_width);
        const int64_t height = sizes.outputs(sizes.padded_height), width = sizes.outputs(sizes.padded_width);
        size_t used = 0;
        const auto place = [&](auto*& start, int64_t count) {
            if (block) start = reinterpret_cast<std::remove_reference_t<decltype(start)>>(block + used);
            used += count * sizeof(*start) / sizeof(float);
        };
        for (Complex** plane : {&image_hat, &first_hat, &work}) place(*plane, area);
        place(room, 2 * longest);
        for (v8** plane : {&first, &second}) place(*plane, area);
        place(blurred, longest * width);
        place(results, sizes.paths() * height * width);
        return used;
    }

    // All paths of order 2 that start at one modulus of order 1; returns the number of the next path.
    int64_t second_order(int64_t level, int64_t path) {
        to_frequencies(first, first_hat, level);
        for (int64_t j = level + 1; j < sizes.scales; j++)
            for (int64_t angle = 0; angle < sizes.angles; angle++) {
                modulus(first_hat, level, j, angle, second);
                blur(second, j, path++);
            }
        return path;
    }

    void read(const float* x, int64_t from, int count) {
        const float* planes[LANES];
        for (int lane = 0; lane < count; lane++) planes[lane] = plane(x, sizes.x, from + lane, 1);
        for (int64_t i = 0; i < sizes.padded_height; i++)
            for (int64_t j = 0; j < sizes.padded_width; j++) {
                const int64_t at = reflected(i - sizes.pad_top, sizes.height) * sizes.x.line +
                                   reflected(j - sizes.pad_left, sizes.width) * sizes.x.column;
                v8 values = {};
                for (int lane = 0; lane < count; lane++) values[lane] = planes[lane][at];
                first[i * sizes.padded_width + j] = values;
            }
    }

    void write(float* y, int64_t from, int count) const {
        const int64_t height = sizes.outputs(sizes.padded_height), width = sizes.outputs(sizes.padded_width);
        for (int lane = 0; lane < count; lane++) {
            float* to = plane(y, sizes.y, from + lane, sizes.paths());
            for (int64_t p = 0; p < sizes.paths(); p++)
                for (int64_t i = 0; i < height; i++)
                    for (int64_t j = 0; j < width; j++)
                        to[p * sizes.y.channel + i * sizes.y.line + j * sizes.y.column] =
                            results[(p * height + i) * width + j][lane];
        }
    }

    // Where a plane begins, if every colour has `channels` channels there.
    template <class Float>
    Float* plane(Float* start, const Strides& strides, int64_t index, int64_t channels) const {
        return start + index / sizes.colours * strides.row + index % sizes.colours * channels * strides.channel;
    }

    void to_frequencies(const v8* plane, Complex* hat, int64_t level) {
        const int64_t area = (sizes.padded_height >> level) * (sizes.padded_width >> level);
        for (int64_t i = 0; i < area; i++) hat[i] = {plane[i], v8{}};
        transform(hat, level);
    }

    void transform(Complex* values, int64_t level) {
        const int64_t height = sizes.padded_height >> level, width = sizes.padded_width >> level;
        for (int64_t i = 0; i < height; i++) lines[level].transform(values + i * width, 1, room);
        for (int64_t j = 0; j < width; j++) columns[level].transform(values + j, width, room);
    }

    // |x ⋆ ψ| at resolution j from x's frequencies at `level`. With the real and the imaginary part exchanged, the
    // transform is its own inverse but for an exchange and a factor, of which the modulus sees the factor alone.
    void modulus(const Complex* hat, int64_t level, int64_t j, int64_t angle, v8* result) {
        filter(hat, level, j, angle);
        transform(work, j);
        const int64_t area = (sizes.padded_height >> j) * (sizes.padded_width >> j);
        // The mean over all frequencies, aliases included.
        const float scale = 1.0f / float((sizes.padded_height >> level) * (sizes.padded_width >> level));
        for (int64_t i = 0; i < area; i++) {
            const v8 re = work[i].re * scale, im = work[i].im * scale;
            result[i] = root(re * re + im * im);
        }
    }

    // Frequencies times wavelet in `work`, real and imaginary parts exchanged. Subsampling adds up the aliases.
    void filter(const Complex* hat, int64_t level, int64_t j, int64_t angle) {
        switch (j - level) {
            case 0: return filter_aliases<1>(hat, level, j, angle);
            case 1: return filter_aliases<2>(hat, level, j, angle);
            default: return filter_aliases<0>(hat, level, j, angle);
        }
    }

    // TIMES as many lines and columns there as are left; 0: any number.
    template <int TIMES>
    void filter_aliases(const Complex* hat, int64_t level, int64_t j, int64_t angle) {
        const int64_t height = sizes.padded_height >> j, width = sizes.padded_width >> j;
        const int64_t times = TIMES ? TIMES : 1 << (j - level), full = width * times;
        const float* wavelet = sizes.wavelets[j * sizes.scales + level] + angle * height * times * full;
        for (int64_t y = 0; y < height; y++)
            for (int64_t x = 0; x < width; x++) {
                v8 re = {}, im = {};
                for (int64_t i = 0; i < times; i++)
                    for (int64_t k = 0; k < times; k++) {
                        const int64_t at = (y + i * height) * full + x + k * width;
                        re += hat[at].re * wavelet[at];
                        im += hat[at].im * wavelet[at];
                    }
                work[y * width + x] = {im, re};
            }
    }

    // Blur, subsample and cut the margin: two small matrix products.
    void blur(const v8* plane, int64_t level, int64_t path) {
        const int64_t height = sizes.padded_height >> level, width = sizes.padded_width >> level;
        const int64_t out_height = sizes.outputs(sizes.padded_height), out_width = sizes.outputs(sizes.padded_width);
        for (int64_t y = 0; y < height; y++)
            weigh(plane + y * width, width, 1, sizes.blur_x[level], out_width, blurred + y * out_width, 1);
        v8* result = results + path * out_height * out_width;
        for (int64_t x = 0; x < out_width; x++)
            weigh(blurred + x, height, out_width, sizes.blur_y[level], out_height, result + x, out_width);
    }

    // Sums of a line with every row of a table.
    static void weigh(const v8* line, int64_t size, int64_t stride, const float* table, int64_t rows, v8* out,
                      int64_t out_stride) {
        int64_t row = 0;
        for (; row + WIDE <= rows; row += WIDE)
            weigh_rows<WIDE>(line, size, stride, table + row * size, out + row * out_stride, out_stride);
        for (; row < rows; row++)
            weigh_rows<1>(line, size, stride, table + row * size, out + row * out_stride, out_stride);
    }

    template <int ROWS>
    static void weigh_rows(const v8* line, int64_t size, int64_t stride, const float* table, v8* out,
                           int64_t out_stride) {
        v8 sum[ROWS] = {};
        for (int64_t i = 0; i < size; i++) {
            const v8 value = line[i * stride];
            for (int r = 0; r < ROWS; r++) sum[r] += value * table[r * size + i];
        }
        for (int r = 0; r < ROWS; r++) out[r * out_stride] = sum[r];
    }

    static constexpr int WIDE = 8;
    const Scattering& sizes;
    const std::vector<Fourier>&lines, &columns;
    Complex *image_hat = nullptr, *first_hat = nullptr, *work = nullptr, *room = nullptr;
    v8 *first = nullptr, *second = nullptr, *blurred = nullptr, *results = nullptr;
};

}  // namespace

// x (rows, colours, height, width) to y (rows, colours · paths, outputs, outputs), both with any strides. Every plane
// is computed by itself: what is in the other lanes changes no bit of it.
extern "C" void dpvision_scatter(int64_t rows, const Sizes* numbers, const float* const* wavelets,
                                 const float* const* blur_y, const float* const* blur_x, const float* x, float* y,
                                 int threads) {
    const Scattering sizes{*numbers, wavelets, blur_y, blur_x};
    std::vector<Fourier> lines, columns;
    for (int64_t level = 0; level < sizes.scales; level++) {
        lines.emplace_back(sizes.padded_width >> level);
        columns.emplace_back(sizes.padded_height >> level);
    }
    const int64_t planes = rows * sizes.colours;
#pragma omp parallel for num_threads(threads) schedule(static) if (planes > LANES)
    for (int64_t from = 0; from < planes; from += LANES) {
        Planes some(sizes, lines, columns);
        some.scatter(x, y, from, int(std::min<int64_t>(LANES, planes - from)));
    }
}
