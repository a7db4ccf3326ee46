"""Norms of a 3×3 convolution's weight gradients (stride 1, padding 1) from Gram matrices over its positions."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dpvision.errors import Problems
from dpvision.kernels import channels_last
from dpvision.kernels.compile import build, loaded

# U units, T positions


def takes(x_gram_UTT: Tensor) -> bool:
    """Whether this kernel can be used: it exists, and the matrices are contiguous float32 on the CPU."""
    plain = x_gram_UTT.dtype == torch.float32 and x_gram_UTT.device.type == "cpu" and x_gram_UTT.is_contiguous()
    return build().library is not None and plain and x_gram_UTT.dim() == 3


def shifted_gram_norms_sq(x_gram_UTT: Tensor, dy_gram_UTT: Tensor, height: int, width: int) -> Tensor:
    """Squared norms of every unit's weight gradient, from X·Xᵀ and dY·dYᵀ over the T = height · width positions.

    The Gram matrix of the 3×3 windows is the sum of x_gram shifted along its diagonal by the nine taps, so no window is
    ever laid out. The sum over all pairs of positions can cancel: what rounding may have hidden is added.

    Guarantee: not below the true value by more than a relative 1e-6; not finite if a matrix is not. float64.
    """
    run = _norms_sq if channels_last.without_dispatch(x_gram_UTT) else _norms_sq_operator
    return run(x_gram_UTT, dy_gram_UTT, height, width)


@functools.cache
def _kernel() -> Callable[..., None]:
    function = loaded()["dpvision_shifted_gram_norms_sq"]
    function.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 3, ctypes.c_int]
    function.restype = None
    return function


def _norms_sq(x_gram: Tensor, dy_gram: Tensor, height: int, width: int) -> Tensor:
    problems = Problems()
    problems.count("height", height)
    problems.count("width", width)
    units = x_gram.shape[0] if x_gram.dim() else 0
    channels_last.require_plain(problems, "x_gram", x_gram, (units, height * width, height * width))
    channels_last.require_plain(problems, "dy_gram", dy_gram, (units, height * width, height * width))
    problems.raise_if_any()
    norms_sq = x_gram.new_empty((units,), dtype=torch.float64)
    tensors = (x_gram.data_ptr(), dy_gram.data_ptr(), norms_sq.data_ptr())
    _kernel()(units, height, width, *tensors, torch.get_num_threads())
    return norms_sq


_norms_sq_operator = torch.library.custom_op(
    "dpvision::shifted_gram_norms_sq",
    _norms_sq,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x_gram, Tensor dy_gram, int height, int width) -> Tensor",
)


@_norms_sq_operator.register_fake
def _(x_gram: Tensor, dy_gram: Tensor, height: int, width: int) -> Tensor:  # noqa: ARG001
    return x_gram.new_empty((x_gram.shape[0],), dtype=torch.float64)
