"""GroupNorm, an activation before or after it, a 2×2 max-pool and a sum in one pass, with per-row gradients of γ and β.

γ and β enter the graph once for each row, so that autograd returns every row's own gradient of them and nothing has to
be captured. The chain runs in a kernel, in code of ``torch.compile``, or in plain operations.

Shapes: N rows, C channels, H height, W width, G groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient, sum_by_unit
from dpvision.gradients.rules.rule import LayerCall, register
from dpvision.kernels import norm_act
from dpvision.kernels.channels_last import laid_out
from dpvision.kernels.norm_act import Chain

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


def in_plain_operations(
    chain: Chain, x_NCHW: Tensor, gamma_NC: Tensor | None, beta_NC: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Compute the chain in PyTorch's own operations.

    Args:
        chain: The operations.
        x_NCHW: The input.
        gamma_NC: γ of each row; None means 1.
        beta_NC: β of each row; None means 0.
        residual: Added to the output.
    """
    act = ACTIVATIONS[chain.activation]
    y = F.group_norm(x_NCHW if chain.norm_first else act(x_NCHW), chain.groups, eps=chain.eps)
    if gamma_NC is not None:
        y = y * gamma_NC[:, :, None, None]
    if beta_NC is not None:
        y = y + beta_NC[:, :, None, None]
    if chain.norm_first:
        y = act(y)
    y = F.max_pool2d(y, 2) if chain.pool else y
    return y if residual is None else y + residual


class _NormAct(Function):
    """The kernels as one operation. γ and β come once for each row, and so do their gradients."""

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
        y, mean_NG, rstd_NG = norm_act.forward(x_NCHW, gamma_C, beta_C, chain, residual)
        ctx.save_for_backward(x_NCHW, gamma_C, beta_C, mean_NG, rstd_NG)
        ctx.chain, ctx.has_residual = chain, residual is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NCHW, gamma_C, beta_C, mean_NG, rstd_NG = ctx.saved_tensors
        dx, dgamma_NC, dbeta_NC = norm_act.backward(
            laid_out(dy), x_NCHW, gamma_C, beta_C, (mean_NG, rstd_NG), ctx.chain
        )
        residual = dy if ctx.has_residual else None
        return dx, dgamma_NC if gamma_C is not None else None, dbeta_NC if beta_C is not None else None, residual, None


@functools.cache
def _compiled(chain: Chain) -> Callable[..., Tensor]:
    return torch.compile(functools.partial(in_plain_operations, chain))


@final
class FusedNorm(nn.Module):
    """Replaces a GroupNorm and its neighbours in the graph, with the parameters of that GroupNorm.

    Args:
        norm: The GroupNorm.
        chain: It and what is fused with it.
        compiled: Whether the chain is compiled by ``torch.compile`` instead of run by a kernel.
    """

    def __init__(self, norm: nn.GroupNorm, chain: Chain, *, compiled: bool = False) -> None:
        super().__init__()
        self.chain = chain
        self.compiled = compiled
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)

    def per_row(self, rows: int) -> dict[str, Tensor]:
        """Return γ and β once for each row: views of the parameters, whose gradients autograd can compute."""
        return {name: parameter.expand(rows, -1) for name, parameter in self.named_parameters()}

    def forward(self, x: Tensor, residual: Tensor | None = None, *, per_row: dict[str, Tensor] | None = None) -> Tensor:
        """Compute the chain of ``x``, then add ``residual``; ``per_row`` has γ and β of every row."""
        per_row = self.per_row(x.shape[0]) if per_row is None else per_row
        gamma_NC, beta_NC = per_row.get("weight"), per_row.get("bias")
        if self.compiled:
            from torch._dynamo import config  # slow to import, and few need it

            with config.patch(recompile_limit=_MOST_VARIANTS):
                return _compiled(self.chain)(x, gamma_NC, beta_NC, residual)
        if x.shape[0] == 0 or not norm_act.forward.takes(x, None, None, self.chain, residual):
            return in_plain_operations(self.chain, x, gamma_NC, beta_NC, residual)
        return _NormAct.apply(x, gamma_NC, beta_NC, residual, self.chain)


def fused_norm(call: LayerCall) -> dict[str, LayerGradient]:
    """Return the units' gradients: autograd has computed those of the rows, and a unit's is the sum over its rows."""
    return {name: MaterialisedGradient(sum_by_unit(call.per_row[name], call.units)) for name in call.wanted}


register(FusedNorm, rule=fused_norm)
