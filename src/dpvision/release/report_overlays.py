"""A picture with two outlines on it: what is there, and what the model found. Made into a PNG."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dpvision.storage.run_folder import Example

# Shapes: C channels, H × W pixels of the example, then of the drawing.


# Two colours of Okabe and Ito's palette, which people with any kind of colour vision tell apart; the truth is the
# wider line, so that it also shows below a prediction that follows it.
TRUTH, PREDICTION = (86, 180, 233), (230, 159, 0)
_TRUTH_RADIUS, _PREDICTION_RADIUS = 2, 1
_SHADE = 0.45
_SIDE = 336  # about what a third of the page is wide, for twice as many dots


def overlay_png(example: Example) -> bytes:
    """The example as a PNG of at most 336 × 336; equal examples give equal bytes."""
    size = _drawn_size(*example.truth_HW.shape)
    image_HWC = _picture(example.image_CHW, size)
    truth_HW, predicted_HW = _stretched(example.truth_HW, size), _stretched(example.predicted_HW, size)
    around = outline(truth_HW, _TRUTH_RADIUS + 1) | outline(predicted_HW, _PREDICTION_RADIUS + 1)
    image_HWC[around] = (image_HWC[around] * _SHADE).astype(np.uint8)  # a dark seam, for bright pictures
    image_HWC[outline(truth_HW, _TRUTH_RADIUS)] = TRUTH
    image_HWC[outline(predicted_HW, _PREDICTION_RADIUS)] = PREDICTION
    content = io.BytesIO()
    Image.fromarray(image_HWC).save(content, "PNG", optimize=True)
    return content.getvalue()


def outline(mask_HW: NDArray[np.uint8], radius: int) -> NDArray[np.bool_]:
    """Pixels that have one of another class at most ``radius`` away, along a row or a column."""
    height, width = mask_HW.shape
    wide = np.pad(mask_HW, radius, mode="edge")
    found = np.zeros(mask_HW.shape, dtype=bool)
    for away in range(1, radius + 1):
        for down, right in ((away, 0), (-away, 0), (0, away), (0, -away)):
            top, left = radius + down, radius + right
            found |= wide[top : top + height, left : left + width] != mask_HW
    return found


def _drawn_size(height: int, width: int) -> tuple[int, int]:
    scale = _SIDE / max(height, width)
    if scale > 1:
        scale = int(scale)  # every pixel becomes the same square
    return max(1, round(height * scale)), max(1, round(width * scale))


def _picture(image_CHW: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    image_HWC = np.ascontiguousarray(np.broadcast_to(image_CHW, (3, *image_CHW.shape[1:])).transpose(1, 2, 0))
    drawn = Image.fromarray(image_HWC).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.array(drawn)


def _stretched(mask_HW: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    return np.asarray(Image.fromarray(mask_HW).resize((size[1], size[0]), Image.Resampling.NEAREST))
