"""Files with several pages, 16 bits, MedMNIST files, and what a run says of names that look like people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpvision.config import parse_config
from dpvision.data import LoadOptions, load, load_images
from dpvision.data.units import owner_hint, require_real_owners
from dpvision.errors import ArgumentError, DataError
from dpvision.privacy.randomness import Keys
from dpvision.training.prepare import Prepared, prepare

KEYS = Keys.from_seed(5)


def shade(value: int) -> Image.Image:
    return Image.fromarray(np.full((8, 8), value, np.uint8))


def prepared(source: Path, **data: Any) -> Prepared:
    privacy = {"target_epsilon": 8.0, "num_units": 8, "delta": 1e-2, "expected_batch_size": 4.0, "steps": 2}
    values = {"source": str(source), "image_size": 8, "holdout_fraction": 0.5, **data}
    return prepare(parse_config({"data": values, "model": {"name": "linear"}, "privacy": privacy}), KEYS)


# ---- validation


def test_validation_holds_training_images_out_and_does_not_read_the_test_set(tmp_path: Path) -> None:
    images, labels = np.arange(40, dtype=np.uint8)[:, None, None] + np.zeros((8, 8), np.uint8), np.arange(40) % 2
    tests = {"x_test": images[:4] + 200, "y_test": labels[:4]}
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, **tests)
    usual = prepared(tmp_path / "a.npz")
    assert usual.splits.test.images.min() >= 200
    found = prepared(tmp_path / "a.npz", validation=True)
    assert found.splits.held_out
    ours, theirs = (set(split.images[:, 0, 0, 0].tolist()) for split in (found.splits.train, found.splits.test))
    assert ours.isdisjoint(theirs)
    assert ours | theirs == set(range(40))
    assert any("the test set is not read: 50% of the units are held out" in note for note in found.notes)


def test_validation_excludes_a_test_set(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="leave test out, or validation"):
        parse_config({"data": {"source": "a", "test": "b", "validation": True}, "privacy": {"target_epsilon": 1.0}})


# ---- several pages


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """Eight files of three pages in two classes."""
    for number in range(8):
        folder = tmp_path / "scans" / ("well", "ill")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        first, *others = (shade(20 * number + page) for page in range(3))
        first.save(folder / f"{number}.tif", save_all=True, append_images=others)
    return tmp_path / "scans"


def test_pages_without_an_owner_are_refused_with_the_flags_that_help(pages: Path) -> None:
    with pytest.raises(DataError, match=r"8 files have several frames or pages: .*Name their owner, take --frames all"):
        load(pages)
    assert load(pages, LoadOptions(frames="first")).train.num_rows == 8


def test_all_pages_of_a_file_are_one_unit(pages: Path) -> None:
    store = load(pages, LoadOptions(frames="all")).train
    assert (store.num_rows, store.num_units) == (24, 8)
    assert store.images[:3, 0, 0, 0].tolist() == [20, 21, 22]
    made = prepared(pages, frames="all")
    assert (made.config.privacy.privacy_unit, made.config.data.units) == ("volume", "owners")


def test_all_pages_are_read_where_their_owner_is_named(pages: Path) -> None:
    store = load(pages, LoadOptions(unit_pattern=r"^(\d)")).train
    assert (store.num_rows, store.num_units, store.row_names[0]) == (24, 8, "ill/1.tif#1")


def test_every_page_is_predicted(pages: Path) -> None:
    images, names, _ = load_images([pages / "well" / "0.tif"], image_shape=(1, 8, 8))
    assert images[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert names[2].endswith("0.tif#3")


# ---- 16 bits


def test_a_window_shows_twelve_bits_that_are_stored_in_sixteen(tmp_path: Path) -> None:
    for name, value in (("well", 0), ("ill", 4095)):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((8, 8), value, np.uint16)).save(tmp_path / name / "a.png")
    assert load(tmp_path).train.images[:, 0, 0, 0].tolist() == [16, 0]
    assert load(tmp_path, LoadOptions(window=(0.0, 4095.0))).train.images[:, 0, 0, 0].tolist() == [255, 0]


def test_nearly_black_images_are_pointed_out(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / ("well", "ill")[number % 2]).mkdir(exist_ok=True)
        name = tmp_path / ("well", "ill")[number % 2] / f"scan{chr(97 + number)}.png"
        Image.fromarray(np.full((8, 8), 4095, np.uint16)).save(name)
    assert any("no pixel is brighter than 16 of 255: give --window" in note for note in prepared(tmp_path).notes)
    assert not any("brighter" in note for note in prepared(tmp_path, window=(0, 4095)).notes)


# ---- MedMNIST


def test_the_validation_part_of_medmnist_is_not_used_and_the_run_says_so(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {}
    for part, count, start in (("train", 30, 0), ("val", 6, 100), ("test", 9, 200)):
        arrays[f"{part}_images"] = np.full((count, 28, 28), start, np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count) % 3)[:, None].astype(np.uint8)
    np.savez(tmp_path / "bloodmnist.npz", **arrays)
    splits = load(tmp_path / "bloodmnist.npz", LoadOptions(classes_are_public=False))
    assert splits.test is not None
    assert (splits.train.num_rows, splits.test.num_rows, splits.train.num_classes) == (30, 9, 3)
    assert int(splits.train.images.max()) == 0
    assert splits.unused.startswith("val_images is neither trained on nor tested on")
    assert splits.unused in prepared(tmp_path / "bloodmnist.npz").notes
    arrays["train_labels"] = np.zeros((30, 14), np.uint8)
    np.savez(tmp_path / "chestmnist.npz", **arrays)
    with pytest.raises(DataError, match="are several findings an image: train on them with --findings"):
        load(tmp_path / "chestmnist.npz", LoadOptions(classes="a,b,c"))
    named = load(tmp_path / "bloodmnist.npz", LoadOptions(classes="a,b,c"))
    assert named.train.class_names == ("a", "b", "c")


# ---- people in file names


@pytest.mark.parametrize(
    ("files", "flag"),
    [
        (["ill/p7_001.png", "ill/p7_002.png", "well/p8_001.png", "well/p8_002.png"], "--unit-pattern"),
        (["ill/00000013_005.png", "ill/00000013_006.png", "well/00000017_000.png"], "--unit-pattern"),
        (
            ["ill/person1_1.jpg", "ill/person1_2.jpg", "ill/person2_1.jpg", "x/IM-0115.jpg"],
            "--unit-pattern",
        ),
        (["ill/patient1/a.png", "ill/patient1/b.png", "well/patient2/a.png"], "--unit-folder-level 2"),
    ],
)
def test_names_that_look_like_people_are_pointed_out_with_a_flag(files: list[str], flag: str) -> None:
    hint = owner_hint(files)
    assert hint is not None
    assert "each image is protected by itself" in hint
    assert flag in hint


@pytest.mark.parametrize(
    "files",
    [
        ["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"],
        ["cat/scan_1.png", "cat/scan_2.png", "dog/scan_3.png"],
        ["n01440764/n01440764_10.JPEG", "n01440764/n01440764_11.JPEG", "n02102040/n02102040_7.JPEG"],
        [],
    ],
)
def test_ordinary_names_are_not_pointed_out(files: list[str]) -> None:
    assert owner_hint(files) is None


def test_a_run_says_that_names_look_like_people_unless_a_unit_is_named(tmp_path: Path) -> None:
    for number in range(16):
        folder = tmp_path / ("well", "ill")[number % 2]
        folder.mkdir(exist_ok=True)
        shade(200).save(folder / f"p{number // 4}_{number}.png")
    assert any("look like ids of people" in note for note in prepared(tmp_path).notes)
    named = prepared(tmp_path, unit_pattern=r"^(p\d+)_")
    assert not any("look like ids of people" in note for note in named.notes)


@pytest.mark.parametrize("name", ["", "ANON", "anonymised", "N/A", "nan", "  ", "--", "xxx", "De-identified", "None"])
def test_names_of_no_one_own_nothing(name: str) -> None:
    with pytest.raises(DataError, match="1 of 3 images have no owner"):
        require_real_owners(["p1", name, "p2"], "the column patient")


def test_pseudonyms_are_owners() -> None:
    require_real_owners(["ANON001", "ANON002", "0", "x1", "Nancy"], "the column patient")
