"""CIFAR files: the binary and the pickled version, from folders and archives; hostile ones are refused, not run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpvision.data import LoadOptions, load
from dpvision.data.pickled import read_plain_pickle
from dpvision.errors import DataError

RNG = np.random.default_rng(0)
CLASSES10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def batch(rows: int, classes: int = 10) -> tuple[np.ndarray, list[int]]:
    return RNG.integers(0, 256, (rows, 3072), dtype=np.uint8), RNG.integers(0, classes, rows).tolist()


def python2_pickle(values: dict[str, Any]) -> bytes:
    """The opcodes that Python 2's cPickle wrote for the official files: byte strings, numpy.core, protocol 2."""
    return b"\x80\x02" + _old_style(values) + b"."


def _old_style(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"}q\x01(" + b"".join(_old_style(k) + _old_style(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"]q\x02(" + b"".join(map(_old_style, value)) + b"e"
    if isinstance(value, int):
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)
    if isinstance(value, str):
        return b"U" + bytes([len(value)]) + value.encode()
    rows, columns = (_old_style(n) for n in value.shape)
    content = value.tobytes()
    return (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87R(K\x01"
        + (rows + columns + b"\x86")
        + b"cnumpy\ndtype\nq\x07U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + (b"T" + struct.pack("<i", len(content)) + content + b"tb")
    )


def python3_pickle(values: dict[str, Any]) -> bytes:
    return pickle.dumps({key.encode(): value for key, value in values.items()}, protocol=2)


def cifar10_files(encode: Callable[[dict[str, Any]], bytes] | None) -> tuple[dict[str, bytes], np.ndarray, list[int]]:
    """Five small batches and a test batch; pickled by ``encode``, or binary."""
    files: dict[str, bytes] = {}
    images, labels = [], []
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]:
        data, own = batch(4)
        if name != "test_batch":
            images.append(data)
            labels += own
        if encode is None:
            files[f"{name}.bin"] = np.concatenate([np.array(own, np.uint8)[:, None], data], axis=1).tobytes()
        else:
            files[name] = encode({"batch_label": name, "labels": own, "data": data, "filenames": ["a.png"] * 4})
    if encode is None:
        files["batches.meta.txt"] = "\n".join([*CLASSES10, ""]).encode()
    else:
        files["batches.meta"] = encode({"num_cases_per_batch": 10000, "label_names": CLASSES10, "num_vis": 3072})
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


ENCODINGS = pytest.mark.parametrize("encode", [None, python2_pickle, python3_pickle])


@ENCODINGS
@pytest.mark.parametrize("archived", [False, True])
def test_cifar10_is_read_from_folder_and_archive(tmp_path: Path, encode: Any, archived: bool) -> None:
    files, images, labels = cifar10_files(encode)
    place = write_archive(tmp_path / "c.tar.gz", files) if archived else write_folder(tmp_path / "c", files)
    splits = load(place)
    np.testing.assert_array_equal(splits.train.images.numpy(), images)
    assert splits.train.labels.tolist() == labels
    assert splits.train.class_names == tuple(CLASSES10)
    assert splits.test is not None
    assert splits.test.num_rows == 4
    assert splits.normalisation.std == (0.2471, 0.2435, 0.2616)


@pytest.mark.parametrize("binary", [True, False])
def test_cifar100_uses_the_fine_labels(tmp_path: Path, binary: bool) -> None:
    names = [f"thing_{n}" for n in range(100)]
    files: dict[str, bytes] = {}
    kept = {}
    for name in ("train", "test"):
        data, fine = batch(5, 100)
        kept[name] = fine
        coarse = [label // 5 for label in fine]
        record = [np.array(each, np.uint8)[:, None] for each in (coarse, fine)]
        pickled = python2_pickle({"fine_labels": fine, "coarse_labels": coarse, "data": data})
        files[f"{name}.bin" if binary else name] = np.concatenate([*record, data], 1).tobytes() if binary else pickled
    if binary:
        files["fine_label_names.txt"] = "\n".join(names).encode()
    else:
        files["meta"] = python2_pickle({"fine_label_names": names, "coarse_label_names": names[:20]})
    write_folder(tmp_path / ("cifar-100-binary" if binary else "cifar-100-python"), files)
    splits = load("cifar100", LoadOptions(data_dir=tmp_path, download=False))
    assert splits.train.labels.tolist() == kept["train"]
    assert splits.train.class_names == tuple(names)
    assert splits.normalisation.mean == (0.5071, 0.4865, 0.4409)


@pytest.mark.parametrize("layout", ["cifar-10-batches-py", "cifar10/cifar-10-batches-py", "CIFAR10", "."])
def test_cifar10_is_found_in_customary_folders(tmp_path: Path, layout: str) -> None:
    files, _, labels = cifar10_files(python2_pickle)
    (tmp_path / layout).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (tmp_path / layout / name).write_bytes(content)
    assert load("cifar10", LoadOptions(data_dir=tmp_path, download=False)).train.labels.tolist() == labels


def test_cifar10_is_found_as_an_archive(tmp_path: Path) -> None:
    files, _, labels = cifar10_files(None)
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
    files, _, _ = cifar10_files(None)
    if content is None:
        del files[name]
    else:
        files[name] = content
    with pytest.raises(DataError, match=message):
        load(write_folder(tmp_path / "c", files))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"labels": [1]}, "no array 'data'"),
        ({"data": np.zeros((1, 3071), np.uint8), "labels": [1]}, "no array 'data'"),
        ({"data": np.zeros((1, 3072), np.uint8)}, "no list 'labels'"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "no list 'labels'"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": ["one"]}, "no list 'labels'"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [11]}, "label outside"),
        ({"data": np.zeros((1, 3072), np.float32), "labels": [1]}, "is refused"),
        ([1, 2], "holds no dictionary"),
    ],
)
def test_broken_pickled_batches_are_named(tmp_path: Path, values: Any, message: str) -> None:
    files, _, _ = cifar10_files(python2_pickle)
    files["data_batch_2"] = pickle.dumps(values, protocol=2)
    with pytest.raises(DataError, match=message):
        load(write_folder(tmp_path / "c", files))


# --- hostile pickles -------------------------------------------------------------------------------------------------


class Bomb:
    """Pickles to a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def hostile_pickles(canary: Path) -> list[bytes]:
    command = f"touch {canary}"
    bombs = [
        Bomb(os.system, command),
        Bomb(eval, f"open({str(canary)!r}, 'w')"),
        Bomb(getattr, "text", "upper"),
        Bomb(np.dtype, "O"),
        Bomb(np.array, [1]),
        np.array([Bomb(os.system, command)], dtype=object),
    ]
    made = [pickle.dumps({"data": bomb}, protocol=p) for bomb in bombs for p in range(6)]
    by_hand = [
        b"\x80\x02cposix\nsystem\n" + b"U" + bytes([len(command)]) + command.encode() + b"\x85R.",
        b"(cposix\nsystem\nV" + command.encode() + b"\no.",
        b"(V" + command.encode() + b"\niposix\nsystem\n.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",
        b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.",
        b"\x80\x02Pid\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x04]\x94\x8c\x01a\x93.",
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"\x80\x02}h\x09.",
        b"\x80\x02}}K\x01U\x01as.",
        b"\x80\x02K\x01K\x02.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
        b"",
        b".",
        b"garbage",
    ]
    return [*made, *by_hand]


def test_a_hostile_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for data in hostile_pickles(canary):
        with pytest.raises(DataError) as caught:
            read_plain_pickle(data, source="data_batch_1")
        assert "\n" not in str(caught.value)
        assert not canary.exists()


def test_the_hostile_pickles_would_have_run_otherwise(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickle.loads(hostile_pickles(canary)[0])  # noqa: S301 - made three lines above
    assert canary.exists()


def test_reading_a_batch_uses_no_unpickler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, _, labels = cifar10_files(python2_pickle)

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an unpickler was used")

    for name in ("loads", "load", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    assert load(write_folder(tmp_path / "c", files)).train.labels.tolist() == labels


def test_shared_lists_that_would_explode_in_print_are_harmless() -> None:
    nested: Any = ["lol"]
    for _ in range(60):
        nested = [nested, nested]
    with pytest.raises(DataError):
        read_plain_pickle(pickle.dumps(nested, protocol=4)[:-1] + b"\x8c\x01a\x93.", source="laughs")


def test_random_damage_gives_values_or_a_data_error_and_nothing_else() -> None:
    whole = python2_pickle({"labels": [1, 2], "data": np.arange(12, dtype=np.uint8).reshape(2, 6), "n": ["a"]})
    rng = np.random.default_rng(7)
    for _ in range(3000):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), rng.integers(1, 4)):
            data[place] = rng.integers(0, 256)
        try:
            read_plain_pickle(bytes(data[: rng.integers(1, len(data) + 1)]), source="damaged")
        except DataError:
            continue


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
    files, _, _ = cifar10_files(None)
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
    files, _, _ = cifar10_files(None)
    whole = write_archive(tmp_path / "c.tar.gz", files).read_bytes()
    for content in (whole[: len(whole) // 2], b"not an archive", b""):
        (tmp_path / "d.tar.gz").write_bytes(content)
        with pytest.raises(DataError):
            load(tmp_path / "d.tar.gz")
    with pytest.raises(DataError, match="none of the training files"):
        load(write_archive(tmp_path / "e.tar.gz", {"readme": b"hello"}))
