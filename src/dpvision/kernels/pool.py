"""Max-pools of stride 1: windows of 3×3 with padding 1, which keep a picture's size, or of 2×2 without padding.

Pictures are float32 and channels-last in memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from dpvision.errors import Problems
from dpvision.kernels import channels_last
from dpvision.kernels.compile import build, loaded

# N rows, C channels, H height, W width


PADDING: Final = {2: 0, 3: 1}
"""The windows there are, and the padding that goes with them."""

_SMALLER: Final = {2: 1, 3: 0}
_NAMES: Final = {2: "pool_two", 3: "pool"}


def takes(x_NCHW: Tensor, *, window: int = 3) -> bool:
    """Whether these kernels can be used: they exist, and the picture's layout and size fit."""
    if build().library is None or not channels_last.is_channels_last(x_NCHW):
        return False
    return x_NCHW.shape[1] >= 1 and min(x_NCHW.shape[2:]) > _SMALLER[window]


def forward(x_NCHW: Tensor, *, window: int = 3) -> tuple[Tensor, Tensor]:
    """The largest of each window, y_NCHW, and which of its numbers it is, index_NCHW in uint8, counted row by row.

    As in PyTorch the first of equals wins, and of several NaNs the last.
    """
    run = _forward if channels_last.without_dispatch(x_NCHW) else _forward_operator
    return run(x_NCHW, window)


def backward(dy_NCHW: Tensor, index_NCHW: Tensor, *, window: int = 3) -> Tensor:
    """The gradient dx_NCHW: each window's goes to its winner."""
    run = _backward if channels_last.without_dispatch(dy_NCHW) else _backward_operator
    return run(dy_NCHW, index_NCHW, window)


@functools.cache
def _kernel(name: str) -> Callable[..., None]:
    function = loaded()[name]
    function.argtypes = [*[ctypes.c_int64] * 4, *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = None
    return function


def _run(name: str, shape: torch.Size, *tensors: Tensor) -> None:
    rows, channels, height, width = shape
    pointers = [tensor.data_ptr() for tensor in tensors]
    _kernel(name)(rows, height, width, channels, *pointers, torch.get_num_threads())


def _forward(x: Tensor, window: int) -> tuple[Tensor, Tensor]:
    problems = Problems()
    channels_last.require(problems, "x", x, x.shape)
    problems.raise_if_any()
    problems.require(takes(x, window=window), f"a window of {window} must fit the picture, got {tuple(x.shape)}.")
    problems.raise_if_any()
    y, index = _empty(x, window)
    if y.numel():
        _run(f"dpvision_{_NAMES[window]}_forward", x.shape, x, y, index)
    return y, index


def _backward(dy: Tensor, index: Tensor, window: int) -> Tensor:
    problems = Problems()
    channels_last.require(problems, "dy", dy, dy.shape)
    problems.require(
        index.dtype == torch.uint8 and index.shape == dy.shape and index.permute(0, 2, 3, 1).is_contiguous(),
        f"index must be what forward gave for a picture of shape {tuple(dy.shape)}, got {tuple(index.shape)}, strides "
        f"{index.stride()}, {index.dtype}.",
    )
    problems.raise_if_any()
    dx = _empty_gradient(dy, window)
    if dy.numel():
        _run(f"dpvision_{_NAMES[window]}_backward", dx.shape, dy, index, dx)
    return dx


def _empty(x: Tensor, window: int) -> tuple[Tensor, Tensor]:
    rows, channels, height, width = x.shape
    y = channels_last.empty(x, rows, channels, height - _SMALLER[window], width - _SMALLER[window])
    return y, torch.empty_like(y, dtype=torch.uint8)


def _empty_gradient(dy: Tensor, window: int) -> Tensor:
    rows, channels, height, width = dy.shape
    return channels_last.empty(dy, rows, channels, height + _SMALLER[window], width + _SMALLER[window])


_forward_operator = torch.library.custom_op(
    "dpvision::pool_forward",
    _forward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, int window) -> (Tensor, Tensor)",
)
_backward_operator = torch.library.custom_op(
    "dpvision::pool_backward",
    _backward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor dy, Tensor index, int window) -> Tensor",
)


@_forward_operator.register_fake
def _(x: Tensor, window: int) -> tuple[Tensor, Tensor]:
    return _empty(x, window)


@_backward_operator.register_fake
def _(dy: Tensor, index: Tensor, window: int) -> Tensor:  # noqa: ARG001
    return _empty_gradient(dy, window)
