"""UNet-9 and LinkNet-9 with their ScaleNorm variants (FACTS §3), for grey slices of 256 pixels.

The papers' Dice loss sums over the batch, which mixes units: train with a loss of one value a slice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor, nn

from dpvision.errors import ArgumentError, Problems
from dpvision.models.layers import ORDERS, Norm, Order
from dpvision.models.resnet import Unit, double_unit

Join = Literal["concat", "add"]


@final
class SizeIsMultipleOf(nn.Module):
    """Refuse images that can't be halved as often as the network does; a module, so that a graph keeps it whole."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """The image as it came."""
        if x_NCHW.shape[-2] % self.number or x_NCHW.shape[-1] % self.number:
            sides = tuple(x_NCHW.shape[-2:])
            raise ArgumentError(f"height and width must be multiples of {self.number}, got {sides}. Set image_size.")
        return x_NCHW


@final
@dataclass(frozen=True, kw_only=True)
class Segmentation9:
    """The options of UNet-9 (``join`` "concat") and LinkNet-9 ("add"); ``build`` makes it.

    ``num_classes`` is the number of maps, 1 for one organ. ``head`` "unit" ends in norm and activation as the papers'
    code does, which bounds the scores from below; "conv" ends in a 1×1 convolution that gives free scores. ``width`` is
    the number of channels of the first layer, 64 in the papers; all others are multiples of it, and 8 suits a CPU.
    """

    num_classes: int
    in_channels: int
    join: Join
    groups: int = 8
    norm: str = "group"
    activation: str = "mish"
    order: Order = "norm_act"
    scale_norm: bool = False
    head: Literal["unit", "conv"] = "unit"
    width: int = 64

    def __post_init__(self) -> None:
        problems = Problems()
        problems.count("width", self.width)
        problems.require(self.order in ORDERS, f"order must be {' or '.join(ORDERS)}, got {self.order!r}.")
        problems.require(self.head in ("unit", "conv"), f"head must be unit or conv, got {self.head!r}.")
        problems.raise_if_any()

    def build(self) -> nn.Module:
        """The network, its weights drawn from the default generator."""
        return SegmentationNet9(self)

    @property
    def unit(self) -> Unit:
        """Convolution, norm and activation."""
        return Unit(norm=Norm(self.norm, self.groups), activation=self.activation, order=self.order)

    def residual(self, channels: int) -> nn.Module:
        """Two units, added to their input."""
        return double_unit(channels, self.unit, scale_norm=self.scale_norm)

    def join_norm(self, channels: int) -> nn.Module:
        """ScaleNorm after a join with a long skip, or nothing."""
        return self.unit.norm.make(channels) if self.scale_norm else nn.Identity()


@final
class SegmentationNet9(nn.Module):
    """An encoder like ResNet-9's, a decoder with two long skips, and one map a class at the input's size.

    Skips are taken before the residual blocks. ScaleNorm, where switched on, follows every residual addition and
    every join with a long skip.
    """

    def __init__(self, options: Segmentation9) -> None:
        super().__init__()
        w, unit, residual, join_norm = options.width, options.unit.make, options.residual, options.join_norm
        # Channels after the joins: UNet keeps both halves, LinkNet adds them.
        deep, shallow = (8 * w, 4 * w) if options.join == "concat" else (4 * w, 2 * w)
        self.join = options.join
        self.checked = SizeIsMultipleOf(16)
        self.down1 = nn.Sequential(unit(options.in_channels, w), unit(w, 2 * w, pool=True))
        self.res1 = residual(2 * w)
        self.down2 = nn.Sequential(unit(2 * w, 4 * w, pool=True), unit(4 * w, 4 * w, pool=True))
        self.res2 = residual(4 * w)
        self.bottom = nn.Sequential(unit(4 * w, 8 * w, pool=True), unit(8 * w, 4 * w, upsample=True))
        self.join_norm2 = join_norm(deep)
        self.res3 = residual(deep)
        self.up2 = nn.Sequential(unit(deep, 4 * w, upsample=True), unit(4 * w, 2 * w, upsample=True))
        self.join_norm1 = join_norm(shallow)
        self.res4 = residual(shallow)
        self.up1 = unit(shallow, shallow // 2, upsample=True)
        # The number of classes need not be a multiple of the groups.
        last = replace(options.unit, norm=replace(options.unit.norm, rule="gcd"))
        self.head: nn.Module = last.make(shallow // 2, options.num_classes)
        if options.head == "conv":
            self.head = nn.Conv2d(shallow // 2, options.num_classes, 1)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, C, H, W) → (N, classes, H, W)."""
        skip1 = self.down1(self.checked(x_NCHW))
        skip2 = self.down2(self.res1(skip1))
        x = self.bottom(self.res2(skip2))
        x = self.res3(self.join_norm2(self._joined(x, skip2)))
        x = self.up2(x)
        x = self.res4(self.join_norm1(self._joined(x, skip1)))
        return self.head(self.up1(x))

    def _joined(self, x_NCHW: Tensor, skip_NCHW: Tensor) -> Tensor:
        """UNet's join doubles the channels, LinkNet's keeps them."""
        return torch.cat((x_NCHW, skip_NCHW), dim=1) if self.join == "concat" else x_NCHW + skip_NCHW
