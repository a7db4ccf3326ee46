"""Every unit's own gradient over one micro-batch: forward, backward, then a rule or the fallback for each call.

Shapes: U units, R rows per unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from dpvision.checks import ArgumentError
from dpvision.flow import Microbatch
from dpvision.grads import layout
from dpvision.grads.capture import Call, backpropagate, captured
from dpvision.grads.duties import Duty
from dpvision.grads.fallback import fallback_shares
from dpvision.grads.layout import Layout, Layouts
from dpvision.grads.rules import LayerCall
from dpvision.grads.shares import Share, added
from dpvision.native.channels_last import laid_out

LossFunction = Callable[[Any, Tensor], Tensor]
"""From the model's outputs and the targets to one loss per row."""


@final
@dataclass(frozen=True, eq=False)
class UnitGradients:
    """Every unit's gradient of its own loss, by parameter. Parameters that the loss does not see are absent."""

    shares: dict[nn.Parameter, Share]
    activation_bytes: int


def unit_gradients(
    model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, duties: tuple[Duty, ...], layouts: Layouts
) -> UnitGradients:
    """Gradients of all units of a micro-batch, each as if the unit were alone."""
    units = microbatch.row_weights_UR.shape[0]
    calls = _watched_step(model, loss_fn, microbatch, duties)
    found: dict[nn.Parameter, list[Share]] = {}
    with torch.no_grad():
        for call, place in zip(calls, _places(calls, layouts), strict=True):
            layout.check(call, place, microbatch.inputs.shape[0])
            for parameter, share in _shares_of(call, place, units).items():
                found.setdefault(parameter, []).append(share)
        shares = {parameter: added(shares) for parameter, shares in found.items()}
    return UnitGradients(shares, sum(_bytes(call) for call in calls))


def _watched_step(
    model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, duties: tuple[Duty, ...]
) -> list[Call]:
    """One forward and one backward pass, with every call of a module with a duty recorded."""
    with torch.enable_grad(), captured(duties) as calls:
        losses = row_losses(model, loss_fn, microbatch)
    for call in calls:
        call.check_untouched()
    # Without hooks: a model that recomputes activations on the way back calls its modules again.
    backpropagate(calls, losses, microbatch.row_weights_UR.reshape(-1).to(losses.dtype))
    return calls


def row_losses(model: Callable[[Tensor], Any], loss_fn: LossFunction, microbatch: Microbatch) -> Tensor:
    """One loss per row.

    Guarantee: refuses anything else: a mean or a sum over rows can't be split into units.
    """
    rows = microbatch.row_weights_UR.numel()
    if microbatch.inputs.shape[0] != rows:
        raise ArgumentError(f"row_weights_UR must have one entry per row, got {rows} for {microbatch.inputs.shape[0]}.")
    losses: Any = loss_fn(model(microbatch.inputs), microbatch.targets)
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ArgumentError(
            f"loss_fn must return one loss per row, shape ({rows},), got {shape}. "
            "Use reduction='none' and average within each row."
        )
    return losses


def _bytes(call: Call) -> int:
    """What a call's inputs and output gradients take."""
    tensors = [*(tensor for tensor, _ in call.versions), *call.gradients]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def with_channels_last(microbatch: Microbatch) -> Microbatch:
    """The same pictures, each position's channels together in memory; anything but pictures stays as it is."""
    x = microbatch.inputs
    if x.dim() != 4 or not x.is_floating_point():
        return microbatch
    return replace(microbatch, inputs=laid_out(x))


def _places(calls: list[Call], layouts: Layouts) -> list[Layout]:
    """The layout of each call: by its order among the calls of its module."""
    counts: Counter[str] = Counter()
    places: list[Layout] = []
    for call in calls:
        known = layouts.get(call.duty.name, ())
        order = counts[call.duty.name]
        counts[call.duty.name] += 1
        if order >= len(known) and len(set(known)) != 1:
            raise layout.unexpected(call)
        places.append(known[min(order, len(known) - 1)])
    return places


def _shares_of(call: Call, place: Layout, units: int) -> dict[nn.Parameter, Share]:
    if not call.reaches_loss:
        return {}
    duty = call.duty
    if duty.rule is None:
        return fallback_shares(call, place, units)
    gradient = call.gradients[0]
    if gradient is None:
        return {}
    wanted = frozenset(name for target in duty.targets for name in target.names)
    per_row = {name: rows for name, rows in zip(call.names, call.gradients, strict=False) if rows is not None}
    shares = duty.rule(LayerCall(duty.module, call.args[0].detach(), gradient, units, wanted, per_row, call.y))
    return {target.parameter: shares[name] for target in duty.targets for name in target.names}
