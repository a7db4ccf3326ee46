"""Per-unit weight gradients of Winograd convolutions: formed, or known by their norms alone.

Small images have few positions: there norms come from Gram matrices over the positions, and the clipped sum is computed
in a second pass over the rows. Elsewhere every unit's gradient is formed once, in memory that the layer keeps.

Shapes: N rows, U units, I in, O out, K kernel (3), H height, W width, T = H·W positions, M moments.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.gradients.fast.fused_conv import (
    CachedWSConv2d,
    FilterFacts,
    WinogradConv,
    WinogradConv2d,
    WinogradWSConv2d,
)
from dpvision.gradients.fast.fused_layer import as_kind
from dpvision.gradients.layer_gradient import (
    Finish,
    LayerGradient,
    MaterialisedGradient,
    gram_underflow,
    sum_by_unit,
    underflow,
)
from dpvision.gradients.rules.convolution import convolution as by_windows
from dpvision.gradients.rules.rule import LayerCall, register
from dpvision.gradients.rules.weight_standardisation import GainGradient, Moments, StandardisedGradient
from dpvision.gradients.rules.weight_standardisation import standardised as standardised_by_windows
from dpvision.kernels import conv_gradients, unit_sums, winograd
from dpvision.kernels.channels_last import laid_out

_RUN: Final = 32
"""Rows that are added in float32."""

_GHOST: Final = 8
"""Entries of the weight for each pair of positions above which norms from Gram matrices are faster (measured)."""


@final
class WinogradGradient(LayerGradient):
    """One convolution's weight gradient, in the order (K, K, I, O).

    Args:
        layer: The convolution, which owns memory and cached filters.
        x_NIHW: Its input, channels-last.
        dy_NOHW: Its output gradient, channels-last.
        units: Privacy units; each owns N / units consecutive rows.
        has_gain: Whether a gain may ask for the same sum as the weight, so that the sum is kept.
    """

    def __init__(
        self, layer: WinogradConv, x_NIHW: Tensor, dy_NOHW: Tensor, units: int, *, has_gain: bool = False
    ) -> None:
        self._layer = layer
        self._x = x_NIHW
        self._dy = dy_NOHW
        self._units = units
        self._has_gain = has_gain
        self._formed: tuple[Tensor, Tensor] | None = None
        self._summed: tuple[Tensor, Tensor] | None = None
        self._normed = False

    @property
    def held_bytes(self) -> int:
        return 0 if self._formed is None else self._formed[0].nbytes

    @property
    def by_ghost(self) -> bool:
        """Whether norms come from Gram matrices, so that no unit's gradient is formed."""
        positions = self._dy.shape[2] * self._dy.shape[3]
        entries = 9 * self._x.shape[1] * self._dy.shape[1]
        return self._x.shape[0] == self._units and _GHOST * positions * positions <= entries

    def norms_sq(self) -> Tensor:
        if self.by_ghost:
            return self.gram_norms_sq(self._dy)
        formed, moments_UMO = self.formed()
        return moments_UMO[:, 0].sum(1) + underflow(formed.flatten(1))

    def gram_norms_sq(self, dy_NOHW: Tensor) -> Tensor:
        """Return squared norms for this output gradient without forming any gradient."""
        self._normed = True
        x_UTI, g_UTO = (part.flatten(2).mT for part in (self._x, dy_NOHW))
        x_gram_UTT, g_gram_UTT = torch.bmm(x_UTI, x_UTI.mT), torch.bmm(g_UTO, g_UTO.mT)
        lost_U = gram_underflow(x_gram_UTT, g_gram_UTT, inputs=9 * self._x.shape[1], outputs=dy_NOHW.shape[1])
        return conv_gradients.gram_norms_sq(x_gram_UTT, g_gram_UTT, *self._x.shape[2:]) + lost_U

    def weighted_sum(self, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        if self._formed is not None:
            return MaterialisedGradient(self._formed[0]).weighted_sum(factor_U, nonfinite_U)
        if self._summed is None or self._summed[0] is not factor_U:
            self._summed = factor_U, self._add_to(self._zeros(), factor_U)
        return self._summed[1]

    def add_weighted_sum(self, total: Tensor | None, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        if self._formed is not None:
            return MaterialisedGradient(self._formed[0]).add_weighted_sum(total, factor_U, nonfinite_U)
        if self._has_gain and not self._normed:
            return super().add_weighted_sum(total, factor_U, nonfinite_U)
        return self._add_to(self._zeros() if total is None else total, factor_U)

    def _zeros(self) -> Tensor:
        return self._x.new_zeros(3, 3, self._x.shape[1], self._dy.shape[1], dtype=torch.float64)

    def _add_to(self, total: Tensor, factor_U: Tensor) -> Tensor:
        """Add in float64 over runs of rows: a long sum in float32 would round away more than the noise may cover."""
        factor_N = factor_U.to(torch.float32).repeat_interleave(self._x.shape[0] // self._units)
        for x, dy, factor in zip(*(part.split(_RUN) for part in (self._x, self._dy, factor_N)), strict=True):
            winograd.add_gradient(total, x, dy, factor)
        return total

    @property
    def finish(self) -> Finish:
        return unit_sums.to_weight_order

    def per_unit(self) -> Tensor:
        return self.formed()[0].permute(0, 4, 3, 1, 2)

    def formed(self) -> tuple[Tensor, Tensor]:
        """Return the gradients (U, K, K, I, O), and of each filter squares and, with z, Σe and ⟨z, e⟩ as (U, M, O)."""
        if self._formed is None:
            memory = self._layer.gradient_memory(self._units)
            z_KKIO = self._layer.direction_KKIO()
            self._formed = winograd.unit_gradients(self._x, self._dy, z_KKIO, self._units, into_UKKIO=memory)
        return self._formed


def convolution(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the gradients of an ordinary convolution."""
    module = as_kind(call.module, WinogradConv2d)
    if not module.takes(call.x):
        return by_windows(replace(call, module=module.layer))
    dy = laid_out(call.dy)
    layer_gradients: dict[str, LayerGradient] = {"weight": WinogradGradient(module, call.x, dy, call.units)}
    return {**layer_gradients, **_bias(call, dy)}


def standardised(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the gradients of a weight-standardised convolution: ``rules.weight_standardisation`` has the formulas."""
    module = as_kind(call.module, WinogradWSConv2d)
    if not module.takes(call.x):
        return standardised_by_windows(replace(call, module=module.layer), module.facts().standardisation)
    facts, dy = module.facts(), laid_out(call.dy)
    used = WinogradGradient(module, call.x, dy, call.units, has_gain="gain" in call.wanted)
    by_ghost = partial(_moments_by_ghost, call, dy, used, facts)
    known = cache(by_ghost if used.by_ghost and facts.steep else partial(_moments, used, facts))
    layer_gradients: dict[str, LayerGradient] = {
        "weight": StandardisedGradient(used, facts.standardisation, known),
        "gain": GainGradient(used, facts.standardisation, known),
    }
    return {**layer_gradients, **_bias(call, dy)}


def cached_standardised(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the gradients of a standardised convolution that Winograd's method does not take."""
    module = as_kind(call.module, CachedWSConv2d)
    return standardised_by_windows(replace(call, module=module.layer), module.facts().standardisation)


def _bias(call: LayerCall, dy: Tensor) -> dict[str, LayerGradient]:
    if "bias" not in call.wanted:
        return {}
    return {"bias": MaterialisedGradient(sum_by_unit(conv_gradients.channel_sums(dy), call.units))}


def _moments(used: WinogradGradient, facts: FilterFacts) -> Moments:
    """From the gradients themselves."""
    squares_UO, total_UO, along_UO = used.formed()[1].unbind(1)
    return Moments(squares_UO @ facts.standardisation.scale_O.double().square(), total_UO, along_UO)


def _moments_by_ghost(call: LayerCall, dy: Tensor, used: WinogradGradient, facts: FilterFacts) -> Moments:
    """Without forming e: ⟨w', e⟩ = Σ_t dy · (y − bias), Σe = Σ_t dy · (box sum of x)."""
    if call.y is None:
        raise TypeError("the layer's output was not kept")
    scale_O = facts.standardisation.scale_O
    box = F.avg_pool2d(call.x.sum(1, keepdim=True), 3, 1, padding=1, divisor_override=1)
    dy_U, dyy_U, total_U, loudness_U = conv_gradients.convolution_moments(dy, laid_out(call.y), box[:, 0]).unbind(1)
    bias = facts.bias_O.double()
    along_U = (dyy_U - bias * dy_U) / facts.gain_O.double()
    doubt_U = 4 * torch.finfo(dy.dtype).eps * (loudness_U + (bias * dy_U).abs()) / facts.gain_O.double().abs()
    squares_U = used.gram_norms_sq(dy * scale_O[:, None, None])
    return Moments(squares_U, total_U, along_U, doubt_U)


register(WinogradConv2d, rule=convolution)
register(CachedWSConv2d, rule=cached_standardised, parameters=("weight", "gain", "bias"))
register(WinogradWSConv2d, rule=standardised, parameters=("weight", "gain", "bias"))
