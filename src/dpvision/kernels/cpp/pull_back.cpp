// From summed gradients e of standardised filters to those of the raw ones, in the same memory:
// (e − mean(e) − z⟨z, e⟩) · scale for each filter, z = (w − mean) · s. A filter whose entries lie place by place, each
// place's channels together, comes out in the order of a weight: channel by channel, each channel's places together.
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t ENOUGH = 1 << 16;  // numbers; below this, waking another thread takes longer than the work
constexpr int LANES = 8;             // sums side by side

struct Filter {
    const float* weight;
    float mean, s, scale, live;

    double direction(int64_t i) const { return (weight[i] - mean) * s; }
};

double total(const double* lanes) {
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

void pull_back(const Filter& filter, const double* e, int64_t entries, double* out) {
    double sums[LANES] = {}, inner[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= entries; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            sums[lane] += e[i + lane];
            inner[lane] += e[i + lane] * filter.direction(i + lane);
        }
    for (; i < entries; i++) {
        sums[i % LANES] += e[i];
        inner[i % LANES] += e[i] * filter.direction(i);
    }
    const double mean = total(sums) / double(entries), along = total(inner) * filter.live;
    for (i = 0; i < entries; i++) out[i] = (e[i] - mean - along * filter.direction(i)) * filter.scale;
}

void to_weight_order(const double* from_KI, int64_t channels, int64_t places, double* to_IK) {
    for (int64_t c = 0; c < channels; c++)
        for (int64_t k = 0; k < places; k++) to_IK[c * places + k] = from_KI[k * channels + c];
}

}  // namespace

extern "C" void dpvision_pull_back(int64_t filters, int64_t channels, int64_t places, int64_t channels_inside,
                                   double* e_OD, const float* weight_OD, const float* mean_O, const float* s_O,
                                   const float* scale_O, const float* live_O, int threads) {
    const int64_t entries = channels * places;
#pragma omp parallel num_threads(threads) if (filters * entries >= ENOUGH)
    {
        std::vector<double> ordered(channels_inside ? entries : 0);
#pragma omp for schedule(static)
        for (int64_t o = 0; o < filters; o++) {
            double* e = e_OD + o * entries;
            const Filter filter = {weight_OD + o * entries, mean_O[o], s_O[o], scale_O[o], live_O[o]};
            if (channels_inside) to_weight_order(e, channels, places, ordered.data());
            pull_back(filter, channels_inside ? ordered.data() : e, entries, e);
        }
    }
}
