"""From the summed gradient of standardised filters to that of the raw ones, in one pass and in the same memory.

Called outside any graph: so it is no operator of torch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.kernels.compile import build, loaded

# O filters, I channels, K places of a filter, D = I·K


def pull_back(e_OIKK: Tensor, weight_OD: Tensor, facts_O: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor | None:
    """``(e − mean(e) − live · z⟨z, e⟩) · scale`` with z = (weight − mean) · s, contiguous, in the memory of ``e_OIKK``.

    ``facts_O`` are each filter's mean, s, scale and live. None where there is no kernel for it: sums must be float64
    on the CPU, a filter's entries dense in the order of a weight or with channels innermost; all else float32.

    Guarantee: a filter is the work of one thread: no bit depends on their number.
    """
    inside = not e_OIKK.is_contiguous() and e_OIKK.dim() == 4 and e_OIKK.permute(0, 2, 3, 1).is_contiguous()
    if build().library is None or not (inside or e_OIKK.is_contiguous()) or not _fits(e_OIKK, torch.float64):
        return None
    filters, channels, places = e_OIKK.shape[0], e_OIKK.shape[1], e_OIKK.shape[2:].numel()
    if weight_OD.shape != (filters, channels * places) or any(fact.shape != (filters,) for fact in facts_O):
        return None
    if not all(_fits(fact, torch.float32) and fact.is_contiguous() for fact in (weight_OD, *facts_O)):
        return None
    tensors = (tensor.data_ptr() for tensor in (e_OIKK, weight_OD, *facts_O))
    _kernel()(filters, channels, places, int(inside), *tensors, torch.get_num_threads())
    return e_OIKK.permute(0, 2, 3, 1).reshape(-1).view(e_OIKK.shape) if inside else e_OIKK


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    return x.dtype == dtype and x.device.type == "cpu"


@functools.cache
def _kernel() -> Callable[..., None]:
    function = loaded()["dpvision_pull_back"]
    function.argtypes = [*[ctypes.c_int64] * 3, ctypes.c_int, *[ctypes.c_void_p] * 6, ctypes.c_int]
    function.restype = None
    return function
