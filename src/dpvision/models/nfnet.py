"""Normaliser-free networks: NF-ResNet-50/200 and NFNet-F0/F3, as De et al. trained them (FACTS §7).

Instead of norms, the signal's variance is known in advance: standardised filters and activations of unit gain keep it
at one, each residual branch adds alpha² to it, and ``beta`` divides by what has gathered before the next branch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from dpvision.errors import ArgumentError
from dpvision.models.layers import (
    SamePad2d,
    ScalarGain,
    Scale,
    SpatialMean,
    SqueezeExcite,
    StochasticDepth,
    WSConv2d,
)
from dpvision.models.layers import activation as make_activation

ALPHA = 0.2
STRIDES = (1, 2, 2, 2)
RESNET_DEPTHS: dict[int, tuple[int, ...]] = {
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}


@final
@dataclass(frozen=True, kw_only=True)
class NFNetSize:
    """How deep and wide an NFNet is.

    The papers' networks differ in ``depths`` alone; the other numbers are there so that tests can build the same
    blocks small. ``group_width`` is the channels that a grouped 3×3 convolution mixes.
    """

    depths: tuple[int, int, int, int]
    stem: tuple[int, int, int, int] = (16, 32, 64, 128)
    widths: tuple[int, int, int, int] = (256, 512, 1536, 1536)
    group_width: int = 128
    features: int = 3072


F0 = NFNetSize(depths=(1, 2, 6, 3))
F3 = NFNetSize(depths=(4, 8, 24, 12))


@final
@dataclass(frozen=True, kw_only=True)
class BlockPlace:
    """Where a block stands: its channels, its stride, and ``beta`` = 1/(expected standard deviation of its input)."""

    in_channels: int
    out_channels: int
    stride: int
    beta: float
    drop_rate: float

    @property
    def projects(self) -> bool:
        """Whether the shortcut needs a convolution, because the block changes the shape."""
        return self.stride > 1 or self.in_channels != self.out_channels


def block_places(
    *, in_channels: int, widths: tuple[int, ...], depths: tuple[int, ...], stochastic_depth: float
) -> list[BlockPlace]:
    """Every block of a network; the rate of dropping rises from zero to nearly ``stochastic_depth``.

    Each block adds alpha² to the variance; a stage's first block starts again from one, since its shortcut is a
    convolution of the rescaled input.
    """
    _require_probability("stochastic_depth", stochastic_depth)
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
    """``shortcut + alpha · skip_gain · branch(h)`` with ``h = act(x) · beta``; a projection also starts at h.

    ``skip_gain`` is a learned number. In training, stochastic depth may drop a row's branch.
    """

    def __init__(
        self, place: BlockPlace, *, branch: nn.Module, shortcut: nn.Module | None, activation: str, skip_gain: float
    ) -> None:
        super().__init__()
        self.before = nn.Sequential(make_activation(activation), Scale(place.beta))
        self.branch = branch
        self.shortcut = shortcut
        self.drop = StochasticDepth(place.drop_rate) if place.drop_rate > 0 else nn.Identity()
        self.skip_gain = ScalarGain(skip_gain)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Add the scaled branch to the shortcut."""
        h = self.before(x_NCHW)
        shortcut = x_NCHW if self.shortcut is None else self.shortcut(h)
        return self.skip_gain(self.drop(self.branch(h))) * ALPHA + shortcut


def same_average_pool() -> nn.Module:
    """Average-pooling 2×2, stride 2, SAME: a window over the edge averages what is inside."""
    return nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)


def _resnet_block(place: BlockPlace, *, activation: str, skip_gain: float) -> NFBlock:
    """A bottleneck: 1×1 down to a quarter of the width, 3×3, 1×1 up."""
    width = place.out_channels // 4
    branch = nn.Sequential(
        WSConv2d(place.in_channels, width, 1),
        make_activation(activation),
        WSConv2d(width, width, 3, stride=place.stride),
        make_activation(activation),
        WSConv2d(width, place.out_channels, 1),
    )
    shortcut = WSConv2d(place.in_channels, place.out_channels, 1, stride=place.stride) if place.projects else None
    return NFBlock(place, branch=branch, shortcut=shortcut, activation=activation, skip_gain=skip_gain)


def _nfnet_block(place: BlockPlace, *, group_width: int, activation: str, skip_gain: float) -> NFBlock:
    """1×1 to half the width, two grouped 3×3, 1×1 up, squeeze-and-excitation times two.

    A strided block's shortcut is average-pooled before its 1×1 convolution.
    """
    groups = place.out_channels // 2 // group_width
    width = groups * group_width
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
    if place.projects:
        project = WSConv2d(place.in_channels, place.out_channels, 1)
        shortcut = nn.Sequential(same_average_pool(), project) if place.stride > 1 else project
    return NFBlock(place, branch=branch, shortcut=shortcut, activation=activation, skip_gain=skip_gain)


def _require_probability(name: str, value: float) -> None:
    if not (isinstance(value, int | float) and 0 <= value < 1):
        raise ArgumentError(f"{name} must be a probability below 1 (0: off), got {value}.")


def _head(channels: int, num_classes: int, *, activation: str, dropout: float) -> list[nn.Module]:
    """Activation, spatial mean, dropout if any, and a linear layer that starts near zero."""
    _require_probability("dropout", dropout)
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

    ``stochastic_depth`` is off unless asked for; 0.1 is the default of De et al.'s code.
    """
    widths = (256, 512, 1024, 2048)
    places = block_places(in_channels=64, widths=widths, depths=RESNET_DEPTHS[depth], stochastic_depth=stochastic_depth)
    stem = (
        WSConv2d(in_channels, 64, 7, stride=2),
        nn.Sequential(SamePad2d(3, stride=2, value=-math.inf), nn.MaxPool2d(3, 2)),
    )
    blocks = [_resnet_block(place, activation=activation, skip_gain=skip_gain) for place in places]
    return nn.Sequential(*stem, *blocks, *_head(widths[-1], num_classes, activation=activation, dropout=0.0))


def nfnet(
    *,
    num_classes: int,
    in_channels: int,
    size: NFNetSize,
    activation: str = "nf_gelu",
    skip_gain: float = 0.0,
    stochastic_depth: float = 0.0,
    dropout: float = 0.0,
) -> nn.Module:
    """NFNet. ``stochastic_depth`` and ``dropout`` (the paper: 0.4 for F3) are off unless asked for.

    With ``skip_gain`` 0, as in the paper, every block without a projection starts as the identity: its other
    parameters have no gradient before the gain has moved.
    """
    places = block_places(
        in_channels=size.stem[-1], widths=size.widths, depths=size.depths, stochastic_depth=stochastic_depth
    )
    stem: list[nn.Module] = []
    channels = in_channels
    for width, stride in zip(size.stem, (2, 1, 1, 2), strict=True):
        stem += [make_activation(activation)] if stem else []
        stem.append(WSConv2d(channels, width, 3, stride=stride))
        channels = width
    blocks = [
        _nfnet_block(place, group_width=size.group_width, activation=activation, skip_gain=skip_gain)
        for place in places
    ]
    last = WSConv2d(size.widths[-1], size.features, 1)
    head = _head(size.features, num_classes, activation=activation, dropout=dropout)
    return nn.Sequential(*stem, *blocks, last, *head)
