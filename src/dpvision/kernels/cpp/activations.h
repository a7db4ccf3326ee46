// Activation functions: their value, and their value with their slope.
#pragma once
#include "simd.h"

struct ValueSlope {
    v8 value, slope;
};

// CHEAP: to compute it twice costs less than to write it down and read it again.
struct Identity {
    static constexpr bool CHEAP = true;
    static v8 value(v8 x) { return x; }
    static ValueSlope both(v8 x) { return {x, all(1)}; }
};

struct Relu {
    static constexpr bool CHEAP = true;
    static v8 value(v8 x) { return x <= 0 ? all(0) : x; }  // so that NaN stays NaN
    static ValueSlope both(v8 x) { return {value(x), x <= 0 ? all(0) : all(1)}; }
};

// tanh |x| = (1 - e) / (1 + e) with e = exp(-2|x|), through e - 1: no digits are lost near zero.
struct Tanh {
    static constexpr bool CHEAP = false;
    static v8 value(v8 x) {
        v8 m = expm1(-2 * magnitude(x));
        v8 t = -m / (2 + m);
        return x < 0 ? -t : t;
    }
    static ValueSlope both(v8 x) {
        v8 t = value(x);
        return {t, 1 - t * t};
    }
};

// x · sigmoid(x); the exponential is that of -|x|, which can't overflow.
struct Silu {
    static constexpr bool CHEAP = false;
    static v8 sigmoid(v8 x) {
        v8 e = exp(-magnitude(x));
        return (x < 0 ? e : all(1)) / (1 + e);
    }
    static v8 value(v8 x) { return x * sigmoid(x); }
    static ValueSlope both(v8 x) {
        v8 s = sigmoid(x);
        return {x * s, s * (1 + x * (1 - s))};
    }
};

// x · tanh(log(1 + e^x)) = x · w / (w + 2) with w = e^x (e^x + 2); from 20 on the factor is 1 in float32.
struct Mish {
    static constexpr bool CHEAP = false;
    static v8 value(v8 x) {
        v8 e = exp(at_most(x, 20));
        v8 w = e * (e + 2);
        return x * (w / (w + 2));
    }
    static ValueSlope both(v8 x) {
        v8 e = exp(at_most(x, 20));
        v8 w = e * (e + 2);
        v8 over = 1 / (w + 2);
        v8 factor = w * over;
        return {x * factor, factor + (4 * x) * (e * (e + 1)) * (over * over)};
    }
};

// scale · x above zero, scale · alpha · (e^x - 1) below.
template <class Constants>
struct Exponential {
    static constexpr bool CHEAP = false;
    static constexpr float ABOVE = Constants::SCALE, BELOW = float(Constants::SCALE * Constants::ALPHA);
    static v8 value(v8 x) { return x > 0 ? x * ABOVE : BELOW * expm1(at_most(x, 0)); }
    static ValueSlope both(v8 x) {
        const Reduced e = reduce(at_most(x, 0));
        const v8 scale = BELOW * e.scale, rest = scale * e.tail;
        return {x > 0 ? x * ABOVE : rest + (scale - BELOW), x > 0 ? all(ABOVE) : rest + scale};
    }
};
struct EluConstants {
    static constexpr double SCALE = 1, ALPHA = 1;
};
struct SeluConstants {
    static constexpr double SCALE = 1.0507009873554804934, ALPHA = 1.6732632423543772848;
};
using Elu = Exponential<EluConstants>;
using Selu = Exponential<SeluConstants>;

// Calls `visit` with the activation of that number: the order of ACTIVATIONS in norm_act.py.
template <class Visit>
static inline void with_activation(int number, Visit&& visit) {
    switch (number) {
        case 0: return visit(Identity{});
        case 1: return visit(Relu{});
        case 2: return visit(Mish{});
        case 3: return visit(Tanh{});
        case 4: return visit(Silu{});
        case 5: return visit(Selu{});
        case 6: return visit(Elu{});
    }
}
