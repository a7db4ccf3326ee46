"""The sampler: independent Bernoulli draws of units at the mechanism's rate, however many units there are."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, binomtest

from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import (
    PoissonSampler,
    Sampling,
    bernoulli,
    choose_without_replacement,
    draw_holdout,
    mismatch_note,
)

Inclusion = NDArray[np.bool_]
FALSE_ALARM = 1e-6
KEYS = Keys.from_seed(2, "test of draws")
MECHANISM = Mechanism(num_units=100, expected_batch_size=10, clip_norm=1.0, noise_multiplier=1.0, steps=10)


def sampler(rate: float, num_units: int = 1000, keys: Keys = KEYS) -> PoissonSampler:
    return PoissonSampler(num_units=num_units, sample_rate=rate, keys=keys)


def middle_share_p_value(counts: NDArray[np.int64], n: int, q: float) -> float:
    """Are these counts independent Binomial(n, q)? A randomised probability transform makes them exactly uniform, so
    that the number that falls into the middle half is exactly Binomial(len, 1/2): too many if the counts hardly vary,
    too few if they vary too much."""
    uniform = np.random.default_rng(5).random(len(counts))
    position = binom.cdf(counts - 1, n, q) + uniform * binom.pmf(counts, n, q)
    middle = int((np.abs(position - 0.5) < 0.25).sum())
    return float(binomtest(middle, len(counts), 0.5).pvalue)


def poisson_p_value(inclusion: Inclusion, q: float) -> float:
    """The p-value (Bonferroni over five exact tests) of: all entries (step, unit) are independent Bernoulli(q)."""
    steps, units = inclusion.shape
    later = inclusion[0 : steps // 2 * 2 : 2] & inclusion[1::2]
    beside = inclusion[:, 0 : units // 2 * 2 : 2] & inclusion[:, 1::2]
    p_values = [
        binomtest(int(inclusion.sum()), inclusion.size, q).pvalue,
        binomtest(int(later.sum()), later.size, q * q).pvalue,
        binomtest(int(beside.sum()), beside.size, q * q).pvalue,
        middle_share_p_value(inclusion.sum(axis=1), units, q),
        middle_share_p_value(inclusion.sum(axis=0), steps, q),
    ]
    return min(1.0, len(p_values) * min(float(p) for p in p_values))


@pytest.mark.parametrize("rate", [0, -0.1, 1.5, float("nan"), float("inf"), None, "0.5"])
def test_a_rate_that_is_no_probability_is_refused(rate: Any) -> None:
    with pytest.raises(ArgumentError, match="sample_rate must"):
        sampler(rate)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None])
def test_a_step_that_is_no_number_of_a_step_has_no_draw(step: Any) -> None:
    with pytest.raises(ArgumentError, match="step must be a whole number"):
        sampler(0.5).units(step)


def inclusion_of(draws: PoissonSampler, steps: int) -> Inclusion:
    inclusion = np.zeros((steps, draws.num_units), dtype=np.bool_)
    for step in range(steps):
        inclusion[step, draws.units(step)] = True
    return inclusion


def test_inclusions_are_independent_bernoulli_draws_at_the_mechanism_rate() -> None:
    # False-alarm rate 1e-6; with 640,000 entries a rate that is 2 % off is eight standard errors away.
    assert poisson_p_value(inclusion_of(sampler(0.2), 640), 0.2) > FALSE_ALARM


def test_a_rate_two_percent_too_high_is_rejected_by_the_same_test() -> None:
    assert poisson_p_value(inclusion_of(sampler(0.204), 640), 0.2) < FALSE_ALARM


def test_fixed_size_batches_are_rejected_by_the_same_test() -> None:
    rng = np.random.default_rng(1)
    inclusion = np.zeros((640, 1000), dtype=np.bool_)
    for row in inclusion:
        row[rng.choice(1000, 200, replace=False)] = True
    assert poisson_p_value(inclusion, 0.2) < FALSE_ALARM


def test_shuffled_epochs_are_rejected_by_the_same_test() -> None:
    rng = np.random.default_rng(1)
    inclusion = np.zeros((640, 1000), dtype=np.bool_)
    for epoch in range(128):
        for part, units in enumerate(np.split(rng.permutation(1000), 5)):
            inclusion[5 * epoch + part, units] = True
    assert poisson_p_value(inclusion, 0.2) < FALSE_ALARM


def test_draws_that_repeat_every_second_step_are_rejected_by_the_same_test() -> None:
    inclusion = inclusion_of(sampler(0.2), 640)
    inclusion[1::2] = inclusion[::2]
    assert poisson_p_value(inclusion, 0.2) < FALSE_ALARM


def test_the_threshold_is_exact_at_its_edges() -> None:
    words = np.array([0, 2**62 - 1, 2**62, 2**64 - 1], dtype=np.uint64)
    assert bernoulli(words, 0.25).tolist() == [True, True, False, False]
    assert bernoulli(words, 1.0).all()
    assert bernoulli(words, 2.0**-64).tolist() == [True, False, False, False]
    assert not bernoulli(words, 2.0**-65).any()
    assert bernoulli(words, 1 - 2.0**-53).tolist() == [True, True, True, False]


def test_an_added_unit_changes_no_other_units_draw() -> None:
    small, large = sampler(0.3, 50), sampler(0.3, 51)
    for step in range(40):
        assert small.units(step).tolist() == [unit for unit in large.units(step).tolist() if unit < 50]


def test_draws_repeat_and_differ_between_steps_and_keys() -> None:
    draws = sampler(0.5)
    assert draws.units(3).tolist() == sampler(0.5).units(3).tolist()
    assert draws.units(3).tolist() != draws.units(4).tolist()
    assert draws.units(3).tolist() != sampler(0.5, keys=Keys.from_seed(2, "another run")).units(3).tolist()
    assert draws.sampling == Sampling("poisson", 0.5)


def test_each_unit_is_held_out_by_its_own_name_alone() -> None:
    names = [f"unit {number}" for number in range(400)]
    held = draw_holdout(names, fraction=0.25, keys=KEYS)
    assert draw_holdout(names[::-1], fraction=0.25, keys=KEYS).tolist() == held[::-1].tolist()
    assert binomtest(int(held.sum()), 400, 0.25).pvalue > FALSE_ALARM
    with pytest.raises(ArgumentError, match="fraction must lie strictly between 0 and 1"):
        draw_holdout(names, fraction=1.0, keys=KEYS)


def test_choosing_without_replacement_is_uniform_over_sets_of_unequal_units() -> None:
    # Exact for all words that matter: the remainders of every pick, enumerated. 3 of 5: picks below 3, 4 and 5.
    words = np.array(list(itertools.product(range(3), range(4), range(5))), dtype=np.uint64)
    chosen = choose_without_replacement(words, np.full(len(words), 5))
    counts = Counter(tuple(sorted(row)) for row in chosen.tolist())
    assert set(counts) == set(itertools.combinations(range(5), 3))
    assert set(counts.values()) == {6}


def test_a_large_mismatch_is_a_note_and_not_an_error() -> None:
    assert mismatch_note(100, MECHANISM) is None
    assert mismatch_note(101, MECHANISM) is None
    note = mismatch_note(250, MECHANISM)
    assert note is not None
    assert "is declared as 100" in note
    assert "holds 250 units" in note
    assert "counted" not in note


def test_a_number_that_was_counted_is_not_called_declared() -> None:
    assert mismatch_note(100, MECHANISM, counted=True) is None
    note = mismatch_note(250, MECHANISM, counted=True)
    assert note is not None
    assert "was counted with noise as 100" in note
    assert "is declared" not in note
