"""3×3 convolutions (stride 1, padding 1) and their weight gradients by Winograd's F(4×4, 3×3).

All pictures are float32 and channels-last in memory. Weight gradients come as (3, 3, in, out), the layout in which the
kernel finds them; ``gradient_KKIO.permute(3, 2, 0, 1)`` is a view in the weight's own order.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from dpvision.errors import ArgumentError
from dpvision.kernels.compile import build, loaded

# N rows, C or I input channels, O output channels, H height, W width, K = 3 taps, U units, M moments


_POINTS: Final = 36
_PANEL: Final = 16


class _Shape(ctypes.Structure):
    """``struct Shape`` of kernels/winograd.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "height", "width", "in_channels", "out_channels")]


@final
@dataclass(frozen=True)
class Filters:
    """Transformed filters: (36 points, panels of 16 output channels, input channels, 16), filled up with zeros."""

    values: Tensor
    out_channels: int


def takes(*, in_channels: int, out_channels: int) -> bool:
    """Whether these kernels can be used: they exist, and there are channels.

    Any number: a single one is dear to transform, but forward and per-unit gradients together still take half the time
    of a direct convolution and matrix products over windows (measured from 1 to 64 and from 64 to 1 channels).
    """
    return min(in_channels, out_channels) >= 1 and build().library is not None


@final
@dataclass(frozen=True)
class PlainFilters:
    """A weight whose filters are transformed while they are used, and not kept; with ``backward``, for dy to dx."""

    weight_OIKK: Tensor
    backward: bool


def transform(weight_OIKK: Tensor, *, backward: bool) -> Filters:
    """The filters for many uses; with ``backward``, those that take dy to dx."""
    run = _transform_now if _is_plain(weight_OIKK) else _transform_op
    return Filters(run(weight_OIKK, backward), weight_OIKK.shape[1 if backward else 0])


def filter_bytes(*, in_channels: int, out_channels: int) -> int:
    """What the filters of both directions take."""
    numbers = _panels(out_channels) * in_channels + _panels(in_channels) * out_channels
    return 4 * _POINTS * _PANEL * numbers


def convolve(x_NCHW: Tensor, filters: Filters | PlainFilters, bias_O: Tensor | None) -> Tensor:
    """The convolution y_NOHW of x with filters. With those for ``backward``, the input gradient of dy.

    Transformed or not, the result is the same to the last bit.
    """
    if isinstance(filters, PlainFilters):
        weight_OIKK, backward = filters.weight_OIKK, filters.backward
        anew = _convolve_anew_now if _is_plain(x_NCHW, weight_OIKK, bias_O) else _convolve_anew_op
        return anew(x_NCHW, weight_OIKK, backward, bias_O)
    run = _convolve_now if _is_plain(x_NCHW, filters.values, bias_O) else _convolve_op
    return run(x_NCHW, filters.values, filters.out_channels, bias_O)


def unit_gradients(
    x_NCHW: Tensor, dy_NOHW: Tensor, z_KKIO: Tensor | None, units: int, *, into_UKKIO: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every unit's weight gradient (U, 3, 3, I, O), and float64 moments of it per output channel (U, M, O).

    A unit owns N / units consecutive rows, whose gradients are added. The first moment is the sum of squares. With
    ``z_KKIO`` there are two more: the sum of the entries, and their inner product with z. ``into_UKKIO`` is memory for
    the gradients, which are large: fresh memory can cost more than computing them.
    """
    in_channels, out_channels = x_NCHW.shape[1], dy_NOHW.shape[1]
    gradient_UKKIO = into_UKKIO
    if gradient_UKKIO is None:
        gradient_UKKIO = x_NCHW.new_empty(units, 3, 3, in_channels, out_channels)
    if tuple(gradient_UKKIO.shape) != (units, 3, 3, in_channels, out_channels):
        raise ArgumentError(
            f"into_UKKIO must have shape {(units, 3, 3, in_channels, out_channels)}, got {tuple(gradient_UKKIO.shape)}."
        )
    plain = _is_plain(x_NCHW, dy_NOHW, z_KKIO, gradient_UKKIO)
    run = _unit_gradients_now if plain else _unit_gradients_op
    return gradient_UKKIO, run(x_NCHW, dy_NOHW, z_KKIO, gradient_UKKIO)


def add_gradient(total_KKIO: Tensor, x_NCHW: Tensor, dy_NOHW: Tensor, factor_N: Tensor) -> None:
    """Add Σ factor · (weight gradient of the row) over all rows to ``total_KKIO`` (3, 3, I, O), a sum in float64.

    What these rows add is rounded as float32 sums are: give few rows at a time.

    Guarantee: a row whose factor is 0 contributes exactly 0, whatever it holds, NaN and infinity included.
    """
    run = _add_gradient_now if _is_plain(total_KKIO, x_NCHW, dy_NOHW, factor_N) else _add_gradient_op
    run(total_KKIO, x_NCHW, dy_NOHW, factor_N)


def _is_plain(*tensors: Tensor | None) -> bool:
    """Nothing but numbers: no graph to record, no compiler or fake tensor that must see an operator.

    Then the kernel is called at once. The way through an operator takes up to 0.3 ms where other work has pushed it out
    of the caches, a tenth of what a kernel takes for a micro-batch.
    """
    if torch.compiler.is_compiling():
        return False
    return all(
        tensor is None or (type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.requires_grad)
        for tensor in tensors
    )


def _transform_now(weight_OIKK: Tensor, backward: bool) -> Tensor:
    _check_weight(weight_OIKK)
    out_channels, in_channels = weight_OIKK.shape[:2]
    weight_OIKK = weight_OIKK.contiguous()
    out = weight_OIKK.new_empty(_filters_shape(weight_OIKK, backward))
    _library().dpvision_winograd_filters(
        _at(weight_OIKK), out_channels, in_channels, int(backward), _at(out), torch.get_num_threads()
    )
    return out


def _convolve_now(x_NCHW: Tensor, filters: Tensor, out_channels: int, bias_O: Tensor | None) -> Tensor:
    _check(x_NCHW=x_NCHW, filters=filters)
    _check_pictures(x_NCHW=x_NCHW)
    expected = (_POINTS, _panels(out_channels), x_NCHW.shape[1], _PANEL)
    if tuple(filters.shape) != expected or not filters.is_contiguous():
        raise ArgumentError(
            f"filters must be what transform() gives for {x_NCHW.shape[1]} to {out_channels} channels, got shape "
            f"{tuple(filters.shape)}."
        )
    _check_bias(bias_O, out_channels)
    y_NOHW = _empty_pictures(x_NCHW, out_channels)
    if y_NOHW.numel():
        shape, bias = _shape(x_NCHW, out_channels), None if bias_O is None else _at(bias_O)
        _library().dpvision_winograd_convolve(
            _at(x_NCHW), _at(filters), bias, _at(y_NOHW), ctypes.byref(shape), torch.get_num_threads()
        )
    return y_NOHW


def _convolve_anew_now(x_NCHW: Tensor, weight_OIKK: Tensor, backward: bool, bias_O: Tensor | None) -> Tensor:
    _check(x_NCHW=x_NCHW)
    _check_pictures(x_NCHW=x_NCHW)
    _check_weight(weight_OIKK)
    out_channels, channels = weight_OIKK.shape[:2][:: -1 if backward else 1]
    if x_NCHW.shape[1] != channels:
        raise ArgumentError(f"x_NCHW must have the filters' {channels} channels, got {x_NCHW.shape[1]}.")
    _check_bias(bias_O, out_channels)
    weight_OIKK = weight_OIKK.contiguous()
    y_NOHW = _empty_pictures(x_NCHW, out_channels)
    if y_NOHW.numel():
        shape, bias = _shape(x_NCHW, out_channels), None if bias_O is None else _at(bias_O)
        _library().dpvision_winograd_convolve_anew(
            _at(x_NCHW),
            _at(weight_OIKK),
            int(backward),
            bias,
            _at(y_NOHW),
            ctypes.byref(shape),
            torch.get_num_threads(),
        )
    return y_NOHW


def _unit_gradients_now(x_NCHW: Tensor, dy_NOHW: Tensor, z_KKIO: Tensor | None, gradient_UKKIO: Tensor) -> Tensor:
    _check(x_NCHW=x_NCHW, dy_NOHW=dy_NOHW, into_UKKIO=gradient_UKKIO)
    _check_pair(x_NCHW, dy_NOHW)
    rows, units = x_NCHW.shape[0], gradient_UKKIO.shape[0]
    if rows % units if units else rows:
        raise ArgumentError(f"units must divide the number of rows, got {units} units for {rows} rows.")
    if not gradient_UKKIO.is_contiguous():
        raise ArgumentError(f"into_UKKIO must be contiguous, got strides {gradient_UKKIO.stride()}.")
    _check_like_weights(z_KKIO, (3, 3, x_NCHW.shape[1], dy_NOHW.shape[1]))
    moments_UMO = _empty_moments(dy_NOHW, z_KKIO, units)
    if units:
        shape, z = _shape(x_NCHW, dy_NOHW.shape[1]), None if z_KKIO is None else _at(z_KKIO)
        outputs = (_at(gradient_UKKIO), _at(moments_UMO))
        _library().dpvision_winograd_units(
            _at(x_NCHW), _at(dy_NOHW), z, units, *outputs, ctypes.byref(shape), torch.get_num_threads()
        )
    return moments_UMO


def _add_gradient_now(total_KKIO: Tensor, x_NCHW: Tensor, dy_NOHW: Tensor, factor_N: Tensor) -> None:
    _check(x_NCHW=x_NCHW, dy_NOHW=dy_NOHW, factor_N=factor_N)
    _check_pair(x_NCHW, dy_NOHW)
    if factor_N.shape != x_NCHW.shape[:1] or not factor_N.is_contiguous():
        raise ArgumentError(f"factor_N must be {x_NCHW.shape[0]} numbers, got shape {tuple(factor_N.shape)}.")
    expected = (3, 3, x_NCHW.shape[1], dy_NOHW.shape[1])
    fits = total_KKIO.dtype == torch.float64 and total_KKIO.device.type == "cpu" and total_KKIO.is_contiguous()
    if tuple(total_KKIO.shape) != expected or not fits:
        raise ArgumentError(
            f"total_KKIO must be contiguous float64 on the CPU of shape {expected}, got {total_KKIO.dtype} on "
            f"{total_KKIO.device} of shape {tuple(total_KKIO.shape)} with strides {total_KKIO.stride()}."
        )
    shape, pictures = _shape(x_NCHW, dy_NOHW.shape[1]), (_at(x_NCHW), _at(dy_NOHW))
    _library().dpvision_winograd_sum(
        *pictures, _at(factor_N), _at(total_KKIO), ctypes.byref(shape), torch.get_num_threads()
    )


_transform_op = torch.library.custom_op("dpvision::winograd_transform", _transform_now, mutates_args=())
_convolve_anew_op = torch.library.custom_op("dpvision::winograd_convolve_anew", _convolve_anew_now, mutates_args=())
_convolve_op = torch.library.custom_op("dpvision::winograd_convolve", _convolve_now, mutates_args=())
_unit_gradients_op = torch.library.custom_op(
    "dpvision::winograd_unit_gradients", _unit_gradients_now, mutates_args=("gradient_UKKIO",)
)
_add_gradient_op = torch.library.custom_op(
    "dpvision::winograd_add_gradient", _add_gradient_now, mutates_args=("total_KKIO",)
)


@_transform_op.register_fake
def _(weight_OIKK: Tensor, backward: bool) -> Tensor:
    return weight_OIKK.new_empty(_filters_shape(weight_OIKK, backward))


@_convolve_op.register_fake
def _(x_NCHW: Tensor, filters: Tensor, out_channels: int, bias_O: Tensor | None) -> Tensor:  # noqa: ARG001
    return _empty_pictures(x_NCHW, out_channels)


@_convolve_anew_op.register_fake
def _(x_NCHW: Tensor, weight_OIKK: Tensor, backward: bool, bias_O: Tensor | None) -> Tensor:  # noqa: ARG001
    return _empty_pictures(x_NCHW, weight_OIKK.shape[1 if backward else 0])


@_unit_gradients_op.register_fake
def _(x_NCHW: Tensor, dy_NOHW: Tensor, z_KKIO: Tensor | None, gradient_UKKIO: Tensor) -> Tensor:  # noqa: ARG001
    return _empty_moments(dy_NOHW, z_KKIO, gradient_UKKIO.shape[0])


@_add_gradient_op.register_fake
def _(total_KKIO: Tensor, x_NCHW: Tensor, dy_NOHW: Tensor, factor_N: Tensor) -> None:
    pass


def _panels(channels: int) -> int:
    return -(-channels // _PANEL)


def _filters_shape(weight_OIKK: Tensor, backward: bool) -> tuple[int, ...]:
    out_channels, in_channels = weight_OIKK.shape[:2]
    columns, channels = (in_channels, out_channels) if backward else (out_channels, in_channels)
    return _POINTS, _panels(columns), channels, _PANEL


def _empty_pictures(x_NCHW: Tensor, channels: int) -> Tensor:
    rows, _, height, width = x_NCHW.shape
    strides = (height * width * channels, 1, width * channels, channels)
    return x_NCHW.new_empty_strided((rows, channels, height, width), strides)


def _empty_moments(dy_NOHW: Tensor, z_KKIO: Tensor | None, units: int) -> Tensor:
    return dy_NOHW.new_empty(units, 1 if z_KKIO is None else 3, dy_NOHW.shape[1], dtype=torch.float64)


def _shape(x_NCHW: Tensor, out_channels: int) -> _Shape:
    rows, in_channels, height, width = x_NCHW.shape
    return _Shape(rows, height, width, in_channels, out_channels)


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _library() -> ctypes.CDLL:
    """The kernels with their signatures declared: a wrong argument is an error here, not a crash there."""
    library = loaded()
    pointer, shape, count, threads = ctypes.c_void_p, ctypes.POINTER(_Shape), ctypes.c_int64, ctypes.c_int
    signatures = {
        "filters": (pointer, count, count, ctypes.c_int, pointer, threads),
        "convolve": (pointer, pointer, pointer, pointer, shape, threads),
        "convolve_anew": (pointer, pointer, ctypes.c_int, pointer, pointer, shape, threads),
        "units": (pointer, pointer, pointer, count, pointer, pointer, shape, threads),
        "sum": (pointer, pointer, pointer, pointer, shape, threads),
    }
    for name, arguments in signatures.items():
        function = getattr(library, f"dpvision_winograd_{name}")
        function.argtypes, function.restype = arguments, None
    return library


def _check(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ArgumentError(f"{name} must be float32 on the CPU, got {tensor.dtype} on {tensor.device}.")


def _check_weight(weight_OIKK: Tensor) -> None:
    _check(weight_OIKK=weight_OIKK)
    if min(weight_OIKK.shape) < 1 or weight_OIKK.shape[2:] != (3, 3):
        raise ArgumentError(f"weight_OIKK must be filters of 3×3, got shape {tuple(weight_OIKK.shape)}.")


def _check_bias(bias_O: Tensor | None, out_channels: int) -> None:
    if bias_O is None:
        return
    _check(bias_O=bias_O)
    if bias_O.shape != (out_channels,) or not bias_O.is_contiguous():
        raise ArgumentError(f"bias_O must be None or {out_channels} numbers, got shape {tuple(bias_O.shape)}.")


def _check_pictures(**pictures: Tensor) -> None:
    """Channels-last in memory; the stride of a dimension of one means nothing."""
    for name, picture in pictures.items():
        fits = picture.dim() == 4 and min(picture.shape[1:]) > 0
        if not fits or not picture.permute(0, 2, 3, 1).is_contiguous():
            raise ArgumentError(
                f"{name} must be (rows, channels, height, width), channels-last in memory, got shape "
                f"{tuple(picture.shape)} with strides {picture.stride()}."
            )


def _check_like_weights(z_KKIO: Tensor | None, expected: tuple[int, ...]) -> None:
    if z_KKIO is None:
        return
    _check(z_KKIO=z_KKIO)
    if tuple(z_KKIO.shape) != expected or not z_KKIO.is_contiguous():
        raise ArgumentError(
            f"z_KKIO must be contiguous of shape {expected}, got {tuple(z_KKIO.shape)} with strides {z_KKIO.stride()}."
        )


def _check_pair(x_NCHW: Tensor, dy_NOHW: Tensor) -> None:
    _check_pictures(x_NCHW=x_NCHW, dy_NOHW=dy_NOHW)
    if x_NCHW.shape[0] != dy_NOHW.shape[0] or x_NCHW.shape[2:] != dy_NOHW.shape[2:]:
        raise ArgumentError(
            f"x_NCHW and dy_NOHW must agree in rows, height and width, got {tuple(x_NCHW.shape)} and "
            f"{tuple(dy_NOHW.shape)}."
        )
