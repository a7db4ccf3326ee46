"""Linear layers with few outputs on many features: one look at the features gives output and norms.

Shapes: N rows, I in, O out.
"""

from __future__ import annotations

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from dpvision.grads.fast.stand_in import StandIn
from dpvision.grads.rules.linear import linear as ordinary
from dpvision.grads.rules.registry import LayerCall, register
from dpvision.grads.shares import Share
from dpvision.native import skinny


class _Forward(Function):
    """Output and input gradient; none flows to the weight, which is an input so that the output has a gradient."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, layer: SkinnyLinear
    ) -> Tensor:
        ctx.save_for_backward(weight_OI)
        y_NO, squares_N = skinny.forward(x_NI, weight_OI.detach(), None if bias_O is None else bias_O.detach())
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
        return module.out_features <= skinny.MOST_OUTPUTS

    def forward(self, x_NI: Tensor) -> Tensor:
        """The layer's output."""
        layer = self.layer
        if not self.takes(x_NI):
            return F.linear(x_NI, layer.weight, layer.bias)
        return _Forward.apply(x_NI, layer.weight, layer.bias, self)

    def takes(self, x_NI: Tensor) -> bool:
        """Whether this input goes through the kernel."""
        weight = self.layer.weight
        return x_NI.dim() == 2 and skinny.takes(x_NI, x_NI.new_empty(0, weight.shape[0])) and weight.is_contiguous()

    def keep_squares(self, squares_N: Tensor) -> None:
        """Keep ‖x‖² of the rows, during a step: a layer of a graph is called once in a pass."""
        if self._holding:
            self._held["squares"] = squares_N

    def squares(self) -> Tensor | None:
        """‖x‖² of the rows of the last pass, if they were kept."""
        return self._held.get("squares")


def linear(call: LayerCall) -> dict[str, Share]:
    """As for any linear layer, but the inputs' norms are known already."""
    module = call.module
    if not isinstance(module, SkinnyLinear):
        raise TypeError(f"not a SkinnyLinear: {type(module).__name__}")
    return ordinary(call, module.squares() if module.takes(call.x) else None)


register(SkinnyLinear, rule=linear)
