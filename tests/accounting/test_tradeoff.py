"""The whole curve: Gaussian-DP and bounds on attacks are proved, not approximated (PITFALLS 19, 24)."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from dpvision.accounting import Charges, Profile, gaussian_dp, guarantee, privacy_profile, true_positive_bound
from dpvision.accounting.pld import gaussian_deltas
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Event

NORMAL = NormalDist()
FLOOR = 1e-8


def charges(rate: float, noise: float, steps: int) -> Charges:
    return [(Event(sample_rate=rate, noise_multiplier=noise), steps)]


SETTINGS = [charges(0.1, 2.997, 400), charges(0.05, 0.9, 60), charges(0.3, 8.0, 50)]


def gaussian_power(mu: float, false_positive_rate: float) -> float:
    """The best attack's true positives on one Gaussian release of shift mu: a closed form."""
    return NORMAL.cdf(NORMAL.inv_cdf(false_positive_rate) + mu)


def test_the_profile_agrees_with_epsilon_and_never_lies_below_it() -> None:
    profile = privacy_profile(SETTINGS[0], delta=FLOOR)
    assert np.all(np.diff(profile.epsilons) > 0)
    assert np.all(np.diff(profile.deltas) <= 0)
    for delta in (1e-3, 1e-5, 1e-7):
        epsilon = guarantee(SETTINGS[0], delta=delta).epsilon
        at = int(np.searchsorted(profile.epsilons, epsilon))
        assert profile.deltas[at] <= delta * (1 + 1e-3)
        assert profile.deltas[at - 1] >= delta * (1 - 1e-3)


def test_the_deltas_of_a_gaussian_are_exact() -> None:
    for mu in (0.01, 0.3, 1.0, 5.0):
        epsilons = np.array([0.0, 0.1, 1.0, 3.0])
        plain = [NORMAL.cdf(mu / 2 - e / mu) - math.exp(e) * NORMAL.cdf(-mu / 2 - e / mu) for e in epsilons]
        np.testing.assert_allclose(gaussian_deltas(mu, epsilons), plain, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("noise", [0.5, 2.0, 20.0])
def test_mu_of_a_gaussian_release_is_its_shift(noise: float) -> None:
    found = gaussian_dp(privacy_profile(charges(1.0, noise, 1), delta=FLOOR))
    assert found.mu == pytest.approx(1 / noise, rel=1e-6)
    assert found.mu <= 1 / noise * (1 + 1e-9)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_mu_is_a_bound_at_every_epsilon_of_its_range_and_no_smaller_one_is(setting: Charges) -> None:
    profile = privacy_profile(setting, delta=FLOOR)
    found = gaussian_dp(profile)
    between = np.sort(np.random.default_rng(1).uniform(0, found.epsilon_up_to, 5))
    for epsilon in between:  # by another way than the profile: through epsilon at that delta
        delta = float(gaussian_deltas(found.mu, np.array([epsilon]))[0])
        assert guarantee(setting, delta=min(delta, 0.999)).epsilon <= epsilon * (1 + 1e-9) + 1e-12
    smaller = gaussian_deltas(0.99 * found.mu, profile.epsilons)
    assert np.any(smaller < profile.deltas)
    assert found.mu <= profile.most_mu


def test_mu_from_few_points_is_larger_because_it_must_hold_between_them() -> None:
    fine = privacy_profile(SETTINGS[0], delta=FLOOR)
    coarse = Profile(fine.epsilons[::200], fine.deltas[::200], fine.most_mu)
    assert gaussian_dp(coarse).mu > 1.01 * gaussian_dp(fine).mu


def test_the_approximation_of_the_central_limit_theorem_would_claim_less() -> None:
    ((event, steps),) = SETTINGS[0]
    approximation = event.sample_rate * math.sqrt(steps * math.expm1(1 / event.noise_multiplier**2))
    assert gaussian_dp(privacy_profile(SETTINGS[0], delta=FLOOR)).mu > 1.02 * approximation


def test_nothing_done_leaves_nothing_to_an_attacker() -> None:
    profile = privacy_profile([], delta=FLOOR)
    assert gaussian_dp(profile).mu == 0
    assert true_positive_bound(profile, false_positive_rate=0.01) == 0.01


def test_an_absurdly_small_noise_is_answered_without_a_grid() -> None:
    found = gaussian_dp(privacy_profile(charges(0.01, 1e-3, 10), delta=FLOOR))
    assert found.mu == pytest.approx(math.sqrt(10) * 1e3)


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1])
def test_the_bound_on_attacks_is_met_by_the_best_attack_on_a_gaussian_and_by_little_more(rate: float) -> None:
    profile = privacy_profile(charges(1.0, 1.5, 1), delta=FLOOR)
    best = gaussian_power(1 / 1.5, rate)
    assert best <= true_positive_bound(profile, false_positive_rate=rate) <= best * 1.002


def test_the_bound_on_attacks_never_exceeds_that_of_mu_or_of_one_pair() -> None:
    profile = privacy_profile(SETTINGS[0], delta=FLOOR)
    mu = gaussian_dp(profile).mu
    epsilon = guarantee(SETTINGS[0], delta=1e-5).epsilon
    for rate in (0.001, 0.01, 0.1, 0.5):
        bound = true_positive_bound(profile, false_positive_rate=rate)
        assert rate <= bound <= gaussian_power(mu, rate) * 1.001
        assert bound <= math.exp(epsilon) * rate + 1e-5
    assert true_positive_bound(profile, false_positive_rate=1.0) == 1.0


def test_replacement_costs_more_than_removal() -> None:
    removal = gaussian_dp(privacy_profile(SETTINGS[2], delta=FLOOR)).mu
    replacement = gaussian_dp(privacy_profile(SETTINGS[2], delta=FLOOR, adjacency="replace_one")).mu
    assert 1.5 * removal < replacement <= 2.1 * removal


def test_a_rate_of_false_positives_outside_of_zero_and_one_is_refused() -> None:
    profile = privacy_profile([], delta=FLOOR)
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(ArgumentError, match="false_positive_rate"):
            true_positive_bound(profile, false_positive_rate=rate)
