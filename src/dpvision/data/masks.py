"""Mask pictures: one class for each pixel, by its number, and never a mixture of two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dpvision.checks import DataError
from dpvision.data.intensities import mask_bytes
from dpvision.data.options import MaskClasses
from dpvision.data.pictures import SIXTEEN_BIT, opened, scaled, upright
from dpvision.data.store import ImageStore
from dpvision.data.wording import BadFile, shown

# Compression blurs the edges of a mask: from here up a JPEG's pixel is foreground.
JPEG_THRESHOLD = 128


def decode_mask(
    path: Path, *, size: tuple[int, int], squash: bool = False, mask_classes: MaskClasses = "merged"
) -> NDArray[np.uint8]:
    """One mask (H, W), scaled and cropped as its picture is, each pixel by the nearest one."""
    with opened(path) as picture:
        picture.load()
        classes = mask_bytes(_numbers(picture, mask_classes), mask_classes)
        flat = upright(Image.fromarray(classes), picture)
    return np.asarray(scaled(flat, size, squash=squash, method=Image.Resampling.NEAREST))


def with_foreground(store: ImageStore) -> ImageStore:
    """The rows whose mask is not empty: each is decided by itself."""
    rows = np.flatnonzero(store.labels.flatten(1).any(1).numpy())
    if not len(rows):
        raise DataError(f"{shown(store.name)}: every mask is empty, so only_foreground leaves nothing.")
    return store if len(rows) == store.num_rows else replace(store.select_rows(rows), skipped=store.skipped)


def _numbers(picture: Image.Image, mask_classes: MaskClasses) -> NDArray[Any]:
    """A mask's numbers: those of a palette by index, of a lossy file by a threshold."""
    if picture.format in ("JPEG", "MPO"):
        if mask_classes != "merged":
            raise BadFile("a JPEG does not keep the numbers of classes; store the mask as PNG or TIFF")
        return np.asarray(picture.convert("L")) >= JPEG_THRESHOLD
    if picture.format == "WEBP":
        raise BadFile("a WebP may have lost numbers; store the mask as PNG or TIFF")
    if picture.mode in ("1", "L", "P") or picture.mode in SIXTEEN_BIT:
        return np.asarray(picture)
    if picture.mode == "RGB" and mask_classes == "merged":
        return np.asarray(picture).max(axis=2)
    raise BadFile(f"a mask needs one channel of whole numbers, got {picture.mode}; store it grey or with a palette")
