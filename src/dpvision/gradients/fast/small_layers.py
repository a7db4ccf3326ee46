"""tanh by a native kernel, where it is not part of a norm's chain.

Max-pools of stride one, which smooth a picture, by native kernels.

Shapes: N rows, C channels, H height, W width.

Linear layers with few outputs on many features: one look at the features gives output and norms.

Shapes: N rows, I in, O out.

The fixed scattering transform by a native kernel.

Shapes: N rows, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from dpvision.gradients.fast.fused_layer import StandIn
from dpvision.gradients.layer_gradient import LayerGradient
from dpvision.gradients.rules.linear import linear as ordinary
from dpvision.gradients.rules.rule import LayerCall, register
from dpvision.kernels import norm_act, unit_sums
from dpvision.kernels.channels_last import is_channels_last, laid_out
from dpvision.kernels.scatter import scatter
from dpvision.models.scattering import Scattering


class _Tanh(Function):
    """The native kernel; its gradient is that of PyTorch, from the output alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = norm_act.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        dy = laid_out(dy) if is_channels_last(y) else dy  # what follows tells layouts by the strides of its gradient
        return torch.ops.aten.tanh_backward(dy, y)


@final
class FastTanh(nn.Module):
    """Stands in for an ``nn.Tanh``; what doesn't fit the kernel goes PyTorch's way."""

    def forward(self, x: Tensor) -> Tensor:
        """tanh."""
        return _Tanh.apply(x) if norm_act.tanh.takes(x) else torch.tanh(x)


def is_max_pool(module: nn.Module | None, *, kernel: int, stride: int, padding: int) -> bool:
    """Whether a layer is a max-pool with these squares, and nothing else about it."""
    return (
        type(module) is nn.MaxPool2d
        and module.kernel_size in (kernel, (kernel, kernel))
        and module.stride in (stride, (stride, stride))
        and module.padding in (padding, (padding, padding))
        and module.dilation in (1, (1, 1))
        and not module.ceil_mode
        and not module.return_indices
    )


class _MaxPool(Function):
    """The native kernels as one operation."""

    @staticmethod
    def forward(ctx: Any, x_NCHW: Tensor, window: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y_NCHW, index_NCHW = norm_act.max_pool(x_NCHW, window)
        ctx.save_for_backward(index_NCHW)
        ctx.window = window
        return y_NCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NCHW: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index_NCHW,) = ctx.saved_tensors
        return norm_act.max_pool_backward(laid_out(dy_NCHW), index_NCHW, ctx.window), None


@final
class FastMaxPool(nn.Module):
    """Stands in for an ``nn.MaxPool2d`` of stride 1 that there is a kernel for; what doesn't fit goes PyTorch's way."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    @staticmethod
    def window_of(module: nn.Module | None) -> int | None:
        """The window of such a pool; ``None`` for any other layer."""
        fitting = (
            w
            for w, padding in norm_act.POOL_PADDING.items()
            if is_max_pool(module, kernel=w, stride=1, padding=padding)
        )
        return next(fitting, None)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Pool."""
        if x_NCHW.shape[0] == 0 or not norm_act.max_pool.takes(x_NCHW, self.window):
            return F.max_pool2d(x_NCHW, self.window, stride=1, padding=norm_act.POOL_PADDING[self.window])
        return _MaxPool.apply(x_NCHW, self.window)


class _Forward(Function):
    """Output and input gradient; none flows to the weight, which is an input so that the output has a gradient."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, layer: SkinnyLinear
    ) -> Tensor:
        ctx.save_for_backward(weight_OI)
        y_NO, squares_N = unit_sums.narrow_linear(x_NI, weight_OI.detach(), None if bias_O is None else bias_O.detach())
        layer.keep_squares(squares_N)
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight_OI,) = ctx.saved_tensors
        return dy_NO @ weight_OI if ctx.needs_input_grad[0] else None, None, None, None


@final
class SkinnyLinear(StandIn[nn.Linear]):
    """Stands in for an ``nn.Linear`` with few outputs."""

    @staticmethod
    def fits(module: nn.Linear) -> bool:
        """Whether a layer is such a one."""
        return module.out_features <= unit_sums.MOST_OUTPUTS

    def forward(self, x_NI: Tensor) -> Tensor:
        """The layer's output."""
        layer = self.layer
        if not self.takes(x_NI):
            return F.linear(x_NI, layer.weight, layer.bias)
        return _Forward.apply(x_NI, layer.weight, layer.bias, self)

    def takes(self, x_NI: Tensor) -> bool:
        """Whether this input goes through the kernel."""
        return unit_sums.narrow_linear.takes(x_NI, self.layer.weight, self.layer.bias)

    def keep_squares(self, squares_N: Tensor) -> None:
        """Keep ‖x‖² of the rows, during a step: a layer of a graph is called once in a pass."""
        if self._holding:
            self._held["squares"] = squares_N

    def squares(self) -> Tensor | None:
        """‖x‖² of the rows of the last pass, if they were kept."""
        return self._held.get("squares")


def linear(call: LayerCall) -> dict[str, LayerGradient]:
    """As for any linear layer, but the inputs' norms are known already."""
    module = call.module
    if not isinstance(module, SkinnyLinear):
        raise TypeError(f"not a SkinnyLinear: {type(module).__name__}")
    return ordinary(call, module.squares() if module.takes(call.x) else None)


register(SkinnyLinear, rule=linear)


@final
class FastScattering(StandIn[Scattering]):
    """Stands in for a ``Scattering``; what doesn't fit the kernel goes that one's way."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Scatter each colour on its own."""
        wavelets, blurs = self.layer.tables()
        right_size = tuple(x_NCHW.shape[-2:]) == self.layer.image_size
        found = scatter.attempt(x_NCHW, wavelets, blurs, self.layer.padding) if right_size else None
        return self.layer(x_NCHW) if found is None else found
