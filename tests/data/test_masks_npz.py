"""Images and masks in an .npz file, and the numbers that become pixels and classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpvision.data import LoadOptions, hold_out, load, load_one
from dpvision.data.images import mask_bytes, resized_masks, windowed
from dpvision.errors import BadFile, DataError
from dpvision.privacy.randomness import Keys

RANDOM = np.random.default_rng(0)
LITS = Path.home() / ".cache" / "dpvision" / "lits-liver-128" / "lits_liver_128.npz"
GREY = RANDOM.integers(0, 256, (6, 4, 5), dtype=np.uint8)
MASKS = RANDOM.integers(0, 3, (6, 4, 5), dtype=np.uint8)
PATIENTS = np.array([7, 7, 3, 7, 9, 3])


def write_npz(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def test_an_npz_holds_images_masks_and_patients(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", images=GREY, masks=MASKS, volume=PATIENTS)
    options = LoadOptions(segmentation=True, unit_column="volume", mask_classes="classes")
    store = load(path, options).train
    assert torch.equal(store.labels, torch.from_numpy(MASKS))
    assert store.unit_of_row.tolist() == [0, 0, 1, 0, 2, 1]
    assert store.class_names == ("background", "1", "2")
    by_rows = load(path, options.model_copy(update={"units": "rows", "mask_classes": "merged"})).train
    assert (by_rows.num_units, by_rows.owners) == (6, tuple(map(str, PATIENTS)))
    assert torch.equal(by_rows.labels, torch.from_numpy((MASKS > 0).astype(np.uint8)))
    one = load_one(path, options, class_names=["air", "liver", "tumour"])
    assert (one.num_units, one.owners, one.class_names) == (6, by_rows.owners, ("air", "liver", "tumour"))
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.1"):
        load_one(path, options, class_names=["air", "liver"])
    with pytest.raises(DataError, match="merged masks have 2 classes, the model has 3"):
        load_one(path, options.model_copy(update={"mask_classes": "merged"}), class_names=["air", "liver", "tumour"])


def test_an_npz_may_bring_a_test_part_with_owners_and_names_of_classes(tmp_path: Path) -> None:
    path = write_npz(
        tmp_path / "a.npz", images=GREY, masks=MASKS[..., None], test_images=GREY[:2], test_masks=MASKS[:2],
        patient=PATIENTS, test_patient=np.array(["x", "y"]), class_names=np.array(["air", "liver", "tumour"]),
    )  # fmt: skip
    splits = load(path, LoadOptions(segmentation=True, unit_column="patient", mask_classes="classes", image_size=8))
    assert splits.test is not None
    assert (splits.test.owners, splits.test.num_units) == (("x", "y"), 2)
    assert splits.test.labels.shape == (2, 8, 8)
    assert splits.train.class_names == ("air", "liver", "tumour")
    assert load(path, LoadOptions(segmentation=True)).train.class_names == ("background", "foreground")


@pytest.mark.parametrize("dtype", [np.int16, np.float32, ">i2", np.float64, np.int64])
def test_a_window_turns_intensities_into_bytes(tmp_path: Path, dtype: Any) -> None:
    images = np.array([[[-1000, -160, 40, 240, 3000]]]).astype(dtype).repeat(2, 0)
    path = write_npz(tmp_path / "a.npz", images=images, masks=np.zeros((2, 1, 5), bool))
    store = load(path, LoadOptions(segmentation=True, window=(-160.0, 240.0))).train
    assert store.images[1, 0, 0].tolist() == [0, 0, 128, 255, 255]
    with pytest.raises(DataError, match="give the window of intensities"):
        load(path, LoadOptions(segmentation=True))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": GREY}, "no array named masks"),
        ({"images": GREY, "labels": np.arange(6)}, "no array named masks"),
        ({"images": GREY, "masks": MASKS[:5]}, r"masks \(5, 4, 5\) don't match 6 images \(4, 5\)"),
        ({"images": GREY, "masks": MASKS.transpose(0, 2, 1)}, "don't match 6 images"),
        ({"images": GREY, "masks": MASKS[:, 0]}, r"masks must be \(N, H, W\)"),
        ({"images": GREY, "masks": MASKS - 0.5}, "got fractions, NaN or infinity"),
        ({"images": GREY, "masks": MASKS.astype(np.int8) - 1}, "numbers >= 0, got -1"),
        ({"images": GREY, "masks": MASKS.astype(np.complex64)}, "must hold whole numbers"),
    ],
)
def test_arrays_that_make_no_pairs_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(write_npz(tmp_path / "a.npz", **arrays), LoadOptions(segmentation=True))
    assert "\n" not in str(caught.value)


def test_a_nan_pixel_is_refused_whatever_the_window(tmp_path: Path) -> None:
    images = GREY.astype(np.float32)
    images[3, 2, 1] = np.nan
    path = write_npz(tmp_path / "a.npz", images=images, masks=MASKS)
    with pytest.raises(DataError, match="NaN or infinite intensities"):
        load(path, LoadOptions(segmentation=True, window=(0.0, 255.0)))


def test_only_foreground_decides_each_row_of_an_npz_by_itself(tmp_path: Path) -> None:
    masks = MASKS.copy()
    masks[[0, 4]] = 0
    path = write_npz(tmp_path / "a.npz", images=GREY, masks=masks, patient=PATIENTS)
    options = LoadOptions(segmentation=True, unit_column="patient", only_foreground=True)
    store = load(path, options).train
    assert store.owners == ("7", "3", "7", "3")
    assert store.unit_of_row.tolist() == [0, 1, 0, 1]
    with pytest.raises(DataError, match="must hold its masks itself"):
        load(path, options.model_copy(update={"masks": tmp_path}))


# --- numbers ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    low=st.integers(-2000, 2000),
    width=st.integers(1, 4000),
    values=st.lists(st.integers(-5000, 5000), min_size=1, max_size=30),
)
def test_a_window_keeps_order_and_ends(low: int, width: int, values: list[int]) -> None:
    window = (float(low), float(low + width))
    found = windowed(np.array([sorted(values)], dtype=np.int16), window)[0].astype(int)
    assert (np.diff(found) >= 0).all()
    for value, byte in zip(sorted(values), found, strict=True):
        exact = min(max((value - low) / width, 0), 1) * 255
        assert abs(byte - exact) <= 0.5 + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from(["u1", "i2", "f4", "f8"]))
def test_masks_become_classes_or_are_refused_but_never_other_classes(values: list[int], dtype: str) -> None:
    numbers = np.array(values).clip(0, 255 if dtype == "u1" else 300).astype(dtype)
    np.testing.assert_array_equal(mask_bytes(numbers, "merged"), numbers != 0)
    if numbers.max() >= 200:
        with pytest.raises(BadFile, match="has no such class"):
            mask_bytes(numbers, "classes")
    else:
        np.testing.assert_array_equal(mask_bytes(numbers, "classes"), numbers)


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 9), width=st.integers(1, 9), size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    squash=st.booleans(),
)  # fmt: skip
def test_resized_masks_have_the_size_and_classes_that_were_there(
    height: int, width: int, size: tuple[int, int], squash: bool
) -> None:
    mask = torch.arange(height * width, dtype=torch.uint8).reshape(1, height, width)
    found = resized_masks(mask, size, squash=squash)
    assert found.shape == (1, *size)
    assert set(found.flatten().tolist()) <= set(mask.flatten().tolist())
    if size == (height, width):
        assert torch.equal(found, mask)


# --- real files ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not LITS.exists(), reason="the liver slices are not on this machine")
def test_the_liver_slices_are_thirty_three_patients() -> None:
    store = load(LITS, LoadOptions(segmentation=True, unit_column="volume", image_size=32)).train
    assert (store.num_rows, store.num_units, store.image_shape) == (2138, 33, (1, 32, 32))
    assert 0.05 < float(store.labels.float().mean()) < 0.3
    train, test = hold_out(store, fraction=0.2, keys=Keys.from_seed(1))
    assert not set(train.owners or ()) & set(test.owners or ())
