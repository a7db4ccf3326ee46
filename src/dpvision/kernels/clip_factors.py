"""The factors that clip units, in one call instead of ten small ones.

Called outside any graph, in every step: so it is no operator of torch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.kernels.compile import build, loaded

# U units


def clip_factors(
    norms_sq: list[Tensor], real_U: Tensor, *, below: float, added: float, most: float, least: float
) -> Tensor | None:
    """``below / (norm + added)``, at most ``most``, for units that are real and get ``least``; zero for the others.

    A unit's squared norm is the sum over the tensors of ``norms_sq``, in float64. None if that is negative or infinite
    or NaN for any unit, and where there is no kernel for it: everything must be contiguous on the CPU.
    """
    units, count = len(real_U), len(norms_sq)
    if build().library is None or not _fits(real_U, torch.bool, units):
        return None
    if not all(_fits(norms_sq_U, torch.float64, units) for norms_sq_U in norms_sq):
        return None
    factor_U = real_U.new_empty(units, dtype=torch.float64)
    pointers = (ctypes.c_void_p * count)(*(norms_sq_U.data_ptr() for norms_sq_U in norms_sq))
    scales = (below, added, most, least)
    broken = _kernel()(units, count, pointers, real_U.data_ptr(), *scales, factor_U.data_ptr())
    return None if broken else factor_U


def _fits(x_U: Tensor, dtype: torch.dtype, units: int) -> bool:
    return x_U.dtype == dtype and x_U.shape == (units,) and x_U.device.type == "cpu" and x_U.is_contiguous()


@functools.cache
def _kernel() -> Callable[..., int]:
    function = loaded()["dpvision_clip_factors"]
    pointers = [ctypes.c_void_p] * 2
    function.argtypes = [*[ctypes.c_int64] * 2, *pointers, *[ctypes.c_double] * 4, ctypes.c_void_p]
    function.restype = ctypes.c_int64
    return function
