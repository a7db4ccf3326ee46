"""The mean gradient without clipping or noise, for twins and public pre-training: no guarantee whatever."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpvision.config import Performance
from dpvision.errors import ArgumentError, PrivacyError, Problems
from dpvision.gradients.clipped_sum import unclipped_sum_of_batch
from dpvision.gradients.fast.fused_conv import Winograd
from dpvision.gradients.ownership import trainable_parameters
from dpvision.gradients.per_unit import LossFunction, row_losses
from dpvision.gradients.plan import Plan, plan_for, plan_key
from dpvision.privacy.values import Batch, Microbatch

_UNITS: Final = 128
_REFUSED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def ordinary_gradient(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, divisor: float, performance: Performance
) -> dict[str, Tensor]:
    """The gradient of the units' summed losses divided by ``divisor``.

    By the engine where it has fast convolutions for the model, else by plain autograd. There BatchNorm is allowed and
    moves its statistics; it sees one micro-batch at a time.
    """
    problems = Problems()
    problems.positive("divisor", divisor)
    problems.raise_if_any()
    first = next(batch.microbatches(1), None)
    if first is not None and fast_plan(model, loss_fn, first, performance) is not None:
        totals = unclipped_sum_of_batch(model, loss_fn, batch, performance=performance)
    else:
        totals = _by_autograd(model, loss_fn, batch, performance)
    return {
        name: (totals[name] / divisor).to(parameter.dtype) for name, parameter in trainable_parameters(model).items()
    }


def fast_plan(model: nn.Module, loss_fn: LossFunction, like: Microbatch, performance: Performance) -> Plan | None:
    """The engine's plan, for a model that it takes and has fast convolutions for; a model that it refuses has none.

    A refusal is remembered as a plan is: finding it out takes several passes.
    """
    signature = plan_key(model, loss_fn, like, performance)
    if _REFUSED.get(model) == signature:
        return None
    try:
        plan = plan_for(model, loss_fn, like, performance)
    except ArgumentError:
        raise  # settings that can't be had, kernels say
    except (PrivacyError, RuntimeError, ValueError):
        _REFUSED[model] = signature
        return None  # units may mix here: autograd takes any model, and says itself what it can't compute
    layers = () if plan.fused_copy is None else plan.fused_copy.modules()
    return plan if any(isinstance(layer, Winograd) for layer in layers) else None


def _by_autograd(model: nn.Module, loss_fn: LossFunction, batch: Batch, performance: Performance) -> dict[str, Tensor]:
    parameters = trainable_parameters(model)
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
    return totals
