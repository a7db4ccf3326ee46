"""Wide residual networks: the layout of De et al. and the plain one of the ScaleNorm paper (FACTS §6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor, nn

from dpvision.checks import ArgumentError, Problems
from dpvision.models.activations import activation as make_activation
from dpvision.models.initialise import truncated_normal, truncated_normal_
from dpvision.models.layers import SamePad2d, ScalarGain, SpatialMean, WSConv2d
from dpvision.models.norms import Norm

Layout = Literal["de", "plain"]
Order = Literal["act_norm", "norm_act"]
MakeConv = Callable[[int, int, int, int], nn.Module]
ORDERS = ("act_norm", "norm_act")


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What the blocks are made of."""

    conv: MakeConv
    norm: Norm
    activation: str
    order: Order
    skip_order: Order
    skip_norm: bool
    scale_norm: bool
    skip_init: bool

    def before_conv(self, channels: int, order: Order) -> nn.Sequential:
        norm, act = self.norm.make(channels), make_activation(self.activation)
        return nn.Sequential(act, norm) if order == "act_norm" else nn.Sequential(norm, act)


@final
class WideBlock(nn.Module):
    """A pre-activation block: ``scale_norm(gain · branch(before(x)) + skip)``.

    The skip is x itself, or a 1×1 convolution of ``skip_before(x)`` (De et al.) or of ``before(x)`` (plain layout).
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, project: bool, parts: _Parts) -> None:
        super().__init__()
        self.before = parts.before_conv(in_channels, parts.order)
        self.branch = nn.Sequential(
            parts.conv(in_channels, out_channels, 3, stride),
            parts.before_conv(out_channels, parts.order),
            parts.conv(out_channels, out_channels, 3, 1),
            ScalarGain(0.0) if parts.skip_init else nn.Identity(),
        )
        own_norm = project and parts.skip_norm
        self.skip_before = parts.before_conv(in_channels, parts.skip_order) if own_norm else None
        self.skip = parts.conv(in_channels, out_channels, 1, stride) if project else None
        self.scale_norm = parts.norm.make(out_channels) if parts.scale_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to the skip."""
        h = self.before(x)
        skip = x
        if self.skip is not None:
            skip = self.skip(h if self.skip_before is None else self.skip_before(x))
        return self.scale_norm(self.branch(h) + skip)


def _ws_conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> nn.Module:
    return WSConv2d(in_channels, out_channels, kernel, stride=stride)


def _biased_conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> nn.Module:
    return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2)


def _bare_conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> nn.Module:
    if stride == 1 or kernel == 1:
        return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
    # Two strides and SAME padding are asymmetric, which nn.Conv2d cannot say.
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, bias=False)
    return nn.Sequential(SamePad2d(kernel, stride=stride), conv)


def wrn(
    *,
    num_classes: int,
    in_channels: int,
    depth: int = 16,
    width: int = 4,
    layout: Layout = "de",
    weight_standardised: bool | None = None,
    norm: str = "group",
    groups: int = 16,
    activation: str = "relu",
    order: Order | None = None,
    skip_order: Order | None = None,
    skip_init: bool = False,
    scale_norm: bool = False,
) -> nn.Module:
    """A wide ResNet of ``depth`` 6n+4.

    ``layout="de"``: weight-standardised convolutions with gain and bias, activation before norm, a projection with a
    norm of its own in the first block of every group. ``layout="plain"``: bare convolutions, norm before activation, a
    projection of the shared pre-activation. The other switches default to what the layout says.
    """
    problems = Problems()
    problems.require(depth >= 10 and (depth - 4) % 6 == 0, f"depth must be 6n+4 (10, 16, 22, 28, 40), got {depth}.")
    problems.require(layout in ("de", "plain"), f"layout must be de or plain, got {layout!r}.")
    problems.require(order in (None, *ORDERS) and skip_order in (None, *ORDERS), f"orders are {' or '.join(ORDERS)}.")
    problems.raise_if_any()
    de = layout == "de"
    own_order: Order = order or ("act_norm" if de else "norm_act")
    parts = _Parts(
        conv=_choose_conv(layout, weight_standardised),
        norm=Norm(norm, groups),
        activation=activation,
        order=own_order,
        skip_order=skip_order or own_order,
        skip_norm=de,
        scale_norm=scale_norm,
        skip_init=skip_init,
    )
    model = _assemble(in_channels, num_classes, blocks=(depth - 4) // 6, width=width, parts=parts)
    (_draw_de if de else _draw_plain)(model)
    return model


def _choose_conv(layout: Layout, weight_standardised: bool | None) -> MakeConv:
    if layout == "plain" and weight_standardised:
        raise ArgumentError("the plain layout has no weight standardisation: use layout='de'.")
    if layout == "plain":
        return _bare_conv
    return _biased_conv if weight_standardised is False else _ws_conv


def _assemble(in_channels: int, num_classes: int, *, blocks: int, width: int, parts: _Parts) -> nn.Sequential:
    layers: list[nn.Module] = [parts.conv(in_channels, 16, 3, 1)]
    channels = 16
    for group in range(3):
        out_channels = 16 * 2**group * width
        for block in range(blocks):
            stride = 2 if group > 0 and block == 0 else 1
            # De et al. project in the first block of every group; the plain layout where the shape changes.
            project = block == 0 if parts.skip_norm else channels != out_channels or stride != 1
            layers.append(WideBlock(channels, out_channels, stride=stride, project=project, parts=parts))
            channels = out_channels
    tail = (parts.before_conv(channels, parts.order), SpatialMean(), nn.Linear(channels, num_classes))
    return nn.Sequential(*layers, *tail)


def _draw_de(model: nn.Sequential) -> None:
    head = model[-1]
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            truncated_normal(module, corrected=False)
    truncated_normal(head)


def _draw_plain(model: nn.Sequential) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            kernel_area = module.weight[0, 0].numel()
            nn.init.normal_(module.weight, std=1 / math.sqrt(0.5 * kernel_area * module.out_channels))
        if isinstance(module, nn.Linear):
            truncated_normal_(module.weight, std=math.sqrt(2 / (module.in_features + module.out_features)))
            nn.init.zeros_(module.bias)
