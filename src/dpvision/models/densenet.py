"""DenseNet-121 with GroupNorm, as SmoothNet's baseline (FACTS §4): the ImageNet stem, unmodified.

Four blocks of 6, 12, 24 and 16 layers that each append 32 channels; between blocks a 1×1 convolution halves the
channels and a pool the image. On 32 pixels the last block sees one pixel.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from dpvision.models.initialisation import initialise, kaiming_normal
from dpvision.models.layers import Norm
from dpvision.models.layers import activation as make_activation

BLOCKS = (6, 12, 24, 16)
GROWTH = 32


@final
class DenseLayer(nn.Module):
    """``[x, f(x)]`` with f = norm, act, 1×1 convolution to 128 channels, norm, act, 3×3 convolution to 32.

    ScaleNorm, where there is one, normalises the whole of it.
    """

    def __init__(self, in_channels: int, *, norm: Norm, activation: str, scale_norm: bool) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            norm.make(in_channels),
            make_activation(activation),
            nn.Conv2d(in_channels, 4 * GROWTH, 1, bias=False),
            norm.make(4 * GROWTH),
            make_activation(activation),
            nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False),
        )
        self.scale_norm = norm.make(in_channels + GROWTH) if scale_norm else nn.Identity()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Concatenate the branch after its input: (N, C, H, W) → (N, C + 32, H, W)."""
        return self.scale_norm(torch.cat((x_NCHW, self.branch(x_NCHW)), dim=1))


def densenet121(
    *,
    num_classes: int,
    in_channels: int,
    groups: int = 32,
    norm: str = "group",
    activation: str = "relu",
    scale_norm: bool = False,
    init: str = "own",
) -> nn.Module:
    """DenseNet-121; a layer of C channels has gcd(``groups``, C) groups.

    The rule is that of Opacus's replacement of BatchNorm, which the paper used. ``init`` "own" draws convolutions
    Kaiming-normal; otherwise it is a scheme's name. ``scale_norm`` normalises after every concatenation.
    """
    spec = Norm(norm, groups, "gcd")
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False),
        spec.make(64),
        make_activation(activation),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = 64
    for index, count in enumerate(BLOCKS):
        for _ in range(count):
            layers.append(DenseLayer(channels, norm=spec, activation=activation, scale_norm=scale_norm))
            channels += GROWTH
        layers += [spec.make(channels), make_activation(activation)]
        if index < len(BLOCKS) - 1:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    body = nn.Sequential(*layers)
    kaiming_normal(body)
    head = nn.Linear(channels, num_classes)
    nn.init.zeros_(head.bias)
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    initialise(model, init)
    return model
