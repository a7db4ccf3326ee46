"""Small fast layers: tanh outside a norm's chain, max-pools of stride 1, narrow linear layers, and scattering.

Each calls a kernel where the input fits, and the original operation elsewhere. Only the linear layer has parameters, so
only it has a gradient rule: one pass over the features gives its output and the norms that clipping needs.

Shapes: N rows, C channels, H height, W width, I in, O out.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from dpvision.gradients.fast.fused_layer import FusedLayer, as_kind
from dpvision.gradients.layer_gradient import LayerGradient
from dpvision.gradients.rules.linear import linear as ordinary
from dpvision.gradients.rules.rule import LayerCall, register
from dpvision.kernels import norm_act, unit_sums
from dpvision.kernels.channels_last import is_channels_last, laid_out
from dpvision.kernels.scatter import scatter
from dpvision.models.scattering import Scattering


class _Tanh(Function):
    """The kernel; its gradient is that of PyTorch, from the output alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = norm_act.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        dy = laid_out(dy) if is_channels_last(y) else dy  # later layers tell layouts by the strides of their gradient
        return torch.ops.aten.tanh_backward(dy, y)


@final
class FastTanh(nn.Module):
    """Replaces an ``nn.Tanh``; inputs that do not fit the kernel go to ``torch.tanh``."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute tanh."""
        return _Tanh.apply(x) if norm_act.tanh.takes(x) else torch.tanh(x)


def is_max_pool(module: nn.Module | None, *, kernel: int, stride: int, padding: int) -> bool:
    """Return whether a layer is a max-pool with these sizes in both directions and no other option."""
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
    """The kernels as one operation."""

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
    """Replaces an ``nn.MaxPool2d`` of stride 1 that has a kernel; inputs that do not fit go to PyTorch's."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    @staticmethod
    def window_of(module: nn.Module | None) -> int | None:
        """Return the window of such a pool, 2 or 3; None for any other layer."""
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


class _NarrowLinearFunction(Function):
    """Output and input gradient; none flows to the weight, which is an input so that the output has a gradient."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, layer: NarrowLinear
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
class NarrowLinear(FusedLayer[nn.Linear]):
    """Replaces an ``nn.Linear`` with few outputs."""

    @staticmethod
    def fits(module: nn.Linear) -> bool:
        """Return whether a layer has few enough outputs."""
        return module.out_features <= unit_sums.MOST_OUTPUTS

    def forward(self, x_NI: Tensor) -> Tensor:
        """Compute the layer's output."""
        layer = self.layer
        if not self.takes(x_NI):
            return F.linear(x_NI, layer.weight, layer.bias)
        return _NarrowLinearFunction.apply(x_NI, layer.weight, layer.bias, self)

    def takes(self, x_NI: Tensor) -> bool:
        """Return whether this input goes through the kernel."""
        return unit_sums.narrow_linear.takes(x_NI, self.layer.weight, self.layer.bias)

    def keep_squares(self, squares_N: Tensor) -> None:
        """Cache ‖x‖² of the rows during a step: a layer of a graph is called once in a pass."""
        self.remember("squares", squares_N)

    def squares(self) -> Tensor | None:
        """Return ‖x‖² of the rows of the last pass; None if they were not cached."""
        return self.recall("squares")


def linear(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the gradients of any linear layer, with the inputs' squared norms that are known already."""
    module = as_kind(call.module, NarrowLinear)
    return ordinary(call, module.squares() if module.takes(call.x) else None)


register(NarrowLinear, rule=linear)


@final
class FastScattering(FusedLayer[Scattering]):
    """Replaces a ``Scattering``; inputs that do not fit the kernel go through the layer itself."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Scatter each colour separately."""
        wavelets, blurs = self.layer.tables()
        right_size = tuple(x_NCHW.shape[-2:]) == self.layer.image_size
        found = scatter.attempt(x_NCHW, wavelets, blurs, self.layer.padding) if right_size else None
        return self.layer(x_NCHW) if found is None else found
