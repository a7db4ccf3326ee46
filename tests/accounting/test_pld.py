"""PLD against closed forms and brute force: always above the truth, and close to it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import binom, log_ndtr, logsumexp, ndtr

from dpvision.accounting import guarantee
from dpvision.accounting.pld import ROUNDING_PER_STEP, most_steps
from dpvision.accounting.rdp import FRACTIONAL_ORDERS, renyi_divergences
from dpvision.accounting.rdp import ROUNDING_PER_STEP as RDP_ROUNDING_PER_STEP
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Adjacency, Event

NEARLY_ALL = 1 - 1e-15  # a rate that is 1 for every purpose but takes the road of sampled events, through the FFT


def epsilon_of(rate: float, noise: float, steps: int, delta: float, adjacency: Adjacency = "add_remove") -> float:
    event = Event(sample_rate=rate, noise_multiplier=noise)
    return guarantee([(event, steps)], delta=delta, adjacency=adjacency).epsilon


def gaussian_epsilon(shift: float, delta: float) -> float:
    """The exact epsilon of one Gaussian release that a unit moves by ``shift`` standard deviations."""

    def excess(epsilon: float) -> float:
        first = ndtr(shift / 2 - epsilon / shift)
        return float(first - math.exp(epsilon + log_ndtr(-shift / 2 - epsilon / shift)) - delta)

    return float(brentq(excess, 0, shift * shift + 12 * shift, xtol=1e-13))


@pytest.mark.parametrize("shift", [0.05, 0.3, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
def test_full_batch_releases_agree_with_the_closed_form(shift: float, delta: float) -> None:
    exact = gaussian_epsilon(shift, delta)
    computed = epsilon_of(1.0, 5 / shift, 25, delta)
    # 2e-4 is the discretisation's share, which may only add.
    assert exact <= computed <= exact * (1 + 2e-4) + 1e-12


@pytest.mark.parametrize("shift", [0.5, 1.0, 4.0])
@pytest.mark.parametrize(("steps", "delta"), [(10, 1e-13), (1000, 4e-12), (100_000, 2.5e-10), (100_000, 1e-9)])
def test_rounding_errors_of_long_compositions_never_lower_epsilon(shift: float, steps: int, delta: float) -> None:
    # Without the margin these deltas are so small that the FFT's errors show: epsilon comes out below the closed form.
    exact = gaussian_epsilon(shift, delta)
    computed = epsilon_of(NEARLY_ALL, math.sqrt(steps) / shift, steps, delta)
    # The margin is at most half of delta here, which costs up to a few per cent of epsilon.
    assert exact <= computed <= exact * 1.06


def test_deltas_that_drown_in_rounding_errors_are_refused() -> None:
    delta = ROUNDING_PER_STEP * 10**6
    with pytest.raises(ArgumentError, match=r"rounding errors would decide.*larger delta, fewer steps, or the rdp"):
        epsilon_of(0.01, 1.0, 10**6, delta)
    assert epsilon_of(0.01, 3.0, most_steps(delta), delta) < math.inf


def mixture_deltas(rate: float, noise: float, epsilon: float) -> tuple[float, float]:
    """The hockey-stick divergences of one release, removing and adding a unit, by brute-force integration."""
    x = np.linspace(-14 * noise, 1 + 14 * noise, 400_001)
    absent = np.exp(-(x**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    present = np.exp(-((x - 1) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    mixed = (1 - rate) * absent + rate * present
    step = x[1] - x[0]
    removing = float(np.maximum(mixed - math.exp(epsilon) * absent, 0).sum() * step)
    adding = float(np.maximum(absent - math.exp(epsilon) * mixed, 0).sum() * step)
    return removing, adding


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 0.7), (0.1, 1.0), (0.3, 2.0), (0.9, 0.8)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_one_sampled_release_agrees_with_brute_force(rate: float, noise: float, delta: float) -> None:
    computed = epsilon_of(rate, noise, 1, delta)
    # 1 % of delta covers the brute force's own error; 0.1 % of epsilon below, delta must be crossed.
    assert max(mixture_deltas(rate, noise, computed)) <= delta * 1.01
    assert max(mixture_deltas(rate, noise, computed * 0.999 - 1e-6)) > delta * 0.99


def replaced_delta(
    rate: float, noise: float, old: tuple[float, float], new: tuple[float, float], epsilon: float
) -> float:
    """The divergence between draws that may hold ``old`` and draws that may hold ``new``, in the plane."""
    axis = np.linspace(-1 - 8 * noise, 1 + 8 * noise, 501)
    x, y = np.meshgrid(axis, axis, indexing="ij")

    def bell(centre: tuple[float, float]) -> np.ndarray:
        squared = (x - centre[0]) ** 2 + (y - centre[1]) ** 2
        return np.exp(-squared / (2 * noise**2)) / (2 * math.pi * noise**2)

    nothing = (1 - rate) * bell((0.0, 0.0))
    difference = nothing + rate * bell(old) - math.exp(epsilon) * (nothing + rate * bell(new))
    return float(np.maximum(difference, 0).sum() * (axis[1] - axis[0]) ** 2)


@pytest.mark.parametrize(("rate", "noise"), [(0.05, 0.7), (0.5, 1.5)])
def test_no_replacement_is_worse_than_the_opposite_vector(rate: float, noise: float) -> None:
    delta = 1e-3
    epsilon = epsilon_of(rate, noise, 1, delta, adjacency="replace_one")
    lengths = [(1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (1.0, 0.0), (0.0, 1.0)]
    for angle in np.pi * np.array([0.0, 0.25, 0.5, 0.75, 0.9, 1.0]):
        for first, second in lengths:
            new = (second * math.cos(angle), second * math.sin(angle))
            # 1 % of delta is the error of the plane's coarse grid.
            assert replaced_delta(rate, noise, (first, 0.0), new, epsilon) <= delta * 1.01
    assert replaced_delta(rate, noise, (1.0, 0.0), (-1.0, 0.0), epsilon * 0.99) > delta


@pytest.mark.parametrize(
    ("rate", "noise"), [(0.01, 0.1), (0.5, 0.1), (0.01, 0.442), (0.3, 1.0), (0.33, 12.0), (1e-4, 0.7)]
)
def test_divergences_by_quadrature_equal_the_binomial_sum(rate: float, noise: float) -> None:
    # At whole orders E[exp(order * loss)] is a finite sum: Mironov et al. 2019, arXiv 1908.10530, section 3.3.
    orders = np.array([2.0, 3.0, 7.0, 10.0])
    found = renyi_divergences(Event(sample_rate=rate, noise_multiplier=noise), orders)
    for order, divergence in zip(orders, found, strict=True):
        k = np.arange(int(order) + 1)
        terms = np.log(binom(order, k)) + k * math.log(rate) + (order - k) * math.log1p(-rate)
        exact = logsumexp(terms + (k * k - k) / (2 * noise**2)) / (order - 1)
        # half of what is added to each step for rounding errors
        assert divergence == pytest.approx(exact, rel=1e-14, abs=RDP_ROUNDING_PER_STEP / 2)


def test_divergences_grow_with_the_order_and_meet_the_full_batch() -> None:
    event = Event(sample_rate=0.1, noise_multiplier=1.0)
    found = renyi_divergences(event, FRACTIONAL_ORDERS)
    assert (np.diff(found) > 0).all()
    full = renyi_divergences(Event(sample_rate=1.0, noise_multiplier=2.0), FRACTIONAL_ORDERS)
    nearly_full = renyi_divergences(Event(sample_rate=NEARLY_ALL, noise_multiplier=2.0), FRACTIONAL_ORDERS)
    np.testing.assert_allclose(nearly_full, full, rtol=1e-12)


def test_rounding_errors_do_not_turn_rdp_into_a_free_lunch() -> None:
    # The divergence of one such step is below the rounding error of its own logarithm; dp-accounting alone says 0.
    charges = [(Event(sample_rate=0.5, noise_multiplier=1e8), 10**6)]
    by_rdp = guarantee(charges, delta=1e-7, accountant="rdp")
    assert by_rdp.epsilon >= guarantee(charges, delta=1e-7).epsilon > 0


def test_long_compositions_of_short_distributions_take_no_exact_power(monkeypatch: pytest.MonkeyPatch) -> None:
    # dp-accounting raises the size of a sparsely stored distribution to the power of the count, as a whole number.
    from dp_accounting.pld import pld_pmf

    def refuse(*_: object) -> None:
        raise AssertionError("composed sparsely")

    monkeypatch.setattr(pld_pmf.SparsePLDPmf, "self_compose", refuse)
    assert epsilon_of(0.1, 30.0, 1000, 1e-5) > 0


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_epsilons_beyond_any_grid_follow_the_closed_form(adjacency: Adjacency) -> None:
    shift = 1e4 * (2 if adjacency == "replace_one" else 1)
    # mu^2/2 + z mu bounds it from above; at the mean loss alone, mu^2/2, delta is about one half.
    computed = epsilon_of(1.0, 1e-4, 1, 1e-5, adjacency)
    assert shift**2 / 2 + 4 * shift < computed < shift**2 / 2 + 5 * shift
