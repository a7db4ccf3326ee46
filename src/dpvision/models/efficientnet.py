"""EfficientNet-B0 with GroupNorm, as SmoothNet's baseline (FACTS §4): the ImageNet stem, unmodified.

Seven runs of inverted-residual blocks between a strided 3×3 stem and a 1×1 convolution to 1280 channels. Neither
stochastic depth nor dropout.

EfficientNet-Lite0: B0 without squeeze-and-excitation, with ReLU6, and with a stem and a last layer of fixed width.

Made for weights that were trained in public (``dpvision train --transfer-weights efficientnet-lite0``): names are
those of the published file without their leading underscores, padding is SAME, as there. Inputs are (x − 127)/128.
Shapes: N rows, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

from torch import Tensor, nn

from dpvision.models.backbone import (
    BackboneNorm,
    FeatureNorm,
    colour_front,
    draw,
    feature_norm_layer,
    norm_maker,
    resize,
    zero,
)
from dpvision.models.initialisation import initialise
from dpvision.models.layers import Norm, SamePad2d, SpatialMean, SqueezeExcite, offset_head
from dpvision.models.layers import activation as make_activation


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
FEATURES = 1280
KEPT_OFFSET = 0.05
"""Share of an offset that predictions keep: where features say little about new images, the frequent class decides."""


def _blocks() -> Iterator[tuple[int, int, _StageSpec]]:
    """Yield every block's input channels, its stride and its stage."""
    channels = 32
    for stage in STAGES:
        for index in range(stage.blocks):
            yield channels, stage.stride if index == 0 else 1, stage
            channels = stage.channels


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
    groups = in_channels if depthwise else 1
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
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
    init: str = "own",
) -> nn.Module:
    """EfficientNet-B0; a layer of C channels has gcd(``groups``, C) groups: 8 for its 24 channels, 16 for its 112.

    ``scale_norm`` normalises the sum of each block that is added to its input. ``init`` "own" is the authors' (see
    ``_draw``); otherwise it is a scheme's name.
    """
    spec = Norm(norm, groups, "gcd")
    layers = _unit(in_channels, 32, 3, norm=spec, activation=activation, stride=2)
    for channels, stride, stage in _blocks():
        layers.append(_block(channels, stage, stride=stride, norm=spec, activation=activation, scale_norm=scale_norm))
    layers += _unit(STAGES[-1].channels, FEATURES, 1, norm=spec, activation=activation)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(FEATURES, num_classes))
    _draw(model)
    initialise(model, init)
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


_EPS = 1e-3
_MakeNorm = Callable[[int], nn.Module]


@final
class LiteBlock(nn.Module):
    """Expand, depthwise convolution, project; added to the input where shapes match. The projection ends linear."""

    def __init__(self, in_channels: int, stride: int, spec: _StageSpec, *, norm: _MakeNorm) -> None:
        super().__init__()
        hidden = in_channels * spec.expansion
        self.expand_conv = nn.Conv2d(in_channels, hidden, 1, bias=False) if spec.expansion > 1 else None
        self.bn0 = norm(hidden) if spec.expansion > 1 else None
        self.pad = SamePad2d(spec.kernel, stride=stride)
        self.depthwise_conv = nn.Conv2d(hidden, hidden, spec.kernel, stride=stride, groups=hidden, bias=False)
        self.bn1 = norm(hidden)
        self.project_conv = nn.Conv2d(hidden, spec.channels, 1, bias=False)
        self.bn2 = norm(spec.channels)
        self.act = nn.ReLU6()
        self.adds = stride == 1 and in_channels == spec.channels

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Add where the block keeps its shape."""
        h = x_NCHW
        if self.expand_conv is not None and self.bn0 is not None:
            h = self.act(self.bn0(self.expand_conv(h)))
        h = self.act(self.bn1(self.depthwise_conv(self.pad(h))))
        h = self.bn2(self.project_conv(h))
        return x_NCHW + h if self.adds else h


def efficientnet_lite0(
    *,
    num_classes: int,
    in_channels: int,
    resize_to: int = 0,
    norm: BackboneNorm = "frozen",
    groups: int = 32,
    feature_norm: FeatureNorm = "layer",
    zero_head: bool = False,
    offset: float = 0.0,
) -> nn.Module:
    """EfficientNet-Lite0. ``resize_to`` scales images inside the model (0: not at all), so 32 pixels can become 128.

    Grey images (``in_channels=1``) are repeated to the three channels of the published weights.

    ``norm`` "frozen" keeps the published BatchNorm as fixed numbers; "group" makes it a GroupNorm that learns on.
    ``feature_norm`` "layer" standardises each row's 1280 features before the head (FACTS §10); the published network
    has "none". ``zero_head`` starts the head at zero instead of drawing it. ``offset`` above 0 makes the head an
    ``OffsetLinear`` with a constant of that many times √1280, of which predictions keep ``KEPT_OFFSET``; it starts at
    zero.
    """
    head = offset_head(FEATURES, num_classes, offset=offset, kept=KEPT_OFFSET)
    make_norm = norm_maker(norm, groups=groups, eps=_EPS)
    colour, channels = colour_front(in_channels)
    model = nn.Sequential(
        OrderedDict[str, nn.Module](
            resize=resize(resize_to),
            colour=colour,
            pad=SamePad2d(3, stride=2),
            conv_stem=nn.Conv2d(channels, 32, 3, stride=2, bias=False),
            bn0=make_norm(32),
            act=nn.ReLU6(),
            blocks=nn.Sequential(*(LiteBlock(*block, norm=make_norm) for block in _blocks())),
            conv_head=nn.Conv2d(320, FEATURES, 1, bias=False),
            bn1=make_norm(FEATURES),
            act_head=nn.ReLU6(),
            pool=SpatialMean(),
            feature_norm=feature_norm_layer(feature_norm, FEATURES),
            fc=head or nn.Linear(FEATURES, num_classes),
        )
    )
    draw(model)
    if zero_head:
        zero(model.get_submodule("fc"))
    return model
