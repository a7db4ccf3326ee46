"""GroupNorm fused with an activation, a 2×2 max-pool and a residual: a row stays in cache from first to last.

With ``norm_first`` it is ``pool(act(γ·norm(x) + β)) + residual``, else ``pool(γ·norm(act(x)) + β) + residual``. All
pictures are float32 and channels-last in memory. Every row is computed by itself: what one holds, NaN included, never
reaches another.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from dpvision.errors import ArgumentError, Problems
from dpvision.kernels import channels_last
from dpvision.kernels.compile import build, loaded

# N rows, C channels, G groups, H height, W width


# The numbers are those of with_activation in kernels/activations.h.
ACTIVATIONS: Final[dict[str, int]] = {"none": 0, "relu": 1, "mish": 2, "tanh": 3, "silu": 4, "selu": 5, "elu": 6}


class _Task(ctypes.Structure):
    """``struct NormTask`` of kernels/norm_act.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "channels", "height", "width", "groups")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("activation", "norm_first", "pool", "threads")),
    )


@final
@dataclass(frozen=True)
class Chain:
    """What follows what: norm and activation in either order, then perhaps a 2×2 max-pool."""

    groups: int
    eps: float
    activation: str = "none"
    norm_first: bool = True
    pool: bool = False

    @property
    def numbers(self) -> list[int]:
        """All but ``eps``, as a custom op takes them."""
        if self.activation not in ACTIVATIONS:
            raise ArgumentError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}.")
        return [self.groups, ACTIVATIONS[self.activation], self.norm_first, self.pool]


def takes(x_NCHW: Tensor, chain: Chain) -> bool:
    """Whether these kernels can be used: they exist, and the picture's layout and size fit."""
    if build().library is None or not channels_last.is_channels_last(x_NCHW):
        return False
    return _fits(x_NCHW, chain.groups, chain.pool)


def forward(
    x_NCHW: Tensor,
    gamma_C: Tensor | None,
    beta_C: Tensor | None,
    chain: Chain,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and mean_NG and rstd_NG (one over the standard deviation), which ``backward`` wants.

    An odd last row or column counts in the statistics, but is in no pooling window. No gamma means 1, no beta 0.
    """
    run = _forward if channels_last.without_dispatch(x_NCHW) else _forward_operator
    return run(x_NCHW, gamma_C, beta_C, residual, chain.eps, chain.numbers)


def backward(
    dy: Tensor,
    x_NCHW: Tensor,
    gamma_C: Tensor | None,
    beta_C: Tensor | None,
    mean_NG: Tensor,
    rstd_NG: Tensor,
    chain: Chain,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and every row's own gradients dgamma_NC and dbeta_NC. The residual's gradient is ``dy`` itself."""
    run = _backward if channels_last.without_dispatch(x_NCHW) else _backward_operator
    return run(dy, x_NCHW, gamma_C, beta_C, mean_NG, rstd_NG, chain.numbers)


class _Settings(NamedTuple):
    """What a custom op gets as a list of whole numbers."""

    groups: int
    activation: int
    norm_first: bool
    pool: bool


def _fits(x_NCHW: Tensor, groups: int, pool: bool) -> bool:
    _, channels, height, width = x_NCHW.shape
    return groups >= 1 and channels >= 1 and channels % groups == 0 and min(height, width) >= (2 if pool else 1)


def _check(x: Tensor, gamma: Tensor | None, beta: Tensor | None, settings: _Settings) -> Problems:
    """What is wrong with the arguments that both directions share; raises if ``x`` has no shape to go on with."""
    problems = Problems()
    channels_last.require(problems, "x", x, tuple(x.shape))
    problems.raise_if_any()
    if not _fits(x, settings.groups, settings.pool):
        problems.require(
            False,
            f"channels must be a multiple of groups, and height and width >= 1 (>= 2 to pool), got {tuple(x.shape)} "
            f"in {settings.groups} groups, pool={settings.pool}. Use `takes` first.",
        )
    channels_last.require_plain(problems, "gamma", gamma, (x.shape[1],))
    channels_last.require_plain(problems, "beta", beta, (x.shape[1],))
    return problems


@functools.cache
def _kernel(name: str, tensors: int) -> Callable[..., None]:
    function = loaded()[name]
    function.argtypes = [ctypes.POINTER(_Task), *[ctypes.c_void_p] * tensors]
    function.restype = None
    return function


def _run(name: str, x: Tensor, eps: float, settings: _Settings, tensors: Sequence[Tensor | None]) -> None:
    groups, activation, norm_first, pool = settings
    task = _Task(*x.shape, groups, eps, activation, norm_first, pool, torch.get_num_threads())
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    _kernel(name, len(tensors))(ctypes.byref(task), *pointers)


def _shape_of_output(x: Tensor, settings: _Settings) -> tuple[int, int, int, int]:
    rows, channels, height, width = x.shape
    return (rows, channels, height // 2, width // 2) if settings.pool else (rows, channels, height, width)


def _forward_outputs(x: Tensor, settings: _Settings) -> tuple[Tensor, Tensor, Tensor]:
    y = channels_last.empty(x, *_shape_of_output(x, settings))
    return y, x.new_empty((x.shape[0], settings.groups)), x.new_empty((x.shape[0], settings.groups))


def _backward_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, channels, height, width = x.shape
    dx = channels_last.empty(x, rows, channels, height, width)
    return dx, x.new_empty((rows, channels)), x.new_empty((rows, channels))


def _settings_of(numbers: Sequence[int]) -> _Settings:
    groups, activation, norm_first, pool = numbers
    return _Settings(groups, activation, bool(norm_first), bool(pool))


def _forward(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    residual: Tensor | None,
    eps: float,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = _settings_of(settings)
    problems = _check(x, gamma, beta, chosen)
    if residual is not None:
        channels_last.require(problems, "residual", residual, _shape_of_output(x, chosen))
    problems.raise_if_any()
    outputs = _forward_outputs(x, chosen)
    _run("dpvision_norm_act_forward", x, eps, chosen, (x, gamma, beta, residual, *outputs))
    return outputs


def _backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = _settings_of(settings)
    problems = _check(x, gamma, beta, chosen)
    channels_last.require(problems, "dy", dy, _shape_of_output(x, chosen))
    channels_last.require_plain(problems, "mean", mean, (x.shape[0], chosen.groups))
    channels_last.require_plain(problems, "rstd", rstd, (x.shape[0], chosen.groups))
    problems.raise_if_any()
    outputs = _backward_outputs(x)
    _run("dpvision_norm_act_backward", x, 0.0, chosen, (dy, x, gamma, beta, mean, rstd, *outputs))
    return outputs


_forward_operator = torch.library.custom_op(
    "dpvision::norm_act_forward",
    _forward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor x, Tensor? gamma, Tensor? beta, Tensor? residual, float eps, int[] settings)"
    " -> (Tensor, Tensor, Tensor)",
)
_backward_operator = torch.library.custom_op(
    "dpvision::norm_act_backward",
    _backward,
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor dy, Tensor x, Tensor? gamma, Tensor? beta, Tensor mean, Tensor rstd, int[] settings)"
    " -> (Tensor, Tensor, Tensor)",
)


@_forward_operator.register_fake
def _(
    x: Tensor,
    gamma: Tensor | None,  # noqa: ARG001
    beta: Tensor | None,  # noqa: ARG001
    residual: Tensor | None,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    settings: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward_outputs(x, _settings_of(settings))


@_backward_operator.register_fake
def _(
    dy: Tensor,  # noqa: ARG001
    x: Tensor,
    gamma: Tensor | None,  # noqa: ARG001
    beta: Tensor | None,  # noqa: ARG001
    mean: Tensor,  # noqa: ARG001
    rstd: Tensor,  # noqa: ARG001
    settings: Sequence[int],  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward_outputs(x)
