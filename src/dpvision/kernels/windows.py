"""Per-unit weight gradients of convolutions with small windows, and their norms, in one pass over the input.

Called outside any graph, so it is no operator of torch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from dpvision.errors import ArgumentError
from dpvision.kernels.compile import build, loaded

# N rows, U units, C in, O out, D = kernel height · kernel width · C


MOST_WINDOW_NUMBERS: Final = 3 << 16
"""Windows of a unit that still fit the second cache; for larger ones matrix products are faster."""
_WIDTHS: Final = (3, 5, 7)
"""Kernels that there is code for where every channel has its own."""


class _Windows(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "rows_per_unit",
            "row_stride",
            "line_stride",
            "channels",
            "height",
            "width",
            "outputs",
            "kernel_height",
            "kernel_width",
            "stride_height",
            "stride_width",
        )
    )


def takes(x_NCHW: Tensor, dy_NOHW: Tensor, *, units: int, kernel: tuple[int, int], groups: int = 1) -> bool:
    """Whether this kernel can be used: float32 pictures on the CPU, channels side by side, windows that fit.

    ``groups`` must be 1, or as many as there are channels in and out.
    """
    if build().library is None or x_NCHW.dim() != 4 or not (_channels_inside(x_NCHW) and _channels_inside(dy_NOHW)):
        return False
    (rows, outputs, height, width), channels = dy_NOHW.shape, x_NCHW.shape[1]
    numbers = rows // max(1, units) * height * width * channels * kernel[0] * kernel[1]
    if numbers == 0 or not dy_NOHW.permute(0, 2, 3, 1).is_contiguous():
        return False
    if groups == 1:
        return numbers <= MOST_WINDOW_NUMBERS
    return groups == channels == outputs and kernel[1] in _WIDTHS


def unit_gradients(
    x_NCHW: Tensor, dy_NOHW: Tensor, *, units: int, kernel: tuple[int, int], stride: tuple[int, int], groups: int = 1
) -> tuple[Tensor, Tensor]:
    """The gradient of every unit as (U, O, D), D in the order (height, width, C), and its squared norm in float64.

    ``x_NCHW`` is padded already, and is all that the windows see. A unit's rows are neighbours. C counts a group's
    channels.

    Guarantee: norms are right to a relative 3e-6, beyond squares that underflow. A unit is the work of one thread: no
    bit depends on their number.
    """
    (rows, outputs, height, width), channels = dy_NOHW.shape, x_NCHW.shape[1]
    reach = ((height - 1) * stride[0] + kernel[0], (width - 1) * stride[1] + kernel[1])
    fits = takes(x_NCHW, dy_NOHW, units=units, kernel=kernel, groups=groups)
    fits = fits and x_NCHW.shape[0] == rows and rows % units == 0
    if not fits or reach != x_NCHW.shape[2:]:
        raise ArgumentError(
            f"x {tuple(x_NCHW.shape)} and dy {tuple(dy_NOHW.shape)} do not fit this kernel for {units} units, "
            f"kernel {kernel}, stride {stride}, groups {groups}. Use `takes` first."
        )
    gradients = x_NCHW.new_empty(units, outputs, kernel[0] * kernel[1] * (channels // groups))
    squares_U = x_NCHW.new_empty(units, dtype=torch.float64)
    strides = x_NCHW.stride()
    sizes = _Windows(rows // units, strides[0], strides[2], channels, height, width, outputs, *kernel, *stride)
    tensors = (x_NCHW.data_ptr(), dy_NOHW.data_ptr(), gradients.data_ptr(), squares_U.data_ptr())
    _kernel("window" if groups == 1 else "depthwise")(ctypes.byref(sizes), units, *tensors, torch.get_num_threads())
    return gradients, squares_U


def _channels_inside(x_NCHW: Tensor) -> bool:
    """Whether a position's channels lie together and its columns side by side, whatever the lines and rows do."""
    channels, width = x_NCHW.shape[1], x_NCHW.shape[3]
    together = (channels == 1 or x_NCHW.stride(1) == 1) and (width == 1 or x_NCHW.stride(3) == channels)
    return together and x_NCHW.dtype == torch.float32 and x_NCHW.device.type == "cpu"


@functools.cache
def _kernel(name: str) -> Callable[..., None]:
    function = loaded()[f"dpvision_{name}_gradients"]
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 4, ctypes.c_int]
    function.restype = None
    return function
