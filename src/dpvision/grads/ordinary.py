"""The mean gradient without clipping or noise, for twins and public pre-training: no guarantee whatever."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from dpvision.checks import Problems
from dpvision.flow import Batch
from dpvision.grads.duties import trainable
from dpvision.grads.performance import Performance
from dpvision.grads.units import LossFunction, row_losses

_UNITS: Final = 128


def ordinary_gradient(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, divisor: float, performance: Performance
) -> dict[str, Tensor]:
    """The gradient of the units' summed losses divided by ``divisor``, by plain autograd.

    BatchNorm is allowed and moves its statistics; it then sees one micro-batch at a time.
    """
    problems = Problems()
    problems.positive("divisor", divisor)
    problems.raise_if_any()
    parameters = trainable(model)
    totals = {name: torch.zeros_like(parameter.detach()) for name, parameter in parameters.items()}
    for microbatch in batch.microbatches(performance.microbatch_size or _UNITS):
        with torch.enable_grad():
            losses = row_losses(model, loss_fn, microbatch)
        if not losses.requires_grad:
            continue
        weights = microbatch.row_weights_UR.reshape(-1).to(losses.dtype)
        found = torch.autograd.grad(losses, list(parameters.values()), weights, allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                totals[name] += gradient
    return {name: total / divisor for name, total in totals.items()}
