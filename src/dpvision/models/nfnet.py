"""Normaliser-free networks: NF-ResNet-50/200 and NFNet-F0/F3, as De et al. trained them (FACTS §7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from dpvision.models.activations import activation as make_activation
from dpvision.models.layers import (
    SameMaxPool2d,
    ScalarGain,
    Scale,
    SpatialMean,
    SqueezeExcite,
    StochasticDepth,
    WSConv2d,
)

ALPHA = 0.2
STRIDES = (1, 2, 2, 2)
RESNET_DEPTHS: dict[int, tuple[int, ...]] = {50: (3, 4, 6, 3), 200: (3, 24, 36, 3)}
NFNET_DEPTHS: dict[str, tuple[int, ...]] = {"f0": (1, 2, 6, 3), "f3": (4, 8, 24, 12)}


@final
@dataclass(frozen=True, kw_only=True)
class BlockPlace:
    """Where a block stands: its channels, its stride, and ``beta`` = 1/(expected standard deviation of its input)."""

    in_channels: int
    out_channels: int
    stride: int
    beta: float
    drop_rate: float


def block_places(
    *, in_channels: int, widths: tuple[int, ...], depths: tuple[int, ...], stochastic_depth: float
) -> list[BlockPlace]:
    """Every block of a network.

    Each block adds alpha² to the variance; a stage's first block starts again from one, since its shortcut is a
    convolution of the rescaled input.
    """
    places: list[BlockPlace] = []
    variance, channels = 1.0, in_channels
    for width, depth, first_stride in zip(widths, depths, STRIDES, strict=True):
        for index in range(depth):
            places.append(
                BlockPlace(
                    in_channels=channels,
                    out_channels=width,
                    stride=first_stride if index == 0 else 1,
                    beta=1 / math.sqrt(variance),
                    drop_rate=stochastic_depth * len(places) / sum(depths),
                )
            )
            channels = width
            variance = (1.0 if index == 0 else variance) + ALPHA**2
    return places


@final
class NFBlock(nn.Module):
    """``shortcut + alpha · skip_gain · branch(h)`` with ``h = act(x) · beta``; a projection also starts at h."""

    def __init__(
        self, place: BlockPlace, *, branch: nn.Module, shortcut: nn.Module | None, activation: str, skip_gain: float
    ) -> None:
        super().__init__()
        self.before = nn.Sequential(make_activation(activation), Scale(place.beta))
        self.branch = branch
        self.shortcut = shortcut
        self.drop = StochasticDepth(place.drop_rate) if place.drop_rate > 0 else nn.Identity()
        self.skip_gain = ScalarGain(skip_gain)

    def forward(self, x: Tensor) -> Tensor:
        """Add the scaled branch to the shortcut."""
        h = self.before(x)
        shortcut = x if self.shortcut is None else self.shortcut(h)
        return self.skip_gain(self.drop(self.branch(h))) * ALPHA + shortcut


@final
class SameAvgPool2d(nn.Module):
    """Average-pooling 2×2, stride 2, SAME: a window over the edge averages what is inside."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Halve height and width, rounding up."""
        return functional.avg_pool2d(x_NCHW, 2, ceil_mode=True, count_include_pad=False)


def _resnet_block(place: BlockPlace, *, activation: str, skip_gain: float) -> NFBlock:
    width = place.out_channels // 4
    branch = nn.Sequential(
        WSConv2d(place.in_channels, width, 1),
        make_activation(activation),
        WSConv2d(width, width, 3, stride=place.stride),
        make_activation(activation),
        WSConv2d(width, place.out_channels, 1),
    )
    project = place.stride > 1 or place.in_channels != place.out_channels
    shortcut = WSConv2d(place.in_channels, place.out_channels, 1, stride=place.stride) if project else None
    return NFBlock(place, branch=branch, shortcut=shortcut, activation=activation, skip_gain=skip_gain)


def _nfnet_block(place: BlockPlace, *, activation: str, skip_gain: float) -> NFBlock:
    groups = place.out_channels // 2 // 128
    width = groups * 128
    branch = nn.Sequential(
        WSConv2d(place.in_channels, width, 1),
        make_activation(activation),
        WSConv2d(width, width, 3, stride=place.stride, groups=groups),
        make_activation(activation),
        WSConv2d(width, width, 3, groups=groups),
        make_activation(activation),
        WSConv2d(width, place.out_channels, 1),
        SqueezeExcite(place.out_channels, place.out_channels // 2, activation=nn.ReLU(), factor=2.0),
    )
    shortcut: nn.Module | None = None
    if place.stride > 1 or place.in_channels != place.out_channels:
        project = WSConv2d(place.in_channels, place.out_channels, 1)
        shortcut = nn.Sequential(SameAvgPool2d(), project) if place.stride > 1 else project
    return NFBlock(place, branch=branch, shortcut=shortcut, activation=activation, skip_gain=skip_gain)


def _head(channels: int, num_classes: int, *, activation: str, dropout: float) -> list[nn.Module]:
    linear = nn.Linear(channels, num_classes)
    nn.init.normal_(linear.weight, std=0.01)
    nn.init.zeros_(linear.bias)
    drop = [nn.Dropout(dropout)] if dropout else []
    return [make_activation(activation), SpatialMean(), *drop, linear]


def nf_resnet(
    *,
    num_classes: int,
    in_channels: int,
    depth: int,
    activation: str = "nf_relu",
    skip_gain: float = 1.0,
    stochastic_depth: float = 0.0,
) -> nn.Module:
    """NF-ResNet. ``skip_gain`` starts at 1 as in the private ImageNet run (0 in the NF papers).

    ``stochastic_depth`` is off unless asked for (the paper's default is 0.1): it draws from the global generator.
    """
    widths = (256, 512, 1024, 2048)
    places = block_places(in_channels=64, widths=widths, depths=RESNET_DEPTHS[depth], stochastic_depth=stochastic_depth)
    stem = (WSConv2d(in_channels, 64, 7, stride=2), SameMaxPool2d(3, stride=2))
    blocks = [_resnet_block(place, activation=activation, skip_gain=skip_gain) for place in places]
    return nn.Sequential(*stem, *blocks, *_head(widths[-1], num_classes, activation=activation, dropout=0.0))


def nfnet(
    *,
    num_classes: int,
    in_channels: int,
    variant: str,
    activation: str = "nf_gelu",
    skip_gain: float = 0.0,
    stochastic_depth: float = 0.0,
    dropout: float = 0.0,
) -> nn.Module:
    """NFNet. ``stochastic_depth`` and ``dropout`` (the paper: 0.4 for F3) are off unless asked for."""
    widths = (256, 512, 1536, 1536)
    places = block_places(
        in_channels=128, widths=widths, depths=NFNET_DEPTHS[variant], stochastic_depth=stochastic_depth
    )
    stem: list[nn.Module] = []
    channels = in_channels
    for width, stride in ((16, 2), (32, 1), (64, 1), (128, 2)):
        stem += [make_activation(activation)] if stem else []
        stem.append(WSConv2d(channels, width, 3, stride=stride))
        channels = width
    blocks = [_nfnet_block(place, activation=activation, skip_gain=skip_gain) for place in places]
    final_conv = WSConv2d(widths[-1], 3072, 1)
    return nn.Sequential(*stem, *blocks, final_conv, *_head(3072, num_classes, activation=activation, dropout=dropout))
