"""How to get a model's per-unit gradients, found out once by trying: the usual way, and where it fails, another one.

A plan is proved on a few made-up units: every parameter's gradient is compared with that of a unit by itself. A
parameter that comes out wrong (used behind its owner's back, rows not in front, no batching rule) is handed to the
next module above, in the end to the model itself. What is wrong even there mixes units, and is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpvision.checks import PrivacyError
from dpvision.flow import Microbatch
from dpvision.grads import layout
from dpvision.grads.capture import Call, captured
from dpvision.grads.duties import Duty, Exceptions, duties_of, trainable
from dpvision.grads.layout import Layout, Layouts
from dpvision.grads.mixing import LOSS, mixing_place, suspected_place
from dpvision.grads.probe import evaluation_mode, only_unit, probe_like, repeated, restored, same_draws
from dpvision.grads.shares import Share
from dpvision.grads.units import LossFunction, row_losses, unit_gradients

_UNITS = 2
"""Two units are enough to notice each other; every more would cost memory in a large model."""


@final
@dataclass(frozen=True)
class Plan:
    """Who answers for which parameter, where the rows are, and what a unit needs in memory."""

    exceptions: Exceptions
    layouts: Layouts
    bytes_per_unit: int


_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, Plan]] = WeakKeyDictionary()


def plan_for(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> Plan:
    """The model's plan, made on first use and again whenever its modules, modes or trainable parameters change.

    Guarantee: raises PrivacyError for a model that mixes units, moves buffers, or whose gradients can't be had.
    """
    signature = _signature(model, microbatch)
    known = _KNOWN.get(model)
    if known is None or known[0] != signature:
        plan, proved = _make(model, loss_fn, microbatch)
        if not proved:
            # Nothing can be compared while gradients are not finite; such units contribute zero in any case.
            return plan
        known = (signature, plan)
        _KNOWN[model] = known
    return known[1]


def _signature(model: nn.Module, microbatch: Microbatch) -> Any:
    modules = tuple((name, id(module), module.training) for name, module in model.named_modules())
    parameters = tuple((name, id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False))
    inputs = microbatch.inputs
    return modules, parameters, inputs.shape[1:], inputs.dtype, inputs.device, microbatch.row_weights_UR.shape[1]


def _make(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> tuple[Plan, bool]:
    probe = _finite_probe(model, loss_fn, microbatch)
    drew = refuse_movement(model, loss_fn, probe)
    refuse_mixing(model, loss_fn, probe)
    found = search(model, loss_fn, probe, evaluate=drew)
    if found.wrong:
        raise PrivacyError(wrong_gradients(found.wrong, suspected_place(model, loss_fn, probe)))
    return found.plan, found.proved


@final
@dataclass(frozen=True)
class Found:
    """The best plan, the parameters that it gets wrong, and whether there were finite numbers to tell."""

    plan: Plan
    wrong: list[str]
    proved: bool


def search(model: nn.Module, loss_fn: LossFunction, probe: Microbatch, *, evaluate: bool) -> Found:
    """Find a plan whose gradients are those of single units; in evaluation mode for a model that draws."""
    units = range(probe.row_weights_UR.shape[0])
    with restored(model), same_draws(probe.inputs.device), evaluation_mode(model, when=evaluate):
        _calls(model, loss_fn, probe, duties_of(model, Exceptions()))
        try:
            alone = [gradients_alone(model, loss_fn, only_unit(probe, unit)) for unit in units]
        except (RuntimeError, ValueError) as error:
            raise PrivacyError(_not_alone(suspected_place(model, loss_fn, probe), error)) from error
        plan, wrong = _search(model, loss_fn, probe, alone)
    return Found(plan, wrong, all(math.isfinite(_norm(one)) for one in alone))


def _not_alone(place: str | None, error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".")
    return (
        f"{place or 'the model'} can't take one unit by itself, so units depend on each other ({reason}). "
        "Replace it by a module that treats each row by itself, such as GroupNorm."
    )


def wrong_gradients(names: list[str], place: str | None) -> str:
    """The message for gradients that are not those of a unit by itself."""
    cause = f"{place} mixes units" if place else "units mix, or the gradient depends on the size of the batch"
    return (
        f"per-unit gradients of {listed(names)} differ from those of a unit by itself: {cause}. "
        "Replace what mixes by a module that treats each row by itself, such as GroupNorm."
    )


def _finite_probe(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> Microbatch:
    """Made-up units, unless the model can't digest them: then the first units as they are."""
    probe = probe_like(microbatch, units=_UNITS)
    with torch.no_grad(), restored(model), same_draws(microbatch.inputs.device):
        losses = row_losses(model, loss_fn, probe)
    return probe if bool(torch.isfinite(losses).all()) else repeated(microbatch, units=_UNITS)


def refuse_movement(model: nn.Module, loss_fn: LossFunction, probe: Microbatch) -> bool:
    """Raise if a forward pass moves buffers or parameters. Returns whether it draws random numbers."""
    with torch.no_grad(), restored(model) as moved, same_draws(probe.inputs.device):
        state = torch.get_rng_state()
        row_losses(model, loss_fn, probe)
        drew = not torch.equal(state, torch.get_rng_state())
    if moved:
        raise PrivacyError(movement(moved))
    return drew


def movement(names: Iterable[str]) -> str:
    """The message for buffers that a step moves."""
    return (
        f"a forward pass moves {listed(names)}: what it stores of the private rows would be released without noise. "
        "Use GroupNorm instead of BatchNorm, or put the module into evaluation mode."
    )


def refuse_mixing(model: nn.Module, loss_fn: LossFunction, probe: Microbatch) -> None:
    """Raise if one unit's loss depends on another unit's input."""
    place = mixing_place(model, loss_fn, probe)
    if place is not None:
        raise PrivacyError(mixture(place))


def mixture(place: str) -> str:
    """The message for a place that mixes units."""
    if place == LOSS:
        return (
            "loss_fn mixes units: one unit's loss depends on another unit's row, so clipping bounds nothing. "
            "Return one loss per row, each from its own row alone."
        )
    return (
        f"{place} mixes units: one unit's output depends on another unit's input, so clipping bounds nothing. "
        "Replace it by a module that treats each row by itself, such as GroupNorm for BatchNorm."
    )


def gradients_alone(model: nn.Module, loss_fn: LossFunction, unit: Microbatch) -> dict[str, Tensor]:
    """The gradient of one unit's loss by plain autograd."""
    parameters = trainable(model)
    with torch.enable_grad():
        losses = row_losses(model, loss_fn, unit)
    if not losses.requires_grad:
        return {name: torch.zeros_like(parameter.detach()) for name, parameter in parameters.items()}
    weights = unit.row_weights_UR.reshape(-1).to(losses.dtype)
    found = torch.autograd.grad(losses, list(parameters.values()), weights, allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def _search(
    model: nn.Module, loss_fn: LossFunction, probe: Microbatch, alone: list[dict[str, Tensor]]
) -> tuple[Plan, list[str]]:
    """Hand parameters upwards until all gradients are right; what is still wrong at the end is named."""
    exceptions = Exceptions()
    while True:
        duties = duties_of(model, exceptions)
        layouts, misfits = _find_layouts(model, loss_fn, probe, duties)
        plan, wrong = Plan(exceptions, layouts, 0), misfits
        if not misfits:
            memory, wrong = _try_out(model, loss_fn, probe, plan, alone)
            plan = replace(plan, bytes_per_unit=memory)
        if not wrong:
            return plan, []
        further = _hand_up(model, exceptions, duties, wrong)
        if further is None:
            return plan, wrong
        exceptions = further


def _find_layouts(
    model: nn.Module, loss_fn: LossFunction, probe: Microbatch, duties: tuple[Duty, ...]
) -> tuple[Layouts, list[str]]:
    """The layout of every call, and the parameters of modules whose rows are not in front."""
    names = {parameter: name for name, parameter in trainable(model).items()}
    larger = repeated(probe, units=probe.row_weights_UR.shape[0] + 1)
    small, large = (_calls(model, loss_fn, microbatch, duties) for microbatch in (probe, larger))
    if [call.duty.name for call in small] != [call.duty.name for call in large]:
        raise PrivacyError(
            "the model calls its modules differently for a larger batch, so one unit notices how many others there "
            "are. Make its control flow independent of the batch size."
        )
    layouts: dict[str, tuple[Layout, ...]] = {}
    misfits: list[str] = []
    rows = probe.inputs.shape[0], larger.inputs.shape[0]
    for one, other in zip(small, large, strict=True):
        place = layout.compare(one, other, rows=rows)
        if place is None:
            misfits += [names[target.parameter] for target in one.duty.targets]
        else:
            layouts[one.duty.name] = (*layouts.get(one.duty.name, ()), place)
    return layouts, misfits


def _calls(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, duties: tuple[Duty, ...]) -> list[Call]:
    with torch.enable_grad(), captured(duties) as calls:
        row_losses(model, loss_fn, microbatch)
        for call in calls:
            call.check_untouched()
    return calls


def _try_out(
    model: nn.Module, loss_fn: LossFunction, probe: Microbatch, plan: Plan, alone: list[dict[str, Tensor]]
) -> tuple[int, list[str]]:
    """Bytes that a unit holds, and the parameters whose gradients are not those of a unit by itself."""
    units = probe.row_weights_UR.shape[0]
    step = unit_gradients(model, loss_fn, probe, duties_of(model, plan.exceptions), plan.layouts)
    sizes = [_norm(one) for one in alone]
    wrong = [
        name
        for name, parameter in trainable(model).items()
        if not _right(step.shares.get(parameter), [one[name] for one in alone], sizes)
    ]
    held = sum(share.held_bytes for share in step.shares.values())
    return (step.activation_bytes + held) // units, wrong


def _right(share: Share | None, alone: list[Tensor], sizes: list[float]) -> bool:
    """Whether a share's norms and sums are those of single units, up to rounding and flips at kinks."""
    units = len(alone)
    tolerance = min(0.3, 30 * torch.finfo(alone[0].dtype).eps ** 0.5)
    norms = [0.0] * units if share is None else share.norms_sq().sqrt().tolist()
    for unit, (gradient, size) in enumerate(zip(alone, sizes, strict=True)):
        if not math.isfinite(size):
            continue
        only = torch.zeros(units, dtype=torch.float64, device=gradient.device)
        only[unit] = 1.0
        found = torch.zeros_like(gradient) if share is None else share.weighted_sum(only, None)
        true_norm = float(gradient.double().norm())
        room = tolerance * (true_norm + size / 100)
        if not float((found - gradient).double().norm()) <= room or not abs(norms[unit] - true_norm) <= room:
            return False
    return True


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def _hand_up(model: nn.Module, exceptions: Exceptions, duties: tuple[Duty, ...], wrong: list[str]) -> Exceptions | None:
    """Another way for each wrong parameter: run its module unit by unit, then let the module above answer for it."""
    parameters = trainable(model)
    moved, looped = dict(exceptions.moved), set(exceptions.looped)
    for name in wrong:
        mine = [duty for duty in duties if any(target.parameter is parameters[name] for target in duty.targets)]
        unlooped = {duty.name for duty in mine if duty.rule is None and not duty.looped}
        if unlooped:
            looped |= unlooped
            continue
        home = _above([duty.name for duty in mine])
        if home is None or moved.get(name) == home:
            return None
        moved[name] = home
    return Exceptions(moved, frozenset(looped))


def _above(names: list[str]) -> str | None:
    """The module above one module, or the lowest that contains several; ``None`` above the model itself."""
    if len(names) == 1:
        return None if names[0] == "" else names[0].rpartition(".")[0]
    shared: list[str] = []
    for parts in zip(*(name.split(".") if name else [] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def listed(names: Iterable[str]) -> str:
    """Some names for a message: all of them if few."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
