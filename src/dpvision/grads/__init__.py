"""Per-unit gradients: rules per layer, norms, clipping, the single-unit oracle, the preflight check."""

from __future__ import annotations

from dpvision.grads.admission import plan_for
from dpvision.grads.engine import clipped_sum, clipped_sum_of_batch, unclipped_sum_of_batch
from dpvision.grads.ordinary import fast_plan, ordinary_gradient
from dpvision.grads.performance import Performance
from dpvision.grads.preflight import Finding, preflight, require_private_ready
from dpvision.grads.units import LossFunction

__all__ = [
    "Finding",
    "LossFunction",
    "Performance",
    "clipped_sum",
    "clipped_sum_of_batch",
    "fast_plan",
    "ordinary_gradient",
    "plan_for",
    "preflight",
    "require_private_ready",
    "unclipped_sum_of_batch",
]
