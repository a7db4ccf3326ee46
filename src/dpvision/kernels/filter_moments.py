"""What a standardised convolution needs of each unit's gradient of each filter, in one pass over the memory.

Called outside any graph, many times a step: so it is no operator of torch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.kernels.compile import build, loaded

# U units, O filters, D entries of a filter, M = 3 moments


def filter_moments(e_UOD: Tensor, z_OD: Tensor) -> Tensor | None:
    """Squared length, sum and inner product with z of every gradient e, as (U, M, O), in float64 throughout.

    None where there is no kernel for it: both must be contiguous float32 on the CPU, and of one shape but for units.

    Guarantee: not finite if a number is not. A unit's filter is the work of one thread: no bit depends on their number.
    """
    if build().library is None or e_UOD.shape[1:] != z_OD.shape or not (_fits(e_UOD, dims=3) and _fits(z_OD, dims=2)):
        return None
    units, outputs, depth = e_UOD.shape
    moments_UMO = e_UOD.new_empty(units, 3, outputs, dtype=torch.float64)
    tensors = (e_UOD.data_ptr(), z_OD.data_ptr(), moments_UMO.data_ptr())
    _kernel()(units, outputs, depth, *tensors, torch.get_num_threads())
    return moments_UMO


def _fits(x: Tensor, *, dims: int) -> bool:
    return x.dim() == dims and x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()


@functools.cache
def _kernel() -> Callable[..., None]:
    function = loaded()["dpvision_filter_moments"]
    function.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = None
    return function
