"""From per-unit gradients to the factors that clip them: one factor a unit, or one for each layer of a unit.

Shapes: U units.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn

from dpvision.checks import Problems
from dpvision.grads.duties import trainable
from dpvision.grads.shares import Share
from dpvision.mechanism import CLIPPINGS, Clipping

SLACK: Final = 32
"""Room below ``clip_norm`` in units of the parameters' rounding, so that rounding can't push a unit above it."""

GAMMA: Final = 0.01
"""What automatic clipping adds to every norm before it divides by it: a public constant (Bu et al. 2022)."""

Factors = dict[nn.Parameter, Tensor]
"""Of every parameter, each unit's factor. Parameters that are clipped together share one tensor."""


@final
@dataclass(frozen=True, eq=False)
class Clip:
    """What bounds a unit: the style, and which parameters are clipped together and how far.

    Guarantee: a unit's gradient times its factors is at most ``clip_norm`` long, all parameters together.
    """

    clipping: Clipping
    bound: float
    groups: Mapping[nn.Parameter, str]

    @staticmethod
    def of(model: nn.Module, *, clip_norm: float, clipping: Clipping = "flat") -> Clip:
        """One group of all parameters, or one for each layer.

        With L layers each is clipped to clip_norm/√L, whatever the others need. Every trainable parameter counts, so
        that L is a fact of the model: not of the units, nor of how the engine runs it.
        """
        problems = Problems()
        problems.positive("clip_norm", clip_norm)
        problems.require(clipping in CLIPPINGS, f"clipping must be one of {', '.join(CLIPPINGS)}, got {clipping!r}.")
        problems.raise_if_any()
        by_layer = clipping == "per_layer"
        groups = {p: name.rpartition(".")[0] if by_layer else "" for name, p in trainable(model).items()}
        return Clip(clipping, clip_norm / math.sqrt(max(1, len(set(groups.values())))), groups)

    @torch.no_grad()
    def factors(self, shares: dict[nn.Parameter, Share], real_U: Tensor) -> tuple[Factors, Tensor | None]:
        """Factors for units whose gradient is made of ``shares``; and the units that must not be touched at all.

        A unit that is not finite in one layer is left out of all of them.
        """
        norms_sq: dict[str, Tensor] = {}
        for parameter, share in shares.items():
            group, norms_sq_U = self.groups[parameter], share.norms_sq().double()
            norms_sq[group] = norms_sq[group] + norms_sq_U if group in norms_sq else norms_sq_U
        finite_U = _all_finite(norms_sq.values(), like=real_U)
        rounding = max((torch.finfo(parameter.dtype).eps for parameter in shares), default=0.0)
        by_group = {
            group: clip_factors(
                norms_sq_U, finite_U & real_U, bound=self.bound, rounding=rounding, clipping=self.clipping
            )
            for group, norms_sq_U in norms_sq.items()
        }
        dead_U = None if bool(finite_U.all()) else ~finite_U
        return {parameter: by_group[self.groups[parameter]] for parameter in shares}, dead_U


def clip_factors(
    norms_sq_U: Tensor, counted_U: Tensor, *, bound: float, rounding: float, clipping: Clipping = "flat"
) -> Tensor:
    """The factor of every unit, from the squared norm of what is clipped together.

    Guarantee: factor · norm ≤ bound; exactly zero for units that don't count, whatever their norm is.
    """
    norm_U = torch.where(counted_U, norms_sq_U, 1.0).sqrt()
    below = bound * (1 - SLACK * rounding)
    factor_U = below / (norm_U + GAMMA) if clipping == "automatic" else (below / norm_U).clamp(max=1.0)
    return torch.where(counted_U, factor_U, 0.0)


def _all_finite(norms_sq: Iterable[Tensor], *, like: Tensor) -> Tensor:
    """Units whose norm is finite in every group."""
    finite = [torch.isfinite(norms_sq_U) for norms_sq_U in norms_sq]
    return functools.reduce(torch.logical_and, finite) if finite else torch.ones_like(like, dtype=torch.bool)
