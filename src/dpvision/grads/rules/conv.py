"""Convolutions of one to three dimensions, and transposed ones, as matrix products over windows of the input.

Shapes: N rows, U units, C in, O out, S space, K kernel, T positions of a unit (its rows included), D = C·K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision.grads.rules.registry import LayerCall, register
from dpvision.grads.shares import (
    Kept,
    Share,
    ghost_pays,
    gram_norms_sq,
    scale_by_unit,
    sum_by_unit,
    sum_of_squares,
    sum_over_space,
    without_dead,
)

Sizes = tuple[int, ...]
_WINDOW_NUMBERS = 1 << 20
"""Window matrices are formed for as many units at a time as stay below this many numbers, about a cache."""


@final
@dataclass(frozen=True)
class Correlation:
    """The map from an already padded input to an output: everything a weight gradient depends on."""

    weight: Tensor
    kernel: Sizes
    stride: Sizes
    dilation: Sizes
    groups: int

    def reach(self, positions: Sizes) -> Sizes:
        """The extent of input that so many output positions see."""
        each = zip(positions, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((t - 1) * s + d * (k - 1) + 1 for t, k, s, d in each)

    def windows(self, x_NCS: Tensor, positions: Sizes, units: int) -> Tensor:
        """The input under the kernel at every position, as (units × groups, T, D)."""
        rows, channels = x_NCS.shape[:2]
        steps = x_NCS.stride()
        along_kernel = tuple(s * d for s, d in zip(steps[2:], self.dilation, strict=True))
        along_space = tuple(s * d for s, d in zip(steps[2:], self.stride, strict=True))
        shape = (units, rows // units, self.groups, channels // self.groups, *self.kernel, *positions)
        strides = (
            steps[0] * (rows // units),
            steps[0],
            steps[1] * (channels // self.groups),
            steps[1],
            *along_kernel,
            *along_space,
        )
        view = x_NCS.as_strided(shape, strides)
        dims = len(self.kernel)
        window = (3, *range(4, 4 + dims))
        space = tuple(range(4 + dims, 4 + 2 * dims))
        depth = self._depth(channels)
        return view.permute(0, 2, *window, 1, *space).reshape(units * self.groups, depth, -1).mT

    def _depth(self, channels: int) -> int:
        depth = channels // self.groups
        for size in self.kernel:
            depth *= size
        return depth


@final
class Correlated(Share):
    """A convolution's weight gradient, formed per unit or kept as input and output gradient, by the shapes."""

    def __init__(self, x_NCS: Tensor, dy_NOS: Tensor, geometry: Correlation, units: int) -> None:
        self._x = x_NCS
        self._dy = dy_NOS
        self._geometry = geometry
        self._units = units
        self._formed: Tensor | None = None

    @property
    def held_bytes(self) -> int:
        return 0 if self._formed is None else self._formed.nbytes

    def norms_sq(self) -> Tensor:
        return self._gram_norms() if self.by_ghost else sum_of_squares(self.per_unit())

    @property
    def by_ghost(self) -> bool:
        """Whether norms come from Gram matrices, so that no unit's gradient is formed."""
        positions = self._dy[0, 0].numel() * (self._dy.shape[0] // self._units)
        return ghost_pays(positions=positions, entries=self._geometry.weight.numel())

    def weighted_sum(self, factor_U: Tensor, dead_U: Tensor | None) -> Tensor:
        if self._formed is not None:
            return Kept(self._formed).weighted_sum(factor_U, dead_U)
        geometry = self._geometry
        dims = len(geometry.kernel)
        _, gradient, _ = torch.ops.aten.convolution_backward(
            scale_by_unit(without_dead(self._dy, dead_U), factor_U),
            without_dead(self._x, dead_U),
            geometry.weight,
            None,
            geometry.stride,
            [0] * dims,
            geometry.dilation,
            False,
            [0] * dims,
            geometry.groups,
            [False, True, False],
        )
        return gradient

    def per_unit(self) -> Tensor:
        if self._formed is None:
            weight = self._geometry.weight
            formed = self._x.new_empty(self._units, *weight.shape)
            for first, last in self._chunks():
                a_BTD, g_BOT = self._matrices(first, last)
                part = formed[first:last].view(g_BOT.shape[0], g_BOT.shape[1], a_BTD.shape[2])
                torch.bmm(g_BOT, a_BTD, out=part)
            self._formed = formed
        return self._formed

    def _gram_norms(self) -> Tensor:
        norms: list[Tensor] = []
        for first, last in self._chunks():
            a_BTD, g_BOT = self._matrices(first, last)
            norms.append(gram_norms_sq(a_BTD, g_BOT.mT).view(last - first, -1).sum(1))
        return torch.cat(norms)

    def _matrices(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Windows (B, T, D) and output gradients (B, O, T) of some units, groups folded into B."""
        per_unit = self._dy.shape[0] // self._units
        rows = slice(first * per_unit, last * per_unit)
        dy_NOS = self._dy[rows]
        groups = self._geometry.groups
        a_BTD = self._geometry.windows(self._x[rows], tuple(dy_NOS.shape[2:]), last - first)
        g = dy_NOS.reshape(last - first, per_unit, groups, dy_NOS.shape[1] // groups, -1)
        return a_BTD, g.permute(0, 2, 3, 1, 4).reshape(a_BTD.shape[0], -1, a_BTD.shape[1])

    def _chunks(self) -> list[tuple[int, int]]:
        windows = self._dy[:, 0].numel() // self._units * (self._geometry.weight[0].numel() * self._geometry.groups)
        size = max(1, _WINDOW_NUMBERS // max(1, windows))
        return [(first, min(first + size, self._units)) for first in range(0, self._units, size)]


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def convolution(call: LayerCall) -> dict[str, Share]:
    """Any ordinary convolution: the input is padded as the layer does it, then correlated."""
    module = call.module
    if not isinstance(module, Convolution):
        raise TypeError(f"not a convolution: {type(module).__name__}")
    geometry = geometry_of(module, module.weight.detach())
    return correlation_shares(call, pad_as(module, call.x), call.dy, geometry)


def transposed(call: LayerCall) -> dict[str, Share]:
    """A transposed convolution is an ordinary one whose input and output gradient have changed places."""
    module = call.module
    if not isinstance(module, nn.ConvTranspose2d):
        raise TypeError(f"not a transposed convolution: {type(module).__name__}")
    geometry = geometry_of(module, module.weight.detach())
    height, width = (int(size) for size in module.padding)
    seen = F.pad(call.dy, (width, width, height, height))
    return correlation_shares(call, seen, call.x, geometry)


def geometry_of(module: Convolution | nn.ConvTranspose2d, weight: Tensor) -> Correlation:
    """The layer's shape facts."""
    return Correlation(weight, module.kernel_size, module.stride, module.dilation, module.groups)


def correlation_shares(call: LayerCall, x_NCS: Tensor, dy_NOS: Tensor, geometry: Correlation) -> dict[str, Share]:
    """Weight and bias shares of one correlation."""
    shares: dict[str, Share] = {}
    if "weight" in call.wanted:
        shares["weight"] = Correlated(seen_by(geometry, x_NCS, dy_NOS), dy_NOS, geometry, call.units)
    if "bias" in call.wanted:
        shares["bias"] = Kept(sum_by_unit(sum_over_space(call.dy), call.units))
    return shares


def seen_by(geometry: Correlation, x_NCS: Tensor, dy_NOS: Tensor) -> Tensor:
    """The input without the rim that no window sees: a stride may leave one, an output padding adds one."""
    for dim, size in enumerate(geometry.reach(tuple(dy_NOS.shape[2:])), start=2):
        x_NCS = x_NCS.narrow(dim, 0, size)
    return x_NCS


def pad_as(module: Convolution, x_NCS: Tensor) -> Tensor:
    """The input with the layer's own padding put on it."""
    sides = _sides(module)
    if not any(sides):
        return x_NCS
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x_NCS, sides, mode=mode)


def _sides(module: Convolution) -> list[int]:
    """Padding before and after each dimension, last dimension first, as ``F.pad`` wants it."""
    sides: list[int] = []
    for dim in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            total = module.dilation[dim] * (module.kernel_size[dim] - 1)
            sides += [total // 2, total - total // 2]
        elif isinstance(module.padding, str):
            sides += [0, 0]
        else:
            sides += [module.padding[dim]] * 2
    return sides


register(nn.Conv1d, nn.Conv2d, nn.Conv3d, rule=convolution)
register(nn.ConvTranspose2d, rule=transposed)
