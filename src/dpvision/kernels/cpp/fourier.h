// Fourier transforms of eight planes at once: a lane is a plane, so that no lane ever meets another.
#pragma once
#include <cmath>
#include <vector>

#include "simd.h"

struct Complex {
    v8 re, im;
};
struct Turn {
    float cosine, sine;
};

static inline Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
static inline Complex operator-(Complex a, Complex b) { return {a.re - b.re, a.im - b.im}; }
static inline Complex over_i(Complex a) { return {a.im, -a.re}; }
static inline Complex turned(Complex a, Turn w) {
    return {a.re * w.cosine + a.im * w.sine, a.im * w.cosine - a.re * w.sine};
}

// The transform y_j = Σ_k x_k · e^(−2πijk/n) of lines of one length, by Stockham's method: every stage takes one factor
// of the length, and the order comes out right by itself.
class Fourier {
  public:
    static constexpr int MOST_FACTOR = 64;

    explicit Fourier(int64_t length) : length(length) {
        int64_t rest = length;
        for (const int64_t factor : {4, 2, 3, 5})
            while (rest % factor == 0) add_stage(rest, factor);
        for (int64_t factor = 7; rest > 1; factor += 2)
            while (rest % factor == 0) add_stage(rest, factor);
    }

    // In place, `stride` apart. `room` holds twice the length, which has two factors or more: the first stage reads the
    // line, the last one writes it.
    void transform(Complex* line, int64_t stride, Complex* room) const {
        const Complex* from = line;
        int64_t from_stride = stride;
        for (size_t i = 0; i < stages.size(); i++) {
            const bool last = i + 1 == stages.size();
            Complex* to = last ? line : room + (i % 2) * length;
            run(stages[i], from, from_stride, to, last ? stride : 1);
            from = to;
            from_stride = 1;
        }
    }

  private:
    // One stage: `block` lines lie interleaved, each of `factor` · `parts` numbers.
    struct Stage {
        int64_t factor, parts, block;
        std::vector<Turn> turns;   // (parts, factor): w^(pj)
        std::vector<Turn> circle;  // (factor): the points of the factor's own transform
    };

    static Turn turn(int64_t part, int64_t whole) {
        const double angle = 2 * M_PI * double(part % whole) / double(whole);
        return {float(std::cos(angle)), float(std::sin(angle))};
    }

    void add_stage(int64_t& rest, int64_t factor) {
        Stage stage = {factor, rest / factor, length / rest, {}, {}};
        for (int64_t p = 0; p < stage.parts; p++)
            for (int64_t j = 0; j < factor; j++) stage.turns.push_back(turn(p * j, rest));
        for (int64_t j = 0; j < factor; j++) stage.circle.push_back(turn(j, factor));
        stages.push_back(stage);
        rest /= factor;
    }

    // The transform of 2 or 4 numbers.
    static inline __attribute__((always_inline)) void even(int64_t factor, Complex* a) {
        if (factor == 2) {
            const Complex sum = a[0] + a[1];
            a[1] = a[0] - a[1];
            a[0] = sum;
            return;
        }
        const Complex s = a[0] + a[2], d = a[0] - a[2], t = a[1] + a[3], e = over_i(a[1] - a[3]);
        a[0] = s + t;
        a[1] = d + e;
        a[2] = s - t;
        a[3] = d - e;
    }

    // The transform of an odd number of numbers: those at k and factor − k meet the same cosine and opposite sines.
    static inline __attribute__((always_inline)) void odd(int64_t factor, const Turn* circle, Complex* a) {
        Complex sum[MOST_FACTOR / 2], difference[MOST_FACTOR / 2];
        const int64_t half = factor / 2;
        const Complex first = a[0];
        for (int64_t k = 0; k < half; k++) {
            sum[k] = a[k + 1] + a[factor - 1 - k];
            difference[k] = over_i(a[k + 1] - a[factor - 1 - k]);
            a[0] = a[0] + sum[k];
        }
        for (int64_t j = 1; j <= half; j++) {
            Complex even_part = first, odd_part = {};
            for (int64_t k = 0; k < half; k++) {
                const Turn w = circle[j * (k + 1) % factor];
                even_part = {even_part.re + sum[k].re * w.cosine, even_part.im + sum[k].im * w.cosine};
                odd_part = {odd_part.re + difference[k].re * w.sine, odd_part.im + difference[k].im * w.sine};
            }
            a[j] = even_part + odd_part;
            a[factor - j] = even_part - odd_part;
        }
    }

    template <int64_t FACTOR>
    static inline void stage_of(const Stage& stage, const Complex* x, int64_t x_stride, Complex* y, int64_t y_stride) {
        const int64_t factor = FACTOR ? FACTOR : stage.factor, block = stage.block;
        Complex a[FACTOR ? FACTOR : MOST_FACTOR];
        for (int64_t p = 0; p < stage.parts; p++) {
            const Turn* w = stage.turns.data() + p * factor;
            for (int64_t q = 0; q < block; q++) {
                for (int64_t k = 0; k < factor; k++) a[k] = x[(q + block * (p + k * stage.parts)) * x_stride];
                if (FACTOR == 2 || FACTOR == 4)
                    even(factor, a);
                else
                    odd(factor, stage.circle.data(), a);
                Complex* out = y + (q + block * factor * p) * y_stride;
                out[0] = a[0];
                for (int64_t j = 1; j < factor; j++) out[j * block * y_stride] = p ? turned(a[j], w[j]) : a[j];
            }
        }
    }

    static void run(const Stage& stage, const Complex* x, int64_t x_stride, Complex* y, int64_t y_stride) {
        switch (stage.factor) {
            case 2: return stage_of<2>(stage, x, x_stride, y, y_stride);
            case 3: return stage_of<3>(stage, x, x_stride, y, y_stride);
            case 4: return stage_of<4>(stage, x, x_stride, y, y_stride);
            case 5: return stage_of<5>(stage, x, x_stride, y, y_stride);
            default: return stage_of<0>(stage, x, x_stride, y, y_stride);
        }
    }

    int64_t length;
    std::vector<Stage> stages;
};
