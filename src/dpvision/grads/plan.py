"""How to get a model's per-unit gradients: the usual way, and where it fails, another one.

A plan is proved on a few units: every parameter's gradient is compared with that of a unit by itself. A parameter that
comes out wrong (used behind its owner's back, rows not in front, no batching rule) is handed to the next module above,
in the end to the model itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from torch import Tensor, nn

from dpvision.checks import DPVisionError, PrivacyError
from dpvision.flow import Microbatch
from dpvision.grads import layout
from dpvision.grads.capture import backpropagate, captured
from dpvision.grads.duties import Duty, Exceptions, duties_of, trainable
from dpvision.grads.fast.holding import held_through_step
from dpvision.grads.layout import Layout, Layouts, Shapes
from dpvision.grads.mixing import suspected_place
from dpvision.grads.probe import evaluation_mode, only_unit, repeated, restored, same_draws
from dpvision.grads.refusals import not_alone
from dpvision.grads.shares import Share
from dpvision.grads.units import LossFunction, UnitGradients, row_losses, unit_gradients, with_channels_last
from dpvision.native.memory import give_back_freed_memory

_TOLERANCE: Final = {torch.float64: 1e-7, torch.float32: 0.1}
"""A mistake in the wiring is of order one. In float32, activations that flip at a kink alone make a few percent."""


_NOTHING: Final = 1e-15
"""A gradient that is exactly zero has a norm of about this, because of what squares may lose by underflow."""


@final
@dataclass(frozen=True)
class Plan:
    """What is run, who answers for which parameter, where the rows are, and what a unit needs in memory."""

    exceptions: Exceptions
    layouts: Layouts
    bytes_per_unit: int
    channels_last: bool
    twin: nn.Module | None = None

    def network(self, model: nn.Module) -> nn.Module:
        """What is run in the model's place: its fast twin with the same parameters, or the model itself."""
        return model if self.twin is None else self.twin

    def arranged(self, microbatch: Microbatch) -> Microbatch:
        """The micro-batch in the memory format of the plan."""
        return with_channels_last(microbatch) if self.channels_last else microbatch


@final
@dataclass(frozen=True)
class Found:
    """The best plan, the parameters that it gets wrong, and whether there were finite numbers to tell."""

    plan: Plan
    wrong: list[str]
    proved: bool


def search(
    model: nn.Module,
    loss_fn: LossFunction,
    probe: Microbatch,
    *,
    evaluate: bool,
    channels_last: bool = True,
    twin: nn.Module | None = None,
) -> Found:
    """Find a plan whose gradients are those of single units; in evaluation mode for a model that draws.

    ``twin`` is tried first, and used only if it gives these very gradients.
    """
    units = range(probe.row_weights_UR.shape[0])
    with restored(model), same_draws(probe.inputs.device), evaluation_mode(model, when=evaluate):
        _shapes(model, loss_fn, probe, duties_of(model, Exceptions()))
        alone = [_gradients_alone(model, loss_fn, probe, unit) for unit in units]
        plan, wrong = _search_twin(model, twin, loss_fn, probe, alone), []
        if plan is None:
            plan, wrong = _search_formats(model, loss_fn, probe, alone, channels_last=channels_last)
    return Found(plan, wrong, all(math.isfinite(_norm(one)) for one in alone))


def _gradients_alone(model: nn.Module, loss_fn: LossFunction, probe: Microbatch, unit: int) -> dict[str, Tensor]:
    """The gradient of one unit's loss by plain autograd, the unit alone in its batch."""
    alone = only_unit(probe, unit)
    parameters = trainable(model)
    with torch.enable_grad():
        try:
            losses = row_losses(model, loss_fn, alone)
        except (RuntimeError, ValueError) as error:
            raise PrivacyError(not_alone(suspected_place(model, loss_fn, probe), error)) from error
    if not losses.requires_grad:
        return {name: torch.zeros_like(parameter.detach()) for name, parameter in parameters.items()}
    weights = alone.row_weights_UR.reshape(-1).to(losses.dtype)
    found = torch.autograd.grad(losses, list(parameters.values()), weights, allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def _search_twin(
    model: nn.Module, twin: nn.Module | None, loss_fn: LossFunction, probe: Microbatch, alone: list[dict[str, Tensor]]
) -> Plan | None:
    """The fast twin, if it works for this model in the usual way and gives the model's gradients."""
    if twin is None:
        return None
    channels_last = _channels_last_pays(model)
    probe = with_channels_last(probe) if channels_last else probe
    give_back_freed_memory()
    try:
        layouts, misfits = _find_layouts(twin, loss_fn, probe, duties_of(twin, Exceptions()))
        plan = Plan(Exceptions(), layouts, 0, channels_last, twin)
        memory, wrong = (0, misfits) if misfits else _try_out(model, loss_fn, probe, plan, alone)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, DPVisionError):
        return None  # the model itself is examined next, and refused there if it must be
    return None if wrong else replace(plan, bytes_per_unit=memory)


def _search_formats(
    model: nn.Module, loss_fn: LossFunction, probe: Microbatch, alone: list[dict[str, Tensor]], *, channels_last: bool
) -> tuple[Plan, list[str]]:
    """The faster memory format, unless the model can't take it: some reshape in ways that depend on it."""
    pictures = probe.inputs.dim() == 4 and probe.inputs.device.type == "cpu"
    if channels_last and pictures and _channels_last_pays(model):
        try:
            plan, wrong = _search(model, loss_fn, with_channels_last(probe), alone, channels_last=True)
        except RuntimeError:
            plan, wrong = None, []
        if plan is not None and not wrong:
            return plan, wrong
    return _search(model, loss_fn, probe, alone, channels_last=False)


def _channels_last_pays(model: nn.Module) -> bool:
    """Not where all that learns are linear layers: whatever flattens pictures for them would turn them back."""
    owners = (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    return any(type(module) is not nn.Linear for module in owners)


def _search(
    model: nn.Module, loss_fn: LossFunction, probe: Microbatch, alone: list[dict[str, Tensor]], *, channels_last: bool
) -> tuple[Plan, list[str]]:
    """Hand parameters upwards until all gradients are right; what is still wrong at the end is named."""
    exceptions = Exceptions()
    while True:
        duties = duties_of(model, exceptions)
        layouts, misfits = _find_layouts(model, loss_fn, probe, duties)
        plan, wrong = Plan(exceptions, layouts, 0, channels_last), misfits
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
    small = _shapes(model, loss_fn, probe, duties, backward=True)
    larger = repeated(probe, units=probe.row_weights_UR.shape[0] + 1)
    large = _shapes(model, loss_fn, larger, duties)
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


def _shapes(
    model: nn.Module,
    loss_fn: LossFunction,
    microbatch: Microbatch,
    duties: tuple[Duty, ...],
    *,
    backward: bool = False,
) -> list[Shapes]:
    """The calls of one forward pass, without their tensors; with ``backward``, which outputs reach the loss too."""
    with torch.enable_grad(), captured(duties) as calls:
        losses = row_losses(model, loss_fn, microbatch)
    for call in calls:
        call.check_untouched()
    if backward:
        backpropagate(calls, losses, microbatch.row_weights_UR.reshape(-1).to(losses.dtype))
    return [Shapes.of(call) for call in calls]


def _try_out(
    model: nn.Module, loss_fn: LossFunction, probe: Microbatch, plan: Plan, alone: list[dict[str, Tensor]]
) -> tuple[int, list[str]]:
    """Bytes that a unit holds, and the parameters whose gradients are not those of a unit by itself."""
    network = plan.network(model)
    give_back_freed_memory()  # of other shapes: a large model's would lie beside what comes
    with held_through_step(network):
        step = unit_gradients(network, loss_fn, probe, duties_of(network, plan.exceptions), plan.layouts)
        return _compared(model, step, probe.row_weights_UR.shape[0], alone)


@torch.no_grad()
def _compared(
    model: nn.Module, step: UnitGradients, units: int, alone: list[dict[str, Tensor]]
) -> tuple[int, list[str]]:
    """As ``_try_out``. It uses the step up: what a share made of itself to be compared is gone before the next one."""
    sizes, wrong, held = [_norm(one) for one in alone], list[str](), 0
    for name, parameter in trainable(model).items():
        share = step.shares.pop(parameter, None)
        if not _right(share, [one[name] for one in alone], sizes):
            wrong.append(name)
        held += 0 if share is None else share.held_bytes
    return (step.activation_bytes + held) // units, wrong


def _right(share: Share | None, alone: list[Tensor], sizes: list[float]) -> bool:
    """Whether a share's norms and sums are those of single units, up to rounding and flips at kinks."""
    units = len(alone)
    tolerance = _TOLERANCE.get(alone[0].dtype, 0.3)
    norms = [0.0] * units if share is None else share.norms_sq().sqrt().tolist()
    for unit, (gradient, size) in enumerate(zip(alone, sizes, strict=True)):
        if not math.isfinite(size):
            continue
        only = torch.zeros(units, dtype=torch.float64, device=gradient.device)
        only[unit] = 1.0
        found = torch.zeros_like(gradient) if share is None else share.finish(share.add_weighted_sum(None, only, None))
        true_norm = _length(gradient)
        room = tolerance * (true_norm + size / 100) + _NOTHING
        if not _length(found.sub_(gradient)) <= room or not abs(norms[unit] - true_norm) <= room:
            return False
    return True


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.hypot(*(_length(gradient) for gradient in gradients.values()))


def _length(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


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
