"""Squared norms, clip factors and weighted sums over units: what clipping needs besides the gradients themselves.

All are computed in one pass over the memory. The linear layer with few outputs is here too, because its kernel returns
each row's squared norm with the output, and the sum of its outer products is the clipped weight gradient.

Shapes: U units, D entries of a parameter, N rows, I inputs, O outputs, K kernel.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from dpvision.kernels.ops import call, is_dense, is_dense_or_none, kernel

MOST_OUTPUTS: Final = 10
"""Outputs up to which the kernels of a linear layer win; above, matrix products are as fast (measured with AVX-512)."""


@kernel(is_dense, "contiguous float32 on the CPU")
def unit_squares(x: Tensor) -> Tensor:
    """Sum the squares of each entry of the first dimension, in float64 throughout.

    Guarantee: not finite if a number is not. One thread computes a unit: no bit depends on the number of threads.
    """
    units = x.shape[0]
    squares_U = torch.empty(units, dtype=torch.float64)
    call("unit_squares", (units, x.numel() // max(1, units)), x, squares_U)
    return squares_U


def _factors_fit(norms_sq: list[Tensor], real_U: Tensor, **_: float) -> bool:
    shape = real_U.shape
    norms_fit = all(norms_sq_U.shape == shape and is_dense(norms_sq_U, torch.float64) for norms_sq_U in norms_sq)
    return norms_fit and len(shape) == 1 and is_dense(real_U, torch.bool)


@kernel(_factors_fit, "float64 norms and one bool for each unit, contiguous on the CPU")
def clip_factors(
    norms_sq: list[Tensor], real_U: Tensor, *, below: float, added: float, most: float, least: float
) -> Tensor | None:
    """Compute ``below / (norm + added)``, at most ``most``; zero for units that are not real or would get < ``least``.

    Args:
        norms_sq: Tensors (U,) in float64, whose sum is each unit's squared norm.
        real_U: False for units that only fill up the batch.
        below: Norm to which gradients are clipped.
        added: Added to a norm before it divides.
        most: The largest factor; infinity for none.
        least: Factors below are set to zero, because rounding could enlarge them.

    Returns:
        The factors (U,) in float64, or None if any unit's squared norm is negative, infinite or NaN.
    """
    factor_U = torch.empty(len(real_U), dtype=torch.float64)
    pointers = (ctypes.c_void_p * len(norms_sq))(*[norms_sq_U.data_ptr() for norms_sq_U in norms_sq])
    numbers = (len(real_U), len(norms_sq), below, added, most, least)
    broken = call("clip_factors", numbers, pointers, real_U, factor_U)
    return None if broken else factor_U


def _weighted_fit(total: Tensor, parts: Tensor, factor_U: Tensor) -> bool:
    shapes_fit = parts.shape[1:] == total.shape and factor_U.shape == parts.shape[:1]
    return shapes_fit and is_dense(total, torch.float64) and is_dense(parts) and is_dense(factor_U, torch.float64)


@kernel(_weighted_fit, "a float64 total, float32 parts of its shape with a float64 factor each, contiguous on the CPU")
def add_weighted(total: Tensor, parts: Tensor, factor_U: Tensor) -> Tensor:
    """Add ``Σ_u factor_U[u] · parts[u]`` to ``total`` and return it: products and sum in float64, unit after unit.

    Guarantee: a unit with factor 0 is not read, so it adds exactly nothing whatever it holds. One thread computes an
    entry: no bit depends on the number of threads.
    """
    call("add_weighted", (parts.shape[0], total.numel()), total, parts, factor_U)
    return total


def _filters_fit(sums_KKIO: Tensor) -> bool:
    return sums_KKIO.dim() == 4 and is_dense(sums_KKIO, torch.float64)


@kernel(_filters_fit, "contiguous float64 (height, width, in, out) on the CPU")
def _filter_order(sums_KKIO: Tensor) -> Tensor:
    height, width, inputs, outputs = sums_KKIO.shape
    weight_OIKK = sums_KKIO.new_empty(outputs, inputs, height, width)
    call("filter_order", (height * width, inputs, outputs), sums_KKIO, weight_OIKK)
    return weight_OIKK


def to_weight_order(sums_KKIO: Tensor) -> Tensor:
    """Return the same numbers as a weight (O, I, K, K), contiguous; by PyTorch where the kernel can't be used."""
    weight_OIKK = _filter_order.attempt(sums_KKIO)
    return sums_KKIO.permute(3, 2, 0, 1).contiguous() if weight_OIKK is None else weight_OIKK


def _linear_fits(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    if x_NI.dim() != 2 or not is_dense(x_NI) or weight_OI.shape[0] > MOST_OUTPUTS:
        return False
    shape = (weight_OI.shape[0], x_NI.shape[1])
    return weight_OI.shape == shape and is_dense(weight_OI) and is_dense_or_none(bias_O, shape[:1])


@kernel(_linear_fits, f"contiguous float32 on the CPU, a weight for x's inputs and at most {MOST_OUTPUTS} outputs")
def narrow_linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute ``x wᵀ + bias``, and each row's ‖x‖² in float64, in one pass over ``x``.

    Returns:
        y (N, O) in float32, and the squares (N,) in float64.
    """
    (rows, columns), outputs = x_NI.shape, weight_OI.shape[0]
    y_NO, squares_N = x_NI.new_empty(rows, outputs), x_NI.new_empty(rows, dtype=torch.float64)
    call("narrow_linear", (rows, columns, outputs), x_NI, weight_OI, bias_O, y_NO, squares_N)
    return y_NO, squares_N


def _outer_fits(a_NI: Tensor, g_NO: Tensor, factor_N: Tensor) -> bool:
    if a_NI.dim() != 2 or g_NO.dim() != 2 or g_NO.shape[1] > MOST_OUTPUTS:
        return False
    same_rows = a_NI.shape[:1] == g_NO.shape[:1] == factor_N.shape
    return same_rows and is_dense(a_NI) and is_dense(g_NO) and is_dense(factor_N, torch.float64)


@kernel(_outer_fits, f"equal rows, float32 with a float64 factor each, contiguous, at most {MOST_OUTPUTS} outputs")
def outer_sum(a_NI: Tensor, g_NO: Tensor, factor_N: Tensor) -> Tensor:
    """Compute ``Σ_n factor_n · g_n aᵀ_n`` (O, I) in float64.

    ``factor · g`` is rounded to float32, 32 rows are added in float32, and those sums in float64.

    Guarantee: a row with factor 0 is not read. One thread computes a column: no bit depends on the number of threads.
    """
    (rows, columns), outputs = a_NI.shape, g_NO.shape[1]
    sum_OI = a_NI.new_empty(outputs, columns, dtype=torch.float64)
    call("outer_sum", (rows, columns, outputs), a_NI, g_NO, factor_N, sum_OI)
    return sum_OI
