// Winograd's F(4×4, 3×3): a 3×3 convolution with stride 1 and padding 1, computed in tiles of 4×4 outputs.
//
//     y = Aᵀ [ (G w Gᵀ) ∘ (Bᵀ x B) ] A        x: 6×6 inputs, w: 3×3 filter, y: 4×4 outputs
//
// The elementwise product, summed over channels, is 36 matrix products: 36 multiplications for 16 outputs, where the
// plain sum takes 144. The gradient of w is the transpose of the same identity:
//
//     dw = Gᵀ [ (Bᵀ x B) ∘ (A dy Aᵀ) ] G
//
// A tile's 36 points lie far apart in memory. At distances that are multiples of 4096 bytes they would compete for the
// same few lines of the cache, so every point's block is followed by a gap of one line.
//
// Channels come in panels of 16. The last panel of an image may have fewer: what it lacks is read as zeros and not
// written at all, so that no access goes beyond a pixel's own channels.
//
// Each of the four maps is applied to one dimension by a function here, and to two by calling it on rows and columns.
// A tile that extends beyond the right or bottom edge reads zeros there and writes to memory that is not used.
#pragma once
#include <cstdint>
#include <cstring>

#include "panel.h"
#include "scratch.h"

constexpr int TILE = 4;                 // outputs of a tile, per side
constexpr int PATCH = TILE + 2;         // inputs of a tile, per side
constexpr int POINTS = PATCH * PATCH;   // products per tile and pair of channels
constexpr int GAP = PANEL;              // floats between the points' blocks: see above

static inline int64_t panels_of(int64_t channels) { return (channels + PANEL - 1) / PANEL; }

// How a whole panel is read from an image and written to it. (Panels go by reference: where no register holds one, a
// function cannot return it without a warning.)
struct WholePanel {
    static constexpr int count() { return PANEL; }
    void get(const float* p, v16& values) const { values = panel_at(p); }
    void put(float* p, const v16& values) const { panel_at(p) = values; }
};

// The same for the first channels of a panel: the others are zeros.
class PartPanel {
  public:
    explicit PartPanel(int count) : channels(count) {}
    int count() const { return channels; }
    void get(const float* p, v16& values) const {
#if defined(__AVX512F__)
        values = _mm512_maskz_loadu_ps(lanes(), p);
#elif defined(__AVX__)
        const __m256 halves[2] = {_mm256_maskload_ps(p, lanes(0)), _mm256_maskload_ps(p + PANEL / 2, lanes(1))};
        std::memcpy(&values, halves, sizeof values);
#else
        values = v16{};
        std::memcpy(&values, p, sizeof(float) * channels);
#endif
    }
    void put(float* p, const v16& values) const {
#if defined(__AVX512F__)
        _mm512_mask_storeu_ps(p, lanes(), values);
#else
        std::memcpy(p, &values, sizeof(float) * channels);
#endif
    }

  private:
#if defined(__AVX512F__)
    __mmask16 lanes() const { return static_cast<__mmask16>((1u << channels) - 1); }
#elif defined(__AVX__)
    // The ones of this table, seen from `channels` places before its middle, are as many as there are channels.
    __m256i lanes(int half) const {
        static constexpr int32_t TABLE[2 * PANEL] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(TABLE + PANEL - channels + half * PANEL / 2));
    }
#endif
    int channels;
};

// Calls `visit(panel, first channel)` for one panel of an image with this many channels, or for every panel. What is in
// `visit` is compiled for whole panels by themselves, with a constant count.
template <class Visit>
static inline void for_panel(int64_t index, int64_t channels, Visit&& visit) {
    const int64_t first = index * PANEL, left = channels - first;
    if (left >= PANEL)
        visit(WholePanel{}, first);
    else
        visit(PartPanel(static_cast<int>(left)), first);
}

template <class Visit>
static inline void for_panels(int64_t channels, Visit&& visit) {
    for (int64_t index = 0; index < panels_of(channels); index++) for_panel(index, channels, visit);
}

struct Shape {
    int64_t rows, height, width, in_channels, out_channels;

    int64_t tiles_across() const { return (width + TILE - 1) / TILE; }
    int64_t tiles_down() const { return (height + TILE - 1) / TILE; }
    int64_t tiles() const { return tiles_across() * tiles_down(); }   // per row of the batch
    int64_t positions() const { return height * width; }
};

// Bᵀ: six inputs to six points.
static inline void to_points(const v16* x, int step, v16* out, int out_step) {
    const v16 x0 = x[0], x1 = x[step], x2 = x[2 * step], x3 = x[3 * step], x4 = x[4 * step], x5 = x[5 * step];
    const v16 even = x4 - x2, odd = x3 - x1;
    const v16 even_far = x4 - 4.f * x2, odd_far = x3 - 4.f * x1;
    out[0] = even + 4.f * (x0 - x2);
    out[out_step] = even_far + odd_far;
    out[2 * out_step] = even_far - odd_far;
    out[3 * out_step] = even + 2.f * odd;
    out[4 * out_step] = even - 2.f * odd;
    out[5 * out_step] = (x5 - x3) - 4.f * odd;
}

// Aᵀ: six points to four outputs.
static inline void to_outputs(const v16* m, int step, v16* out, int out_step) {
    const v16 near_sum = m[step] + m[2 * step], near_difference = m[step] - m[2 * step];
    const v16 far_sum = m[3 * step] + m[4 * step], far_difference = m[3 * step] - m[4 * step];
    out[0] = m[0] + near_sum + far_sum;
    out[out_step] = near_difference + 2.f * far_difference;
    out[2 * out_step] = near_sum + 4.f * far_sum;
    out[3 * out_step] = near_difference + 8.f * far_difference + m[5 * step];
}

// A: four output gradients to six points.
static inline void gradient_to_points(const v16* y, int step, v16* out, int out_step) {
    const v16 y0 = y[0], y1 = y[step], y2 = y[2 * step], y3 = y[3 * step];
    const v16 even = y0 + y2, odd = y1 + y3;
    const v16 even_far = y0 + 4.f * y2, odd_far = y1 + 4.f * y3;
    out[0] = y0;
    out[out_step] = even + odd;
    out[2 * out_step] = even - odd;
    out[3 * out_step] = even_far + 2.f * odd_far;
    out[4 * out_step] = even_far - 2.f * odd_far;
    out[5 * out_step] = y3;
}

// G: three filter taps to six points.
static inline void filter_to_points(const v16* w, int step, v16* out, int out_step) {
    const v16 outer = w[0] + w[2 * step], middle = w[step];
    const v16 outer_far = w[0] + 4.f * w[2 * step];
    out[0] = 0.25f * w[0];
    out[out_step] = (-1.f / 6) * (outer + middle);
    out[2 * out_step] = (-1.f / 6) * (outer - middle);
    out[3 * out_step] = (1.f / 24) * (outer_far + 2.f * middle);
    out[4 * out_step] = (1.f / 24) * (outer_far - 2.f * middle);
    out[5 * out_step] = w[2 * step];
}

// Gᵀ: six points to three filter taps.
static inline void to_taps(const v16* q, int step, v16* out, int out_step) {
    const v16 near_sum = (1.f / 6) * (q[step] + q[2 * step]), near_difference = (1.f / 6) * (q[2 * step] - q[step]);
    const v16 far_sum = q[3 * step] + q[4 * step], far_difference = q[3 * step] - q[4 * step];
    out[0] = 0.25f * q[0] - near_sum + (1.f / 24) * far_sum;
    out[out_step] = near_difference + (1.f / 12) * far_difference;
    out[2 * out_step] = q[5 * step] - near_sum + (1.f / 6) * far_sum;
}

// The addresses of a square of pixels of one image; those outside the image are `outside`.
template <int SIDE, class Float>
static inline void locate(Float* image, const Shape& shape, int64_t channels, int64_t top, int64_t left,
                          Float* outside, Float** at) {
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++) {
            const int64_t y = top + i, x = left + j;
            const bool inside = y >= 0 && y < shape.height && x >= 0 && x < shape.width;
            at[i * SIDE + j] = inside ? image + (y * shape.width + x) * channels : outside;
        }
}

static inline void locate_inputs(const float* image, const Shape& shape, int64_t tile, const float* outside,
                                 const float** at) {
    const int64_t top = tile / shape.tiles_across() * TILE, left = tile % shape.tiles_across() * TILE;
    locate<PATCH>(image, shape, shape.in_channels, top - 1, left - 1, outside, at);
}

// The same for a tile's own 4×4 pixels, in the output or its gradient.
template <class Float>
static inline void locate_outputs(Float* image, const Shape& shape, int64_t tile, Float* outside, Float** at) {
    const int64_t top = tile / shape.tiles_across() * TILE, left = tile % shape.tiles_across() * TILE;
    locate<TILE>(image, shape, shape.out_channels, top, left, outside, at);
}

// Where the inputs of a tile lie.
struct Inputs {
    const float* at[POINTS];
};

// BᵀxB for one panel of a tile: point e goes to `out + e * stride`. Meanwhile the tile after it is prefetched into the
// cache: its pixels lie in six places, which the processor does not foresee by itself.
template <class Panel>
static inline void pack_inputs(Panel panel, const Inputs& tile, const Inputs& next, int64_t channel, float* out,
                               int64_t stride) {
    v16 x[PATCH], half[POINTS], column[PATCH];
    for (int i = 0; i < PATCH; i++) {
        for (int j = 0; j < PATCH; j++) {
            panel.get(tile.at[i * PATCH + j] + channel, x[j]);
            __builtin_prefetch(next.at[i * PATCH + j] + channel);
        }
        to_points(x, 1, half + i * PATCH, 1);
    }
    for (int j = 0; j < PATCH; j++) {
        to_points(half + j, PATCH, column, 1);
        for (int i = 0; i < PATCH; i++) panel_at(out + (i * PATCH + j) * stride) = column[i];
    }
}
