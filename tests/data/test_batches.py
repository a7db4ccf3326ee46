"""Batches of images: the drawn units' rows in micro-batches of a fixed shape, whatever the store holds."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from dpvision.data import ImageBatches, ImageStore, Normalisation, fixed_normalisation, store_of_arrays
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.private_step import step_event
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import Sampling

FALSE_ALARM = 1e-6
KEYS = Keys.from_seed(2, "test of draws")


def make_store(rows_of_unit: list[int]) -> ImageStore:
    """A store whose unit u has rows_of_unit[u] rows; each pixel of row r is (r + 1) % 256."""
    units = np.repeat(np.arange(len(rows_of_unit)), rows_of_unit)
    rows = len(units)
    images = np.broadcast_to(((np.arange(rows) + 1) % 256).astype(np.uint8)[:, None, None, None], (rows, 1, 2, 2))
    store = store_of_arrays(
        images=images.copy(), labels=np.arange(rows) % 3, class_names=["a", "b", "c"], name="made", unit_names=units
    )
    # Unit numbers as they are, not renumbered, so that units without rows exist.
    return replace(store, unit_of_row=torch.from_numpy(units))


def make_mechanism(num_units: int, expected_batch_size: float) -> Mechanism:
    return Mechanism(
        num_units=num_units, expected_batch_size=expected_batch_size, clip_norm=1.0, noise_multiplier=1.0, steps=10
    )


def make_draws(store: ImageStore, mechanism: Mechanism, *, rows_per_unit: int = 1, keys: Keys = KEYS) -> ImageBatches:
    return ImageBatches(
        mechanism=mechanism,
        store=store,
        normalisation=Normalisation(mean=(0.0,), std=(1 / 255,), source="fixed"),
        keys=keys,
        rows_per_unit=rows_per_unit,
    )


def rows_drawn(draws: ImageBatches, step: int, *, units: int = 4) -> list[list[int]]:
    """The rows of each drawn unit, read back from the pixels."""
    found = []
    for piece in draws.batch(step).microbatches(units):
        values = piece.inputs[:, 0, 0, 0].reshape(piece.row_weights_UR.shape).round().long() - 1
        for row_values, weights in zip(values, piece.row_weights_UR, strict=True):
            found.append(sorted(row_values[weights > 0].tolist()))
    return [rows for rows in found if rows]


# --- draws ---------------------------------------------------------------------------------------------------------


def test_rate_one_draws_every_unit_in_every_step() -> None:
    draws = make_draws(make_store([1] * 7), make_mechanism(7, 7))
    assert all(draws.units(step).tolist() == list(range(7)) for step in range(20))


def test_an_empty_draw_yields_no_micro_batch_and_is_still_a_poisson_draw() -> None:
    mechanism = make_mechanism(7, 1e-9)
    batch = make_draws(make_store([1] * 7), mechanism).batch(0)
    assert list(batch.microbatches(4)) == []
    assert step_event(batch.sampling, mechanism) == mechanism.step_event


def test_a_store_without_rows_gives_empty_draws() -> None:
    draws = make_draws(make_store([]), make_mechanism(7, 7))
    assert list(draws.batch(0).microbatches(2)) == []


def test_a_draw_is_the_same_whenever_it_is_asked_for_and_other_in_other_steps_and_keys() -> None:
    store, mechanism = make_store([1] * 200), make_mechanism(200, 50)
    first, again = make_draws(store, mechanism), make_draws(store, mechanism)
    list(again.batch(3).microbatches(8))
    assert rows_drawn(first, 5) == rows_drawn(again, 5)
    assert rows_drawn(first, 5) != rows_drawn(first, 6)
    other = make_draws(store, mechanism, keys=Keys.from_seed(2, "another run"))
    assert rows_drawn(first, 5) != rows_drawn(other, 5)


# --- neighbours ------------------------------------------------------------------------------------------------------


def test_the_rate_comes_from_the_mechanism_and_not_from_the_store() -> None:
    mechanism = make_mechanism(64, 16)
    sizes = [1, 63, 64, 65, 1000]
    assert {make_draws(make_store([1] * n), mechanism).batch(0).sampling for n in sizes} == {Sampling("poisson", 0.25)}
    # Ten thousand units in the store at a declared 64: still each with a probability of 1/4. False alarm 1e-6.
    crowd = len(make_draws(make_store([1] * 10_000), mechanism).units(0))
    assert binomtest(crowd, 10_000, 0.25).pvalue > FALSE_ALARM


@pytest.mark.parametrize("rows_per_unit", [1, 2, 3])
def test_a_unit_added_at_the_end_changes_neither_inclusion_nor_rows_of_the_others(rows_per_unit: int) -> None:
    rows_of_unit = [1, 5, 2, 9, 0, 4, 3, 7] * 4
    mechanism = make_mechanism(32, 16)
    small = make_draws(make_store(rows_of_unit), mechanism, rows_per_unit=rows_per_unit)
    for extra in ([6], [1] * 10):
        large = make_draws(make_store(rows_of_unit + extra), mechanism, rows_per_unit=rows_per_unit)
        for step in range(30):
            before, after = small.units(step), large.units(step)
            assert before.tolist() == after[after < 32].tolist()
            assert rows_drawn(small, step) == [rows for rows in rows_drawn(large, step) if rows[0] < sum(rows_of_unit)]


@pytest.mark.parametrize("other_size", [0, 1, 2, 3, 60])
def test_the_size_of_a_unit_changes_no_row_choice_of_the_others(other_size: int) -> None:
    mechanism = make_mechanism(3, 3)
    before = make_draws(make_store([4, 6, 5]), mechanism, rows_per_unit=2)
    after = make_draws(make_store([4, other_size, 5]), mechanism, rows_per_unit=2)
    for step in range(50):
        first, *_, third = rows_drawn(before, step)
        first_again, *_, third_again = rows_drawn(after, step)
        assert first == first_again
        assert [row - 10 for row in third] == [row - 4 - other_size for row in third_again]


# --- rows of units ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_per_unit", [1, 2, 4, 9])
def test_a_unit_gives_at_most_rows_per_unit_different_rows_of_its_own(rows_per_unit: int) -> None:
    rows_of_unit = [0, 1, 2, 3, 8, 20, 0, 1]
    store = make_store(rows_of_unit)
    draws = make_draws(store, make_mechanism(8, 8), rows_per_unit=rows_per_unit)
    for step in range(20):
        drawn = rows_drawn(draws, step, units=3)
        assert [len(rows) for rows in drawn] == [min(k, rows_per_unit) for k in rows_of_unit if k]
        for rows in drawn:
            assert len(set(rows)) == len(rows)
            assert len(set(store.unit_of_row[rows].tolist())) == 1


def test_row_weights_sum_to_one_in_a_unit_with_rows_and_to_zero_elsewhere() -> None:
    draws = make_draws(make_store([0, 1, 2, 3, 8]), make_mechanism(5, 5), rows_per_unit=3)
    weights = torch.cat([piece.row_weights_UR for piece in draws.batch(0).microbatches(4)])
    # Shares are float32: three thirds are one up to their rounding.
    torch.testing.assert_close(weights.sum(1), torch.tensor([0.0, 1, 1, 1, 1, 0, 0, 0]))
    assert weights[2].tolist() == [0.5, 0.5, 0.0]


def test_every_set_of_rows_is_equally_likely() -> None:
    # 2 of 4 rows, 6 sets, 60 units, 100 steps: each count is Binomial(6000, 1/6). False alarm 1e-6 over six tests.
    draws = make_draws(make_store([4] * 60), make_mechanism(60, 60), rows_per_unit=2)
    counts = Counter(
        tuple(row % 4 for row in rows) for step in range(100) for rows in rows_drawn(draws, step, units=60)
    )
    assert set(counts) == set(itertools.combinations(range(4), 2))
    assert min(binomtest(count, 6000, 1 / 6).pvalue for count in counts.values()) > FALSE_ALARM / 6


# --- micro-batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [1, 2, 3, 7, 50])
def test_micro_batches_have_a_fixed_shape_and_hold_the_same_draw(units: int) -> None:
    draws = make_draws(make_store([1, 3, 2] * 7), make_mechanism(21, 10), rows_per_unit=2)
    for step in range(10):
        pieces = list(draws.batch(step).microbatches(units))
        assert all(piece.inputs.shape == (units * 2, 1, 2, 2) for piece in pieces)
        assert all(piece.targets.shape == (units * 2,) for piece in pieces)
        assert all(piece.row_weights_UR.shape == (units, 2) for piece in pieces)
        assert rows_drawn(draws, step, units=units) == rows_drawn(draws, step, units=5)


def test_padding_holds_zeros_and_no_ones_picture() -> None:
    store = make_store([1, 1, 1])
    draws = ImageBatches(
        mechanism=make_mechanism(3, 3),
        store=store,
        normalisation=fixed_normalisation(1),
        keys=KEYS,
        rows_per_unit=2,
    )
    (piece,) = draws.batch(0).microbatches(5)
    padding = piece.row_weights_UR.reshape(-1) == 0
    assert padding.tolist() == [False, True] * 3 + [True] * 4
    assert (piece.inputs[padding] == 0).all()
    assert (piece.targets[padding] == 0).all()
    assert torch.isfinite(piece.inputs).all()


def test_inputs_are_normalised_and_targets_are_the_labels_of_the_rows() -> None:
    store = make_store([1] * 30)
    normalisation = Normalisation(mean=(0.3,), std=(0.2,), source="fixed")
    draws = ImageBatches(mechanism=make_mechanism(30, 15), store=store, normalisation=normalisation, keys=KEYS)
    units = torch.from_numpy(draws.units(4))
    (piece,) = draws.batch(4).microbatches(30)
    expected = (store.images[units].float() / 255 - 0.3) / 0.2
    # float32 arithmetic in another order: a few roundings of values up to 4.
    torch.testing.assert_close(piece.inputs[: len(units)], expected, rtol=1e-6, atol=2e-6)
    assert torch.equal(piece.targets[: len(units)], store.labels[units])


def test_a_batch_shows_nothing_of_itself_in_print() -> None:
    batch = make_draws(make_store([1] * 9), make_mechanism(9, 9)).batch(0)
    assert repr(batch) == "DrawnBatch(Sampling(method='poisson', sample_rate=1.0), sensitive)"


def test_impossible_sizes_are_refused() -> None:
    store, mechanism = make_store([1]), make_mechanism(1, 1)
    with pytest.raises(ArgumentError, match="rows_per_unit must be a whole number >= 1"):
        make_draws(store, mechanism, rows_per_unit=0)
    with pytest.raises(ArgumentError, match="units must be a whole number >= 1"):
        next(make_draws(store, mechanism).batch(0).microbatches(0))
