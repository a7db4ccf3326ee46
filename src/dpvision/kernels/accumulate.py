"""Sums of per-unit gradients in float64, each in one pass over the memory: weighted ones, and the way back to a weight.

Called outside any graph, many times a step: so they are no operators of torch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.errors import ArgumentError
from dpvision.kernels.compile import build, loaded

# U units, D entries of a parameter, K kernel, I in, O out


def takes(total: Tensor, parts: Tensor) -> bool:
    """Whether this kernel can be used: it exists, total is float64 and parts float32, contiguous and on the CPU."""
    return build().library is not None and _fits(total, torch.float64) and _fits(parts, torch.float32)


def add_weighted(total: Tensor, parts: Tensor, factor_U: Tensor) -> None:
    """``total += Σ_u factor_U[u] · parts[u]``, each product and the whole sum in float64, unit after unit.

    Guarantee: a unit with factor 0 is not looked at, so it adds exactly nothing whatever it holds. Every entry is the
    work of one thread: no bit depends on their number.
    """
    fits = takes(total, parts) and parts.shape[1:] == total.shape
    if not fits or factor_U.shape != parts.shape[:1] or not _fits(factor_U, torch.float64):
        raise ArgumentError(
            "total must be float64, parts float32 of the same shape with a float64 factor each, all contiguous, got "
            f"{tuple(total.shape)} {total.dtype}, {tuple(parts.shape)} {parts.dtype} and {tuple(factor_U.shape)} "
            f"{factor_U.dtype}. Use `takes` first."
        )
    tensors = (total.data_ptr(), parts.data_ptr(), factor_U.data_ptr())
    _kernel()(parts.shape[0], total.numel(), *tensors, torch.get_num_threads())


def to_weight_order(sums_KKIO: Tensor) -> Tensor:
    """The same numbers as a weight (O, I, K, K), contiguous."""
    if build().library is None or not _fits(sums_KKIO, torch.float64):
        return sums_KKIO.permute(3, 2, 0, 1).contiguous()
    height, width, inputs, outputs = sums_KKIO.shape
    weight_OIKK = sums_KKIO.new_empty(outputs, inputs, height, width)
    tensors = (sums_KKIO.data_ptr(), weight_OIKK.data_ptr())
    _order_kernel()(height * width, inputs, outputs, *tensors, torch.get_num_threads())
    return weight_OIKK


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    return x.dtype == dtype and x.device.type == "cpu" and x.is_contiguous()


@functools.cache
def _kernel() -> Callable[..., None]:
    function = loaded()["dpvision_add_weighted"]
    function.argtypes = [*[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = None
    return function


@functools.cache
def _order_kernel() -> Callable[..., None]:
    function = loaded()["dpvision_filter_order"]
    function.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2, ctypes.c_int]
    function.restype = None
    return function
