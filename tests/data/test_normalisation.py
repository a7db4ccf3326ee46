"""Noisy normalisation constants: bounded contribution of each unit, one charged release."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from dpvision.data import ImageStore, released_normalisation, store_of_arrays
from dpvision.data.normalisation import unit_bound, unit_statistics
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Event
from dpvision.privacy.randomness import Keys

KEYS = Keys.from_seed(4)


def make_store(images: NDArray[np.uint8], units: list[int] | None = None) -> ImageStore:
    return store_of_arrays(
        images=images, labels=np.zeros(len(images)), class_names=["a", "b"], name="made", unit_names=units
    )


def random_store(rows: int, *, channels: int = 3, units: list[int] | None = None) -> ImageStore:
    rng = np.random.default_rng(rows)
    centre = rng.integers(40, 215, (rows, channels, 1, 1))
    return make_store(np.clip(centre + rng.normal(0, 30, (rows, channels, 5, 7)), 0, 255).astype(np.uint8), units)


def no_noise(key: bytes, count: int) -> NDArray[np.float64]:
    return np.zeros(count)


def seeded_normals(key: bytes, count: int) -> NDArray[np.float64]:
    return np.random.default_rng(int.from_bytes(key, "big")).standard_normal(count)


@pytest.mark.parametrize("channels", [1, 3])
def test_no_unit_moves_the_sum_by_more_than_the_bound_and_the_worst_one_reaches_it(channels: int) -> None:
    # The extremes of a and b lie at constant images and at mixtures of black and white: try all of them and noise.
    rng = np.random.default_rng(0)
    flat = [np.full((channels, 4, 4), value) for value in (0, 1, 127, 128, 255)]
    mixed = [np.where(rng.random((channels, 4, 4)) < share, 255, 0) for share in (0.1, 0.5, 0.9)]
    noise = [rng.integers(0, 256, (channels, 4, 4)) for _ in range(50)]
    store = make_store(np.stack([*flat, *mixed, *noise]).astype(np.uint8))
    norms = np.linalg.norm(unit_statistics(store), axis=1)
    assert norms.max() <= unit_bound(channels)
    assert norms.max() == pytest.approx(unit_bound(channels), rel=1e-12)
    # The worst one is whole: the bound is no smaller than it must be.
    np.testing.assert_allclose(unit_statistics(store)[4], [1 / 2] * channels + [1 / 8] * channels, rtol=1e-12)


def test_a_patient_with_many_rows_moves_the_sum_no_more_than_one_with_one_row() -> None:
    images = np.full((101, 1, 3, 3), 255, dtype=np.uint8)
    store = make_store(images, units=[0] * 100 + [1])
    vectors = unit_statistics(store)
    assert vectors.shape == (2, 2)
    np.testing.assert_allclose(vectors[0], vectors[1], rtol=1e-12)


def test_units_contribute_the_mean_over_all_their_rows() -> None:
    store = random_store(12, units=[0, 1, 1, 0, 2, 2, 2, 2, 0, 3, 3, 3])
    x = store.images.numpy() / 255 - 0.5
    for unit, vector in enumerate(unit_statistics(store)):
        rows = x[store.unit_of_row.numpy() == unit]
        expected = [*rows.mean(axis=(0, 2, 3)), *(np.square(rows).mean(axis=(0, 2, 3)) - 1 / 8)]
        np.testing.assert_allclose(vector, expected, atol=1e-12)


def test_without_noise_the_constants_are_those_of_the_images() -> None:
    store = random_store(400)
    constants, _ = released_normalisation(store, num_units=400, noise_multiplier=1.0, keys=KEYS, normals=no_noise)
    x = store.images.numpy() / 255
    # Published to four decimals.
    np.testing.assert_allclose(constants.mean, x.mean(axis=(0, 2, 3)), atol=1e-4)
    np.testing.assert_allclose(constants.std, x.std(axis=(0, 2, 3)), atol=1e-4)
    assert constants.source == "released"


def test_the_event_is_one_release_over_everybody_at_the_given_noise() -> None:
    _, event = released_normalisation(
        random_store(5), num_units=5, noise_multiplier=7.5, keys=KEYS, normals=seeded_normals
    )
    assert event == Event(sample_rate=1.0, noise_multiplier=7.5, purpose="normalisation statistics")


@pytest.mark.parametrize("channels", [1, 3])
def test_the_noise_on_the_sum_is_the_multiplier_times_the_bound(channels: int) -> None:
    """Each normal moves its own statistic by exactly noise_multiplier · bound / num_units."""
    store = random_store(1000, channels=channels)
    asked: list[tuple[bytes, int]] = []

    def constants_with(draws: NDArray[np.float64]) -> NDArray[np.float64]:
        def normals(key: bytes, count: int) -> NDArray[np.float64]:
            asked.append((key, count))
            return draws

        found, _ = released_normalisation(store, num_units=1000, noise_multiplier=20.0, keys=KEYS, normals=normals)
        mean, std = np.array(found.mean), np.array(found.std)
        return np.concatenate([mean, std**2 + (mean - 0.5) ** 2])

    still = constants_with(np.zeros(2 * channels))
    step = 20.0 * unit_bound(channels) / 1000
    for place, sign in itertools.product(range(2 * channels), (-1.0, 1.0)):
        moved = constants_with(sign * np.eye(2 * channels)[place]) - still
        # Constants are rounded to four decimals.
        np.testing.assert_allclose(moved, sign * step * np.eye(2 * channels)[place], atol=2e-4)
    assert {count for _, count in asked} == {2 * channels}
    assert {key for key, _ in asked} == {KEYS.derive("statistics", "normalisation")}


def test_the_divisor_is_the_public_number_of_units() -> None:
    images = np.full((10, 1, 2, 2), 255, dtype=np.uint8)
    half, _ = released_normalisation(
        make_store(images), num_units=20, noise_multiplier=1.0, keys=KEYS, normals=no_noise
    )
    assert half.mean == (0.75,)


def test_constants_are_sane_whatever_the_noise_does() -> None:
    for shift in (-1e9, 1e9):
        for place in range(2):
            draws = shift * np.eye(2)[place]
            found, _ = released_normalisation(
                random_store(3, channels=1),
                num_units=3,
                noise_multiplier=1.0,
                keys=KEYS,
                normals=lambda k, n, d=draws: d,
            )
            assert 0 <= found.mean[0] <= 1
            assert 0.05 <= found.std[0] <= 0.5


def test_a_unit_without_rows_and_an_empty_store_contribute_nothing() -> None:
    empty = random_store(3).select_units([])
    found, _ = released_normalisation(empty, num_units=3, noise_multiplier=1.0, keys=KEYS, normals=no_noise)
    assert found.mean == (0.5, 0.5, 0.5)


def test_nonsense_is_refused() -> None:
    store = random_store(3)
    with pytest.raises(ArgumentError, match=r"num_units .* noise_multiplier"):
        released_normalisation(store, num_units=0, noise_multiplier=0.0, keys=KEYS, normals=no_noise)
    with pytest.raises(ArgumentError, match="normals must give 6 numbers"):
        released_normalisation(
            store, num_units=3, noise_multiplier=1.0, keys=KEYS, normals=lambda key, count: np.zeros(1)
        )
