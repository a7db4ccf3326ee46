"""Augmented views of images: rotated, mirrored, cropped, erased; in batches, each view from its own random words.

Shapes: N images, K views of each, B = N·K views with those of one image together, J random words of a view.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dpvision.config import ViewsConfig

Padding = Literal["reflect", "symmetric", "zeros"]
WORDS_PER_VIEW: Final = 5
ERASED_AREA: Final = (0.02, 0.33)
ERASED_ASPECT: Final = (0.3, 3.3)
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64(2**32 - 1)
# Which half of a view's words decides what.
_Y, _X, _MIRROR, _ANGLE, _ERASE, _AREA, _ASPECT, _TOP, _LEFT = range(9)


NO_AUGMENTATION: Final = ViewsConfig()


def words_per_view(settings: ViewsConfig) -> int:
    """The number of random 64-bit words that decide one view; 0 if every view equals its image."""
    return WORDS_PER_VIEW if settings.random else 0


def make_views(
    images_NCHW: Tensor, settings: ViewsConfig, words_NKJ: NDArray[np.uint64], *, classes: bool = False
) -> Tensor:
    """Make augmented views: first rotated, then mirrored, then padded and cropped.

    Args:
        images_NCHW: images of any type, or masks (N, 1, H, W).
        settings: how many views, and what changes them.
        words_NKJ: uniform 64-bit words, ``words_per_view`` of them for each view.
        classes: the values are class numbers, which are moved but never mixed: the same words move a mask as they move
            its
            image. What lies outside is mirrored where the image is mirrored, and class 0 otherwise.

    Returns:
        (N·K, C, H, W) of the same type.

    Guarantee: a view depends on its own image and its own words alone.
    """
    if not settings.random:
        return images_NCHW
    halves_BJ = _halves(words_NKJ)
    source_B = torch.arange(len(images_NCHW), device=images_NCHW.device).repeat_interleave(settings.count)
    if settings.rotation > 0:
        angle_B = math.radians(settings.rotation) * (2 * _fraction(halves_BJ[:, _ANGLE]) - 1)
        outside = "zeros" if settings.padding == "zeros" else "reflection"
        images_NCHW = rotate(images_NCHW[source_B], angle_B, outside=outside, nearest=classes)
        source_B = torch.arange(len(source_B), device=source_B.device)
    mirror_B = _fraction(halves_BJ[:, _MIRROR]) < settings.flip
    y_B, x_B = (_below(halves_BJ[:, which], 2 * settings.crop_padding + 1) for which in (_Y, _X))
    chosen = (torch.from_numpy(index.astype(np.int64)).to(source_B.device) for index in (mirror_B, y_B, x_B))
    return _windows(images_NCHW, settings)[(source_B, *chosen)]


def erase_views(inputs_BCHW: Tensor, settings: ViewsConfig, words_NKJ: NDArray[np.uint64]) -> Tensor:
    """Set a random rectangle of some views to zero, in place; after normalisation zero is the mean colour.

    Args:
        inputs_BCHW: normalised views.
        settings: ``erasing`` is the probability for each view.
        words_NKJ: the words from which the views were made.

    Returns:
        The same tensor. A rectangle has 2 to 33 % of the image's area, and its height is 0.3 to 3.3 times its width
        (even in
        logarithms), rounded to pixels; a side longer than the image's is cut.
    """
    if settings.erasing == 0:
        return inputs_BCHW
    device, (height, width) = inputs_BCHW.device, inputs_BCHW.shape[2:]
    edges = _boxes(_halves(words_NKJ), settings.erasing, height, width)
    top_B1, bottom_B1, left_B1, right_B1 = (torch.from_numpy(edge).to(device)[:, None] for edge in edges)
    y_H, x_W = torch.arange(height, device=device), torch.arange(width, device=device)
    inside_BH = (y_H >= top_B1) & (y_H < bottom_B1)
    inside_BW = (x_W >= left_B1) & (x_W < right_B1)
    return inputs_BCHW.masked_fill_((inside_BH[:, :, None] & inside_BW[:, None, :])[:, None], 0.0)


def rotate(
    images_BCHW: Tensor,
    angle_B: NDArray[np.float64],
    *,
    outside: Literal["zeros", "reflection"],
    nearest: bool = False,
) -> Tensor:
    """Rotate each image clockwise about its centre; bytes are rounded.

    Args:
        images_BCHW: the images.
        angle_B: angles in radians.
        outside: what lies outside of an image.
        nearest: take the nearest pixel instead of mixing four, so that no new value appears.
    """
    device, (height, width) = images_BCHW.device, images_BCHW.shape[2:]
    y_H1 = (torch.arange(height, device=device) + 0.5 - height / 2)[:, None]
    x_W = torch.arange(width, device=device) + 0.5 - width / 2
    turn = np.stack([np.cos(angle_B), np.sin(angle_B)]).astype(np.float32)
    cos_B11, sin_B11 = torch.from_numpy(turn).to(device)[:, :, None, None]
    # Written out instead of a matrix product, whose last bits may depend on how many images there are.
    from_x_BHW = (cos_B11 * x_W + sin_B11 * y_H1) * (2 / width)
    from_y_BHW = (cos_B11 * y_H1 - sin_B11 * x_W) * (2 / height)
    values = images_BCHW if images_BCHW.is_floating_point() else images_BCHW.to(torch.float32)
    grid = torch.stack([from_x_BHW, from_y_BHW], dim=-1).to(values.dtype)
    mode = "nearest" if nearest else "bilinear"
    turned = F.grid_sample(values, grid, mode=mode, padding_mode=outside, align_corners=False)
    return turned if values is images_BCHW else turned.round_().to(images_BCHW.dtype)


def pad(images_NCHW: Tensor, pixels: int, padding: Padding) -> Tensor:
    """Pad images with ``pixels`` on every side as numpy does: mirrored repeatedly where they are small."""
    if padding == "zeros":
        return F.pad(images_NCHW, (pixels,) * 4)
    repeats_edge = 1 if padding == "symmetric" else 0
    for dim in (2, 3):
        side = images_NCHW.shape[dim]
        period = max(2 * (side - 1 + repeats_edge), 1)
        ahead = torch.arange(-pixels, side + pixels, device=images_NCHW.device).remainder(period)
        images_NCHW = images_NCHW.index_select(dim, torch.minimum(ahead, period - repeats_edge - ahead))
    return images_NCHW


def _windows(images_NCHW: Tensor, settings: ViewsConfig) -> Tensor:
    """Return every crop of every padded image, as it is and mirrored, without copies: (N, mirrored, y, x, C, H, W)."""
    height, width = images_NCHW.shape[2:]
    padded = pad(images_NCHW, settings.crop_padding, settings.padding)[:, None]
    if settings.flip > 0:
        padded = torch.cat([padded, padded.flip(-1)], dim=1)
    return padded.unfold(3, height, 1).unfold(4, width, 1).permute(0, 1, 3, 4, 2, 5, 6)


def _boxes(
    halves_BJ: NDArray[np.uint64], probability: float, height: int, width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return top, bottom, left and right of the erased rectangle of each view; an empty one where nothing is erased."""
    (smallest, largest), (flattest, tallest) = ERASED_AREA, ERASED_ASPECT
    area_B = (smallest + (largest - smallest) * _fraction(halves_BJ[:, _AREA])) * height * width
    aspect_B = flattest * np.exp(math.log(tallest / flattest) * _fraction(halves_BJ[:, _ASPECT]))
    erased_B = _fraction(halves_BJ[:, _ERASE]) < probability
    high_B = np.minimum(np.rint(np.sqrt(area_B * aspect_B)), height).astype(np.int64) * erased_B
    wide_B = np.minimum(np.rint(np.sqrt(area_B / aspect_B)), width).astype(np.int64) * erased_B
    top_B, left_B = _below(halves_BJ[:, _TOP], height - high_B + 1), _below(halves_BJ[:, _LEFT], width - wide_B + 1)
    return top_B, top_B + high_B, left_B, left_B + wide_B


def _halves(words_NKJ: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Split each view's words into 32-bit halves, one row for each view."""
    words_BJ = words_NKJ.reshape(-1, WORDS_PER_VIEW)
    return np.stack([words_BJ >> _HALF, words_BJ & _LOW], axis=-1).reshape(len(words_BJ), -1)


def _fraction(half: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform in [0, 1), in steps of 2⁻³²."""
    return half / 2.0**32


def _below(half: NDArray[np.uint64], bound: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """A whole number from 0 to ``bound`` - 1; no two probabilities differ by more than 2⁻³²."""
    return ((half * np.asarray(bound).astype(np.uint64)) >> _HALF).astype(np.int64)
