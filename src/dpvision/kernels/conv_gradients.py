"""Per-unit weight gradients of convolutions other than Winograd's, and what norms need of them.

``window_gradients`` forms the gradients of small or depthwise convolutions with their norms. ``gram_norms_sq`` gives
the norms of 3×3 convolutions without forming anything. The others are the sums that weight standardisation needs, and
the linear map from the standardised filters' gradient to that of the raw ones. Images are float32 on the CPU.

Shapes: N rows, U units, C in, O out, H height, W width, T positions, K places of a filter, D entries of a filter
(K · C), M moments.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from dpvision.kernels.channels_last import is_channels_last
from dpvision.kernels.ops import call, is_dense, is_readable, kernel

MOST_WINDOW_NUMBERS: Final = 3 << 16
"""Numbers in a unit's windows that still fit the second cache; for more, matrix products are faster."""
_DEPTHWISE_WIDTHS: Final = (3, 5, 7)
"""Kernel widths that depthwise convolutions have code for."""
_CONVOLUTION_MOMENTS: Final = 4
Sizes = tuple[int, ...]


def _has_channels_inside(x_NCHW: Tensor) -> bool:
    """Whether a position's channels and a line's columns are adjacent, whatever the distance of lines and rows."""
    channels, width = x_NCHW.shape[1], x_NCHW.shape[3]
    adjacent = (channels == 1 or x_NCHW.stride(1) == 1) and (width == 1 or x_NCHW.stride(3) == channels)
    return adjacent and is_readable(x_NCHW)


def _windows_fit(x_NCHW: Tensor, dy_NOHW: Tensor, *, units: int, kernel: Sizes, stride: Sizes, groups: int = 1) -> bool:
    if units < 1 or x_NCHW.dim() != 4 or not _has_channels_inside(x_NCHW) or not is_channels_last(dy_NOHW):
        return False
    (rows, outputs, height, width), channels = dy_NOHW.shape, x_NCHW.shape[1]
    numbers = rows // units * height * width * channels * kernel[0] * kernel[1]
    reach = ((height - 1) * stride[0] + kernel[0], (width - 1) * stride[1] + kernel[1])
    if numbers == 0 or x_NCHW.shape[0] != rows or rows % units or reach != x_NCHW.shape[2:]:
        return False
    if groups == 1:
        return numbers <= MOST_WINDOW_NUMBERS
    return groups == channels == outputs and kernel[1] in _DEPTHWISE_WIDTHS


@kernel(_windows_fit, "float32 images with channels inside that windows cover exactly, small or depthwise")
def window_gradients(
    x_NCHW: Tensor, dy_NOHW: Tensor, *, units: int, kernel: Sizes, stride: Sizes, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Form every unit's weight gradient, with its squared norm.

    Args:
        x_NCHW: The input, already padded, and without a rim that no window covers.
        dy_NOHW: The output gradient.
        units: Privacy units; each owns N / units consecutive rows.
        kernel: Height and width of the filters.
        stride: Vertical and horizontal stride.
        groups: 1, or the number of channels in and out.

    Returns:
        The gradients (U, O, D), D in the order (height, width, channel of the group), and squared norms in float64.

    Guarantee: norms are right to a relative 3e-6, apart from squares that underflow. One thread computes a unit: no
    bit depends on the number of threads.
    """
    (rows, outputs, height, width), channels = dy_NOHW.shape, x_NCHW.shape[1]
    gradients_UOD = x_NCHW.new_empty(units, outputs, kernel[0] * kernel[1] * (channels // groups))
    squares_U = x_NCHW.new_empty(units, dtype=torch.float64)
    row_stride, _, line_stride, _ = x_NCHW.stride()
    sizes = (rows // units, row_stride, line_stride, channels, height, width, outputs, *kernel, *stride)
    name = "window_gradients" if groups == 1 else "depthwise_gradients"
    call(name, (units, *sizes), x_NCHW, dy_NOHW, gradients_UOD, squares_U)
    return gradients_UOD, squares_U


def _grams_fit(x_gram_UTT: Tensor, dy_gram_UTT: Tensor, height: int, width: int) -> bool:
    positions = height * width
    shape = (*x_gram_UTT.shape[:1], positions, positions)
    same = x_gram_UTT.shape == dy_gram_UTT.shape == shape
    return min(height, width) >= 1 and same and is_dense(x_gram_UTT) and is_dense(dy_gram_UTT)


@kernel(_grams_fit, "two contiguous float32 matrices (units, positions, positions) on the CPU, and positive sizes")
def gram_norms_sq(x_gram_UTT: Tensor, dy_gram_UTT: Tensor, height: int, width: int) -> Tensor:
    """Compute squared norms of a 3×3 convolution's weight gradients (stride 1, padding 1) from X·Xᵀ and dY·dYᵀ.

    The Gram matrix of the 3×3 windows is the sum of x_gram shifted along its diagonal by the nine taps, so no window is
    formed. The sum over all pairs of the T = height · width positions can cancel; a bound on the rounding is added.

    Guarantee: not below the true value by more than a relative 1e-6; not finite if a matrix is not. float64.
    """
    norms_sq_U = x_gram_UTT.new_empty(x_gram_UTT.shape[0], dtype=torch.float64)
    call("gram_norms_sq", (x_gram_UTT.shape[0], height, width), x_gram_UTT, dy_gram_UTT, norms_sq_U)
    return norms_sq_U


def _sums_fit(dy_NCHW: Tensor) -> bool:
    return is_channels_last(dy_NCHW) and 0 not in dy_NCHW.shape[1:]


@kernel(_sums_fit, "a channels-last float32 image on the CPU")
def channel_sums(dy_NCHW: Tensor) -> Tensor:
    """Sum over the positions, for each row and channel: a row's bias gradient (N, C) in float32."""
    rows, channels, height, width = dy_NCHW.shape
    sums_NC = dy_NCHW.new_empty(rows, channels)
    call("channel_sums", (rows, channels, height * width), dy_NCHW, sums_NC)
    return sums_NC


def _moments_fit(dy_NOHW: Tensor, y_NOHW: Tensor, box_NHW: Tensor) -> bool:
    images_fit = _sums_fit(dy_NOHW) and y_NOHW.shape == dy_NOHW.shape and is_channels_last(y_NOHW)
    return images_fit and box_NHW.shape == (dy_NOHW.shape[0], *dy_NOHW.shape[2:]) and is_dense(box_NHW)


@kernel(_moments_fit, "two channels-last float32 images of one shape and a contiguous box (rows, height, width)")
def convolution_moments(dy_NOHW: Tensor, y_NOHW: Tensor, box_NHW: Tensor) -> Tensor:
    """Compute Σ dy, Σ dy·y, Σ dy·box and Σ |dy·y| over the positions, as (N, M, O) in float64.

    With y the convolution's output without its bias, and box the sum of the inputs in each output's window, these are
    of a row's weight gradient: the bias gradient, the inner product with the filter, the sum of the entries, and the
    scale of the rounding in the inner product. Short runs are added in float32, the runs in float64.
    """
    rows, outputs, height, width = dy_NOHW.shape
    sums_NMO = dy_NOHW.new_empty(rows, _CONVOLUTION_MOMENTS, outputs, dtype=torch.float64)
    call("convolution_moments", (rows, outputs, height * width), dy_NOHW, y_NOHW, box_NHW, sums_NMO)
    return sums_NMO


def _filter_moments_fit(e_UOD: Tensor, z_OD: Tensor) -> bool:
    return e_UOD.dim() == 3 and e_UOD.shape[1:] == z_OD.shape and is_dense(e_UOD) and is_dense(z_OD)


@kernel(_filter_moments_fit, "contiguous float32 (units, filters, entries) and (filters, entries) on the CPU")
def filter_moments(e_UOD: Tensor, z_OD: Tensor) -> Tensor:
    """Compute squared length, sum and inner product with z of every filter's gradient, as (U, 3, O) in float64.

    Guarantee: not finite if a number is not. One thread computes a filter of a unit: no bit depends on their number.
    """
    units, outputs, depth = e_UOD.shape
    moments_UMO = e_UOD.new_empty(units, 3, outputs, dtype=torch.float64)
    call("filter_moments", (units, outputs, depth), e_UOD, z_OD, moments_UMO)
    return moments_UMO


def _in_window_order(e_OIKK: Tensor) -> bool:
    """Whether a filter's channels are adjacent in memory: the order in which windows give its gradient."""
    return not e_OIKK.is_contiguous() and e_OIKK.dim() == 4 and e_OIKK.permute(0, 2, 3, 1).is_contiguous()


def _pull_back_fits(e_OIKK: Tensor, weight_OD: Tensor, facts_O: tuple[Tensor, Tensor, Tensor, Tensor]) -> bool:
    dense = e_OIKK.is_contiguous() or _in_window_order(e_OIKK)
    if not dense or e_OIKK.dim() < 2 or not is_readable(e_OIKK, torch.float64):
        return False
    filters, entries = e_OIKK.shape[0], e_OIKK.shape[1:].numel()
    facts_fit = all(fact.shape == (filters,) and is_dense(fact) for fact in facts_O)
    return facts_fit and weight_OD.shape == (filters, entries) and is_dense(weight_OD)


@kernel(_pull_back_fits, "float64 sums without gaps, with float32 weights and facts of as many filters on the CPU")
def pull_back(e_OIKK: Tensor, weight_OD: Tensor, facts_O: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Map the summed gradient of standardised filters to that of the raw ones, in the memory of ``e_OIKK``.

    Args:
        e_OIKK: The sum, in the order of a weight or with each filter's channels adjacent; overwritten.
        weight_OD: The raw filters.
        facts_O: Each filter's mean, s, scale and live: see ``gradients.rules.weight_standardisation``.

    Returns:
        ``(e − mean(e) − live · z⟨z, e⟩) · scale`` with z = (weight − mean) · s, contiguous in the order of a weight.

    Guarantee: one thread computes a filter: no bit depends on the number of threads.
    """
    inside = _in_window_order(e_OIKK)
    filters, channels, places = e_OIKK.shape[0], e_OIKK.shape[1], e_OIKK.shape[2:].numel()
    call("pull_back", (filters, channels, places, inside), e_OIKK, weight_OD, *facts_O)
    return e_OIKK.permute(0, 2, 3, 1).reshape(-1).view(e_OIKK.shape) if inside else e_OIKK
