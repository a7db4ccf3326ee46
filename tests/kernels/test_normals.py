"""Native normals and their release: against higher precision, against numpy, and equal bits however they are made."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpvision.errors import ArgumentError
from dpvision.kernels import normals as kernels
from dpvision.kernels.compile import build
from dpvision.privacy import noise
from dpvision.privacy.randomness import Keys

pytestmark = pytest.mark.skipif(build().library is None, reason=f"no native kernels: {build().reason}")

Words = NDArray[np.uint64]
Doubles = NDArray[np.float64]
KEYS = Keys.from_seed(30)
KEY = KEYS.derive("noise", 0, "w")
NO_TAILS = np.empty(0, dtype=np.int64), np.empty(0)
PI = np.longdouble("3.14159265358979323846264338327950288")
PIECE = 1024  # of the kernel
STRETCH = 16384  # pairs from which on several threads work


def made(
    radius_words: Words, angle_words: Words, tails: tuple[NDArray[np.int64], Doubles] | None = None
) -> tuple[Doubles, Doubles]:
    words = np.concatenate([radius_words, angle_words])
    one, other = np.split(kernels.from_words(words, *(tails or NO_TAILS)), 2)
    return one, other


def spread(count: int, name: str) -> list[int]:
    """Words of all magnitudes."""
    return [int(word) >> (place % 50) for place, word in enumerate(KEYS.bits(count, "noise", name))]


def as_words(numbers: list[int]) -> Words:
    return np.array([number % 2**64 for number in numbers], dtype=np.uint64)


def exact_circle(word: int) -> tuple[np.longdouble, np.longdouble]:
    quarter = (word + 2**61) // 2**62
    angle = np.longdouble(word - quarter * 2**62) / np.longdouble(2**63) * PI
    cosine, sine = np.cos(angle), np.sin(angle)
    return [(cosine, sine), (-sine, cosine), (-cosine, -sine), (sine, -cosine)][quarter % 4]


# ---- accuracy


def test_radii_are_right_to_two_units_in_the_last_place() -> None:
    numbers = [0, 1, 2**10, 2**53, 2**62, 2**63, *spread(2000, "radii")]
    words = as_words([number for number in numbers if number < 2**64 - 2**53])
    radii, sines = made(words, np.zeros_like(words))
    # The word rounded to float64 is what numpy uses too; the rest is the logarithm's own error.
    exact = np.sqrt(-2 * np.log1p(-(words.astype(np.float64) * 2.0**-64).astype(np.longdouble)))
    np.testing.assert_allclose(radii.astype(np.longdouble), exact, rtol=4.5e-16, atol=0)
    assert not sines.any()


def test_cosines_and_sines_are_right_also_next_to_their_zeros() -> None:
    near = [
        quarter * 2**62 + side * distance for quarter in range(4) for side in (-1, 1) for distance in spread(60, "a")
    ]
    eighths = [eighth * 2**61 + side for eighth in range(8) for side in (-1, 0, 1)]
    words = as_words([*near, *eighths, *spread(500, "angles")])
    one = np.full_like(words, 7 * 2**61)
    (radius,), _ = made(one[:1], as_words([0]))
    cosines, sines = made(one, words)
    exact = [exact_circle(int(word)) for word in words]
    # Three roundings of the angle, one or two of the series, one of the product with the radius.
    np.testing.assert_allclose(cosines, [float(radius * cosine) for cosine, _ in exact], rtol=7e-16, atol=0)
    np.testing.assert_allclose(sines, [float(radius * sine) for _, sine in exact], rtol=7e-16, atol=0)


def test_native_and_numpy_agree_to_the_last_bits_tails_included(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 400_001
    one, other = np.split(noise.standard_normals(KEY, count + 1), 2)
    monkeypatch.setattr(kernels.from_words, "_fits", lambda *_: False)
    plain_one, plain_other = np.split(noise.standard_normals(KEY, count + 1), 2)
    radius = np.hypot(plain_one, plain_other)
    np.testing.assert_allclose(np.hypot(one, other), radius, rtol=1e-14, atol=0)
    # Of the radius: numpy's cosine has an absolute error, so that next to its zeros no relative one can be asked for.
    assert (np.abs(one - plain_one) <= 1e-14 * radius).all()
    assert (np.abs(other - plain_other) <= 1e-14 * radius).all()
    beyond = np.sqrt(22 * np.log(2))  # the radius of the first tail word
    assert (radius > beyond).sum() > 50  # 98 expected, of 200,001 pairs


# ---- the same bits, however they are made


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 1023, 1025])
def test_a_pair_does_not_depend_on_its_neighbours(count: int) -> None:
    words = KEYS.bits(2 * 3000, "noise", "pairs")
    one, other = made(words[:3000], words[3000:])
    for first in (0, 1, 2, 3, 1500):
        some = slice(first, first + count)
        part_one, part_other = made(words[:3000][some], words[3000:][some])
        assert part_one.tobytes() == one[some].tobytes()
        assert part_other.tobytes() == other[some].tobytes()


def test_the_number_of_threads_changes_no_bit() -> None:
    found: list[tuple[bytes, bytes]] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        draws = noise.standard_normals(KEY, 4 * STRETCH + 3)
        sums = torch.linspace(-3, 3, draws.size, dtype=torch.float64)
        found.append((draws.tobytes(), released([sums], draws.copy(), per_normal=99.7)))
    assert found[0] == found[1] == found[2]


# ---- tails


def test_tails_get_the_radius_that_they_are_given_and_no_others_do() -> None:
    pairs = 3 * PIECE + 5
    words = KEYS.bits(2 * pairs, "noise", "tails")
    radius_words, angle_words = words[:pairs] >> np.uint64(1), words[pairs:]
    clean_one, clean_other = made(radius_words, angle_words)
    places = np.array([0, 1, 3, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, pairs - 1])
    radii = 8 + np.arange(places.size) / 8
    one, other = made(radius_words, angle_words, (places, radii))
    untouched = np.setdiff1d(np.arange(pairs), places)
    assert one[untouched].tobytes() == clean_one[untouched].tobytes()
    assert other[untouched].tobytes() == clean_other[untouched].tobytes()
    np.testing.assert_allclose(np.hypot(one[places], other[places]), radii, rtol=1e-15)
    np.testing.assert_allclose(np.arctan2(other, one), np.arctan2(clean_other, clean_one), rtol=1e-14)


# ---- the release


def released(rows: list[Tensor], normals: NDArray[np.float64], *, per_normal: float = 2.0**30) -> bytes:
    """The bytes of a release that must not be refused."""
    assert kernels.release(rows, normals, steps_per_sum=64.0, steps_per_normal=per_normal, mean_per_step=0.1)
    return torch.cat([row.view(-1) for row in rows]).numpy().tobytes()


@pytest.mark.parametrize("cuts", [[0], [1], [7], [1000], [40_001], [0, 3, 0, 5], [1, 40_000, 17_000, 1]])
def test_the_release_is_numpys_bit_by_bit(cuts: list[int]) -> None:
    count = sum(cuts)
    values = noise.standard_normals(KEYS.derive("noise", 1, "w"), count) * np.logspace(-12, 6, count)
    rows, draws = list(torch.from_numpy(values).split(cuts)), noise.standard_normals(KEY, count)
    scales = {"steps_per_sum": 2.0**31, "steps_per_normal": 1.7 * 2.0**30, "mean_per_step": 2.0**-31 / 255.6}
    wanted, found = ([row.clone() for row in rows] for _ in range(2))
    assert noise._release(wanted, draws, **scales)
    assert kernels.release(found, draws, **scales)
    exact = (np.rint(values * 2.0**31) + np.rint(draws * (1.7 * 2.0**30))) * (2.0**-31 / 255.6)
    assert torch.cat(found).numpy().tobytes() == torch.cat(wanted).numpy().tobytes() == exact.tobytes()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 6, 7, 40_006])
def test_a_sum_that_is_not_finite_is_not_released(value: float, place: int) -> None:
    sums = torch.zeros(40_007, dtype=torch.float64)
    sums[place] = value
    scales = {"steps_per_sum": 1.0, "steps_per_normal": 1.0, "mean_per_step": 1.0}
    for release in (kernels.release, noise._release):
        assert not release(list(sums.clone().split([7, 40_000])), np.zeros(40_007), **scales)
    assert released([torch.full((3,), 1.7e308, dtype=torch.float64)], np.zeros(3))  # finite, if barely


def test_sums_of_any_kind_become_rows_of_float64() -> None:
    double = torch.ones(3, 2, dtype=torch.float64)
    others = [torch.ones(2, 3), double.mT, torch.ones(4, dtype=torch.bfloat16), double.clone().requires_grad_()]
    for sums, copy in [*((each, False) for each in others), (double, True)]:
        row = kernels.row_of(sums, copy=copy)
        assert (row.shape, row.dtype) == (sums.shape, torch.float64)
        assert row.is_contiguous()
        assert not row.requires_grad
        assert row.data_ptr() != sums.data_ptr()
    assert kernels.row_of(double, copy=False) is double


# ---- in use


def test_the_noise_is_native_and_its_fingerprint_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    dealt_out = b"parameters by name, together up to 262144 numbers and 8 steps, else in parts"

    def digest() -> str:
        return hashlib.sha256(dealt_out + noise.standard_normals(bytes(32), 1 << 16).tobytes()).hexdigest()

    native, draws = noise.generator_fingerprint(), noise.standard_normals(KEY, 1001)
    assert native == digest()
    monkeypatch.setattr(kernels.from_words, "_fits", lambda *_: False)
    assert noise.generator_fingerprint() == digest() != native
    assert noise.standard_normals(KEY, 1001).tobytes() != draws.tobytes()


def test_other_arrays_are_refused() -> None:
    words = np.zeros(8, dtype=np.uint64)
    frozen = words.copy()
    frozen.flags.writeable = False
    scales = {"steps_per_sum": 1.0, "steps_per_normal": 1.0, "mean_per_step": 1.0}
    assert kernels.from_words.takes(words, *NO_TAILS)
    wrong_ones: list[Any] = [words.astype(np.uint32), words[::2], words.reshape(2, 4), frozen, words.astype(">u8")]
    for wrong in wrong_ones:
        with pytest.raises(ArgumentError, match="an even number of writable"):
            kernels.from_words(wrong, *NO_TAILS)
        if wrong is not frozen:
            with pytest.raises(ArgumentError, match="one float64 normal for each"):
                kernels.release([torch.zeros(8, dtype=torch.float64)], wrong, **scales)
    wrong_tails: list[Any] = [(np.zeros(1, dtype=np.int64), np.zeros(2)), (np.zeros(1, dtype=np.int32), np.zeros(1))]
    for tails in wrong_tails:
        with pytest.raises(ArgumentError, match="as many int64 tails"):
            kernels.from_words(words, *tails)
    with pytest.raises(ArgumentError, match="an even number"):
        kernels.from_words(words[:7], *NO_TAILS)
    for rows in ([torch.zeros(7, dtype=torch.float64)], [torch.zeros(8)], [torch.zeros(16, dtype=torch.float64)[::2]]):
        with pytest.raises(ArgumentError, match="one float64 normal for each"):
            kernels.release(rows, np.zeros(8), **scales)
