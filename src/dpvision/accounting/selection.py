"""The privacy cost of a hyper-parameter search in which every trial uses the same private data.

Two methods are proved. Composition: all trials are charged, and each may depend on the earlier ones and be published.
Random stopping (Papernot and Steinke, arXiv 2110.03620): settings are drawn at random, the number of trials is drawn
from a known distribution and kept secret, and only the best trial is released. Its cost hardly grows with the number.

Where the noise or the number of steps of a trial depends on what earlier trials released, composing what was run by
PLD proves nothing. A Rényi filter (Feldman and Zrnic, arXiv 2008.11193) does: one order and one limit are fixed before
the first trial, every trial must fit into what is left of the limit, and the limit is the guarantee.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from dp_accounting.rdp import compute_epsilon
from numpy.typing import NDArray

from dpvision.accounting.charges import Charges, check_request
from dpvision.accounting.epsilon import guarantee
from dpvision.accounting.pld import pld_deltas
from dpvision.accounting.rdp import rdp_curve
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.mechanism import Adjacency, Guarantee

# pyright: reportMissingTypeStubs=false
# dp-accounting has annotations but no stubs.


Stopping = Literal["logarithmic", "geometric", "poisson"]
STOPPINGS: tuple[Stopping, ...] = ("logarithmic", "geometric", "poisson")
_SHAPES = {"logarithmic": 0.0, "geometric": 1.0}  # of the truncated negative binomial distribution


def all_trials(charges: Charges, *, trials: int, delta: float, adjacency: Adjacency = "add_remove") -> Guarantee:
    """Compute the guarantee of several runs with these charges, where each may depend on the earlier ones.

    Args:
        charges: Noisy releases of one trial.
        trials: Number of trials, at least 1.
        delta: The delta of the guarantee, in (0, 1).
        adjacency: Which datasets are neighbours.

    Returns:
        The guarantee of all trials together.

    Raises:
        ArgumentError: A value is out of range.

    Guarantee:
        An upper bound by PLD; every trial may be released.
    """
    Problems().count("trials", trials).raise_if_any()
    return guarantee([(event, count * trials) for event, count in charges], delta=delta, adjacency=adjacency)


def best_of_random_many(
    charges: Charges,
    *,
    mean_trials: float,
    stopping: Stopping = "geometric",
    delta: float,
    adjacency: Adjacency = "add_remove",
) -> Guarantee:
    """Compute the guarantee of releasing only the best of a random number of runs.

    Args:
        charges: Noisy releases of one trial, at most.
        mean_trials: Mean of the distribution of the number of trials, at least 1.
        stopping: The distribution: ``logarithmic``, ``geometric`` or ``poisson``.
        delta: The delta of the guarantee, in (0, 1).
        adjacency: ``add_remove`` or ``zero_out``.

    Returns:
        The guarantee of the released trial.

    Raises:
        ArgumentError: A value is out of range.

    Guarantee:
        An upper bound by RDP (theorems 2 and 6 of the paper), if settings are drawn independently of the data, the
        number of trials is drawn from ``stopping`` with ``mean_trials`` as its mean, and only the best trial is seen.
    """
    problems = Problems()
    problems.require(
        type(mean_trials) in (int, float) and 1 <= mean_trials < math.inf,
        f"mean_trials must be a finite number >= 1, got {mean_trials}.",
    )
    problems.require(stopping in STOPPINGS, f"stopping must be one of {', '.join(STOPPINGS)}, got {stopping!r}.")
    problems.raise_if_any()
    check_request(charges, delta=delta, adjacency=adjacency)
    orders, divergences = rdp_curve(charges, adjacency=adjacency)
    if not any(count for _, count in charges):
        epsilon = 0.0
    else:
        penalty = math.log(mean_trials) / (orders - 1)
        if stopping == "poisson":
            penalty += mean_trials * _deltas_of_one(charges, orders, delta, adjacency)
        else:
            penalty += _negative_binomial_penalty(orders, divergences, mean_trials, _SHAPES[stopping])
        found, _ = compute_epsilon(list(orders), list(divergences + penalty), delta)
        epsilon = max(0.0, float(found))
    return Guarantee(epsilon=epsilon, delta=delta, adjacency=adjacency, accountant="rdp")


def filter_epsilon(*, order: float, divergence: float, delta: float) -> float:
    """Return the epsilon of a Rényi divergence at one order.

    Args:
        order: The order, above 1.
        divergence: The divergence at that order, at least 0.
        delta: The delta of the guarantee, in (0, 1).

    Returns:
        An upper bound on epsilon, at least 0.
    """
    problems = Problems().probability("delta", delta)
    problems.require(1 < order < math.inf, f"order must be a finite number > 1, got {order}.")
    problems.require(0 <= divergence < math.inf, f"divergence must be a finite number >= 0, got {divergence}.")
    problems.raise_if_any()
    # Proposition 12 of Canonne, Kamath and Steinke (arXiv 2004.00010).
    return max(0.0, divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def filter_limit(*, order: float, epsilon: float, delta: float) -> float:
    """Return the largest divergence at ``order`` whose ``filter_epsilon`` is at most ``epsilon``; below 0 if none."""
    return epsilon - (math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def divergence_at(charges: Charges, *, order: float, adjacency: Adjacency = "add_remove") -> float:
    """Return a bound on the Rényi divergence of the charges at one order of ``rdp_curve``; infinite if it has none.

    Args:
        charges: Noisy releases and how often each was made.
        order: One of the orders that the accountant computes.
        adjacency: ``add_remove`` or ``zero_out``.

    Guarantee:
        The divergences of several charges add up, also where later ones depend on what earlier ones released.
    """
    orders, divergences = rdp_curve(charges, adjacency=adjacency)
    found = np.flatnonzero(orders == order)
    return float(divergences[found[0]]) if len(found) else math.inf


def best_filter_order(charges: Charges, *, delta: float, adjacency: Adjacency = "add_remove") -> float:
    """Return the order at which the epsilon of these planned charges is smallest: a good order for a filter."""
    check_request(charges, delta=delta, adjacency=adjacency)
    orders, divergences = rdp_curve(charges, adjacency=adjacency)
    epsilons = [
        filter_epsilon(order=float(order), divergence=float(divergence), delta=delta)
        for order, divergence in zip(orders, divergences, strict=True)
    ]
    return float(orders[int(np.argmin(epsilons))])


def _negative_binomial_penalty(
    orders: NDArray[np.float64], divergences: NDArray[np.float64], mean_trials: float, shape: float
) -> float:
    """Return the penalty of theorem 2 at the best second order."""
    log_inverse = -math.log(stopping_chance(mean_trials, shape))
    return (1 + shape) * float(np.min((1 - 1 / orders) * divergences + log_inverse / orders))


def _deltas_of_one(
    charges: Charges, orders: NDArray[np.float64], delta: float, adjacency: Adjacency
) -> NDArray[np.float64]:
    """Return delta of one run at epsilon = ln(1 + 1/(order − 1)) by PLD, as theorem 6 needs it."""
    epsilons = np.log1p(1 / (orders - 1))
    rising = np.argsort(epsilons)
    deltas = np.empty_like(epsilons)
    deltas[rising] = pld_deltas(charges, epsilons=epsilons[rising], delta=delta, adjacency=adjacency)
    return deltas


def stopping_chance(mean_trials: float, shape: float) -> float:
    """Return the parameter of a truncated negative binomial distribution (shape 0 or 1) with at most this mean.

    Geometric (1): stop after each trial with this chance. Logarithmic (0): mean = (1/chance − 1) / ln(1/chance).
    """
    if shape == 1:
        return 1 / mean_trials
    if shape != 0:
        raise ArgumentError(f"shape must be 0 or 1, got {shape}.")
    low, high = 0.0, 1.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _logarithmic_mean(middle) < mean_trials else (middle, high)
    return low if low > 0 else high


def _logarithmic_mean(chance: float) -> float:
    odds = 1 / chance - 1
    return 1.0 if odds == 0 else odds / math.log1p(odds)
