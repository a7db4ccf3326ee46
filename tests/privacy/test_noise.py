"""The generator: full tails, the right shape, and a stream for each key.

Keys are fixed, so nothing here fails by chance; each false-alarm rate is that of the test under a fresh key.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dpvision.errors import ArgumentError
from dpvision.privacy import noise
from dpvision.privacy.noise import standard_normals
from dpvision.privacy.randomness import Keys, WordStream, random_words

Normals = NDArray[np.float64]
KEYS = Keys.from_seed(20)
KEY = KEYS.derive("noise", 0, "w")
LARGEST_WORD = np.uint64(2**64 - 1)
TORCH_CPU_REACH = 5.768  # PITFALLS 23: √(−2·log(2⁻²⁴)), and 6·10⁹ draws of torch.randn without one beyond


@functools.cache
def two_million(generator: str) -> Normals:
    return standard_normals(KEY, 2_000_000)


@pytest.fixture
def normals(generator: str) -> Normals:
    return two_million(generator)


# ---- the distribution


def variance_is_one(draws: Normals) -> bool:
    # The variance of 2·10⁶ squared normals' mean is 2/n: 0.5 % is 5 standard errors, false alarm 6e-7.
    return abs(np.mean(draws**2) - 1) < 5 * math.sqrt(2 / len(draws))


def tails_are_full(draws: Normals) -> bool:
    # Exact binomial tests at 3 levels, two-sided, 3e-7 each.
    return all(
        stats.binomtest(int(np.sum(np.abs(draws) > level)), len(draws), 2 * stats.norm.sf(level)).pvalue > 3e-7
        for level in (3, 4, 5)
    )


def shape_is_normal(draws: Normals) -> bool:
    return stats.kstest(draws, "norm").pvalue > 1e-6  # false alarm 1e-6


CHECKS: list[Callable[[Normals], bool]] = [variance_is_one, tails_are_full, shape_is_normal]


@pytest.mark.parametrize("check", CHECKS)
def test_draws_have_the_variance_tails_and_shape_of_a_normal(
    check: Callable[[Normals], bool], normals: Normals
) -> None:
    assert check(normals)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_the_same_checks_reject_noise_that_is_one_percent_wrong(factor: float, normals: Normals) -> None:
    assert not variance_is_one(factor * normals)
    assert not shape_is_normal(factor * normals)


def test_the_variance_check_rejects_even_a_variance_that_is_one_percent_wrong(normals: Normals) -> None:
    assert not variance_is_one(math.sqrt(0.99) * normals)
    assert not variance_is_one(math.sqrt(1.01) * normals)


def test_the_tail_check_rejects_cut_tails(normals: Normals) -> None:
    assert not tails_are_full(np.clip(normals, -3.9, 3.9))


def test_mean_is_zero_and_signs_are_fair(normals: Normals) -> None:
    assert abs(normals.mean()) < 5 / math.sqrt(len(normals))  # false alarm 6e-7
    assert stats.binomtest(int(np.sum(normals > 0)), len(normals)).pvalue > 1e-6


def test_the_two_normals_of_a_pair_are_independent(normals: Normals) -> None:
    one, other = np.split(normals, 2)
    # Correlation of values, of squares (the shared radius) and across them: 3 tests, false alarm 6e-7 each.
    for first, second in ((one, other), (one**2, other**2), (one, other**2)):
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(len(one))
    quadrants, _, _ = np.histogram2d(stats.norm.cdf(one), stats.norm.cdf(other), bins=16, range=[[0, 1], [0, 1]])
    assert stats.chisquare(quadrants.ravel()).pvalue > 1e-6


@pytest.mark.slow
def test_variance_is_within_three_permille_on_ten_million_draws(generator: str) -> None:
    draws = standard_normals(KEYS.derive("noise", 1, "w"), 10_000_000)
    assert abs(np.mean(draws**2) - 1) < 0.003  # 6.7 standard errors, false alarm 2e-11
    assert abs(np.mean((0.99 * draws) ** 2) - 1) > 0.003
    assert all(check(draws) for check in CHECKS)


@pytest.mark.slow
def test_two_billion_draws_pass_the_point_where_torch_stops() -> None:
    counts = dict.fromkeys((4.0, 5.0, TORCH_CPU_REACH, 6.0), 0)
    total = 500 * 4_000_000
    for step in range(500):
        draws = np.abs(standard_normals(KEYS.derive("noise", step, "tails"), 4_000_000))
        large = draws[draws > 4]
        for level in counts:
            counts[level] += int(np.sum(large > level))
    for level, count in counts.items():  # 4 exact tests, false alarm 2.5e-7 each
        assert stats.binomtest(count, total, 2 * stats.norm.sf(level)).pvalue > 2.5e-7, (level, count)
    # A generator that stops there has no draw beyond: 16 are expected, and none comes with a chance of 1e-7.
    assert counts[TORCH_CPU_REACH] > 0
    assert stats.binomtest(0, total, 2 * stats.norm.sf(TORCH_CPU_REACH)).pvalue < 1e-6


# ---- the reach, by construction


def exact_radius(word: int, more: int) -> float:
    """√(−2·log u), u = what the word lacks to 2⁶⁴ (continued by ``more`` where it is a tail word), in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        in_tail = word >= 2**64 - 2**53
        rest = Decimal(2**64 - 1 - word) + (Decimal(2 * more + 1) / 2**65) if in_tail else Decimal(2**64 - word)
        return float((-2 * (rest / 2**64).ln()).sqrt())


def words_around(*corners: int) -> list[int]:
    """Words with all bits in use, above and below each corner."""
    spread = [int(word) for word in KEYS.bits(20, "noise", "words")]
    return [*corners] + [word >> bits for bits in (0, 8, 16, 24) for word in spread]


def test_radii_are_exact_to_float64_from_the_centre_to_the_tail() -> None:
    words = words_around(0, 1, 2**11, 2**40, 2**63, 2**64 - 2**60, 2**64 - 2**53 - 1)
    radii = noise._radii(np.array(words, dtype=np.uint64))
    # One rounding of the word, relative to what it lacks to 2⁶⁴: 11 of 53 bits at the worst, where the tail begins.
    tolerances = [2.0**-52 * (1 + 2.0**64 / (2**64 - word)) for word in words]
    for word, radius, tolerance in zip(words, radii, tolerances, strict=True):
        assert radius == pytest.approx(exact_radius(word, 0), rel=tolerance, abs=0)


def test_radii_are_exact_to_float64_in_the_far_tail() -> None:
    spread = [2**64 - 1 - (word >> 11) for word in words_around()]
    words = [2**64 - 2**53, 2**64 - 2**40, 2**64 - 2**11, 2**64 - 2, 2**64 - 1, *spread]
    for more in (0, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15):
        radii = noise._tail_radii(np.array(words, dtype=np.uint64), np.full(len(words), more, dtype=np.uint64))
        np.testing.assert_allclose(radii, [exact_radius(word, more) for word in words], rtol=1e-15)


def test_angles_are_exact_to_float64_and_go_round_once() -> None:
    words = words_around(0, 2**62, 2**63 - 1, 2**63, 3 * 2**62, 2**64 - 1)
    cosines, sines = noise._circle(np.array(words, dtype=np.uint64))
    angles = [2 * math.pi * (word / 2**64) for word in words]
    np.testing.assert_allclose(cosines, np.cos(angles), atol=2e-15, rtol=0)
    np.testing.assert_allclose(sines, np.sin(angles), atol=2e-15, rtol=0)


def test_no_word_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among 100,000 numbers there are about 24 tail words: those that continue them come after all others."""
    taken: list[NDArray[np.uint64]] = []

    class Noted(WordStream):
        def take(self, count: int) -> NDArray[np.uint64]:
            taken.append(super().take(count))
            return taken[-1].copy()

    monkeypatch.setattr(noise, "WordStream", Noted)
    standard_normals(KEY, 100_000)
    first, more = taken
    assert (len(first), 10 < len(more) < 50) == (100_000, True)
    assert np.concatenate(taken).tobytes() == random_words(KEY, 100_000 + len(more)).tobytes()


def test_the_radius_does_not_jump_where_the_tail_begins() -> None:
    first_tail = noise._FIRST_TAIL_WORD
    below = noise._radii(np.array([first_tail - np.uint64(1)]))[0]
    above = noise._tail_radii(np.array([first_tail]), np.array([0], dtype=np.uint64))[0]
    assert abs(above - below) < 1e-11
    assert stats.chi2.sf(above**2, 2) == pytest.approx(2**-11, rel=1e-9)


def reach() -> float:
    """The largest radius that any words can give."""
    return float(noise._tail_radii(np.array([LARGEST_WORD]), np.zeros(1, dtype=np.uint64))[0])


def test_the_farthest_normal_lies_beyond_eight_and_a_half(generator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def largest_words(_: WordStream, count: int) -> NDArray[np.uint64]:
        # The first call asks for radius words, then angle words (zero: the x axis); the second for tail words.
        words = np.zeros(count, dtype=np.uint64)
        words[: count // 2] = LARGEST_WORD if count == 40_000 else 0
        return words

    monkeypatch.setattr(WordStream, "take", largest_words)
    draws = standard_normals(KEY, 40_000)
    np.testing.assert_array_equal(draws[:20_000], reach())
    np.testing.assert_array_equal(draws[20_000:], 0.0)
    assert reach() > 13.3 > 8.5


def delta_floor(reach: float, *, noise_multiplier: float, epochs: float) -> float:
    """The delta that no epsilon gets below: outputs that only one of two neighbours can give.

    One coordinate moved by the whole clip norm, over steps in which the unit takes part (``epochs`` on average).
    """
    return epochs * float(stats.norm.sf(reach - 1 / noise_multiplier))


@pytest.mark.parametrize(("noise_multiplier", "epochs", "torch_floor"), [(1.1, 60, 3.5e-5), (0.93, 50, 6.6e-5)])
def test_the_end_of_the_tail_adds_nothing_to_delta(noise_multiplier: float, epochs: float, torch_floor: float) -> None:
    def is_negligible(floor: float) -> bool:
        return floor < 0.001 * 1e-5

    assert is_negligible(delta_floor(reach(), noise_multiplier=noise_multiplier, epochs=epochs))
    # Also if all pairs of 2.4 million parameters could tell, each at any angle.
    any_pair = 1.2e6 * epochs * math.exp(-((reach() - 1 / noise_multiplier) ** 2) / 2)
    assert is_negligible(any_pair)
    truncated = delta_floor(TORCH_CPU_REACH, noise_multiplier=noise_multiplier, epochs=epochs)
    assert not is_negligible(truncated)
    assert truncated == pytest.approx(torch_floor, rel=0.03)  # the figures of PITFALLS 23


# ---- streams


def test_a_stream_depends_on_key_and_count_alone(generator: str) -> None:
    # In another place of the memory, after other work: vector units must not see alignment.
    draws = [standard_normals(KEY, 100_001)]
    for _ in range(5):
        spacer = standard_normals(KEYS.derive("noise", 1, "w"), 12_345)
        draws.append(standard_normals(KEY, 100_001))
        assert spacer.size == 12_345
    assert len({draw.tobytes() for draw in draws}) == 1


@pytest.mark.parametrize("pairs", [1, 100, 1 << 20])
def test_working_in_other_pieces_gives_equal_bits(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise.kernels.from_words, "_fits", lambda *_: False)
    expected = standard_normals(KEY, 10_001)
    monkeypatch.setattr(noise, "_PAIRS", pairs)
    assert standard_normals(KEY, 10_001).tobytes() == expected.tobytes()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 16_384, 32_769])
def test_any_count_can_be_drawn(count: int, generator: str) -> None:
    draws = standard_normals(KEY, count)
    assert draws.shape == (count,)
    assert np.isfinite(draws).all()


def test_any_flipped_bit_of_the_key_gives_another_stream() -> None:
    number = int.from_bytes(KEY, "big")
    flipped = [(number ^ (1 << bit)).to_bytes(32, "big") for bit in range(256)]
    streams = np.stack([standard_normals(key, 1000) for key in [KEY, *flipped]])
    assert len(np.unique(streams)) == streams.size
    correlations = np.corrcoef(streams)[np.triu_indices(257, 1)]
    assert np.abs(correlations).max() < 7.5 / math.sqrt(1000)  # 32,896 pairs at 6e-14: false alarm 2e-9


def test_noise_is_uncorrelated_across_steps_parameters_streams_contexts_and_seeds() -> None:
    one, other = KEYS.bind("run a"), KEYS.bind("run b")
    places = [*itertools.product((one, other, Keys.from_seed(21), Keys.from_seed(20 + 2**32)), (0, 1), ("a", "b"))]
    keys = [key.derive("noise", step, name) for key, step, name in places]
    keys += [one.derive("statistics", 0, "a"), one.derive("sampling", 0, "a"), one.derive("init", 0, "a")]
    draws = np.stack([standard_normals(key, 200_000) for key in keys])
    bound = 6.5 / math.sqrt(200_000)  # 171 pairs × 2 tests at 8e-11: false alarm 3e-8
    pairs = np.triu_indices(len(keys), 1)
    assert np.abs(np.corrcoef(draws)[pairs]).max() < bound
    assert np.abs(np.corrcoef(draws**2)[pairs]).max() < bound
    shared = np.corrcoef(draws[0], 0.05 * draws[0] + math.sqrt(1 - 0.05**2) * draws[1])[0, 1]
    assert shared > bound  # 5 % of another's noise would be seen


@pytest.mark.parametrize("length", [0, 16, 24, 31])
def test_a_key_that_is_not_256_bits_long_is_refused(length: int) -> None:
    with pytest.raises(ArgumentError, match="must have 32 bytes"):
        standard_normals(bytes(length), 1)


def test_the_generators_fingerprint_is_stable_and_sees_the_last_bit(
    generator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = noise.generator_fingerprint()
    assert noise.generator_fingerprint() == before
    monkeypatch.setattr(noise, "standard_normals", lambda key, count: np.nextafter(standard_normals(key, count), 9.0))
    assert noise.generator_fingerprint() != before
