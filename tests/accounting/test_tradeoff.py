"""The whole curve: Gaussian-DP and bounds on attacks are proved, not approximated (PITFALLS 19, 24)."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpvision.accounting import (
    AttackRisk,
    Charges,
    Profile,
    advantage_bound,
    balanced_accuracy_bound,
    cautions,
    describe,
    full_profile,
    gaussian_dp,
    guarantee,
    privacy_profile,
    propose_delta,
    true_positive_bound,
)
from dpvision.accounting.pld import gaussian_deltas
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Adjacency, Event, Guarantee

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


def pair_bound(epsilon: float, delta: float, rate: float) -> float:
    return true_positive_bound(Profile.from_pairs([(epsilon, delta)]), false_positive_rate=rate)


def test_the_bound_of_a_single_pair_has_its_known_values() -> None:
    assert pair_bound(0.0, 1e-5, 0.01) == pytest.approx(0.01001)
    assert pair_bound(1.0, 1e-5, 0.01) == pytest.approx(math.e / 100 + 1e-5)
    # The other inequality: few false negatives are as hard to reach as few false positives.
    assert pair_bound(3.0, 1e-5, 0.5) == pytest.approx(1 - math.exp(-3) * (1 - 1e-5 - 0.5))
    assert pair_bound(1e9, 1e-5, 0.01) == 1.0
    assert pair_bound(3.0, 1e-5, 0.0) == 1e-5
    assert true_positive_bound(Profile.from_pairs([]), false_positive_rate=0.01) == 1.0


def test_the_bound_of_a_single_pair_covers_the_best_attack_on_a_gaussian() -> None:
    epsilon = guarantee(charges(1.0, 1.0, 1), delta=1e-3).epsilon
    for rate in (1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9):
        assert pair_bound(epsilon, 1e-3, rate) >= gaussian_power(1.0, rate)


@pytest.mark.parametrize("shift", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("rate", [1e-4, 1e-3, 0.01, 0.1, 0.5])
def test_exact_pairs_of_a_gaussian_bound_its_best_attack_closely(shift: float, rate: float) -> None:
    epsilons = np.arange(0.05, 15, 0.05)
    deltas = gaussian_deltas(shift, epsilons)
    pairs = Profile(epsilons[deltas > 1e-14], deltas[deltas > 1e-14])
    bound, power = true_positive_bound(pairs, false_positive_rate=rate), gaussian_power(shift, rate)
    assert power <= bound + 1e-12  # rounding of the two computations
    assert bound <= 1.05 * power + 1e-3  # the grid of epsilons is 0.05 wide


def test_the_accuracy_bound_is_the_total_variation_of_the_gaussian_mechanism() -> None:
    pairs = Profile.from_pairs([(1e-9, float(gaussian_deltas(1.0, np.array([1e-9]))[0]))])
    assert balanced_accuracy_bound(pairs) == pytest.approx(NORMAL.cdf(0.5), abs=1e-6)


@given(st.floats(min_value=0, max_value=1000), st.floats(min_value=1e-12, max_value=0.999), st.floats(0, 1))
def test_bounds_on_attacks_are_never_below_guessing(epsilon: float, delta: float, rate: float) -> None:
    assert rate <= pair_bound(epsilon, delta, rate) + 1e-12
    assert pair_bound(epsilon, delta, rate) <= 1
    assert 0.5 <= balanced_accuracy_bound(Profile.from_pairs([(epsilon, delta)])) <= 1


def test_more_proved_pairs_never_loosen_the_bound() -> None:
    two = Profile.from_pairs([(3.0, 1e-5), (1.5, 1e-2)])
    for rate in (1e-4, 1e-3, 0.01, 0.1, 0.9):
        assert true_positive_bound(two, false_positive_rate=rate) <= pair_bound(3.0, 1e-5, rate)


def test_the_full_profile_ends_at_the_smallest_delta_that_can_be_proved() -> None:
    short = full_profile(SETTINGS[0], delta=1e-5)
    assert short.epsilons[-1] == guarantee(SETTINGS[0], delta=1e-8).epsilon


@pytest.mark.slow
def test_the_full_profile_of_very_many_steps_ends_where_rounding_errors_do() -> None:
    many = charges(0.001, 20.0, 10**7)  # so many steps leave rounding errors above 1e-8
    assert full_profile(many, delta=1e-5).epsilons[-1] == guarantee(many, delta=1e-7).epsilon
    with pytest.raises(ArgumentError, match="delta must be >"):
        full_profile(many, delta=1e-10)


def test_certificate_report_audit_and_command_line_state_the_same_bound() -> None:
    import json

    from typer.testing import CliRunner

    from dpvision.cli import app
    from dpvision.release.build import bounds_of, proved_profile
    from dpvision.release.schema import Certificate
    from tests.support.report_fixtures import certificate

    setting = "epsilon --num-units 60000 --expected-batch-size 6000 --noise-multiplier 2.997 --steps 400 --delta 1e-5"
    shown = json.loads(CliRunner().invoke(app, [*setting.split(), "--json"]).stdout)
    spent = bounds_of(tuple(SETTINGS[0]), delta=1e-5, adjacency="add_remove")
    made = certificate(epsilon=spent.epsilon)
    reported = true_positive_bound(proved_profile(Certificate.model_validate(made)), false_positive_rate=0.01)
    bounds = {bound.false_positive_rate: bound.true_positive_rate for bound in spent.attack_success}
    assert bounds[0.01] == reported == shown["true_positive_rate_at_0.01"]
    assert reported == pytest.approx(0.0510, abs=5e-5)
    assert "finds at most 5.11 in 100 members" in shown["meaning"]


def a_guarantee(epsilon: float, delta: float = 1e-5, adjacency: Adjacency = "add_remove") -> Guarantee:
    return Guarantee(epsilon=epsilon, delta=delta, adjacency=adjacency, accountant="pld", privacy_unit="patient")


@pytest.mark.parametrize(
    ("num_units", "delta"),
    [(1, 0.1), (10, 1e-2), (1797, 1e-4), (9469, 1e-5), (50_000, 1e-5), (60_000, 1e-5), (90_000, 1e-6), (10**6, 1e-7)],
)
def test_the_proposed_delta_is_a_power_of_ten_clearly_below_one_over_units(num_units: int, delta: float) -> None:
    assert propose_delta(num_units) == delta
    assert propose_delta(num_units) <= 2 / 3 / num_units


@pytest.mark.parametrize("num_units", [0, -5, 2.5, True])
def test_no_delta_is_proposed_for_nonsense(num_units: Any) -> None:
    with pytest.raises(ArgumentError, match="num_units"):
        propose_delta(num_units)


@pytest.mark.parametrize(
    ("adjacency", "words"),
    [
        ("add_remove", "Adding or removing one patient"),
        ("zero_out", "Blanking out one patient"),
        ("replace_one", "Replacing one patient by another"),
    ],
)
def test_a_guarantee_is_told_in_plain_words(adjacency: Adjacency, words: str) -> None:
    text = describe(a_guarantee(3.0, adjacency=adjacency))
    assert words in text
    assert "any outcome at most 20.1 times as likely, plus 1e-05" in text
    assert "finds at most 20.1 in 100 members" in text
    assert "moderate" in text


def test_words_follow_epsilon() -> None:
    assert "strong" in describe(a_guarantee(0.5))
    assert "weak" in describe(a_guarantee(15.0))
    assert "practically no guarantee" in describe(a_guarantee(1e6))


def test_delta_at_or_above_one_over_units_is_warned_of() -> None:
    (warning,) = cautions(a_guarantee(3.0, delta=1e-4), num_units=10_000)
    assert "not below 1/num_units" in warning
    assert "Use 1e-05 or less" in warning
    assert cautions(a_guarantee(3.0, delta=1e-4), num_units=9_999) == ()


def test_meaninglessly_large_epsilons_are_warned_of() -> None:
    assert cautions(a_guarantee(10.0), num_units=100) == ()
    assert "weak promise" in cautions(a_guarantee(12.0), num_units=100)[0]
    assert "next to nothing" in cautions(a_guarantee(50.0), num_units=100)[0]
    assert len(cautions(a_guarantee(50.0), num_units=10**6)) == 2


@pytest.mark.parametrize("rate", [1 / 6000, 1.0])
def test_a_profile_beyond_every_exponential_is_still_a_bound(rate: float) -> None:
    """Hardly any noise: epsilons in the thousands, whose e^epsilon overflows. No value may be NaN, or too small."""
    profile = full_profile([(Event(sample_rate=rate, noise_multiplier=0.01), 1)], delta=0.01)
    assert profile.epsilons[-1] > 1000
    assert np.all(np.diff(profile.deltas) <= 0)
    assert np.all((profile.deltas > 0) & (profile.deltas <= 1))
    # A unit that is drawn at all is seen: its rate bounds delta from below, far out.
    middle = int(np.searchsorted(profile.epsilons, 2000.0))
    assert profile.deltas[middle] >= rate * (1 - 1e-6)
    for false_positives in (0.0, 0.01):
        assert true_positive_bound(profile, false_positive_rate=false_positives) >= rate * (1 - 1e-6)
    assert gaussian_dp(profile).mu <= profile.most_mu


def gaussian_advantage(mu: float) -> float:
    """The best advantage of an attack on one Gaussian release of shift mu: a closed form."""
    return 2 * NORMAL.cdf(mu / 2) - 1


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 2.5])
def test_the_bound_on_the_advantage_is_that_of_a_gaussian_and_never_below(mu: float) -> None:
    bound = advantage_bound(full_profile(charges(1.0, 1 / mu, 1), delta=1e-5))
    exact = gaussian_advantage(mu)  # itself rounded, hence 1e-12
    assert exact * (1 - 1e-12) <= bound <= exact * (1 + 1e-4)


def test_the_advantage_is_twice_the_balanced_accuracy_minus_one() -> None:
    for setting in SETTINGS:
        profile = full_profile(setting, delta=1e-5)
        assert advantage_bound(profile) == pytest.approx(2 * balanced_accuracy_bound(profile) - 1, abs=1e-12)
        assert advantage_bound(profile) == pytest.approx(profile.deltas[0], rel=1e-12)
    assert advantage_bound(Profile.from_pairs([])) == 1.0


@pytest.mark.parametrize("text", ["tpr:0.05@0.01", "advantage:0.1", "tpr:0.001@1e-05"])
def test_a_limit_on_attacks_is_read_as_it_is_written(text: str) -> None:
    assert str(AttackRisk.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "0.05", "tpr:0.05", "advantage:0.1@0.2", "auc:0.6", "tpr:0.05@0.01@0.2", "tpr:x@0.1", "tpr:0.01@0.01"),
        *("tpr:0.005@0.01", "tpr:1@0.01", "advantage:0", "advantage:1", "advantage:nan", "tpr:nan@0.1", "tpr:0.1@nan"),
        *("tpr:0.1@0", "tpr:0.1@-1"),
    ],
)
def test_a_limit_that_guessing_reaches_or_that_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="target_risk"):
        AttackRisk.parse(text)


@pytest.mark.parametrize("risk", [AttackRisk(0.05, 0.01), AttackRisk(0.4, 0.1), AttackRisk(0.1), AttackRisk(0.6)])
def test_the_gaussian_of_a_limit_reaches_it_exactly(risk: AttackRisk) -> None:
    mu, rate = risk.gaussian_shift, risk.false_positive_rate
    reached = gaussian_advantage(mu) if rate is None else gaussian_power(mu, rate)
    assert reached == pytest.approx(risk.limit, rel=1e-9)
    epsilon = risk.gaussian_epsilon(delta=1e-5)
    assert float(gaussian_deltas(mu, np.array([epsilon]))[0]) == pytest.approx(1e-5, rel=1e-6)
    # At its telling rate a test with this advantage finds exactly rate + limit.
    if rate is None:
        assert gaussian_power(mu, risk.telling_rate) == pytest.approx((1 + risk.limit) / 2, rel=1e-9)
