"""MNIST's idx files, gzipped or not. A header must agree with its file to the byte."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dpvision.data.safe_read import open_regular, require_memory
from dpvision.data.store import ImageStore, store_of_arrays
from dpvision.errors import DataError, shown

IMAGES_MAGIC, LABELS_MAGIC = 0x00000803, 0x00000801
# Deflate can't do better than 1 : 1032, so a header that promises more than this is lying.
MAX_GZIP_RATIO = 1100
STEMS = {"train": "train", "test": "t10k"}


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in one idx file of unsigned bytes (one or three dimensions)."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if path.suffix != ".gz":
                return _read(file, path, most=size)
            with gzip.open(file, "rb") as unpacked:
                return _read(unpacked, path, most=size * MAX_GZIP_RATIO)
    except MemoryError as error:
        raise DataError(f"{shown(path)} does not fit into memory.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{shown(path)} can't be read: {shown(error)}. Get the file again.") from error


def _read(file: BinaryIO | gzip.GzipFile, path: Path, *, most: int) -> NDArray[np.uint8]:
    (magic,) = struct.unpack(">I", _exactly(file, 4, path))
    if magic not in (IMAGES_MAGIC, LABELS_MAGIC):
        raise DataError(f"{shown(path)} is not an idx file of bytes: its magic number is {magic:#010x}.")
    dimensions = magic & 0xFF
    shape = struct.unpack(f">{dimensions}I", _exactly(file, 4 * dimensions, path))
    size = math.prod(shape)
    if size > most:
        raise DataError(f"{shown(path)} promises {size} bytes (shape {shape}), more than the file can hold.")
    require_memory(2 * size, path)
    data = _exactly(file, size, path)
    if file.read(1):
        raise DataError(f"{shown(path)} promises {size} bytes (shape {shape}), but holds more.")
    return np.frombuffer(bytearray(data), dtype=np.uint8).reshape(shape)


def _exactly(file: BinaryIO | gzip.GzipFile, count: int, path: Path) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise DataError(f"{shown(path)} ends too early: {count} more bytes were promised, {len(data)} are there.")
    return data


def find_idx(folder: Path, split: str, kind: str) -> Path | None:
    """The file of a split's ``images`` or ``labels`` in ``folder``, under any of its customary names."""
    dimensions = 3 if kind == "images" else 1
    for separator in "-.":
        for suffix in ("", ".gz"):
            path = folder / f"{STEMS[split]}-{kind}{separator}idx{dimensions}-ubyte{suffix}"
            if path.is_file():
                return path
    return None


def has_idx(folder: Path) -> bool:
    """Whether ``folder`` holds idx files of a training split."""
    return find_idx(folder, "train", "images") is not None


def load_idx(folder: Path, split: str, *, name: str, class_names: tuple[str, ...] | None = None) -> ImageStore | None:
    """One split (``train`` or ``test``) of a folder of idx files; None if it has no file of that split."""
    found = {kind: find_idx(folder, split, kind) for kind in ("images", "labels")}
    if not any(found.values()):
        return None
    paths = {kind: path for kind, path in found.items() if path is not None}
    for kind in found.keys() - paths.keys():
        raise DataError(f"{shown(folder)} has no {STEMS[split]}-{kind}-idx… file beside the other one.")
    images, labels = read_idx(paths["images"]), read_idx(paths["labels"])
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"{shown(folder)}: images {images.shape} and labels {labels.shape} of the {split} split don't match."
        )
    names = class_names or tuple(str(label) for label in range(int(labels.max(initial=0)) + 1))
    return store_of_arrays(images=images[:, None], labels=labels, class_names=names, name=f"{name} {split}")
