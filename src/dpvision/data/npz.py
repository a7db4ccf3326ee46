"""Arrays in an .npz file. Nothing is unpickled, and each header must agree with its member to the byte."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpvision.checks import DataError
from dpvision.data.store import ImageStore, store_of_arrays
from dpvision.data.wording import shown, some_of

IMAGE_KEYS = {"train": ("images", "x_train", "train_images", "X", "x"), "test": ("x_test", "test_images")}
LABEL_KEYS = {"train": ("labels", "y_train", "train_labels", "Y", "y"), "test": ("y_test", "test_labels")}
# Deflate can't do better than 1 : 1032: a member that promises more is lying.
MAX_ZIP_RATIO = 1100
CLASS_NAMES_KEY = "class_names"
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def load_npz(
    path: Path, *, unit_column: str | None = None, class_names: Sequence[str] | None = None
) -> tuple[ImageStore, ImageStore | None]:
    """The training split of an .npz file, and its test split if it has one."""
    arrays = _open(path, unit_column)
    images, labels = (_pick(arrays, keys["train"], path) for keys in (IMAGE_KEYS, LABEL_KEYS))
    units = None if unit_column is None else _units(_pick(arrays, (unit_column,), path), unit_column, path)
    test = None
    if any(key in arrays for key in IMAGE_KEYS["test"]):
        test = [_pick(arrays, keys["test"], path) for keys in (IMAGE_KEYS, LABEL_KEYS)]
    names = _class_names(arrays, [labels, *([] if test is None else test[1:])], class_names, path)
    train_store = _store(images, labels, names, name=f"{path.stem} train", path=path, units=units)
    test_store = None if test is None else _store(test[0], test[1], names, name=f"{path.stem} test", path=path)
    return train_store, test_store


def _store(
    images: NDArray[Any],
    labels: NDArray[Any],
    names: tuple[str, ...],
    *,
    name: str,
    path: Path,
    units: NDArray[Any] | None = None,
) -> ImageStore:
    rows = len(images)
    for what, values in (("labels", labels), ("units", units)):
        if values is not None and values.shape != (rows,):
            raise DataError(f"{shown(path)}: {what} {values.shape} don't match {rows} pictures.")
    numbers = _numbered(labels, names, path)
    pixels = _pictures(images, path)
    return store_of_arrays(images=pixels, labels=numbers, class_names=names, name=name, unit_names=units)


def _open(path: Path, unit_column: str | None) -> dict[str, NDArray[Any]]:
    """The arrays of the file that can be ours, read without pickle."""
    named = (key for keys in (IMAGE_KEYS, LABEL_KEYS) for split in keys.values() for key in split)
    wanted = {*named, CLASS_NAMES_KEY, unit_column}
    try:
        with zipfile.ZipFile(path) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist() if m.filename.endswith(".npy")}
            arrays = {key: np.atleast_1d(read_member(archive, members[key])) for key in members if key in wanted}
    except MemoryError as error:
        raise DataError(f"{shown(path)} does not fit into memory.") from error
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise DataError(f"{shown(path)} can't be read as .npz: {shown(error)}.") from error
    if not arrays:
        raise DataError(f"{shown(path)} has no pictures: its arrays are {some_of(sorted(members), limit=8) or 'none'}.")
    return arrays


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """One array of an .npz file, without pickle, and no larger than the member says."""
    where = f"{shown(archive.filename or 'the file')}/{shown(member.filename)}"
    if member.compress_type not in _COMPRESSIONS or member.file_size > member.compress_size * MAX_ZIP_RATIO + 1024:
        raise DataError(f"{where} is refused: its compression is not what .npz files use.")
    with archive.open(member) as file:
        shape, _, dtype = _header(file)
        if dtype.hasobject:
            raise DataError(f"{where} is refused: it holds pickled objects. Save plain numbers or texts.")
        if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise DataError(f"{where} is refused: its header promises {shape} {dtype}, its size says otherwise.")
    with archive.open(member) as file:
        return npy.read_array(file, allow_pickle=False)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    if version == (1, 0):
        return npy.read_array_header_1_0(file)
    return npy.read_array_header_2_0(file)


def _pick(arrays: dict[str, NDArray[Any]], keys: Sequence[str], path: Path) -> NDArray[Any]:
    for key in keys:
        if key in arrays:
            return arrays[key].reshape(-1) if arrays[key].ndim == 2 and arrays[key].shape[1] == 1 else arrays[key]
    raise DataError(f"{shown(path)} has no array named {shown(' or '.join(keys))} beside {some_of(sorted(arrays))}.")


def _pictures(images: NDArray[Any], path: Path) -> NDArray[np.uint8]:
    """Bytes in (N, C, H, W), from the layouts and types that can be told apart without looking at the values."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[1:]:
        raise DataError(
            f"{shown(path)}: pictures must be (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W), got {images.shape}."
        )
    return np.ascontiguousarray(_bytes(images, path))


def _bytes(images: NDArray[Any], path: Path) -> NDArray[np.uint8]:
    kind, width = images.dtype.kind, images.dtype.itemsize
    if kind == "u" and width == 1:
        return images.astype(np.uint8)
    if kind == "u" and width == 2:
        return ((images.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    if kind == "b":
        return images.astype(np.uint8) * np.uint8(255)
    top = {"f": 1, "i": 255, "u": 255}.get(kind)
    if top is None or (images.size and not (images.min() >= 0 and images.max() <= top)):
        raise DataError(
            f"{shown(path)}: {images.dtype} pictures must be numbers in 0..{top or 255}. Store them as uint8, 0..255."
        )
    return np.rint(images.astype(np.float64) * (255 / top)).astype(np.uint8)


def _class_names(
    arrays: dict[str, NDArray[Any]], labels: Sequence[NDArray[Any]], given: Sequence[str] | None, path: Path
) -> tuple[str, ...]:
    if given is not None:
        return tuple(given)
    if CLASS_NAMES_KEY in arrays:
        return tuple(_texts(arrays[CLASS_NAMES_KEY].reshape(-1)))
    if len({each.dtype.kind in "US" for each in labels}) > 1:
        raise DataError(f"{shown(path)}: labels are texts in one split and numbers in the other.")
    values = np.concatenate([each.reshape(-1) for each in labels])
    if values.dtype.kind in "US":
        return tuple(sorted(set(_texts(values))))
    top = int(_whole(values, path).max(initial=-1))
    if top >= 10_000:
        raise DataError(f"{shown(path)}: labels up to {top} without class_names are taken for a mistake.")
    return tuple(str(label) for label in range(top + 1))


def _numbered(labels: NDArray[Any], names: tuple[str, ...], path: Path) -> NDArray[np.int64]:
    if labels.dtype.kind not in "US":
        return _whole(labels, path)
    number = {name: index for index, name in enumerate(names)}
    unknown = sorted(set(_texts(labels)) - number.keys())
    if unknown:
        raise DataError(f"{shown(path)} has labels that are no class: {some_of(unknown)}.")
    return np.array([number[label] for label in _texts(labels)], dtype=np.int64)


def _whole(values: NDArray[Any], path: Path) -> NDArray[np.int64]:
    if values.dtype.kind not in "iub" or (values.size and (values.min() < 0 or values.max() > 2**31)):
        raise DataError(f"{shown(path)}: labels must be whole numbers >= 0 or texts, got {values.dtype}.")
    return values.astype(np.int64)


def _units(units: NDArray[Any], column: str, path: Path) -> NDArray[Any]:
    if units.dtype.kind not in "iubUS":
        raise DataError(f"{shown(path)}: {shown(column)} must hold whole numbers or texts, got {units.dtype}.")
    if units.dtype.kind in "US" and not all(_texts(units.reshape(-1))):
        raise DataError(f"{shown(path)}: {shown(column)} is empty in some rows. Each row needs its unit.")
    return units


def _texts(values: NDArray[Any]) -> list[str]:
    return [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values.tolist()]
