"""Readers for the files in which MNIST and CIFAR are published: idx files, and CIFAR's binary version.

Idx files (MNIST, FashionMNIST) may be gzipped. CIFAR-10 and CIFAR-100 are read from a folder or from the official tar
archive, of which nothing is ever unpacked to disk. CIFAR's Python version consists of pickles, which are refused.
"""

from __future__ import annotations

import math
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, final

import numpy as np
from numpy.typing import NDArray

from dpvision.data.safe_read import open_regular, open_unpacked, read_exactly, reading
from dpvision.data.store import ImageStore, store_of_arrays
from dpvision.errors import BadFile, DataError, printable, require_memory, shown, some_of

IMAGES_MAGIC, LABELS_MAGIC = 0x00000803, 0x00000801
IDX_STEMS = {"train": "train", "test": "t10k"}
CIFAR_PIXELS = 3 * 32 * 32
# The official CIFAR archives unpack to less than 200 MiB and have fewer than ten members.
MAX_FILE_BYTES = 256 * 2**20
MAX_ARCHIVE_BYTES = 512 * 2**20
MAX_MEMBERS = 1_000
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_HOMEPAGE = "www.cs.toronto.edu/~kriz/cifar.html"


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read one idx file of unsigned bytes.

    Args:
        path: the file, gzipped if its name ends in ``.gz``.

    Returns:
        Labels (rows,) or images (rows, height, width).

    Raises:
        DataError: if the header and the file do not agree to the byte.
    """
    with reading(path), open_unpacked(path) as (file, most):
        (magic,) = struct.unpack(">I", read_exactly(file, 4))
        if magic not in (IMAGES_MAGIC, LABELS_MAGIC):
            raise BadFile(f"not an idx file of bytes: its magic number is {magic:#010x}")
        dimensions = magic & 0xFF
        shape = struct.unpack(f">{dimensions}I", read_exactly(file, 4 * dimensions))
        if 0 in shape[1:]:
            raise BadFile(f"its header promises images without pixels (shape {shape})")
        size = math.prod(shape)
        if size > most:
            raise BadFile(f"its header promises {size} bytes (shape {shape}), more than the file can hold")
        require_memory(2 * size, path)
        data = read_exactly(file, size)
        if file.read(1):
            raise BadFile(f"its header promises {size} bytes (shape {shape}), but holds more")
        return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def has_idx(folder: Path) -> bool:
    """Whether ``folder`` holds the images of a training split as an idx file."""
    return _find_idx(folder, "train", "images") is not None


def load_idx(folder: Path, split: str, *, name: str, class_names: tuple[str, ...] | None = None) -> ImageStore | None:
    """Load one split of a folder of idx files.

    Args:
        folder: where the files are.
        split: ``train`` or ``test``.
        name: the dataset's name.
        class_names: names of the classes; numbers by default.

    Returns:
        The images as a store, or None if the folder has no file of that split.

    Raises:
        DataError: if one of the two files is missing or they do not match.
    """
    paths = {kind: _find_idx(folder, split, kind) for kind in ("images", "labels")}
    found = [path for path in paths.values() if path is not None]
    if not found:
        return None
    if len(found) == 1:
        missing = "labels" if paths["images"] else "images"
        raise DataError(f"{shown(folder)} has no {IDX_STEMS[split]}-{missing}-idx… file beside the other one.")
    images, labels = map(read_idx, found)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(f"{shown(folder)}: {split} images {images.shape} and labels {labels.shape} don't match.")
    names = class_names or tuple(str(label) for label in range(int(labels.max(initial=0)) + 1))
    return store_of_arrays(images=images[:, None], labels=labels, class_names=names, name=f"{name} {split}")


def _find_idx(folder: Path, split: str, kind: str) -> Path | None:
    """Find the file of a split's ``images`` or ``labels`` under any of its usual names."""
    stem = folder / f"{IDX_STEMS[split]}-{kind}"
    names = [f"{stem}{mark}idx{3 if kind == 'images' else 1}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz")]
    return next((path for path in map(Path, names) if path.is_file()), None)


@final
@dataclass(frozen=True, kw_only=True)
class CifarLayout:
    """The files of one CIFAR dataset in its binary version, and those that only the pickled version has.

    A record is ``label_bytes`` labels, of which the last counts, and the pixels of one image.
    """

    train: tuple[str, ...]
    test: tuple[str, ...]
    names_file: str
    num_classes: int
    label_bytes: int
    pickled: frozenset[str]

    @property
    def files(self) -> frozenset[str]:
        """Every file that the dataset may have, in either version."""
        return frozenset({*self.train, *self.test, self.names_file, *self.pickled})


CIFAR_LAYOUTS = {
    "cifar10": CifarLayout(
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        names_file="batches.meta.txt",
        num_classes=10,
        label_bytes=1,
        pickled=frozenset({"data_batch_1", "batches.meta"}),
    ),
    "cifar100": CifarLayout(
        train=("train.bin",),
        test=("test.bin",),
        names_file="fine_label_names.txt",
        num_classes=100,
        label_bytes=2,
        pickled=frozenset({"train", "meta"}),
    ),
}


@final
@dataclass(frozen=True, kw_only=True)
class CifarFiles:
    """The files of a dataset in a folder or in an archive, by name."""

    source: Path
    names: frozenset[str]
    read: Callable[[str], bytes]

    def has(self, name: str) -> bool:
        """Whether any training file of the dataset ``name`` is there."""
        return bool(self.names & {*CIFAR_LAYOUTS[name].train})

    def pickled_version(self) -> str | None:
        """The dataset whose Python version this is; a file named train may be anything, so meta must be there too."""
        return next((name for name, layout in CIFAR_LAYOUTS.items() if layout.pickled <= self.names), None)


def open_cifar(source: Path) -> CifarFiles:
    """Open a folder, or a tar archive (which may be gzipped) that is read into memory.

    Raises:
        DataError: if the archive is damaged, too large, or has a member that is a link, a device or outside of it.
    """
    if source.is_dir():
        names = frozenset(path.name for path in source.iterdir() if path.is_file())
        return CifarFiles(source=source, names=names, read=lambda name: _file_content(source / name))
    members = _archive_content(source)
    return CifarFiles(source=source, names=frozenset(members), read=members.__getitem__)


def has_cifar(folder: Path, name: str) -> bool:
    """Whether ``folder`` holds training files of the dataset ``name`` in its binary version."""
    return folder.is_dir() and open_cifar(folder).has(name)


def refuse_pickled_cifar(files: CifarFiles) -> None:
    """Refuse CIFAR's Python version and say where the binary version comes from."""
    name = files.pickled_version()
    if name is not None:
        archive = f"cifar-{name.removeprefix('cifar')}-binary.tar.gz"
        raise DataError(
            f"{shown(files.source)} holds the Python version of {name}, which is pickled and could run code. Get the "
            f"binary version, {archive}, from {CIFAR_HOMEPAGE}."
        )


def load_cifar(files: CifarFiles, name: str) -> tuple[ImageStore, ImageStore]:
    """Load the training and the test split.

    Args:
        files: from ``open_cifar``.
        name: ``cifar10`` or ``cifar100`` (with its fine labels).

    Raises:
        DataError: if files are missing or damaged.
    """
    layout = CIFAR_LAYOUTS[name]
    if not files.has(name):
        refuse_pickled_cifar(files)
        raise DataError(f"{shown(files.source)} has none of the training files of {name}.")
    missing = sorted({*layout.train, *layout.test} - files.names)
    if missing:
        raise DataError(f"{shown(files.source)} lacks {some_of(missing)} of {name}. Get the dataset again.")
    class_names = _class_names(files, layout)
    train, test = (
        _load_split(files, layout, batches, class_names, f"{name} {split}")
        for split, batches in (("train", layout.train), ("test", layout.test))
    )
    return train, test


def _load_split(
    files: CifarFiles, layout: CifarLayout, batches: tuple[str, ...], class_names: tuple[str, ...], name: str
) -> ImageStore:
    """Read the records of some files into one store."""
    record, parts = layout.label_bytes + CIFAR_PIXELS, []
    for batch in batches:
        data, where = files.read(batch), shown(f"{files.source.name}/{batch}")
        if not data or len(data) % record:
            raise DataError(f"{where} has {len(data)} bytes, not a whole number of records of {record} bytes.")
        rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
        top = rows[:, layout.label_bytes - 1].max()
        if top >= layout.num_classes:
            raise DataError(f"{where} has a label {top}, outside 0..{layout.num_classes - 1}.")
        parts.append(rows)
    records = np.concatenate(parts)
    images = records[:, layout.label_bytes :].reshape(-1, 3, 32, 32)
    labels = records[:, layout.label_bytes - 1]
    return store_of_arrays(images=images, labels=labels, class_names=class_names, name=name)


def _class_names(files: CifarFiles, layout: CifarLayout) -> tuple[str, ...]:
    """Read the names of the classes, or use CIFAR-10's own or numbers where the file is missing."""
    if layout.names_file not in files.names:
        return CIFAR10_CLASSES if layout.num_classes == 10 else tuple(map(str, range(layout.num_classes)))
    found = files.read(layout.names_file).decode("utf-8", "replace").split()
    if len(found) != layout.num_classes:
        raise DataError(f"{shown(files.source)}/{layout.names_file} does not name {layout.num_classes} classes.")
    return tuple(map(printable, found))


def _file_content(path: Path) -> bytes:
    """Read a whole file of at most ``MAX_FILE_BYTES``."""
    with reading(path), open_regular(path) as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise DataError(f"{shown(path)} is larger than any CIFAR file.")
    return content


def _archive_content(path: Path) -> dict[str, bytes]:
    """Read the files of the CIFAR datasets out of a tar archive; one bad member condemns the whole archive."""
    wanted = frozenset[str]().union(*(layout.files for layout in CIFAR_LAYOUTS.values()))
    content: dict[str, bytes] = {}
    try:
        with open_unpacked(path) as (file, _):
            bounded: Any = _Bounded(file, path)
            # As a stream, which can't be sent back and forth by the sizes that it states.
            with tarfile.open(fileobj=bounded, mode="r|") as archive:
                for count, member in enumerate(archive):
                    _check_member(member, path, count=count)
                    name = PurePosixPath(member.name).name
                    if not member.isfile() or name not in wanted:
                        continue
                    if name in content:
                        raise DataError(f"{shown(path)} holds {name} twice.")
                    found = archive.extractfile(member)
                    content[name] = found.read() if found is not None else b""
    except (tarfile.TarError, BadFile, ValueError, LookupError) as error:
        raise DataError(f"{shown(path)} can't be read as an archive: {shown(error)}. Get it again.") from error
    return content


@final
class _Bounded:
    """A stream that yields at most ``MAX_ARCHIVE_BYTES``: a small archive can unpack to an endless one."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._left = MAX_ARCHIVE_BYTES

    def read(self, size: int) -> bytes:
        """Read the next ``size`` bytes."""
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise DataError(f"{shown(self._path)} is refused: it unpacks to more than any CIFAR archive.")
        return data


def _check_member(member: tarfile.TarInfo, path: Path, *, count: int) -> None:
    """Refuse a member that no CIFAR archive has."""
    parts = PurePosixPath(member.name.replace("\\", "/")).parts
    name, refused = shown(member.name), f"{shown(path)} is refused:"
    if not (member.isfile() or member.isdir()) or member.issparse():
        raise DataError(f"{refused} {name} is a link or a device, or has holes.")
    if not parts or parts[0] == "/" or ".." in parts or ":" in parts[0]:
        raise DataError(f"{refused} {name} leads outside the archive.")
    if not 0 <= member.size <= MAX_FILE_BYTES:
        raise DataError(f"{refused} {name} is larger than any CIFAR file.")
    if count >= MAX_MEMBERS:
        raise DataError(f"{refused} it has more members than any CIFAR archive.")
