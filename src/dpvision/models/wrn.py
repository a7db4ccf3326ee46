"""Wide residual networks: the layout of De et al. and the plain one of the ScaleNorm paper (FACTS §6).

Both have a 3×3 stem of 16 channels, three groups of pre-activation blocks with 16k, 32k and 64k channels at strides 1,
2 and 2, and a linear layer on the spatial mean; "WRN-d-k" has d = 6n+4 layers, n blocks a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor, nn

from dpvision.errors import Problems
from dpvision.models.initialisation import truncated_normal, truncated_normal_
from dpvision.models.layers import ORDERS, Norm, Order, SamePad2d, ScalarGain, SpatialMean, WSConv2d
from dpvision.models.layers import activation as make_activation

Layout = Literal["de", "plain"]


@final
@dataclass(frozen=True, kw_only=True)
class WideResNet:
    """The options of a wide ResNet; ``build`` makes it.

    ``layout="de"``: weight-standardised convolutions with gain and bias, activation before norm, a projection with a
    norm of its own in the first block of every group. ``layout="plain"``: bare convolutions, norm before activation, a
    projection of the shared pre-activation where the shape changes. ``weight_standardised=False`` gives De et al.'s
    layout with ordinary convolutions, as the TAN code has it. ``order`` and ``skip_order`` (activation or norm first,
    on the branch and on the projection) follow the layout unless given; a later study found them to matter more than
    ScaleNorm. ``skip_init`` puts a gain that starts at zero on every branch.
    """

    num_classes: int
    in_channels: int
    depth: int = 16
    width: int = 4
    layout: Layout = "de"
    weight_standardised: bool | None = None
    norm: str = "group"
    groups: int = 16
    activation: str = "relu"
    order: Order | None = None
    skip_order: Order | None = None
    skip_init: bool = False
    scale_norm: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        depth, plain = self.depth, self.layout == "plain"
        problems.require(depth >= 10 and (depth - 4) % 6 == 0, f"depth must be 6n+4 (10, 16, 22, 28, 40), got {depth}.")
        problems.count("width", self.width)
        problems.require(self.layout in ("de", "plain"), f"layout must be de or plain, got {self.layout!r}.")
        known = self.order in (None, *ORDERS) and self.skip_order in (None, *ORDERS)
        problems.require(known, f"orders are {' or '.join(ORDERS)}, got {self.order!r} and {self.skip_order!r}.")
        no_ws = not (plain and self.weight_standardised)
        problems.require(no_ws, "the plain layout has no weight standardisation: use layout='de'.")
        problems.raise_if_any()

    @property
    def own_order(self) -> Order:
        """What comes first on the branch and in the tail: as asked for, or as the layout has it."""
        return self.order or ("norm_act" if self.layout == "plain" else "act_norm")

    def build(self) -> nn.Sequential:
        """Stem, blocks, tail, with the initial weights of the layout's authors."""
        layers: list[nn.Module] = [self.conv(self.in_channels, 16, 3)]
        channels = 16
        for group in range(3):
            out_channels = 16 * 2**group * self.width
            for block in range((self.depth - 4) // 6):
                stride = 2 if group > 0 and block == 0 else 1
                # De et al. project in the first block of every group; the plain layout where the shape changes.
                project = block == 0 if self.layout == "de" else channels != out_channels or stride != 1
                layers.append(WideBlock(channels, out_channels, stride=stride, project=project, options=self))
                channels = out_channels
        layers += [self.pre_activation(channels, self.own_order), SpatialMean(), nn.Linear(channels, self.num_classes)]
        model = nn.Sequential(*layers)
        (_draw_plain if self.layout == "plain" else _draw_de)(model)
        return model

    def conv(self, in_channels: int, out_channels: int, kernel: int, *, stride: int = 1) -> nn.Module:
        """The layout's convolution: SAME padding, asymmetric at two strides, but for ordinary ones with a bias."""
        if self.layout == "plain":
            return _bare_conv(in_channels, out_channels, kernel, stride=stride)
        if self.weight_standardised is False:
            return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2)
        return WSConv2d(in_channels, out_channels, kernel, stride=stride)

    def pre_activation(self, channels: int, order: Order) -> nn.Sequential:
        """Norm and activation in front of a convolution, in the order asked for."""
        norm, act = self.make_norm(channels), make_activation(self.activation)
        return nn.Sequential(act, norm) if order == "act_norm" else nn.Sequential(norm, act)

    def make_norm(self, channels: int) -> nn.Module:
        """The norm for that many channels; 16 groups on the stem's 16 channels are InstanceNorm, as in the paper."""
        return Norm(self.norm, self.groups).make(channels)


@final
class WideBlock(nn.Module):
    """A pre-activation block: ``scale_norm(gain · branch(before(x)) + skip)``; no activation follows the sum.

    The skip is x itself, or a 1×1 convolution of ``skip_before(x)`` (De et al.) or of ``before(x)`` (plain layout).
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, project: bool, options: WideResNet) -> None:
        super().__init__()
        self.before = options.pre_activation(in_channels, options.own_order)
        self.branch = nn.Sequential(
            options.conv(in_channels, out_channels, 3, stride=stride),
            options.pre_activation(out_channels, options.own_order),
            options.conv(out_channels, out_channels, 3),
            ScalarGain(0.0) if options.skip_init else nn.Identity(),
        )
        own_norm = project and options.layout == "de"
        skip_order = options.skip_order or options.own_order
        self.skip_before = options.pre_activation(in_channels, skip_order) if own_norm else None
        self.skip = options.conv(in_channels, out_channels, 1, stride=stride) if project else None
        self.scale_norm = options.make_norm(out_channels) if options.scale_norm else nn.Identity()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Add the branch to the skip."""
        h = self.before(x_NCHW)
        skip = x_NCHW
        if self.skip is not None:
            skip = self.skip(h if self.skip_before is None else self.skip_before(x_NCHW))
        return self.scale_norm(self.branch(h) + skip)


def _bare_conv(in_channels: int, out_channels: int, kernel: int, *, stride: int) -> nn.Module:
    """A convolution without bias; two strides and SAME padding are asymmetric, which ``nn.Conv2d`` cannot say."""
    if stride == 1 or kernel == 1:
        return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, bias=False)
    return nn.Sequential(SamePad2d(kernel, stride=stride), conv)


def _draw_de(model: nn.Sequential) -> None:
    """Truncated normals; ``WSConv2d`` has drawn itself.

    The ordinary convolutions' normals are not widened to make up for the cut, as in the TAN code; the head's are.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            truncated_normal(module, corrected=False)
    truncated_normal(model[-1])


def _draw_plain(model: nn.Sequential) -> None:
    """Objax's defaults: normals of variance 2/fan_out for convolutions, a truncated Xavier normal for the head."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            kernel_area = module.weight[0, 0].numel()
            nn.init.normal_(module.weight, std=1 / math.sqrt(0.5 * kernel_area * module.out_channels))
        if isinstance(module, nn.Linear):
            truncated_normal_(module.weight, std=math.sqrt(2 / (module.in_features + module.out_features)))
            nn.init.zeros_(module.bias)
