"""The factors that clip units, in one call instead of ten small ones.

Called outside any graph, in every step: so it is no operator of torch's.
"""

# U units

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.checks import ArgumentError
from dpvision.native.build import build, loaded


def takes(norms_sq: list[Tensor], real_U: Tensor) -> bool:
    """Whether this kernel can be used: it exists, and all of this is contiguous on the CPU, the norms float64."""
    if build().library is None or not _fits(real_U, torch.bool, real_U.shape) or real_U.dim() != 1:
        return False
    return all(_fits(norms_sq_U, torch.float64, real_U.shape) for norms_sq_U in norms_sq)


def clip_factors(norms_sq: list[Tensor], real_U: Tensor, *, below: float, added: float, most: float) -> Tensor | None:
    """``below / (norm + added)``, at most ``most``, for units that are real, and exactly zero for the others.

    A unit's squared norm is the sum over the tensors of ``norms_sq``. None if that is not finite for any unit.
    """
    if not takes(norms_sq, real_U):
        raise ArgumentError("norms must be contiguous float64, a row of units as real_U is. Use `takes` first.")
    factor_U = real_U.new_empty(real_U.shape, dtype=torch.float64)
    pointers = (ctypes.c_void_p * len(norms_sq))(*(norms_sq_U.data_ptr() for norms_sq_U in norms_sq))
    scales = (below, added, most)
    broken = _kernel()(len(real_U), len(norms_sq), pointers, real_U.data_ptr(), *scales, factor_U.data_ptr())
    return None if broken else factor_U


def _fits(x: Tensor, dtype: torch.dtype, shape: torch.Size) -> bool:
    return x.dtype == dtype and x.shape == shape and x.device.type == "cpu" and x.is_contiguous()


@functools.cache
def _kernel() -> Callable[..., int]:
    function = loaded()["dpvision_clip_factors"]
    pointers = [ctypes.c_void_p] * 2
    function.argtypes = [*[ctypes.c_int64] * 2, *pointers, *[ctypes.c_double] * 3, ctypes.c_void_p]
    function.restype = ctypes.c_int64
    return function
