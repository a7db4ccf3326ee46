// tanh of every number by itself.
#include <algorithm>

#include "activations.h"

constexpr int64_t PIECE = 4096;      // a whole number of vectors
constexpr int64_t ENOUGH = 1 << 15;  // numbers; below this, waking another thread takes longer than the work

extern "C" void dpvision_tanh(int64_t count, const float* x, float* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (count >= ENOUGH)
    for (int64_t first = 0; first < count; first += PIECE) {
        const int64_t last = std::min(count, first + PIECE);
        int64_t i = first;
        for (; i + LANES <= last; i += LANES) store(y + i, Tanh::value(load(x + i)));
        if (i < last) store_some(y + i, Tanh::value(load_some(x + i, int(last - i))), int(last - i));
    }
}
