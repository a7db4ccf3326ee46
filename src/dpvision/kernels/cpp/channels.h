// How the kernels of this folder walk over a channels-last image: runs of positions, blocks of channels.
#pragma once
#include "scratch.h"
#include "simd.h"

// Some whole vectors of channels, or what is left of the channels at the end, in lanes filled up with zeros.
template <int COUNT>
struct WholeVectors {
    static constexpr int VECTORS = COUNT;
    v8 get(const float* p, int v) const { return load(p + v * LANES); }
    void put(float* p, int v, v8 x) const { store(p + v * LANES, x); }
};
struct PartVector {
    static constexpr int VECTORS = 1;
    int count;
    v8 get(const float* p, int) const { return load_some(p, count); }
    void put(float* p, int, v8 x) const { store_some(p, x, count); }
};

// Calls `visit(block, first channel)`. Several vectors at once, because one sum alone waits for its last addition.
template <class Visit>
static inline void for_channel_blocks(int64_t channels, Visit&& visit) {
    constexpr int WIDE = 4;
    int64_t c = 0;
    for (; c + WIDE * LANES <= channels; c += WIDE * LANES) visit(WholeVectors<WIDE>{}, c);
    for (; c + LANES <= channels; c += LANES) visit(WholeVectors<1>{}, c);
    if (c < channels) visit(PartVector{int(channels - c)}, c);
}

// Tables with one entry a channel have this many, so that whole vectors can be read from them.
static inline int64_t padded(int64_t channels) { return (channels + LANES - 1) / LANES * LANES; }

// Positions that are added up in float32 before the sum continues in double: few enough for the sum to be exact to
// about 1e-7 and for a run to stay in the first cache, many enough for the conversion to cost nothing.
static inline int64_t run_length(int64_t channels) {
    constexpr int64_t FLOATS = 8192, LEAST = 32, MOST = 128;
    int64_t length = FLOATS / channels;
    return length < LEAST ? LEAST : length > MOST ? MOST : length;
}

template <class Visit>
static inline void for_runs(int64_t positions, int64_t length, Visit&& visit) {
    for (int64_t t = 0; t < positions; t += length) visit(t, positions - t < length ? positions - t : length);
}

static inline void add_to(double* total, v8 sum) {
    *reinterpret_cast<d8_unaligned*>(total) += __builtin_convertvector(sum, d8);
}
