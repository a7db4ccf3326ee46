"""Prices of a search against closed forms and dp-accounting; they rise with everything, and exceed a single run's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent, RepeatAndSelectDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from dpvision.accounting import (
    all_trials,
    best_filter_order,
    best_of_random_many,
    divergence_at,
    filter_epsilon,
    filter_limit,
    guarantee,
)
from dpvision.privacy.mechanism import Event

DELTA = 1e-5
GAUSSIAN = [(4.0, 1), (4.0, 5), (8.0, 3), (8.0, 20), (20.0, 10), (20.0, 100), (50.0, 7), (3.0, 2)]
SAMPLED = [
    (0.01, 1.0, 200, 3),
    (0.01, 1.5, 500, 8),
    (0.05, 2.0, 100, 5),
    (0.05, 3.0, 300, 10),
    (0.1, 4.0, 150, 4),
    (0.2, 6.0, 60, 20),
    (0.02, 1.2, 250, 2),
    (0.5, 10.0, 40, 6),
]
SELECTED = [
    (0.01, 1.0, 200, 3.0, "geometric", 1.0),
    (0.05, 3.0, 300, 10.0, "geometric", 1.0),
    (0.2, 6.0, 60, 30.0, "geometric", 1.0),
    (0.01, 1.5, 500, 5.0, "logarithmic", 0.0),
    (0.05, 3.0, 300, 10.0, "logarithmic", 0.0),
    (0.1, 4.0, 150, 4.0, "logarithmic", 0.0),
]


def releases(rate: float, noise: float, count: int) -> list[tuple[Event, int]]:
    return [(Event(sample_rate=rate, noise_multiplier=noise), count)]


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Balle and Wang's exact formula for one Gaussian release of sensitivity over stddev ``shift``."""

    def excess(epsilon: float) -> float:
        high = norm.cdf(shift / 2 - epsilon / shift)
        return high - math.exp(epsilon + norm.logcdf(-shift / 2 - epsilon / shift)) - delta

    return float(brentq(excess, 0, 100))


@pytest.mark.parametrize(("noise", "trials"), GAUSSIAN)
def test_full_batch_trials_compose_to_the_closed_form_of_one_gaussian(noise: float, trials: int) -> None:
    found = all_trials(releases(1.0, noise, 1), trials=trials, delta=DELTA).epsilon
    exact = gaussian_epsilon(math.sqrt(trials) / noise, DELTA)
    assert exact * (1 - 1e-6) <= found <= exact * 1.002 + 2e-4  # the accountant's grid


@pytest.mark.parametrize(("rate", "noise", "steps", "trials"), SAMPLED)
def test_sampled_trials_compose_as_dp_accounting_composes_them(
    rate: float, noise: float, steps: int, trials: int
) -> None:
    found = all_trials(releases(rate, noise, steps), trials=trials, delta=DELTA).epsilon
    other: Any = PLDAccountant()
    other.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps * trials))
    assert found == pytest.approx(other.get_epsilon(DELTA), rel=0.01)


@pytest.mark.parametrize(("rate", "noise", "steps", "mean", "stopping", "shape"), SELECTED)
def test_the_best_of_price_is_at_most_that_of_dp_accounting(
    rate: float, noise: float, steps: int, mean: float, stopping: Any, shape: float
) -> None:
    charges = releases(rate, noise, steps)
    found = best_of_random_many(charges, mean_trials=mean, stopping=stopping, delta=DELTA).epsilon
    single = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), steps)
    other = RdpAccountant()
    other.compose(RepeatAndSelectDpEvent(single, mean, shape))
    theirs = other.get_epsilon(DELTA)
    assert 0.9 * theirs <= found <= theirs * 1.001  # ours has more orders, and a cost for rounding
    assert found >= guarantee(charges, delta=DELTA).epsilon


def closed_form_of_selection(noise: float, runs: int, mean: float, stopping: str) -> float:
    """Theorems 2 and 6 of Papernot and Steinke for Gaussian releases, over all orders from 1.01 to 2000."""
    orders = np.geomspace(0.01, 2000, 4000) + 1
    slope = runs / (2 * noise**2)  # the divergence at order a is a times this
    penalty = np.log(mean) / (orders - 1)
    if stopping == "poisson":
        shift = math.sqrt(runs) / noise
        at = np.log1p(1 / (orders - 1))
        deltas = norm.cdf(shift / 2 - at / shift) - np.exp(at + norm.logcdf(-shift / 2 - at / shift))
        penalty += mean * deltas
    else:
        shape = 1.0 if stopping == "geometric" else 0.0
        if stopping == "geometric":
            chance = 1 / mean
        else:
            chance = brentq(lambda c: (1 / c - 1) / math.log(1 / c) - mean, 1e-12, 1 - 1e-12)
        penalty += (1 + shape) * np.min((1 - 1 / orders) * orders * slope - math.log(chance) / orders)
    total = orders * slope + penalty
    return float(np.min(total + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1)))


@pytest.mark.parametrize("stopping", ["geometric", "logarithmic", "poisson"])
@pytest.mark.parametrize(("noise", "runs", "mean"), [(4.0, 1, 3.0), (8.0, 20, 10.0), (20.0, 100, 30.0), (3.0, 4, 2.0)])
def test_the_best_of_price_is_the_papers_theorem(noise: float, runs: int, mean: float, stopping: Any) -> None:
    found = best_of_random_many(releases(1.0, noise, runs), mean_trials=mean, stopping=stopping, delta=DELTA).epsilon
    exact = closed_form_of_selection(noise, runs, mean, stopping)
    assert exact * (1 - 1e-3) <= found <= exact * 1.01  # ours has fewer orders, and its deltas are upper bounds


@pytest.mark.parametrize("stopping", ["geometric", "logarithmic", "poisson"])
def test_prices_rise_with_the_number_of_trials_and_never_fall_below_one_run(stopping: Any) -> None:
    charges = releases(0.05, 3.0, 300)
    alone = guarantee(charges, delta=DELTA).epsilon
    by_rdp = guarantee(charges, delta=DELTA, accountant="rdp").epsilon
    means = (1.0, 2.0, 5.0, 20.0, 100.0)
    prices = [best_of_random_many(charges, mean_trials=mean, stopping=stopping, delta=DELTA).epsilon for mean in means]
    assert prices == sorted(prices)
    assert all(price >= by_rdp >= alone for price in prices)
    composed = [all_trials(charges, trials=trials, delta=DELTA).epsilon for trials in (1, 2, 5, 20, 100)]
    assert composed == sorted(composed)
    assert composed[0] >= alone * (1 - 1e-9)
    assert prices[-1] < composed[-1]  # what random stopping is for


@pytest.mark.parametrize(("rate", "noise", "steps", "trials"), SAMPLED[:4])
def test_a_filter_at_its_best_order_costs_what_rdp_costs(rate: float, noise: float, steps: int, trials: int) -> None:
    charges = releases(rate, noise, steps * trials)
    order = best_filter_order(charges, delta=DELTA)
    found = filter_epsilon(order=order, divergence=divergence_at(charges, order=order), delta=DELTA)
    assert found == pytest.approx(guarantee(charges, delta=DELTA, accountant="rdp").epsilon, rel=1e-6)
    assert found >= guarantee(charges, delta=DELTA).epsilon
    limit = filter_limit(order=order, epsilon=found, delta=DELTA)
    assert limit == pytest.approx(divergence_at(charges, order=order), rel=1e-9)
    assert divergence_at(releases(rate, noise, steps), order=order) * trials == pytest.approx(limit, rel=1e-9)


def test_an_order_that_the_accountant_does_not_compute_admits_nothing() -> None:
    assert divergence_at(releases(0.1, 2.0, 5), order=2.123456) == math.inf
