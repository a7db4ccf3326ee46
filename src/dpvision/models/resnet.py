"""ResNet-18, -34 and -50 with GroupNorm, and ScaleResNet-50 (FACTS: SmoothNet's baselines; Klause et al.)."""

from __future__ import annotations

from typing import Literal, final

from torch import Tensor, nn

from dpvision.checks import ArgumentError
from dpvision.models.activations import activation as make_activation
from dpvision.models.initialise import kaiming_normal
from dpvision.models.norms import Groups, Norm, norm_per_stage

DEPTHS: dict[int, tuple[int, ...]] = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
PLANES = (64, 128, 256, 512)
Stem = Literal["small", "large"]


def _conv(in_channels: int, out_channels: int, kernel: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)


@final
class ResidualBlock(nn.Module):
    """``act(scale_norm(branch(x) + shortcut(x)))``."""

    def __init__(self, *, branch: nn.Module, shortcut: nn.Module, scale_norm: nn.Module, activation: str) -> None:
        super().__init__()
        self.branch, self.shortcut, self.scale_norm = branch, shortcut, scale_norm
        self.activation = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Add, normalise if asked, activate."""
        return self.activation(self.scale_norm(self.branch(x) + self.shortcut(x)))


def _basic_branch(in_channels: int, planes: int, *, stride: int, norm: Norm, activation: str) -> nn.Sequential:
    return nn.Sequential(
        _conv(in_channels, planes, 3, stride=stride),
        norm.make(planes),
        make_activation(activation),
        _conv(planes, planes, 3),
        norm.make(planes),
    )


def _bottleneck_branch(in_channels: int, planes: int, *, stride: int, norm: Norm, activation: str) -> nn.Sequential:
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


def _block(
    in_channels: int, planes: int, *, stride: int, bottleneck: bool, norm: Norm, activation: str, scale_norm: bool
) -> ResidualBlock:
    out_channels = 4 * planes if bottleneck else planes
    make_branch = _bottleneck_branch if bottleneck else _basic_branch
    shortcut: nn.Module = nn.Identity()
    if stride != 1 or in_channels != out_channels:
        shortcut = nn.Sequential(_conv(in_channels, out_channels, 1, stride=stride), norm.make(out_channels))
    return ResidualBlock(
        branch=make_branch(in_channels, planes, stride=stride, norm=norm, activation=activation),
        shortcut=shortcut,
        scale_norm=norm.make(out_channels) if scale_norm else nn.Identity(),
        activation=activation,
    )


def _stem(in_channels: int, *, stem: Stem, norm: Norm, activation: str) -> nn.Sequential:
    if stem not in ("small", "large"):
        raise ArgumentError(f"stem must be small (3×3) or large (7×7, stride 2, pool), got {stem!r}.")
    if stem == "small":
        return nn.Sequential(_conv(in_channels, 64, 3), norm.make(64), make_activation(activation))
    layers = (_conv(in_channels, 64, 7, stride=2), norm.make(64), make_activation(activation))
    return nn.Sequential(*layers, nn.MaxPool2d(3, stride=2, padding=1))


def resnet(
    *,
    num_classes: int,
    in_channels: int,
    depth: int,
    stem: Stem | None = None,
    groups: Groups = 32,
    norm: str = "group",
    activation: str = "relu",
    stage1_activation: str | None = None,
    scale_norm: bool = False,
) -> nn.Module:
    """A torchvision-style ResNet; ``groups`` may be one number a stage (the stem takes the first).

    ``stem`` is by default what the papers used: "small" (3×3) for ResNet-18, "large" (7×7 and a pool) for the others.
    ``stage1_activation`` differs from ``activation`` only to repeat the thesis's runs of ResNet-50, whose code left
    ReLU in the first stage whatever was asked for.
    """
    norms = norm_per_stage(norm, groups, stages=4)
    stem = stem or ("small" if depth == 18 else "large")
    activations = [stage1_activation or activation, activation, activation, activation]
    stages = _stages(depth, norms=norms, activations=activations, scale_norm=scale_norm)
    body = nn.Sequential(_stem(in_channels, stem=stem, norm=norms[0], activation=activation), *stages)
    kaiming_normal(body, mode="fan_out")
    features = PLANES[-1] * _expansion(depth)
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, num_classes))


def _expansion(depth: int) -> int:
    return 4 if depth >= 50 else 1


def _stages(depth: int, *, norms: list[Norm], activations: list[str], scale_norm: bool) -> list[nn.Module]:
    channels = 64
    stages: list[nn.Module] = []
    for index, (planes, blocks) in enumerate(zip(PLANES, DEPTHS[depth], strict=True)):
        stage: list[nn.Module] = []
        for block in range(blocks):
            made = _block(
                channels,
                planes,
                stride=2 if index > 0 and block == 0 else 1,
                bottleneck=depth >= 50,
                norm=norms[index],
                activation=activations[index],
                scale_norm=scale_norm,
            )
            stage.append(made)
            channels = planes * _expansion(depth)
        stages.append(nn.Sequential(*stage))
    return stages
