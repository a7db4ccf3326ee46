"""Images (N, C, H, W) whose channels are adjacent in memory: the layout that most kernels need.

Strides are compared and set here, because torch's memory formats leave them undefined where a size is 1.

Shapes: N rows, C channels, H height, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpvision.kernels.ops import PLAIN_TYPES


def strides_of(channels: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the strides of such an image, in numbers."""
    return (height * width * channels, 1, width * channels, channels)


def is_channels_last(x_NCHW: Tensor) -> bool:
    """Return whether this is a float32 image on the CPU in that layout. The stride of a size of 1 has no meaning."""
    if x_NCHW.dtype is not torch.float32 or not x_NCHW.is_cpu or type(x_NCHW) not in PLAIN_TYPES:
        return False
    shape, strides = x_NCHW.shape, x_NCHW.stride()
    if len(shape) != 4:
        return False
    wanted = strides_of(*shape[1:])
    if strides == wanted or 0 in shape:
        return True
    return all(size == 1 or stride == want for size, stride, want in zip(shape, strides, wanted, strict=True))


def laid_out(x_NCHW: Tensor) -> Tensor:
    """Return the same numbers of any type in that layout, with its strides also where a size is 1.

    PyTorch tells layouts by strides: after a grey image without them it would continue in the other layout.
    """
    if is_channels_last(x_NCHW):
        return x_NCHW.as_strided(x_NCHW.shape, strides_of(*x_NCHW.shape[1:]))
    return empty(x_NCHW, *x_NCHW.shape).copy_(x_NCHW)


def empty(x: Tensor, rows: int, channels: int, height: int, width: int) -> Tensor:
    """Return an uninitialised image in that layout, of the type and device of ``x``."""
    return x.new_empty_strided((rows, channels, height, width), strides_of(channels, height, width))
