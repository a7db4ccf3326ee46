"""Activations by name. None works in place, because per-unit gradients need what an in-place layer overwrites.

Normalisation by name. LayerNorm is GroupNorm with one group, InstanceNorm is GroupNorm with one channel a group.

Layers that PyTorch lacks: scalar gains, weight-standardised convolution, SAME padding, fixed affine maps.

Every one treats each row by itself, and each one that has parameters has a rule in the gradient engine.

Shapes: N rows, C channels, H height, W width, O out channels, I in channels per group, K kernel, M hidden.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpvision.errors import ArgumentError, Problems
from dpvision.models.backbone import FrozenBatchNorm


@final
class TemperedSigmoid(nn.Module):
    """``scale · sigmoid(temperature · x) − offset``; (2, 2, 1) is tanh, (1, 1, 0) the logistic function.

    Bounded activations keep per-unit gradients small, so that clipping takes less of them (Papernot et al. 2021).
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        return self.scale * torch.sigmoid(self.temperature * x) - self.offset

    def extra_repr(self) -> str:
        """The three constants."""
        return f"{self.scale}, {self.temperature}, {self.offset}"


@final
class UnitVariance(nn.Module):
    """An activation times the constant that gives it unit variance on standard normal input (NF networks).

    The mean of the output is not zero; the standardised filters that follow take it away.
    """

    def __init__(self, function: nn.Module, factor: float) -> None:
        super().__init__()
        self.function, self.factor = function, factor

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        return self.function(x) * self.factor


_MAKERS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "mish": nn.Mish,
    "selu": nn.SELU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "tempered_sigmoid": TemperedSigmoid,
    # The constants of the NF papers; GELU is JAX's default tanh approximation.
    "nf_relu": lambda: UnitVariance(nn.ReLU(), 1.7139588594436646),
    "nf_gelu": lambda: UnitVariance(nn.GELU(approximate="tanh"), 1.7015043497085571),
    "none": nn.Identity,
}
ACTIVATIONS: tuple[str, ...] = tuple(_MAKERS)
_TEMPERED = re.compile(r"tempered_sigmoid\(([^,()]+),([^,()]+),([^,()]+)\)")


def activation(name: str) -> nn.Module:
    """An activation by name; ``tempered_sigmoid(scale, temperature, offset)`` takes its constants in brackets."""
    if name in _MAKERS:
        return _MAKERS[name]()
    match = _TEMPERED.fullmatch(name.replace(" ", "")) if isinstance(name, str) else None
    try:
        constants = [float(text) for text in match.groups()] if match else None
    except ValueError:
        constants = None
    if constants is None:
        raise ArgumentError(
            f"activation must be one of {', '.join(ACTIVATIONS)} or tempered_sigmoid(scale,temperature,offset), "
            f"got {name!r}."
        )
    return TemperedSigmoid(*constants)


NORMS = ("group", "layer", "instance", "batch", "frozen", "none")
Groups = int | Sequence[int] | str
Rule = Literal["clamp", "gcd"]
Order = Literal["act_norm", "norm_act"]
ORDERS = ("act_norm", "norm_act")


@final
@dataclass(frozen=True)
class Norm:
    """Which normalisation to put after a layer.

    ``kind`` "batch" mixes rows: it is for ordinary (public) training only and ``check_model`` refuses it. "frozen" is
    what such training leaves: BatchNorm's fixed affine map, for weights from a run with "batch".
    ``rule`` says how many groups C channels get: "clamp" min(groups, C) as in the ScaleNorm papers, "gcd" the greatest
    common divisor as in Opacus's replacement of BatchNorm.
    """

    kind: str = "group"
    groups: int = 32
    rule: Rule = "clamp"

    def __post_init__(self) -> None:
        problems = Problems()
        problems.require(self.kind in NORMS, f"norm must be one of {', '.join(NORMS)}, got {self.kind!r}.")
        problems.count("groups", self.groups)
        problems.raise_if_any()

    def make(self, channels: int) -> nn.Module:
        """The layer for ``channels`` channels."""
        if self.kind == "none":
            return nn.Identity()
        if self.kind == "batch":
            return nn.BatchNorm2d(channels)
        if self.kind == "frozen":
            return FrozenBatchNorm(channels)
        return nn.GroupNorm(self._groups_of(channels), channels)

    def _groups_of(self, channels: int) -> int:
        """How many groups ``channels`` channels get; a number that does not divide them is refused, not rounded."""
        if self.kind == "layer":
            return 1
        if self.kind == "instance":
            return channels
        if self.rule == "gcd":
            return math.gcd(self.groups, channels)
        groups = min(self.groups, channels)
        if channels % groups:
            raise ArgumentError(f"groups must divide the {channels} channels of every layer, got {self.groups}.")
        return groups


def norm_per_stage(kind: str, groups: Groups, *, stages: int, rule: Rule = "clamp") -> list[Norm]:
    """One ``Norm`` a stage: ``groups`` is one number for all stages, or one number each.

    Several numbers may also be a text such as "8,16,16,32", which a command line and a configuration can hold.
    """
    counts = [groups] * stages if isinstance(groups, int) else _numbers(groups)
    if counts is None or len(counts) != stages:
        raise ArgumentError(f"groups must be one number or {stages} numbers (one a stage), got {groups!r}.")
    return [Norm(kind, count, rule) for count in counts]


def _numbers(groups: Sequence[int] | str) -> list[int] | None:
    """The numbers of a sequence, or of a text that has them between commas; None if it has something else."""
    if not isinstance(groups, str):
        return list(groups) if isinstance(groups, Sequence) else None
    try:
        return [int(part) for part in groups.split(",")]
    except ValueError:
        return None


Padding = Literal["same"] | int


def same_padding(size: int, *, kernel: int, stride: int) -> tuple[int, int]:
    """How much to pad one side before and after, as TensorFlow and JAX do: the odd pixel goes after."""
    total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def pad_same(x_NCHW: Tensor, *, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad height and width so that a window of ``kernel`` and ``stride`` gives ``ceil(size / stride)`` outputs."""
    top, bottom = same_padding(x_NCHW.shape[-2], kernel=kernel, stride=stride)
    left, right = same_padding(x_NCHW.shape[-1], kernel=kernel, stride=stride)
    if top == bottom == left == right == 0:
        return x_NCHW
    return functional.pad(x_NCHW, (left, right, top, bottom), value=value)


@final
class ScalarGain(nn.Module):
    """One learned number that multiplies its input (SkipInit). Parameter: ``gain``, shape ()."""

    def __init__(self, initial: float = 1.0) -> None:
        super().__init__()
        self.initial = initial
        self.gain = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain to its initial value."""
        nn.init.constant_(self.gain, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        """``x * gain``."""
        return x * self.gain


@final
class OffsetLinear(nn.Module):
    """A linear layer for training with a large constant feature, of which predictions keep a share, or nothing.

    In training, ``bias`` counts ``length`` times: every row has one more feature of that value. Its weight learns how
    frequent the classes are, so that the others learn what differs between them. In evaluation mode the bias counts
    ``kept · length`` times: with 0 it is left out, and scores belong to classes of about equal frequency. All
    parameters begin at zero: ``weight`` (O, I) and ``bias`` (O,).
    """

    def __init__(self, in_features: int, out_features: int, *, length: float, kept: float = 0.0) -> None:
        super().__init__()
        if not 0 < length < math.inf:
            raise ArgumentError(f"length must be a finite number above 0, got {length}.")
        if not 0 <= kept <= 1:
            raise ArgumentError(f"kept must be between 0 and 1, got {kept}.")
        self.in_features, self.out_features, self.length, self.kept = in_features, out_features, length, kept
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    @property
    def bias_factor(self) -> float:
        """What the bias is multiplied by in the present mode."""
        return self.length if self.training else self.kept * self.length

    def forward(self, x: Tensor) -> Tensor:
        """``x Wᵀ`` and ``bias_factor`` times the bias."""
        factor = self.bias_factor
        return functional.linear(x, self.weight, self.bias * factor if factor else None)

    def extra_repr(self) -> str:
        """Sizes, length and what is kept."""
        return f"{self.in_features}, {self.out_features}, length={self.length:g}, kept={self.kept:g}"


def offset_head(features: int, num_classes: int, *, offset: float, kept: float) -> OffsetLinear | None:
    """A head on rows of length √features whose constant feature is ``offset`` times as long; None for an offset of 0.

    Raises:
        ArgumentError: the offset is negative or not finite.
    """
    if not 0 <= offset < math.inf:
        raise ArgumentError(f"offset must be a finite number from 0, got {offset}.")
    return OffsetLinear(features, num_classes, length=offset * features**0.5, kept=kept) if offset else None


@final
class WSConv2d(nn.Module):
    """A convolution whose filters are standardised before use (FACTS: the convolution of De et al.).

    ``w' = (w − mean) · gain / sqrt(max(var · fan_in, eps))`` with mean and biased variance over each filter: zero mean
    and, but for tiny filters, a norm of ``gain``, so that the output has the input's variance times ``gain²``.
    Parameters: ``weight`` (O, I, K, K), and those of ``gain`` (O,) and ``bias`` (O,) that ``affine`` names.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: Padding = "same",
        groups: int = 1,
        affine: Sequence[Literal["gain", "bias"]] = ("gain", "bias"),
    ) -> None:
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise ArgumentError(f"groups must divide {in_channels} and {out_channels} channels, got {groups}.")
        if not {*affine} <= {"gain", "bias"}:
            raise ArgumentError(f"affine must name gain, bias, both or none of them, got {affine!r}.")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.padding, self.groups = kernel_size, stride, padding, groups
        self.eps = 1e-4
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, kernel_size, kernel_size))
        self.gain = nn.Parameter(torch.empty(out_channels)) if "gain" in affine else None
        self.bias = nn.Parameter(torch.empty(out_channels)) if "bias" in affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Raw weights from N(0, 1/fan_in), gain one, bias zero."""
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)
        if self.gain is not None:
            nn.init.ones_(self.gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def standardised_weight(self) -> Tensor:
        """The filters that the convolution uses."""
        weight_OD = self.weight.flatten(1)
        centred_OD = weight_OD - weight_OD.mean(1, keepdim=True)
        # Biased variance times fan-in is the sum of squares.
        scale_O = centred_OD.square().sum(1).clamp(min=self.eps).rsqrt()
        if self.gain is not None:
            scale_O = scale_O * self.gain
        return (centred_OD * scale_O[:, None]).view_as(self.weight)

    def pad(self, x_NCHW: Tensor) -> Tensor:
        """The input with its padding, so that the convolution itself needs none."""
        if isinstance(self.padding, str):
            return pad_same(x_NCHW, kernel=self.kernel_size, stride=self.stride)
        return functional.pad(x_NCHW, (self.padding,) * 4) if self.padding else x_NCHW

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Convolve with the standardised filters."""
        weight_OIKK = self.standardised_weight()
        return functional.conv2d(self.pad(x_NCHW), weight_OIKK, self.bias, stride=self.stride, groups=self.groups)

    def extra_repr(self) -> str:
        """Shape and switches, as ``nn.Conv2d`` prints them."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, groups={self.groups}, gain={self.gain is not None}, bias={self.bias is not None}"
        )


@final
class SamePad2d(nn.Module):
    """SAME padding for a layer that follows and has none of its own; minus infinity never wins a max-pool."""

    def __init__(self, kernel_size: int, *, stride: int, value: float = 0.0) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.value = kernel_size, stride, value

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """The padded input."""
        return pad_same(x_NCHW, kernel=self.kernel_size, stride=self.stride, value=self.value)


@final
class Scale(nn.Module):
    """Multiply by a fixed number; no parameter."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """``x * factor``."""
        return x * self.factor

    def extra_repr(self) -> str:
        """The factor."""
        return f"{self.factor}"


@final
class SpatialMean(nn.Module):
    """Mean over height and width."""

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, C, H, W) → (N, C)."""
        return x_NCHW.mean((-2, -1))


@final
class SqueezeExcite(nn.Module):
    """Multiply each channel by ``factor · sigmoid(W₂ act(W₁ mean))``, computed from the channels' spatial means."""

    def __init__(self, channels: int, hidden: int, *, activation: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.reduce = nn.Linear(channels, hidden)
        self.activation = activation
        self.expand = nn.Linear(hidden, channels)
        self.factor = factor

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Gate the channels."""
        hidden_NM = self.activation(self.reduce(x_NCHW.mean((-2, -1))))
        gate_NC = self.factor * torch.sigmoid(self.expand(hidden_NM))
        return x_NCHW * gate_NC[..., None, None]


@final
class StochasticDepth(nn.Module):
    """In training, drop a row's whole branch with probability ``rate`` and scale the others up.

    It draws from torch's global generator, which the training loop seeds again for every step.

    Guarantee: each row has a draw of its own that depends on no image, so no unit notices another through it.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Drop rows, in training only."""
        if not self.training or self.rate == 0:
            return x_NCHW
        keep_N111 = torch.rand_like(x_NCHW[:, :1, :1, :1]) >= self.rate
        return x_NCHW * keep_N111 / (1 - self.rate)

    def extra_repr(self) -> str:
        """The rate."""
        return f"{self.rate}"
