"""Downsampled ImageNet: batches become one store, planes and classes are where they belong, damage is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpvision.config import RunConfig
from dpvision.data import LoadOptions, load
from dpvision.data.splits import load_splits
from dpvision.errors import DataError
from dpvision.privacy.randomness import Keys

SIDE = 4


def batch(path: Path, first: int, rows: int, **changes: Any) -> None:
    """Write images whose red, green and blue are 10 n + 1, 2, 3, with a ramp along each row of pixels."""
    planes = 10 * np.arange(first, first + rows)[:, None, None, None] + np.array([1, 2, 3])[:, None, None]
    images = (planes + np.zeros((SIDE, SIDE))).astype(np.uint8)
    images[..., -1] = 255  # the last column of each plane
    labels = np.arange(first, first + rows) % 1000 + 1
    np.savez(path, **{"data": images.reshape(rows, -1), "labels": labels, "mean": np.zeros(3 * SIDE**2), **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "imagenet32"
    place.mkdir()
    batch(place / "train_data_batch_1.npz", 0, 5)
    batch(place / "train_data_batch_2.npz", 5, 3)
    batch(place / "val_data.npz", 0, 2)
    return place


def test_batches_become_one_store_of_a_thousand_classes(folder: Path) -> None:
    splits = load(folder)
    assert splits.test is not None
    assert (splits.train.num_rows, splits.test.num_rows, splits.train.num_classes) == (8, 2, 1000)
    assert splits.train.image_shape == (3, SIDE, SIDE)
    assert splits.train.labels.tolist() == list(range(8))
    assert splits.train.class_names[0] == "1"
    assert splits.train.images[6, :, 0, 0].tolist() == [61, 62, 63]
    assert splits.train.images[6, 0, :, -1].tolist() == [255] * SIDE
    assert load(folder, LoadOptions(image_size=2)).train.image_shape == (3, 2, 2)


def test_without_validation_images_a_part_is_held_out(folder: Path) -> None:
    (folder / "val_data.npz").unlink()
    assert load(folder).test is None
    config = {"data": {"source": str(folder), "holdout_fraction": 0.5}, "privacy": {"enabled": False}}
    splits = load_splits(RunConfig.model_validate(config), Keys.from_seed(1))
    assert splits.held_out
    assert splits.train.num_rows + splits.test.num_rows == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.array([0, 1, 2])}, "from 1 to 1000"),
        ({"labels": np.array([1, 2, 1001])}, "from 1 to 1000"),
        ({"labels": np.array(["1", "2", "3"])}, "from 1 to 1000"),
        ({"labels": np.array([1, 2])}, "three square planes"),
        ({"data": np.zeros((3, 3 * SIDE**2))}, "three square planes"),
        ({"data": np.zeros((3, 50), np.uint8)}, "three square planes"),
        ({"data": np.zeros((3, 3 * 25), np.uint8)}, "5 pixels, the first batch of 4"),
    ],
)
def test_batches_that_are_something_else_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    batch(folder / "train_data_batch_2.npz", 5, 3, **changes)
    with pytest.raises(DataError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_damaged_and_foreign_files_are_named(folder: Path) -> None:
    np.savez(folder / "train_data_batch_2.npz", images=np.zeros(3))
    with pytest.raises(DataError, match="has no array named labels"):
        load(folder)
    (folder / "train_data_batch_2.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"can.t be read as \.npz"):
        load(folder)


def test_validation_images_of_another_size_are_refused(folder: Path) -> None:
    np.savez(folder / "val_data.npz", data=np.zeros((1, 12), np.uint8), labels=np.array([1]))
    with pytest.raises(DataError, match="not \\(4, 4\\)"):
        load(folder)
