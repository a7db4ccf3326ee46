"""ResNet-18, -34 and -50 with GroupNorm, and ScaleResNet-50 (FACTS §2 and §4: Klause et al., SmoothNet's baselines).

The layers are torchvision's, stride on the 3×3 convolution of a bottleneck, with GroupNorm wherever it has BatchNorm.

ResNet-9 and ScaleResNet-9 (FACTS §1: Klause et al.), and the units that UNet-9 and LinkNet-9 share with them.

A unit is convolution, norm, activation, in the order of the authors' code; ``order="act_norm"`` is that of their
appendix. A residual branch ends in its unit's last layer. ScaleNorm, where there is one, has no activation after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, final

from torch import Tensor, nn

from dpvision.errors import Problems
from dpvision.models.initialisation import initialise, kaiming_normal
from dpvision.models.layers import ORDERS, Groups, Norm, Order, norm_per_stage
from dpvision.models.layers import activation as make_activation

DEPTHS: dict[int, tuple[int, ...]] = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
PLANES = (64, 128, 256, 512)
Stem = Literal["small", "large"]


@final
@dataclass(frozen=True, kw_only=True)
class ResNet:
    """The options of a ResNet; ``build`` makes it.

    ``groups`` may be one number a stage; the stem takes the first. ``stem`` is by default what the papers used: "small"
    (3×3) for ResNet-18, "large" (7×7 and a pool) for the others. ``stage1_activation`` differs from ``activation`` only
    to repeat the thesis's runs of ResNet-50, whose code left ReLU in the first stage whatever was asked for.
    ``scale_norm`` normalises each sum before its activation; the thesis found it to help with LayerNorm and to hurt
    with 16 groups or more. ``init`` "own" is Kaiming-normal over the outputs, torchvision's; or a scheme's name.
    """

    num_classes: int
    in_channels: int
    depth: int
    stem: Stem | None = None
    groups: Groups = 32
    norm: str = "group"
    activation: str = "relu"
    stage1_activation: str | None = None
    scale_norm: bool = False
    init: str = "own"

    def __post_init__(self) -> None:
        problems = Problems()
        problems.require(self.depth in DEPTHS, f"depth must be one of {', '.join(map(str, DEPTHS))}, got {self.depth}.")
        known = self.stem in (None, "small", "large")
        problems.require(known, f"stem must be small (3×3) or large (7×7, stride 2, pool), got {self.stem!r}.")
        problems.raise_if_any()

    @property
    def bottleneck(self) -> bool:
        """Blocks of 1×1, 3×3 and 1×1 convolutions that leave four times their inner width."""
        return self.depth >= 50

    @cached_property
    def norms(self) -> list[Norm]:
        """One a stage."""
        return norm_per_stage(self.norm, self.groups, stages=len(PLANES))

    def build(self) -> nn.Sequential:
        """(stem and stages, pool, flatten, linear)."""
        expansion = 4 if self.bottleneck else 1
        stages: list[nn.Module] = []
        channels = 64
        for index, planes in enumerate(PLANES):
            stages.append(self._stage(index, channels, planes, out_channels=planes * expansion))
            channels = planes * expansion
        body = nn.Sequential(self._stem(), *stages)
        kaiming_normal(body, mode="fan_out")
        model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.num_classes))
        initialise(model, self.init)
        return model

    def _stem(self) -> nn.Sequential:
        small = self.stem == "small" or (self.stem is None and self.depth == 18)
        conv = _conv(self.in_channels, 64, 3) if small else _conv(self.in_channels, 64, 7, stride=2)
        pool = [] if small else [nn.MaxPool2d(3, stride=2, padding=1)]
        return nn.Sequential(conv, self.norms[0].make(64), make_activation(self.activation), *pool)

    def _stage(self, index: int, in_channels: int, planes: int, *, out_channels: int) -> nn.Sequential:
        """All blocks of one size; the first one halves the image, but for stage 0."""
        first = self.stage1_activation if index == 0 else None
        activation = first or self.activation
        blocks: list[nn.Module] = []
        for block in range(DEPTHS[self.depth][index]):
            stride = 2 if index > 0 and block == 0 else 1
            make_branch = _bottleneck_branch if self.bottleneck else _basic_branch
            branch = make_branch(in_channels, planes, stride=stride, norm=self.norms[index], activation=activation)
            blocks.append(
                ResidualBlock(
                    branch=branch,
                    shortcut=_shortcut(in_channels, out_channels, stride=stride, norm=self.norms[index]),
                    scale_norm=self.norms[index].make(out_channels) if self.scale_norm else nn.Identity(),
                    activation=activation,
                )
            )
            in_channels = out_channels
        return nn.Sequential(*blocks)


@final
class ResidualBlock(nn.Module):
    """``act(scale_norm(branch(x) + shortcut(x)))``."""

    def __init__(self, *, branch: nn.Module, shortcut: nn.Module, scale_norm: nn.Module, activation: str) -> None:
        super().__init__()
        self.branch, self.shortcut, self.scale_norm = branch, shortcut, scale_norm
        self.activation = make_activation(activation)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Add, normalise if asked, activate."""
        return self.activation(self.scale_norm(self.branch(x_NCHW) + self.shortcut(x_NCHW)))


def _conv(in_channels: int, out_channels: int, kernel: int, *, stride: int = 1) -> nn.Conv2d:
    """No bias: a norm follows."""
    return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)


def _shortcut(in_channels: int, out_channels: int, *, stride: int, norm: Norm) -> nn.Module:
    """The identity, or a normalised 1×1 convolution where the block changes the shape."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride=stride), norm.make(out_channels))


def _basic_branch(in_channels: int, planes: int, *, stride: int, norm: Norm, activation: str) -> nn.Sequential:
    """Two 3×3 convolutions (ResNet-18 and -34)."""
    return nn.Sequential(
        _conv(in_channels, planes, 3, stride=stride),
        norm.make(planes),
        make_activation(activation),
        _conv(planes, planes, 3),
        norm.make(planes),
    )


def _bottleneck_branch(in_channels: int, planes: int, *, stride: int, norm: Norm, activation: str) -> nn.Sequential:
    """1×1 down, 3×3, 1×1 up to four times the width (ResNet-50)."""
    return nn.Sequential(
        _conv(in_channels, planes, 1),
        norm.make(planes),
        make_activation(activation),
        _conv(planes, planes, 3, stride=stride),
        norm.make(planes),
        make_activation(activation),
        _conv(planes, 4 * planes, 1),
        norm.make(4 * planes),
    )


@final
@dataclass(frozen=True, kw_only=True)
class Unit:
    """What the units of a "-9" network share: norm, activation, and which of them follows the convolution."""

    norm: Norm
    activation: str
    order: Order = "norm_act"

    def __post_init__(self) -> None:
        problems = Problems()
        problems.require(self.order in ORDERS, f"order must be {' or '.join(ORDERS)}, got {self.order!r}.")
        problems.raise_if_any()

    def make(self, in_channels: int, out_channels: int, *, pool: bool = False, upsample: bool = False) -> nn.Sequential:
        """[upsample] → 3×3 convolution without bias → norm and activation [→ max-pool]."""
        layers: list[nn.Module] = [nn.Upsample(scale_factor=2, mode="nearest")] if upsample else []
        layers.append(nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False))
        both = [self.norm.make(out_channels), make_activation(self.activation)]
        layers += both if self.order == "norm_act" else both[::-1]
        return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


@final
class Residual(nn.Module):
    """``norm(x + branch(x))``: a residual block that ends in ScaleNorm, or in nothing."""

    def __init__(self, branch: nn.Module, *, scale_norm: nn.Module | None) -> None:
        super().__init__()
        self.branch = branch
        self.scale_norm = nn.Identity() if scale_norm is None else scale_norm

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Add the branch, then normalise; no activation follows."""
        return self.scale_norm(x_NCHW + self.branch(x_NCHW))


def double_unit(channels: int, unit: Unit, *, scale_norm: bool) -> Residual:
    """The residual block of the "-9" networks: two units, added to their input."""
    branch = nn.Sequential(unit.make(channels, channels), unit.make(channels, channels))
    return Residual(branch, scale_norm=unit.norm.make(channels) if scale_norm else None)


@final
class ResNet9(nn.Module):
    """Four convolutions, two residual blocks, adaptive max-pool to 2×2, one linear layer of 1024 inputs.

    The pool makes the number of features, and so of parameters, independent of the image's size. Blocks have the
    authors' names, because transfer freezes them by name: conv1, conv2, res1 and conv3 stay, the rest learns.

    ``groups`` has four slots: conv1–2, res1, conv3–4, res2 (a block's ScaleNorm goes with it). Every reported run had
    one number in all four; a number above a layer's channels is clamped to them, so that 1 is LayerNorm and 2048
    InstanceNorm. Initial weights are PyTorch's. ``order`` says whether norm or activation follows a convolution.
    ``large_images`` is the authors' unused variant for big inputs: six pools instead of three.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int,
        groups: Groups = 32,
        norm: str = "group",
        activation: str = "mish",
        order: Order = "norm_act",
        scale_norm: bool = False,
        large_images: bool = False,
    ) -> None:
        super().__init__()
        norms = norm_per_stage(norm, groups, stages=4)
        u1, u2, u3, u4 = (Unit(norm=each, activation=activation, order=order) for each in norms)

        def chain(unit: Unit, *channels: int) -> nn.Sequential:
            made = [unit.make(i, o, pool=True) for i, o in pairwise(channels)]
            return made[0] if len(made) == 1 else nn.Sequential(*made)

        self.conv1 = u1.make(in_channels, 64, pool=large_images)
        self.conv2 = chain(u1, 64, 128, 128) if large_images else chain(u1, 64, 128)
        self.res1 = double_unit(128, u2, scale_norm=scale_norm)
        self.conv3 = chain(u3, 128, 128 if large_images else 256)
        self.conv4 = chain(u3, 128, 256, 256) if large_images else chain(u3, 256, 256)
        self.res2 = double_unit(256, u4, scale_norm=scale_norm)
        self.pool = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten())
        self.classifier = nn.Linear(1024, num_classes)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, C, H, W) → (N, classes)."""
        x = self.res1(self.conv2(self.conv1(x_NCHW)))
        x = self.res2(self.conv4(self.conv3(x)))
        return self.classifier(self.pool(x))
