"""A model's first meeting with the engine: it is refused by name, or given a plan that is kept from then on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dpvision import native
from dpvision.checks import ArgumentError, PrivacyError
from dpvision.flow import Microbatch
from dpvision.grads.fast import fast_twin, frozen_values
from dpvision.grads.mixing import mixing_place, suspected_place
from dpvision.grads.performance import Performance
from dpvision.grads.plan import Plan, search
from dpvision.grads.probe import probe_like, repeated, restored, same_draws
from dpvision.grads.refusals import mixture, movement, wrong_gradients
from dpvision.grads.units import LossFunction, row_losses
from dpvision.native.memory import give_back_freed_memory

_UNITS: Final = 2
"""Two units are enough to notice each other; every more would cost memory in a large model."""


@final
@dataclass(frozen=True)
class _Known:
    """A plan, what it was made for, and the parts of the model, kept so that nothing else can take their identity."""

    signature: Any
    plan: Plan
    parts: list[Any]


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def plan_for(
    model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, performance: Performance | None = None
) -> Plan:
    """The model's plan, made on first use and again whenever its modules, modes or trainable parameters change.

    Guarantee: raises PrivacyError for a model that mixes units, moves buffers, or whose gradients can't be had.
    """
    performance = performance or Performance()
    with performance.chosen_kernels():
        return _plan_for(model, loss_fn, microbatch, performance)


def _plan_for(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, performance: Performance) -> Plan:
    signature = signature_of(model, loss_fn, microbatch, performance)
    known = _KNOWN.get(model)
    if known is None or known.signature != signature:
        plan, proved = _make(model, loss_fn, microbatch, performance)
        give_back_freed_memory()
        if not proved:
            # Nothing can be compared while gradients are not finite; such units contribute zero in any case.
            return plan
        known = _Known(signature, plan, [*list(model.modules())[1:], *model.parameters(), *model.buffers()])
        _KNOWN[model] = known
    return known.plan


def signature_of(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, performance: Performance) -> Any:
    """All that a plan, or its refusal, hangs on."""
    modules = tuple((name, id(module), module.training) for name, module in model.named_modules())
    parameters = tuple((name, id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False))
    inputs = microbatch.inputs
    rows = (inputs.shape[1:], inputs.dtype, inputs.device, microbatch.row_weights_UR.shape[1])
    speed = (performance.channels_last, performance.kernels, native.available())
    return modules, parameters, rows, frozen_values(model), getattr(loss_fn, "__code__", loss_fn), speed


def _make(
    model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, performance: Performance
) -> tuple[Plan, bool]:
    probe = _finite_probe(model, loss_fn, microbatch)
    drew = _refuse_movement(model, loss_fn, probe)
    _refuse_mixing(model, loss_fn, probe)
    found = search(
        model,
        loss_fn,
        probe,
        evaluate=drew,
        channels_last=performance.channels_last,
        twin=_twin(model, probe, performance),
    )
    if found.wrong:
        raise PrivacyError(wrong_gradients(found.wrong, suspected_place(model, loss_fn, probe)))
    return found.plan, found.proved


def _twin(model: nn.Module, probe: Microbatch, performance: Performance) -> nn.Module | None:
    """The fast twin, where the settings and the inputs allow one."""
    kernels = performance.kernels
    if kernels == "native" and not native.available():
        raise ArgumentError(f"native kernels are not at hand: {native.reason()}. Choose kernels auto or plain.")
    fits = probe.inputs.dtype == torch.float32 and probe.inputs.device.type == "cpu"
    if kernels == "plain" or not performance.channels_last or not fits:
        return None
    if kernels == "auto" and not native.available():
        return None
    return fast_twin(model, compiled=kernels == "compiled")


def _finite_probe(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> Microbatch:
    """Made-up units, unless the model can't digest them: then the first units as they are."""
    probe = probe_like(microbatch, units=_UNITS)
    try:
        with torch.no_grad(), restored(model), same_draws(microbatch.inputs.device):
            digested = bool(torch.isfinite(row_losses(model, loss_fn, probe)).all())
    except (RuntimeError, ValueError, IndexError):
        digested = False
    return probe if digested else repeated(microbatch, units=_UNITS)


def _refuse_movement(model: nn.Module, loss_fn: LossFunction, probe: Microbatch) -> bool:
    """Raise if a forward pass moves buffers or parameters. Returns whether it draws random numbers."""
    with torch.no_grad(), restored(model) as moved, same_draws(probe.inputs.device):
        state = torch.get_rng_state()
        row_losses(model, loss_fn, probe)
        drew = not torch.equal(state, torch.get_rng_state())
    if moved:
        raise PrivacyError(movement(moved))
    return drew


def _refuse_mixing(model: nn.Module, loss_fn: LossFunction, probe: Microbatch) -> None:
    """Raise if one unit's loss depends on another unit's input."""
    place = mixing_place(model, loss_fn, probe)
    if place is not None:
        raise PrivacyError(mixture(place))
