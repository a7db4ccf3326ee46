"""GroupNorm fused with an activation, a 2×2 max-pool and a residual; max-pools of stride 1; tanh.

With ``norm_first`` the chain is ``pool(act(γ·norm(x) + β)) + residual``, else ``pool(γ·norm(act(x)) + β) + residual``;
a row stays in the cache from the first operation to the last. Images are float32 and channels-last. Every row is
computed separately: what one holds, NaN included, never reaches another.

Shapes: N rows, C channels, G groups, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from dpvision.errors import ArgumentError
from dpvision.kernels.channels_last import empty, is_channels_last
from dpvision.kernels.ops import call, is_dense, is_dense_or_none, is_readable, kernel

ACTIVATIONS: Final[dict[str, int]] = {"none": 0, "relu": 1, "mish": 2, "tanh": 3, "silu": 4, "selu": 5, "elu": 6}
"""Activations of the chain, with their numbers in ``with_activation`` of cpp/activations.h."""

POOL_PADDING: Final = {2: 0, 3: 1}
"""Windows of the max-pools of stride 1, and the padding that goes with each."""


@final
@dataclass(frozen=True)
class Chain:
    """What follows what: a GroupNorm and an activation in either order, then perhaps a 2×2 max-pool.

    Attributes:
        groups: Groups of the norm; divides the channels.
        eps: Added to the variance.
        activation: A key of ``ACTIVATIONS``.
        norm_first: Whether the norm comes before the activation.
        pool: Whether a 2×2 max-pool of stride 2 follows.
    """

    groups: int
    eps: float
    activation: str = "none"
    norm_first: bool = True
    pool: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ArgumentError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}.")

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Groups, activation, order and pool, as the C functions take them."""
        return self.groups, ACTIVATIONS[self.activation], self.norm_first, self.pool

    def output_shape(self, x_NCHW: Tensor) -> tuple[int, int, int, int]:
        """Return the shape of the chain's output."""
        rows, channels, height, width = x_NCHW.shape
        return (rows, channels, height // 2, width // 2) if self.pool else (rows, channels, height, width)


_NEEDS: Final = "channels-last float32 images on the CPU, groups that divide the channels, and matching parameters"


def _chain_fits(x_NCHW: Tensor, gamma_C: Tensor | None, beta_C: Tensor | None, chain: Chain) -> bool:
    if not is_channels_last(x_NCHW):
        return False
    _, channels, height, width = x_NCHW.shape
    if chain.groups < 1 or channels < 1 or channels % chain.groups or min(height, width) < 1 + chain.pool:
        return False
    return is_dense_or_none(gamma_C, (channels,)) and is_dense_or_none(beta_C, (channels,))


def _forward_fits(
    x_NCHW: Tensor, gamma_C: Tensor | None, beta_C: Tensor | None, chain: Chain, residual: Tensor | None = None
) -> bool:
    if not _chain_fits(x_NCHW, gamma_C, beta_C, chain):
        return False
    return residual is None or (residual.shape == chain.output_shape(x_NCHW) and is_channels_last(residual))


@kernel(_forward_fits, _NEEDS)
def forward(
    x_NCHW: Tensor, gamma_C: Tensor | None, beta_C: Tensor | None, chain: Chain, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the chain.

    An odd last row or column counts in the statistics, but is in no pooling window.

    Args:
        x_NCHW: The input.
        gamma_C: Scale of each channel; None means 1.
        beta_C: Shift of each channel; None means 0.
        chain: The operations.
        residual: Added to the output, of its shape.

    Returns:
        The output, and mean_NG and rstd_NG (one over the standard deviation) for ``backward``.
    """
    rows = x_NCHW.shape[0]
    y_NCHW = empty(x_NCHW, *chain.output_shape(x_NCHW))
    mean_NG, rstd_NG = x_NCHW.new_empty(rows, chain.groups), x_NCHW.new_empty(rows, chain.groups)
    numbers = (*x_NCHW.shape, *chain.numbers, chain.eps)
    call("norm_act_forward", numbers, x_NCHW, gamma_C, beta_C, residual, y_NCHW, mean_NG, rstd_NG)
    return y_NCHW, mean_NG, rstd_NG


def _backward_fits(
    dy: Tensor,
    x_NCHW: Tensor,
    gamma_C: Tensor | None,
    beta_C: Tensor | None,
    statistics: tuple[Tensor, Tensor],
    chain: Chain,
) -> bool:
    if not _chain_fits(x_NCHW, gamma_C, beta_C, chain):
        return False
    shape = (x_NCHW.shape[0], chain.groups)
    dy_fits = dy.shape == chain.output_shape(x_NCHW) and is_channels_last(dy)
    return dy_fits and all(is_dense_or_none(each_NG, shape) for each_NG in statistics)


@kernel(_backward_fits, _NEEDS)
def backward(
    dy: Tensor,
    x_NCHW: Tensor,
    gamma_C: Tensor | None,
    beta_C: Tensor | None,
    statistics: tuple[Tensor, Tensor],
    chain: Chain,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the chain's gradients; that of the residual is ``dy`` itself.

    Args:
        dy: The output gradient.
        x_NCHW: The input of ``forward``, as are ``gamma_C``, ``beta_C`` and ``chain``.
        gamma_C: See there.
        beta_C: See there.
        statistics: mean_NG and rstd_NG, which ``forward`` returned.
        chain: The operations.

    Returns:
        dx, and every row's own gradients dgamma_NC and dbeta_NC.
    """
    rows, channels = x_NCHW.shape[:2]
    dx = empty(x_NCHW, *x_NCHW.shape)
    dgamma_NC, dbeta_NC = x_NCHW.new_empty(rows, channels), x_NCHW.new_empty(rows, channels)
    numbers = (*x_NCHW.shape, *chain.numbers, 0.0)
    call("norm_act_backward", numbers, dy, x_NCHW, gamma_C, beta_C, *statistics, dx, dgamma_NC, dbeta_NC)
    return dx, dgamma_NC, dbeta_NC


def _pool_fits(x_NCHW: Tensor, window: int) -> bool:
    if window not in POOL_PADDING or not is_channels_last(x_NCHW):
        return False
    return x_NCHW.shape[1] >= 1 and min(x_NCHW.shape[2:]) >= window - 2 * POOL_PADDING[window]


@kernel(_pool_fits, "a channels-last float32 image on the CPU that a window of 2 or 3 fits")
def max_pool(x_NCHW: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Take the maximum of each window, with stride 1: 3×3 with padding 1, or 2×2 without padding.

    As in PyTorch the first of equal numbers wins, and of several NaNs the last.

    Returns:
        The maxima, and which number of its window each is, in uint8, counted row by row.
    """
    rows, channels, height, width = x_NCHW.shape
    less = window - 1 - 2 * POOL_PADDING[window]
    y_NCHW = empty(x_NCHW, rows, channels, height - less, width - less)
    index_NCHW = torch.empty_like(y_NCHW, dtype=torch.uint8)
    if y_NCHW.numel():
        call(f"pool{window}_forward", (rows, height, width, channels), x_NCHW, y_NCHW, index_NCHW)
    return y_NCHW, index_NCHW


def _unpool_fits(dy_NCHW: Tensor, index_NCHW: Tensor, window: int) -> bool:
    if window not in POOL_PADDING or not is_channels_last(dy_NCHW) or index_NCHW.shape != dy_NCHW.shape:
        return False
    return is_readable(index_NCHW, torch.uint8) and index_NCHW.permute(0, 2, 3, 1).is_contiguous()


@kernel(_unpool_fits, "a channels-last float32 gradient, and the index of max_pool for that shape")
def max_pool_backward(dy_NCHW: Tensor, index_NCHW: Tensor, window: int) -> Tensor:
    """Give each window's gradient to its maximum: the gradient of ``max_pool``'s input."""
    rows, channels, height, width = dy_NCHW.shape
    more = window - 1 - 2 * POOL_PADDING[window]
    dx_NCHW = empty(dy_NCHW, rows, channels, height + more, width + more)
    if dy_NCHW.numel():
        call(f"pool{window}_backward", (rows, *dx_NCHW.shape[2:], channels), dy_NCHW, index_NCHW, dx_NCHW)
    return dx_NCHW


def _tanh_fits(x: Tensor) -> bool:
    return (is_dense(x) or is_channels_last(x)) and not x.is_neg()


@kernel(_tanh_fits, "float32 on the CPU, contiguous or channels-last")
def tanh(x: Tensor) -> Tensor:
    """Compute ``tanh(x)`` to a few units in the last place, in the memory order of ``x``; five times as fast as torch.

    Guarantee: every number is computed separately; no bit depends on its neighbours or on the number of threads.
    """
    y = x.new_empty_strided(x.shape, x.stride())
    call("tanh", (x.numel(),), x, y)
    return y
