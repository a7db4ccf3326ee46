"""ResNet-9 and ScaleResNet-9 (FACTS §1: Klause et al.), and the units that UNet-9 and LinkNet-9 share with them.

A unit is convolution, norm, activation, in the order of the authors' code (their appendix has norm and activation the
other way round). A residual branch ends in its activation, and ScaleNorm, where there is one, has none after it.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from dpvision.models.activations import activation as make_activation
from dpvision.models.norms import Groups, Norm, norm_per_stage


def conv_norm_act(
    in_channels: int, out_channels: int, *, norm: Norm, activation: str, pool: bool = False, upsample: bool = False
) -> nn.Sequential:
    """The unit of the "-9" networks: [upsample] → 3×3 convolution without bias → norm → activation [→ max-pool]."""
    layers: list[nn.Module] = [nn.Upsample(scale_factor=2, mode="nearest")] if upsample else []
    layers += [
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        norm.make(out_channels),
        make_activation(activation),
    ]
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


def double_unit(channels: int, *, norm: Norm, activation: str, scale_norm: bool) -> Residual:
    """The residual block of the "-9" networks: two units, added to their input."""
    branch = nn.Sequential(
        conv_norm_act(channels, channels, norm=norm, activation=activation),
        conv_norm_act(channels, channels, norm=norm, activation=activation),
    )
    return Residual(branch, scale_norm=norm.make(channels) if scale_norm else None)


@final
class ResNet9(nn.Module):
    """Four convolutions, two residual blocks, adaptive max-pool to 2×2, one linear layer of 1024 inputs.

    The pool makes the number of features, and so of parameters, independent of the picture's size. Blocks have the
    authors' names, because transfer freezes them by name: conv1, conv2, res1 and conv3 stay, the rest learns.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        num_classes: int,
        norms: list[Norm],
        activation: str,
        scale_norm: bool,
        large_pictures: bool,
    ) -> None:
        super().__init__()
        n1, n2, n3, n4 = norms

        def unit(i: int, o: int, norm: Norm, *, pool: bool = True) -> nn.Sequential:
            return conv_norm_act(i, o, norm=norm, activation=activation, pool=pool)

        self.conv1 = unit(in_channels, 64, n1, pool=large_pictures)
        self.conv2 = nn.Sequential(unit(64, 128, n1), unit(128, 128, n1)) if large_pictures else unit(64, 128, n1)
        self.res1 = double_unit(128, norm=n2, activation=activation, scale_norm=scale_norm)
        self.conv3 = unit(128, 128 if large_pictures else 256, n3)
        self.conv4 = nn.Sequential(unit(128, 256, n3), unit(256, 256, n3)) if large_pictures else unit(256, 256, n3)
        self.res2 = double_unit(256, norm=n4, activation=activation, scale_norm=scale_norm)
        self.pool = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten())
        self.classifier = nn.Linear(1024, num_classes)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, C, H, W) → (N, classes)."""
        x = self.res1(self.conv2(self.conv1(x_NCHW)))
        x = self.res2(self.conv4(self.conv3(x)))
        return self.classifier(self.pool(x))


def resnet9(
    *,
    num_classes: int,
    in_channels: int,
    groups: Groups = 32,
    norm: str = "group",
    activation: str = "mish",
    scale_norm: bool = False,
    large_pictures: bool = False,
) -> nn.Module:
    """ResNet-9. ``groups`` has four slots: conv1–2, res1, conv3–4, res2 (a block's ScaleNorm goes with it).

    Every reported run had one number in all four; a number above a layer's channels is clamped to them, so that 1 is
    LayerNorm and 2048 InstanceNorm. Initial weights are PyTorch's.

    ``large_pictures`` is the authors' unused variant for big inputs: six pools instead of three.
    """
    return ResNet9(
        in_channels=in_channels,
        num_classes=num_classes,
        norms=norm_per_stage(norm, groups, stages=4),
        activation=activation,
        scale_norm=scale_norm,
        large_pictures=large_pictures,
    )
