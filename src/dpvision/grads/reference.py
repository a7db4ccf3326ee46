"""The clipped sum by ``torch.func`` over the whole model: another independent route, in the model's own precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpvision.flow import ClippedSum
from dpvision.grads.duties import places
from dpvision.grads.units import LossFunction
from dpvision.mechanism import Clipping


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
    names = {place: by_parameter[p] for place, p in places(model) if p.requires_grad}
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
