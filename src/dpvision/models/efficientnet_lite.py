"""EfficientNet-Lite0: B0 without squeeze-and-excitation, with ReLU6, and with a stem and a last layer of fixed width.

Made for weights that were trained in public (``dpvision train --transfer-weights efficientnet-lite0``): names are
those of the published file without their leading underscores, padding is SAME, as there. Inputs are (x − 127)/128.
Shapes: N rows, C channels, H height, W width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import final

from torch import Tensor, nn

from dpvision.models.backbone import BackboneNorm, FeatureNorm, draw, feature_norm_layer, norm_maker, resize
from dpvision.models.efficientnet import STAGES
from dpvision.models.layers import SamePad2d, SpatialMean

FEATURES = 1280
_EPS = 1e-3
_MakeNorm = Callable[[int], nn.Module]


@final
class LiteBlock(nn.Module):
    """Expand, depthwise convolution, project; added to the input where shapes match. The projection ends linear."""

    def __init__(
        self, in_channels: int, out_channels: int, *, expansion: int, kernel: int, stride: int, norm: _MakeNorm
    ) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.expand_conv = nn.Conv2d(in_channels, hidden, 1, bias=False) if expansion > 1 else None
        self.bn0 = norm(hidden) if expansion > 1 else None
        self.pad = SamePad2d(kernel, stride=stride)
        self.depthwise_conv = nn.Conv2d(hidden, hidden, kernel, stride=stride, groups=hidden, bias=False)
        self.bn1 = norm(hidden)
        self.project_conv = nn.Conv2d(hidden, out_channels, 1, bias=False)
        self.bn2 = norm(out_channels)
        self.act = nn.ReLU6()
        self.adds = stride == 1 and in_channels == out_channels

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Add where the block keeps its shape."""
        h = x_NCHW
        if self.expand_conv is not None and self.bn0 is not None:
            h = self.act(self.bn0(self.expand_conv(h)))
        h = self.act(self.bn1(self.depthwise_conv(self.pad(h))))
        h = self.bn2(self.project_conv(h))
        return x_NCHW + h if self.adds else h


def _blocks(norm: _MakeNorm) -> nn.Sequential:
    blocks: list[nn.Module] = []
    channels = 32
    for stage in STAGES:
        for index in range(stage.blocks):
            stride = stage.stride if index == 0 else 1
            blocks.append(
                LiteBlock(
                    channels,
                    stage.channels,
                    expansion=stage.expansion,
                    kernel=stage.kernel,
                    stride=stride,
                    norm=norm,
                )
            )
            channels = stage.channels
    return nn.Sequential(*blocks)


def efficientnet_lite0(
    *,
    num_classes: int,
    in_channels: int,
    resize_to: int = 0,
    norm: BackboneNorm = "frozen",
    groups: int = 32,
    feature_norm: FeatureNorm = "layer",
) -> nn.Module:
    """EfficientNet-Lite0. ``resize_to`` scales pictures inside the model (0: not at all), so 32 pixels can become 128.

    ``norm`` "frozen" keeps the published BatchNorm as fixed numbers; "group" makes it a GroupNorm that learns on.
    ``feature_norm`` "layer" standardises each row's 1280 features before the head (FACTS §10); the published network
    has "none".
    """
    make_norm = norm_maker(norm, groups=groups, eps=_EPS)
    model = nn.Sequential(
        OrderedDict[str, nn.Module](
            resize=resize(resize_to),
            pad=SamePad2d(3, stride=2),
            conv_stem=nn.Conv2d(in_channels, 32, 3, stride=2, bias=False),
            bn0=make_norm(32),
            act=nn.ReLU6(),
            blocks=_blocks(make_norm),
            conv_head=nn.Conv2d(320, FEATURES, 1, bias=False),
            bn1=make_norm(FEATURES),
            act_head=nn.ReLU6(),
            pool=SpatialMean(),
            feature_norm=feature_norm_layer(feature_norm, FEATURES),
            fc=nn.Linear(FEATURES, num_classes),
        )
    )
    draw(model)
    return model
