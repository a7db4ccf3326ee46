"""Pairs of images and masks: by name, by rule, and each in its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from dpvision.data import ImageStore, LoadOptions, hold_out, load, load_one, store_of_arrays
from dpvision.data.images import fit
from dpvision.errors import DataError
from dpvision.privacy.randomness import Keys

RANDOM = np.random.default_rng(0)


def disc(rows: int = 8, columns: int = 8) -> NDArray[np.uint8]:
    mask = np.zeros((rows, columns), dtype=np.uint8)
    mask[2:5, 3:6] = 1
    return mask


def write_pair(root: Path, name: str, *, mask: NDArray[Any] | None = None, mask_name: str | None = None) -> None:
    """A grey image and its mask; the image shows where the mask is."""
    mask = disc() if mask is None else mask
    for path, values in (
        (root / "images" / f"{name}.png", (mask > 0) * np.uint8(200)),
        (root / "masks" / f"{mask_name or name}.png", mask),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(path)


def options_of(root: Path, **changes: Any) -> LoadOptions:
    return LoadOptions(segmentation=True, masks=root / "masks", **changes)


def store_with_masks(owners: list[str] | None = None, *, rows: int = 6, rows_are_units: bool = False) -> ImageStore:
    return store_of_arrays(
        images=RANDOM.integers(0, 256, (rows, 1, 4, 6), dtype=np.uint8),
        labels=RANDOM.integers(0, 2, (rows, 4, 6)),
        class_names=["background", "foreground"],
        name="made",
        unit_names=owners,
        rows_are_units=rows_are_units,
    )


# --- the store -------------------------------------------------------------------------------------------------------


def test_a_store_holds_one_class_a_pixel() -> None:
    store = store_with_masks(["p", "q", "p", "p", "r", "q"])
    assert store.per_pixel
    assert (store.labels.dtype, store.labels.shape) == (torch.uint8, (6, 4, 6))
    part = store.select_units([1])
    assert torch.equal(part.labels, store.labels[[1, 5]])
    assert part.owners == ("q", "q")
    rows = store.select_rows([5, 2, 3])
    assert torch.equal(rows.labels, store.labels[[5, 2, 3]])
    assert rows.unit_of_row.tolist() == [0, 1, 1]
    assert not store_of_arrays(
        images=np.zeros((1, 1, 2, 2), np.uint8), labels=np.zeros(1), class_names=["a"], name="made"
    ).per_pixel


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(6, 4, 6, dtype=torch.int64), "labels must be int64"),
        (torch.zeros(6, 6, 4, dtype=torch.uint8), r"or uint8 \(6, 4, 6\)"),
        (torch.zeros(6, dtype=torch.uint8), "labels must be int64"),
        (torch.full((6, 4, 6), 2, dtype=torch.uint8), r"labels must lie in 0\.\.1"),
    ],
)
def test_masks_that_do_not_fit_their_images_are_refused(labels: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(store_with_masks(), labels=labels)


def test_numbers_that_no_byte_holds_are_refused_and_not_wrapped_around() -> None:
    with pytest.raises(DataError, match=r"masks must lie in 0\.\.255, got 0\.\.256"):
        store_of_arrays(
            images=np.zeros((1, 1, 1, 2), np.uint8), labels=np.array([[[0, 256]]]), class_names=["a", "b"], name="made"
        )


def test_the_fingerprint_changes_with_any_pixel_of_a_mask() -> None:
    store = store_with_masks()
    other = store.labels.clone()
    other[5, 3, 5] ^= 1
    assert replace(store, labels=other).fingerprint() != store.fingerprint()
    assert replace(store, labels=store.labels.clone()).fingerprint() == store.fingerprint()


def test_no_patient_is_split_by_the_hold_out_even_where_slices_are_the_units() -> None:
    owners = [f"patient {number}" for number in np.random.default_rng(1).integers(0, 30, 300)]
    store = store_with_masks(owners, rows=300, rows_are_units=True)
    assert store.num_units == 300
    parts = hold_out(store, fraction=0.3, keys=Keys.from_seed(1))
    train, test = (set(part.owners or ()) for part in parts)
    assert not train & test
    assert train | test == set(owners)
    by_patient = hold_out(replace(store, unit_of_row=store_with_masks(owners, rows=300).unit_of_row), fraction=0.3,
                          keys=Keys.from_seed(1))  # fmt: skip
    assert set(by_patient[1].owners or ()) == test


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "_mask", "_seg", "_label", "_MASK"])
def test_a_mask_is_found_by_its_images_name(tmp_path: Path, ending: str) -> None:
    for name in ("b", "sub/a", "a"):
        write_pair(tmp_path, name, mask_name=name + ending)
    store = load(tmp_path / "images", options_of(tmp_path)).train
    assert store.row_names == ("a.png", "b.png", "sub/a.png")
    assert (store.class_names, store.owners, store.num_units) == (("background", "foreground"), None, 3)
    assert torch.equal(store.images[:, 0], store.labels * 200)


def test_images_and_masks_may_lie_in_one_folder(tmp_path: Path) -> None:
    for name, value in (("a", 200), ("a_mask", 1), ("b", 200), ("b_seg", 1)):
        Image.fromarray(disc() * np.uint8(value)).save(tmp_path / f"{name}.png")
    store = load(tmp_path, LoadOptions(segmentation=True, masks=tmp_path)).train
    assert store.row_names == ("a.png", "b.png")
    assert torch.equal(store.images[:, 0], store.labels * 200)


def test_images_and_masks_without_a_partner_are_named_and_refused(tmp_path: Path) -> None:
    write_pair(tmp_path, "both")
    write_pair(tmp_path, "lonely")
    write_pair(tmp_path, "extra")
    (tmp_path / "masks" / "lonely.png").unlink()
    (tmp_path / "images" / "extra.png").unlink()
    for skip_bad in (False, True):
        with pytest.raises(DataError, match=r"1 images have no mask: lonely\.png\. 1 masks have no image: extra"):
            load(tmp_path / "images", options_of(tmp_path, skip_bad=skip_bad))


def test_names_that_fit_twice_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path, "a")
    write_pair(tmp_path, "a", mask_name="a_mask")
    with pytest.raises(DataError, match="1 names belong to several masks: a"):
        load(tmp_path / "images", options_of(tmp_path))
    (tmp_path / "masks" / "a_mask.png").unlink()
    Image.fromarray(disc()).save(tmp_path / "images" / "a.bmp")
    with pytest.raises(DataError, match="1 names belong to several images: a"):
        load(tmp_path / "images", options_of(tmp_path))


def bad_mask(root: Path, kind: str) -> str:
    """Write mask b anew with a fault; what the message must say of it."""
    path = root / "masks" / "b.png"
    if kind == "shape":
        Image.fromarray(disc(8, 9)).save(path)
        return r"b\.png \(mask b\.png: 8×9, but its image is 8×8\)"
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:60])
        return r"b\.png \(mask b\.png: "
    if kind == "empty":
        path.write_bytes(b"")
        return r"b\.png \(mask b\.png: empty file\)"
    if kind == "transparent":
        Image.fromarray(disc()).convert("RGBA").save(path)
        return "needs one channel of whole numbers, got RGBA"
    Image.fromarray(disc()).save(path, format="WEBP", lossless=True)
    return "a WebP may have lost numbers"


@pytest.mark.parametrize("kind", ["shape", "truncated", "empty", "transparent", "webp"])
def test_a_bad_mask_is_named_and_skipped_only_when_asked(tmp_path: Path, kind: str) -> None:
    for name in "abc":
        write_pair(tmp_path, name)
    message = bad_mask(tmp_path, kind)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path / "images", options_of(tmp_path, image_size=8))
    assert "\n" not in str(caught.value)
    store = load(tmp_path / "images", options_of(tmp_path, image_size=8, skip_bad=True)).train
    assert store.row_names == ("a.png", "c.png")
    assert [name for name, _ in store.skipped] == ["b.png"]


def test_any_number_but_zero_is_foreground_unless_classes_are_asked_for(tmp_path: Path) -> None:
    write_pair(tmp_path, "a", mask=disc() * np.uint8(255))
    write_pair(tmp_path, "b", mask=disc() * np.uint8(2))
    assert load(tmp_path / "images", options_of(tmp_path)).train.labels.max() == 1
    with pytest.raises(DataError, match=r"a\.png \(mask a\.png: a mask with the value 255 has no such class"):
        load(tmp_path / "images", options_of(tmp_path, mask_classes="classes"))
    (tmp_path / "images" / "a.png").unlink()
    (tmp_path / "masks" / "a.png").unlink()
    store = load(tmp_path / "images", options_of(tmp_path, mask_classes="classes")).train
    assert store.class_names == ("background", "1", "2")
    assert sorted(set(store.labels.flatten().tolist())) == [0, 2]


def test_a_palette_counts_by_index_and_colour_only_where_classes_are_merged(tmp_path: Path) -> None:
    write_pair(tmp_path, "a")
    palette = Image.fromarray(disc() * np.uint8(2)).convert("P")
    palette.putpalette([255, 255, 255, 9, 9, 9, 0, 0, 0])  # class 2 is black, class 0 white
    palette.save(tmp_path / "masks" / "a.png")
    store = load(tmp_path / "images", options_of(tmp_path, mask_classes="classes")).train
    assert torch.equal(store.labels[0], torch.from_numpy(disc() * np.uint8(2)))
    colour = np.zeros((8, 8, 3), np.uint8)
    colour[2:5, 3:6, 1] = 7
    Image.fromarray(colour).save(tmp_path / "masks" / "a.png")
    assert torch.equal(load(tmp_path / "images", options_of(tmp_path)).train.labels[0], torch.from_numpy(disc()))
    with pytest.raises(DataError, match="got RGB"):
        load(tmp_path / "images", options_of(tmp_path, mask_classes="classes"))


def test_a_jpeg_mask_has_a_threshold_and_no_classes(tmp_path: Path) -> None:
    mask = np.zeros((32, 32), np.uint8)
    mask[8:24, 8:24] = 1
    write_pair(tmp_path, "a", mask=mask)
    (tmp_path / "masks" / "a.png").unlink()
    Image.fromarray(mask * np.uint8(255)).save(tmp_path / "masks" / "a.jpg", quality=40)
    store = load(tmp_path / "images", options_of(tmp_path)).train
    # Blocks of 8 pixels are uniform here, so that the threshold recovers the mask exactly.
    assert torch.equal(store.labels[0], torch.from_numpy(mask))
    with pytest.raises(DataError, match="a JPEG does not keep the numbers of classes"):
        load(tmp_path / "images", options_of(tmp_path, mask_classes="classes"))


def test_an_empty_mask_is_a_row_unless_only_foreground_is_asked_for(tmp_path: Path) -> None:
    write_pair(tmp_path, "a")
    write_pair(tmp_path, "b", mask=disc() * np.uint8(0))
    assert load(tmp_path / "images", options_of(tmp_path)).train.num_rows == 2
    assert load(tmp_path / "images", options_of(tmp_path, only_foreground=True)).train.row_names == ("a.png",)
    write_pair(tmp_path, "a", mask=disc() * np.uint8(0))
    with pytest.raises(DataError, match="every mask is empty"):
        load(tmp_path / "images", options_of(tmp_path, only_foreground=True))


def test_masks_are_resized_with_their_images_and_never_mixed(tmp_path: Path) -> None:
    mask = np.zeros((24, 40), np.uint8)
    mask[2:14, 6:30] = 3
    for name, values in (("images", mask * np.uint8(60)), ("masks", mask)):
        (tmp_path / name).mkdir()
        Image.fromarray(values).save(tmp_path / name / "a.png")
    for squash in (False, True):
        options = options_of(tmp_path, mask_classes="classes", image_size=12, squash=squash)
        store = load(tmp_path / "images", options).train
        assert set(store.labels.flatten().tolist()) == {0, 3}
        seen = store.images[:, 0] > 90
        # Half-covered pixels at the edge may fall on either side.
        assert (seen == (store.labels > 0)).float().mean() > 0.95
        arrays = store_of_arrays(
            images=(mask * np.uint8(60))[None, None], labels=mask[None], class_names=list("abcd"), name="made"
        )
        assert (fit(arrays, options).labels == store.labels).float().mean() > 0.95


def test_a_folder_of_splits_has_masks_in_both(tmp_path: Path) -> None:
    for split, names in (("train", "ab"), ("test", "c")):
        for name in names:
            for kind, value in (("images", 200), ("masks", 1)):
                folder = tmp_path / kind / split
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(disc() * np.uint8(value)).save(folder / f"{name}.png")
    splits = load(tmp_path / "images", options_of(tmp_path))
    assert splits.test is not None
    assert (splits.train.row_names, splits.test.row_names) == (("a.png", "b.png"), ("c.png",))
    assert load_one(tmp_path / "images", options_of(tmp_path)).row_names == ("c.png",)


# --- owners ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def patients(tmp_path: Path) -> Path:
    for name in ("p1_000", "p1_001", "p2_000", "p10_000"):
        write_pair(tmp_path, name)
    return tmp_path


def test_a_pattern_finds_the_owner_in_the_files_name(patients: Path) -> None:
    options = options_of(patients, unit_pattern=r"^(p\d+)_")
    splits = load(patients / "images", options)
    assert splits.train.owners == ("p10", "p1", "p1", "p2")
    assert splits.train.unit_of_row.tolist() == [0, 1, 1, 2]
    by_rows = load(patients / "images", options.model_copy(update={"units": "rows"}))
    assert by_rows.train.owners == splits.train.owners
    assert by_rows.train.unit_of_row.tolist() == [0, 1, 2, 3]


def test_a_csv_and_folders_name_owners_too(patients: Path) -> None:
    csv = patients / "units.csv"
    csv.write_text("file,unit\np1_000.png,x\np1_001.png,y\np2_000.png,x\np10_000.png,z\n")
    store = load(patients / "images", options_of(patients, unit_csv=csv)).train
    assert store.owners == ("z", "x", "y", "x")
    assert store.num_units == 3
    write_pair(patients / "deep", "anna/1")
    write_pair(patients / "deep", "anna/2")
    write_pair(patients / "deep", "bert/1")
    store = load(patients / "deep" / "images", options_of(patients / "deep", unit_folder_level=1)).train
    assert store.owners == ("anna", "anna", "bert")


def test_owners_that_nobody_knows_can_not_be_units(patients: Path) -> None:
    with pytest.raises(DataError, match="units=owners needs to know who owns each row"):
        load(patients / "images", options_of(patients, units="owners"))
    path = patients / "a.npz"
    np.savez(path, images=np.zeros((2, 4, 5), np.uint8), labels=np.arange(2))
    with pytest.raises(DataError, match="units=owners needs to know"):
        load(path, LoadOptions(units="owners"))
    assert load(patients / "images", options_of(patients)).train.owners is None
    with pytest.raises(DataError, match=r"unit_pattern is \^\(p1\)_, but 2 files have no such name: p10_000\.png"):
        load(patients / "images", options_of(patients, unit_pattern="^(p1)_"))


def test_public_images_need_no_owners_but_keep_those_that_are_known(patients: Path) -> None:
    known = load_one(patients / "images", options_of(patients, unit_pattern=r"^(p\d+)_"))
    assert (known.owners, known.num_units) == (("p10", "p1", "p1", "p2"), 4)
    assert load_one(patients / "images", options_of(patients, unit_pattern="^(p1)_")).owners is None
    csv = patients / "units.csv"
    csv.write_text("file,unit\np1_000.png,x\nof_the_private_part.png,y\n")
    assert load_one(patients / "images", options_of(patients, unit_csv=csv)).owners is None
    with pytest.raises(DataError, match="that are not in the folder: of_the_private_part"):
        load(patients / "images", options_of(patients, unit_csv=csv))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit_pattern": "p("}, "a regular expression with one group"),
        ({"unit_pattern": r"p\d"}, "a regular expression with one group"),
        ({"unit_pattern": "(p)", "unit_folder_level": 1}, "choose one"),
        ({"units": "people"}, "should be 'auto', 'rows' or 'owners'"),
        ({"masks": Path("x")}, "need segmentation"),
        ({"only_foreground": True}, "need segmentation"),
        ({"mask_classes": "some"}, "should be 'merged' or 'classes'"),
        ({"volume_axis": 3}, "should be 0, 1 or 2"),
        ({"window": (5.0, 5.0)}, "the lower one first"),
        ({"window": (float("nan"), 5.0)}, "finite number"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LoadOptions(**options)


def test_public_data_of_another_kind_does_not_mind_how_private_owners_are_named(patients: Path) -> None:
    path = patients / "a.npz"
    np.savez(path, images=np.zeros((2, 4, 5), np.uint8), masks=np.zeros((2, 4, 5), np.uint8))
    options = options_of(patients, unit_pattern=r"^(p\d+)_").model_copy(update={"masks": None})
    assert load_one(path, options).owners is None
    with pytest.raises(DataError, match="this source has no unit_pattern"):
        load(path, options)
    assert load_one(patients / "images", options_of(patients, unit_column="volume")).owners is None


def test_a_window_is_refused_where_nothing_would_heed_it(patients: Path) -> None:
    with pytest.raises(DataError, match="no intensities for a window"):
        load(patients / "images", options_of(patients, window=(0.0, 1.0)))
    with pytest.raises(DataError, match="a window is for DICOM and 16-bit grey images"):
        load(patients, LoadOptions(window=(0.0, 1.0)))


def test_names_of_owners_are_safe_to_print(tmp_path: Path) -> None:
    write_pair(tmp_path, "p\x1b[31m_1")
    store = load(tmp_path / "images", options_of(tmp_path, unit_pattern="^(.*)_")).train
    assert store.owners == ("p\\x1b[31m",)


def test_what_has_no_masks_is_no_source(patients: Path) -> None:
    for source, options, message in (
        ("digits", LoadOptions(segmentation=True), "can't be used for segmentation"),
        (patients / "images", LoadOptions(segmentation=True), "needs masks: name the folder"),
        (patients / "nowhere", options_of(patients), "neither a file or folder"),
        (
            patients / "images",
            options_of(patients).model_copy(update={"masks": str(patients / "nowhere")}),
            "must be two folders",
        ),
        (patients, options_of(patients).model_copy(update={"masks": str(patients / "masks")}), "images have no mask"),
    ):
        with pytest.raises(DataError, match=message):
            load(source, options)
