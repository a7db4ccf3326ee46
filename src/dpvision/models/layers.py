"""Layers that PyTorch lacks: scalar gains, weight-standardised convolution, SAME padding, fixed affine maps.

Every one treats each row by itself, and each one that has parameters has a rule in the gradient engine.

Shapes: N rows, C channels, H height, W width, O out channels, I in channels per group, K kernel, M hidden.
"""

from __future__ import annotations

import math
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpvision.checks import ArgumentError

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
class WSConv2d(nn.Module):
    """A convolution whose filters are standardised before use (FACTS: the convolution of De et al.).

    ``w' = (w − mean) · gain / sqrt(max(var · fan_in, eps))`` with mean and biased variance over each filter: zero mean
    and, but for tiny filters, a norm of ``gain``, so that the output has the input's variance times ``gain²``.
    Parameters: ``weight`` (O, I, K, K); ``gain`` (O,) unless switched off; ``bias`` (O,) unless switched off.
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
        gain: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise ArgumentError(f"groups must divide {in_channels} and {out_channels} channels, got {groups}.")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.padding, self.groups = kernel_size, stride, padding, groups
        self.eps = 1e-4
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, kernel_size, kernel_size))
        self.gain = nn.Parameter(torch.empty(out_channels)) if gain else None
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
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
class SameMaxPool2d(nn.Module):
    """Max-pooling with SAME padding."""

    def __init__(self, kernel_size: int, *, stride: int) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, stride

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Pad with minus infinity, which never wins."""
        padded = pad_same(x_NCHW, kernel=self.kernel_size, stride=self.stride, value=-math.inf)
        return functional.max_pool2d(padded, self.kernel_size, self.stride)


@final
class SamePad2d(nn.Module):
    """SAME zero-padding for a layer that follows and has none of its own."""

    def __init__(self, kernel_size: int, *, stride: int) -> None:
        super().__init__()
        self.kernel_size, self.stride = kernel_size, stride

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """The padded input."""
        return pad_same(x_NCHW, kernel=self.kernel_size, stride=self.stride)


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

    It draws from torch's global generator, which the training loop seeds anew for every step.

    Guarantee: each row has a draw of its own that depends on no picture, so no unit notices another through it.
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
