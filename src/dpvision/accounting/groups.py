"""Guarantees for more, or less, than the privacy unit: a patient with many slices, or one slice of a patient.

Rows as units, an owner of at most k of them. In each step the owner's rows join one by one, each with the sample
rate, so that B of them do, B ~ Binomial(k, rate), and together they move the sum by at most B clip norms. Such a step
is dominated by one number with Gaussian noise whose mean is B (Choquette-Choo et al., arXiv 2310.15526, corollary
4.7: norms instead of vectors, larger norms are worse), whatever the steps before it gave. dp-accounting discretises
that mixture for adding and for removing the owner.

Owners as units, one row of an owner more or less. The owner stays, and its clipped gradient becomes another one: the
same draw, moved by up to two clip norms. That is ``replace_one`` of the owner.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as distributions
from numpy.typing import NDArray
from scipy.stats import binom

from dpvision.accounting.charges import Charges, check_request, merge
from dpvision.accounting.epsilon import guarantee
from dpvision.accounting.pld import (
    ROUNDING_PER_STEP,
    WIDEST_INTERVAL,
    Grid,
    Loss,
    composed,
    epsilon_of,
    epsilon_without_sampling,
    grid_for,
    loss_of_one,
    pld_epsilon,
    stricter,
    tail_reach,
)
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.mechanism import Adjacency, Event, Guarantee

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# dp-accounting has annotations but no stubs; the types of scipy.stats are vague.


MOST_ROWS = 1_000_000
MOST_JOINING = 500  # beyond, sampling is left out of account
MOST_CELLS_OF_ONE_STEP = 2**13  # inverting a mixture's loss takes a search for every cell
_RARE = 1e-30  # draws rarer than this count as draws of all the owner's rows
_PRECISION = 1e-6  # with which dp-accounting finds the point of a given loss


def owner_guarantee(
    charges: Charges, *, most_rows: int, delta: float, adjacency: Adjacency = "add_remove", owner: str = "owner"
) -> Guarantee:
    """Compute what charges for single rows guarantee to an owner of several rows.

    Args:
        charges: Noisy releases with rows as privacy units.
        most_rows: The largest number of rows that one owner has, from 1 to 1,000,000.
        delta: The delta of the guarantee, in (0, 1).
        adjacency: ``add_remove`` or ``zero_out``.
        owner: The word for the owner.

    Returns:
        The guarantee with ``owner`` as its privacy unit.

    Raises:
        ArgumentError: A value is out of range, or ``replace_one``, for which no such bound is proved.

    Guarantee:
        An upper bound by PLD for an owner who joins or leaves with all rows (zero_out: whose rows are all blanked).
    """
    problems = Problems()
    problems.count("most_rows", most_rows)
    problems.require(
        type(most_rows) is not int or most_rows <= MOST_ROWS, f"most_rows must be <= {MOST_ROWS}, got {most_rows}."
    )
    problems.require(
        adjacency != "replace_one", "adjacency must be add_remove or zero_out: replacing a group is not proved."
    )
    problems.raise_if_any()
    check_request(charges, delta=delta, adjacency=adjacency)
    if most_rows == 1:
        epsilon = pld_epsilon(charges, delta=delta, adjacency=adjacency)
    else:
        epsilon = _owner_epsilon(merge(charges), most_rows, delta)
    return Guarantee(epsilon=epsilon, delta=delta, adjacency=adjacency, accountant="pld", privacy_unit=owner)


def row_guarantee(
    charges: Charges, *, delta: float, adjacency: Adjacency = "add_remove", row: str = "picture"
) -> Guarantee:
    """Compute what charges for owners guarantee to one row of an owner who has others too.

    Args:
        charges: Noisy releases with owners as privacy units.
        delta: The delta of the guarantee, in (0, 1).
        adjacency: The adjacency that the result is labelled with.
        row: The word for the row.

    Returns:
        The guarantee with ``row`` as its privacy unit.

    Raises:
        ArgumentError: A value is out of range.

    Guarantee:
        An upper bound by PLD for adding, removing or changing one row of an owner who stays.
    """
    proved = guarantee(charges, delta=delta, adjacency="replace_one", privacy_unit=row)
    return Guarantee(epsilon=proved.epsilon, delta=delta, adjacency=adjacency, accountant="pld", privacy_unit=row)


@lru_cache(maxsize=16)
def _owner_epsilon(charges: tuple[tuple[Event, int], ...], most_rows: int, delta: float) -> float:
    if not charges:
        return 0.0
    # Without sampling all rows take part in every step: always true, and all that is left where the grid ends.
    whole = [(Event(sample_rate=1.0, noise_multiplier=e.noise_multiplier / most_rows), n) for e, n in charges]
    bound = epsilon_without_sampling(whole, delta, "add_remove")
    if any(
        event.sample_rate < 1 and binom.sf(MOST_JOINING, most_rows, event.sample_rate) > _RARE for event, _ in charges
    ):
        return bound
    try:
        strict_delta = stricter(delta, math.fsum(count * _error_of_one(event, most_rows) for event, count in charges))
        grid = _grid(charges, most_rows, delta)
    except ArgumentError:
        return bound
    if grid.interval > WIDEST_INTERVAL:
        return bound
    losses = composed([(_loss_of_one(event, most_rows, grid), count) for event, count in charges], grid)
    return min(bound, epsilon_of(losses, strict_delta))


def _error_of_one(event: Event, most_rows: int) -> float:
    """Bound what the numerical errors of one release may take off delta.

    A cell's delta is the largest of a function over all points, and dp-accounting looks at a point that is off by up to
    ``_PRECISION``. There the slope is zero, and the curvature at most the density's peak times the slope of the loss.
    """
    peak = 1 / (event.noise_multiplier * math.sqrt(2 * math.pi))
    return ROUNDING_PER_STEP + 4 * peak * most_rows / event.noise_multiplier**2 * _PRECISION**2


def _grid(charges: Charges, most_rows: int, delta: float) -> Grid:
    reach = tail_reach(delta)
    losses = [(*_moments(event, most_rows, reach), count) for event, count in charges]
    return grid_for(losses, delta=delta, most_cells_of_one_step=MOST_CELLS_OF_ONE_STEP)


def _loss_of_one(event: Event, most_rows: int, grid: Grid) -> Loss:
    if event.sample_rate == 1:  # all rows join: an ordinary Gaussian release
        return loss_of_one(1.0, event.noise_multiplier / most_rows, NeighboringRelation.ADD_OR_REMOVE_ONE, grid)
    joined, chances = joining(event.sample_rate, most_rows)
    loss = distributions.from_mixture_gaussian_mechanism(
        standard_deviation=event.noise_multiplier,
        sensitivities=[float(rows) for rows in joined],
        sampling_probs=[float(chance) for chance in chances],
        pessimistic_estimate=True,
        value_discretization_interval=grid.interval,
        log_mass_truncation_bound=grid.log_tail_of_one_step,
        use_connect_dots=True,
    )
    return loss.compute_mixture(loss, 0.5)  # the same distribution, stored densely (see pld.py)


def joining(sample_rate: float, most_rows: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return how many of an owner's rows may join a step, with probabilities; very rare numbers count as all rows."""
    counted = np.arange(min(most_rows, MOST_JOINING) + 1)
    more = np.asarray(binom.sf(counted, most_rows, sample_rate))  # the chance that more than this many join; it falls
    joined = counted[: int(np.count_nonzero(more > _RARE)) + 1]
    chances = np.asarray(binom.pmf(joined, most_rows, sample_rate))
    if joined[-1] < most_rows:
        joined = np.append(joined, most_rows)
        chances = np.append(chances, binom.sf(joined[-2], most_rows, sample_rate))
    return joined, chances


def _moments(event: Event, most_rows: int, reach: float) -> tuple[float, float, float]:
    """Compute mean, standard deviation and range of one release's loss by quadrature. They only choose the grid."""
    joined, chances = joining(event.sample_rate, most_rows)
    kept = chances > 0
    joined, log_chances, noise = joined[kept], np.log(chances[kept]), event.noise_multiplier

    def loss(x: NDArray[np.float64]) -> NDArray[np.float64]:
        exponents = joined * (x[..., None] - joined / 2) / noise**2
        return np.logaddexp.reduce(exponents + log_chances, axis=-1)

    z = np.linspace(-9.0, 9.0, 181)
    weights = np.exp(-z * z / 2)
    weights /= weights.sum()
    losses = np.stack([loss(noise * z + rows) for rows in joined])
    means = losses @ weights
    mean = float(np.exp(log_chances) @ means)
    variance = float(np.exp(log_chances) @ ((losses - mean) ** 2 @ weights))
    likely = joined[log_chances > -reach * reach / 2]
    ends = loss(np.array([-reach * noise, reach * noise + float(likely.max(initial=1))]))
    return mean, math.sqrt(variance), float(ends[1] - ends[0])
