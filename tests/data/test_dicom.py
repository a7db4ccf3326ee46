"""DICOM files made here: rescaling, windows, inversion, frames, colours, and the patient as the privacy unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dicom_files import write_dicom
from dpvision.config import parse_config
from dpvision.data import LoadOptions, load, load_images
from dpvision.data.dicom import dicom_frame, is_dicom, read_dicom_header
from dpvision.data.splits import load_splits, owners_may_be_shared
from dpvision.errors import BadFile, DataError
from dpvision.privacy.randomness import Keys
from dpvision.training.prepare import prepare

pytest.importorskip("pydicom", reason="DICOM is an optional extra")
RAMP = np.arange(16, dtype=np.uint16).reshape(4, 4) * 256
SHAPE = (1, 4, 4)


def frame(path: Path, window: tuple[float, float] | None = None, number: int = 0) -> Any:
    return dicom_frame(path, frame=number, window=window)


def test_rescaled_values_pass_through_the_window_of_the_file(tmp_path: Path) -> None:
    path = write_dicom(
        tmp_path / "a.dcm", RAMP, RescaleSlope=2, RescaleIntercept=-1024, WindowCenter=[1000, 40], WindowWidth=[801, 9]
    )
    low, high = 1000 - 0.5 - 400, 1000 - 0.5 + 400
    expected = np.rint((np.clip(RAMP * 2.0 - 1024, low, high) - low) / (high - low) * 255)
    np.testing.assert_array_equal(frame(path), expected)


def test_a_declared_window_replaces_that_of_the_file(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "a.dcm", RAMP, RescaleSlope=1, RescaleIntercept=-100, WindowCenter=0, WindowWidth=1)
    shown = frame(path, (0.0, 2000.0))
    np.testing.assert_array_equal(shown, np.rint(np.clip(RAMP - 100.0, 0, 2000) / 2000 * 255))


def test_monochrome1_is_inverted(tmp_path: Path) -> None:
    same = {"WindowCenter": 2000, "WindowWidth": 4000}
    bright = write_dicom(tmp_path / "a.dcm", RAMP, **same)
    dark = write_dicom(tmp_path / "b.dcm", RAMP, PhotometricInterpretation="MONOCHROME1", **same)
    np.testing.assert_array_equal(frame(dark), 255 - frame(bright))


def test_without_a_window_a_frame_is_scaled_by_its_own_range(tmp_path: Path) -> None:
    shown = frame(write_dicom(tmp_path / "a.dcm", RAMP))
    assert (shown.min(), shown.max()) == (0, 255)
    eight = write_dicom(tmp_path / "b.dcm", (RAMP // 64).astype(np.uint8))
    np.testing.assert_array_equal(frame(eight), RAMP // 64)


def test_signed_and_colour_pixels_are_read(tmp_path: Path) -> None:
    signed = write_dicom(tmp_path / "a.dcm", RAMP.astype(np.int16) - 2000)
    np.testing.assert_array_equal(
        frame(signed, (-2000.0, 2000.0)), np.rint((RAMP.astype(float).clip(0, 4000)) / 4000 * 255)
    )
    colours = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    np.testing.assert_array_equal(frame(write_dicom(tmp_path / "b.dcm", colours)), colours)
    with pytest.raises(BadFile, match="this file has colours"):
        frame(tmp_path / "b.dcm", (0.0, 1.0))


def test_a_file_without_an_ending_is_known_by_its_content(tmp_path: Path) -> None:
    assert is_dicom(write_dicom(tmp_path / "IM0001", RAMP))
    assert is_dicom(write_dicom(tmp_path / "1.2.840.113619", RAMP))
    (tmp_path / "README").write_text("no image")
    assert not is_dicom(tmp_path / "README")
    images, names, _ = load_images([tmp_path], image_shape=SHAPE)
    assert (len(images), len(names)) == (2, 2)


def test_every_frame_becomes_an_image_of_the_same_patient(tmp_path: Path) -> None:
    for number, label in enumerate(("well", "ill")):
        frames = np.stack([np.full((4, 4), 40 * k, np.uint8) for k in range(3)])
        write_dicom(tmp_path / label / "clip.dcm", frames, patient=f"P{number}")
    store = load(tmp_path, LoadOptions()).train
    assert store.images[:, 0, 0, 0].tolist() == [0, 40, 80] * 2
    assert (store.num_units, store.owners) == (2, ("P1",) * 3 + ("P0",) * 3)
    assert store.row_names[1] == "ill/clip.dcm#2"
    assert load(tmp_path, LoadOptions(frames="first")).train.num_rows == 2


@pytest.mark.parametrize("patient", ["", "ANON", "anonymous", "N/A", "Anonymized^", "unknown"])
def test_a_patient_id_of_no_one_is_an_error_and_not_single_images(tmp_path: Path, patient: str) -> None:
    for number in range(4):
        who = patient if number == 3 else f"P{number}"
        write_dicom(tmp_path / ("well", "ill")[number % 2] / f"{number}.dcm", RAMP, patient=who)
    with pytest.raises(DataError, match=r"1 of 4 images have no (DICOM patient id|owner)"):
        load(tmp_path, LoadOptions())
    pattern = LoadOptions(unit_pattern=r"^(\d)")
    assert load(tmp_path, pattern).train.num_units == 4


def test_one_patient_id_in_all_files_is_an_error(tmp_path: Path) -> None:
    for number in range(4):
        write_dicom(tmp_path / ("well", "ill")[number % 2] / f"{number}.dcm", RAMP, patient="HOSPITAL")
    with pytest.raises(DataError, match="all 4 images have the same owner, HOSPITAL"):
        load(tmp_path, LoadOptions())
    assert load(tmp_path, LoadOptions(units="rows", unit_pattern=r"^(\d)")).train.num_units == 4


def test_other_images_among_dicom_files_need_a_named_owner(tmp_path: Path) -> None:
    write_dicom(tmp_path / "well" / "a.dcm", RAMP, patient="P1")
    (tmp_path / "ill").mkdir()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "ill" / "b.png")
    with pytest.raises(DataError, match=r"1 of 2 images have no DICOM patient id: ill/b\.png"):
        load(tmp_path, LoadOptions())


def test_a_dicom_patient_in_train_and_test_is_refused(tmp_path: Path) -> None:
    for split, who in (("train", ("P1", "P2")), ("test", ("P3", "P2"))):
        for label, patient in zip(("well", "ill"), who, strict=True):
            write_dicom(tmp_path / split / label / f"{patient}.dcm", RAMP, patient=patient)
    config = parse_config({"data": {"source": str(tmp_path)}, "privacy": {"target_epsilon": 3.0}})
    with pytest.raises(DataError, match="images of 1 owner are in both train and test: P2"):
        load_splits(config, Keys.from_seed(1))


def test_the_patient_is_the_privacy_unit_by_default(tmp_path: Path) -> None:
    for number in range(12):
        label = ("well", "ill")[number % 2]
        write_dicom(tmp_path / label / f"{number}.dcm", RAMP + number, patient=f"P{number // 2}")
    privacy = {"target_epsilon": 3.0, "num_units": 6, "delta": 1e-2, "expected_batch_size": 3.0, "steps": 2}
    data = {"source": str(tmp_path), "holdout_fraction": 0.5, "image_size": 8}
    made = prepare(parse_config({"data": data, "model": {"name": "linear"}, "privacy": privacy}), Keys.from_seed(5))
    assert (made.config.privacy.privacy_unit, made.config.data.units) == ("patient", "owners")
    assert made.splits.train.owners is not None
    assert not set(made.splits.train.owners) & set(made.splits.test.owners or ())


HOSTILE = {
    "cut.dcm": (lambda good: good[:-9], "decoded|truncated|bytes|less|length"),
    "empty.dcm": (lambda good: b"", "empty file"),
    "text.dcm": (lambda good: b"not a scan at all" * 20, "not a DICOM file"),
    "header.dcm": (lambda good: good[:200], "holds no image|EOF|unexpected|can't"),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_damaged_dicom_file_is_named_with_its_reason(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    change, reason = HOSTILE[name]
    good = write_dicom(tmp_path / "good", RAMP).read_bytes()
    (tmp_path / name).write_bytes(change(good))
    with pytest.raises(DataError, match=rf"1 of 1 images can't be read: .*{name} \(.*({reason})") as caught:
        load_images([Path(name)], image_shape=SHAPE)
    assert "\n" not in str(caught.value)


def test_a_header_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    huge = write_dicom(tmp_path / "a.dcm", RAMP, Rows=60_000, Columns=60_000)
    with pytest.raises(DataError, match="more than 89478485 pixels"):
        load_images([huge], image_shape=SHAPE)
    with pytest.raises(BadFile, match="frames, the limit is"):
        read_dicom_header(write_dicom(tmp_path / "b.dcm", RAMP, NumberOfFrames=10**9))


def test_a_deflated_data_set_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    import pydicom

    path = write_dicom(tmp_path / "a.dcm", RAMP)
    content = pydicom.dcmread(path)
    content.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.1.99"
    content.save_as(path)
    with pytest.raises(DataError, match="a deflated data set"):
        load_images([path], image_shape=SHAPE)


def test_known_patients_of_the_test_images_are_compared_where_others_are_not_known(tmp_path: Path) -> None:
    for split, patients in (("train", ("p1", "p2")), ("test", ("P02", ""))):
        for number, patient in enumerate(patients):
            write_dicom(tmp_path / split / ("ill" if number else "well") / "a.dcm", RAMP, patient=patient)
    assert load(tmp_path).test.owners is None
    config = parse_config({"data": {"source": str(tmp_path)}, "privacy": {"target_epsilon": 3.0}})
    with pytest.raises(DataError, match="images of 1 owner are in both train and test: p2"):
        load_splits(config, Keys.from_seed(1))
    write_dicom(tmp_path / "test" / "well" / "a.dcm", RAMP, patient="p3")
    splits = load_splits(config, Keys.from_seed(1))
    assert owners_may_be_shared(config, splits)
    write_dicom(tmp_path / "test" / "ill" / "a.dcm", RAMP, patient="p4")
    assert not owners_may_be_shared(config, load_splits(config, Keys.from_seed(1)))


def test_single_images_of_unknown_patients_are_an_explicit_choice(tmp_path: Path) -> None:
    for name in ("well/a.dcm", "ill/b.dcm"):
        write_dicom(tmp_path / name, RAMP, patient="ANON")
    with pytest.raises(DataError, match="2 of 2 images have no owner"):
        load(tmp_path)
    assert load(tmp_path, LoadOptions(units="rows")).train.owners is None


def test_a_window_that_is_not_finite_is_no_window(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "a.dcm", RAMP, WindowCenter="1e999", WindowWidth="1e999")
    with pytest.raises(BadFile, match="a window of centre inf"):
        frame(path)
