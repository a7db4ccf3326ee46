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
from dpvision.gradients.batch_axes import AxesByModule, BatchAxes, CallShapes, backpropagate, capture_calls
from dpvision.gradients.fast import fast_twin, frozen_values
from dpvision.gradients.fast.weight_cache import held_through_step
from dpvision.gradients.layer_gradient import LayerGradient
from dpvision.gradients.ownership import OwnershipOverrides, ParameterOwner, parameter_owners, trainable_parameters
from dpvision.gradients.per_unit import LossFunction, UnitGradients, row_losses, unit_gradients, with_channels_last
from dpvision.gradients.refusals import mixture, movement, not_alone, wrong_gradients
from dpvision.gradients.separability import find_mixing, suspect_mixing
from dpvision.gradients.synthetic_batch import (
    evaluation_mode,
    model_restored,
    repeat_units,
    repeatable_randomness,
    single_unit,
    synthetic_batch,
)
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

    overrides: OwnershipOverrides
    axes_by_module: AxesByModule
    bytes_per_unit: int
    channels_last: bool
    fused_copy: nn.Module | None = None

    def network(self, model: nn.Module) -> nn.Module:
        """What is run in the model's place: its fast fused_copy with the same parameters, or the model itself."""
        return model if self.fused_copy is None else self.fused_copy

    def arranged(self, microbatch: Microbatch) -> Microbatch:
        """The micro-batch in the memory format of the plan."""
        return with_channels_last(microbatch) if self.channels_last else microbatch


@final
@dataclass(frozen=True)
class CheckedPlan:
    """The best plan, the parameters that it gets wrong, and whether there were finite numbers to tell."""

    plan: Plan
    wrong: list[str]
    proved: bool


def find_plan(
    model: nn.Module,
    loss_fn: LossFunction,
    synthetic: Microbatch,
    *,
    evaluate: bool,
    channels_last: bool = True,
    fused_copy: nn.Module | None = None,
) -> CheckedPlan:
    """Find a plan whose gradients are those of single units; in evaluation mode for a model that draws.

    ``fused_copy`` is tried first, and used only if it gives these very gradients.
    """
    with model_restored(model), repeatable_randomness(synthetic.inputs.device), evaluation_mode(model, when=evaluate):
        _shapes(model, loss_fn, synthetic, parameter_owners(model, OwnershipOverrides()))
        found = _search_fused_copy(model, fused_copy, loss_fn, synthetic)
        return found or _search_formats(model, loss_fn, synthetic, channels_last=channels_last)


def _gradients_alone(model: nn.Module, loss_fn: LossFunction, synthetic: Microbatch, unit: int) -> dict[str, Tensor]:
    """The gradient of one unit's loss by plain autograd, the unit alone in its batch."""
    alone = single_unit(synthetic, unit)
    parameters = trainable_parameters(model)
    with torch.enable_grad():
        try:
            losses = row_losses(model, loss_fn, alone)
        except (RuntimeError, ValueError) as error:
            raise PrivacyError(not_alone(suspect_mixing(model, loss_fn, synthetic), error)) from error
    if not losses.requires_grad:
        return {name: torch.zeros_like(parameter.detach()) for name, parameter in parameters.items()}
    weights = alone.row_weights_UR.reshape(-1).to(losses.dtype)
    found = torch.autograd.grad(losses, list(parameters.values()), weights, allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def _search_fused_copy(
    model: nn.Module, fused_copy: nn.Module | None, loss_fn: LossFunction, synthetic: Microbatch
) -> CheckedPlan | None:
    """The fast fused_copy, if it works for this model in the usual way and gives the model's gradients."""
    if fused_copy is None:
        return None
    give_back_freed_memory()
    try:
        found = _try_plan(
            model, loss_fn, synthetic, Plan(OwnershipOverrides(), {}, 0, _channels_last_pays(model), fused_copy)
        )
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, DPVisionError):
        return None  # the model itself is examined next, and refused there if it must be
    return None if found.wrong else found


def _search_formats(
    model: nn.Module, loss_fn: LossFunction, synthetic: Microbatch, *, channels_last: bool
) -> CheckedPlan:
    """The faster memory format, unless the model can't take it: some reshape in ways that depend on it."""
    pictures = synthetic.inputs.dim() == 4 and synthetic.inputs.device.type == "cpu"
    if channels_last and pictures and _channels_last_pays(model):
        try:
            found = _search(model, loss_fn, synthetic, channels_last=True)
        except RuntimeError:
            found = None
        if found is not None and not found.wrong:
            return found
    return _search(model, loss_fn, synthetic, channels_last=False)


def _channels_last_pays(model: nn.Module) -> bool:
    """Not where all that learns are linear layers: whatever flattens pictures for them would turn them back."""
    owners = (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    return any(type(module) is not nn.Linear for module in owners)


def _search(model: nn.Module, loss_fn: LossFunction, synthetic: Microbatch, *, channels_last: bool) -> CheckedPlan:
    """Hand parameters upwards until all gradients are right; what is still wrong at the end is named."""
    overrides = OwnershipOverrides()
    while True:
        found = _try_plan(model, loss_fn, synthetic, Plan(overrides, {}, 0, channels_last))
        further = _hand_up(model, overrides, parameter_owners(model, overrides), found.wrong) if found.wrong else None
        if further is None:
            return found
        overrides = further


def _find_layouts(
    model: nn.Module, loss_fn: LossFunction, synthetic: Microbatch, owners: tuple[ParameterOwner, ...]
) -> tuple[AxesByModule, list[str]]:
    """The axes of every call, and the parameters of modules whose rows are not in front."""
    names = {parameter: name for name, parameter in trainable_parameters(model).items()}
    small = _shapes(model, loss_fn, synthetic, owners, backward=True)
    larger = repeat_units(synthetic, units=synthetic.row_weights_UR.shape[0] + 1)
    large = _shapes(model, loss_fn, larger, owners)
    if [call.owner.name for call in small] != [call.owner.name for call in large]:
        raise PrivacyError(
            "the model calls its modules differently for a larger batch, so one unit notices how many others there "
            "are. Make its control flow independent of the batch size."
        )
    axes_by_module: dict[str, tuple[BatchAxes, ...]] = {}
    misfits: list[str] = []
    rows = synthetic.inputs.shape[0], larger.inputs.shape[0]
    for one, other in zip(small, large, strict=True):
        place = batch_axes.compare(one, other, rows=rows)
        if place is None:
            misfits += [names[target.parameter] for target in one.owner.targets]
        else:
            axes_by_module[one.owner.name] = (*axes_by_module.get(one.owner.name, ()), place)
    return axes_by_module, misfits


def _shapes(
    model: nn.Module,
    loss_fn: LossFunction,
    microbatch: Microbatch,
    owners: tuple[ParameterOwner, ...],
    *,
    backward: bool = False,
) -> list[CallShapes]:
    """The calls of one forward pass, without their tensors; with ``backward``, which outputs reach the loss too."""
    with torch.enable_grad(), capture_calls(owners) as calls:
        losses = row_losses(model, loss_fn, microbatch)
    for call in calls:
        call.check_untouched()
    if backward:
        backpropagate(calls, losses, microbatch.row_weights_UR.reshape(-1).to(losses.dtype))
    return [CallShapes.from_call(call) for call in calls]


def _try_plan(model: nn.Module, loss_fn: LossFunction, synthetic: Microbatch, plan: Plan) -> CheckedPlan:
    """The plan with its axes_by_module and the bytes that a unit holds, beside the parameters that it gets wrong."""
    network = plan.network(model)
    owners = parameter_owners(network, plan.overrides)
    arranged = plan.arranged(synthetic)
    axes_by_module, misfits = _find_layouts(network, loss_fn, arranged, owners)
    plan = replace(plan, axes_by_module=axes_by_module)
    if misfits:
        return CheckedPlan(plan, misfits, proved=False)
    give_back_freed_memory()  # of other shapes: a large model's would lie beside what comes
    with held_through_step(network):
        step = unit_gradients(network, loss_fn, arranged, owners, plan.axes_by_module)
        return _compared(model, loss_fn, synthetic, plan, step)


@torch.no_grad()
def _compared(
    model: nn.Module, loss_fn: LossFunction, synthetic: Microbatch, plan: Plan, step: UnitGradients
) -> CheckedPlan:
    """Compare a step with each unit by itself, one unit after the other: their gradients are not held side by side.

    It uses the step up.
    """
    units = synthetic.row_weights_UR.shape[0]
    # Norms first, as in every step: some layer_gradients take their sums from what the norms have formed.
    norms = {parameter: each.norms_sq().sqrt().tolist() for parameter, each in step.layer_gradients.items()}
    wrong, held, proved = set[str](), 0, True
    for unit in range(units):
        alone = _gradients_alone(model, loss_fn, synthetic, unit)
        size = _norm(alone)
        proved &= math.isfinite(size)
        for name, parameter in trainable_parameters(model).items():
            layer_gradient, gradient = step.layer_gradients.get(parameter), alone.pop(name)
            norm = 0.0 if layer_gradient is None else norms[parameter][unit]
            if math.isfinite(size) and not _right(layer_gradient, norm, gradient, size, unit=unit, units=units):
                wrong.add(name)
            if unit == units - 1:
                held += 0 if layer_gradient is None else layer_gradient.held_bytes
                step.layer_gradients.pop(parameter, None)
    plan = replace(plan, bytes_per_unit=(step.activation_bytes + held) // units)
    return CheckedPlan(plan, [name for name in trainable_parameters(model) if name in wrong], proved)


def _right(
    layer_gradient: LayerGradient | None, norm: float, alone: Tensor, size: float, *, unit: int, units: int
) -> bool:
    """Whether norm and gradient of one unit are what it has by itself, up to rounding and flips at kinks."""
    only = torch.zeros(units, dtype=torch.float64, device=alone.device)
    only[unit] = 1.0
    found = (
        torch.zeros_like(alone)
        if layer_gradient is None
        else layer_gradient.finish(layer_gradient.add_weighted_sum(None, only, None))
    )
    true_norm = _length(alone)
    room = _TOLERANCE.get(alone.dtype, 0.3) * (true_norm + size / 100) + _NOTHING
    return _length(found.sub_(alone)) <= room and abs(norm - true_norm) <= room


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.hypot(*(_length(gradient) for gradient in gradients.values()))


def _length(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _hand_up(
    model: nn.Module, overrides: OwnershipOverrides, owners: tuple[ParameterOwner, ...], wrong: list[str]
) -> OwnershipOverrides | None:
    """Another way for each wrong parameter: run its module unit by unit, then let the module above answer for it."""
    parameters = trainable_parameters(model)
    moved, looped = dict(overrides.moved), set(overrides.looped)
    for name in wrong:
        mine = [owner for owner in owners if any(target.parameter is parameters[name] for target in owner.targets)]
        unlooped = {owner.name for owner in mine if owner.rule is None and not owner.looped}
        if unlooped:
            looped |= unlooped
            continue
        home = _above([owner.name for owner in mine])
        if home is None or moved.get(name) == home:
            return None
        moved[name] = home
    return OwnershipOverrides(moved, frozenset(looped))


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
    signature = plan_key(model, loss_fn, microbatch, performance)
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


def plan_key(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, performance: Performance) -> Any:
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
    synthetic = _finite_batch(model, loss_fn, microbatch)
    drew = _refuse_movement(model, loss_fn, synthetic)
    _refuse_mixing(model, loss_fn, synthetic)
    found = find_plan(
        model,
        loss_fn,
        synthetic,
        evaluate=drew,
        channels_last=performance.channels_last,
        fused_copy=_fused_copy(model, synthetic, performance),
    )
    if found.wrong:
        raise PrivacyError(wrong_gradients(found.wrong, suspect_mixing(model, loss_fn, synthetic)))
    return found.plan, found.proved


def _fused_copy(model: nn.Module, synthetic: Microbatch, performance: Performance) -> nn.Module | None:
    """The fast fused_copy, where the settings and the inputs allow one."""
    kernels = performance.kernels
    if kernels == "native" and not native.available():
        raise ArgumentError(f"native kernels are not at hand: {native.reason()}. Choose kernels auto or plain.")
    fits = synthetic.inputs.dtype == torch.float32 and synthetic.inputs.device.type == "cpu"
    if kernels == "plain" or not performance.channels_last or not fits:
        return None
    if kernels == "auto" and not native.available():
        return None
    return fast_twin(model, compiled=kernels == "compiled")


def _finite_batch(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> Microbatch:
    """Made-up units, unless the model can't digest them: then the first units as they are."""
    synthetic = synthetic_batch(microbatch, units=_UNITS)
    try:
        with torch.no_grad(), model_restored(model), repeatable_randomness(microbatch.inputs.device):
            digested = bool(torch.isfinite(row_losses(model, loss_fn, synthetic)).all())
    except (RuntimeError, ValueError, IndexError):
        digested = False
    return synthetic if digested else repeat_units(microbatch, units=_UNITS)


def _refuse_movement(model: nn.Module, loss_fn: LossFunction, synthetic: Microbatch) -> bool:
    """Raise if a forward pass moves buffers or parameters. Returns whether it draws random numbers."""
    with torch.no_grad(), model_restored(model) as moved, repeatable_randomness(synthetic.inputs.device):
        state = torch.get_rng_state()
        row_losses(model, loss_fn, synthetic)
        drew = not torch.equal(state, torch.get_rng_state())
    if moved:
        raise PrivacyError(movement(moved))
    return drew


def _refuse_mixing(model: nn.Module, loss_fn: LossFunction, synthetic: Microbatch) -> None:
    """Raise if one unit's loss depends on another unit's input."""
    place = find_mixing(model, loss_fn, synthetic)
    if place is not None:
        raise PrivacyError(mixture(place))
