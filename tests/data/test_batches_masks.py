"""Draws of pictures with masks: a mask goes where its picture goes, and a patient is one unit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpvision.data import ImageBatches, ImageStore, Normalisation, ViewsConfig, store_of_arrays
from dpvision.data.augmentation import Padding, make_views, rotate
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import Microbatch
from draws_support import draws_at_rate

SIDE = 12
KEYS = Keys.from_seed(4, "test of masks in draws")


def blobs(rows: int, seed: int = 0) -> np.ndarray:
    """Masks with one large rectangle each, somewhere."""
    random = np.random.default_rng(seed)
    masks = np.zeros((rows, SIDE, SIDE), np.uint8)
    for mask in masks:
        top, left = random.integers(0, 5, 2)
        mask[top : top + 6, left : left + 7] = 1
    return masks


def store_of(rows_of_patient: list[int], *, seed: int = 0) -> ImageStore:
    """Pictures that show their masks: white where the mask is 1."""
    masks = blobs(sum(rows_of_patient), seed)
    owners = np.repeat([f"patient {number}" for number in range(len(rows_of_patient))], rows_of_patient)
    return store_of_arrays(
        images=(masks * np.uint8(255))[:, None],
        labels=masks,
        class_names=["background", "foreground"],
        name="made",
        unit_names=owners if len(owners) else None,
    )


draws_of = partial(draws_at_rate, keys=KEYS, normalisation=Normalisation(mean=(0.0,), std=(1.0,), source="fixed"))


def drawn(draws: ImageBatches, step: int = 0, *, units: int = 8) -> list[Microbatch]:
    return list(draws.batch(step).microbatches(units))


def test_targets_are_whole_numbers_one_for_each_pixel() -> None:
    store = store_of([1] * 8)
    (piece,) = drawn(draws_of(store))
    assert (piece.targets.dtype, piece.targets.shape) == (torch.int64, (8, SIDE, SIDE))
    assert torch.equal(piece.targets, store.labels.long())


@pytest.mark.parametrize("padding", ["reflect", "symmetric", "zeros"])
def test_crops_and_mirrors_move_the_mask_with_its_picture(padding: Padding) -> None:
    views = ViewsConfig(count=3, crop_padding=5, padding=padding, flip=0.5)
    for piece in drawn(draws_of(store_of([2] * 16), views, rows_per_unit=2)):
        assert torch.equal(piece.inputs[:, 0].round().long(), piece.targets)


@pytest.mark.parametrize("padding", ["reflect", "zeros"])
def test_a_rotation_moves_the_mask_with_its_picture_and_mixes_no_classes(padding: Padding) -> None:
    store = store_of([1] * 16)
    store = replace(store, labels=store.labels * 4, class_names=tuple("abcde"))
    views = ViewsConfig(count=2, rotation=40, padding=padding)
    pieces = drawn(draws_of(store, views))
    inputs, targets = torch.cat([p.inputs[:, 0] for p in pieces]), torch.cat([p.targets for p in pieces])
    assert set(targets.flatten().tolist()) == {0, 4}
    # Bilinear and nearest may differ along the edge of the rectangle: 26 of 144 pixels touch it.
    assert ((inputs > 0.5) == (targets == 4)).float().mean() > 0.93
    assert not torch.equal(targets[::2], store.labels.long())


def test_a_quarter_turn_of_classes_is_exact_and_outside_is_background() -> None:
    mask = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 4, 4) + 7
    quarter = rotate(mask, np.array([math.pi / 2]), outside="zeros", nearest=True)
    assert torch.equal(quarter, mask.rot90(-1, (2, 3)))
    eighth = rotate(torch.full((1, 1, 9, 9), 5, dtype=torch.uint8), np.array([math.pi / 4]), outside="zeros",
                    nearest=True)  # fmt: skip
    assert set(eighth.flatten().tolist()) == {0, 5}
    assert eighth[0, 0, 0, 0] == 0


def test_erasing_leaves_the_mask() -> None:
    store = store_of([1] * 8)
    (piece,) = drawn(draws_of(store, ViewsConfig(erasing=1.0)))
    assert torch.equal(piece.targets, store.labels.long())
    assert not torch.equal(piece.inputs[:, 0].long(), piece.targets)


def test_padding_rows_have_blank_masks() -> None:
    store = store_of([1, 3, 1])
    store.labels[0] = 1  # the row that padding rows are made of
    views = ViewsConfig(count=2, crop_padding=2, flip=0.5)
    (piece,) = drawn(draws_of(store, views, rows_per_unit=2), units=5)
    absent = piece.row_weights_UR.reshape(-1) == 0
    assert int(absent.sum()) == 20 - 8
    assert not piece.targets[absent].any()
    assert not piece.inputs[absent].any()
    assert piece.targets[~absent].flatten(1).any(1).all()


@settings(max_examples=25, deadline=None)
@given(slices=st.integers(1, 60), rows_per_unit=st.integers(1, 5), views=st.sampled_from([1, 3]))
def test_a_patient_gives_few_slices_whose_weights_sum_to_one(slices: int, rows_per_unit: int, views: int) -> None:
    chosen = ViewsConfig(count=views, flip=0.5)
    draws = draws_of(store_of([1, slices, 2]), chosen, rows_per_unit=rows_per_unit)
    (piece,) = drawn(draws, units=4)
    assert piece.row_weights_UR.shape == (4, rows_per_unit * views)
    there = (piece.row_weights_UR > 0).sum(1).tolist()
    assert there == [views * min(rows, rows_per_unit) for rows in (1, slices, 2, 0)]
    torch.testing.assert_close(piece.row_weights_UR.sum(1), torch.tensor([1.0, 1.0, 1.0, 0.0]))


def by_patient(draws: ImageBatches, step: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    units = draws.units(step)
    pieces = drawn(draws, step, units=3)
    inputs, targets = (
        torch.cat([getattr(p, name).reshape(3, -1, *getattr(p, name).shape[1:]) for p in pieces])
        for name in ("inputs", "targets")
    )
    return {int(unit): (inputs[place], targets[place]) for place, unit in enumerate(units)}


def test_a_patient_more_moves_no_other() -> None:
    views = ViewsConfig(count=2, crop_padding=3, flip=0.5, rotation=20, erasing=0.5)
    sizes = [3, 1, 7, 2, 5]
    whole = store_of([*sizes, 9])
    alone = draws_of(whole.select_units(range(5)), views, rate=0.6, rows_per_unit=2)
    beside = draws_of(whole, views, rate=0.6, rows_per_unit=2)
    joined = 0
    for step in range(10):
        before, after = by_patient(alone, step), by_patient(beside, step)
        assert before.keys() == after.keys() - {5}
        joined += 5 in after
        for unit, parts in before.items():
            assert all(torch.equal(a, b) for a, b in zip(parts, after[unit], strict=True))
    assert joined > 0


def test_many_classes_survive_every_view() -> None:
    masks = torch.randint(0, 200, (4, 1, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    views = ViewsConfig(count=2, crop_padding=3, flip=0.5, rotation=90)
    words = KEYS.bits(4 * 2 * 5, "augmentation", 0).reshape(4, 2, 5)
    moved = make_views(masks, views, words, classes=True)
    for number, view in enumerate(moved):
        assert set(view.flatten().tolist()) <= set(masks[number // 2].flatten().tolist())
