"""Weight-standardised convolution: the raw weight's gradient is a linear map of the standardised weight's gradient.

With z the filter shifted to mean zero and scaled by s, and w' = gain · z the weight that is used, a gradient e of w'
gives ⟨z, e⟩ for the gain and ``s · gain · (e − mean(e) − z⟨z, e⟩)`` for the raw filter; the last term is absent where
the filter's variance is below its floor, because s is a constant there. The map is applied once, to the clipped sum;
norms need only ‖e‖², Σe and ⟨z, e⟩ of each filter.

Shapes: U units, O filters, D entries of a filter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.grads.rules.conv import Correlated, Correlation, seen_by
from dpvision.grads.rules.registry import LayerCall, register
from dpvision.grads.shares import Kept, Share, sum_by_unit, sum_over_space
from dpvision.models.layers import WSConv2d


@final
@dataclass(frozen=True)
class Standardisation:
    """The facts of all filters: unit direction ``z_OD``, total scale ``s · gain``, and where the variance counts."""

    z_OD: Tensor
    scale_O: Tensor
    live_O: Tensor

    @staticmethod
    def of(module: WSConv2d) -> Standardisation:
        """Read off the layer's raw weight and gain."""
        weight_OD = module.weight.detach().flatten(1)
        centred_OD = weight_OD - weight_OD.mean(1, keepdim=True)
        square_O = torch.var(weight_OD, dim=1, correction=0) * weight_OD.shape[1]
        s_O = square_O.clamp(min=module.eps).rsqrt()
        scale_O = s_O if module.gain is None else s_O * module.gain.detach()
        return Standardisation(centred_OD * s_O[:, None], scale_O, (square_O >= module.eps).to(s_O.dtype))

    def pull_back(self, e: Tensor) -> Tensor:
        """The raw weight's gradient, from (…, O, D)."""
        along = (e * self.z_OD).sum(-1, keepdim=True) * self.live_O[:, None]
        return (e - e.mean(-1, keepdim=True) - along * self.z_OD) * self.scale_O[:, None]


@final
class Standardised(Share):
    """The raw weight's gradient, from the share of the weight that the convolution uses."""

    def __init__(self, used: Share, facts: Standardisation, length_UO: Tensor, total_UO: Tensor, along_UO: Tensor) -> None:
        self._used = used
        self._facts = facts
        self._length_UO = length_UO
        self._total_UO = total_UO
        self._along_UO = along_UO
