"""3×3 convolutions by Winograd's method: forward, input gradient, and every unit's weight gradient.

Shapes: N rows, U units, I in, O out, K kernel (3), H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from dpvision.gradients.fast.fused_layer import StandIn
from dpvision.gradients.rules.weight_standardisation import Standardisation
from dpvision.kernels import winograd
from dpvision.kernels.channels_last import is_channels_last, laid_out
from dpvision.models.layers import WSConv2d

_LEAST_SIDE: Final = 3
"""Below this, most of a 4×4 tile is padding."""

_LEAST_GAIN: Final = 0.01
"""Below this, a filter's own output says too little about ⟨z, e⟩."""


class _Convolve(Function):
    """Forward and input gradient. The weight is an input only so that the output has a gradient: none flows to it."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x_NIHW: Tensor, weight: Tensor, bias_O: Tensor | None, layer: Winograd
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


@final
@dataclass(frozen=True)
class Facts:
    """What the per-unit gradients of a standardised convolution depend on besides pictures."""

    standardisation: Standardisation
    gain_O: Tensor
    bias_O: Tensor
    steep: bool


class ConvStandIn(StandIn[nn.Conv2d | WSConv2d]):
    """Stands in for a convolution."""

    @property
    def filter_bytes(self) -> int:
        """What it takes to keep the filters that it makes of its weight."""
        return self.layer.weight.nbytes

    def make_anew(self) -> None:
        """Keep nothing that is larger than the weight in this step."""
        self._held["anew"] = True

    def used_weight(self) -> Tensor:
        """The weight that the convolution uses."""
        layer = self.layer
        return layer.standardised_weight() if isinstance(layer, WSConv2d) else layer.weight

    def facts(self) -> Facts:
        """What is derived from a standardised layer's parameters, once a step."""
        return self.derived("facts", self._make_facts)

    def _make_facts(self) -> Facts:
        layer = self.layer
        if not isinstance(layer, WSConv2d):
            raise TypeError(f"not a WSConv2d: {type(layer).__name__}")
        known = Standardisation.from_layer(layer.weight, layer.gain, layer.eps)
        gain_O = torch.ones_like(known.scale_O) if layer.gain is None else layer.gain.detach()
        bias_O = torch.zeros_like(known.scale_O) if layer.bias is None else layer.bias.detach()
        return Facts(known, gain_O, bias_O, bool((gain_O.abs() >= _LEAST_GAIN).all()))


class Winograd(ConvStandIn):
    """Stands in for a 3×3 convolution of stride and padding one; inputs that don't fit go through the layer itself."""

    _room: Tensor | None = None

    def gradient_memory(self, units: int) -> Tensor | None:
        """Room for the weight gradients of so many units, the same in every micro-batch of every step.

        Fresh pages are slow to touch, so it is kept between steps, too. A layer of a graph is called once in a pass,
        and a micro-batch is done with before the next one begins. ``None`` outside a step.
        """
        if not self._holding:
            return None
        weight = self.layer.weight
        if self._room is None or self._room.shape[0] < units or self._room.device != weight.device:
            self._room = weight.new_empty(units, 3, 3, weight.shape[1], weight.shape[0])
        return self._room[:units]

    def filters(self, *, backward: bool) -> winograd.Filters | winograd.RawFilters:
        """The filters of the forward pass or of the input gradient: transformed once a step, or wherever they are used.

        Transformed ones take four times as much as the weight in each direction.
        """
        if "anew" in self._held:
            weight = self.derived("weight", lambda: self.used_weight().detach().contiguous())
            return winograd.RawFilters(weight, backward)
        return self.derived(
            f"filters {backward}", lambda: winograd.transform(self.used_weight().detach(), backward=backward)
        )

    def direction_KKIO(self) -> Tensor | None:
        """z of a standardised layer's filters, in the order of their gradients."""
        return None

    @property
    def filter_bytes(self) -> int:
        """What it takes to keep the filters of both directions."""
        layer = self.layer
        return winograd.filter_bytes(in_channels=layer.in_channels, out_channels=layer.out_channels)

    def takes(self, x_NIHW: Tensor) -> bool:
        """Whether this input goes through Winograd's method: a picture's size decides, not how many there are."""
        return is_channels_last(x_NIHW) and x_NIHW.shape[0] > 0 and min(x_NIHW.shape[2:]) >= _LEAST_SIDE

    def forward(self, x_NIHW: Tensor) -> Tensor:
        """Convolve."""
        layer = self.layer
        if not self.takes(x_NIHW):
            return layer(x_NIHW)
        return _Convolve.apply(x_NIHW, layer.weight, layer.bias, self)


@final
class WinogradConv2d(Winograd):
    """Stands in for an ``nn.Conv2d``."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a layer is such a convolution."""
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
class WinogradWSConv2d(Winograd):
    """Stands in for a ``WSConv2d``."""

    keeps_output: Final = True

    def direction_KKIO(self) -> Tensor:
        """z of the filters, in the order of their gradients; kept for a step, since only small layers ask for it."""
        return self.derived("direction", self._make_direction)

    def _make_direction(self) -> Tensor:
        z_OIKK = self.facts().standardisation.z_OD.view_as(self.layer.weight)
        return z_OIKK.permute(2, 3, 1, 0).contiguous()

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a layer is such a convolution."""
        return (
            type(module) is WSConv2d
            and module.kernel_size == 3
            and module.stride == 1
            and module.groups == 1
            and module.padding in ("same", 1)
            and winograd.takes_channels(in_channels=module.in_channels, out_channels=module.out_channels)
        )


class _ConvolveAnew(Function):
    """A convolution whose filters are made for the forward pass and again for the input gradient, and not kept.

    Weight and gain are inputs only so that the output has a gradient: none flows to them.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x_NCHW: Tensor, weight: Tensor, gain_O: Tensor | None, bias_O: Tensor | None, layer: HeldWSConv2d
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
class HeldWSConv2d(ConvStandIn):
    """Stands in for a ``WSConv2d`` that Winograd's method does not take: its filters are standardised once a step.

    Those of a large model take as much memory as all its weights, and are made anew wherever they are used.
    """

    @property
    def _standardised(self) -> WSConv2d:
        layer = self.layer
        if not isinstance(layer, WSConv2d):
            raise TypeError(f"not a WSConv2d: {type(layer).__name__}")
        return layer

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Convolve."""
        layer = self._standardised
        padded = layer.pad(x_NCHW)
        if "anew" in self._held:
            return _ConvolveAnew.apply(padded, layer.weight, layer.gain, layer.bias, self)
        return self.convolve(padded, self.derived("weight", lambda: self.used_weight().requires_grad_()), layer.bias)

    def filters(self) -> Tensor:
        """The standardised filters, made of what is kept of them: a mean and a scale each."""
        return self.facts().standardisation.used_OD.view_as(self.layer.weight)

    def convolve(self, x_NCHW: Tensor, weight: Tensor, bias_O: Tensor | None) -> Tensor:
        """The layer's convolution of a padded input with such filters."""
        layer = self._standardised
        return F.conv2d(x_NCHW, weight, bias_O, stride=layer.stride, groups=layer.groups)

    def input_gradient(self, x_NCHW: Tensor, dy_NOHW: Tensor) -> Tensor:
        """What ``convolve``'s output gradient means for its input."""
        layer = self._standardised
        step = (layer.stride,) * 2, (0, 0), (1, 1), False, (0, 0), layer.groups
        return torch.ops.aten.convolution_backward(dy_NOHW, x_NCHW, self.filters(), None, *step, (True, False, False))[
            0
        ]
