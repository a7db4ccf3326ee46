"""Choosing one of noise, steps or batch size so that a target epsilon is met and not exceeded.

Every search works on values that a person would write (five or six significant digits, whole steps) and ends with a
value whose own epsilon was computed by ``guarantee`` and is within the target, while that of the next value is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import final

from dpvision.accounting.charges import (
    LARGEST_NOISE,
    SMALLEST_RATE,
    Charges,
    check_delta_and_adjacency,
    check_request,
)
from dpvision.accounting.pld import most_steps, pld_epsilon
from dpvision.accounting.search import Decimals, Scale, WholeNumbers, last_within
from dpvision.checks import ArgumentError, Problems
from dpvision.mechanism import Adjacency, Event
from dpvision.rounding import rounded_up

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
