"""CIFAR-10 and CIFAR-100: the official python and binary versions, from a folder or from the official archive."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, final

import numpy as np
from numpy.typing import NDArray

from dpvision.data.pickled import read_plain_pickle
from dpvision.data.safe_read import open_regular
from dpvision.data.store import ImageStore, store_of_arrays
from dpvision.errors import DataError, printable, shown, some_of

PIXELS = 3 * 32 * 32
MAX_FILE_BYTES = 256 * 2**20
# The official archives unpack to less than 200 MiB and have fewer than ten members.
MAX_ARCHIVE_BYTES = 512 * 2**20
MAX_MEMBERS = 1_000
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@final
@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which files one version of one set consists of. ``label_bytes``: before each image of a binary record."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    names_file: str
    num_classes: int
    label_key: str
    names_key: str
    label_bytes: int | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        """Every file that this version may have."""
        return (*self.train, *self.test, self.names_file)


_TEN = partial(Layout, num_classes=10, label_key="labels", names_key="label_names")
_HUNDRED = partial(Layout, num_classes=100, label_key="fine_labels", names_key="fine_label_names")
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "cifar10": (
        _TEN(
            train=tuple(f"{batch}.bin" for batch in _BATCHES),
            test=("test_batch.bin",),
            names_file="batches.meta.txt",
            label_bytes=1,
        ),
        _TEN(train=_BATCHES, test=("test_batch",), names_file="batches.meta"),
    ),
    "cifar100": (
        _HUNDRED(train=("train.bin",), test=("test.bin",), names_file="fine_label_names.txt", label_bytes=2),
        _HUNDRED(train=("train",), test=("test",), names_file="meta"),
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a set, wherever they lie."""

    source: Path
    names: frozenset[str]
    read: Callable[[str], bytes]


def open_files(source: Path) -> Files:
    """A folder, or a tar archive read in memory; nothing is ever unpacked to disk."""
    if source.is_dir():
        names = frozenset(path.name for path in source.iterdir() if path.is_file())
        return Files(source=source, names=names, read=lambda name: _file_content(source / name))
    members = _archive_content(source, wanted=frozenset(n for each in LAYOUTS.values() for v in each for n in v.wanted))
    return Files(source=source, names=frozenset(members), read=members.__getitem__)


def layout_of(name: str, files: Files) -> Layout | None:
    """The version of the set ``name`` that these files are, if any of its training files is there."""
    return next((layout for layout in LAYOUTS[name] if files.names & {*layout.train}), None)


def has_cifar(folder: Path, name: str) -> bool:
    """Whether ``folder`` holds files of the set ``name``."""
    if not folder.is_dir():
        return False
    layout = layout_of(name, open_files(folder))
    # "train" and "test" may be anything: the 100-class python version also has a file named meta.
    return layout is not None and (layout.label_bytes is not None or (folder / layout.names_file).is_file())


def load_cifar(files: Files, name: str) -> tuple[ImageStore, ImageStore]:
    """The training and test split."""
    layout = layout_of(name, files)
    if layout is None:
        raise DataError(f"{shown(files.source)} has none of the training files of {name}.")
    missing = sorted({*layout.train, *layout.test} - files.names)
    if missing:
        raise DataError(f"{shown(files.source)} lacks {some_of(missing)} of {name}. Get the set again.")
    class_names = _class_names(files, layout)
    train, test = (_load(files, layout, batches) for batches in (layout.train, layout.test))
    return (
        store_of_arrays(images=train[0], labels=train[1], class_names=class_names, name=f"{name} train"),
        store_of_arrays(images=test[0], labels=test[1], class_names=class_names, name=f"{name} test"),
    )


def _load(files: Files, layout: Layout, batches: tuple[str, ...]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    read = _read_binary if layout.label_bytes is not None else _read_pickled
    parts = [read(files.read(batch), layout, f"{files.source.name}/{batch}") for batch in batches]
    images = np.concatenate([part[0] for part in parts]).reshape(-1, 3, 32, 32)
    return images, np.concatenate([part[1] for part in parts])


def _read_binary(data: bytes, layout: Layout, source: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    record = (layout.label_bytes or 0) + PIXELS
    if not data or len(data) % record:
        raise DataError(f"{shown(source)} has {len(data)} bytes, not a whole number of records of {record} bytes.")
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    labels = rows[:, record - PIXELS - 1].astype(np.int64)
    return rows[:, record - PIXELS :], _checked(labels, layout, source)


def _read_pickled(data: bytes, layout: Layout, source: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    batch = _text_keys(read_plain_pickle(data, source=source))
    images, labels = batch.get("data"), batch.get(layout.label_key)
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != PIXELS:
        raise DataError(f"{shown(source)} has no array 'data' of rows of {PIXELS} bytes.")
    whole = isinstance(labels, list) and all(type(label) is int for label in labels)
    if not isinstance(labels, list) or not whole or len(labels) != len(images) or not labels:
        raise DataError(f"{shown(source)} has no list '{layout.label_key}' of one whole number for each image.")
    if not (min(labels) >= 0 and max(labels) < layout.num_classes):
        raise DataError(f"{shown(source)} has a label outside 0..{layout.num_classes - 1}.")
    return images, np.array(labels, dtype=np.int64)


def _checked(labels: NDArray[np.int64], layout: Layout, source: str) -> NDArray[np.int64]:
    if labels.max() >= layout.num_classes:
        raise DataError(f"{shown(source)} has a label {labels.max()}, outside 0..{layout.num_classes - 1}.")
    return labels


def _class_names(files: Files, layout: Layout) -> tuple[str, ...]:
    names = CIFAR10_CLASSES if layout.num_classes == 10 else tuple(map(str, range(layout.num_classes)))
    if layout.names_file not in files.names:
        return names
    data = files.read(layout.names_file)
    if layout.label_bytes is not None:
        found: Any = data.decode("utf-8", "replace").split()
    else:
        found = _text_keys(read_plain_pickle(data, source=layout.names_file)).get(layout.names_key)
    if not isinstance(found, list) or len(found) != layout.num_classes:
        raise DataError(f"{shown(files.source)}/{layout.names_file} does not name {layout.num_classes} classes.")
    return tuple(printable(_text(name)) for name in found)


def _text_keys(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {_text(key): value for key, value in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if not isinstance(value, str):
        raise DataError("a name in a CIFAR file is not a text.")
    return value


def _file_content(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise DataError(f"{shown(path)} can't be read: {shown(error)}.") from error
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{shown(path)} is larger than any CIFAR file.")
    return content


def _archive_content(path: Path, *, wanted: frozenset[str]) -> dict[str, bytes]:
    """The wanted files of a tar archive. One link, device or path that leads outside condemns the whole archive."""
    content: dict[str, bytes] = {}
    try:
        # As a stream, which can't be sent back and forth by the sizes that it states.
        with _unpacked(path) as bounded, tarfile.open(fileobj=bounded, mode="r|") as archive:
            for count, member in enumerate(archive):
                _check_member(member, path, count=count)
                name = PurePosixPath(member.name).name
                if not member.isfile() or name not in wanted:
                    continue
                if name in content:
                    raise DataError(f"{shown(path)} holds {name} twice.")
                found = archive.extractfile(member)
                content[name] = found.read() if found is not None else b""
    except (tarfile.TarError, OSError, EOFError, ValueError, LookupError, zlib.error, MemoryError) as error:
        raise DataError(f"{shown(path)} can't be read as an archive: {shown(error)}. Get it again.") from error
    return content


@contextmanager
def _unpacked(path: Path) -> Iterator[Any]:
    with open_regular(path) as file:
        if path.suffix not in (".gz", ".tgz"):
            yield _Bounded(file, path)
            return
        with gzip.open(file, "rb") as unpacked:
            yield _Bounded(unpacked, path)


@final
class _Bounded:
    """A file that may be read up to a size: small archives can unpack to endless ones."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, path: Path) -> None:
        self._file = file
        self._path = path
        self._left = MAX_ARCHIVE_BYTES

    def read(self, size: int) -> bytes:
        """The next bytes."""
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise DataError(f"{shown(self._path)} is refused: it unpacks to more than any CIFAR archive.")
        return data


def _check_member(member: tarfile.TarInfo, path: Path, *, count: int) -> None:
    parts = PurePosixPath(member.name.replace("\\", "/")).parts
    if not (member.isfile() or member.isdir()) or member.issparse():
        raise DataError(f"{shown(path)} is refused: {shown(member.name)} is a link or a device, or has holes.")
    if not parts or parts[0] == "/" or ".." in parts or ":" in parts[0]:
        raise DataError(f"{shown(path)} is refused: {shown(member.name)} leads outside the archive.")
    if not 0 <= member.size <= MAX_FILE_BYTES:
        raise DataError(f"{shown(path)} is refused: {shown(member.name)} is larger than any CIFAR file.")
    if count >= MAX_MEMBERS:
        raise DataError(f"{shown(path)} is refused: it has more members than any CIFAR archive.")
