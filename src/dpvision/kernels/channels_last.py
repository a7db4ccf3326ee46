"""Pictures (N, C, H, W) whose channels lie side by side in memory: the layout that all kernels want.

Strides are compared and set by hand, because torch's memory formats leave them open where a size is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpvision.errors import Problems

# N rows, C channels, H height, W width


def strides_of(channels: int, height: int, width: int) -> tuple[int, int, int, int]:
    """The strides of such a picture."""
    return (height * width * channels, 1, width * channels, channels)


def is_channels_last(x_NCHW: Tensor) -> bool:
    """Whether this is a float32 picture on the CPU in that layout. The stride of a size of 1 means nothing."""
    if x_NCHW.dim() != 4 or x_NCHW.dtype != torch.float32 or x_NCHW.device.type != "cpu":
        return False
    wanted = strides_of(*x_NCHW.shape[1:])
    steps = zip(x_NCHW.shape, x_NCHW.stride(), wanted, strict=True)
    return x_NCHW.numel() == 0 or all(size == 1 or stride == want for size, stride, want in steps)


def laid_out(x_NCHW: Tensor) -> Tensor:
    """The same numbers in that layout, whatever their type, with its strides also where a size is 1.

    PyTorch tells layouts by strides: a grey picture without them would make it go on with the other layout.
    """
    if is_channels_last(x_NCHW):
        return x_NCHW.as_strided(x_NCHW.shape, strides_of(*x_NCHW.shape[1:]))
    return empty(x_NCHW, *x_NCHW.shape).copy_(x_NCHW)


def empty(x: Tensor, rows: int, channels: int, height: int, width: int) -> Tensor:
    """An uninitialised picture in that layout, otherwise like ``x``."""
    return x.new_empty_strided((rows, channels, height, width), strides_of(channels, height, width))


def require(problems: Problems, name: str, x: Tensor, shape: Sequence[int]) -> None:
    """Note it unless ``x`` is a picture of that shape in that layout."""
    if tuple(x.shape) != tuple(shape) or not is_channels_last(x):
        seen = f"{tuple(x.shape)}, strides {x.stride()}, {x.dtype}, {x.device}"
        wanted = f"a channels-last float32 CPU tensor (rows, channels, height, width) of shape {tuple(shape)}"
        problems.require(False, f"{name} must be {wanted}, got {seen}. Use `takes` first.")


def require_plain(problems: Problems, name: str, x: Tensor | None, shape: Sequence[int]) -> None:
    """Note it unless ``x`` is None or a contiguous float32 CPU tensor of that shape."""
    if x is None:
        return
    plain = x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()
    if not plain or tuple(x.shape) != tuple(shape):
        seen = f"{tuple(x.shape)}, strides {x.stride()}, {x.dtype}, {x.device}"
        wanted = f"a contiguous float32 CPU tensor of shape {tuple(shape)}"
        problems.require(False, f"{name} must be {wanted}, got {seen}.")


def without_dispatch(x: Tensor) -> bool:
    """Whether a kernel may be called directly, which saves 25 µs: nobody records gradients, a graph or shapes."""
    return type(x) is Tensor and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
