"""Max-pools of stride one, which smooth a picture, by native kernels.

Shapes: N rows, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from dpvision.native import pool
from dpvision.native.channels_last import laid_out


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
        y_NCHW, index_NCHW = pool.forward(x_NCHW, window=window)
        ctx.save_for_backward(index_NCHW)
        ctx.window = window
        return y_NCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NCHW: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index_NCHW,) = ctx.saved_tensors
        return pool.backward(laid_out(dy_NCHW), index_NCHW, window=ctx.window), None


@final
class FastMaxPool(nn.Module):
    """Stands in for an ``nn.MaxPool2d`` of stride 1 that there is a kernel for; what doesn't fit goes PyTorch's way."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    @staticmethod
    def window_of(module: nn.Module | None) -> int | None:
        """The window of such a pool; ``None`` for any other layer."""
        fitting = (w for w, padding in pool.PADDING.items() if is_max_pool(module, kernel=w, stride=1, padding=padding))
        return next(fitting, None)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Pool."""
        if x_NCHW.dim() != 4 or x_NCHW.shape[0] == 0 or not pool.takes(x_NCHW, window=self.window):
            return F.max_pool2d(x_NCHW, self.window, stride=1, padding=pool.PADDING[self.window])
        return _MaxPool.apply(x_NCHW, self.window)
