"""The statistics of an audit: bounds, estimates and attack figures, against published and exact values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dpvision.accounting import guarantee
from dpvision.audit.bounds import (
    attack_metrics,
    epsilon_lower_bound,
    gaussian_epsilon,
    gaussian_estimate,
    likelihood_ratio,
    metrics_by_class,
    one_run_bound,
    p_value,
)
from dpvision.audit.mechanism_check import DRAWS_FOR_ONE_PERCENT, _independence_checks, _scale_checks
from dpvision.errors import ArgumentError, DataError
from dpvision.privacy.mechanism import Event


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "published"),
    [
        (1000, 100, 75, 1e-4, 0.673),  # arXiv:2305.08846v1, appendix D
        (100_000, 1510, 1439, 1e-5, 2.675),  # the same, section 7, printed without rounding up
    ],
)
def test_the_bound_is_the_published_one(
    canaries: int, guesses: int, right: int, delta: float, published: float
) -> None:
    bound = epsilon_lower_bound(canaries=canaries, guesses=guesses, right=right, delta=delta, confidence=0.95)
    assert bound == pytest.approx(published, abs=1e-3)


def test_the_bound_itself_is_refuted_and_a_little_more_is_not() -> None:
    known = {"canaries": 500, "guesses": 200, "right": 160, "delta": 1e-5}
    bound = epsilon_lower_bound(**known, confidence=0.95)
    assert p_value(**known, epsilon=bound) < 0.05 <= p_value(**known, epsilon=bound + 1e-5)


def test_guesses_at_random_refute_nothing() -> None:
    assert epsilon_lower_bound(canaries=100, guesses=100, right=55, delta=0.0, confidence=0.95) == 0
    assert epsilon_lower_bound(canaries=100, guesses=0, right=0, delta=0.0, confidence=0.95) == 0


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_is_rarely_refuted_at_its_own_epsilon(epsilon: float) -> None:
    # Nothing that is epsilon-private tells more. A bound above epsilon has a chance of at most 5 % each time, so that
    # more than 12 in 60 have one below 1e-4.
    generator = np.random.default_rng(1)
    truth, wrong = 1 / (1 + math.exp(-epsilon)), 0
    for _ in range(60):
        included = generator.random(300) < 0.5
        kept = generator.random(300) < truth
        scores = np.where(included == kept, 1.0, -1.0) + 1e-3 * generator.random(300)
        wrong += one_run_bound(scores, included, delta=0.0).epsilon_lower > epsilon
    assert wrong <= 12


def test_the_largest_refutable_epsilon_is_that_of_guesses_that_are_all_right() -> None:
    included = np.arange(400) % 2 == 0
    perfect = one_run_bound(included.astype(float), included, delta=1e-6)
    assert perfect.right == perfect.guesses
    assert perfect.epsilon_lower == perfect.largest_refutable
    blind = one_run_bound(np.random.default_rng(0).normal(size=400), included, delta=1e-6)
    assert blind.largest_refutable == perfect.largest_refutable
    assert blind.epsilon_lower < 1


def test_trying_several_numbers_of_guesses_costs_confidence() -> None:
    included = np.arange(400) % 2 == 0
    tried = one_run_bound(included.astype(float), included, delta=0.0)
    alone = epsilon_lower_bound(canaries=400, guesses=400, right=400, delta=0.0, confidence=0.95)
    assert tried.epsilon_lower < alone - 0.1


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ArgumentError, match="right <= guesses"):
        epsilon_lower_bound(canaries=10, guesses=5, right=6, delta=0.0, confidence=0.95)
    with pytest.raises(ArgumentError, match="confidence"):
        epsilon_lower_bound(canaries=10, guesses=5, right=5, delta=0.0, confidence=1.0)


@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_gaussian_epsilon_is_that_of_a_gaussian_release(mu: float) -> None:
    proved = guarantee([(Event(sample_rate=1.0, noise_multiplier=1 / mu), 1)], delta=1e-5).epsilon
    assert gaussian_epsilon(mu, delta=1e-5) == pytest.approx(proved, rel=2e-3)  # the accountant rounds up


def test_a_tiny_mu_costs_nothing_and_none_costs_nothing() -> None:
    assert gaussian_epsilon(0.0, delta=1e-5) == gaussian_epsilon(1e-7, delta=1e-5) == 0.0


def test_the_estimate_finds_mu_and_its_limit_lies_below() -> None:
    generator = np.random.default_rng(2)
    included = generator.random(2000) < 0.5
    found = gaussian_estimate(generator.normal(size=2000) * 7 + 7 * 1.3 * included, included, delta=1e-5)
    assert found.mu == pytest.approx(1.3, abs=0.2)
    assert found.mu_lower == pytest.approx(found.mu - 3.09 * math.sqrt(4 / 2000 + 1.3**2 / 4000), abs=0.01)
    assert found.epsilon_lower < found.epsilon


def test_scores_without_any_spread_are_infinitely_telling_and_equal_ones_not_at_all() -> None:
    included = np.arange(40) % 2 == 0
    assert gaussian_estimate(included.astype(float), included, delta=1e-5).epsilon_lower == math.inf
    assert gaussian_estimate(np.zeros(40), included, delta=1e-5).epsilon == 0


def test_few_canaries_on_one_side_are_refused() -> None:
    with pytest.raises(ArgumentError, match="more canaries"):
        gaussian_estimate(np.zeros(30), np.arange(30) < 25, delta=1e-5)


def test_noise_that_is_one_per_cent_wrong_is_found_and_right_noise_is_not() -> None:
    noise = np.random.default_rng(3).normal(size=(400, DRAWS_FOR_ONE_PERCENT // 400))
    assert [check.passed for check in _scale_checks({"w": noise})] == [True, True]
    for factor in (0.99, 1.01):
        scale, _ = _scale_checks({"w": noise * factor})
        assert not scale.passed, factor


def test_noise_that_is_missing_in_one_small_parameter_is_found() -> None:
    generator = np.random.default_rng(4)
    noise = {"weight": generator.normal(size=(100, 4000)), "bias": generator.normal(size=(100, 4))}
    noise["bias"][:] = 0
    scale, _ = _scale_checks(noise)
    assert not scale.passed
    assert "bias" in scale.finding


@pytest.mark.parametrize("broken", ["steps", "parameters", "coordinates", None])
def test_noise_that_is_used_twice_is_found(broken: str | None) -> None:
    generator = np.random.default_rng(5)
    noise = {"a": generator.normal(size=(30, 400)), "b": generator.normal(size=(30, 400))}
    if broken == "steps":
        noise = {name: np.concatenate([z[:-1], z[:1]]) for name, z in noise.items()}
    elif broken == "parameters":
        noise["b"] = noise["a"].copy()
    elif broken == "coordinates":
        noise["a"] = np.repeat(noise["a"][:, :200], 2, axis=1)
    failed = [check.name for check in _independence_checks(noise) if not check.passed]
    assert failed == ([] if broken is None else [f"independence of {broken}"])


def test_the_area_counts_ties_half_and_its_interval_holds_it() -> None:
    found = attack_metrics(np.array([3.0, 2.0, 1.0]), np.array([2.0, 0.0]))
    assert found.area == pytest.approx((1 + 1 + 0.5 + 1 + 0 + 1) / 6)
    generator = np.random.default_rng(6)
    wide = attack_metrics(generator.normal(1.0, 1, 4000), generator.normal(0, 1, 4000))
    assert wide.area_low < 0.7602 < wide.area_high  # Phi(1/sqrt 2)
    assert wide.area_high - wide.area_low < 0.03


def test_true_positives_are_counted_where_few_others_are_accused() -> None:
    others, members = np.arange(1000.0), np.arange(1000.0) + 100.5
    by_rate = {at.false_positive_rate: at for at in attack_metrics(members, others).at_rates}
    # At 1 % ten of the others may be accused: the threshold is 989, and members from 989.5 on are above it.
    assert by_rate[0.01].true_positive_rate == pytest.approx(0.111)
    assert by_rate[0.1].true_positive_rate == pytest.approx(0.201)
    assert by_rate[0.01].low < 0.111 < by_rate[0.01].high
    assert attack_metrics(others, others).at_rates[0].true_positive_rate <= 0.001


def test_the_curve_rises_from_nobody_to_everybody() -> None:
    generator = np.random.default_rng(7)
    roc = attack_metrics(generator.normal(size=500), generator.normal(size=700)).roc
    assert roc[0] == (0.0, 0.0)
    assert roc[-1] == (1.0, 1.0)
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(roc))


def test_classes_are_attacked_one_by_one() -> None:
    members = np.array([5.0, 6.0, 0.0, 1.0]), np.array([0, 0, 1, 1])
    others = np.array([1.0, 2.0, 0.5, 7.0]), np.array([0, 0, 1, 2])
    found = metrics_by_class(members, others, ("cat", "dog", "owl"))
    assert found["cat"] is not None
    assert found["cat"].area == 1.0
    assert found["dog"] is None
    assert found["owl"] is None


def test_one_picture_on_a_side_is_too_few() -> None:
    with pytest.raises(DataError, match="at least 2"):
        attack_metrics(np.array([1.0]), np.array([1.0, 2.0]))


def test_the_likelihood_ratio_uses_what_each_picture_does_to_shadows() -> None:
    # Two pictures: being in a model lifts the first one's confidence from 10 to 12, the second one's from 0 to 2.
    generator = np.random.default_rng(8)
    included = np.array([[True, False], [False, True]] * 20)
    confidences = np.array([10.0, 0.0]) + 2 * included + 0.3 * generator.normal(size=included.shape)
    first_in = likelihood_ratio(np.array([12.0, 0.0]), confidences, included)
    assert first_in[0] > 5
    assert first_in[1] < -5
