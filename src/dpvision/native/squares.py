"""The squared length of every unit's numbers, in one pass over the memory.

Called outside any graph, many times a step: so it is no operator of torch's.
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


def takes(x: Tensor) -> bool:
    """Whether this kernel can be used: it exists, and ``x`` is contiguous float32 on the CPU."""
    fits = x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()
    return build().library is not None and fits and x.dim() > 0


def unit_squares(x: Tensor) -> Tensor:
    """The sum of squares of each entry of the first dimension, in float64 throughout.

    Guarantee: not finite if a number is not. A unit is the work of one thread: no bit depends on their number.
    """
    if not takes(x):
        raise ArgumentError(f"x must be contiguous float32, got {tuple(x.shape)} {x.dtype}. Use `takes` first.")
    units = x.shape[0]
    squares_U = x.new_empty(units, dtype=torch.float64)
    _kernel()(units, x.numel() // max(1, units), x.data_ptr(), squares_U.data_ptr(), torch.get_num_threads())
    return squares_U


@functools.cache
def _kernel() -> Callable[..., None]:
    function = loaded()["dpvision_unit_squares"]
    function.argtypes = [*[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2, ctypes.c_int]
    function.restype = None
    return function
