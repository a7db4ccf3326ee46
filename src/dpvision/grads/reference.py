"""The clipped sum by ``torch.func`` over the whole model: another independent route, in the model's own precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpvision.flow import ClippedSum
from dpvision.grads.duties import places
from dpvision.grads.units import LossFunction


def clipped_sum_by_func(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    *,
    clip_norm: float,
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
    squares = [g.double().square().reshape(g.shape[0], -1).sum(1) for g in gradients.values()]
    norm = torch.stack(squares).sum(0).sqrt()
    factor = torch.where(norm.isfinite(), (clip_norm / norm).clamp(max=1.0), 0.0)
    clean = {name: g.masked_fill(~norm.isfinite().view(-1, *[1] * (g.dim() - 1)), 0.0) for name, g in gradients.items()}
    total = {name: torch.einsum("u,u...->...", factor.to(g.dtype), g) for name, g in clean.items()}
    return ClippedSum(total, clip_norm)
