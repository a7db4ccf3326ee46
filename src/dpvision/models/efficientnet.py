"""EfficientNet-B0 with GroupNorm, as SmoothNet's baseline (FACTS §4): the ImageNet stem, unmodified.

Seven runs of inverted-residual blocks between a strided 3×3 stem and a 1×1 convolution to 1280 channels. Neither
stochastic depth nor dropout.
"""

from __future__ import annotations

import math
from typing import NamedTuple, final

from torch import Tensor, nn

from dpvision.models.activations import activation as make_activation
from dpvision.models.layers import SqueezeExcite
from dpvision.models.norms import Norm


class _StageSpec(NamedTuple):
    """A run of equal blocks; the first one has the stride."""

    expansion: int
    kernel: int
    stride: int
    channels: int
    blocks: int


STAGES = (
    _StageSpec(1, 3, 1, 16, 1),
    _StageSpec(6, 3, 2, 24, 2),
    _StageSpec(6, 5, 2, 40, 2),
    _StageSpec(6, 3, 2, 80, 3),
    _StageSpec(6, 5, 1, 112, 3),
    _StageSpec(6, 5, 2, 192, 4),
    _StageSpec(6, 3, 1, 320, 1),
)


@final
class InvertedResidual(nn.Module):
    """Expand, depthwise convolution, squeeze-and-excitation, project; added to the input where shapes match.

    The projection ends in a norm without activation: the block's output is linear in its last convolution.
    """

    def __init__(self, branch: nn.Module, *, scale_norm: nn.Module | None, adds: bool) -> None:
        super().__init__()
        self.branch, self.adds = branch, adds
        self.scale_norm = nn.Identity() if scale_norm is None else scale_norm

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Add where the block keeps its shape."""
        y_NCHW = self.branch(x_NCHW)
        return self.scale_norm(x_NCHW + y_NCHW) if self.adds else y_NCHW


def _unit(
    in_channels: int,
    out_channels: int,
    kernel: int,
    *,
    norm: Norm,
    activation: str,
    stride: int = 1,
    depthwise: bool = False,
) -> list[nn.Module]:
    """Convolution without bias, norm, activation; ``depthwise`` gives every channel one filter of its own."""
    conv = nn.Conv2d(
        in_channels,
        out_channels,
        kernel,
        stride=stride,
        padding=kernel // 2,
        groups=in_channels if depthwise else 1,
        bias=False,
    )
    return [conv, norm.make(out_channels), make_activation(activation)]


def _block(
    in_channels: int, spec: _StageSpec, *, stride: int, norm: Norm, activation: str, scale_norm: bool
) -> InvertedResidual:
    """One block; the squeeze goes to a quarter of the block's *input* channels, not of the expanded ones."""
    hidden = in_channels * spec.expansion
    layers: list[nn.Module] = []
    if spec.expansion > 1:
        layers += _unit(in_channels, hidden, 1, norm=norm, activation=activation)
    layers += _unit(hidden, hidden, spec.kernel, norm=norm, activation=activation, stride=stride, depthwise=True)
    layers.append(SqueezeExcite(hidden, in_channels // 4, activation=make_activation(activation)))
    layers += _unit(hidden, spec.channels, 1, norm=norm, activation="none")
    adds = stride == 1 and in_channels == spec.channels
    own_norm = norm.make(spec.channels) if adds and scale_norm else None
    return InvertedResidual(nn.Sequential(*layers), scale_norm=own_norm, adds=adds)


def efficientnet_b0(
    *,
    num_classes: int,
    in_channels: int,
    groups: int = 32,
    norm: str = "group",
    activation: str = "silu",
    scale_norm: bool = False,
) -> nn.Module:
    """EfficientNet-B0; a layer of C channels has gcd(``groups``, C) groups: 8 for its 24 channels, 16 for its 112.

    ``scale_norm`` normalises the sum of each block that is added to its input.
    """
    spec = Norm(norm, groups, "gcd")
    layers = _unit(in_channels, 32, 3, norm=spec, activation=activation, stride=2)
    channels = 32
    for stage in STAGES:
        for index in range(stage.blocks):
            stride = stage.stride if index == 0 else 1
            layers.append(
                _block(channels, stage, stride=stride, norm=spec, activation=activation, scale_norm=scale_norm)
            )
            channels = stage.channels
    layers += _unit(channels, 1280, 1, norm=spec, activation=activation)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, num_classes))
    _draw(model)
    return model


def _draw(model: nn.Sequential) -> None:
    """Normal with variance 2/fan_out for convolutions (the gates' linear layers too), uniform for the classifier."""
    head = model[-1]
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.weight[0, 0].numel() * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        elif isinstance(module, nn.Linear):
            if module is head:
                nn.init.uniform_(module.weight, -(module.out_features**-0.5), module.out_features**-0.5)
            else:
                nn.init.normal_(module.weight, std=math.sqrt(2 / module.out_features))
            nn.init.zeros_(module.bias)
