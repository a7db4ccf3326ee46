"""Convolutions of one to three dimensions, and transposed ones, as matrix products over windows of the input.

Shapes: N rows, U units, C in, O out, S space, K kernel, T positions of a unit (its rows included), D = C·K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dpvision.gradients.layer_gradient import (
    LayerGradient,
    MaterialisedGradient,
    ghost_pays,
    gram_norms_sq,
    scale_by_unit,
    sum_by_unit,
    sum_of_squares,
    sum_over_space,
    underflow,
    without_nonfinite,
)
from dpvision.gradients.rules.rule import LayerCall, register
from dpvision.kernels.conv_gradients import window_gradients

Sizes = tuple[int, ...]
_WINDOW_NUMBERS = 1 << 23  # window matrices are formed for as many units at a time as stay below this
_IN_GROUP = 1 << 14  # entries of a group's filters below which its products are too small to pay


@final
@dataclass(frozen=True)
class Correlation:
    """The map from a padded input to an output: everything a weight gradient depends on.

    Attributes:
        weight: of shape (O, C / groups, *kernel).
        kernel: sizes of the kernel, one per dimension; likewise ``stride`` and ``dilation``.
        stride: steps between positions.
        dilation: steps inside a window.
        groups: groups of channels that do not meet.
    """

    weight: Tensor
    kernel: Sizes
    stride: Sizes
    dilation: Sizes
    groups: int

    def reach(self, positions: Sizes) -> Sizes:
        """Return the extent of input under this many output positions."""
        each = zip(positions, self.kernel, self.stride, self.dilation, strict=True)
        return tuple((t - 1) * s + d * (k - 1) + 1 for t, k, s, d in each)

    def windows(self, x_NCS: Tensor, positions: Sizes, units: int) -> Tensor:
        """Return the input under the kernel at every position, as (units × groups, T, D), D as in ``to_order``."""
        rows, channels = x_NCS.shape[:2]
        steps = x_NCS.stride()
        along_kernel = tuple(s * d for s, d in zip(steps[2:], self.dilation, strict=True))
        along_space = tuple(s * d for s, d in zip(steps[2:], self.stride, strict=True))
        in_group = channels // self.groups
        shape = (units, rows // units, self.groups, in_group, *self.kernel, *positions)
        across = (steps[0] * (rows // units), steps[0], steps[1] * in_group, steps[1])
        view = x_NCS.as_strided(shape, (*across, *along_kernel, *along_space))
        dims = len(self.kernel)
        kernel, space = range(4, 4 + dims), range(4 + dims, 4 + 2 * dims)
        depth = self.weight[0].numel()
        # The copy runs along whatever lies together in memory: channels, or positions.
        if channels_inside(x_NCS):
            return view.permute(0, 2, 1, *space, *kernel, 3).reshape(units * self.groups, -1, depth)
        return view.permute(0, 2, 3, *kernel, 1, *space).reshape(units * self.groups, depth, -1).mT

    def to_order(self, weight: Tensor, *, channels_inside: bool) -> Tensor:
        """Return a weight as (O, D), D in the order of the windows."""
        return (weight.movedim(1, -1) if channels_inside else weight).flatten(1)

    def from_order(self, x: Tensor, *, channels_inside: bool) -> Tensor:
        """The inverse of ``to_order``, for (…, O, D)."""
        in_group = self.weight.shape[1]
        if channels_inside:
            return x.unflatten(-1, (*self.kernel, in_group)).movedim(-1, -1 - len(self.kernel))
        return x.unflatten(-1, (in_group, *self.kernel))


def channels_inside(x_NCS: Tensor) -> bool:
    """Return whether a position's channels lie together in memory."""
    return x_NCS.shape[1] > 1 and x_NCS.stride(1) == 1


@final
class ConvolutionGradient(LayerGradient):
    """A convolution's weight gradient, formed per unit or held as input and output gradient, whichever is cheaper."""

    def __init__(self, x_NCS: Tensor, dy_NOS: Tensor, geometry: Correlation, units: int) -> None:
        self._x = x_NCS
        self._dy = dy_NOS
        self._geometry = geometry
        self._units = units
        self._formed_UOD: Tensor | None = None
        self._squares_U: Tensor | None = None

    @property
    def held_bytes(self) -> int:
        return 0 if self._formed_UOD is None else self._formed_UOD.nbytes

    @property
    def channels_inside(self) -> bool:
        """The order of ``formed``."""
        return channels_inside(self._x)

    @property
    def by_ghost(self) -> bool:
        """Whether norms come from Gram matrices, so that no unit's gradient is formed."""
        positions = self._dy[0, 0].numel() * (self._dy.shape[0] // self._units)
        return ghost_pays(positions=positions, entries=self._geometry.weight.numel())

    def norms_sq(self) -> Tensor:
        if self.by_ghost:
            return self._gram_norms()
        formed_UOD = self.formed()
        if self._squares_U is None:
            return sum_of_squares(formed_UOD)
        return self._squares_U + underflow(formed_UOD.flatten(1))

    def weighted_sum(self, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        geometry = self._geometry
        if self._formed_UOD is not None:
            total_OD = MaterialisedGradient(self._formed_UOD).weighted_sum(factor_U, nonfinite_U)
            return geometry.from_order(total_OD, channels_inside=self.channels_inside)
        x_NCS, dy_NOS = (
            without_nonfinite(self._x, nonfinite_U),
            scale_by_unit(without_nonfinite(self._dy, nonfinite_U), factor_U),
        )
        if self.by_ghost and _products_pay(x_NCS, geometry):
            total_OD = _sum_by_products(x_NCS, dy_NOS, geometry)
            return geometry.from_order(total_OD, channels_inside=True)
        dims = len(geometry.kernel)
        step = geometry.stride, [0] * dims, geometry.dilation, False, [0] * dims, geometry.groups
        return torch.ops.aten.convolution_backward(dy_NOS, x_NCS, geometry.weight, None, *step, [False, True, False])[1]

    def add_weighted_sum(self, total: Tensor | None, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        if self._formed_UOD is None:
            return super().add_weighted_sum(total, factor_U, nonfinite_U)
        inside = self.channels_inside
        total_OD = None if total is None else self._geometry.to_order(total, channels_inside=inside)
        total_OD = MaterialisedGradient(self._formed_UOD).add_weighted_sum(total_OD, factor_U, nonfinite_U)
        return self._geometry.from_order(total_OD, channels_inside=inside)

    def per_unit(self) -> Tensor:
        return self._geometry.from_order(self.formed(), channels_inside=self.channels_inside)

    def formed(self) -> Tensor:
        """Form and return the gradients as (U, O, D), D in the order of the windows."""
        if self._formed_UOD is None:
            self._formed_UOD, self._squares_U = self._by_kernel() or (self._by_products(), None)
        return self._formed_UOD

    def _by_kernel(self) -> tuple[Tensor, Tensor] | None:
        """Form the gradients, with squared norms, without storing all windows; None where the kernel refuses.

        It refuses dilated filters too: their windows do not cover the input as those of its own do.
        """
        kernel, stride, groups = self._geometry.kernel, self._geometry.stride, self._geometry.groups
        return window_gradients.attempt(
            self._x, self._dy, units=self._units, kernel=kernel, stride=stride, groups=groups
        )

    def _by_products(self) -> Tensor:
        weight = self._geometry.weight
        formed_UOD = self._x.new_empty(self._units, weight.shape[0], weight[0].numel())
        for first, last, a_BTD, g_BTO in self._chunks():
            part = formed_UOD[first:last].view(a_BTD.shape[0], g_BTO.shape[2], a_BTD.shape[2])
            torch.bmm(g_BTO.mT, a_BTD, out=part)
        return formed_UOD

    def _gram_norms(self) -> Tensor:
        parts = (gram_norms_sq(a_BTD, g_BTO).view(last - first, -1) for first, last, a_BTD, g_BTO in self._chunks())
        return torch.cat([part.sum(1) for part in parts])

    def _chunks(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield (first, last, windows, output gradients) of some units at a time; see ``_matrices``."""
        per_unit = self._dy.shape[0] // self._units
        for first, last in _chunks(self._units, self._dy[:, 0].numel() // self._units, self._geometry):
            rows = slice(first * per_unit, last * per_unit)
            yield first, last, *_matrices(self._x[rows], self._dy[rows], self._geometry, last - first)


def _matrices(x_NCS: Tensor, dy_NOS: Tensor, geometry: Correlation, units: int) -> tuple[Tensor, Tensor]:
    """Return windows (B, T, D) and output gradients (B, T, O) of units, groups folded into B."""
    groups, per_group = geometry.groups, dy_NOS.shape[1] // geometry.groups
    a_BTD = geometry.windows(x_NCS, tuple(dy_NOS.shape[2:]), units)
    if channels_inside(dy_NOS):
        g = dy_NOS.movedim(1, -1).reshape(units, -1, groups, per_group)
        return a_BTD, g.transpose(1, 2).reshape(a_BTD.shape[0], a_BTD.shape[1], -1)
    g = dy_NOS.reshape(units, dy_NOS.shape[0] // units, groups, per_group, -1)
    return a_BTD, g.permute(0, 2, 3, 1, 4).reshape(a_BTD.shape[0], -1, a_BTD.shape[1]).mT


def _chunks(count: int, positions: int, geometry: Correlation) -> list[tuple[int, int]]:
    """Return the ranges of ``count`` units or rows, of ``positions`` each, whose windows are formed at once."""
    size = max(1, _WINDOW_NUMBERS // max(1, positions * geometry.weight[0].numel() * geometry.groups))
    return [(first, min(first + size, count)) for first in range(0, count, size)]


def _products_pay(x_NCS: Tensor, geometry: Correlation) -> bool:
    """Return whether matrix products add up few positions' gradients faster than oneDNN's convolutions.

    Measured on a CPU with AVX-512: up to eight times where filters have many channels and images few pixels.
    """
    in_group = geometry.weight.numel() // geometry.groups
    return x_NCS.device.type == "cpu" and channels_inside(x_NCS) and (geometry.groups == 1 or in_group >= _IN_GROUP)


def _sum_by_products(x_NCS: Tensor, dy_NOS: Tensor, geometry: Correlation) -> Tensor:
    """Return the weight gradient of all rows together, as (O, D)."""
    groups, depth = geometry.groups, geometry.weight[0].numel()
    make = dy_NOS.new_empty if x_NCS.shape[0] else dy_NOS.new_zeros
    total_GOD = make(groups, dy_NOS.shape[1] // groups, depth)
    for first, last in _chunks(x_NCS.shape[0], dy_NOS.shape[2:].numel(), geometry):
        a_GTD, g_GTO = _matrices(x_NCS[first:last], dy_NOS[first:last], geometry, 1)
        total_GOD.baddbmm_(g_GTO.mT, a_GTD, beta=int(first > 0))
    return total_GOD.flatten(0, 1)


def convolution(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the gradients of an ordinary convolution, from the input padded as the layer does it."""
    module = call.layer(_ConvNd)
    geometry = geometry_of(module, module.weight.detach())
    return correlation_gradients(call, pad_as(module, call.x), call.dy, geometry)


def transposed(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the gradients of a transposed convolution: an ordinary one with input and output gradient exchanged."""
    module = call.layer(nn.ConvTranspose2d)
    geometry = geometry_of(module, module.weight.detach())
    height, width = (int(size) for size in module.padding)
    seen = F.pad(call.dy, (width, width, height, height))
    return correlation_gradients(call, seen, call.x, geometry)


def geometry_of(module: _ConvNd, weight: Tensor) -> Correlation:
    """Return the geometry of a layer with this weight."""
    return Correlation(weight, module.kernel_size, module.stride, module.dilation, module.groups)


def correlation_gradients(
    call: LayerCall, x_NCS: Tensor, dy_NOS: Tensor, geometry: Correlation
) -> dict[str, LayerGradient]:
    """Return weight and bias gradients of one correlation."""
    layer_gradients: dict[str, LayerGradient] = {}
    if "weight" in call.wanted:
        layer_gradients["weight"] = ConvolutionGradient(seen_by(geometry, x_NCS, dy_NOS), dy_NOS, geometry, call.units)
    if "bias" in call.wanted:
        layer_gradients["bias"] = MaterialisedGradient(sum_by_unit(sum_over_space(call.dy), call.units))
    return layer_gradients


def seen_by(geometry: Correlation, x_NCS: Tensor, dy_NOS: Tensor) -> Tensor:
    """Return the input without the rim outside all windows: a stride may leave one, an output padding adds one."""
    for dim, size in enumerate(geometry.reach(tuple(dy_NOS.shape[2:])), start=2):
        x_NCS = x_NCS.narrow(dim, 0, size)
    return x_NCS


def pad_as(module: _ConvNd, x_NCS: Tensor) -> Tensor:
    """Return the input with the layer's own padding."""
    sides = _sides(module)
    if not any(sides):
        return x_NCS
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x_NCS, sides, mode=mode)


def _sides(module: _ConvNd) -> list[int]:
    """Return the padding before and after each dimension, last dimension first, as ``F.pad`` expects it."""
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
