"""Numbers of any kind into bytes: intensities by a public window, masks by their rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpvision.data.options import MaskClasses
from dpvision.data.wording import BadFile

MAX_CLASSES = 200
BACKGROUND = "background"


def windowed(
    values: NDArray[Any], window: tuple[float, float], *, slope: float = 1.0, intercept: float = 0.0
) -> NDArray[np.uint8]:
    """Bytes: 0 at the window's lower end and below, 255 at its upper end and above. All zeros if it has no width.

    An intensity is ``slope`` times the value plus ``intercept``.
    """
    if values.dtype.kind not in "iuf":
        raise BadFile(f"intensities must be real numbers, got {values.dtype}")
    low, high = window
    width = high - low if high > low else math.inf
    found = np.empty(values.shape, dtype=np.uint8)
    # Slice by slice: in float64 a volume would be eight times as large.
    for piece, out in zip(values, found, strict=True):
        if piece.dtype.kind == "f" and not np.isfinite(piece).all():
            raise BadFile("NaN or infinite intensities")
        share = (np.clip(piece.astype(np.float64) * slope + intercept, low, high) - low) / width
        out[...] = np.rint(share * 255)
    return found


def mask_bytes(values: NDArray[Any], mask_classes: MaskClasses) -> NDArray[np.uint8]:
    """The class of each pixel from the numbers of a mask: whole, not negative, and in "classes" mode few."""
    if values.dtype.kind not in "biuf":
        raise BadFile(f"a mask must hold whole numbers, got {values.dtype}")
    if values.dtype.kind == "f" and not (np.isfinite(values).all() and (values == np.floor(values)).all()):
        raise BadFile("a mask must hold whole numbers, got fractions, NaN or infinity")
    if values.size and values.min() < 0:
        raise BadFile(f"a mask must hold numbers >= 0, got {values.min()}")
    if mask_classes == "merged":
        return (values != 0).astype(np.uint8)
    top = int(values.max(initial=0))
    if top >= MAX_CLASSES:
        raise BadFile(
            f"a mask with the value {top} has no class of that number (0 to {MAX_CLASSES - 1}); merge the classes"
        )
    return values.astype(np.uint8)


def mask_class_names(masks: Sequence[NDArray[Any]], mask_classes: MaskClasses) -> tuple[str, ...]:
    """What the classes of masks are called that bring no names: by number, as many as the largest value needs."""
    if mask_classes == "merged":
        return BACKGROUND, "foreground"
    top = max((int(each.max(initial=0)) for each in masks), default=0)
    return BACKGROUND, *(str(number) for number in range(1, max(top, 1) + 1))
