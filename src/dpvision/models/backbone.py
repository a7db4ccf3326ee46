"""Parts of networks that were trained in public and stay as they are: frozen BatchNorm, resizing, a new head.

Shapes: N rows, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpvision.checks import ArgumentError, Problems

BackboneNorm = Literal["frozen", "group", "batch"]
FeatureNorm = Literal["layer", "none"]


@final
class FrozenBatchNorm(nn.Module):
    """What BatchNorm computes in evaluation, in training too: an affine map of fixed numbers.

    Its buffers have BatchNorm's names, so that a file of a trained BatchNorm fits.

    Guarantee: rows don't mix and nothing moves. The numbers must come from public training.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Scale and shift each channel."""
        return functional.batch_norm(
            x_NCHW, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )

    def extra_repr(self) -> str:
        """Channels and eps, as BatchNorm prints them."""
        return f"{len(self.weight)}, eps={self.eps}"


@final
class Resize(nn.Module):
    """Pictures scaled to ``size`` × ``size`` pixels, each by itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Bicubic; smoothed first where the picture becomes smaller."""
        if tuple(x_NCHW.shape[-2:]) == (self.size, self.size):
            return x_NCHW
        return functional.interpolate(
            x_NCHW, size=(self.size, self.size), mode="bicubic", align_corners=False, antialias=True
        )

    def extra_repr(self) -> str:
        """The size."""
        return f"{self.size}"


def resize(size: int) -> nn.Module:
    """The layer that resizes to ``size`` pixels; 0 leaves pictures as they are."""
    problems = Problems()
    problems.count("resize_to", size, least=0)
    problems.raise_if_any()
    return Resize(size) if size else nn.Identity()


def norm_maker(norm: BackboneNorm, *, groups: int, eps: float) -> Callable[[int], nn.Module]:
    """What follows a convolution: ``frozen`` or ordinary BatchNorm, or GroupNorm with gcd(``groups``, C) groups.

    Ordinary BatchNorm mixes rows: it is for training in public, and the preflight refuses it.
    """
    if norm not in ("frozen", "group", "batch"):
        raise ArgumentError(f"norm must be frozen, group or batch, got {norm!r}.")
    if norm == "frozen":
        return lambda channels: FrozenBatchNorm(channels, eps=eps)
    if norm == "batch":
        return lambda channels: nn.BatchNorm2d(channels, eps=eps)
    return lambda channels: nn.GroupNorm(math.gcd(groups, channels), channels, eps=eps)


def feature_norm_layer(kind: FeatureNorm, features: int) -> nn.Module:
    """``layer`` brings every row's features to mean 0 and variance 1 by that row alone; nothing is learned."""
    if kind not in ("layer", "none"):
        raise ArgumentError(f"feature_norm must be layer or none, got {kind!r}.")
    return nn.LayerNorm(features, elementwise_affine=False) if kind == "layer" else nn.Identity()


def draw(model: nn.Module) -> None:
    """Convolutions normal with variance 2/fan_out and zero biases; linear layers as PyTorch draws them."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.weight[0, 0].numel() * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
