"""From per-unit gradients to their clipped sum.

Shapes: U units.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from dpvision.grads.shares import Share

SLACK: Final = 8
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


def clipped_sums(shares: dict[nn.Parameter, Share], real_U: Tensor, clip_norm: float) -> dict[nn.Parameter, Tensor]:
    """Each unit's gradient over all parameters scaled to at most ``clip_norm``, then added up over units.

    The sums still want their share's ``finish``.

    Guarantee: one unit moves the result by at most ``clip_norm`` in L2, all parameters together.
    """
    norms_sq_U = torch.zeros(real_U.shape, dtype=torch.float64, device=real_U.device)
    for share in shares.values():
        norms_sq_U = norms_sq_U + share.norms_sq()
    rounding = max((torch.finfo(parameter.dtype).eps for parameter in shares), default=0.0)
    factor_U, dead_U = clip_factors(norms_sq_U, real_U, clip_norm=clip_norm, rounding=rounding)
    return {parameter: share.weighted_sum(factor_U, dead_U) for parameter, share in shares.items()}
