"""MNIST's idx files and CIFAR's binary files, from folders and archives: read whole and exactly, or refused."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dpvision.data import LoadOptions, load, load_one
from dpvision.data.mnist_cifar import load_idx, read_idx
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
    assert splits.train.num_rows == 7
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


# --- CIFAR -----------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
CLASSES10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def batch(rows: int, classes: int = 10) -> tuple[np.ndarray, list[int]]:
    return RNG.integers(0, 256, (rows, 3072), dtype=np.uint8), RNG.integers(0, classes, rows).tolist()


def cifar10_files() -> tuple[dict[str, bytes], np.ndarray, list[int]]:
    """Five small batches and a test batch."""
    files: dict[str, bytes] = {}
    images, labels = [], []
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        data, own = batch(4)
        if name != "test_batch":
            images.append(data)
            labels += own
        files[f"{name}.bin"] = np.concatenate([np.array(own, np.uint8)[:, None], data], axis=1).tobytes()
    files["batches.meta.txt"] = "\n".join([*CLASSES10, ""]).encode()
    return files, np.concatenate(images).reshape(-1, 3, 32, 32), labels


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def write_archive(path: Path, files: dict[str, bytes], *extra: tarfile.TarInfo, top: str = "cifar") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in extra:
            archive.addfile(member)
        for name, content in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("archived", [False, True])
def test_cifar10_is_read_from_folder_and_archive(tmp_path: Path, archived: bool) -> None:
    files, images, labels = cifar10_files()
    place = write_archive(tmp_path / "c.tar.gz", files) if archived else write_folder(tmp_path / "c", files)
    splits = load(place)
    np.testing.assert_array_equal(splits.train.images.numpy(), images)
    assert splits.train.labels.tolist() == labels
    assert splits.train.class_names == tuple(CLASSES10)
    assert splits.test is not None
    assert splits.test.num_rows == 4
    assert splits.normalisation.std == (0.2471, 0.2435, 0.2616)


def test_cifar100_uses_the_fine_labels(tmp_path: Path) -> None:
    names = [f"thing_{n}" for n in range(100)]
    files: dict[str, bytes] = {"fine_label_names.txt": "\n".join(names).encode()}
    kept = {}
    for name in ("train", "test"):
        data, fine = batch(5, 100)
        kept[name] = fine
        coarse = [label // 5 for label in fine]
        record = [np.array(each, np.uint8)[:, None] for each in (coarse, fine)]
        files[f"{name}.bin"] = np.concatenate([*record, data], 1).tobytes()
    write_folder(tmp_path / "cifar-100-binary", files)
    splits = load("cifar100", LoadOptions(data_dir=tmp_path, download=False))
    assert splits.train.labels.tolist() == kept["train"]
    assert splits.train.class_names == tuple(names)
    assert splits.normalisation.mean == (0.5071, 0.4865, 0.4409)


@pytest.mark.parametrize("layout", ["cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "CIFAR10", "."])
def test_cifar10_is_found_in_customary_folders(tmp_path: Path, layout: str) -> None:
    files, _, labels = cifar10_files()
    (tmp_path / layout).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (tmp_path / layout / name).write_bytes(content)
    assert load("cifar10", LoadOptions(data_dir=tmp_path, download=False)).train.labels.tolist() == labels


def test_cifar10_is_found_as_an_archive(tmp_path: Path) -> None:
    files, _, labels = cifar10_files()
    write_archive(tmp_path / "cifar-10-binary.tar.gz", files)
    assert load("cifar10", LoadOptions(data_dir=tmp_path, download=False)).train.labels.tolist() == labels


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_3.bin", None, r"lacks data_batch_3\.bin"),
        ("data_batch_3.bin", b"", "not a whole number of records"),
        ("data_batch_3.bin", bytes(3072), "not a whole number of records"),
        ("data_batch_3.bin", bytes([10]) + bytes(3072), "label 10, outside"),
        ("batches.meta.txt", b"one two three", "does not name 10 classes"),
    ],
)
def test_broken_binary_batches_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    files, _, _ = cifar10_files()
    if content is None:
        del files[name]
    else:
        files[name] = content
    with pytest.raises(DataError, match=message):
        load(write_folder(tmp_path / "c", files))


@pytest.mark.parametrize("archived", [False, True])
@pytest.mark.parametrize("classes", [10, 100])
def test_the_pickled_version_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classes: int, archived: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DPVISION_DATA", raising=False)
    canary = tmp_path / "canary"
    program = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "batches.meta"] if classes == 10 else ["train", "test", "meta"]
    files = dict.fromkeys(names, program)
    place = write_archive(tmp_path / "c.tar.gz", files) if archived else write_folder(tmp_path / "c", files)
    with pytest.raises(DataError, match=f"Python version of cifar{classes}.*cifar-{classes}-binary.tar.gz, from www"):
        load(place)
    if not archived:
        with pytest.raises(DataError, match=f"It is at www.*cifar-{classes}-binary.tar.gz"):
            load(f"cifar{classes}", LoadOptions(data_dir=place, download=False))
    assert not canary.exists()
    pickle.loads(program)  # noqa: S301 - what an unpickler would have done
    assert canary.exists()


# --- hostile archives ------------------------------------------------------------------------------------------------


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (member("cifar/data_batch_1.bin", tarfile.SYMTYPE, "/etc/passwd"), "is a link or a device"),
        (member("cifar/x", tarfile.LNKTYPE, "cifar/y"), "is a link or a device"),
        (member("cifar/x", tarfile.FIFOTYPE), "is a link or a device"),
        (member("cifar/x", tarfile.CHRTYPE), "is a link or a device"),
        (member("../outside"), "leads outside"),
        (member("cifar/../../outside"), "leads outside"),
        (member("/etc/passwd"), "leads outside"),
        (member("C:\\windows\\x"), "leads outside"),
        (member("cifar\\..\\..\\x"), "leads outside"),
        (member("other/data_batch_1.bin"), "twice"),
    ],
)
def test_an_archive_with_a_bad_member_is_refused_whole(tmp_path: Path, extra: tarfile.TarInfo, message: str) -> None:
    files, _, _ = cifar10_files()
    before = {path.name for path in tmp_path.iterdir()}
    place = write_archive(tmp_path / "c.tar.gz", files, extra)
    with pytest.raises(DataError, match=message):
        load(place)
    assert {path.name for path in tmp_path.iterdir()} == before | {"c.tar.gz"}


def test_a_member_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    header = member("cifar/data_batch_1.bin", size=10**12).tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "c.tar").write_bytes(header + bytes(2048))
    with pytest.raises(DataError, match="larger than any CIFAR file"):
        load(tmp_path / "c.tar")


def test_a_truncated_or_foreign_archive_is_refused(tmp_path: Path) -> None:
    files, _, _ = cifar10_files()
    whole = write_archive(tmp_path / "c.tar.gz", files).read_bytes()
    for content in (whole[: len(whole) // 2], b"not an archive", b""):
        (tmp_path / "d.tar.gz").write_bytes(content)
        with pytest.raises(DataError):
            load(tmp_path / "d.tar.gz")
    with pytest.raises(DataError, match="none of the training files"):
        load(write_archive(tmp_path / "e.tar.gz", {"readme": b"hello"}))
