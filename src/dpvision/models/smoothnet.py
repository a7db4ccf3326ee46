"""SmoothNet (FACTS §4: Remerscheid et al.) with its parts as switches, for the study of isolated components."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from dpvision.errors import Problems
from dpvision.models.initialisation import SCHEMES, initialise, xavier_uniform
from dpvision.models.layers import Norm
from dpvision.models.layers import activation as make_activation

Connections = Literal["dense", "residual", "none"]
Pooling = Literal["max", "average", "none"]
_POOLS = {
    "max": lambda: nn.MaxPool2d(3, stride=1, padding=1),
    "average": lambda: nn.AvgPool2d(3, stride=1, padding=1),
    "none": nn.Identity,
}


@final
@dataclass(frozen=True, kw_only=True)
class SmoothNet:
    """The options of SmoothNet W{10·width}D{10·depth}; ``build`` makes it.

    Two stages of 8·width and 16·width channels, ``depth`` blocks each; the paper's own are ``width=8, depth=5``
    (W80D50). ``pooling`` is a 3×3 pool of stride 1 inside every block: it smooths, it does not shrink. With
    ``connections`` "residual" a block is added to its input wherever the channels match; ``scale_norm`` then normalises
    each sum. ``init`` "selu_xavier" is Xavier-uniform with SELU's gain of 3/4.
    """

    num_classes: int
    in_channels: int
    width: float = 8.0
    depth: float = 5.0
    connections: Connections = "dense"
    pooling: Pooling = "max"
    norm: str = "group"
    groups: int = 8
    activation: str = "selu"
    init: str = "selu_xavier"
    scale_norm: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        width, depth, connections = self.width, self.depth, self.connections
        problems.positive("width", width)
        problems.positive("depth", depth)
        problems.raise_if_any()
        problems.require(8 * width >= 1, f"width must give at least one channel (8 · width >= 1), got {width}.")
        problems.require(depth >= 1, f"depth must be >= 1, got {depth}.")
        known = connections in ("dense", "residual", "none")
        problems.require(known, f"connections must be dense, residual or none, got {connections!r}.")
        problems.require(self.pooling in _POOLS, f"pooling must be one of {', '.join(_POOLS)}, got {self.pooling!r}.")
        fits = not self.scale_norm or connections == "residual"
        problems.require(fits, f"scale_norm needs connections='residual', got {connections!r}.")
        schemes = ("selu_xavier", *SCHEMES)
        problems.require(self.init in schemes, f"init must be one of {', '.join(schemes)}, got {self.init!r}.")
        problems.raise_if_any()

    def build(self) -> nn.Sequential:
        """Stage, transition that halves the image, stage, head."""
        stage0, channels = self._stage(self.in_channels, int(8 * self.width))
        # The paper's transition has neither norm nor activation.
        transition = nn.Sequential(nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2))
        last = int(16 * self.width)
        stage1, _ = self._stage(channels // 2, last)
        model = nn.Sequential(stage0, transition, stage1, *_head(last, self.num_classes, self.activation))
        if self.init == "selu_xavier":
            xavier_uniform(model, gain=nn.init.calculate_gain("selu"))
        else:
            initialise(model, self.init)
        return model

    def _stage(self, channels: int, width: int) -> tuple[Stage, int]:
        """The stage and the channels that leave it: its input's too if connections are dense."""
        norm = Norm(self.norm, self.groups)
        blocks: list[nn.Module] = []
        joins: list[Connections] = []
        norms: list[nn.Module] = []
        for _ in range(int(self.depth)):
            blocks.append(self._block(channels, width))
            # A block that changes the channels is not added to its input.
            adds = self.connections == "residual" and channels == width
            joins.append("none" if self.connections == "residual" and not adds else self.connections)
            norms.append(norm.make(width) if self.scale_norm and adds else nn.Identity())
            channels = channels + width if self.connections == "dense" else width
        return Stage(blocks, joins=joins, scale_norms=norms), channels

    def _block(self, in_channels: int, width: int) -> nn.Sequential:
        """SmoothBlock: convolution, pool of stride 1, norm, activation."""
        return nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
            _POOLS[self.pooling](),
            Norm(self.norm, self.groups).make(width),
            make_activation(self.activation),
        )


@final
class Stage(nn.Module):
    """A chain of blocks: each one's output is concatenated to its input, added to it, or replaces it."""

    def __init__(self, blocks: list[nn.Module], *, joins: list[Connections], scale_norms: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.scale_norms = nn.ModuleList(scale_norms)
        self.joins = tuple(joins)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Run the chain; height and width stay."""
        x = x_NCHW
        for block, join, scale_norm in zip(self.blocks, self.joins, self.scale_norms, strict=True):
            y = block(x)
            match join:
                case "dense":
                    x = torch.cat((x, y), dim=1)
                case "residual":
                    x = scale_norm(x + y)
                case "none":
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


def _head(channels: int, num_classes: int, activation: str) -> list[nn.Module]:
    """Pool to 4×4 pixels of the last block's channels, then three linear layers; images may have any size."""
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
