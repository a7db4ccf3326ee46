// Max-pools of stride 1 and their gradients, in channels-last images: 3×3 with padding 1, 2×2 without.
//
// A row of an image is one run of width · channels numbers, and a number's neighbours to the left and right lie
// `channels` before and behind it. So vectors go along the run, over the borders of pixels, whatever the channels.
//
// The largest of nine is the largest of three largest: each row is searched from left to right once, and its winners
// serve three windows. As in PyTorch the first of equals wins, and a NaN wins against everything before it.
#include "scratch.h"
#include "simd.h"

namespace {

typedef uint8_t u8x8 __attribute__((vector_size(8)));

struct Image {
    int64_t height, width, channels;

    int64_t row() const { return width * channels; }
    int64_t size() const { return height * row(); }
};

// Eight bytes as eight lanes, and back. Left to itself, the compiler would move them one by one.
static inline i8x32 widened(int64_t bytes) {
#ifdef __AVX2__
    return (i8x32)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes));
#else
    return __builtin_convertvector((u8x8)bytes, i8x32);
#endif
}

static inline int64_t narrowed(i8x32 lanes) {
#ifdef __AVX2__
    const auto low = _mm256_castsi256_si128((__m256i)lanes), high = _mm256_extracti128_si256((__m256i)lanes, 1);
    const auto halves = _mm_packus_epi32(low, high);
    return _mm_cvtsi128_si64(_mm_packus_epi16(halves, halves));
#else
    return (int64_t)__builtin_convertvector(lanes, u8x8);
#endif
}

// What is left at the end of a run, and its whole vectors.
struct Part {
    int count;
    v8 get(const float* p) const { return load_some(p, count); }
    void put(float* p, v8 x) const { store_some(p, x, count); }
    i8x32 get(const uint8_t* p) const {
        int64_t bytes = 0;
        std::memcpy(&bytes, p, count);
        return widened(bytes);
    }
    void put(uint8_t* p, i8x32 x) const {
        const int64_t bytes = narrowed(x);
        std::memcpy(p, &bytes, count);
    }
};
struct Whole {
    v8 get(const float* p) const { return load(p); }
    void put(float* p, v8 x) const { store(p, x); }
    i8x32 get(const uint8_t* p) const { return Part{LANES}.get(p); }
    void put(uint8_t* p, i8x32 x) const { Part{LANES}.put(p, x); }
};

template <class Visit>
static inline void for_vectors(int64_t begin, int64_t end, Visit&& visit) {
    int64_t p = begin;
    for (; p + LANES <= end; p += LANES) visit(p, Whole{});
    if (p < end) visit(p, Part{static_cast<int>(end - p)});
}

// The neighbours FIRST … LAST of -1, 0 and 1 that a pixel has along one side of the image. Constants, because only
// then does the compiler unroll what is done for each of them.
template <int FIRST, int LAST> struct Neighbours {
    static constexpr int first = FIRST, last = LAST;
};

// Calls `visit(neighbours, first, end)` for a side's beginning, its middle and its end, `length` positions in all.
template <class Visit>
static inline void for_parts(int64_t length, Visit&& visit) {
    if (length == 1) return visit(Neighbours<0, 0>{}, 0, 1);
    visit(Neighbours<0, 1>{}, 0, 1);
    visit(Neighbours<-1, 1>{}, 1, length - 1);
    visit(Neighbours<-1, 0>{}, length - 1, length);
}

struct Best {
    v8 value;
    i8x32 index;

    void challenge(v8 x, i8x32 at) {
        const i8x32 wins = (x > value) | (x != x);
        value = wins ? x : value;
        index = wins ? at : index;
    }
};

// The winners of a row's windows of three, and which of the three they are.
struct Winners {
    float* values;
    uint8_t* indices;
};

void search_row(const Image& image, const float* x, const Winners& out) {
    const int64_t C = image.channels;
    for_parts(image.width, [&](auto columns, int64_t begin, int64_t end) {
        for_vectors(begin * C, end * C, [=](int64_t p, auto vector) {
            Best best{vector.get(x + p + columns.first * C), i8x32{} + (columns.first + 1)};
#pragma GCC unroll 2
            for (int k = columns.first + 1; k <= columns.last; k++)
                best.challenge(vector.get(x + p + k * C), i8x32{} + (k + 1));
            vector.put(out.values + p, best.value);
            vector.put(out.indices + p, best.index);
        });
    });
}

// The winners among the winners of rows above, here and below; row k is `rows[k + 1]`.
template <class Rows>
void search_rows(Rows, int64_t length, const Winners* rows, float* y, uint8_t* index) {
    const Winners above = rows[0], here = rows[1], below = rows[2];
    for_vectors(0, length, [=](int64_t p, auto vector) {
        const Winners rows[3] = {above, here, below};
        const Winners& top = rows[Rows::first + 1];
        Best best{vector.get(top.values + p), vector.get(top.indices + p) + 3 * (Rows::first + 1)};
#pragma GCC unroll 2
        for (int k = Rows::first + 2; k <= Rows::last + 1; k++)
            best.challenge(vector.get(rows[k].values + p), vector.get(rows[k].indices + p) + 3 * k);
        vector.put(y + p, best.value);
        vector.put(index + p, best.index);
    });
}

void pool(const Image& image, const float* x, float* y, uint8_t* index) {
    static thread_local Scratch memory;
    const int64_t row = image.row(), floats = (row + 3) / 4;  // as many as have room for a row of bytes
    float* block = memory.floats(3 * (row + floats));
    const auto winners = [&](int64_t i) {
        const int64_t slot = (i + 3) % 3;
        return Winners{block + slot * row, reinterpret_cast<uint8_t*>(block + 3 * row + slot * floats)};
    };
    search_row(image, x, winners(0));
    for_parts(image.height, [&](auto neighbours, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            if (neighbours.last == 1) search_row(image, x + (i + 1) * row, winners(i + 1));
            const Winners rows[3] = {winners(i - 1), winners(i), winners(i + 1)};
            search_rows(neighbours, row, rows, y + i * row, index + i * row);
        }
    });
}

// Each input gathers from the windows whose maximum it may be, in their order: no other thread writes to it.
template <class Rows>
void unpool_row(Rows, const Image& image, const float* dy, const uint8_t* index, float* dx) {
    const int64_t C = image.channels, row = image.row();
    for_parts(image.width, [&](auto columns, int64_t begin, int64_t end) {
        for_vectors(begin * C, end * C, [=](int64_t p, auto vector) {
            v8 sum = {};
#pragma GCC unroll 3
            for (int r = Rows::first; r <= Rows::last; r++)
#pragma GCC unroll 3
                for (int k = columns.first; k <= columns.last; k++) {
                    const int64_t at = p + r * row + k * C;
                    const int32_t mine = 3 * (1 - r) + 1 - k;  // in the window of a neighbour above, this input is below
                    sum += vector.get(index + at) == mine ? vector.get(dy + at) : all(0);
                }
            vector.put(dx + p, sum);
        });
    });
}

void unpool(const Image& image, const float* dy, const uint8_t* index, float* dx) {
    const int64_t row = image.row();
    for_parts(image.height, [&](auto neighbours, int64_t begin, int64_t end) {
        for (int64_t at = begin * row; at < end * row; at += row)
            unpool_row(neighbours, image, dy + at, index + at, dx + at);
    });
}

// 2×2 windows without padding: output (i, j) looks at inputs i, i + 1 and j, j + 1, so that only the way back has borders.
struct Smaller {
    Image in;

    int64_t row() const { return in.row() - in.channels; }
    int64_t size() const { return (in.height - 1) * row(); }
};

void pool_small(const Smaller& sizes, const float* x, float* y, uint8_t* index) {
    const int64_t C = sizes.in.channels, below = sizes.in.row(), row = sizes.row();
    for (int64_t i = 0; i + 1 < sizes.in.height; i++, x += below, y += row, index += row)
        for_vectors(0, row, [=](int64_t p, auto vector) {
            Best best{vector.get(x + p), i8x32{}};
            best.challenge(vector.get(x + p + C), i8x32{} + 1);
            best.challenge(vector.get(x + p + below), i8x32{} + 2);
            best.challenge(vector.get(x + p + below + C), i8x32{} + 3);
            vector.put(y + p, best.value);
            vector.put(index + p, best.index);
        });
}

// Calls `visit(neighbours, first, end)` for the inputs along one side: the windows that see them begin one before or here.
template <class Visit>
static inline void for_windows(int64_t length, Visit&& visit) {
    visit(Neighbours<0, 0>{}, 0, 1);
    visit(Neighbours<-1, 0>{}, 1, length - 1);
    visit(Neighbours<-1, -1>{}, length - 1, length);
}

void unpool_small(const Smaller& sizes, const float* dy, const uint8_t* index, float* dx) {
    const int64_t C = sizes.in.channels, row = sizes.row();
    for_windows(sizes.in.height, [&](auto rows, int64_t top, int64_t bottom) {
        for (int64_t i = top; i < bottom; i++)
            for_windows(sizes.in.width, [&](auto columns, int64_t begin, int64_t end) {
                for_vectors(begin * C, end * C, [=](int64_t p, auto vector) {
                    v8 sum = {};
#pragma GCC unroll 2
                    for (int r = rows.first; r <= rows.last; r++)
#pragma GCC unroll 2
                        for (int k = columns.first; k <= columns.last; k++) {
                            const int64_t at = (i + r) * row + p + k * C;
                            sum += vector.get(index + at) == -2 * r - k ? vector.get(dy + at) : all(0);
                        }
                    vector.put(dx + i * sizes.in.row() + p, sum);
                });
            });
    });
}

}  // namespace

// The same for windows of two: y is one row and one column smaller than x, and index is 0 … 3.
extern "C" void dpvision_pool2_forward(int64_t rows, int64_t height, int64_t width, int64_t channels, const float* x,
                                          float* y, uint8_t* index, int threads) {
    const Smaller sizes{{height, width, channels}};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < rows; n++)
        pool_small(sizes, x + n * sizes.in.size(), y + n * sizes.size(), index + n * sizes.size());
}

extern "C" void dpvision_pool2_backward(int64_t rows, int64_t height, int64_t width, int64_t channels,
                                           const float* dy, const uint8_t* index, float* dx, int threads) {
    const Smaller sizes{{height, width, channels}};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < rows; n++)
        unpool_small(sizes, dy + n * sizes.size(), index + n * sizes.size(), dx + n * sizes.in.size());
}

// y, and for each of its numbers which of the window's nine it is: 0 … 8, row by row.
extern "C" void dpvision_pool3_forward(int64_t rows, int64_t height, int64_t width, int64_t channels, const float* x,
                                      float* y, uint8_t* index, int threads) {
    const Image image{height, width, channels};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        const int64_t at = n * image.size();
        pool(image, x + at, y + at, index + at);
    }
}

extern "C" void dpvision_pool3_backward(int64_t rows, int64_t height, int64_t width, int64_t channels, const float* dy,
                                       const uint8_t* index, float* dx, int threads) {
    const Image image{height, width, channels};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        const int64_t at = n * image.size();
        unpool(image, dy + at, index + at, dx + at);
    }
}
