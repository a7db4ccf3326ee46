"""Two independent routes to the clipped sum, which the engine is tested against.

``clipped_sum_by_loop`` is the slowest and plainest: float64, one unit at a time, ordinary autograd.
``clipped_sum_by_func`` uses ``torch.func`` over the whole model, in its own precision. Neither uses the engine, so that
they can't share a mistake with it.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpvision.gradients.ownership import parameter_places
from dpvision.gradients.per_unit import LossFunction
from dpvision.privacy.mechanism import Clipping
from dpvision.privacy.values import ClippedSum


def unit_gradients_by_loop(
    model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor, *, rows_per_unit: int = 1
) -> list[dict[str, Tensor]]:
    """Return each unit's own gradient in float64, the unit alone in its batch."""
    double = copy.deepcopy(model).double()
    parameters = {name: p for name, p in double.named_parameters() if p.requires_grad}
    inputs, targets = (x.double() if x.is_floating_point() else x for x in (inputs, targets))
    gradients: list[dict[str, Tensor]] = []
    for first in range(0, inputs.shape[0], rows_per_unit):
        mine = slice(first, first + rows_per_unit)
        loss = loss_fn(double(inputs[mine]), targets[mine]).mean()
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
    """Compute ``clipped_sum`` in float64; the arguments are the same."""
    gradients = unit_gradients_by_loop(model, loss_fn, inputs, targets, rows_per_unit=rows_per_unit)
    zeros = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters() if p.requires_grad}
    return clip_and_add(gradients, zeros, clip_norm=clip_norm, clipping=clipping)


def clip_and_add(
    gradients: list[dict[str, Tensor]], zeros: dict[str, Tensor], *, clip_norm: float, clipping: Clipping = "flat"
) -> ClippedSum:
    """Scale each unit's gradient to at most ``clip_norm`` and add it to ``zeros``; leave out those not finite."""
    total = {name: zero.detach() for name, zero in zeros.items()}
    for gradient in gradients:
        if math.isfinite(_norm(gradient)):
            clipped = _clipped(gradient, clip_norm, clipping)
            total = {name: so_far + clipped[name] for name, so_far in total.items()}
    return ClippedSum(total, clip_norm)


def _clipped(gradient: dict[str, Tensor], clip_norm: float, clipping: Clipping) -> dict[str, Tensor]:
    """Return one unit's gradient, clipped as a whole or layer by layer."""
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
    return math.sqrt(sum(float(part.double().square().sum()) for part in gradient.values()))


def _gradient(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    if not loss.requires_grad or not parameters:
        return tuple(torch.zeros_like(parameter) for parameter in parameters)
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


def clipped_sum_by_func(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    *,
    clip_norm: float,
    clipping: Clipping = "flat",
    rows_per_unit: int = 1,
) -> ClippedSum:
    """Compute ``clipped_sum`` with all per-unit gradients in memory at once; the arguments are the same."""
    values = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    by_parameter = {parameter: name for name, parameter in model.named_parameters()}
    names = {place: by_parameter[p] for place, p in parameter_places(model) if p.requires_grad}
    if not inputs.shape[0]:
        return ClippedSum({name: torch.zeros_like(value) for name, value in values.items()}, clip_norm)

    def unit_loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        everywhere = {place: parameters[name] for place, name in names.items()}
        return loss_fn(functional_call(model, everywhere, (x,), tie_weights=False), y).mean()

    by_unit = (x.unflatten(0, (-1, rows_per_unit)) for x in (inputs, targets))
    gradients = vmap(grad(unit_loss), in_dims=(None, 0, 0))(values, *by_unit)
    units = inputs.shape[0] // rows_per_unit
    each = [{name: gradient[unit] for name, gradient in gradients.items()} for unit in range(units)]
    return clip_and_add(
        each, {name: torch.zeros_like(value) for name, value in values.items()}, clip_norm=clip_norm, clipping=clipping
    )
