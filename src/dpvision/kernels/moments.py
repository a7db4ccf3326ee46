"""Sums over positions, one for every row and channel, of a convolution's output and its gradient.

All pictures are float32 and channels-last in memory. Short runs are added up in float32, the runs in float64.
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

# N rows, C channels, O output channels, H height, W width, M moments


MOMENTS: Final = 4


def takes(dy_NCHW: Tensor) -> bool:
    """Whether these kernels can be used: they exist, and the picture's layout fits."""
    return build().library is not None and channels_last.is_channels_last(dy_NCHW) and min(dy_NCHW.shape[1:]) >= 1


def convolution_moments(dy_NOHW: Tensor, y_NOHW: Tensor, box_NHW: Tensor) -> Tensor:
    """Σ dy, Σ dy·y, Σ dy·box and Σ |dy·y| over the positions of each row and output channel: sums_NMO in float64.

    With y a convolution's output without its bias, and box the sum of the inputs in each output's window, these are of
    the weight gradient: the bias gradient, the inner product with the filter, the sum of the entries, and the scale of
    the second one's rounding.
    """
    run = _convolution_moments if channels_last.without_dispatch(dy_NOHW) else _convolution_moments_operator
    return run(dy_NOHW, y_NOHW, box_NHW)


def channel_sums(dy_NCHW: Tensor) -> Tensor:
    """Σ dy over the positions: a row's gradient of a bias, sums_NC in float32."""
    run = _channel_sums if channels_last.without_dispatch(dy_NCHW) else _channel_sums_operator
    return run(dy_NCHW)


@functools.cache
def _kernel(name: str, tensors: int) -> Callable[..., None]:
    function = loaded()[name]
    function.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * tensors, ctypes.c_int]
    function.restype = None
    return function


def _run(name: str, *tensors: Tensor) -> None:
    rows, channels, height, width = tensors[0].shape
    pointers = [tensor.data_ptr() for tensor in tensors]
    _kernel(name, len(tensors))(rows, channels, height * width, *pointers, torch.get_num_threads())


def _convolution_moments(dy: Tensor, y: Tensor, box: Tensor) -> Tensor:
    problems = Problems()
    channels_last.require(problems, "dy", dy, dy.shape)
    channels_last.require(problems, "y", y, dy.shape)
    channels_last.require_plain(problems, "box", box, (*dy.shape[:1], *dy.shape[2:]))
    problems.raise_if_any()
    sums = dy.new_empty((dy.shape[0], MOMENTS, dy.shape[1]), dtype=torch.float64)
    _run("dpvision_convolution_moments", dy, y, box, sums)
    return sums


def _channel_sums(dy: Tensor) -> Tensor:
    problems = Problems()
    channels_last.require(problems, "dy", dy, dy.shape)
    problems.raise_if_any()
    sums = dy.new_empty(dy.shape[:2])
    _run("dpvision_channel_sums", dy, sums)
    return sums


_convolution_moments_operator = torch.library.custom_op(
    "dpvision::convolution_moments",
    _convolution_moments,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor dy, Tensor y, Tensor box) -> Tensor",
)
_channel_sums_operator = torch.library.custom_op(
    "dpvision::channel_sums", _channel_sums, mutates_args=(), device_types="cpu", schema="(Tensor dy) -> Tensor"
)


@_convolution_moments_operator.register_fake
def _(dy: Tensor, y: Tensor, box: Tensor) -> Tensor:  # noqa: ARG001
    return dy.new_empty((dy.shape[0], MOMENTS, dy.shape[1]), dtype=torch.float64)


@_channel_sums_operator.register_fake
def _(dy: Tensor) -> Tensor:
    return dy.new_empty(dy.shape[:2])
