"""Embedding tables: each unit's gradient has rows only where its indices point.

Shapes: U units, T indices of a unit, D entries of a vector, V vectors.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from dpvision.gradients.layer_gradient import (
    LayerGradient,
    ghost_pays,
    scale_by_unit,
    sum_of_squares,
    without_nonfinite,
)
from dpvision.gradients.rules.rule import LayerCall, register


@final
class EmbeddingGradient(LayerGradient):
    """The table's gradient, as indices and the gradients of the vectors that they select."""

    def __init__(self, index_UT: Tensor, g_UTD: Tensor, vectors: int) -> None:
        self._index_UT = index_UT
        self._g_UTD = g_UTD
        self._vectors = vectors

    def norms_sq(self) -> Tensor:
        entries = self._vectors * self._g_UTD.shape[2]
        if not ghost_pays(positions=self._index_UT.shape[1], entries=entries):
            return sum_of_squares(self.per_unit())
        same_UTT = self._index_UT[:, :, None] == self._index_UT[:, None, :]
        # Adding up equal indices first keeps the sum free of cancellation: |Σ g|² over each distinct index.
        merged_UTD = torch.bmm(same_UTT.to(self._g_UTD.dtype), self._g_UTD)
        first_UT = same_UTT.int().argmax(2) == torch.arange(same_UTT.shape[1], device=same_UTT.device)
        merged = torch.linalg.vector_norm(merged_UTD, dim=2, dtype=torch.float64).square()
        return torch.where(first_UT, merged, torch.zeros_like(merged)).sum(1)

    def weighted_sum(self, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        g_UTD = scale_by_unit(without_nonfinite(self._g_UTD, nonfinite_U), factor_U)
        total = g_UTD.new_zeros(self._vectors, g_UTD.shape[2])
        return total.index_add_(0, self._index_UT.flatten(), g_UTD.flatten(0, 1))

    def per_unit(self) -> Tensor:
        units = self._index_UT.shape[0]
        table = self._g_UTD.new_zeros(units * self._vectors, self._g_UTD.shape[2])
        offset_U = torch.arange(units, device=self._index_UT.device) * self._vectors
        table.index_add_(0, (self._index_UT + offset_U[:, None]).flatten(), self._g_UTD.flatten(0, 1))
        return table.view(units, self._vectors, -1)


def embedding(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the table's gradient; rows at ``padding_idx`` get none, as in the layer itself."""
    module = call.layer(nn.Embedding)
    index_UT = call.x.reshape(call.units, -1).long()
    g_UTD = call.dy.reshape(call.units, -1, call.dy.shape[-1])
    if module.padding_idx is not None:
        g_UTD = g_UTD.masked_fill((index_UT == module.padding_idx)[:, :, None], 0.0)
    return {"weight": EmbeddingGradient(index_UT, g_UTD, module.num_embeddings)}


def _has_no_side_effect(module: nn.Module) -> bool:
    """Return whether it is neither renormalised in place nor scaled by frequencies, which mix units."""
    return isinstance(module, nn.Embedding) and module.max_norm is None and not module.scale_grad_by_freq


register(nn.Embedding, rule=embedding, parameters=("weight",), applies=_has_no_side_effect)
