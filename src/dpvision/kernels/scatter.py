"""Wavelet scattering of pictures: Fourier transforms, moduli and blurs of eight colours at a time, in the cache."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from dpvision.errors import Problems
from dpvision.kernels.channels_last import strides_of, without_dispatch
from dpvision.kernels.compile import build, loaded

# N rows, C colours, J scales, L angles, H and W padded height and width, P paths


_MOST_FACTOR: Final = 61
"""The largest prime factor of a padded side that there is room for."""
_NUMBERS: Final = (
    *("colours", "height", "width", "pad_top", "pad_left", "padded_height", "padded_width", "scales", "angles"),
    *("x_row", "x_channel", "x_line", "x_column", "y_row", "y_channel", "y_line", "y_column"),
)
_TABLES: Final = ("wavelets", "blur_y", "blur_x")


class _Scattering(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in _TABLES),
    )


def takes(x_NCHW: Tensor, wavelets: Sequence[Tensor]) -> bool:
    """Whether this kernel can be used: it exists, pictures and wavelets are float32 on the CPU, and sides have factors.

    A picture's gradient is not computed here.
    """
    if build().library is None or x_NCHW.dim() != 4 or (x_NCHW.requires_grad and torch.is_grad_enabled()):
        return False
    plain = all(_plain(tensor) for tensor in (x_NCHW, *wavelets))
    return plain and all(_largest_factor(side) <= _MOST_FACTOR for side in wavelets[0].shape[1:])


def scatter(
    x_NCHW: Tensor, wavelets: Sequence[Tensor], blurs: Sequence[Tensor], padding: tuple[int, int, int, int]
) -> Tensor:
    """(N, C·P, height, width) in the layout of ``x_NCHW``: see ``models.Scattering``, whose tables these are.

    ``wavelets`` are (L, H, W) for every scale j and level ≤ j, ``blurs`` the matrices of every level, first the one
    for columns, then the one for lines; ``padding`` is left, right, top, bottom. Moduli above 1e19 come out infinite.

    Guarantee: every colour of a picture is computed by itself; no bit depends on others or on the number of threads.
    """
    run = _scatter if without_dispatch(x_NCHW) else _operator
    return run(x_NCHW, list(wavelets), list(blurs), list(padding))


def _plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and not x.is_neg()


@functools.cache
def _largest_factor(side: int) -> int:
    factor = 2
    while factor * factor <= side:
        if side % factor == 0:
            side //= factor
        else:
            factor += 1
    return side


def _scatter(x: Tensor, wavelets: list[Tensor], blurs: list[Tensor], padding: list[int]) -> Tensor:
    _require(x, wavelets, blurs, padding)
    y = _empty(x, wavelets, blurs, padding)
    if not y.numel():
        return y
    scales, (angles, height, width) = len(blurs) // 2, wavelets[0].shape
    numbers = (*x.shape[1:], padding[2], padding[0], height, width, scales, angles, *x.stride(), *y.stride())
    square = [0] * scales**2  # (scale, level)
    for wavelet, (scale, level) in zip(wavelets, _levels(scales), strict=True):
        square[scale * scales + level] = wavelet.data_ptr()
    columns, lines = ([blur.data_ptr() for blur in blurs[first::2]] for first in (0, 1))
    sizes = _Scattering(*numbers, *((ctypes.c_void_p * len(table))(*table) for table in (square, columns, lines)))
    _kernel()(ctypes.byref(sizes), x.shape[0], x.data_ptr(), y.data_ptr(), torch.get_num_threads())
    return y


def _levels(scales: int) -> list[tuple[int, int]]:
    return [(scale, level) for scale in range(scales) for level in range(scale + 1)]


def _require(x: Tensor, wavelets: list[Tensor], blurs: list[Tensor], padding: list[int]) -> None:
    """Refuse what the kernel would read past."""
    scales = len(blurs) // 2
    problems = Problems()
    problems.require(len(padding) == 4, f"padding must be left, right, top, bottom, got {padding}.")
    problems.require(
        scales > 0 and len(blurs) == 2 * scales and len(wavelets) == len(_levels(scales)) and wavelets[0].dim() == 3,
        f"there must be two blurs a scale and wavelets for every level, got {len(blurs)} and {len(wavelets)}.",
    )
    problems.raise_if_any()
    problems.require(
        takes(x, wavelets),
        f"x {tuple(x.shape)}, {x.dtype}, {x.device} does not fit this kernel. Use `takes` first.",
    )
    (angles, height, width), (left, right, top, bottom) = wavelets[0].shape, padding
    shapes = [(angles, height >> level, width >> level) for _, level in _levels(scales)]
    shapes += [((side >> scales) - 2, side >> level) for level in range(scales) for side in (height, width)]
    tables = zip((*wavelets, *blurs), shapes, strict=True)
    problems.require(
        all(_plain(table) and table.is_contiguous() and table.shape == shape for table, shape in tables)
        and height % 2**scales == width % 2**scales == 0,
        f"tables must be contiguous float32 of shapes {shapes}, got {[tuple(t.shape) for t in (*wavelets, *blurs)]}.",
    )
    problems.require(
        x.dim() == 4
        and (x.shape[2] + top + bottom, x.shape[3] + left + right) == (height, width)
        and max(top, bottom) < x.shape[2]
        and max(left, right) < x.shape[3]
        and min(padding) >= 0,
        f"pictures {tuple(x.shape)} with padding {padding} must be {height} × {width} and larger than it.",
    )
    problems.raise_if_any()


def _empty(x: Tensor, wavelets: list[Tensor], blurs: list[Tensor], padding: list[int]) -> Tensor:  # noqa: ARG001
    scales, angles = len(blurs) // 2, wavelets[0].shape[0]
    paths = 1 + scales * angles + scales * (scales - 1) // 2 * angles**2
    shape = (x.shape[0], x.shape[1] * paths, blurs[0].shape[0], blurs[1].shape[0])
    return x.new_empty_strided(shape, strides_of(*shape[1:])) if x.stride(1) == 1 else x.new_empty(shape)


@functools.cache
def _kernel() -> Callable[..., None]:
    function = loaded()["dpvision_scatter"]
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int]
    function.restype = None
    return function


_operator = torch.library.custom_op(
    "dpvision::scatter",
    _scatter,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor[] wavelets, Tensor[] blurs, int[] padding) -> Tensor",
)
_operator.register_fake(_empty)
