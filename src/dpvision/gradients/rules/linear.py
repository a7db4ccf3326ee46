"""Linear layers with any number of positions between the row and its features.

Shapes: U units, T positions of a unit (rows included), I in, O out.
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor, nn

from dpvision.gradients.layer_gradient import (
    LayerGradient,
    MaterialisedGradient,
    ghost_pays,
    gram_norms_sq,
    scale_by_unit,
    sum_of_squares,
    without_nonfinite,
)
from dpvision.gradients.rules.rule import LayerCall, register
from dpvision.kernels.unit_sums import outer_sum
from dpvision.models.layers import OffsetLinear

_RUN: Final = 512  # rows that are added up in one product


@final
class LinearGradient(LayerGradient):
    """The weight gradient ``Σ_t g_t a_tᵀ`` of each unit, held as its factors.

    Args:
        a_UTI: inputs.
        g_UTO: output gradients.
        squares_N: ‖a‖² of the rows, if known.
        g_UO: g where a unit has one position.
    """

    def __init__(
        self, a_UTI: Tensor, g_UTO: Tensor, *, squares_N: Tensor | None = None, g_UO: MaterialisedGradient | None = None
    ) -> None:
        self._a_UTI = a_UTI
        self._g_UTO = g_UTO
        self._squares_N = squares_N
        self._g_UO = g_UO
        self._formed: Tensor | None = None

    @property
    def held_bytes(self) -> int:
        return 0 if self._formed is None else self._formed.nbytes

    def norms_sq(self) -> Tensor:
        if self._g_UO is not None:
            squares_U = sum_of_squares(self._a_UTI) if self._squares_N is None else self._squares_N
            return squares_U * self._g_UO.norms_sq()
        entries = self._a_UTI.shape[2] * self._g_UTO.shape[2]
        if ghost_pays(positions=self._a_UTI.shape[1], entries=entries):
            return gram_norms_sq(self._a_UTI, self._g_UTO)
        return sum_of_squares(self.per_unit())

    def weighted_sum(self, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        if self._formed is not None:  # what the norm was taken of: another product could round to something longer
            return MaterialisedGradient(self._formed).weighted_sum(factor_U, nonfinite_U)
        a_NI, g_NO = self._a_UTI.flatten(0, 1), self._g_UTO.flatten(0, 1)
        positions, factor_N = self._a_UTI.shape[1], without_nonfinite(factor_U, nonfinite_U)
        factor_N = factor_N if positions == 1 else factor_N.repeat_interleave(positions)
        sum_OI = outer_sum.attempt(a_NI, g_NO, factor_N)
        if sum_OI is not None:
            return sum_OI
        a_NI, g_NO = without_nonfinite(a_NI, nonfinite_U), scale_by_unit(without_nonfinite(g_NO, nonfinite_U), factor_U)
        # Runs of rows in their own precision, the runs in float64: a long sum would round away more than noise covers.
        runs = zip(a_NI.split(_RUN), g_NO.split(_RUN), strict=True)
        return torch.stack([g.mT @ a for a, g in runs]).sum(0, dtype=torch.float64)

    def add_weighted_sum(self, total: Tensor | None, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        if self._formed is not None:
            return MaterialisedGradient(self._formed).add_weighted_sum(total, factor_U, nonfinite_U)
        return super().add_weighted_sum(total, factor_U, nonfinite_U)

    def per_unit(self) -> Tensor:
        if self._formed is None:
            self._formed = torch.bmm(self._g_UTO.mT, self._a_UTI)
        return self._formed


def linear(call: LayerCall, squares_N: Tensor | None = None) -> dict[str, LayerGradient]:
    """Return weight and bias gradients of a linear layer; ``squares_N`` is ‖x‖² of the rows, if known."""
    a_UTI = call.x.reshape(call.units, -1, call.x.shape[-1])
    g_UTO = call.dy.reshape(call.units, -1, call.dy.shape[-1])
    layer_gradients: dict[str, LayerGradient] = {}
    g_UO = MaterialisedGradient(g_UTO[:, 0]) if g_UTO.shape[1] == 1 else None
    if "weight" in call.wanted:
        layer_gradients["weight"] = LinearGradient(a_UTI, g_UTO, squares_N=squares_N, g_UO=g_UO)
    if "bias" in call.wanted:
        layer_gradients["bias"] = g_UO or MaterialisedGradient(g_UTO.sum(1))
    return layer_gradients


def offset_linear(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the gradients of a linear layer whose bias counts several times in training, and not in evaluation."""
    layer_gradients = linear(call)
    if "bias" in call.wanted:
        g_UTO = call.dy.reshape(call.units, -1, call.dy.shape[-1])
        layer_gradients["bias"] = MaterialisedGradient(g_UTO.sum(1) * call.layer(OffsetLinear).bias_factor)
    return layer_gradients


register(nn.Linear, rule=linear)
register(OffsetLinear, rule=offset_linear)
