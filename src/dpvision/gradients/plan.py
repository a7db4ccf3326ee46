"""How to get a model's per-unit gradients: the usual way, and where it fails, another one.

A plan is proved on a few units: every parameter's gradient is compared with that of a unit by itself. A parameter that
comes out wrong (used behind its owner's back, rows not in front, no batching rule) is handed to the next module above,
in the end to the model itself.

A model's first meeting with the engine: it is refused by name, or given a plan that is kept from then on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpvision import kernels as native
from dpvision.config import Performance
from dpvision.errors import ArgumentError, DPVisionError, PrivacyError
from dpvision.gradients import batch_axes
from dpvision.gradients.batch_axes import Layout, Layouts, Shapes, backpropagate, captured
from dpvision.gradients.fast import fast_twin, frozen_values
from dpvision.gradients.fast.weight_cache import held_through_step
from dpvision.gradients.layer_gradient import Share
from dpvision.gradients.ownership import Duty, Exceptions, duties_of, trainable
from dpvision.gradients.per_unit import LossFunction, UnitGradients, row_losses, unit_gradients, with_channels_last
from dpvision.gradients.refusals import mixture, movement, not_alone, wrong_gradients
from dpvision.gradients.separability import mixing_place, suspected_place
from dpvision.gradients.synthetic_batch import evaluation_mode, only_unit, probe_like, repeated, restored, same_draws
from dpvision.kernels.memory import give_back_freed_memory
from dpvision.privacy.values import Microbatch

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
    with restored(model), same_draws(probe.inputs.device), evaluation_mode(model, when=evaluate):
        _shapes(model, loss_fn, probe, duties_of(model, Exceptions()))
        found = _search_twin(model, twin, loss_fn, probe)
        return found or _search_formats(model, loss_fn, probe, channels_last=channels_last)


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


def _search_twin(model: nn.Module, twin: nn.Module | None, loss_fn: LossFunction, probe: Microbatch) -> Found | None:
    """The fast twin, if it works for this model in the usual way and gives the model's gradients."""
    if twin is None:
        return None
    give_back_freed_memory()
    try:
        found = _tried_out(model, loss_fn, probe, Plan(Exceptions(), {}, 0, _channels_last_pays(model), twin))
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, DPVisionError):
        return None  # the model itself is examined next, and refused there if it must be
    return None if found.wrong else found


def _search_formats(model: nn.Module, loss_fn: LossFunction, probe: Microbatch, *, channels_last: bool) -> Found:
    """The faster memory format, unless the model can't take it: some reshape in ways that depend on it."""
    pictures = probe.inputs.dim() == 4 and probe.inputs.device.type == "cpu"
    if channels_last and pictures and _channels_last_pays(model):
        try:
            found = _search(model, loss_fn, probe, channels_last=True)
        except RuntimeError:
            found = None
        if found is not None and not found.wrong:
            return found
    return _search(model, loss_fn, probe, channels_last=False)


def _channels_last_pays(model: nn.Module) -> bool:
    """Not where all that learns are linear layers: whatever flattens pictures for them would turn them back."""
    owners = (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    return any(type(module) is not nn.Linear for module in owners)


def _search(model: nn.Module, loss_fn: LossFunction, probe: Microbatch, *, channels_last: bool) -> Found:
    """Hand parameters upwards until all gradients are right; what is still wrong at the end is named."""
    exceptions = Exceptions()
    while True:
        found = _tried_out(model, loss_fn, probe, Plan(exceptions, {}, 0, channels_last))
        further = _hand_up(model, exceptions, duties_of(model, exceptions), found.wrong) if found.wrong else None
        if further is None:
            return found
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
        place = batch_axes.compare(one, other, rows=rows)
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


def _tried_out(model: nn.Module, loss_fn: LossFunction, probe: Microbatch, plan: Plan) -> Found:
    """The plan with its layouts and the bytes that a unit holds, beside the parameters that it gets wrong."""
    network = plan.network(model)
    duties = duties_of(network, plan.exceptions)
    arranged = plan.arranged(probe)
    layouts, misfits = _find_layouts(network, loss_fn, arranged, duties)
    plan = replace(plan, layouts=layouts)
    if misfits:
        return Found(plan, misfits, proved=False)
    give_back_freed_memory()  # of other shapes: a large model's would lie beside what comes
    with held_through_step(network):
        step = unit_gradients(network, loss_fn, arranged, duties, plan.layouts)
        return _compared(model, loss_fn, probe, plan, step)


@torch.no_grad()
def _compared(model: nn.Module, loss_fn: LossFunction, probe: Microbatch, plan: Plan, step: UnitGradients) -> Found:
    """Compare a step with each unit by itself, one unit after the other: their gradients are not held side by side.

    It uses the step up.
    """
    units = probe.row_weights_UR.shape[0]
    # Norms first, as in every step: some shares take their sums from what the norms have formed.
    norms = {parameter: share.norms_sq().sqrt().tolist() for parameter, share in step.shares.items()}
    wrong, held, proved = set[str](), 0, True
    for unit in range(units):
        alone = _gradients_alone(model, loss_fn, probe, unit)
        size = _norm(alone)
        proved &= math.isfinite(size)
        for name, parameter in trainable(model).items():
            share, gradient = step.shares.get(parameter), alone.pop(name)
            norm = 0.0 if share is None else norms[parameter][unit]
            if math.isfinite(size) and not _right(share, norm, gradient, size, unit=unit, units=units):
                wrong.add(name)
            if unit == units - 1:
                held += 0 if share is None else share.held_bytes
                step.shares.pop(parameter, None)
    plan = replace(plan, bytes_per_unit=(step.activation_bytes + held) // units)
    return Found(plan, [name for name in trainable(model) if name in wrong], proved)


def _right(share: Share | None, norm: float, alone: Tensor, size: float, *, unit: int, units: int) -> bool:
    """Whether a share's norm and gradient of one unit are what it has by itself, up to rounding and flips at kinks."""
    only = torch.zeros(units, dtype=torch.float64, device=alone.device)
    only[unit] = 1.0
    found = torch.zeros_like(alone) if share is None else share.finish(share.add_weighted_sum(None, only, None))
    true_norm = _length(alone)
    room = _TOLERANCE.get(alone.dtype, 0.3) * (true_norm + size / 100) + _NOTHING
    return _length(found.sub_(alone)) <= room and abs(norm - true_norm) <= room


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
