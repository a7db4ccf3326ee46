"""NIfTI volumes: slices, windows, owners, and headers that lie."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpvision.data import LoadOptions, load, load_one, read_volume, volume_images
from dpvision.data import nifti as module
from dpvision.errors import DataError

nibabel: Any = pytest.importorskip("nibabel", reason="NIfTI is an optional extra")

RANDOM = np.random.default_rng(0)
HIPPOCAMPUS = Path.home() / ".cache" / "dpvision" / "msd_task04_hippocampus"
VOXELS = RANDOM.integers(-1000, 1000, (4, 5, 6)).astype(np.int16)
MASK = RANDOM.integers(0, 3, (4, 5, 6)).astype(np.uint8)


def write(path: Path, values: NDArray[Any], *, affine: NDArray[Any] | None = None, slope: float = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine)
    if slope != 1:
        image.header.set_slope_inter(slope, -1024)
    image.to_filename(path)
    if slope != 1:  # nibabel forgets the slope of new files: write it where the format has it
        raw = bytearray(path.read_bytes())
        raw[112:120] = np.array([slope, -1024], dtype="<f4").tobytes()
        path.write_bytes(raw)
    return path


def write_pair(root: Path, name: str, *, voxels: NDArray[Any] = VOXELS, mask: NDArray[Any] = MASK) -> None:
    write(root / "images" / f"{name}.nii.gz", voxels)
    write(root / "masks" / f"{name}.nii.gz", mask)


def options_of(root: Path, **changes: Any) -> LoadOptions:
    changes = {"window": (-1000.0, 1000.0), "mask_classes": "classes", "image_size": None, **changes}
    return LoadOptions(segmentation=True, masks=root / "masks", **changes)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_are_cut_along_the_axis_and_windowed(tmp_path: Path, axis: int) -> None:
    write_pair(tmp_path, "p1")
    shape = tuple(np.delete(VOXELS.shape, axis).tolist())
    store = load(tmp_path / "images", options_of(tmp_path, volume_axis=axis, image_size=shape)).train
    assert store.num_rows == VOXELS.shape[axis]
    np.testing.assert_array_equal(store.labels.numpy(), np.moveaxis(MASK, axis, 0))
    exact = (np.moveaxis(VOXELS, axis, 0).astype(float) + 1000) / 2000 * 255
    assert np.abs(store.images[:, 0].numpy() - exact).max() <= 0.5
    assert store.row_names[1] == "p1.nii.gz slice 1"


def test_a_volume_is_one_owner_and_one_unit_unless_told_otherwise(tmp_path: Path) -> None:
    for name in ("a_1", "a_2", "sub/b_1"):
        write_pair(tmp_path, name)
    (tmp_path / "images" / "._a_1.nii.gz").write_bytes(b"junk")
    store = load(tmp_path / "images", options_of(tmp_path, image_size=4)).train
    assert (store.num_units, store.num_rows) == (3, 18)
    assert sorted(set(store.owners or ())) == ["a_1", "a_2", "sub/b_1"]
    paired = load(tmp_path / "images", options_of(tmp_path, image_size=4, unit_pattern="^([a-z])_")).train
    assert (paired.num_units, set(paired.owners or ())) == (2, {"a", "b"})
    assert paired.unit_of_row.tolist() == [0] * 12 + [1] * 6
    slices = load(tmp_path / "images", options_of(tmp_path, image_size=4, units="rows")).train
    assert (slices.num_units, slices.owners) == (18, store.owners)


def test_slices_as_units_need_a_window_that_no_other_slice_decides(tmp_path: Path) -> None:
    write_pair(tmp_path, "a")
    own = options_of(tmp_path, window=None, image_size=(4, 5))
    with pytest.raises(DataError, match="slices are the units need a window"):
        load(tmp_path / "images", own.model_copy(update={"units": "rows"}))
    by_patient = load(tmp_path / "images", own).train
    low, high = np.percentile(VOXELS, [1, 99])
    exact = (np.moveaxis(VOXELS, 2, 0).clip(low, high) - low) / (high - low) * 255
    assert np.abs(by_patient.images[:, 0].numpy() - exact).max() <= 0.5
    assert torch.equal(load_one(tmp_path / "images", own).images, by_patient.images)  # public: nobody to protect


def test_one_bad_slice_may_not_take_other_units_with_it(tmp_path: Path) -> None:
    write_pair(tmp_path, "a")
    skipping = options_of(tmp_path, image_size=(4, 5), skip_bad=True)
    with pytest.raises(DataError, match="skip_bad must be off"):
        load(tmp_path / "images", skipping.model_copy(update={"units": "rows"}))
    assert load(tmp_path / "images", skipping).train.num_units == 1


def test_a_volumes_own_range_is_not_touched_by_other_volumes(tmp_path: Path) -> None:
    write_pair(tmp_path, "a")
    own = options_of(tmp_path, window=None, image_size=4)
    before = load(tmp_path / "images", own).train
    write_pair(tmp_path, "b", voxels=np.full_like(VOXELS, 30000))
    after = load(tmp_path / "images", own).train.select_units([0])
    assert after.fingerprint() == before.fingerprint()
    assert load(tmp_path / "images", own).train.images[6:].max() == 0  # a constant volume is black, by definition


def test_the_headers_scale_counts(tmp_path: Path) -> None:
    for root, ending in ((tmp_path, ".nii"),):
        write(root / "images" / f"a{ending}", VOXELS, slope=2)
        write(root / "masks" / f"a{ending}", MASK)
    volume = read_volume(tmp_path / "images" / "a.nii")
    assert (volume.slope, volume.intercept) == (2.0, -1024.0)
    store = load(tmp_path / "images", options_of(tmp_path, image_size=(4, 5), window=(-1024.0, 1000.0))).train
    exact = (np.moveaxis(VOXELS, 2, 0) * 2.0).clip(0, 2024) / 2024 * 255
    assert np.abs(store.images[:, 0].numpy() - exact).max() <= 0.5


def test_single_files_and_named_volumes_are_read_too(tmp_path: Path) -> None:
    write_pair(tmp_path, "a")
    files = {kind: tmp_path / kind / "a.nii.gz" for kind in ("images", "masks")}
    options = options_of(tmp_path).model_copy(update={"masks": files["masks"], "image_size": 4})
    assert load(files["images"], options).train.owners == ("a",) * 6
    images = volume_images(read_volume(files["images"]), image_shape=(3, 4, 4), options=options)
    assert images.shape == (6, 3, 4, 4)
    assert torch.equal(images[:, :1], load(files["images"], options).train.images)


def test_only_foreground_drops_empty_slices_one_by_one(tmp_path: Path) -> None:
    mask = MASK.copy()
    mask[:, :, [0, 3]] = 0
    write_pair(tmp_path, "a", mask=mask)
    write_pair(tmp_path, "b", mask=mask * 0)
    store = load(tmp_path / "images", options_of(tmp_path, image_size=(4, 5), only_foreground=True)).train
    assert [int(name.split()[-1]) for name in store.row_names] == [1, 2, 4, 5]
    assert set(store.owners or ()) == {"a"}
    assert load(tmp_path / "images", options_of(tmp_path, image_size=4)).train.num_units == 2


def test_without_a_size_the_slices_get_what_most_volumes_have(tmp_path: Path) -> None:
    for name in "abc":
        write_pair(tmp_path, name)
    write_pair(tmp_path, "d", voxels=np.zeros((9, 9, 2), np.int16), mask=np.zeros((9, 9, 2), np.uint8))
    store = load(tmp_path / "images", options_of(tmp_path)).train
    assert store.image_shape == (1, 4, 5)
    assert store.num_rows == 20


# --- faults ----------------------------------------------------------------------------------------------------------


def damage(root: Path, kind: str) -> str:
    """Spoil volume b or its mask; what the message must say."""
    image, mask = root / "images" / "b.nii.gz", root / "masks" / "b.nii.gz"
    raw = bytearray(gzip.decompress(image.read_bytes()))
    floats = VOXELS.astype(np.float32)
    if kind == "nan":
        floats[1, 2, 3] = np.nan
        write(image, floats)
        return "NaN or infinite intensities"
    if kind == "infinity":
        floats[1, 2, 3] = np.inf
        write(image, floats)
        return "NaN or infinite intensities"
    if kind == "nan mask":
        floats = MASK.astype(np.float32)
        floats[1, 2, 3] = np.nan
        write(mask, floats)
        return "mask b.nii.gz: .*got fractions, NaN or infinity"
    if kind == "negative mask":
        write(mask, -MASK.astype(np.int16))
        return "numbers >= 0, got -2"
    if kind == "shape":
        write(mask, MASK[:, :, :5])
        return r"the volume has \(4, 5, 6\) voxels, its mask \(4, 5, 5\)"
    if kind == "affine":
        write(mask, MASK, affine=np.diag([1, 1, 1.2, 1]))
        return "affines differ"
    if kind == "4-D":
        write(image, np.stack([VOXELS, VOXELS], axis=3))
        return "4 dimensions .*store each time or channel"
    if kind == "2-D":
        write(image, VOXELS[0])
        return "needs three dimensions"
    if kind == "complex":
        write(image, VOXELS.astype(np.complex64))
        return "voxels must be real numbers"
    if kind == "truncated gzip":
        image.write_bytes(image.read_bytes()[:-40])
        return "can't be read: Compressed file ended"
    if kind == "truncated voxels":
        image.write_bytes(gzip.compress(bytes(raw[:-10])))
        return "ends too early: 240 bytes were promised, 230 are there"
    if kind == "flipped checksum":
        image.write_bytes(image.read_bytes()[:-8] + bytes(8))
        return "CRC check failed"
    if kind == "no gzip":
        image.write_bytes(bytes(raw))
        return "can't be read: Not a gzipped file"
    if kind == "bomb":
        raw[40:56] = np.array([3, 30000, 30000, 30000, 1, 1, 1, 1], "<i2").tobytes()
        image.write_bytes(gzip.compress(bytes(raw)))
        return "more than 268435456 voxels"
    if kind == "promises":
        raw[40:56] = np.array([3, 600, 600, 600, 1, 1, 1, 1], "<i2").tobytes()
        image.write_bytes(gzip.compress(bytes(raw)))
        return "its header promises 432000000 bytes"
    if kind == "offset":
        raw[108:112] = np.array([3e8], "<f4").tobytes()
        image.write_bytes(gzip.compress(bytes(raw)))
        return "its size says otherwise"
    if kind == "type":
        raw[70:72] = np.array([9999], "<i2").tobytes()
        image.write_bytes(gzip.compress(bytes(raw)))
        return "its header makes no sense"
    image.write_bytes(gzip.compress(b"hello, this is a text"))
    return "not a NIfTI file"


@pytest.mark.parametrize(
    "kind",
    [
        "nan", "infinity", "nan mask", "negative mask", "shape", "affine", "4-D", "2-D", "complex", "truncated gzip",
        "truncated voxels", "flipped checksum", "no gzip", "bomb", "promises", "offset", "type", "text",
    ],
)  # fmt: skip
def test_a_bad_volume_is_named_and_skipped_only_when_asked(tmp_path: Path, kind: str) -> None:
    for name in "abc":
        write_pair(tmp_path, name)
    message = damage(tmp_path, kind)
    options = options_of(tmp_path, image_size=4)
    with pytest.raises(DataError, match=f"1 of 3 images or their masks can't be used: b.nii.gz.*{message}") as caught:
        load(tmp_path / "images", options)
    assert "\n" not in str(caught.value)
    store = load(tmp_path / "images", options.model_copy(update={"skip_bad": True})).train
    assert set(store.owners or ()) == {"a", "c"}
    assert [name for name, _ in store.skipped] == ["b.nii.gz"]


def test_volumes_and_masks_without_a_partner_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path, "a")
    write(tmp_path / "images" / "b.nii.gz", VOXELS)
    with pytest.raises(DataError, match=r"1 images have no mask: b\.nii\.gz"):
        load(tmp_path / "images", options_of(tmp_path))
    write(tmp_path / "masks" / "b_seg.nii", MASK)
    assert load(tmp_path / "images", options_of(tmp_path, image_size=4)).train.num_units == 2


def test_a_missing_extra_is_named_once_whatever_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path, "a")
    monkeypatch.setitem(sys.modules, "nibabel", None)
    for skip_bad in (False, True):
        with pytest.raises(DataError, match=r"pip install 'dpvision\[medical\]'"):
            load(tmp_path / "images", options_of(tmp_path, skip_bad=skip_bad))
    with pytest.raises(DataError, match=r"dpvision\[medical\]"):
        read_volume(tmp_path / "images" / "a.nii.gz")


def test_an_extension_is_skipped_and_never_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", VOXELS)
    raw = bytearray(path.read_bytes())
    raw[108:112] = np.array([352 + 64], "<f4").tobytes()
    raw[348:352] = b"\1\0\0\0"
    lie = np.array([-8, 16], "<i4").tobytes()  # a size below zero, and the code of a pickle
    path.write_bytes(bytes(raw[:352]) + lie + b"cos\nsystem\n" + bytes(64 - 8 - 11) + bytes(raw[352:]))
    np.testing.assert_array_equal(read_volume(path).voxels, VOXELS)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_spoiled_headers_end_in_one_line_or_a_volume(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("spoiled")
    raw = bytearray(write(folder / "a.nii", VOXELS).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 351))] = data.draw(st.integers(0, 255))
    (folder / "a.nii").write_bytes(
        bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    )
    problem = ""
    try:
        volume = read_volume(folder / "a.nii")
    except DataError as error:
        problem = str(error)
    else:
        assert volume.voxels.ndim == 3
        assert volume.voxels.nbytes <= len(raw)
    assert "\n" not in problem


def test_bytes_of_either_order_and_the_second_version_are_read(tmp_path: Path) -> None:
    swapped = nibabel.Nifti1Image(VOXELS, np.eye(4), nibabel.Nifti1Header(endianness=">"))
    swapped.header.set_data_dtype(">i2")
    swapped.to_filename(tmp_path / "big.nii.gz")
    nibabel.Nifti2Image(VOXELS, np.eye(4)).to_filename(tmp_path / "two.nii")
    for name in ("big.nii.gz", "two.nii"):
        np.testing.assert_array_equal(read_volume(tmp_path / name).voxels, VOXELS)
    assert repr(read_volume(tmp_path / "two.nii")) == "Volume((4, 5, 6), sensitive)"
    assert module.volume_shape(tmp_path / "two.nii") == (4, 5, 6)


@pytest.mark.skipif(not HIPPOCAMPUS.exists(), reason="the hippocampus volumes are not on this machine")
@pytest.mark.parametrize("volumes", [5, pytest.param(130, marks=pytest.mark.slow)])
def test_real_volumes_are_a_patient_each(tmp_path: Path, volumes: int) -> None:
    for kind in ("imagesTr", "labelsTr"):
        (tmp_path / kind).mkdir()
        for path in sorted((HIPPOCAMPUS / kind).glob("hippo*"))[:volumes]:
            (tmp_path / kind / path.name).symlink_to(path)
    # Squashed to more pixels than they have, so that no class is lost at the edge.
    options = options_of(tmp_path, window=None, image_size=64, squash=True, only_foreground=True)
    options = options.model_copy(update={"masks": tmp_path / "labelsTr"})
    store = load(tmp_path / "imagesTr", options).train
    assert (store.num_units, store.class_names) == (volumes, ("background", "1", "2"))
    masks = [np.asarray(nibabel.load(path).dataobj) for path in (tmp_path / "labelsTr").iterdir()]
    assert store.num_rows == sum(int(mask.any(axis=(0, 1)).sum()) for mask in masks)
