"""Noise as it is released, at full strength (PITFALLS 23): what ``noisy_mean`` adds, not what a generator promises.

Keys are fixed, so nothing here fails by chance; each false-alarm rate is that of the test under a fresh key. The
million draws of the fast suite are ten million in the slow one.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.noise import noisy_mean
from dpvision.privacy.randomness import Keys, WordStream
from dpvision.privacy.values import ClippedSum
from dpvision.training.run_fingerprint import bound_keys

Normals = NDArray[np.float64]
KEYS = Keys.from_seed(31).bind("strength")
MECHANISM = Mechanism(num_units=600, expected_batch_size=37.0, clip_norm=0.7, noise_multiplier=1.3, steps=9)
COUNTS = [1_000_000, pytest.param(10_000_000, marks=pytest.mark.slow)]
BINS = 1000


@functools.cache
def released(count: int, step: int = 0, kernels: str = "native", name: str = "w") -> Normals:
    """The noise of one release, in standard deviations: the sum is zero, and noisy_mean does all the rest."""
    sums = ClippedSum({name: torch.zeros(count, dtype=torch.float64)}, MECHANISM.clip_norm)
    gradient = noisy_mean(sums, MECHANISM, KEYS, step=step).gradients[name].numpy()
    return gradient * MECHANISM.divisor / MECHANISM.noise_stddev


def anderson_darling(draws: Normals) -> float:
    """A² against the standard normal, wholly specified: looks at the tails where Kolmogorov–Smirnov looks away."""
    ordered = np.sort(draws)
    places = 2 * np.arange(1, len(ordered) + 1) - 1
    return -len(ordered) - float(np.mean(places * (stats.norm.logcdf(ordered) + stats.norm.logsf(ordered[::-1]))))


def is_normal(draws: Normals) -> dict[str, Any]:
    """Every check by its name. False alarms: 1e-6 each, or less."""
    count = len(draws)
    bins = np.bincount(np.minimum((stats.norm.cdf(draws) * BINS).astype(np.int64), BINS - 1), minlength=BINS)
    tails = {
        f"tail beyond {level}": stats.binomtest(
            int(np.sum(np.abs(draws) > level)), count, 2 * float(stats.norm.sf(level))
        ).pvalue
        > 1e-6
        for level in (3, 4, 5)
    }
    return {
        "variance": abs(np.mean(draws**2) - 1) < 5 * math.sqrt(2 / count),  # 0.22 % at ten million
        "mean": abs(np.mean(draws)) < 5 / math.sqrt(count),
        "chi-square": stats.chisquare(bins).pvalue > 1e-6,
        "Kolmogorov-Smirnov": stats.kstest(draws, "norm").pvalue > 1e-6,
        # Its distribution's tail falls like e^-x: 6.0 is passed by one in a thousand, 14 by less than one in a million.
        "Anderson-Darling": anderson_darling(draws) < 14,
        **tails,
    }


def failed(draws: Normals) -> set[str]:
    return {name for name, holds in is_normal(draws).items() if not holds}


@pytest.mark.parametrize("count", COUNTS)
def test_released_noise_passes_every_test_of_normality(generator: str, count: int) -> None:
    assert not failed(released(count, 0, generator))


@pytest.mark.slow
def test_variance_of_ten_million_released_values_is_within_three_permille(generator: str) -> None:
    draws = released(10_000_000, 0, generator)
    assert abs(np.mean(draws**2) - 1) < 0.003  # 6.7 standard errors: false alarm 2e-11
    assert "variance" in failed(math.sqrt(1.003) * draws)


def test_the_same_tests_reject_noise_that_is_a_little_wrong() -> None:
    draws = released(1_000_000)
    assert {"variance", "Kolmogorov-Smirnov", "Anderson-Darling"} <= failed(0.99 * draws)
    assert "mean" in failed(draws + 0.01)
    assert {"tail beyond 4", "tail beyond 5"} & failed(np.clip(draws, -3.999, 3.999))
    # Right mean and variance, wrong shape: a sum of three uniforms.
    uniforms = stats.norm.cdf(draws[:999_999]).reshape(3, -1)
    assert {"chi-square", "Anderson-Darling", "tail beyond 3"} <= failed(2 * (uniforms.sum(0) - 1.5))


def test_extreme_random_words_are_released_in_full(generator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The farthest value that can be released, by construction: nothing between generator and release cuts it."""
    count = 1 << 18  # too many for steps to share a draw

    def words(_: WordStream, asked: int) -> NDArray[np.uint64]:
        found = np.zeros(asked, dtype=np.uint64)
        found[: asked // 2] = 2**64 - 1 if asked == count else 0  # radii; then words that continue a tail are asked for
        return found

    monkeypatch.setattr(WordStream, "take", words)
    released.cache_clear()
    farthest = released(count, 0, generator)
    released.cache_clear()
    assert np.abs(farthest).max() > 13.3 > 8.5


@pytest.mark.parametrize("count", COUNTS)
def test_released_values_know_nothing_of_their_neighbours(count: int) -> None:
    draws = released(count)
    bound = 5.5 / math.sqrt(count)  # 2 × 66 tests at 4e-8: false alarm 5e-6
    lags = [*range(1, 65), 1 << 14, count // 2]
    for values in (draws, draws**2 - 1):
        scale = math.sqrt(float(np.mean(values**2)))
        lagged = [abs(float(np.mean(values[:-lag] * values[lag:]))) / scale**2 for lag in lags]
        # Fewer products at a large lag: a wider bound.
        assert all(found < bound / math.sqrt(1 - lag / count) for found, lag in zip(lagged, lags, strict=True))


def test_the_test_of_neighbours_sees_a_shared_share_of_one_percent() -> None:
    draws = released(1_000_000)
    mixed = math.sqrt(1 - 0.01**2) * draws + 0.01 * np.roll(draws, 1)
    assert abs(float(np.mean(mixed[:-1] * mixed[1:]))) > 5.5 / math.sqrt(1_000_000)


def test_noise_of_steps_parameters_and_forks_shares_nothing() -> None:
    """Equal and shifted values, correlations and correlations of squares, over everything that has a stream."""
    count = 50_000
    facts = {"run": "a", "data": "b"}
    places = [*itertools.product(range(4), ("w", "b", "w.0"), range(3))]
    sums = {name: torch.zeros(count, dtype=torch.float64) for name in ("w", "b", "w.0")}
    forks = [bound_keys(Keys.from_seed(5), facts, fork) for fork in range(3)]
    gradients = {
        (step, fork): noisy_mean(ClippedSum(sums, MECHANISM.clip_norm), MECHANISM, forks[fork], step=step).gradients
        for step in range(4)
        for fork in range(3)
    }
    draws = np.stack([gradients[step, fork][name].numpy() for step, name, fork in places])
    # On a grid of 2³⁰ steps to a deviation about 350 of 1.8 million values meet by chance; one shared stream is 50,000.
    assert len(np.unique(draws)) > draws.size - 600
    bound = 7 / math.sqrt(count)  # 630 pairs × 3 tests at 3e-12: false alarm 5e-9
    pairs = np.triu_indices(len(draws), 1)
    assert np.abs(np.corrcoef(draws)[pairs]).max() < bound
    assert np.abs(np.corrcoef(draws**2)[pairs]).max() < bound
    shifted = np.corrcoef(draws[:, :-1], draws[:, 1:])[: len(draws), len(draws) :]
    assert np.abs(shifted).max() < bound


def test_every_bit_of_the_secret_and_of_a_seed_gives_other_noise_everywhere() -> None:
    count = 500
    secret = int.from_bytes(KEYS.secret, "big")
    others = [Keys((secret ^ (1 << bit)).to_bytes(32, "big"), KEYS.context) for bit in range(256)]
    seeds = [Keys.from_seed(31 ^ (1 << bit)).bind("strength") for bit in range(128)]
    sums = {"w": torch.zeros(count, dtype=torch.float64)}
    clipped = [ClippedSum(sums, MECHANISM.clip_norm) for _ in range(1 + 256 + 128)]
    each = zip(clipped, (KEYS, *others, *seeds), strict=True)
    draws = np.stack([noisy_mean(one, MECHANISM, keys, step=0).gradients["w"].numpy() for one, keys in each])
    assert len(np.unique(draws)) > draws.size - 30  # about 4 of 192,500 meet by chance
    correlations = np.corrcoef(draws)[np.triu_indices(len(draws), 1)]
    assert np.abs(correlations).max() < 7.5 / math.sqrt(count)  # 73,920 pairs at 6e-14: false alarm 5e-9


@pytest.mark.slow
def test_the_counts_of_far_tails_over_two_hundred_million_released_values() -> None:
    levels, total = (3.0, 4.0, 5.0, 5.768), 0
    counts = dict.fromkeys(levels, 0)
    for step in range(50):
        draws = np.abs(released.__wrapped__(4_000_000, step))
        total += len(draws)
        for level in levels:
            counts[level] += int(np.sum(draws > level))
    for level, count in counts.items():
        assert stats.binomtest(count, total, 2 * float(stats.norm.sf(level))).pvalue > 1e-6, (level, count)
