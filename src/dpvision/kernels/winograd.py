"""3×3 convolutions (stride 1, padding 1) and their weight gradients by Winograd's F(4×4, 3×3).

Images are float32 and channels-last. Weight gradients come as (3, 3, in, out), the layout in which the kernel computes
them; ``gradient_KKIO.permute(3, 2, 0, 1)`` is a view in the order of a weight.

Shapes: N rows, C or I input channels, O output channels, H height, W width, K = 3 taps, U units, M moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from dpvision.kernels.channels_last import empty, is_channels_last
from dpvision.kernels.compile import build
from dpvision.kernels.ops import call, is_dense, is_dense_or_none, is_readable, kernel

_POINTS: Final = 36
_PANEL: Final = 16


@final
@dataclass(frozen=True)
class Filters:
    """Transformed filters (36 points, panels of 16 output channels, input channels, 16), padded with zeros."""

    values: Tensor
    out_channels: int

    def fit(self, channels: int) -> bool:
        """Return whether the memory is that of ``transform`` for images of this many channels."""
        shape = (_POINTS, _panels(self.out_channels), channels, _PANEL)
        return self.values.shape == shape and is_dense(self.values)


@final
@dataclass(frozen=True)
class RawFilters:
    """A weight that is transformed during each convolution and not kept; with ``backward``, for dy to dx."""

    weight_OIKK: Tensor
    backward: bool

    @property
    def out_channels(self) -> int:
        """Channels of the convolution's output."""
        return self.weight_OIKK.shape[1 if self.backward else 0]

    def fit(self, channels: int) -> bool:
        """Return whether the filters are 3×3 for images of this many channels."""
        expected = self.weight_OIKK.shape[0 if self.backward else 1] if self.weight_OIKK.dim() == 4 else 0
        return _is_weight(self.weight_OIKK) and expected == channels


def takes_channels(*, in_channels: int, out_channels: int) -> bool:
    """Return whether the kernels are available and there are channels, any number of them.

    A single channel is expensive to transform, but forward and per-unit gradients together still take half the time of
    a direct convolution and matrix products over windows (measured from 1 to 64 and from 64 to 1 channels).
    """
    return min(in_channels, out_channels) >= 1 and build().library is not None


def filter_bytes(*, in_channels: int, out_channels: int) -> int:
    """Return the bytes that the transformed filters of both directions take."""
    numbers = _panels(out_channels) * in_channels + _panels(in_channels) * out_channels
    return 4 * _POINTS * _PANEL * numbers


def _panels(channels: int) -> int:
    return -(-channels // _PANEL)


def _is_image(x_NCHW: Tensor) -> bool:
    return is_channels_last(x_NCHW) and 0 not in x_NCHW.shape[1:]


def _is_weight(weight_OIKK: Tensor, *_: bool) -> bool:
    shape = weight_OIKK.shape
    return is_readable(weight_OIKK) and len(shape) == 4 and shape[2:] == (3, 3) and 0 not in shape


@kernel(_is_weight, "float32 filters of 3×3 on the CPU")
def _transformed(weight_OIKK: Tensor, backward: bool) -> Tensor:
    out_channels, in_channels = weight_OIKK.shape[:2]
    columns, channels = (in_channels, out_channels) if backward else (out_channels, in_channels)
    values = weight_OIKK.new_empty(_POINTS, _panels(columns), channels, _PANEL)
    call("winograd_filters", (out_channels, in_channels, backward), weight_OIKK.contiguous(), values)
    return values


def transform(weight_OIKK: Tensor, *, backward: bool) -> Filters:
    """Transform filters for many convolutions; with ``backward``, into those that take dy to dx.

    Raises:
        ArgumentError: The weight is not (O, I, 3, 3) in float32 on the CPU.
    """
    return Filters(_transformed(weight_OIKK, backward), weight_OIKK.shape[1 if backward else 0])


def _convolution_fits(x_NCHW: Tensor, filters: Filters | RawFilters, bias_O: Tensor | None) -> bool:
    if not _is_image(x_NCHW) or not filters.fit(x_NCHW.shape[1]):
        return False
    return is_dense_or_none(bias_O, (filters.out_channels,))


@kernel(_convolution_fits, "a channels-last float32 image on the CPU, 3×3 filters for its channels, a matching bias")
def convolve(x_NCHW: Tensor, filters: Filters | RawFilters, bias_O: Tensor | None) -> Tensor:
    """Convolve images with filters; with those for ``backward``, compute the input gradient from dy.

    Transformed and raw filters give the same result to the last bit.
    """
    rows, channels, height, width = x_NCHW.shape
    y_NOHW = empty(x_NCHW, rows, filters.out_channels, height, width)
    sizes = (rows, height, width, channels, filters.out_channels)
    if isinstance(filters, RawFilters):
        weight_OIKK = filters.weight_OIKK.contiguous()
        if rows:
            call("winograd_convolve_raw", (*sizes, filters.backward), x_NCHW, weight_OIKK, bias_O, y_NOHW)
    elif rows:
        call("winograd_convolve", sizes, x_NCHW, filters.values, bias_O, y_NOHW)
    return y_NOHW


def _pair_fits(x_NCHW: Tensor, dy_NOHW: Tensor) -> bool:
    both = _is_image(x_NCHW) and _is_image(dy_NOHW)
    return both and x_NCHW.shape[0] == dy_NOHW.shape[0] and x_NCHW.shape[2:] == dy_NOHW.shape[2:]


def _units_fit(
    x_NCHW: Tensor, dy_NOHW: Tensor, z_KKIO: Tensor | None, units: int, *, into_UKKIO: Tensor | None = None
) -> bool:
    if not _pair_fits(x_NCHW, dy_NOHW) or (x_NCHW.shape[0] % units if units else x_NCHW.shape[0]):
        return False
    shape = (3, 3, x_NCHW.shape[1], dy_NOHW.shape[1])
    return is_dense_or_none(z_KKIO, shape) and is_dense_or_none(into_UKKIO, (units, *shape))


@kernel(_units_fit, "channels-last float32 images on the CPU that agree, and units that divide their rows")
def unit_gradients(
    x_NCHW: Tensor, dy_NOHW: Tensor, z_KKIO: Tensor | None, units: int, *, into_UKKIO: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute every unit's weight gradient, and moments of it for each output channel.

    Args:
        x_NCHW: The input.
        dy_NOHW: The output gradient.
        z_KKIO: A direction for each filter, for two more moments.
        units: Privacy units; each owns N / units consecutive rows, whose gradients are added.
        into_UKKIO: Memory for the gradients, which are large: new memory can cost more than computing them.

    Returns:
        The gradients (U, 3, 3, I, O), and moments (U, M, O) in float64: the sum of squares and, with ``z_KKIO``, the
        sum of the entries and their inner product with z.
    """
    (rows, channels, height, width), outputs = x_NCHW.shape, dy_NOHW.shape[1]
    gradient_UKKIO = x_NCHW.new_empty(units, 3, 3, channels, outputs) if into_UKKIO is None else into_UKKIO
    moments_UMO = dy_NOHW.new_empty(units, 1 if z_KKIO is None else 3, outputs, dtype=torch.float64)
    if units:
        sizes = (rows, height, width, channels, outputs, units)
        call("winograd_units", sizes, x_NCHW, dy_NOHW, z_KKIO, gradient_UKKIO, moments_UMO)
    return gradient_UKKIO, moments_UMO


def _sum_fits(total_KKIO: Tensor, x_NCHW: Tensor, dy_NOHW: Tensor, factor_N: Tensor) -> bool:
    if not _pair_fits(x_NCHW, dy_NOHW) or not is_dense_or_none(factor_N, (x_NCHW.shape[0],)):
        return False
    return total_KKIO.shape == (3, 3, x_NCHW.shape[1], dy_NOHW.shape[1]) and is_dense(total_KKIO, torch.float64)


@kernel(_sum_fits, "channels-last float32 images that agree, a factor for each row, and a float64 total (3, 3, I, O)")
def add_gradient(total_KKIO: Tensor, x_NCHW: Tensor, dy_NOHW: Tensor, factor_N: Tensor) -> None:
    """Add Σ factor · (weight gradient of the row) over all rows to ``total_KKIO``, a sum in float64.

    What these rows add is rounded as float32 sums are: pass few rows at a time.

    Guarantee: a row whose factor is 0 contributes exactly 0, whatever it holds, NaN and infinity included.
    """
    rows, channels, height, width = x_NCHW.shape
    sizes = (rows, height, width, channels, dy_NOHW.shape[1])
    call("winograd_sum", sizes, x_NCHW, dy_NOHW, factor_N, total_KKIO)
