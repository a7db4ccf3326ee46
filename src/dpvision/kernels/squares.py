"""The squared length of every unit's numbers, in one pass over the memory.

Called outside any graph, many times a step: so it is no operator of torch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.kernels.compile import build, loaded

# U units


def unit_squares(x: Tensor) -> Tensor | None:
    """The sum of squares of each entry of the first dimension, in float64 throughout.

    None where there is no kernel for it: ``x`` must be contiguous float32 on the CPU.

    Guarantee: not finite if a number is not. A unit is the work of one thread: no bit depends on their number.
    """
    if build().library is None or x.dtype != torch.float32 or x.device.type != "cpu" or not x.is_contiguous():
        return None
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
