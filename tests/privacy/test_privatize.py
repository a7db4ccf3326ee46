"""The release: the right scale, noise of its own for each step and parameter, one public grid, and the refusals.

Keys are fixed, so nothing here fails by chance; each false-alarm rate is that of the test under a fresh key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dpvision import kernels
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy import noise
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.noise import Grid, noisy_mean, standard_normals
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import ClippedSum, groups_by_size

Normals = NDArray[np.float64]
KEYS = Keys.from_seed(20)
MECHANISM = Mechanism(num_units=60_000, expected_batch_size=256.0, clip_norm=0.37, noise_multiplier=1.1, steps=100)


@pytest.fixture
def two_thread_counts() -> Iterator[tuple[int, int]]:
    before = torch.get_num_threads()
    yield (1, 2)
    torch.set_num_threads(before)


both_generators = pytest.mark.usefixtures("generator")


def zeros(*shape: int, clip_norm: float = 0.37, dtype: torch.dtype = torch.float32) -> ClippedSum:
    return ClippedSum({"w": torch.zeros(*shape, dtype=dtype)}, clip_norm)


def released(clipped: ClippedSum, mechanism: Mechanism = MECHANISM, *, keys: Keys = KEYS, step: int = 0) -> Normals:
    return noisy_mean(clipped, mechanism, keys, step=step).gradients["w"].double().numpy()


def stddev_is_right(mechanism: Mechanism, *, count: int = 1_000_000) -> bool:
    """Whether noise on a zero sum has stddev σ·C/B within 0.5 %: 7 standard errors, false alarm 1.5e-12."""
    draws = released(zeros(count, clip_norm=mechanism.clip_norm), mechanism)
    expected = mechanism.noise_multiplier * mechanism.clip_norm / mechanism.expected_batch_size
    return abs(math.sqrt(np.mean(draws**2)) / expected - 1) < 0.005


@both_generators
def test_noise_on_a_zero_sum_has_stddev_sigma_times_clip_norm_over_batch() -> None:
    assert stddev_is_right(MECHANISM)
    assert stddev_is_right(dataclasses.replace(MECHANISM, clip_norm=3.7, noise_multiplier=0.93))


@pytest.mark.parametrize("factor", [1.01, 0.99, 1 / 0.37, 1 / math.sqrt(2), 0.93, 256.0, 0.0])
def test_the_same_test_rejects_noise_of_a_wrong_size(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # In order: 1 % wrong either way, without C, ÷√2, ×0.93, not divided, none.
    monkeypatch.setattr(noise, "standard_normals", lambda key, count: factor * standard_normals(key, count))
    assert not stddev_is_right(MECHANISM)


def test_a_sum_is_released_once_and_gone_then() -> None:
    clipped = zeros(3)
    released(clipped)
    assert not clipped.gradients
    for step in (0, 1):
        with pytest.raises(PrivacyError, match="has been released"):
            released(clipped, step=step)


def test_a_sum_that_was_refused_can_still_be_released() -> None:
    clipped = zeros(3)
    with pytest.raises(PrivacyError, match="clipped to"):
        released(clipped, dataclasses.replace(MECHANISM, clip_norm=0.5))
    assert released(clipped).shape == (3,)


def test_each_parameter_and_step_has_its_own_noise() -> None:
    sums = {"a": torch.zeros(500), "b": torch.zeros(500)}
    drawn = [
        noisy_mean(ClippedSum(sums, 0.37), MECHANISM, keys, step=step).gradients[name].numpy()
        for keys in (KEYS, KEYS.bind("fork"))
        for step in (0, 1)
        for name in ("a", "b")
    ]
    assert len(np.unique(np.concatenate(drawn))) > 8 * 500 - 5  # equal float32 values by chance are rare


def test_noise_does_not_depend_on_the_order_of_the_parameters() -> None:
    a, b = torch.randn(40), torch.randn(3, 5)
    one = noisy_mean(ClippedSum({"a": a, "b": b}, 0.37), MECHANISM, KEYS, step=4).gradients
    other = noisy_mean(ClippedSum({"b": b, "a": a}, 0.37), MECHANISM, KEYS, step=4).gradients
    assert torch.equal(one["a"], other["a"])
    assert torch.equal(one["b"], other["b"])


def test_other_parameters_beside_it_change_a_parameters_noise() -> None:
    """One step released for two sets of parameters must not show the difference of two sums without noise."""
    sums = {name: torch.zeros(40) for name in "abc"}
    drawn = [
        noisy_mean(ClippedSum({name: sums[name] for name in names}, 0.37), MECHANISM, KEYS, step=4).gradients["a"]
        for names in ("a", "ab", "ac", "abc")
    ]
    assert len(torch.cat(drawn).unique()) == 4 * 40


def test_other_sizes_under_the_same_names_share_nothing() -> None:
    """Not even the words of their radii: squares are not correlated either."""
    one, other = noise_of({"a": 4000, "b": 2000}, 3), noise_of({"a": 8000, "b": 4000}, 5)
    swapped = noise_of({"a": 2000, "b": 4000}, 3)
    rows = [np.concatenate([*drawn.values()])[:6000] for drawn in (one, other, swapped)]
    for power in (1, 2):
        correlations = np.corrcoef(np.stack(rows) ** power)[np.triu_indices(3, 1)]
        assert np.abs(correlations).max() < 5.73 / math.sqrt(6000)


def noise_of(sizes: dict[str, int], step: int) -> dict[str, Normals]:
    sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    released = noisy_mean(ClippedSum(sums, 0.37), MECHANISM, KEYS, step=step).gradients
    return {name: gradient.numpy() for name, gradient in released.items()}


def test_steps_that_share_a_draw_share_no_number_and_can_be_taken_in_any_order() -> None:
    sizes = {"a": 301, "b": 3}
    steps = range(2 * noise._AHEAD + 1)
    expected = {step: noise_of(sizes, step) for step in steps}
    everything = np.concatenate([part for step in steps for part in expected[step].values()])
    assert len(np.unique(everything)) == len(everything) == 304 * len(steps)
    for step in (*reversed(steps), 5, 5, 0, 16, 5):
        for name, numbers in noise_of(sizes, step).items():
            assert numbers.tobytes() == expected[step][name].tobytes()


def test_steps_that_share_a_draw_are_not_correlated() -> None:
    """Eight steps of one draw against each other: 28 pairs of 30,001 numbers, false alarm 1e-8 each."""
    drawn = np.stack([np.concatenate([*noise_of({"a": 20_000, "b": 10_001}, step).values()]) for step in range(8)])
    correlations = np.corrcoef(drawn)[np.triu_indices(8, 1)]
    assert np.abs(correlations).max() < 5.73 / math.sqrt(30_001)


def test_what_was_drawn_ahead_can_not_be_changed() -> None:
    noise_of({"w": 5}, 0)
    drawn = noise._drawn_ahead(KEYS, 0, 8, (0, "w", 5), 40, kernels.identity())
    assert noise._drawn_ahead.cache_info().hits == 1
    with pytest.raises(ValueError, match="read-only"):
        drawn[0] = 1.0


@pytest.mark.parametrize("last", [0, 1, 1000])
def test_parameters_share_a_draw_until_they_are_too_many(last: int) -> None:
    """Every set is drawn by itself: what a parameter gets does not depend on the sets before or after its own."""
    together = noise._TOGETHER
    sizes = {"a": 5, "b": together - 5, "c": 7, "d": together + 1, "e": together, "f": last}
    sets = [("a", "b"), ("c",), ("d",), ("e", "f") if not last else ("e",), *([("f",)] if last else [])]
    assert list(groups_by_size(dict(sorted(sizes.items())), most=together)) == sets
    drawn = noise_of(sizes, 3)
    assert {name: each.size for name, each in drawn.items()} == sizes
    whole = np.concatenate([*drawn.values()])
    assert len(np.unique(whole)) > whole.size - 200  # by chance, about 60 of 800,000 meet on the grid
    others = noise_of({"c": 2 * together + 7 + last, "d": together + 1}, 3)  # as many in all, so on the same grid
    assert drawn["d"].tobytes() == others["d"].tobytes()


@both_generators
def test_every_part_of_a_long_parameter_has_its_own_noise() -> None:
    """Parts against each other: three pairs of 2¹⁸ numbers, false alarm 1e-8 each."""
    parts = np.split(noise_of({"w": 3 * noise._TOGETHER}, 1)["w"], 3)
    for power in (1, 2):  # parts that shared their radii would show in the squares
        correlations = np.corrcoef(np.stack(parts) ** power)[np.triu_indices(3, 1)]
        assert np.abs(correlations).max() < 5.73 / math.sqrt(noise._TOGETHER)


@both_generators
@pytest.mark.parametrize("place", [0, -1])
def test_a_long_sum_that_is_not_finite_anywhere_is_refused(place: int) -> None:
    sums = torch.zeros(2 * noise._TOGETHER + 3, dtype=torch.float64)
    sums[place] = math.inf
    with pytest.raises(PrivacyError, match="must be finite, and is not in w:"):
        noisy_mean(ClippedSum({"w": sums}, 0.37, disposable=True), MECHANISM, KEYS, step=0)


def test_every_step_of_a_large_model_has_its_own_noise() -> None:
    drawn = [noise_of({"w": noise._TOGETHER}, step)["w"] for step in range(3)]
    correlations = np.corrcoef(np.stack(drawn))[np.triu_indices(3, 1)]
    assert np.abs(correlations).max() < 5.73 / math.sqrt(noise._TOGETHER)


@both_generators
def test_the_sum_is_divided_by_the_public_batch_size_unrounded() -> None:
    mechanism = dataclasses.replace(MECHANISM, expected_batch_size=255.6)
    sums = torch.linspace(-50, 50, 1001, dtype=torch.float64)
    moved = released(ClippedSum({"w": sums}, 0.37), mechanism) - released(zeros(1001, dtype=torch.float64), mechanism)
    # Equal noise cancels: what is left is the sum over 255.6, rounded to the grid of 0.37·1.1·2⁻³⁰/255.6.
    np.testing.assert_allclose(moved, sums.numpy() / 255.6, atol=1e-11, rtol=0)


@both_generators
def test_release_and_noise_lie_on_one_grid_whatever_the_sum() -> None:
    grid = Grid.for_mechanism(MECHANISM, coordinates=2000)
    sums = torch.randn(2000, dtype=torch.float64) * torch.logspace(-12, 3, 2000, dtype=torch.float64)
    release = released(ClippedSum({"w": sums}, 0.37)) * 256.0 / grid.spacing  # both powers of two: exact
    assert np.array_equal(release, np.rint(release))
    noise_alone = released(zeros(2000, dtype=torch.float64)) * 256.0 / grid.spacing
    assert np.array_equal(release - noise_alone, np.rint(sums.numpy() / grid.spacing))


@both_generators
def test_bits_below_the_grid_leave_no_trace() -> None:
    grid = Grid.for_mechanism(MECHANISM, coordinates=500)
    on_grid = torch.arange(500, dtype=torch.float64) * grid.spacing
    nudged = on_grid + 0.49 * grid.spacing
    one, other = (released(ClippedSum({"w": sums}, 0.37)) for sums in (on_grid, nudged))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("coordinates", [1, 26_010, 2_448_714, 10**9])
@pytest.mark.parametrize("noise_multiplier", [0.01, 1.1, 40.0])
def test_the_grid_is_fine_and_its_rounding_is_paid_for(coordinates: int, noise_multiplier: float) -> None:
    mechanism = dataclasses.replace(MECHANISM, noise_multiplier=noise_multiplier)
    grid = Grid.for_mechanism(mechanism, coordinates=coordinates)
    assert math.frexp(grid.spacing)[0] == 0.5  # a power of two
    assert 2.0**-31 < grid.spacing / mechanism.noise_stddev <= 2.0**-30
    sensitivity = mechanism.clip_norm + grid.spacing * math.sqrt(coordinates)
    assert grid.noise_stddev / sensitivity == pytest.approx(noise_multiplier, rel=1e-15)
    assert 1 < grid.noise_stddev / mechanism.noise_stddev < 1 + 2e-9 * noise_multiplier * math.sqrt(coordinates)


@both_generators
def test_release_uses_the_noise_that_pays_for_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "standard_normals", lambda key, count: np.ones(count))
    mechanism = dataclasses.replace(MECHANISM, noise_multiplier=40.0)
    sums = ClippedSum({name: torch.zeros(500_000, dtype=torch.float64) for name in ("v", "w")}, 0.37)
    grid = Grid.for_mechanism(mechanism, coordinates=1_000_000)
    noise_on_sum = released(sums, mechanism)[0] * 256.0
    assert noise_on_sum == pytest.approx(grid.noise_stddev, abs=grid.spacing)
    assert noise_on_sum > mechanism.noise_stddev * (1 + 1e-5)


@both_generators
def test_release_is_bit_equal_for_every_thread_count(two_thread_counts: tuple[int, int]) -> None:
    sums = torch.randn(300, 301)
    releases = []
    for threads in two_thread_counts:
        torch.set_num_threads(threads)
        releases.append(released(ClippedSum({"w": sums}, 0.37)))
    assert releases[0].tobytes() == releases[1].tobytes()


@both_generators
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 4, 5, 6)])
def test_release_keeps_shape_and_dtype_and_leaves_the_sum_alone(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sums = torch.randn(shape).to(dtype)
    before = sums.clone()
    gradient = noisy_mean(ClippedSum({"w": sums}, 0.37), MECHANISM, KEYS, step=0).gradients["w"]
    assert (gradient.shape, gradient.dtype) == (sums.shape, dtype)
    assert torch.equal(sums, before)
    assert torch.isfinite(gradient).all()


@both_generators
def test_a_disposable_sum_becomes_its_own_release() -> None:
    sums = {"a": torch.randn(5, 4).double(), "b": torch.randn(7)}
    kept = noisy_mean(ClippedSum(sums, 0.37), MECHANISM, KEYS, step=0).gradients
    private = noisy_mean(ClippedSum(dict(sums), 0.37, disposable=True), MECHANISM, KEYS, step=0).gradients
    assert all(torch.equal(private[name], kept[name]) for name in sums)
    assert private["a"] is sums["a"]  # nothing is left of the exact sum
    assert private["b"].data_ptr() != sums["b"].data_ptr()


@both_generators
def test_memory_order_does_not_matter() -> None:
    sums = torch.randn(4, 3, 5, 5)
    plain, last = (
        noisy_mean(ClippedSum({"w": tensor}, 0.37), MECHANISM, KEYS, step=0).gradients["w"]
        for tensor in (sums, sums.to(memory_format=torch.channels_last))
    )
    assert torch.equal(plain, last)


def test_an_empty_draw_is_a_release_of_noise_alone() -> None:
    assert np.all(released(zeros(100)) != 0)


def test_a_private_gradient_knows_its_step() -> None:
    assert noisy_mean(zeros(2), MECHANISM, KEYS, step=17).step == 17


@pytest.mark.parametrize("pairs", [1, 100, 1 << 20])
def test_releasing_in_other_pieces_gives_equal_bits(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels.switched_off():
        expected = released(zeros(10_001))
        monkeypatch.setattr(noise, "_PAIRS", pairs)
        assert released(zeros(10_001)).tobytes() == expected.tobytes()


# ---- refusals


def test_a_sum_clipped_to_another_norm_is_refused() -> None:
    for clip_norm in (0.38, math.nextafter(0.37, 1), math.nan, 1.0):
        with pytest.raises(PrivacyError, match=r"clipped to .* but the noise is for clip_norm 0\.37"):
            noisy_mean(zeros(3, clip_norm=clip_norm), MECHANISM, KEYS, step=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sum_that_is_not_finite_is_refused_by_name(value: float) -> None:
    sums = torch.zeros(1000)
    sums[777] = value
    with pytest.raises(PrivacyError, match=r"must be finite, and is not in bad, worse:"):
        noisy_mean(ClippedSum({"good": torch.zeros(2), "bad": sums, "worse": sums}, 0.37), MECHANISM, KEYS, step=0)


def test_whole_numbers_are_not_a_gradient_sum() -> None:
    with pytest.raises(PrivacyError, match="floating-point"):
        noisy_mean(ClippedSum({"w": torch.zeros(3, dtype=torch.int64)}, 0.37), MECHANISM, KEYS, step=0)


@pytest.mark.parametrize("step", [-1, 1.0, True, "3", None])
def test_a_step_that_is_not_a_count_is_refused(step: object) -> None:
    with pytest.raises(ArgumentError, match="step must be a whole number >= 0"):
        noisy_mean(zeros(3), MECHANISM, KEYS, step=step)  # type: ignore[arg-type]


def test_only_a_clipped_sum_is_taken() -> None:
    with pytest.raises(PrivacyError, match="only a ClippedSum"):
        noisy_mean({"w": torch.zeros(3)}, MECHANISM, KEYS, step=0)  # type: ignore[arg-type]


def test_noise_too_small_or_large_for_a_grid_is_refused() -> None:
    for clip_norm in (1e-200, 1e200):
        with pytest.raises(ArgumentError, match="noise_stddev must lie between"):
            noisy_mean(zeros(3, clip_norm=clip_norm), dataclasses.replace(MECHANISM, clip_norm=clip_norm), KEYS, step=0)
