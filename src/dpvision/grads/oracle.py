"""The slowest and plainest way to the clipped sum: in float64, one unit at a time, by ordinary autograd.

Nothing of the engine is used here, so that the two can't share a mistake.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from dpvision.flow import ClippedSum
from dpvision.grads.units import LossFunction
from dpvision.mechanism import Clipping


def unit_gradients_by_loop(
    model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor, *, rows_per_unit: int = 1
) -> list[dict[str, Tensor]]:
    """Each unit's own gradient in float64, the unit alone in its batch."""
    twin = copy.deepcopy(model).double()
    parameters = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    inputs, targets = (x.double() if x.is_floating_point() else x for x in (inputs, targets))
    gradients: list[dict[str, Tensor]] = []
    for first in range(0, inputs.shape[0], rows_per_unit):
        mine = slice(first, first + rows_per_unit)
        loss = loss_fn(twin(inputs[mine]), targets[mine]).mean()
        found = _gradient(loss, list(parameters.values()))
        gradients.append(dict(zip(parameters, found, strict=True)))
    return gradients


def clipped_sum_by_loop(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    *,
    clip_norm: float,
    clipping: Clipping = "flat",
    rows_per_unit: int = 1,
) -> ClippedSum:
    """The same number as ``clipped_sum``, in float64."""
    gradients = unit_gradients_by_loop(model, loss_fn, inputs, targets, rows_per_unit=rows_per_unit)
    zeros = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters() if p.requires_grad}
    return clip_and_add(gradients, zeros, clip_norm=clip_norm, clipping=clipping)


def clip_and_add(
    gradients: list[dict[str, Tensor]], zeros: dict[str, Tensor], *, clip_norm: float, clipping: Clipping = "flat"
) -> ClippedSum:
    """Each unit's gradient brought to at most ``clip_norm``, added to ``zeros``; one that is not finite is left out."""
    total = {name: zero.detach() for name, zero in zeros.items()}
    for gradient in gradients:
        if math.isfinite(_norm(gradient)):
            clipped = _clipped(gradient, clip_norm, clipping)
            total = {name: so_far + clipped[name] for name, so_far in total.items()}
    return ClippedSum(total, clip_norm)


def _clipped(gradient: dict[str, Tensor], clip_norm: float, clipping: Clipping) -> dict[str, Tensor]:
    """One unit's gradient, clipped as a whole or layer by layer."""
    if clipping == "per_layer":
        layers = {name.rpartition(".")[0] for name in gradient}
        parts = [{name: g for name, g in gradient.items() if name.rpartition(".")[0] == layer} for layer in layers]
        share = clip_norm / math.sqrt(len(layers))
        clipped = [_clipped(part, share, "flat") for part in parts]
        return {name: g for part in clipped for name, g in part.items()}
    norm = _norm(gradient)
    factor = clip_norm / (norm + 0.01 if clipping == "automatic" else max(norm, clip_norm))
    return {name: factor * part for name, part in gradient.items()}


def _norm(gradient: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(part.square().sum()) for part in gradient.values()))


def _gradient(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    if not loss.requires_grad or not parameters:
        return tuple(torch.zeros_like(parameter) for parameter in parameters)
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
