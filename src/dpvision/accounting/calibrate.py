"""The last value on a scale whose cost stays within a target, found with few evaluations.

Choosing one of noise, steps or batch size so that a target epsilon is met and not exceeded.

Every search works on values that a person would write (five or six significant digits, whole steps) and ends with a
value whose own epsilon was computed by ``guarantee`` and is within the target, while that of the next value is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol, final

from dpvision.accounting.charges import LARGEST_NOISE, SMALLEST_RATE, Charges, check_delta_and_adjacency, check_request
from dpvision.accounting.pld import most_steps, pld_epsilon
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.mechanism import Adjacency, Event, rounded_up

_FIRST_STRIDE = 0.02
_PATIENCE = 8


class Scale(Protocol):
    """Values numbered by whole numbers; a higher number costs at least as much."""

    def value(self, index: int) -> float:
        """The value of that number."""
        ...

    def place(self, index: int) -> float:
        """A logarithmic coordinate that grows with ``index``."""
        ...

    def index_at(self, place: float) -> int:
        """The number at that coordinate, give or take one."""
        ...


@final
@dataclass(frozen=True)
class WholeNumbers:
    """1, 2, 3, …, each numbered by itself."""

    def value(self, index: int) -> float:
        """The number itself."""
        return float(index)

    def place(self, index: int) -> float:
        """Its logarithm."""
        return math.log(index)

    def index_at(self, place: float) -> int:
        """Rounded down."""
        return math.floor(math.exp(place))


@final
@dataclass(frozen=True)
class Decimals:
    """All positive decimals of ``digits`` significant digits. ``descending`` numbers them from large to small."""

    digits: int
    descending: bool = False

    @property
    def _first_mantissa(self) -> int:
        return 10 ** (self.digits - 1)

    @property
    def _sign(self) -> int:
        return -1 if self.descending else 1

    def value(self, index: int) -> float:
        """The decimal, exactly as a person would write it."""
        decade, position = divmod(self._sign * index, 9 * self._first_mantissa)
        return float(f"{self._first_mantissa + position}e{decade - self.digits + 1}")

    def place(self, index: int) -> float:
        """Its logarithm; negated if descending."""
        return self._sign * math.log(self.value(index))

    def index_at(self, place: float) -> int:
        """The decimal next to ``exp(place)``, on its cheaper side."""
        value = math.exp(self._sign * place)
        decade = math.floor(math.log10(value))
        scaled = value / 10.0 ** (decade - self.digits + 1)
        mantissa = math.ceil(scaled) if self.descending else math.floor(scaled)
        return self._sign * (decade * 9 * self._first_mantissa + mantissa - self._first_mantissa)


@final
@dataclass(frozen=True)
class _Probe:
    index: int
    place: float
    cost: float


def last_within(
    cost: Callable[[float], float], *, target: float, scale: Scale, guess: float, cheapest: int, dearest: int
) -> float | None:
    """The value whose cost is <= ``target`` while that of the next number on the scale is above it.

    ``guess`` is a place on the scale. None if even the value of number ``cheapest`` costs too much; the value of
    number ``dearest`` if nothing does.

    Guarantee: the cost of the returned value was computed and is <= ``target``.
    """

    def probe(index: int) -> _Probe:
        return _Probe(index, scale.place(index), cost(scale.value(index)))

    sensible = min(max(guess, scale.place(cheapest)), scale.place(dearest))
    start = min(max(scale.index_at(sensible), cheapest), dearest)
    low, high = _bracket(probe, target, scale, start, cheapest, dearest)
    if low is None:
        return None
    if high is not None:
        low = _narrow(probe, target, scale, low, high)
    return scale.value(low.index)


def _bracket(
    probe: Callable[[int], _Probe], target: float, scale: Scale, start: int, cheapest: int, dearest: int
) -> tuple[_Probe | None, _Probe | None]:
    """A probe within the target and one above it, as near to the start as doubling strides find them."""
    low: _Probe | None = None
    high: _Probe | None = None
    index, stride = start, _FIRST_STRIDE
    while low is None or high is None:
        here = probe(index)
        if here.cost <= target:
            low = here
            if index == dearest:
                break
            index = min(max(scale.index_at(here.place + stride), index + 1), dearest)
        else:
            high = here
            if index == cheapest:
                break
            index = max(min(scale.index_at(here.place - stride), index - 1), cheapest)
        stride *= 2
    return low, high


def _narrow(probe: Callable[[int], _Probe], target: float, scale: Scale, low: _Probe, high: _Probe) -> _Probe:
    """Regula falsi on logarithms; after several moves of the same end it strides past the root, then bisects."""
    moves_of_low = moves_of_high = 0
    while high.index - low.index > 1:
        if max(moves_of_low, moves_of_high) > _PATIENCE:
            index = (low.index + high.index) // 2
        else:
            index = scale.index_at(_interpolate(low, high, target))
            index += 2**moves_of_low - 2**moves_of_high
        here = probe(min(max(index, low.index + 1), high.index - 1))
        if here.cost <= target:
            low, moves_of_low, moves_of_high = here, moves_of_low + 1, 0
        else:
            high, moves_of_low, moves_of_high = here, 0, moves_of_high + 1
    return low


def _interpolate(low: _Probe, high: _Probe, target: float) -> float:
    if not 0 < low.cost < high.cost < math.inf:
        return (low.place + high.place) / 2
    share = math.log(target / low.cost) / math.log(high.cost / low.cost)
    return low.place + share * (high.place - low.place)


NOISE_SCALE = Decimals(digits=5, descending=True)
BATCH_SCALE = Decimals(digits=6)
STEP_SCALE = WholeNumbers()
SMALLEST_USEFUL_NOISE = 0.01
LARGEST_TARGET = 1e6


def calibrate_noise_multiplier(
    *,
    num_units: int,
    expected_batch_size: float,
    steps: int,
    target_epsilon: float,
    delta: float,
    adjacency: Adjacency = "add_remove",
    extra: Charges = (),
) -> float:
    """The smallest noise multiplier of five significant digits that keeps the target.

    Guarantee: ``guarantee`` of the result is <= ``target_epsilon``.
    """
    budget = _Budget(target_epsilon=target_epsilon, delta=delta, adjacency=adjacency, extra=tuple(extra))
    problems = budget.problems()
    rate = _check_batch(problems, num_units, expected_batch_size)
    problems.count("steps", steps)
    problems.raise_if_any()
    budget.require_room()
    guess = _clt_noise(rate, steps, _gaussian_shift(target_epsilon, delta))
    noise = budget.last_within(
        lambda noise: [(Event(sample_rate=rate, noise_multiplier=noise), steps)],
        scale=NOISE_SCALE,
        guess=-math.log(guess),
        cheapest=NOISE_SCALE.index_at(-math.log(LARGEST_NOISE)),
        dearest=NOISE_SCALE.index_at(-math.log(SMALLEST_USEFUL_NOISE)),
    )
    if noise is None:
        raise ArgumentError(
            f"target_epsilon {target_epsilon} at delta {delta} can't be met with any noise_multiplier "
            f"up to {LARGEST_NOISE:g}. Raise target_epsilon or delta, or lower the extra charges."
        )
    if noise <= SMALLEST_USEFUL_NOISE * 1.001:
        raise ArgumentError(
            f"target_epsilon {target_epsilon} at delta {delta} is met with next to no noise "
            f"(noise_multiplier {noise:g}): such a guarantee protects nobody. Lower target_epsilon or delta."
        )
    return noise


def calibrate_steps(
    *,
    num_units: int,
    expected_batch_size: float,
    noise_multiplier: float,
    target_epsilon: float,
    delta: float,
    adjacency: Adjacency = "add_remove",
    extra: Charges = (),
) -> int:
    """The largest number of steps that keeps the target: one more would cross it.

    Guarantee: ``guarantee`` of the result is <= ``target_epsilon``.
    """
    budget = _Budget(target_epsilon=target_epsilon, delta=delta, adjacency=adjacency, extra=tuple(extra))
    problems = budget.problems()
    rate = _check_batch(problems, num_units, expected_batch_size)
    problems.positive("noise_multiplier", noise_multiplier)
    problems.raise_if_any()
    event = Event(sample_rate=rate, noise_multiplier=noise_multiplier)
    budget.require_room()
    shift = _gaussian_shift(target_epsilon, delta)
    steps = budget.last_within(
        lambda steps: [(event, int(steps))],
        scale=STEP_SCALE,
        guess=2 * math.log(shift) - _log_clt_precision(rate, noise_multiplier),
        cheapest=1,
        dearest=most_steps(delta),
    )
    if steps is None:
        raise ArgumentError(
            f"target_epsilon {target_epsilon} does not allow a single step: one costs "
            f"{rounded_up(budget.epsilon([(event, 1)]))}. Raise noise_multiplier or target_epsilon, or lower the batch "
            "size."
        )
    if steps >= most_steps(delta):
        raise ArgumentError(
            f"steps would exceed {most_steps(delta)}: with noise_multiplier {noise_multiplier} and sample_rate "
            f"{rate:.3g} a target_epsilon of {target_epsilon} is never spent. Lower noise_multiplier or target_epsilon."
        )
    return int(steps)


def calibrate_expected_batch_size(
    *,
    num_units: int,
    noise_multiplier: float,
    steps: int,
    target_epsilon: float,
    delta: float,
    adjacency: Adjacency = "add_remove",
    extra: Charges = (),
) -> float:
    """The largest expected batch size of six significant digits, at most ``num_units``, that keeps the target.

    Guarantee: ``guarantee`` of the result is <= ``target_epsilon``.
    """
    budget = _Budget(target_epsilon=target_epsilon, delta=delta, adjacency=adjacency, extra=tuple(extra))
    problems = budget.problems()
    problems.count("num_units", num_units)
    problems.positive("noise_multiplier", noise_multiplier)
    problems.count("steps", steps)
    problems.raise_if_any()
    budget.require_room()

    def charges(batch: float) -> list[tuple[Event, int]]:
        return [(Event(sample_rate=batch / num_units, noise_multiplier=noise_multiplier), steps)]

    if budget.epsilon(charges(num_units)) <= target_epsilon:
        return float(num_units)
    shift = _gaussian_shift(target_epsilon, delta)
    smallest = 2 * SMALLEST_RATE * num_units
    batch = budget.last_within(
        charges,
        scale=BATCH_SCALE,
        guess=math.log(num_units * shift) - (math.log(steps) + _log_clt_precision(1.0, noise_multiplier)) / 2,
        cheapest=BATCH_SCALE.index_at(math.log(smallest)),
        dearest=BATCH_SCALE.index_at(math.log(num_units)),
    )
    if batch is None:
        raise ArgumentError(
            f"target_epsilon {target_epsilon} can't be met with any expected_batch_size: noise_multiplier "
            f"{noise_multiplier} is too low for {steps} steps. Raise noise_multiplier or lower steps."
        )
    return batch


@final
@dataclass(frozen=True, kw_only=True)
class _Budget:
    """What may be spent, and what has been spent already."""

    target_epsilon: float
    delta: float
    adjacency: Adjacency
    extra: Charges

    def problems(self) -> Problems:
        """The rules that the budget itself breaks."""
        problems = Problems()
        problems.positive("target_epsilon", self.target_epsilon)
        problems.require(
            not self.target_epsilon > LARGEST_TARGET,
            f"target_epsilon must be <= {LARGEST_TARGET:g}, got {self.target_epsilon}: it would promise nothing.",
        )
        check_delta_and_adjacency(problems, delta=self.delta, adjacency=self.adjacency)
        return problems

    def epsilon(self, charges: Charges) -> float:
        """The cost of ``charges`` and the extra ones, exactly as ``guarantee`` computes it."""
        together = [*charges, *self.extra]
        check_request(together, delta=self.delta, adjacency=self.adjacency)
        return pld_epsilon(together, delta=self.delta, adjacency=self.adjacency)

    def require_room(self) -> None:
        """Refuse if the extra charges alone use up the target."""
        already = self.epsilon([]) if self.extra else 0.0
        if not already < self.target_epsilon:
            raise ArgumentError(
                f"target_epsilon must be above what the extra charges cost ({rounded_up(already)}), "
                f"got {self.target_epsilon}. Raise target_epsilon or put more noise on the extra releases."
            )

    def last_within(
        self, charges: Callable[[float], Charges], *, scale: Scale, guess: float, cheapest: int, dearest: int
    ) -> float | None:
        """The last value on the scale whose charges, with the extra ones, stay within the target."""
        return last_within(
            lambda value: self.epsilon(charges(value)),
            target=self.target_epsilon,
            scale=scale,
            guess=guess,
            cheapest=cheapest,
            dearest=dearest,
        )


def _check_batch(problems: Problems, num_units: int, expected_batch_size: float) -> float:
    """Note problems of the pair; the sample rate, if there are none."""
    problems.count("num_units", num_units)
    problems.positive("expected_batch_size", expected_batch_size)
    problems.require(
        not expected_batch_size > num_units,
        f"sample_rate must be <= 1, got {expected_batch_size} / {num_units} "
        f"(expected_batch_size={expected_batch_size}, num_units={num_units}). Lower expected_batch_size.",
    )
    return expected_batch_size / num_units if num_units > 0 else math.nan


def _gaussian_shift(epsilon: float, delta: float) -> float:
    """The shift mu of one Gaussian release with about this epsilon: solves epsilon = mu²/2 + mu z. Only a guess."""
    z = max(0.5, -NormalDist().inv_cdf(delta))
    return 2 * epsilon / (math.sqrt(z * z + 2 * epsilon) + z)


def _log_clt_precision(rate: float, noise_multiplier: float) -> float:
    """ln of rate² (exp(1/σ²) − 1), one step's share of mu² in the central limit. Only a guess."""
    inverse = 1 / noise_multiplier**2
    return 2 * math.log(rate) + (inverse if inverse > 40 else math.log(math.expm1(inverse)))


def _clt_noise(rate: float, steps: int, shift: float) -> float:
    """The noise multiplier that gives shift mu after ``steps`` in the central limit. Only a guess."""
    return 1 / math.sqrt(max(1e-20, math.log1p((shift / rate) ** 2 / steps)))
