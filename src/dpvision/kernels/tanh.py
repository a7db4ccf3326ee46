"""tanh where no norm is beside it: five times as fast as PyTorch's own, which is made for the last bit."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.errors import ArgumentError
from dpvision.kernels.channels_last import is_channels_last, without_dispatch
from dpvision.kernels.compile import build, loaded


def takes(x: Tensor) -> bool:
    """Whether this kernel can be used: it exists, and ``x`` is float32 on the CPU without gaps in its memory."""
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()
    return build().library is not None and (plain or is_channels_last(x)) and not x.is_neg()


def tanh(x: Tensor) -> Tensor:
    """``tanh(x)`` to a few units in the last place, in the memory order of ``x``.

    Guarantee: every number is computed by itself; no bit depends on its neighbours or on the number of threads.
    """
    return _tanh(x) if without_dispatch(x) else _operator(x)


def _tanh(x: Tensor) -> Tensor:
    if not takes(x):
        raise ArgumentError(
            f"x must be float32 on the CPU, contiguous or channels-last, got {tuple(x.shape)}, strides {x.stride()}, "
            f"{x.dtype}, {x.device}. Use `takes` first."
        )
    y = x.new_empty_strided(x.shape, x.stride())
    _kernel()(x.numel(), x.data_ptr(), y.data_ptr(), torch.get_num_threads())
    return y


@functools.cache
def _kernel() -> Callable[..., None]:
    function = loaded()["dpvision_tanh"]
    function.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int]
    function.restype = None
    return function


_operator = torch.library.custom_op(
    "dpvision::tanh", _tanh, mutates_args=(), device_types="cpu", schema="(Tensor x) -> Tensor"
)


@_operator.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty_strided(x.shape, x.stride())
