"""SmoothNet (FACTS: Remerscheid et al.) with its parts as switches, for the study of isolated components."""

from __future__ import annotations

from typing import Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from dpvision.checks import Problems
from dpvision.models.activations import activation as make_activation
from dpvision.models.initialise import SCHEMES, initialise, xavier_uniform
from dpvision.models.norms import Norm

Connections = Literal["dense", "residual", "none"]
Pooling = Literal["max", "average", "none"]
_POOLS = {
    "max": lambda: nn.MaxPool2d(3, stride=1, padding=1),
    "average": lambda: nn.AvgPool2d(3, stride=1, padding=1),
    "none": nn.Identity,
}


class _Parts(NamedTuple):
    """What the stages are made of."""

    depth: int
    connections: Connections
    pooling: Pooling
    norm: Norm
    activation: str
    scale_norm: bool


@final
class Stage(nn.Module):
    """A chain of blocks: each one's output is concatenated to its input, added to it, or replaces it."""

    def __init__(self, blocks: list[nn.Module], *, connections: Connections, scale_norms: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.scale_norms = nn.ModuleList(scale_norms)
        self.connections = connections

    def forward(self, x: Tensor) -> Tensor:
        """Run the chain."""
        for block, scale_norm in zip(self.blocks, self.scale_norms, strict=True):
            y = block(x)
            if self.connections == "dense":
                x = torch.cat((x, y), dim=1)
            elif self.connections == "residual" and x.shape == y.shape:
                x = scale_norm(x + y)
            else:
                x = y
        return x


@final
class LastChannels(nn.Module):
    """Keep the last ``count`` channels: the last block's output in a dense stage."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """A view."""
        return x_NCHW[:, -self.count :]


def smoothnet(
    *,
    num_classes: int,
    in_channels: int,
    width: float = 8.0,
    depth: float = 5.0,
    connections: Connections = "dense",
    pooling: Pooling = "max",
    norm: str = "group",
    groups: int = 8,
    activation: str = "selu",
    init: str = "selu_xavier",
    scale_norm: bool = False,
) -> nn.Module:
    """SmoothNet W{10·width}D{10·depth}: stages of 8·width and 16·width channels, ``depth`` blocks each.

    With ``connections`` "residual" a block is added to its input wherever the channels match; ``scale_norm`` then
    normalises each sum. ``init`` "selu_xavier" is Xavier-uniform with SELU's gain of 3/4.
    """
    problems = Problems()
    problems.require(int(8 * width) >= 1, f"width must give at least one channel (8 · width >= 1), got {width}.")
    problems.require(int(depth) >= 1, f"depth must be >= 1, got {depth}.")
    problems.require(connections in ("dense", "residual", "none"), f"connections can't be {connections!r}.")
    problems.require(pooling in _POOLS, f"pooling must be one of {', '.join(_POOLS)}, got {pooling!r}.")
    problems.require(not scale_norm or connections == "residual", "scale_norm needs connections='residual'.")
    problems.require(init == "selu_xavier" or init in SCHEMES, f"init must be selu_xavier, {', '.join(SCHEMES)}.")
    problems.raise_if_any()
    parts = _Parts(int(depth), connections, pooling, Norm(norm, groups), activation, scale_norm)
    stage0, channels = _stage(in_channels, int(8 * width), parts)
    transition = nn.Sequential(nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2))
    stage1, _ = _stage(channels // 2, int(16 * width), parts)
    model = nn.Sequential(stage0, transition, stage1, *_head(int(16 * width), num_classes, activation))
    if init == "selu_xavier":
        xavier_uniform(model, gain=nn.init.calculate_gain("selu"))
    else:
        initialise(model, init)
    return model


def _stage(channels: int, width: int, parts: _Parts) -> tuple[Stage, int]:
    """The stage and the channels that leave it."""
    blocks: list[nn.Module] = []
    norms: list[nn.Module] = []
    for _ in range(parts.depth):
        blocks.append(_block(channels, width, parts))
        # A block that changes the channels is not added to its input.
        norms.append(parts.norm.make(width) if parts.scale_norm and channels == width else nn.Identity())
        channels = channels + width if parts.connections == "dense" else width
    return Stage(blocks, connections=parts.connections, scale_norms=norms), channels


def _block(in_channels: int, width: int, parts: _Parts) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
        _POOLS[parts.pooling](),
        parts.norm.make(width),
        make_activation(parts.activation),
    )


def _head(channels: int, num_classes: int, activation: str) -> list[nn.Module]:
    return [
        nn.AvgPool2d(2),
        LastChannels(channels),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * channels, 256),
        make_activation(activation),
        nn.Linear(256, 128),
        make_activation(activation),
        nn.Linear(128, num_classes),
    ]
