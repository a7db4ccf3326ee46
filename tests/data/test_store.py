"""The store, its normalisation, its options and what messages show."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dpvision.data import (
    ImageStore,
    LoadOptions,
    Normalisation,
    dense_units,
    fixed_normalisation,
    hold_out,
    store_of_arrays,
)
from dpvision.data.images import fit
from dpvision.errors import ArgumentError, DataError, shown, some_of
from dpvision.privacy.randomness import Keys


def make_store(rows: int = 6, *, units: list[int] | None = None, channels: int = 1) -> ImageStore:
    images = np.random.default_rng(0).integers(0, 256, (rows, channels, 4, 6), dtype=np.uint8)
    return store_of_arrays(
        images=images, labels=np.arange(rows) % 2, class_names=["a", "b"], name="made", unit_names=units
    )


def test_each_row_is_its_own_unit_unless_told_otherwise() -> None:
    assert make_store(3).unit_of_row.tolist() == [0, 1, 2]
    grouped = make_store(5, units=[7, 7, 3, 7, 9])
    assert grouped.unit_of_row.tolist() == [0, 0, 1, 0, 2]
    assert (grouped.num_units, grouped.num_rows) == (3, 5)


def test_units_are_numbered_by_first_appearance_so_that_a_new_one_renumbers_nobody() -> None:
    assert dense_units(["z", "b", "z", "a"]).tolist() == [0, 1, 0, 2]
    assert dense_units(["z", "b", "z", "a", "A"]).tolist() == [0, 1, 0, 2, 3]


def test_rows_of_units_lists_each_row_once_under_its_unit() -> None:
    offsets, order = make_store(6, units=[5, 1, 5, 2, 1, 5]).rows_of_units
    assert [order[a:b].tolist() for a, b in pairwise(offsets)] == [[0, 2, 5], [1, 4], [3]]


def test_selected_units_keep_their_rows_labels_and_names() -> None:
    store = make_store(6, units=[5, 1, 5, 2, 1, 5])
    part = store.select_units([2, 0])
    assert part.row_names == ("row 0", "row 2", "row 3", "row 5")
    assert part.unit_of_row.tolist() == [1, 1, 0, 1]
    assert torch.equal(part.images, store.images[[0, 2, 3, 5]])
    assert torch.equal(part.labels, store.labels[[0, 2, 3, 5]])


def test_the_fingerprint_changes_with_any_pixel_label_unit_or_shape() -> None:
    store = make_store()
    images, labels, units = store.images.clone(), store.labels.clone(), store.unit_of_row.clone()
    images[0, 0, 0, 0] ^= 1
    labels[0] ^= 1
    units[5] = 0
    others = [
        replace(store, images=images),
        replace(store, labels=labels),
        replace(store, unit_of_row=units),
        replace(store, images=store.images.reshape(6, 1, 6, 4)),
        store.select_units(range(5)),
    ]
    assert make_store().fingerprint() == store.fingerprint()
    assert len({store.fingerprint(), *(other.fingerprint() for other in others)}) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(6, 1, 4, 6)}, "images must be uint8"),
        ({"images": torch.zeros(6, 4, 6, dtype=torch.uint8)}, "images must be uint8"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, "labels must be int64"),
        ({"labels": torch.full((6,), 2)}, r"labels must lie in 0\.\.1"),
        ({"labels": torch.full((6,), -1)}, r"labels must lie in 0\.\.1"),
        ({"unit_of_row": torch.full((6,), -1)}, "unit_of_row must be >= 0"),
        ({"row_names": ("one",)}, "row_names must name 6 rows"),
    ],
)
def test_a_store_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(make_store(), **change)


def test_a_store_prints_no_pixels() -> None:
    assert repr(make_store()) == "ImageStore('made', 6 rows of (1, 4, 6), 6 units)"


# --- normalisation ---------------------------------------------------------------------------------------------------


def test_normalisation_maps_bytes_by_mean_and_std_of_each_channel() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)
    constants = Normalisation(mean=(0.1, 0.2, 0.5), std=(0.5, 0.2, 0.25), source="fixed")
    # float32 with one rounding more than the formula.
    torch.testing.assert_close(constants.apply(images).flatten(), torch.tensor([-0.2, 0.0, 2.0]), atol=1e-6, rtol=0)


def test_fixed_constants_use_no_data() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    assert fixed_normalisation(1).apply(images).flatten().tolist() == [-1.0, 1.0]
    assert fixed_normalisation(1, mean=0, std=1).apply(images).flatten().tolist() == [0.0, 1.0]
    assert fixed_normalisation(1).source == "fixed"


def test_constants_follow_a_change_of_channels() -> None:
    grey = Normalisation(mean=(0.3,), std=(0.2,), source="published")
    assert grey.for_channels(3).mean == (0.3, 0.3, 0.3)
    colour = Normalisation(mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2), source="published")
    assert colour.for_channels(1).mean == pytest.approx((0.299 * 0.5 + 0.587 * 0.4 + 0.114 * 0.3,))
    assert colour.for_channels(1).std == pytest.approx((0.2,))
    with pytest.raises(ArgumentError, match="can't serve 2 channels"):
        colour.for_channels(2)


def test_normalisation_survives_json_and_refuses_nonsense() -> None:
    constants = Normalisation(mean=(0.1,), std=(0.5,), source="released")
    assert Normalisation.from_dict(constants.to_dict()) == constants
    for change in ({"std": [0.0]}, {"std": [float("nan")]}, {"source": "guessed"}, {"mean": [0.1, 0.2]}, {"more": 1}):
        with pytest.raises(ArgumentError):
            Normalisation.from_dict({**constants.to_dict(), **change})
    with pytest.raises(ArgumentError, match="not a normalisation"):
        Normalisation.from_dict({"mean": [0.1]})
    with pytest.raises(ArgumentError, match="uint8"):
        constants.apply(torch.zeros(1, 1, 2, 2))


# --- options and shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0}, "greater than or equal to 1"),
        ({"image_size": 10**6}, "less than or equal to 4096"),
        ({"channels": 2}, "should be 1 or 3"),
        ({"unit_folder_level": 0}, "greater than or equal to 1"),
        ({"unit_folder_level": 2, "unit_column": "patient"}, "choose one"),
    ],
)
def test_nonsense_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LoadOptions(**options)


def test_arrays_are_scaled_to_cover_the_size_and_cropped_in_the_middle() -> None:
    images = np.zeros((2, 1, 4, 8), dtype=np.uint8)
    images[:, :, :, 2:6] = 200
    store = store_of_arrays(images=images, labels=np.zeros(2), class_names=["a", "b"], name="made")
    cropped = fit(store, LoadOptions(image_size=4))
    assert cropped.image_shape == (1, 4, 4)
    assert (cropped.images == 200).all()
    squashed = fit(store, LoadOptions(image_size=4, squash=True)).images
    assert squashed.float().mean() == pytest.approx(100, abs=2)
    assert fit(store, LoadOptions(image_size=(6, 12))).image_shape == (1, 6, 12)
    assert fit(store, LoadOptions()) is store


def test_grey_arrays_become_colour_and_colour_arrays_become_grey() -> None:
    grey = make_store(channels=1)
    assert torch.equal(fit(grey, LoadOptions(channels=3)).images[:, 2:], grey.images)
    colour = make_store(channels=3)
    luma = (colour.images.float() * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    # The integer weights round once more.
    assert (fit(colour, LoadOptions(channels=1)).images.float() - luma).abs().max() <= 0.51
    empty = colour.select_units([])
    assert fit(empty, LoadOptions(channels=1, image_size=9)).image_shape == (1, 9, 9)


# --- held-out part ---------------------------------------------------------------------------------------------------


def test_hold_out_never_splits_a_unit_and_loses_nobody() -> None:
    units = np.random.default_rng(1).integers(0, 40, 300).tolist()
    store = make_store(300, units=units)
    train, test = hold_out(store, fraction=0.3, keys=Keys.from_seed(1))
    names = [set(part.row_names) for part in (train, test)]
    assert names[0] | names[1] == set(store.row_names)
    unit_of = dict(zip(store.row_names, units, strict=True))
    assert not {unit_of[name] for name in names[0]} & {unit_of[name] for name in names[1]}
    assert train.num_units + test.num_units == store.num_units


def test_a_unit_added_at_the_end_moves_nobody_across_the_hold_out() -> None:
    keys = Keys.from_seed(3)
    small = hold_out(make_store(80), fraction=0.25, keys=keys)
    large = hold_out(make_store(81), fraction=0.25, keys=keys)
    for before, after in zip(small, large, strict=True):
        assert set(after.row_names) - set(before.row_names) <= {"row 80"}
        assert set(before.row_names) <= set(after.row_names)


def test_hold_out_refuses_what_leaves_one_part_empty() -> None:
    with pytest.raises(DataError, match=r"too few units to hold out a fraction of 0\.5: one part"):
        hold_out(make_store(1), fraction=0.5, keys=Keys.from_seed(1))
    with pytest.raises(ArgumentError, match="fraction must lie strictly between"):
        hold_out(make_store(), fraction=1.0, keys=Keys.from_seed(1))


# --- wording ---------------------------------------------------------------------------------------------------------


def test_names_in_messages_have_no_control_characters_and_an_end() -> None:
    assert shown("a\x1b[31mb\n\u202ec\udc80") == "a\\x1b[31mb\\n\\u202ec\\udc80"
    assert len(shown("x" * 1000)) == 121
    assert some_of(["a", "b"]) == "a, b"
    assert some_of(["a", "b", "c", "d\n", "e"]) == "a, b, c and 2 more"
