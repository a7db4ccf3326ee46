"""Fast convolutions: 3×3 ones by Winograd's method, and weight-standardised ones with cached filters.

Only forward and input gradient are here; per-unit weight gradients are in ``weight_gradients``.

Shapes: N rows, I in, O out, K kernel (3), H height, W width, U units, D entries of a filter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from dpvision.gradients.fast.fused_layer import CacheLimits, FusedLayer, as_kind
from dpvision.gradients.rules.weight_standardisation import Standardisation
from dpvision.kernels import winograd
from dpvision.kernels.channels_last import is_channels_last, laid_out
from dpvision.models.layers import WSConv2d

_LEAST_SIDE: Final = 3
"""Pixels; in smaller images, most of a 4×4 tile would be padding."""

_LEAST_GAIN: Final = 0.01
"""Below this gain, a filter's own output determines ⟨z, e⟩ too poorly."""


@final
@dataclass(frozen=True)
class FilterFacts:
    """What the per-unit gradients of a standardised convolution depend on besides images.

    Attributes:
        standardisation: Mean and scales of all filters.
        gain_O: The gains; ones where the layer has none.
        bias_O: The biases; zeros where the layer has none.
        steep: Whether every gain is large enough for ⟨z, e⟩ to be computed from the output.
    """

    standardisation: Standardisation
    gain_O: Tensor
    bias_O: Tensor
    steep: bool


class FusedConv(FusedLayer[nn.Conv2d | WSConv2d]):
    """A fast layer in the place of a convolution."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the filters that it computes from its weight."""
        return self.layer.weight.nbytes

    def used_weight(self) -> Tensor:
        """Return the weight that the convolution uses: standardised if the layer does that."""
        layer = self.layer
        return layer.standardised_weight() if isinstance(layer, WSConv2d) else layer.weight

    def facts(self) -> FilterFacts:
        """Return what is derived from a standardised layer's parameters, computed once a step."""
        return self.derived("facts", self._make_facts)

    def _make_facts(self) -> FilterFacts:
        layer = as_kind(self.layer, WSConv2d)
        known = Standardisation.from_layer(layer.weight, layer.gain, layer.eps)
        gain_O = torch.ones_like(known.scale_O) if layer.gain is None else layer.gain.detach()
        bias_O = torch.zeros_like(known.scale_O) if layer.bias is None else layer.bias.detach()
        return FilterFacts(known, gain_O, bias_O, bool((gain_O.abs() >= _LEAST_GAIN).all()))


class _WinogradFunction(Function):
    """Forward and input gradient. The weight is an input only so that the output has a gradient: none flows to it."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x_NIHW: Tensor, weight: Tensor, bias_O: Tensor | None, layer: WinogradConv
    ) -> Tensor:
        del weight
        ctx.layer = layer
        return winograd.convolve(x_NIHW, layer.filters(backward=False), None if bias_O is None else bias_O.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NOHW: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return winograd.convolve(laid_out(dy_NOHW), ctx.layer.filters(backward=True), None), None, None, None


class WinogradConv(FusedConv):
    """A 3×3 convolution of stride and padding 1 by Winograd's method; other inputs go through the layer itself."""

    # Larger filters are not worth keeping: transforming them takes hardly longer than reading them back.
    cache_limits: ClassVar[CacheLimits | None] = CacheLimits(1 << 27, 1 << 25)
    _gradient_memory: Tensor | None = None

    def gradient_memory(self, units: int) -> Tensor | None:
        """Return memory for the weight gradients of this many units; None outside a step.

        It is the same in every micro-batch of every step, because new pages are slow to touch. A layer of a graph is
        called once in a pass, and a micro-batch is finished before the next one begins.
        """
        if not self.is_caching:
            return None
        weight, memory = self.layer.weight, self._gradient_memory
        if memory is None or memory.shape[0] < units or memory.device != weight.device:
            memory = self._gradient_memory = weight.new_empty(units, 3, 3, weight.shape[1], weight.shape[0])
        return memory[:units]

    def filters(self, *, backward: bool) -> winograd.Filters | winograd.RawFilters:
        """Return the filters of the forward pass or of the input gradient.

        Transformed filters take four times as much memory as the weight in each direction. Where the cache has no room
        for them, they are transformed in every convolution.
        """
        if not self.caches_large:
            weight = self.derived("weight", lambda: self.used_weight().detach().contiguous())
            return winograd.RawFilters(weight, backward)
        return self.derived(
            f"filters {backward}", lambda: winograd.transform(self.used_weight().detach(), backward=backward)
        )

    def direction_KKIO(self) -> Tensor | None:
        """Return z of a standardised layer's filters, in the order of their gradients; None for other layers."""
        return None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the transformed filters of both directions."""
        layer = self.layer
        return winograd.filter_bytes(in_channels=layer.in_channels, out_channels=layer.out_channels)

    def takes(self, x_NIHW: Tensor) -> bool:
        """Return whether this input goes through Winograd's method: decided by the images' size, not their number."""
        return is_channels_last(x_NIHW) and x_NIHW.shape[0] > 0 and min(x_NIHW.shape[2:]) >= _LEAST_SIDE

    def forward(self, x_NIHW: Tensor) -> Tensor:
        """Convolve."""
        layer = self.layer
        if not self.takes(x_NIHW):
            return layer(x_NIHW)
        return _WinogradFunction.apply(x_NIHW, layer.weight, layer.bias, self)


@final
class WinogradConv2d(WinogradConv):
    """Replaces an ``nn.Conv2d``."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Return whether a layer is such a convolution."""
        return (
            type(module) is nn.Conv2d
            and module.kernel_size == (3, 3)
            and module.stride == (1, 1)
            and module.dilation == (1, 1)
            and module.groups == 1
            and module.padding in ((1, 1), "same")
            and module.padding_mode == "zeros"
            and winograd.takes_channels(in_channels=module.in_channels, out_channels=module.out_channels)
        )


@final
class WinogradWSConv2d(WinogradConv):
    """Replaces a ``WSConv2d``."""

    keeps_output: Final = True

    def direction_KKIO(self) -> Tensor:
        """Return z of the filters, in the order of their gradients; cached, since only small layers ask for it."""
        return self.derived("direction", self._make_direction)

    def _make_direction(self) -> Tensor:
        z_OIKK = self.facts().standardisation.z_OD.view_as(self.layer.weight)
        return z_OIKK.permute(2, 3, 1, 0).contiguous()

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Return whether a layer is such a convolution."""
        return (
            type(module) is WSConv2d
            and module.kernel_size == 3
            and module.stride == 1
            and module.groups == 1
            and module.padding in ("same", 1)
            and winograd.takes_channels(in_channels=module.in_channels, out_channels=module.out_channels)
        )


class _UncachedFunction(Function):
    """A convolution whose filters are computed in the forward pass and again for the input gradient, and not kept.

    Weight and gain are inputs only so that the output has a gradient: none flows to them.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x_NCHW: Tensor, weight: Tensor, gain_O: Tensor | None, bias_O: Tensor | None, layer: CachedWSConv2d
    ) -> Tensor:
        del weight, gain_O
        ctx.layer = layer
        ctx.save_for_backward(x_NCHW)
        return layer.convolve(x_NCHW, layer.filters(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NOHW: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x_NCHW,) = ctx.saved_tensors
        dx_NCHW = ctx.layer.input_gradient(x_NCHW, dy_NOHW) if ctx.needs_input_grad[0] else None
        return dx_NCHW, None, None, None, None


@final
class CachedWSConv2d(FusedConv):
    """Replaces a ``WSConv2d`` that Winograd's method does not take: its filters are standardised once a step.

    Filters of a large model take as much memory as all its weights: beyond the limits of the cache they are computed
    wherever they are used.
    """

    cache_limits: ClassVar[CacheLimits | None] = CacheLimits(1 << 26, 1 << 26)

    @property
    def _standardised(self) -> WSConv2d:
        return as_kind(self.layer, WSConv2d)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Convolve."""
        layer = self._standardised
        padded = layer.pad(x_NCHW)
        if not self.caches_large:
            return _UncachedFunction.apply(padded, layer.weight, layer.gain, layer.bias, self)
        return self.convolve(padded, self.derived("weight", lambda: self.used_weight().requires_grad_()), layer.bias)

    def filters(self) -> Tensor:
        """Return the standardised filters, computed from a mean and a scale each."""
        return self.facts().standardisation.used_OD.view_as(self.layer.weight)

    def convolve(self, x_NCHW: Tensor, weight: Tensor, bias_O: Tensor | None) -> Tensor:
        """Convolve a padded input with standardised filters."""
        layer = self._standardised
        return F.conv2d(x_NCHW, weight, bias_O, stride=layer.stride, groups=layer.groups)

    def input_gradient(self, x_NCHW: Tensor, dy_NOHW: Tensor) -> Tensor:
        """Return the gradient of ``convolve``'s input from that of its output."""
        layer = self._standardised
        step = (layer.stride,) * 2, (0, 0), (1, 1), False, (0, 0), layer.groups
        wanted = (True, False, False)
        return torch.ops.aten.convolution_backward(dy_NOHW, x_NCHW, self.filters(), None, *step, wanted)[0]
