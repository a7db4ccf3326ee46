"""idx files: read whole and exactly, or refused."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from dpvision.data import LoadOptions, load, load_one
from dpvision.data.idx import load_idx, read_idx
from dpvision.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 4, 5), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9, 2], dtype=np.uint8)


def idx_bytes(array: np.ndarray, shape: tuple[int, ...] | None = None, magic: int | None = None) -> bytes:
    shape = shape or array.shape
    return struct.pack(f">I{len(shape)}I", magic or 0x800 + len(shape), *shape) + array.tobytes()


def write_set(folder: Path, *, zipped: bool = False, separator: str = "-") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, rows in (("train", slice(None)), ("t10k", slice(3))):
        for kind, array in (("images", IMAGES[rows]), ("labels", LABELS[rows])):
            content = idx_bytes(array)
            name = f"{stem}-{kind}{separator}idx{array.ndim}-ubyte"
            (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(content) if zipped else content)
    return folder


@pytest.mark.parametrize(("zipped", "separator"), [(False, "-"), (True, "-"), (False, ".")])
def test_idx_files_are_read_zipped_or_not(tmp_path: Path, zipped: bool, separator: str) -> None:
    splits = load(str(write_set(tmp_path, zipped=zipped, separator=separator)))
    assert splits.test is not None
    np.testing.assert_array_equal(splits.train.images[:, 0].numpy(), IMAGES)
    np.testing.assert_array_equal(splits.train.labels.numpy(), LABELS)
    assert (splits.train.num_rows, splits.test.num_rows) == (7, 3)
    assert splits.test.class_names == splits.train.class_names == tuple("0123456789")
    assert splits.normalisation.source == "fixed"


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
def test_mnist_is_found_below_data_dir(tmp_path: Path, folder: str) -> None:
    write_set(tmp_path / folder)
    splits = load("mnist", LoadOptions(data_dir=tmp_path, download=False, image_size=8, channels=3))
    assert splits.train.image_shape == (3, 8, 8)
    assert splits.normalisation.mean == (0.1307,) * 3
    assert splits.normalisation.source == "published"
    assert splits.public_facts["rows"] == 7
    assert load_one("mnist", LoadOptions(data_dir=tmp_path, download=False)).num_rows == 3


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends too early"),
        (b"\0\0", "ends too early"),
        (idx_bytes(IMAGES)[:10], "ends too early"),
        (idx_bytes(IMAGES)[:-1], "ends too early|more than the file can hold"),
        (idx_bytes(IMAGES) + b"x", "but holds more"),
        (idx_bytes(IMAGES, magic=0x00000D03), "not an idx file of bytes"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "not an idx file of bytes"),
        (idx_bytes(IMAGES, shape=(2**32 - 1, 2**32 - 1, 2**32 - 1)), "more than the file can hold"),
        (idx_bytes(IMAGES, shape=(2**31, 1, 1)), "more than the file can hold"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, content: bytes, message: str, zipped: bool) -> None:
    path = tmp_path / ("file.gz" if zipped else "file")
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path)
    assert "\n" not in str(caught.value)


def test_a_broken_gzip_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(idx_bytes(IMAGES))
    flipped = bytearray(whole)
    flipped[40] ^= 0xFF
    for number, content in enumerate((whole[:-12], b"no gzip at all", bytes(flipped))):
        path = tmp_path / f"{number}.gz"
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"can't be read|ends too early"):
            read_idx(path)


def test_a_missing_or_unequal_partner_is_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(LABELS[:5]))
    with pytest.raises(DataError, match="don't match"):
        load_idx(tmp_path, "train", name="made")
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="no train-labels-idx"):
        load_idx(tmp_path, "train", name="made")


def test_labels_that_are_no_class_are_refused(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "mnist")
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(LABELS + 8))
    with pytest.raises(DataError, match="labels must lie in"):
        load("mnist", LoadOptions(data_dir=tmp_path, download=False))
