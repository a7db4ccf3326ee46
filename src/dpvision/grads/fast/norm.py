"""GroupNorm, an activation before or after it, a 2×2 max-pool and a sum in one pass, with per-row gradients of γ and β.

Shapes: N rows, C channels, H height, W width, G groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from dpvision.grads.rules.registry import LayerCall, register
from dpvision.grads.shares import Kept, Share, sum_by_unit
from dpvision.native import norm_act

ACTIVATIONS: Final[dict[str, Any]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "silu": F.silu,
    "selu": F.selu,
    "elu": F.elu,
}

_MOST_VARIANTS: Final = 256


@final
@dataclass(frozen=True)
class Chain:
    """What follows what: norm and activation in either order, then perhaps a 2×2 max-pool."""

    groups: int
    eps: float
    activation: str = "none"
    norm_first: bool = True
    pool: bool = False

    def plain(self, x_NCHW: Tensor, gamma_NC: Tensor | None, beta_NC: Tensor | None, residual: Tensor | None) -> Tensor:
        """The chain in PyTorch's own operations, γ and β given for each row."""
        act = ACTIVATIONS[self.activation]
        y = F.group_norm(x_NCHW if self.norm_first else act(x_NCHW), self.groups, eps=self.eps)
        if gamma_NC is not None:
            y = y * gamma_NC[:, :, None, None]
        if beta_NC is not None:
            y = y + beta_NC[:, :, None, None]
        if self.norm_first:
            y = act(y)
        y = F.max_pool2d(y, 2) if self.pool else y
        return y if residual is None else y + residual


class _NormAct(Function):
    """The native kernels as one operation. γ and β come once for each row, so that their gradients do too."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x_NCHW: Tensor,
        gamma_NC: Tensor | None,
        beta_NC: Tensor | None,
        residual: Tensor | None,
        chain: Chain,
    ) -> Tensor:
        gamma_C = None if gamma_NC is None else gamma_NC[0].contiguous()
        beta_C = None if beta_NC is None else beta_NC[0].contiguous()
        y, mean_NG, rstd_NG = norm_act.forward(
            x_NCHW,
            gamma_C,
            beta_C,
            groups=chain.groups,
            eps=chain.eps,
            activation=chain.activation,
            norm_first=chain.norm_first,
            pool=chain.pool,
            residual=residual,
        )
        ctx.save_for_backward(x_NCHW, gamma_C, beta_C, mean_NG, rstd_NG)
        ctx.chain, ctx.has_residual = chain, residual is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        chain: Chain = ctx.chain
        x_NCHW, gamma_C, beta_C, mean_NG, rstd_NG = ctx.saved_tensors
        dx, dgamma_NC, dbeta_NC = norm_act.backward(
            channels_last(dy),
            x_NCHW,
            gamma_C,
            beta_C,
            mean_NG,
            rstd_NG,
            groups=chain.groups,
            activation=chain.activation,
            norm_first=chain.norm_first,
            pool=chain.pool,
        )
        residual = dy if ctx.has_residual else None
        return dx, dgamma_NC if gamma_C is not None else None, dbeta_NC if beta_C is not None else None, residual, None


@functools.cache
def _compiled(chain: Chain) -> Callable[..., Tensor]:
    return torch.compile(chain.plain)


@final
class FusedNorm(nn.Module):
    """Stands in for a GroupNorm and its neighbours, with the very parameters of that GroupNorm."""

    def __init__(self, norm: nn.GroupNorm, chain: Chain, *, compiled: bool = False) -> None:
        super().__init__()
        self.chain = chain
        self.compiled = compiled
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)

    def per_row(self, rows: int) -> dict[str, Tensor]:
        """γ and β once for each row: views of the parameters, which the loss's gradient can be asked for."""
        return {name: parameter.expand(rows, -1) for name, parameter in self.named_parameters()}

    def forward(self, x: Tensor, residual: Tensor | None = None, *, per_row: dict[str, Tensor] | None = None) -> Tensor:
        """The chain on ``x``, then ``residual`` added."""
        per_row = self.per_row(x.shape[0]) if per_row is None else per_row
        gamma_NC, beta_NC = per_row.get("weight"), per_row.get("bias")
        if self.compiled:
            from torch._dynamo import config  # slow to import, and few need it

            with config.patch(recompile_limit=_MOST_VARIANTS):
                return _compiled(self.chain)(x, gamma_NC, beta_NC, residual)
        if not self._native(x, residual):
            return self.chain.plain(x, gamma_NC, beta_NC, residual)
        return _NormAct.apply(x, gamma_NC, beta_NC, residual, self.chain)

    def _native(self, x: Tensor, residual: Tensor | None) -> bool:
        pool = 2 if self.chain.pool else 1
        if x.dim() != 4 or x.shape[0] == 0 or not is_channels_last(x) or min(x.shape[2:]) < pool:
            return False
        if residual is not None:
            shape = (*x.shape[:2], x.shape[2] // pool, x.shape[3] // pool)
            if residual.shape != shape or not is_channels_last(residual):
                return False
        return norm_act.takes(x, self.chain.groups)


def is_channels_last(x_NCHW: Tensor) -> bool:
    """Whether a float32 picture in a CPU's memory has each position's channels together, positions in order."""
    if x_NCHW.dtype != torch.float32 or x_NCHW.device.type != "cpu" or x_NCHW.dim() != 4:
        return False
    _, channels, height, width = x_NCHW.shape
    wanted = (height * width * channels, 1, width * channels, channels)
    return all(size == 1 or got == want for size, got, want in zip(x_NCHW.shape, x_NCHW.stride(), wanted, strict=True))


def channels_last(x_NCHW: Tensor) -> Tensor:
    """The same numbers, laid out so."""
    if is_channels_last(x_NCHW):
        return x_NCHW
    _, channels, height, width = x_NCHW.shape
    strides = (height * width * channels, 1, width * channels, channels)
    return x_NCHW.new_empty_strided(x_NCHW.shape, strides).copy_(x_NCHW)


def fused_norm(call: LayerCall) -> dict[str, Share]:
    """The rows' gradients are there already; a unit's is the sum over its rows."""
    return {name: Kept(sum_by_unit(call.per_row[name], call.units)) for name in call.wanted}


register(FusedNorm, rule=fused_norm)
