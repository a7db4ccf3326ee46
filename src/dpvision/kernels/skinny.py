"""Linear layers with few outputs: output and summed weight gradient, as fast as the inputs can be read."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from dpvision.errors import Problems
from dpvision.kernels.channels_last import without_dispatch
from dpvision.kernels.compile import build, loaded

# N rows, I in, O out


MOST_OUTPUTS: Final = 10
"""Measured on a CPU with AVX-512: above about as many, matrix products are as fast."""


def takes(a_NI: Tensor, g_NO: Tensor) -> bool:
    """Whether this kernel can be used: it exists, outputs are few, and both are contiguous float32 on the CPU."""
    fits = _fits(a_NI, torch.float32) and _fits(g_NO, torch.float32) and a_NI.dim() == g_NO.dim() == 2
    return build().library is not None and fits and g_NO.shape[1] <= MOST_OUTPUTS


def forward(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> tuple[Tensor, Tensor]:
    """``x wᵀ + bias``, and each row's ‖x‖², in float64 throughout."""
    run = _forward if without_dispatch(x_NI) else _forward_operator
    return run(x_NI, weight_OI, bias_O)


def outer_sum(a_NI: Tensor, g_NO: Tensor, factor_N: Tensor) -> Tensor:
    """``Σ_n factor_n · g_n aᵀ_n`` as sum_OI in float64; ``factor_N`` is float64.

    ``factor · g`` is rounded to float32, 32 rows are added up in float32, and those sums in float64.

    Guarantee: a row with factor 0 is not looked at. Every column is the work of one thread: no bit depends on their
    number.
    """
    run = _outer_sum if without_dispatch(a_NI) else _outer_sum_operator
    return run(a_NI, g_NO, factor_N)


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    return x.dtype == dtype and x.device.type == "cpu" and x.is_contiguous()


@functools.cache
def _kernel(name: str, pointers: int) -> Callable[..., None]:
    function = loaded()[f"dpvision_{name}"]
    function.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * pointers, ctypes.c_int]
    function.restype = None
    return function


def _outer_sum(a: Tensor, g: Tensor, factor: Tensor) -> Tensor:
    problems = Problems()
    problems.require(takes(a, g), f"a {tuple(a.shape)} and g {tuple(g.shape)} do not fit this kernel. Use `takes`.")
    problems.require(
        _fits(factor, torch.float64) and a.shape[:1] == g.shape[:1] == factor.shape,
        f"there must be as many rows, each with a float64 factor, got {tuple(a.shape)}, {tuple(g.shape)} and "
        f"{tuple(factor.shape)} {factor.dtype}.",
    )
    problems.raise_if_any()
    (rows, columns), outputs = a.shape, g.shape[1]
    sums = a.new_empty((outputs, columns), dtype=torch.float64)
    tensors = (a.data_ptr(), g.data_ptr(), factor.data_ptr(), sums.data_ptr())
    _kernel("outer_sum", 4)(rows, columns, outputs, *tensors, torch.get_num_threads())
    return sums


_outer_sum_operator = torch.library.custom_op(
    "dpvision::outer_sum",
    _outer_sum,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor a, Tensor g, Tensor factor) -> Tensor",
)


@_outer_sum_operator.register_fake
def _(a: Tensor, g: Tensor, factor: Tensor) -> Tensor:  # noqa: ARG001
    return a.new_empty((g.shape[1], a.shape[1]), dtype=torch.float64)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    (rows, columns), outputs = x.shape, weight.shape[0]
    y, squares = x.new_empty((rows, outputs)), x.new_empty((rows,), dtype=torch.float64)
    problems = Problems()
    problems.require(takes(x, y), f"x {tuple(x.shape)} and {outputs} outputs do not fit this kernel. Use `takes`.")
    given = [weight] if bias is None else [weight, bias]
    problems.require(
        all(_fits(tensor, torch.float32) for tensor in given)
        and weight.shape == (outputs, columns)
        and (bias is None or bias.shape == (outputs,)),
        f"weight and bias must be contiguous float32 for {columns} inputs, got {[tuple(one.shape) for one in given]}.",
    )
    problems.raise_if_any()
    tensors = (x, weight, bias, y, squares)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    _kernel("skinny_forward", 5)(rows, columns, outputs, *pointers, torch.get_num_threads())
    return y, squares


_forward_operator = torch.library.custom_op(
    "dpvision::skinny_forward",
    _forward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor weight, Tensor? bias) -> (Tensor, Tensor)",
)


@_forward_operator.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    rows = x.shape[0]
    return x.new_empty((rows, weight.shape[0])), x.new_empty((rows,), dtype=torch.float64)
