"""A search for settings is charged: all trials, or a random number of them (PITFALLS 16)."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from dp_accounting.dp_event import GaussianDpEvent, RepeatAndSelectDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant

from dpvision.accounting import STOPPINGS, Charges, Stopping, all_trials, best_of_random_many, guarantee
from dpvision.accounting.selection import stopping_chance
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Event

DELTA = 1e-5


def charges(rate: float, noise: float, steps: int) -> Charges:
    return [(Event(sample_rate=rate, noise_multiplier=noise), steps)]


RUN = charges(0.1, 2.997, 400)


def test_composition_charges_every_trial() -> None:
    assert all_trials(RUN, trials=1, delta=DELTA).epsilon == guarantee(RUN, delta=DELTA).epsilon
    assert all_trials(RUN, trials=10, delta=DELTA).epsilon == guarantee(charges(0.1, 2.997, 4000), delta=DELTA).epsilon


def by_hand(shape: float, chance: float, mean: float, sigma: float) -> float:
    """Theorem 2 of Papernot and Steinke for one Gaussian release, over a fine list of orders, with the usual
    conversion of RDP to epsilon (Canonne et al. 2020)."""
    orders = [1 + n / 10 for n in range(1, 100)] + list(range(11, 1025))
    second = min((1 - 1 / o) * o / (2 * sigma**2) + math.log(1 / chance) / o for o in orders)
    return min(
        o / (2 * sigma**2)
        + (1 + shape) * second
        + math.log(mean) / (o - 1)
        + math.log1p(-1 / o)
        - math.log(DELTA * o) / (o - 1)
        for o in orders
    )


def test_geometric_stopping_of_a_gaussian_has_its_known_value() -> None:
    found = best_of_random_many(charges(1.0, 4.0, 1), mean_trials=20, stopping="geometric", delta=DELTA).epsilon
    assert found == pytest.approx(by_hand(1.0, 1 / 20, 20, 4.0), rel=5e-3)
    assert found >= by_hand(1.0, 1 / 20, 20, 4.0) * (1 - 1e-9)


@pytest.mark.parametrize(("stopping", "shape"), [("logarithmic", 0.0), ("geometric", 1.0), ("poisson", math.inf)])
@pytest.mark.parametrize("mean", [2.0, 10.0, 50.0])
def test_random_stopping_agrees_with_dp_accounting_or_is_tighter(stopping: Stopping, shape: float, mean: float) -> None:
    accountant = RdpAccountant()
    accountant.compose(RepeatAndSelectDpEvent(SelfComposedDpEvent(GaussianDpEvent(5.0), 3), mean, shape))
    theirs = float(accountant.get_epsilon(DELTA))
    ours = best_of_random_many(charges(1.0, 5.0, 3), mean_trials=mean, stopping=stopping, delta=DELTA).epsilon
    assert ours <= theirs * (1 + 1e-6)
    assert ours >= theirs * (0.6 if stopping == "poisson" else 1 - 1e-6)


def test_poisson_stopping_of_a_gaussian_has_its_known_value() -> None:
    """Theorem 6, by hand, with the exact delta of the Gaussian release."""
    sigma, mean, normal = 4.0, 10.0, NormalDist()
    bounds = []
    for order in [1 + n / 10 for n in range(1, 100)] + list(range(11, 64)):
        epsilon = math.log1p(1 / (order - 1))
        delta = normal.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * normal.cdf(
            -0.5 / sigma - epsilon * sigma
        )
        rdp = order / (2 * sigma**2) + mean * delta + math.log(mean) / (order - 1)
        bounds.append(rdp + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1))
    found = best_of_random_many(charges(1.0, sigma, 1), mean_trials=mean, stopping="poisson", delta=DELTA).epsilon
    assert min(bounds) * (1 - 1e-9) <= found <= min(bounds) * 1.005


@pytest.mark.parametrize("stopping", STOPPINGS)
def test_random_stopping_costs_more_than_one_run_and_grows_with_the_number(stopping: Stopping) -> None:
    one = guarantee(RUN, delta=DELTA).epsilon
    costs = [best_of_random_many(RUN, mean_trials=m, stopping=stopping, delta=DELTA).epsilon for m in (1, 3, 30)]
    assert one <= costs[0]
    assert costs == sorted(costs)


def test_many_trials_at_random_are_cheaper_than_composing_them() -> None:
    composed = all_trials(RUN, trials=50, delta=DELTA).epsilon
    for stopping in ("logarithmic", "geometric"):
        assert best_of_random_many(RUN, mean_trials=50, stopping=stopping, delta=DELTA).epsilon < composed / 4


@pytest.mark.parametrize("mean", [1.0, 1.5, 10.0, 1e4])
def test_the_chance_of_stopping_gives_the_mean_that_was_asked_for(mean: float) -> None:
    assert stopping_chance(mean, 1.0) == 1 / mean
    chance = stopping_chance(mean, 0.0)
    if mean > 1:
        assert (1 / chance - 1) / math.log(1 / chance) == pytest.approx(mean, rel=1e-6)
        assert (1 / chance - 1) / math.log(1 / chance) >= mean * (1 - 1e-12)
    else:
        assert chance == pytest.approx(1, abs=1e-9)


def test_a_search_that_never_looks_costs_nothing() -> None:
    assert best_of_random_many([], mean_trials=10, delta=DELTA).epsilon == 0
    assert all_trials([], trials=10, delta=DELTA).epsilon == 0


def test_bad_numbers_are_refused_and_so_is_an_adjacency_without_proof() -> None:
    for mean in (0, 0.5, math.nan, math.inf, "3"):
        with pytest.raises(ArgumentError, match="mean_trials"):
            best_of_random_many(RUN, mean_trials=mean, delta=DELTA)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="stopping"):
        best_of_random_many(RUN, mean_trials=3, stopping="never", delta=DELTA)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="trials"):
        all_trials(RUN, trials=0, delta=DELTA)
    with pytest.raises(ArgumentError, match="rdp"):
        best_of_random_many(RUN, mean_trials=3, delta=DELTA, adjacency="replace_one")
    with pytest.raises(ArgumentError, match="shape"):
        stopping_chance(3, 2.0)
