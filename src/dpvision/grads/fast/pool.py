"""The 3×3 max-pool of stride and padding one, which smooths a picture, by native kernels.

Shapes: N rows, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from dpvision.grads.fast.norm import channels_last
from dpvision.native import pool


class _MaxPool(Function):
    """The native kernels as one operation."""

    @staticmethod
    def forward(ctx: Any, x_NCHW: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y_NCHW, index_NCHW = pool.forward(x_NCHW)
        ctx.save_for_backward(index_NCHW)
        return y_NCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NCHW: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index_NCHW,) = ctx.saved_tensors
        return pool.backward(channels_last(dy_NCHW), index_NCHW)


@final
class FastMaxPool(nn.Module):
    """Stands in for ``nn.MaxPool2d(3, stride=1, padding=1)``; inputs that don't fit go PyTorch's way."""

    @staticmethod
    def fits(module: nn.Module | None) -> bool:
        """Whether a layer is such a pool."""
        return (
            type(module) is nn.MaxPool2d
            and module.kernel_size in (3, (3, 3))
            and module.stride in (1, (1, 1))
            and module.padding in (1, (1, 1))
            and module.dilation in (1, (1, 1))
            and not module.ceil_mode
            and not module.return_indices
        )

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Pool."""
        if x_NCHW.dim() != 4 or x_NCHW.shape[0] == 0 or not pool.takes(x_NCHW):
            return F.max_pool2d(x_NCHW, 3, stride=1, padding=1)
        return _MaxPool.apply(x_NCHW)
