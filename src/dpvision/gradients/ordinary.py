"""Gradients and outputs without privacy, by the engine's fused layers where they compute the same.

``ordinary_gradient`` trains non-private baselines and on public data; ``fused_forward`` evaluates a model faster.
Nothing here has a privacy guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpvision import kernels
from dpvision.config import Performance
from dpvision.errors import ArgumentError, PrivacyError, Problems
from dpvision.gradients.clipped_sum import unclipped_sum_of_batch
from dpvision.gradients.fast import fused_copy, weight_cache
from dpvision.gradients.fast.fused_conv import WinogradConv
from dpvision.gradients.ownership import trainable_parameters
from dpvision.gradients.per_unit import LossFunction, row_losses
from dpvision.gradients.plan import Plan, plan_for, plan_key
from dpvision.kernels.channels_last import laid_out
from dpvision.privacy.values import Batch, Microbatch

_UNITS: Final = 128
_TOLERANCE: Final = 1e-3  # of the largest output: far above rounding, far below what another layer would do
_REFUSED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def ordinary_gradient(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, divisor: float, performance: Performance
) -> dict[str, Tensor]:
    """Compute the gradient of the units' summed losses divided by ``divisor``.

    By the engine where it has fast convolutions for the model, else by plain autograd. There BatchNorm is allowed and
    moves its statistics; it sees one micro-batch at a time.

    Args:
        model: the model or the part of it that trains.
        loss_fn: one loss per row.
        batch: the units.
        divisor: what the sum is divided by, above zero.
        performance: speed and memory settings.

    Returns:
        By name, the gradient of each trainable parameter, in its own dtype.
    """
    problems = Problems()
    problems.positive("divisor", divisor)
    problems.raise_if_any()
    first = next(batch.microbatches(1), None)
    if first is not None and fast_plan(model, loss_fn, first, performance) is not None:
        totals = unclipped_sum_of_batch(model, loss_fn, batch, performance=performance)
    else:
        totals = _by_autograd(model, loss_fn, batch, performance)
    parameters = trainable_parameters(model)
    return {name: (totals[name] / divisor).to(parameter.dtype) for name, parameter in parameters.items()}


def fast_plan(model: nn.Module, loss_fn: LossFunction, like: Microbatch, performance: Performance) -> Plan | None:
    """Return the engine's plan, if it accepts the model and has fast convolutions for it.

    A refusal is remembered as a plan is, because finding it out takes several passes.
    """
    key = plan_key(model, loss_fn, like, performance)
    if _REFUSED.get(model) == key:
        return None
    try:
        plan = plan_for(model, loss_fn, like, performance, own_code=False)
    except ArgumentError:
        raise  # settings that can't be met, such as native kernels
    except (PrivacyError, RuntimeError, ValueError):
        _REFUSED[model] = key
        return None  # units may mix here: autograd takes any model, and says itself what it can't compute
    layers = () if plan.fused_copy is None else plan.fused_copy.modules()
    return plan if any(isinstance(layer, WinogradConv) for layer in layers) else None


def _by_autograd(model: nn.Module, loss_fn: LossFunction, batch: Batch, performance: Performance) -> dict[str, Tensor]:
    """Return the summed gradient by plain autograd, one micro-batch at a time."""
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


@contextmanager
def fused_forward(model: nn.Module, rows: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Give the block a faster function to call instead of the model, whose weights must not change meanwhile.

    Args:
        model: a model in evaluation mode.
        rows: a few of its inputs, on which the fused layers must agree with it.

    Yields:
        The fused copy, or the model itself where there is none or it disagrees.
    """
    fused = _fused_copy(model, rows)
    if fused is None:
        yield model
        return
    with weight_cache(fused):
        yield lambda inputs: fused(_arranged(inputs))


def _fused_copy(model: nn.Module, rows: Tensor) -> nn.Module | None:
    """Return the fused copy, if it gives the model's outputs for ``rows``."""
    on_cpu = rows.device.type == "cpu" and rows.dtype == torch.float32 and len(rows) > 0
    fused = fused_copy(model) if on_cpu and kernels.available() else None
    if fused is None:
        return None
    with torch.no_grad():
        expected = model(rows)
        try:
            found = fused.forward(_arranged(rows))  # called as a module, a graph prints its errors
        except RuntimeError:  # some models reshape in ways that only the other layout allows
            return None
    largest = float(expected.abs().max())  # NaN compares as false: then the model itself is used
    agrees = expected.shape == found.shape and bool((found - expected).abs().max() <= _TOLERANCE * largest)
    return fused if agrees else None


def _arranged(inputs: Tensor) -> Tensor:
    """Lay images out as the fused layers want them; anything else stays as it is."""
    return laid_out(inputs) if inputs.dim() == 4 else inputs
