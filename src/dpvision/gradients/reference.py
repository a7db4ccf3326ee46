"""The slowest and plainest way to the clipped sum: in float64, one unit at a time, by ordinary autograd.

Nothing of the engine is used here, so that the two can't share a mistake.

The clipped sum by ``torch.func`` over the whole model: another independent route, in the model's own precision.
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
    """The same number as ``clipped_sum``; all per-unit gradients are in memory at once."""
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
    squares = {name: g.double().square().reshape(g.shape[0], -1).sum(1) for name, g in gradients.items()}
    finite = torch.stack(list(squares.values())).sum(0).isfinite()
    factors = _factors(squares, clip_norm, clipping)
    clean = {name: g.masked_fill(~finite.view(-1, *[1] * (g.dim() - 1)), 0.0) for name, g in gradients.items()}
    factors = {name: factor.where(finite, 0.0) for name, factor in factors.items()}
    total = {name: torch.einsum("u,u...->...", factors[name].to(g.dtype), g) for name, g in clean.items()}
    return ClippedSum(total, clip_norm)


def _factors(squares: dict[str, Tensor], clip_norm: float, clipping: Clipping) -> dict[str, Tensor]:
    """Each parameter's factors, from the squared norms of all parameters."""
    layer_of = {name: name.rpartition(".")[0] if clipping == "per_layer" else "" for name in squares}
    layers = set(layer_of.values())
    bound = clip_norm / len(layers) ** 0.5
    factors: dict[str, Tensor] = {}
    for layer in layers:
        members = [name for name in squares if layer_of[name] == layer]
        norm = torch.stack([squares[name] for name in members]).sum(0).sqrt()
        factor = bound / (norm + 0.01 if clipping == "automatic" else norm.clamp(min=bound))
        for name in members:
            factors[name] = factor
    return factors
