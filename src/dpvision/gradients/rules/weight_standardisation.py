"""Weight-standardised convolution: the raw weight's gradient is a linear map of the standardised weight's gradient.

With z the filter shifted to mean zero and scaled by s, and w' = gain · z the weight that is used, a gradient e of w'
gives ⟨z, e⟩ for the gain and ``s · gain · (e − mean(e) − z⟨z, e⟩)`` for the raw filter; the last term is absent where
the filter's variance is below its floor, because s is a constant there. The map is applied once, to the clipped sum;
norms need only ‖e‖², Σe and ⟨z, e⟩ of each filter.

Shapes: U units, O filters, D entries of a filter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.gradients.layer_gradient import (
    Finish,
    LayerGradient,
    MaterialisedGradient,
    sum_by_unit,
    sum_of_squares,
    sum_over_space,
)
from dpvision.gradients.rules.convolution import ConvolutionGradient, Correlation, seen_by
from dpvision.gradients.rules.rule import LayerCall, register
from dpvision.kernels.conv_gradients import filter_moments, pull_back
from dpvision.models.layers import WSConv2d

_NUMBERS_AT_ONCE: Final = 1 << 18


@final
@dataclass(frozen=True)
class Standardisation:
    """The constants of all filters of a layer.

    The unit directions ``z_OD`` are computed on demand, because they would take as much memory as the weights.

    Attributes:
        weight_OD: the raw filters.
        mean_O: their means.
        s_O: 1 / √(sum of squared deviations), with the floor of the layer.
        scale_O: ``s · gain``.
        live_O: 1 where the variance is above its floor, else 0.
    """

    weight_OD: Tensor
    mean_O: Tensor
    s_O: Tensor
    scale_O: Tensor
    live_O: Tensor

    @staticmethod
    def from_layer(weight: Tensor, gain_O: Tensor | None, eps: float) -> Standardisation:
        """Compute the constants from a layer's raw weight and its gain."""
        weight_OD = weight.detach().flatten(1)
        mean_O = weight_OD.mean(1)
        square_O = (weight_OD - mean_O[:, None]).square().sum(1)
        s_O = square_O.clamp(min=eps).rsqrt()
        scale_O = s_O if gain_O is None else s_O * gain_O.detach()
        return Standardisation(weight_OD, mean_O, s_O, scale_O, (square_O >= eps).to(s_O.dtype))

    @property
    def entries(self) -> int:
        """Entries of a filter."""
        return self.weight_OD.shape[1]

    @property
    def z_OD(self) -> Tensor:
        """Each filter's direction: mean zero, length one where the variance is above its floor."""
        return (self.weight_OD - self.mean_O[:, None]).mul_(self.s_O[:, None])

    @property
    def used_OD(self) -> Tensor:
        """The filters that the convolution uses, including the gain."""
        return (self.weight_OD - self.mean_O[:, None]).mul_(self.scale_O[:, None])

    def pull_back(self, e: Tensor) -> Tensor:
        """Return the raw weight's gradient from that of the used weight, shape (…, O, D)."""
        z_OD = self.z_OD
        along = (e * z_OD).sum(-1, keepdim=True) * self.live_O[:, None]
        return (e - e.mean(-1, keepdim=True) - along * z_OD) * self.scale_O[:, None]

    def pulled_back(self, e: Tensor) -> Tensor:
        """Return ``pull_back`` of a sum in a weight's shape, which is used up, in place where possible."""
        facts_O = (self.mean_O, self.s_O, self.scale_O, self.live_O)
        found = pull_back.attempt(e, self.weight_OD, facts_O)
        return self.pull_back_in_place(e.flatten(1)).view(e.shape) if found is None else found

    def pull_back_in_place(self, e_OD: Tensor) -> Tensor:
        """Write ``pull_back`` into ``e_OD``, some filters at a time, because copies of a large layer add up."""
        size = max(1, _NUMBERS_AT_ONCE // self.entries)
        for first in range(0, e_OD.shape[0], size):
            some = slice(first, first + size)
            parts = (self.weight_OD, self.mean_O, self.s_O, self.scale_O, self.live_O)
            e_OD[some] = Standardisation(*(part[some] for part in parts)).pull_back(e_OD[some])
        return e_OD


@final
@dataclass(frozen=True)
class Moments:
    """What norms need of the used weight's gradients e.

    Attributes:
        squares_U: ``Σ_O scale²‖e‖²`` of each unit.
        total_UO: Σe of each filter.
        along_UO: ⟨z, e⟩ of each filter.
        doubt_UO: how far ⟨z, e⟩ may be off where it is not computed from e itself.
    """

    squares_U: Tensor
    total_UO: Tensor
    along_UO: Tensor
    doubt_UO: Tensor | None = None


@final
class StandardisedGradient(LayerGradient):
    """The raw weight's gradient, from the gradient of the weight that the convolution uses."""

    def __init__(self, used: LayerGradient, facts: Standardisation, moments: Callable[[], Moments]) -> None:
        self._used = used
        self._facts = facts
        self._moments = moments

    @property
    def held_bytes(self) -> int:
        return self._used.held_bytes

    def norms_sq(self) -> Tensor:
        moments, facts = self._moments(), self._facts
        scale_sq_O = facts.scale_O.double().square()
        along_UO = moments.along_UO.double()
        removed_UO = moments.total_UO.double().square() / facts.entries + facts.live_O * along_UO.square()
        kept_U = (moments.squares_U - removed_UO @ scale_sq_O).clamp_min(0)
        # A difference: what rounding may have hidden is added, so that the norm is an upper bound. Σe of a gradient
        # that hardly varies is rounded the same way again and again, up to half a unit in the last place a term.
        terms = max(64, facts.entries / 2)
        hidden_U = terms * torch.finfo(facts.scale_O.dtype).eps * moments.squares_U
        if moments.doubt_UO is not None:
            hidden_U = hidden_U + (2 * along_UO.abs() * moments.doubt_UO) @ scale_sq_O
        return kept_U + hidden_U

    def weighted_sum(self, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        return self._used.weighted_sum(factor_U, nonfinite_U)

    def add_weighted_sum(self, total: Tensor | None, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        return self._used.add_weighted_sum(total, factor_U, nonfinite_U)

    @property
    def finish(self) -> Finish:
        facts, used = self._facts, self._used.finish

        return lambda total: facts.pulled_back(used(total))

    def per_unit(self) -> Tensor:
        e_U = self._used.per_unit()
        return self._facts.pull_back(e_U.flatten(2)).view(e_U.shape)


@final
class GainGradient(LayerGradient):
    """The gain's gradient: ⟨z, e⟩ of each filter."""

    def __init__(self, used: LayerGradient, facts: Standardisation, moments: Callable[[], Moments]) -> None:
        self._used = used
        self._facts = facts
        self._moments = moments
        self._known: Moments | None = None

    def norms_sq(self) -> Tensor:
        self._known = self._moments()
        return sum_of_squares(self._known.along_UO)

    def weighted_sum(self, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        if self._known is not None:
            return MaterialisedGradient(self._known.along_UO).weighted_sum(factor_U, nonfinite_U)
        e = self._used.finish(self._used.weighted_sum(factor_U, nonfinite_U))
        return (e.flatten(1) * self._facts.z_OD).sum(1)

    def per_unit(self) -> Tensor:
        return self._moments().along_UO


def standardised(call: LayerCall, facts: Standardisation | None = None) -> dict[str, LayerGradient]:
    """Return raw weight and gain gradients from the used weight's gradient, bias as in any convolution."""
    module = call.layer(WSConv2d)
    layer_gradients: dict[str, LayerGradient] = {}
    if "bias" in call.wanted:
        layer_gradients["bias"] = MaterialisedGradient(sum_by_unit(sum_over_space(call.dy), call.units))
    if call.wanted & {"weight", "gain"}:
        geometry = _geometry(module)
        x = seen_by(geometry, module.pad(call.x), call.dy)
        used = ConvolutionGradient(x, call.dy, geometry, call.units)
        facts = facts or Standardisation.from_layer(module.weight, module.gain, module.eps)
        by_ghost = partial(_moments_by_ghost, call, x, geometry, facts)
        known = cache(by_ghost if used.by_ghost else partial(_moments, used, geometry, facts))
        layer_gradients["weight"] = StandardisedGradient(used, facts, known)
        layer_gradients["gain"] = GainGradient(used, facts, known)
    return {name: layer_gradient for name, layer_gradient in layer_gradients.items() if name in call.wanted}


def _geometry(module: WSConv2d) -> Correlation:
    size, stride = (module.kernel_size,) * 2, (module.stride,) * 2
    return Correlation(module.weight.detach(), size, stride, (1, 1), module.groups)


def _moments(used: ConvolutionGradient, geometry: Correlation, facts: Standardisation) -> Moments:
    e_UOD = used.formed()
    z_OD = geometry.to_order(facts.z_OD.view_as(geometry.weight), channels_inside=used.channels_inside)
    moments_UMO = filter_moments.attempt(e_UOD, z_OD)
    squares_UO, total_UO, along_UO = _plainly(e_UOD, z_OD) if moments_UMO is None else moments_UMO.unbind(1)
    return Moments(squares_UO @ facts.scale_O.double().square(), total_UO, along_UO)


def _plainly(e_UOD: Tensor, z_OD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖e‖², Σe and ⟨z, e⟩ of each filter, without a kernel."""
    squares_UO = sum_of_squares(e_UOD.flatten(0, 1)).unflatten(0, e_UOD.shape[:2])
    directions_OD2 = torch.stack([torch.ones_like(z_OD), z_OD], 2)
    total_UO, along_UO = torch.bmm(e_UOD.transpose(0, 1), directions_OD2).permute(2, 1, 0)
    return squares_UO, total_UO, along_UO


def _moments_by_ghost(call: LayerCall, x: Tensor, geometry: Correlation, facts: Standardisation) -> Moments:
    """Return the moments without forming e: ⟨z, e⟩ = Σ_t dy · (z ∗ x), Σe = Σ_t dy · (box sum of x)."""
    scaled = ConvolutionGradient(x, call.dy * facts.scale_O[:, None, None], geometry, call.units)
    z = facts.z_OD.view_as(geometry.weight)
    along = call.dy * F.conv2d(x, z, stride=geometry.stride, groups=geometry.groups)
    in_group = x.unflatten(1, (geometry.groups, -1)).sum(2)
    ones = torch.ones_like(z[: geometry.groups, :1])
    box = F.conv2d(in_group, ones, stride=geometry.stride, groups=geometry.groups)
    total = call.dy * box.repeat_interleave(z.shape[0] // geometry.groups, 1)
    each = [sum_by_unit(sum_over_space(product), call.units) for product in (total, along)]
    return Moments(scaled.norms_sq(), *each)


register(WSConv2d, rule=standardised, parameters=("weight", "gain", "bias"))
