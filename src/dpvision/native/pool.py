"""The 3×3 max-pool of stride 1 and padding 1, which smooths a picture and keeps its size.

Pictures are float32 and channels-last in memory.
"""

# N rows, C channels, H height, W width

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.checks import Problems
from dpvision.native import channels_last
from dpvision.native.build import build, loaded


def takes(x_NCHW: Tensor) -> bool:
    """Whether these kernels can be used: they exist, and the picture's layout fits."""
    return build().library is not None and channels_last.is_channels_last(x_NCHW) and min(x_NCHW.shape[1:]) >= 1


def forward(x_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each window, y_NCHW, and which of the nine it is, index_NCHW in uint8, counted row by row.

    As in PyTorch the first of equals wins, and of several NaNs the last.
    """
    run = _forward if channels_last.without_dispatch(x_NCHW) else _forward_operator
    return run(x_NCHW)


def backward(dy_NCHW: Tensor, index_NCHW: Tensor) -> Tensor:
    """The gradient dx_NCHW: each window's goes to its winner."""
    run = _backward if channels_last.without_dispatch(dy_NCHW) else _backward_operator
    return run(dy_NCHW, index_NCHW)


@functools.cache
def _kernel(name: str) -> Callable[..., None]:
    function = loaded()[name]
    function.argtypes = [*[ctypes.c_int64] * 4, *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = None
    return function


def _run(name: str, *tensors: Tensor) -> None:
    rows, channels, height, width = tensors[0].shape
    pointers = [tensor.data_ptr() for tensor in tensors]
    _kernel(name)(rows, height, width, channels, *pointers, torch.get_num_threads())


def _forward(x: Tensor) -> tuple[Tensor, Tensor]:
    problems = Problems()
    channels_last.require(problems, "x", x, x.shape)
    problems.raise_if_any()
    y, index = _empty(x)
    if x.numel():
        _run("dpvision_pool_forward", x, y, index)
    return y, index


def _backward(dy: Tensor, index: Tensor) -> Tensor:
    problems = Problems()
    channels_last.require(problems, "dy", dy, dy.shape)
    problems.require(
        index.dtype == torch.uint8 and index.shape == dy.shape and index.permute(0, 2, 3, 1).is_contiguous(),
        f"index must be what forward gave for a picture of shape {tuple(dy.shape)}, got {tuple(index.shape)}, strides "
        f"{index.stride()}, {index.dtype}.",
    )
    problems.raise_if_any()
    dx = channels_last.empty(dy, *dy.shape)
    if dy.numel():
        _run("dpvision_pool_backward", dy, index, dx)
    return dx


def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    y = channels_last.empty(x, *x.shape)
    return y, torch.empty_like(y, dtype=torch.uint8)


_forward_operator = torch.library.custom_op(
    "dpvision::pool_forward", _forward, mutates_args=(), device_types="cpu", schema="(Tensor x) -> (Tensor, Tensor)"
)
_backward_operator = torch.library.custom_op(
    "dpvision::pool_backward",
    _backward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor dy, Tensor index) -> Tensor",
)


@_forward_operator.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(x)


@_backward_operator.register_fake
def _(dy: Tensor, index: Tensor) -> Tensor:  # noqa: ARG001
    return channels_last.empty(dy, *dy.shape)
