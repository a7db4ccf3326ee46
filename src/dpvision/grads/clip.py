"""From per-unit gradients to the factors that clip them.

Shapes: U units.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from dpvision.grads.shares import Share

SLACK: Final = 32
"""Room below ``clip_norm`` in units of the parameters' rounding, so that rounding can't push a unit above it."""


def clip_factors(
    norms_sq_U: Tensor, real_U: Tensor, *, clip_norm: float, rounding: float
) -> tuple[Tensor, Tensor | None]:
    """The factor of every unit, and the mask of units whose numbers must not be touched at all (or ``None``).

    Guarantee: factor · norm ≤ clip_norm; zero for padding and for a unit whose gradient is not finite.
    """
    finite_U = torch.isfinite(norms_sq_U)
    norm_U = torch.where(finite_U, norms_sq_U, 1.0).sqrt()
    factor_U = (clip_norm * (1 - SLACK * rounding) / norm_U).clamp(max=1.0)
    factor_U = torch.where(finite_U & real_U, factor_U, 0.0)
    dead_U = None if bool(finite_U.all()) else ~finite_U
    return factor_U, dead_U


def factors_of(shares: dict[nn.Parameter, Share], real_U: Tensor, clip_norm: float) -> tuple[Tensor, Tensor | None]:
    """``clip_factors`` for units whose gradient is made of ``shares``.

    Guarantee: one unit's gradient times its factor is at most ``clip_norm`` long, all parameters together.
    """
    norms_sq_U = torch.zeros(real_U.shape, dtype=torch.float64, device=real_U.device)
    for share in shares.values():
        norms_sq_U = norms_sq_U + share.norms_sq()
    rounding = max((torch.finfo(parameter.dtype).eps for parameter in shares), default=0.0)
    return clip_factors(norms_sq_U, real_U, clip_norm=clip_norm, rounding=rounding)
