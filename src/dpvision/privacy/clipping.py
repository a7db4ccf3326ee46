"""Clipping: from per-unit gradient norms to the factors that bound each unit's contribution.

One factor per unit, or one per unit and layer. This is where the sensitivity of the sum comes from: ``clipped_sum``
multiplies every unit's gradient by its factors and does nothing else to it.

Shapes: U units.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import torch
from torch import Tensor, nn

from dpvision.errors import Problems

if TYPE_CHECKING:
    from dpvision.gradients.layer_gradient import LayerGradient
from dpvision.kernels import unit_sums as kernel
from dpvision.privacy.mechanism import CLIPPINGS, Clipping

# Room below ``clip_norm`` in units of the parameters' rounding, so that rounding can't push a unit above it.
SLACK: Final = 32
# What automatic clipping adds to every norm before it divides by it: a public constant (Bu et al. 2022).
GAMMA: Final = 0.01

# Each unit's factor, by parameter. Parameters that are clipped together share one tensor.
Factors = dict[nn.Parameter, Tensor]


@final
@dataclass(frozen=True, eq=False)
class Clipper:
    """The bound on a unit: the style, and which parameters are clipped together and to what length.

    Attributes:
        clipping: the style.
        bound: the L2 bound on each group of parameters.
        groups: the group of each parameter.

    Guarantee: a unit's gradient times its factors is at most ``clip_norm`` long, all parameters together.
    """

    clipping: Clipping
    bound: float
    groups: Mapping[nn.Parameter, str]

    @staticmethod
    def for_parameters(
        parameters: dict[str, nn.Parameter], *, clip_norm: float, clipping: Clipping = "flat"
    ) -> Clipper:
        """Make one group of all parameters, or one for each layer.

        With L layers each is clipped to clip_norm/√L, whatever the others need.

        Args:
            parameters: all that train, by name, so that L is a fact of the model: not of the units, nor of how the
                engine runs it.
            clip_norm: L2 bound on all parameters of a unit together, above zero.
            clipping: "flat", "automatic" or "per_layer".

        Raises:
            ArgumentError: an argument breaks its rule.
        """
        problems = Problems()
        problems.positive("clip_norm", clip_norm)
        problems.require(clipping in CLIPPINGS, f"clipping must be one of {', '.join(CLIPPINGS)}, got {clipping!r}.")
        problems.raise_if_any()
        by_layer = clipping == "per_layer"
        groups = {p: name.rpartition(".")[0] if by_layer else "" for name, p in parameters.items()}
        return Clipper(clipping, clip_norm / math.sqrt(max(1, len(set(groups.values())))), groups)

    @torch.no_grad()
    def factors(
        self, layer_gradients: dict[nn.Parameter, LayerGradient], real_U: Tensor
    ) -> tuple[Factors, Tensor | None]:
        """Compute the factors of all units of a micro-batch.

        Args:
            layer_gradients: the units' gradients.
            real_U: False for padding units, which get the factor zero.

        Returns:
            The factors, and the units whose norm is not finite in some layer (None if there are none); those are left
            out of all layers.
        """
        parts: dict[str, list[Tensor]] = {}
        for parameter, layer_gradient in layer_gradients.items():
            parts.setdefault(self.groups[parameter], []).append(layer_gradient.norms_sq().double())
        limits = FactorLimits.for_bound(
            self.bound, frozenset(parameter.dtype for parameter in layer_gradients), clipping=self.clipping
        )
        by_group, nonfinite_U = _factors_by_kernel(parts, real_U, limits) or _factors(parts, real_U, limits)
        return {parameter: by_group[self.groups[parameter]] for parameter in layer_gradients}, nonfinite_U


@final
@dataclass(frozen=True, kw_only=True)
class FactorLimits:
    """A factor is ``below / (norm + added)``, but at most ``most``, and zero if that is less than ``least``."""

    below: float
    added: float
    most: float
    least: float

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def for_bound(bound: float, dtypes: frozenset[torch.dtype], *, clipping: Clipping) -> FactorLimits:
        """Return limits for which factor · norm stays below ``bound`` when both are rounded to any of these dtypes.

        Factors below the smallest normal number are zero: rounding could make them much larger.
        """
        kinds = [torch.finfo(dtype) for dtype in dtypes]
        below = bound * (1 - SLACK * max((kind.eps for kind in kinds), default=0.0))
        least = max((kind.tiny for kind in kinds), default=0.0)
        if clipping == "automatic":
            return FactorLimits(below=below, added=GAMMA, most=math.inf, least=least)
        return FactorLimits(below=below, added=0.0, most=1.0, least=least)


# By group, the units' squared norms of each parameter, which add up.
Parts = dict[str, list[Tensor]]
# By group, the units' factors; and the units without a finite norm, if there are any.
ByGroup = tuple[dict[str, Tensor], Tensor | None]


def _factors(parts: Parts, real_U: Tensor, limits: FactorLimits) -> ByGroup:
    norms_sq = {group: functools.reduce(torch.add, some) for group, some in parts.items()}
    finite_U = functools.reduce(torch.logical_and, map(_is_norm, norms_sq.values()), real_U.new_ones(()))
    by_group = {group: clip_factors(some_U, finite_U & real_U, limits) for group, some_U in norms_sq.items()}
    return by_group, None if bool(finite_U.all()) else ~finite_U


def _is_norm(norms_sq_U: Tensor) -> Tensor:
    return norms_sq_U.isfinite() & (norms_sq_U >= 0)


def _factors_by_kernel(parts: Parts, real_U: Tensor, limits: FactorLimits) -> ByGroup | None:
    """Return ``_factors`` by a kernel, or None if there is none or a unit has no finite norm."""
    by_group: dict[str, Tensor] = {}
    for group, some in parts.items():
        factor_U = kernel.clip_factors.attempt(
            some, real_U, below=limits.below, added=limits.added, most=limits.most, least=limits.least
        )
        if factor_U is None:
            return None
        by_group[group] = factor_U
    return by_group, None


def clip_factors(norms_sq_U: Tensor, counted_U: Tensor, limits: FactorLimits) -> Tensor:
    """Compute the factor of every unit.

    Args:
        norms_sq_U: squared norms of what is clipped together.
        counted_U: False for units that do not count: padding, and norms that are not finite.
        limits: the bound.

    Guarantee: factor · norm ≤ bound; exactly zero for units that don't count, whatever their norm is.
    """
    factor_U = (limits.below / (norms_sq_U.sqrt() + limits.added)).clamp(max=limits.most)
    return torch.where(counted_U & (factor_U >= limits.least), factor_U, 0.0)
