"""The per-unit gradient of one parameter, in whatever form is cheapest for its layer.

A ``LayerGradient`` answers two questions without necessarily forming one gradient per unit: each unit's squared norm,
and the sum of all units' gradients times given factors. Rules (``rules/``) make them, ``privacy.clipping`` takes the
norms, ``clipped_sum`` adds up the sums.

Shapes: U units, D entries of a parameter, T positions, I inputs, O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, final

import torch
from torch import Tensor

from dpvision.kernels.unit_sums import add_weighted, unit_squares

_RUN: Final = 512  # numbers whose squares are added up in their own precision

# A linear map that depends on weights alone, so that it can wait until all units are added up.
Finish = Callable[[Tensor], Tensor]


class LayerGradient(ABC):
    """A parameter's gradient for every unit. Sensitive."""

    @abstractmethod
    def norms_sq(self) -> Tensor:
        """Return the squared L2 norm of each unit's gradient, shape (U,), in float64.

        Guarantee: not below the true value by more than a relative 4e-6; not finite if the gradient is not.
        """

    @abstractmethod
    def weighted_sum(self, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        """Return the sum over units of ``factor_U[u]`` times unit u's gradient.

        Args:
            factor_U: one factor per unit.
            nonfinite_U: True for units that are left out even if their gradient is NaN; None if there are none.

        Returns:
            A sum that ``finish`` turns into the parameter's gradient, also after adding over micro-batches.
        """

    def add_weighted_sum(self, total: Tensor | None, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        """Add ``weighted_sum`` to the float64 sum ``total`` (None is zero) and return it; ``total`` is used up."""
        return _added_to(total, self.weighted_sum(factor_U, nonfinite_U))

    @property
    def finish(self) -> Finish:
        """The map from weighted sums to the parameter's own gradient.

        It holds no activations and uses a sum up: the gradient may lie in the same memory.
        """
        return _unchanged

    @property
    def held_bytes(self) -> int:
        """Memory of the per-unit gradients, beyond that of the layer's input and output gradient."""
        return 0

    @abstractmethod
    def per_unit(self) -> Tensor:
        """Return the gradients themselves, units first."""


@final
class MaterialisedGradient(LayerGradient):
    """Per-unit gradients that exist in memory, units first."""

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient
        self._norms_sq_U: Tensor | None = None

    @property
    def held_bytes(self) -> int:
        return self._gradient.nbytes

    def norms_sq(self) -> Tensor:
        if self._norms_sq_U is None:
            self._norms_sq_U = sum_of_squares(self._gradient)
        return self._norms_sq_U

    def weighted_sum(self, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        gradient_UD = self._gradient.reshape(self._gradient.shape[0], -1)
        if nonfinite_U is not None:
            gradient_UD = gradient_UD.masked_fill(nonfinite_U[:, None], 0.0)
        return (factor_U.to(gradient_UD.dtype) @ gradient_UD).view(self._gradient.shape[1:])

    def add_weighted_sum(self, total: Tensor | None, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        so_far = self._gradient.new_zeros(self._gradient.shape[1:], dtype=torch.float64) if total is None else total
        added_up = add_weighted.attempt(so_far, self._gradient, without_nonfinite(factor_U, nonfinite_U))
        return super().add_weighted_sum(total, factor_U, nonfinite_U) if added_up is None else added_up

    def per_unit(self) -> Tensor:
        return self._gradient


def _unchanged(total: Tensor) -> Tensor:
    return total


def _added_to(total: Tensor | None, part: Tensor) -> Tensor:
    if total is None:
        return part.to(torch.float64, copy=True)
    added_up = add_weighted.attempt(total, part[None], total.new_ones(1))
    return total.add_(part) if added_up is None else added_up


def sum_of_calls(layer_gradients: list[LayerGradient]) -> LayerGradient:
    """Return one parameter's gradient over all calls that used it, added before any norm is taken."""
    if len(layer_gradients) == 1:
        return layer_gradients[0]
    total = layer_gradients[0].per_unit()
    for layer_gradient in layer_gradients[1:]:
        total = total + layer_gradient.per_unit()
    return MaterialisedGradient(total)


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of squares of each entry of the first dimension, in float64, correct to a relative 3e-6.

    Without a kernel, short runs are added up in the tensor's own precision, the runs in float64: as exact as all in
    float64 for this purpose, and thirty times as fast. Squares that underflow are covered by adding the smallest number
    for each of them.
    """
    exact_U = unit_squares.attempt(x)
    if exact_U is not None:
        return exact_U  # no square of a float32 underflows in float64
    x_UD = x.reshape(x.shape[0], -1)
    whole = x_UD.shape[1] // _RUN * _RUN
    rest_U = torch.linalg.vector_norm(x_UD[:, whole:], dim=1).double().square()
    if not whole:
        return rest_U + underflow(x_UD)
    runs = torch.linalg.vector_norm(x_UD[:, :whole].unflatten(1, (-1, _RUN)), dim=2)
    return runs.double().square().sum(1) + rest_U + underflow(x_UD)


def underflow(x_UD: Tensor) -> float:
    """Return what the squares of a row may have lost by falling below the smallest normal number."""
    return x_UD.shape[1] * torch.finfo(x_UD.dtype).tiny


def gram_norms_sq(a_UTI: Tensor, g_UTO: Tensor) -> Tensor:
    """Return squared norms of ``Σ_t a_t g_tᵀ`` without forming the product: ``Σ_tt' (a_t·a_t')(g_t·g_t')``.

    The sum can cancel, so what rounding may have hidden is added: its terms err at random by about a unit in the last
    place of ‖a_t‖‖a_t'‖‖g_t‖‖g_t'‖, which adds up to that much of ``Σ_t ‖a_t‖²‖g_t‖²``. Sixteen is far beyond chance.
    """
    if a_UTI.shape[1] == 1:
        return sum_of_squares(a_UTI) * sum_of_squares(g_UTO)
    a_UTT, g_UTT = torch.bmm(a_UTI, a_UTI.mT), torch.bmm(g_UTO, g_UTO.mT)
    products_UTT = a_UTT * g_UTT
    hidden_U = 16 * torch.finfo(a_UTI.dtype).eps * products_UTT.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64)
    hidden_U = hidden_U + gram_underflow(a_UTT, g_UTT, inputs=a_UTI.shape[2], outputs=g_UTO.shape[2])
    return products_UTT.sum((1, 2), dtype=torch.float64).clamp_min(0) + hidden_U


def gram_underflow(a_UTT: Tensor, g_UTT: Tensor, *, inputs: int, outputs: int) -> Tensor:
    """Bound what inner products in two Gram matrices lose where their terms fall below the smallest number."""
    tiny = torch.finfo(a_UTT.dtype).tiny * a_UTT.shape[1]
    a_U, g_U = (gram.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float64) for gram in (a_UTT, g_UTT))
    return tiny * (inputs * g_U + outputs * a_U)


def ghost_pays(*, positions: int, entries: int) -> bool:
    """Return whether norms from Gram matrices cost less than forming each unit's gradient of ``entries`` numbers.

    Measured on a CPU with AVX2: forming wins up to about sixty entries for each pair of positions.
    """
    return 64 * positions * positions <= entries


def sum_by_unit(x: Tensor, units: int) -> Tensor:
    """Add up the rows of each unit: (rows, …) → (units, …)."""
    if x.shape[0] == units:
        return x
    return x.unflatten(0, (units, -1)).sum(1)


def sum_over_space(x: Tensor) -> Tensor:
    """Add up everything beyond rows and channels: (rows, channels, …) → (rows, channels)."""
    return x if x.dim() == 2 else x.flatten(2).sum(2)


def without_nonfinite(x: Tensor, nonfinite_U: Tensor | None) -> Tensor:
    """Return ``x`` (rows first) with the rows of units in ``nonfinite_U`` set to exactly zero."""
    if nonfinite_U is None:
        return x
    nonfinite_N = nonfinite_U.repeat_interleave(x.shape[0] // nonfinite_U.shape[0])
    return x.masked_fill(nonfinite_N.view(-1, *[1] * (x.dim() - 1)), 0.0)


def scale_by_unit(x: Tensor, factor_U: Tensor) -> Tensor:
    """Return ``x`` (rows first) with every row multiplied by its unit's factor."""
    factor_N = factor_U.to(x.dtype).repeat_interleave(x.shape[0] // factor_U.shape[0])
    return x * factor_N.view(-1, *[1] * (x.dim() - 1))
