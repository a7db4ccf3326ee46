"""Epsilon by privacy loss distributions (PLD): the headline value of every guarantee.

dp-accounting discretises the loss of one release pessimistically ("connect the dots") and composes by FFT. This file
chooses two things. The grid: fine enough that epsilon is within about 1e-4 of its limit, coarse enough that an answer
takes a fraction of a second. The margin: the rounding errors of the FFT grow with the number of steps and may have any
sign, so the accountant is asked for a slightly smaller delta than the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from statistics import NormalDist
from typing import final

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as distributions
from numpy.typing import NDArray
from scipy.special import log_ndtr

from dpvision.accounting.charges import Charges, merge
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Adjacency, Event

# pyright: reportMissingTypeStubs=false
# dp-accounting has annotations but no stubs.


# A T-fold composition by FFT was seen to lower delta by up to 6.2e-17 * T, against the closed form of the Gaussian
# mechanism (tests/accounting/test_pld.py). This is fourteen times as much.
ROUNDING_PER_STEP = 2.0**-50

CELLS_PER_DEVIATION = 60
FINEST_INTERVAL = 2.0**-20  # finer cells drown in the rounding errors of differences of deltas
WIDEST_INTERVAL = 64.0  # wider cells overflow an exponential
MOST_CELLS_OF_ONE_STEP = 2**17
MOST_CELLS = 2**20
MOST_STEPS = 10**8
LARGEST_EXPONENT = 700.0  # e to the power of more overflows

Loss = distributions.PrivacyLossDistribution

_RELATIONS: dict[Adjacency, NeighboringRelation] = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
    "replace_one": NeighboringRelation.REPLACE_ONE,
}


def pld_epsilon(charges: Charges, *, delta: float, adjacency: Adjacency) -> float:
    """Compute epsilon of the charges at ``delta`` by PLD.

    Args:
        charges: Noisy releases and how often each was made, already checked by ``check_request``.
        delta: The delta of the guarantee, in (0, 1).
        adjacency: Which datasets are neighbours.

    Returns:
        Epsilon, at least 0.

    Raises:
        ArgumentError: Rounding errors would decide the result at this delta.

    Guarantee:
        An upper bound: discretisation, truncated tails and rounding errors all make it larger. Under ``replace_one``,
        noise multipliers still refer to the bound on one unit's contribution; that a replacement may move a release by
        twice this bound is accounted for.
    """
    merged = merge(charges)
    if not merged:
        return 0.0
    strict_delta = _strict_delta(merged, delta)
    grid = choose_grid(merged, delta=delta)
    if grid.interval > WIDEST_INTERVAL:
        return epsilon_without_sampling(merged, strict_delta, adjacency)
    return epsilon_of(_compose(merged, grid, _RELATIONS[adjacency]), strict_delta)


@final
@dataclass(frozen=True)
class Grid:
    """Discretisation of losses: cell width, and the probability that may be cut off (it counts as infinite loss)."""

    interval: float
    log_tail_of_one_step: float
    tail_mass: float


def choose_grid(charges: Charges, *, delta: float) -> Grid:
    """Choose a power-of-two cell width from the spread of one release's loss and the range of all losses together.

    Guarantee:
        None needed. Every grid gives an upper bound; this one gives a tight bound quickly.
    """
    reach = tail_reach(delta)
    losses = [(*_loss_moments(event), _loss_range(event, reach), count) for event, count in charges]
    return grid_for(losses, delta=delta, most_cells_of_one_step=MOST_CELLS_OF_ONE_STEP)


def tail_reach(delta: float) -> float:
    """Return how many standard deviations of the noise the discretisation covers."""
    return -NormalDist().inv_cdf(math.exp(_log_tail(delta)) / 2)


def _log_tail(delta: float) -> float:
    return math.log(delta) - 30


def grid_for(losses: Sequence[tuple[float, float, float, int]], *, delta: float, most_cells_of_one_step: int) -> Grid:
    """Choose a grid from (mean, standard deviation, range, count) of the loss of each kind of release."""
    mean = math.fsum(count * one_mean for one_mean, _, _, count in losses)
    variance = math.fsum(count * one_deviation**2 for _, one_deviation, _, count in losses)
    steps = sum(count for _, _, _, count in losses)
    width = max(
        FINEST_INTERVAL,
        math.sqrt(variance / steps) / CELLS_PER_DEVIATION,
        max(room for _, _, room, _ in losses) / most_cells_of_one_step,
        (mean + 2 * tail_reach(delta) * math.sqrt(variance)) / MOST_CELLS,
    )
    return Grid(
        interval=2.0 ** math.ceil(math.log2(width)),
        log_tail_of_one_step=_log_tail(delta),
        tail_mass=delta * 1e-7,
    )


def most_steps(delta: float) -> int:
    """Return how many steps can be composed before rounding errors could matter at this ``delta``."""
    return min(MOST_STEPS, math.floor(delta / (4 * ROUNDING_PER_STEP)))


def _strict_delta(charges: Charges, delta: float) -> float:
    return stricter(delta, _margin(charges))


def _margin(charges: Charges) -> float:
    return ROUNDING_PER_STEP * sum(count for _, count in charges)


def stricter(delta: float, margin: float) -> float:
    """Return ``delta`` minus the numerical errors; refuse a delta that they would dominate."""
    if not margin < delta / 2:
        raise ArgumentError(
            f"delta must be > {2 * margin:.1e} for this many steps, got {delta}: below that, rounding errors would "
            "decide the result. Use a larger delta, fewer steps, or the rdp accountant."
        )
    return delta - margin


@lru_cache(maxsize=2)
def _compose(charges: tuple[tuple[Event, int], ...], grid: Grid, relation: NeighboringRelation) -> Loss:
    """The loss of all charges; remembered, because a profile asks for its epsilon first and then for its deltas."""
    return composed(
        [(loss_of_one(event.sample_rate, event.noise_multiplier, relation, grid), count) for event, count in charges],
        grid,
    )


def composed(losses: Sequence[tuple[Loss, int]], grid: Grid) -> Loss:
    """Compose the losses of all releases, each given once with its count."""
    parts = [loss.self_compose(count, grid.tail_mass) if count > 1 else loss for loss, count in losses]
    return reduce(lambda left, right: left.compose(right, grid.tail_mass), parts)


def epsilon_of(composed: Loss, delta: float) -> float:
    """Return the smallest epsilon, at least 0, of a composed loss at ``delta``."""
    # Asked first, because the search for epsilon walks down to losses whose exponential may overflow.
    if float(composed.get_delta_for_epsilon(0.0)) <= delta:
        return 0.0
    return max(0.0, float(composed.get_epsilon_for_delta(delta)))


def epsilon_without_sampling(charges: Charges, delta: float, adjacency: Adjacency) -> float:
    """Bound epsilon in closed form as if every step used every unit; for epsilons in the tens of millions.

    With mu the total shift in units of the noise, delta(epsilon) <= Phi(mu/2 - epsilon/mu).
    """
    shift = shift_without_sampling(charges, adjacency)
    return max(0.0, shift**2 / 2 + shift * -NormalDist().inv_cdf(delta))


def shift_without_sampling(charges: Charges, adjacency: Adjacency) -> float:
    """Return how far one unit moves all releases together, in standard deviations, if every step used every unit.

    Guarantee:
        The charges are at least as private as one Gaussian release with this shift, at every epsilon.
    """
    one = 2.0 if adjacency == "replace_one" else 1.0
    return math.sqrt(math.fsum(count * (one / event.noise_multiplier) ** 2 for event, count in charges))


def pld_deltas(
    charges: Charges, *, epsilons: NDArray[np.float64], delta: float, adjacency: Adjacency
) -> NDArray[np.float64]:
    """Compute delta of the charges at each of ``epsilons`` (rising, none negative), on the grid for ``delta``.

    Guarantee:
        Upper bounds, as in ``pld_epsilon``; at most 1.
    """
    merged = merge(charges)
    if not merged:
        return np.zeros_like(epsilons)
    grid = choose_grid(merged, delta=delta)
    if grid.interval > WIDEST_INTERVAL:
        return gaussian_deltas(shift_without_sampling(merged, adjacency), epsilons)
    # Beyond, e^epsilon is infinite and the result not a number. Deltas fall, so that of a smaller epsilon holds too.
    asked = np.minimum(epsilons, LARGEST_EXPONENT).tolist()
    with np.errstate(over="ignore"):  # of losses that are left out just after
        deltas = np.asarray(_compose(merged, grid, _RELATIONS[adjacency]).get_delta_for_epsilon(asked))
    return np.clip(deltas + _margin(merged), 0.0, 1.0)


def gaussian_deltas(shift: float, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the exact deltas of one Gaussian release that a unit can move by ``shift`` standard deviations."""
    if shift == 0:
        return np.zeros_like(epsilons)
    first = log_ndtr(-epsilons / shift + shift / 2)
    second = epsilons + log_ndtr(-epsilons / shift - shift / 2)
    return -np.expm1(np.minimum(second - first, 0.0)) * np.exp(first)


@lru_cache(maxsize=16)
def loss_of_one(sample_rate: float, noise_multiplier: float, relation: NeighboringRelation, grid: Grid) -> Loss:
    """The discretised loss of one Poisson-sampled Gaussian release, remembered."""
    loss = distributions.from_gaussian_mechanism(
        standard_deviation=noise_multiplier,
        pessimistic_estimate=True,
        value_discretization_interval=grid.interval,
        log_mass_truncation_bound=grid.log_tail_of_one_step,
        sampling_prob=sample_rate,
        use_connect_dots=True,
        neighboring_relation=relation,
    )
    # The mixture with itself is the same distribution, stored densely. A short, sparsely stored one would be composed
    # only after computing size**count as an exact whole number, which takes seconds at 10^6 steps.
    return loss.compute_mixture(loss, 0.5)


def _loss(event: Event, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """ln of the density ratio at ``x`` between a draw that may hold a unit of value 1 and one that can't."""
    exponent = (x - 0.5) / event.noise_multiplier**2
    if event.sample_rate == 1:
        return exponent
    return np.logaddexp(math.log1p(-event.sample_rate), math.log(event.sample_rate) + exponent)


def _loss_moments(event: Event) -> tuple[float, float]:
    """Mean and standard deviation of one release's loss, by quadrature: they choose the grid and nothing else."""
    z = np.linspace(-9.0, 9.0, 721)
    weights = np.exp(-z * z / 2)
    weights /= weights.sum()
    absent = _loss(event, event.noise_multiplier * z)
    present = _loss(event, event.noise_multiplier * z + 1)
    rate = event.sample_rate
    mean = float((1 - rate) * (weights @ absent) + rate * (weights @ present))
    variance = float((1 - rate) * (weights @ (absent - mean) ** 2) + rate * (weights @ (present - mean) ** 2))
    return mean, math.sqrt(variance)


def _loss_range(event: Event, reach: float) -> float:
    ends = np.array([-reach * event.noise_multiplier, reach * event.noise_multiplier + 1])
    lowest, highest = _loss(event, ends)
    return float(highest - lowest)
