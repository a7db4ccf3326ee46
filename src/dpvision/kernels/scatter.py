"""Wavelet scattering of images: Fourier transforms, moduli and blurs of eight colour planes at a time, in the cache.

Shapes: N rows, C colours, J scales, L angles, H and W padded height and width, P paths.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from dpvision.kernels.channels_last import strides_of
from dpvision.kernels.ops import call, is_dense, is_readable, kernel

_MOST_FACTOR: Final = 61
"""The largest prime factor of a padded side that the Fourier transform has room for."""
Padding = tuple[int, int, int, int]


@functools.cache
def _largest_factor(side: int) -> int:
    factor = 2
    while factor * factor <= side:
        if side % factor == 0:
            side //= factor
        else:
            factor += 1
    return side


def _levels(scales: int) -> list[tuple[int, int]]:
    return [(scale, level) for scale in range(scales) for level in range(scale + 1)]


def _is_image(x_NCHW: Tensor) -> bool:
    """Whether these are float32 images on the CPU, of any strides. An image's gradient is not computed here."""
    if x_NCHW.dim() != 4 or (x_NCHW.requires_grad and torch.is_grad_enabled()):
        return False
    return is_readable(x_NCHW) and not x_NCHW.is_neg()


def _tables_fit(wavelets: Sequence[Tensor], blurs: Sequence[Tensor]) -> bool:
    """Whether the tables have the shapes of one scattering transform, which the kernel can compute."""
    scales = len(blurs) // 2
    if not scales or len(blurs) % 2 or len(wavelets) != len(_levels(scales)) or wavelets[0].dim() != 3:
        return False
    angles, height, width = wavelets[0].shape
    shapes = [(angles, height >> level, width >> level) for _, level in _levels(scales)]
    shapes += [((side >> scales) - 2, side >> level) for level in range(scales) for side in (height, width)]
    tables = zip((*wavelets, *blurs), shapes, strict=True)
    return (
        all(is_dense(table) and table.shape == shape for table, shape in tables)
        and height % 2**scales == width % 2**scales == 0
        and all(_largest_factor(side) <= _MOST_FACTOR for side in (height, width))
    )


def _scatter_fits(x_NCHW: Tensor, wavelets: Sequence[Tensor], blurs: Sequence[Tensor], padding: Padding) -> bool:
    if not _is_image(x_NCHW) or len(padding) != 4 or not _tables_fit(wavelets, blurs):
        return False
    (height, width), (left, right, top, bottom) = x_NCHW.shape[2:], padding
    return (
        (height + top + bottom, width + left + right) == wavelets[0].shape[1:]
        and max(top, bottom) < height
        and max(left, right) < width
        and min(padding) >= 0
    )


@kernel(_scatter_fits, "float32 images on the CPU larger than their padding, and tables for their padded size")
def scatter(x_NCHW: Tensor, wavelets: Sequence[Tensor], blurs: Sequence[Tensor], padding: Padding) -> Tensor:
    """Compute the scattering transform of ``models.scattering.Scattering``.

    Args:
        x_NCHW: Images, in any layout.
        wavelets: Tables (L, H, W) for every scale j and level ≤ j, subsampled by 2^level.
        blurs: Matrices of every level: first the one for columns, then the one for lines.
        padding: Pixels reflected at the left, right, top and bottom.

    Returns:
        (N, C·P, height, width), channels-last if the images are. Moduli above 1e19 come out infinite.

    Guarantee: every colour of an image is computed separately; no bit depends on others or on the number of threads.
    """
    scales, (angles, height, width) = len(blurs) // 2, wavelets[0].shape
    paths = 1 + scales * angles + scales * (scales - 1) // 2 * angles**2
    shape = (x_NCHW.shape[0], x_NCHW.shape[1] * paths, blurs[0].shape[0], blurs[1].shape[0])
    inside = x_NCHW.stride(1) == 1
    y_NCHW = x_NCHW.new_empty_strided(shape, strides_of(*shape[1:])) if inside else x_NCHW.new_empty(shape)
    if not y_NCHW.numel():
        return y_NCHW
    left, _, top, _ = padding
    sizes = (*x_NCHW.shape[1:], top, left, height, width, scales, angles, *x_NCHW.stride(), *y_NCHW.stride())
    square = [0] * scales**2  # (scale, level)
    for wavelet, (scale, level) in zip(wavelets, _levels(scales), strict=True):
        square[scale * scales + level] = wavelet.data_ptr()
    columns, lines = ([blur.data_ptr() for blur in blurs[first::2]] for first in (0, 1))
    tables = ((ctypes.c_void_p * len(table))(*table) for table in (square, columns, lines))
    call("scatter", (x_NCHW.shape[0],), (ctypes.c_int64 * len(sizes))(*sizes), *tables, x_NCHW, y_NCHW)
    return y_NCHW
