"""tanh by a native kernel, where it is not part of a norm's chain."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from dpvision.native import tanh as native_tanh
from dpvision.native.channels_last import is_channels_last, laid_out


class _Tanh(Function):
    """The native kernel; its gradient is that of PyTorch, from the output alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = native_tanh.tanh(x)
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
        return _Tanh.apply(x) if native_tanh.takes(x) else torch.tanh(x)
