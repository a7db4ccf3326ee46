"""Weighted sums of per-unit gradients, added to a running float64 sum in one pass over the memory.

Called outside any graph, many times a step, and changes its argument: so it is no operator of torch's.
"""

# U units, D entries of a parameter

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.checks import ArgumentError
from dpvision.native.build import build, loaded


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


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    return x.dtype == dtype and x.device.type == "cpu" and x.is_contiguous()


@functools.cache
def _kernel() -> Callable[..., None]:
    function = loaded()["dpvision_add_weighted"]
    function.argtypes = [*[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = None
    return function
