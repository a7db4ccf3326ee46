"""Choose noise, steps or batch size so that a target epsilon, or a limit on attacks, is met and not exceeded.

Each search runs on a public grid: decimals of five or six significant digits, or whole steps. It brackets the target
from a guess by the central limit theorem, finds the crossing with scipy's ``brentq``, and then moves along the grid
until the cost of the result is within the target and that of its neighbour is not. The cost is epsilon, or the bound on
attacks that ``AttackRisk`` names. Both are computed by the accountant, so neither the guess nor the root finder can
affect the guarantee.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import cast, final

from scipy.optimize import brentq

from dpvision.accounting.charges import (
    LARGEST_NOISE,
    SMALLEST_RATE,
    Charges,
    check_delta_and_adjacency,
    check_noise,
    check_rate,
    check_request,
)
from dpvision.accounting.epsilon import Accountant, guarantee
from dpvision.accounting.pld import most_steps, pld_epsilon
from dpvision.accounting.tradeoff import AttackRisk, full_profile
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.mechanism import Adjacency, Event, rounded_up

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
# scipy has no stubs.

SMALLEST_USEFUL_NOISE = 0.01
LARGEST_TARGET = 1e6
_FIRST_STRIDE = 1.02
_STEEPEST = 50.0


@final
@dataclass(frozen=True)
class SearchGrid:
    """The allowed values of a searched setting, numbered in the order of rising cost.

    Values are the decimals of ``digits`` significant digits, or the positive whole numbers if ``digits`` is None.
    ``falling`` numbers them from large to small, for settings such as noise that cost less the larger they are.
    """

    digits: int | None = None
    falling: bool = False

    def value(self, index: int) -> float:
        """Return the value with that number, as it would be written by hand."""
        if self.digits is None:
            return float(index)
        first = 10 ** (self.digits - 1)
        decade, position = divmod(-index if self.falling else index, 9 * first)
        return float(f"{first + position}e{decade - self.digits + 1}")

    def index(self, value: float) -> int:
        """Return the number of the nearest value that costs at most as much as ``value``, give or take one."""
        if self.digits is None:
            return math.floor(value)
        first = 10 ** (self.digits - 1)
        decade = math.floor(math.log10(value))
        scaled = value / 10.0 ** (decade - self.digits + 1)
        number = decade * 9 * first - first + (math.ceil(scaled) if self.falling else math.floor(scaled))
        return -number if self.falling else number


def last_within(
    cost: Callable[[float], float], *, target: float, grid: SearchGrid, guess: float, ends: tuple[float, float]
) -> float | None:
    """Find the last value of the grid, in the order of rising cost, whose cost is at most ``target``.

    Args:
        cost: The cost of a value; it does not fall along the grid.
        target: The largest allowed cost, > 0.
        grid: The allowed values.
        guess: Where to start.
        ends: The cheapest and the most expensive value to try.

    Returns:
        The value, or None if the cheapest one costs too much.

    Guarantee:
        The cost of the returned value was computed and is at most ``target``.
    """
    first, last = (grid.index(end) for end in ends)

    @cache
    def cost_at(index: int) -> float:
        return cost(grid.value(index))

    def excess(place: float) -> float:
        """Return ln(cost / target) at the nearest index, cut off where it would be infinite."""
        found = cost_at(round(place))
        return max(-_STEEPEST, min(_STEEPEST, math.log(found / target))) if found > 0 else -_STEEPEST

    index = min(max(grid.index(min(max(guess, min(ends)), max(ends))), first), last)
    low: int | None = None
    high: int | None = None
    stride = _FIRST_STRIDE
    while low is None or high is None:
        if cost_at(index) <= target:
            low = index
            if index == last:
                return grid.value(last)
            factor = 1 / stride if grid.falling else stride
            index = min(max(grid.index(grid.value(index) * factor), index + 1), last)
        else:
            high = index
            if index == first:
                return None
            factor = stride if grid.falling else 1 / stride
            index = max(min(grid.index(grid.value(index) * factor), index - 1), first)
        stride *= stride
    index = round(cast("float", brentq(excess, low, high, xtol=1.0)))
    while cost_at(index) > target:
        index -= 1
    while cost_at(index + 1) <= target:
        index += 1
    return grid.value(index)


NOISE_GRID = SearchGrid(digits=5, falling=True)
BATCH_GRID = SearchGrid(digits=6)
STEP_GRID = SearchGrid()


def calibrate_noise_multiplier(
    *,
    num_units: int,
    expected_batch_size: float,
    steps: int,
    delta: float,
    target_epsilon: float | None = None,
    target_risk: AttackRisk | None = None,
    adjacency: Adjacency = "add_remove",
    extra: Charges = (),
    refuse_little_noise: bool = True,
    accountant: Accountant = "pld",
) -> float:
    """Find the smallest noise multiplier of five significant digits that meets the target.

    Args:
        num_units: Number of protected units.
        expected_batch_size: Mean number of units per step, at most ``num_units``.
        steps: Noisy releases, at least 1.
        delta: The delta of the guarantee, in (0, 1).
        target_epsilon: The largest allowed epsilon, in (0, 1e6].
        target_risk: The largest allowed success of attacks, instead of ``target_epsilon``.
        adjacency: Which datasets are neighbours.
        extra: Further releases that the same budget pays for.
        refuse_little_noise: Refuse a target that hardly needs noise; otherwise the smallest useful noise multiplier
            (0.01) is returned for it.
        accountant: By which the cost is computed. RDP costs more, so it leaves a little more noise; it has no
            ``target_risk``.

    Returns:
        Standard deviation of the noise on the sum, divided by the clip norm.

    Raises:
        ArgumentError: A value is out of range, or the target cannot be met, or hardly any noise is needed.

    Guarantee:
        ``guarantee`` of the result is at most ``target_epsilon``, by either accountant where ``accountant`` is rdp;
        or the bound on attacks of its ``full_profile`` is at most that of ``target_risk``.
    """
    budget = _Budget.of(target_epsilon, target_risk, delta=delta, adjacency=adjacency, extra=tuple(extra))
    budget = replace(budget, accountant=accountant)
    problems = budget.problems()
    rate = _check_batch(problems, num_units, expected_batch_size)
    problems.count("steps", steps)
    problems.raise_if_any()
    budget.require_room()
    noise = last_within(
        lambda noise: budget.cost([(Event(sample_rate=rate, noise_multiplier=noise), steps)]),
        target=budget.limit,
        grid=NOISE_GRID,
        guess=1 / math.sqrt(max(1e-20, math.log1p((budget.shift() / rate) ** 2 / steps))),
        ends=(LARGEST_NOISE, SMALLEST_USEFUL_NOISE),
    )
    if noise is None:
        raise ArgumentError(
            f"{budget.name} at delta {delta} can't be met with any noise_multiplier "
            f"up to {LARGEST_NOISE:g}. Raise the target or delta, or lower the extra charges."
        )
    if refuse_little_noise and noise <= SMALLEST_USEFUL_NOISE * 1.001:
        raise ArgumentError(
            f"{budget.name} at delta {delta} is met with next to no noise "
            f"(noise_multiplier {noise:g}): such a guarantee has no value. Lower the target or delta."
        )
    return noise


def calibrate_steps(
    *,
    num_units: int,
    expected_batch_size: float,
    noise_multiplier: float,
    delta: float,
    target_epsilon: float | None = None,
    target_risk: AttackRisk | None = None,
    adjacency: Adjacency = "add_remove",
    extra: Charges = (),
) -> int:
    """Find the largest number of steps that meets the target.

    Args:
        num_units: Number of protected units.
        expected_batch_size: Mean number of units per step, at most ``num_units``.
        noise_multiplier: Standard deviation of the noise on the sum, divided by the clip norm, > 0.
        delta: The delta of the guarantee, in (0, 1).
        target_epsilon: The largest allowed epsilon, in (0, 1e6].
        target_risk: The largest allowed success of attacks, instead of ``target_epsilon``.
        adjacency: Which datasets are neighbours.
        extra: Further releases that the same budget pays for.

    Returns:
        Steps; one more would exceed the target.

    Raises:
        ArgumentError: A value is out of range, one step exceeds the target, or no number of steps does.

    Guarantee:
        ``guarantee`` of the result is at most ``target_epsilon``; or the bound on attacks of its ``full_profile`` is
        at most that of ``target_risk``.
    """
    budget = _Budget.of(target_epsilon, target_risk, delta=delta, adjacency=adjacency, extra=tuple(extra))
    problems = budget.problems()
    rate = _check_batch(problems, num_units, expected_batch_size)
    check_noise(problems, noise_multiplier)
    problems.raise_if_any()
    event = Event(sample_rate=rate, noise_multiplier=noise_multiplier)
    budget.require_room()
    guess = 2 * math.log(budget.shift()) - _log_clt_precision(rate, noise_multiplier)
    steps = last_within(
        lambda steps: budget.cost([(event, int(steps))]),
        target=budget.limit,
        grid=STEP_GRID,
        guess=math.exp(min(max(guess, 0.0), 30.0)),
        ends=(1, most_steps(delta)),
    )
    if steps is None:
        raise ArgumentError(
            f"{budget.name} does not allow a single step: one costs "
            f"{rounded_up(budget.cost([(event, 1)]))}. Raise noise_multiplier or the target, or lower the batch "
            "size."
        )
    if steps >= most_steps(delta):
        raise ArgumentError(
            f"steps would exceed {most_steps(delta)}: with noise_multiplier {noise_multiplier} and sample_rate "
            f"{rate:.3g} {budget.name} is never spent. Lower noise_multiplier or the target."
        )
    return int(steps)


def calibrate_expected_batch_size(
    *,
    num_units: int,
    noise_multiplier: float,
    steps: int,
    delta: float,
    target_epsilon: float | None = None,
    target_risk: AttackRisk | None = None,
    adjacency: Adjacency = "add_remove",
    extra: Charges = (),
) -> float:
    """Find the largest expected batch size of six significant digits that meets the target.

    Args:
        num_units: Number of protected units; the largest possible result.
        noise_multiplier: Standard deviation of the noise on the sum, divided by the clip norm, > 0.
        steps: Noisy releases, at least 1.
        delta: The delta of the guarantee, in (0, 1).
        target_epsilon: The largest allowed epsilon, in (0, 1e6].
        target_risk: The largest allowed success of attacks, instead of ``target_epsilon``.
        adjacency: Which datasets are neighbours.
        extra: Further releases that the same budget pays for.

    Returns:
        Mean number of units per step.

    Raises:
        ArgumentError: A value is out of range, or no batch size meets the target.

    Guarantee:
        ``guarantee`` of the result is at most ``target_epsilon``; or the bound on attacks of its ``full_profile`` is
        at most that of ``target_risk``.
    """
    budget = _Budget.of(target_epsilon, target_risk, delta=delta, adjacency=adjacency, extra=tuple(extra))
    problems = budget.problems()
    problems.count("num_units", num_units)
    check_noise(problems, noise_multiplier)
    problems.count("steps", steps)
    problems.raise_if_any()
    budget.require_room()

    def cost(batch: float) -> float:
        return budget.cost([(Event(sample_rate=batch / num_units, noise_multiplier=noise_multiplier), steps)])

    if cost(num_units) <= budget.limit:
        return float(num_units)
    log_guess = math.log(num_units * budget.shift())
    log_guess -= (math.log(steps) + _log_clt_precision(1.0, noise_multiplier)) / 2
    ends = (2 * SMALLEST_RATE * num_units, float(num_units))
    guess = math.exp(min(max(log_guess, math.log(ends[0])), math.log(ends[1])))
    batch = last_within(cost, target=budget.limit, grid=BATCH_GRID, guess=guess, ends=ends)
    if batch is None:
        raise ArgumentError(
            f"{budget.name} can't be met with any expected_batch_size: noise_multiplier "
            f"{noise_multiplier} is too low for {steps} steps. Raise noise_multiplier or lower steps."
        )
    return batch


@final
@dataclass(frozen=True, kw_only=True)
class _Budget:
    """The target, an epsilon or a limit on attacks, and the releases that it must also pay for."""

    target: float | AttackRisk
    delta: float
    adjacency: Adjacency
    extra: Charges
    accountant: Accountant = "pld"

    @classmethod
    def of(
        cls, epsilon: float | None, risk: AttackRisk | None, *, delta: float, adjacency: Adjacency, extra: Charges
    ) -> _Budget:
        """Make the budget of the one target that is given."""
        if epsilon is not None and risk is None:
            return cls(target=epsilon, delta=delta, adjacency=adjacency, extra=extra)
        if risk is not None and epsilon is None:
            return cls(target=risk, delta=delta, adjacency=adjacency, extra=extra)
        raise ArgumentError(f"give target_epsilon or target_risk, got {'neither' if risk is None else 'both'}.")

    @property
    def limit(self) -> float:
        """The largest allowed cost."""
        return self.target.limit if isinstance(self.target, AttackRisk) else self.target

    @property
    def name(self) -> str:
        """The target in the words of an error message."""
        return f"target_{'risk' if isinstance(self.target, AttackRisk) else 'epsilon'} {self.target}"

    def problems(self) -> Problems:
        """Collect the rules that the budget itself breaks."""
        problems = Problems()
        if not isinstance(self.target, AttackRisk):
            problems.positive("target_epsilon", self.target)
            problems.require(
                not self.target > LARGEST_TARGET,
                f"target_epsilon must be <= {LARGEST_TARGET:g}, got {self.target}: it would promise nothing.",
            )
        elif self.accountant != "pld":
            problems.require(False, f"accountant must be pld with target_risk, got {self.accountant!r}.")
        check_delta_and_adjacency(problems, delta=self.delta, adjacency=self.adjacency)
        return problems

    def cost(self, charges: Charges) -> float:
        """Compute what ``charges`` and the extra ones cost: epsilon as ``guarantee`` does, or a bound on attacks.

        With ``accountant`` rdp it is the larger epsilon of both accountants: that of RDP but in odd cases.
        """
        together = [*charges, *self.extra]
        check_request(together, delta=self.delta, adjacency=self.adjacency)
        if isinstance(self.target, AttackRisk):
            return self.target.bound(full_profile(together, delta=self.delta, adjacency=self.adjacency))
        by_pld = pld_epsilon(together, delta=self.delta, adjacency=self.adjacency)
        if self.accountant == "pld":
            return by_pld
        by_other = guarantee(together, delta=self.delta, adjacency=self.adjacency, accountant=self.accountant)
        return max(by_pld, by_other.epsilon)

    def require_room(self) -> None:
        """Refuse a budget that the extra charges alone use up."""
        already = self.cost([]) if self.extra else 0.0
        if not already < self.limit:
            raise ArgumentError(
                f"{self.name.split()[0]} must be above what the extra charges cost ({rounded_up(already)}), "
                f"got {self.target}. Raise it or put more noise on the extra releases."
            )

    def shift(self) -> float:
        """Estimate the shift mu of one Gaussian release that spends the target. For guesses.

        With an epsilon it follows from epsilon = mu²/2 + mu z.
        """
        if isinstance(self.target, AttackRisk):
            return max(self.target.gaussian_shift, sys.float_info.min)
        z = max(0.5, -NormalDist().inv_cdf(self.delta))
        shift = 2 * self.target / (math.sqrt(z * z + 2 * self.target) + z)
        return max(shift, sys.float_info.min)  # its logarithm is taken


def _check_batch(problems: Problems, num_units: int, expected_batch_size: float) -> float:
    """Check the pair, and return the sample rate if both are valid."""
    problems.count("num_units", num_units)
    problems.positive("expected_batch_size", expected_batch_size)
    problems.require(
        not expected_batch_size > num_units,
        f"sample_rate must be <= 1, got {expected_batch_size} / {num_units} "
        f"(expected_batch_size={expected_batch_size}, num_units={num_units}). Lower expected_batch_size.",
    )
    rate = expected_batch_size / num_units if num_units > 0 else math.nan
    if rate >= 0 and expected_batch_size > 0:
        check_rate(problems, rate)
    return rate


def _log_clt_precision(rate: float, noise_multiplier: float) -> float:
    """Return ln of rate² (exp(1/σ²) - 1), one step's part of mu² in the central limit. For guesses."""
    inverse = 1 / noise_multiplier**2
    return 2 * math.log(rate) + (inverse if inverse > 40 else math.log(math.expm1(inverse)))
