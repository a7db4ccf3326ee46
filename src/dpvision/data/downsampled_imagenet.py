"""Downsampled ImageNet: the .npz batches of 16, 32 or 64 pixels on which De et al. pre-train.

A batch has the arrays ``data``, uint8 rows of red, green and blue planes one after the other, and ``labels`` from 1 to
1000. The training images are in ``train_data_batch_1.npz`` and so on, the validation images in ``val_data.npz``.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpvision.data.safe_read import open_regular, read_member, reading
from dpvision.data.store import ImageStore, store_of_arrays
from dpvision.errors import DataError, require_memory, shown

CLASSES: Final = 1000
_TRAIN, _VALIDATION = "train_data_batch_*.npz", "val_data.npz"


def is_downsampled_imagenet(path: Path) -> bool:
    """Whether a folder holds batches of downsampled ImageNet."""
    return path.is_dir() and any(path.glob(_TRAIN))


def load_downsampled_imagenet(folder: Path) -> tuple[ImageStore, ImageStore | None]:
    """Load all training batches as one store, and the validation images as the test split.

    Args:
        folder: holds ``train_data_batch_*.npz`` and, if there is a test split, ``val_data.npz``.

    Raises:
        DataError: a batch is damaged, is of another size, or has other classes; or they do not fit into memory.
    """
    train = _joined(sorted(folder.glob(_TRAIN)), name=f"{shown(folder.name)} train")
    validation = folder / _VALIDATION
    if not validation.exists():
        return train, None
    test = _joined([validation], name=f"{shown(folder.name)} test")
    if test.image_shape != train.image_shape:
        raise DataError(f"{shown(validation)} has images of {test.image_shape[1:]}, not {train.image_shape[1:]}.")
    return train, test


def _joined(paths: Sequence[Path], *, name: str) -> ImageStore:
    """Read batches one after the other into one array."""
    labels = [_array(path, "labels") for path in paths]
    for path, own in zip(paths, labels, strict=True):
        if own.ndim != 1 or own.dtype.kind not in "iu" or not (len(own) and own.min() >= 1 and own.max() <= CLASSES):
            raise DataError(f"{shown(path)}: labels must be whole numbers from 1 to {CLASSES}, one an image.")
    images: NDArray[np.uint8] | None = None
    start = 0
    for path, own in zip(paths, labels, strict=True):
        pixels = _array(path, "data")
        side = math.isqrt(pixels.shape[1] // 3) if pixels.ndim == 2 else 0
        if pixels.dtype != np.uint8 or side == 0 or pixels.shape != (len(own), 3 * side**2):
            raise DataError(f"{shown(path)}: data must be uint8 rows of three square planes, got {pixels.shape}.")
        if images is None:
            rows = sum(map(len, labels))
            require_memory(rows * pixels.shape[1], paths[0].parent)
            images = np.empty((rows, 3, side, side), dtype=np.uint8)
        elif images.shape[3] != side:
            raise DataError(f"{shown(path)} has images of {side} pixels, the first batch of {images.shape[3]}.")
        images[start : start + len(own)] = pixels.reshape(-1, 3, side, side)
        start += len(own)
    if images is None:
        raise DataError("there is no batch to read.")
    classes = tuple(str(label) for label in range(1, CLASSES + 1))
    return store_of_arrays(images=images, labels=np.concatenate(labels) - 1, class_names=classes, name=name)


def _array(path: Path, key: str) -> NDArray[Any]:
    """Read one array of a batch, without pickle."""
    try:
        with reading(path), open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = {member.filename: member for member in archive.infolist()}
            if f"{key}.npy" in members:
                return read_member(archive, members[f"{key}.npy"])
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise DataError(f"{shown(path)} can't be read as .npz: {shown(error)}.") from error
    raise DataError(f"{shown(path)} has no array named {key}: is it a batch of downsampled ImageNet?")
