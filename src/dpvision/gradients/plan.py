"""How a model's per-unit gradients are computed: chosen once, proved on synthetic units, and cached.

``plan_for`` is what every step calls. For a model that it has not seen in this form, it refuses moving buffers and
mixing units, then searches for a plan: the fused copy of the model if it gives the model's own gradients, else the
model in the faster memory format, else as it is. A parameter whose gradient comes out wrong (used outside of its
module, rows not in the first dimension, no batching rule) is assigned to the next module above, in the end to the model
itself. ``check_model`` is the same examination for people: on their own rows, in float64 where the model allows it, and
with all findings at once.

Shapes: U units, R rows per unit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from dpvision import kernels as native
from dpvision.config import Performance, Precision
from dpvision.errors import ArgumentError, DPVisionError, PrivacyError, brief
from dpvision.gradients.devices import generator_states, require_device
from dpvision.gradients.fast import frozen_callable, frozen_values, fused_copy, fused_graph, weight_cache
from dpvision.gradients.ownership import (
    OwnershipOverrides,
    ParameterOwner,
    module_label,
    parameter_owners,
    trainable_parameters,
)
from dpvision.gradients.per_unit import (
    AxesByModule,
    BatchAxes,
    LossFunction,
    RowsPerEntry,
    axes_of_calls,
    row_losses,
    run_captured,
    unit_gradients,
    with_channels_last,
)
from dpvision.gradients.proved_graph import ProvedGraph, clear_refusals, losses_as_they_are, noted_losses, prove
from dpvision.gradients.separability import (
    LOSS,
    MIXING_REMEDY,
    Finding,
    Reference,
    Trial,
    blind_batch,
    compare_with_single_units,
    evaluation_mode,
    find_mixing,
    leaking_layers,
    mixing_units,
    model_restored,
    model_state,
    moving_state,
    other_gradients,
    parameter_hooks,
    refuse,
    repeat_units,
    repeatable_randomness,
    synthetic_batch,
    try_forward,
    unfaithful,
    unfaithful_gradients,
    unfit_parts,
    units_in_order,
    uses_batch_statistics,
    wrong_gradients,
)
from dpvision.kernels.memory import give_back_freed_memory
from dpvision.privacy.values import Microbatch, RowTree, map_tensors, row_tensors

_UNITS: Final = 2  # enough to depend on each other; every more would cost memory in a large model
_MOST_CHECKED_UNITS: Final = 4
_ELSEWHERE: Final = 0  # rows in another dimension than the first


@final
@dataclass(frozen=True)
class Plan:
    """How the gradients of one model are computed.

    Attributes:
        overrides: which modules own which parameters, where it is not the module itself.
        axes_by_module: where the rows are in what modules are given and return.
        bytes_per_unit: memory that one unit needs.
        channels_last: whether images are laid out channels-last.
        fused_copy: a faster network with the same parameters, to be run in the model's place.
        proof: the proved graph of a user's own code, which is run in its place; None for our own models.
        own_bits: sizes of micro-batches at which layers of low precision were compared (``require_own_bits``).
    """

    overrides: OwnershipOverrides
    axes_by_module: AxesByModule
    bytes_per_unit: int
    channels_last: bool
    fused_copy: nn.Module | None = None
    proof: ProvedGraph | None = None
    own_bits: set[int] = field(default_factory=set)

    def network(self, model: nn.Module) -> nn.Module:
        """Return what is run in the model's place: the fused copy, the proved graph, or the model itself."""
        if self.fused_copy is not None:
            return self.fused_copy
        return model if self.proof is None else self.proof.network

    def loss(self, loss_fn: LossFunction) -> LossFunction:
        """Return the loss of what is run: a proved graph ends in its losses."""
        return loss_fn if self.proof is None else noted_losses

    def arranged(self, microbatch: Microbatch) -> Microbatch:
        """Return the micro-batch as the plan's network takes it, in its memory format."""
        if self.proof is not None:
            microbatch = self.proof.microbatch(microbatch)
        return with_channels_last(microbatch) if self.channels_last else microbatch


@final
@dataclass(frozen=True)
class CheckedPlan:
    """A plan, the parameters that it gets wrong, and whether there were finite gradients to compare with."""

    plan: Plan
    wrong: list[str]
    proved: bool


@final
@dataclass(frozen=True)
class _CachedPlan:
    """A plan, its key, and the parts of the model, held so that no other object can take their identity."""

    key: Any
    plan: Plan
    parts: list[Any]


_CACHE: WeakKeyDictionary[nn.Module, _CachedPlan] = WeakKeyDictionary()


def plan_for(
    model: nn.Module,
    loss_fn: LossFunction,
    microbatch: Microbatch,
    performance: Performance | None = None,
    *,
    own_code: bool = True,
) -> Plan:
    """Return the model's plan, made on first use and again whenever anything in ``plan_key`` changes.

    Args:
        model: the model or the part of it that trains.
        loss_fn: one loss per row.
        microbatch: rows whose shape and type the model will be run on; their values are not used if the model gives
            finite losses for synthetic ones.
        performance: speed and memory settings.
        own_code: whether model and loss may be anyone's code: then it is proved that rows do not influence each other,
            and the proved graph is run. False for the models and losses of this package, whose proof is in the tests.

    Returns:
        A plan whose gradients were compared with those of single units.

    Raises:
        PrivacyError: the model mixes units, changes its buffers, can't be traced, or its per-unit gradients cannot be
            computed.
        ArgumentError: native kernels are required and not available.
    """
    performance = performance or Performance()
    require_device(microbatch.device)
    with performance.chosen_kernels():
        return _cached_plan(model, loss_fn, microbatch, performance, own_code)


def _cached_plan(
    model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, performance: Performance, own_code: bool
) -> Plan:
    key = (plan_key(model, loss_fn, microbatch, performance), own_code)
    known = _CACHE.get(model)
    if known is None or known.key != key:
        if own_code:
            with clear_refusals():
                found = _make_proved_plan(model, loss_fn, microbatch, performance)
            if key[0] != plan_key(model, loss_fn, microbatch, performance):
                raise PrivacyError(
                    "the model or the loss keeps something from one call to the next, in a list, an object or a "
                    "closure, which a traced graph would freeze. Compute it before training, from public values."
                )
        else:
            found = _make_plan(model, loss_fn, microbatch, performance)
        give_back_freed_memory()
        if not found.proved:
            # Nothing can be compared while gradients are not finite; such units contribute zero in any case.
            return found.plan
        known = _CachedPlan(key, found.plan, [*list(model.modules())[1:], *model.parameters(), *model.buffers()])
        _CACHE[model] = known
    return known.plan


def plan_key(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, performance: Performance) -> Any:
    """Return everything a plan, or its refusal, depends on; used as the cache key."""
    trees = tree_flatten((microbatch.inputs, microbatch.targets))
    leaves = tuple((x.shape[1:], x.dtype, x.device) if isinstance(x, Tensor) else None for x in trees[0])
    rows = (leaves, trees[1], microbatch.row_weights_UR.shape[1])
    speed = (performance.channels_last, performance.kernels, performance.precision, native.available())
    return model_key(model), rows, frozen_callable(loss_fn), speed


def model_key(model: nn.Module) -> Any:
    """Return everything of a model but the values of its weights that a plan depends on: modules, modes, settings."""
    modules = tuple((name, id(module), module.training) for name, module in model.named_modules())
    held = model.named_parameters(remove_duplicate=False)
    parameters = tuple((name, id(p), p.requires_grad, parameter_hooks(p)) for name, p in held)
    return modules, parameters, frozen_values(model)


def _make_plan(
    model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, performance: Performance
) -> CheckedPlan:
    """Refuse a model that is not separable, then search for a plan."""
    batch, trial = _batch_to_try(model, loss_fn, microbatch)
    refuse(moving_state(model, trial.moved))
    refuse(mixing_units(model, find_mixing(model, loss_fn, batch)))
    found = find_plan(
        model,
        loss_fn,
        batch,
        evaluate=trial.draws_random,
        channels_last=performance.channels_last,
        fused_copy=_fused_copy(model, batch, performance),
    )
    refuse(wrong_gradients(model, found.wrong))
    return found


def _make_proved_plan(
    model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, performance: Performance
) -> CheckedPlan:
    """Prove that rows do not influence each other, and search for a plan that runs the proved graph."""
    refuse(unfit_parts(model))
    batch, trial = blind_trial(model, loss_fn, microbatch, units=_UNITS)
    refuse(moving_state(model, trial.moved))
    refuse(mixing_units(model, find_mixing(model, loss_fn, batch)))
    with model_restored(model):
        proof = prove(model, loss_fn, microbatch)
    network, rows = proof.network, proof.microbatch(batch)
    check_faithful(model, loss_fn, proof, batch)
    _require_gradients(network, rows)
    random = trial.draws_random
    if random:
        code = Reference(model, loss_fn, batch)
        refuse(other_gradients(model, unfaithful_gradients(code, network, rows)))
    found = find_plan(
        network,
        losses_as_they_are,
        rows,
        evaluate=False,
        channels_last=performance.channels_last,
        fused_copy=_fused_copy(network, rows, performance, proved=True),
        reference=Reference(network, losses_as_they_are, rows, in_batch=True)
        if random
        else Reference(model, loss_fn, batch),
    )
    refuse(wrong_gradients(model, found.wrong))
    _refuse_leaks(found.plan.network(network), rows, found.plan.overrides)
    return replace(found, plan=replace(found.plan, proof=proof))


def check_faithful(model: nn.Module, loss_fn: LossFunction, proof: ProvedGraph, microbatch: Microbatch) -> None:
    """Refuse code whose losses are not those of its proved graph, on units of these shapes.

    Raises:
        PrivacyError: they differ.
    """

    def losses(rows: Microbatch) -> Tensor:
        return proof.network(*proof.microbatch(rows).inputs)[: rows.rows]

    if unfaithful(model, loss_fn, losses, microbatch):
        raise PrivacyError(
            "the model or the loss gives other results when it is called again, or for other numbers of rows: it keeps "
            "state, draws random numbers outside of torch, or lets units mix. Make the result a function of row and "
            "weights."
        )


def require_own_bits(
    model: nn.Module, loss_fn: LossFunction, plan: Plan, batch: Microbatch, precision: Precision
) -> None:
    """Refuse layers of low precision in which one bit of a unit depends on its place or on the other units.

    Args:
        model: the model.
        loss_fn: one loss per row.
        plan: how its gradients are computed.
        batch: synthetic units, as many as a step computes at once: kernels are chosen by shape.
        precision: of the layers.

    Raises:
        PrivacyError: a unit's inputs of a layer, or its gradients there, have other bits elsewhere; or the model can't
            be computed in this precision.
    """
    network, units = plan.network(model), batch.row_weights_UR.shape[0]
    owners = parameter_owners(network, plan.overrides)

    def numbers(rows: Microbatch) -> tuple[list[tuple[str, Tensor]], bool]:
        with repeatable_randomness(rows.device):
            states = generator_states(rows.device)
            calls = run_captured(network, plan.loss(loss_fn), plan.arranged(rows), owners, precision=precision)
            draws = not all(map(torch.equal, states, generator_states(rows.device)))
        found = []
        for call, axes in zip(calls, axes_of_calls(calls, plan.axes_by_module), strict=True):
            tensors = [*tree_leaves((call.args, call.kwargs)), *call.gradients]
            entries = [*axes.inputs, *axes.outputs[: len(call.gradients)]]
            found += [
                (call.owner.label, x.unflatten(0, (units, -1)))
                for x, each in zip(tensors, entries, strict=True)
                if isinstance(x, Tensor) and each
            ]
        return found, draws

    try:
        before, draws = numbers(batch)
        # Random numbers belong to places. Where a model draws some, units stay, and every second one is exchanged.
        order = [unit - unit % 2 if draws else (unit + 1) % units for unit in range(units)]
        after, _ = numbers(units_in_order(batch, order))
    except (RuntimeError, TypeError) as error:
        raise PrivacyError(
            f"the model can't be computed in {precision} ({brief(' '.join(str(error).split()))}). Use float32."
        ) from error
    places = range(0, units, 2 if draws else 1)
    units_there = [order[place] for place in places]
    for (label, one), (_, two) in zip(before, after, strict=True):
        if not torch.equal(one[units_there], two[list(places)]):
            raise PrivacyError(
                f"{label}: in {precision} a unit's numbers change with its place among the {units} units of a "
                "micro-batch, which would let one unit move the gradients of others by more than the noise covers. "
                "Choose another microbatch_size, such as a multiple of 8, deterministic kernels, or float32."
            )


def _require_gradients(network: nn.Module, rows: Microbatch) -> None:
    """Refuse losses that no parameter has an influence on: a step would pay for noise alone."""
    with torch.enable_grad(), repeatable_randomness(rows.device):
        losses = row_losses(network, losses_as_they_are, rows)
    if not losses.is_floating_point() or not losses.requires_grad:
        raise ArgumentError(
            f"the losses ({losses.dtype}) have no gradient of real numbers, so every step would pay for noise alone. "
            "Look for detach(), torch.no_grad() and whole numbers in the model and the loss, and remove them."
        )


def _refuse_leaks(network: nn.Module, rows: Microbatch, overrides: OwnershipOverrides) -> None:
    """Refuse a network in which the loss of one unit has a gradient in the rows of another."""
    units = rows.row_weights_UR.shape[0]
    owners = parameter_owners(network, overrides)
    for unit in range(units):
        weights_UR = torch.zeros_like(rows.row_weights_UR)
        weights_UR[unit] = rows.row_weights_UR[unit]
        with repeatable_randomness(rows.device):
            calls = run_captured(network, losses_as_they_are, replace(rows, row_weights_UR=weights_UR), owners)
        layers = leaking_layers(calls, unit, units)
        if layers:
            raise PrivacyError(
                f"{', '.join(layers)}: a unit's loss depends on the rows of another unit. {MIXING_REMEDY}"
            )


def blind_trial(
    model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, *, units: int
) -> tuple[Microbatch, Trial]:
    """Return synthetic units on which code that is not ours gives finite losses; it is never shown a private value.

    Raises:
        PrivacyError: there are none, so nothing could be compared.
    """
    for classes in (2, 1):
        batch = blind_batch(microbatch, units=units, classes=classes)
        try:
            trial = try_forward(model, loss_fn, batch)
        except (RuntimeError, ValueError, IndexError):
            if classes == 1:
                raise
            continue
        if trial.is_finite or not all(bool(x.isfinite().all()) for _, x in model_state(model)):
            return batch, trial
    raise PrivacyError(
        "the model or the loss gives no finite losses for synthetic rows (numbers from 0 to 1, classes 0 and 1), so "
        "its gradients can't be checked. Make losses finite for such rows."
    )


def _batch_to_try(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> tuple[Microbatch, Trial]:
    """Return synthetic units, or the first units as they are where the model gives no finite losses for those."""
    batch = synthetic_batch(microbatch, units=_UNITS)
    try:
        trial = try_forward(model, loss_fn, batch)
        if trial.is_finite:
            return batch, trial
    except (RuntimeError, ValueError, IndexError):
        pass
    batch = repeat_units(microbatch, units=_UNITS)
    return batch, try_forward(model, loss_fn, batch)


def _fused_copy(
    model: nn.Module, batch: Microbatch, performance: Performance, *, proved: bool = False
) -> nn.Module | None:
    """Return the fused copy of a model, or of a proved graph, where the settings and the inputs allow one."""
    kernels = performance.kernels
    if kernels == "native" and not native.available():
        raise ArgumentError(f"native kernels are not available: {native.reason()}. Choose kernels auto or plain.")
    inputs = batch.inputs[0] if proved else batch.inputs
    fits = isinstance(inputs, Tensor) and inputs.dtype == torch.float32 and inputs.device.type == "cpu"
    if kernels == "plain" or performance.precision != "float32" or not performance.channels_last or not fits:
        return None
    if kernels == "auto" and not native.available():
        return None
    if proved and isinstance(model, fx.GraphModule):
        return fused_graph(model, compiled=kernels == "compiled")
    return fused_copy(model, compiled=kernels == "compiled")


def find_plan(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Microbatch,
    *,
    evaluate: bool,
    channels_last: bool = True,
    fused_copy: nn.Module | None = None,
    reference: Reference | None = None,
) -> CheckedPlan:
    """Search for a plan whose gradients are those of single units.

    Args:
        model: the model.
        loss_fn: one loss per row.
        batch: a few units to compare on.
        evaluate: whether to search in evaluation mode, for a model that draws random numbers.
        channels_last: whether the channels-last memory format may be used.
        fused_copy: a faster network that is tried first, and used only if it gives the model's gradients.
        reference: what to compare with; the model itself, each unit alone, by default.

    Returns:
        The plan, with the parameters that no plan gets right.
    """
    subject = _Subject(model, loss_fn, batch, reference or Reference(model, loss_fn, batch))
    with model_restored(model), repeatable_randomness(batch.device), evaluation_mode(model, when=evaluate):
        _call_shapes(model, loss_fn, batch, parameter_owners(model, OwnershipOverrides()), backward=False)
        found = _try_fused_copy(subject, fused_copy)
        return found or _try_formats(subject, channels_last=channels_last)


@final
@dataclass(frozen=True, eq=False)
class _Subject:
    """What a plan is searched for: the network to run, its loss, a few units, and what to compare with."""

    model: nn.Module
    loss_fn: LossFunction
    batch: Microbatch
    reference: Reference


def _try_fused_copy(subject: _Subject, fused_copy: nn.Module | None) -> CheckedPlan | None:
    """Return the plan with the fused copy, if it works without overrides and gives the model's gradients."""
    if fused_copy is None:
        return None
    give_back_freed_memory()
    plan = Plan(OwnershipOverrides(), {}, 0, _channels_last_pays(subject.model), fused_copy)
    try:
        found = _try_plan(subject, plan)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, DPVisionError):
        return None  # the model itself is examined next, and refused there if it must be
    return None if found.wrong else found


def _try_formats(subject: _Subject, *, channels_last: bool) -> CheckedPlan:
    """Use the faster memory format, unless the model can't take it: some reshape in ways that depend on it."""
    batch = subject.batch
    images = batch.device.type == "cpu" and any(x.dim() == 4 for x in row_tensors(batch.inputs))
    if channels_last and images and _channels_last_pays(subject.model):
        try:
            found = _search_overrides(subject, channels_last=True)
        except RuntimeError:
            found = None
        if found is not None and not found.wrong:
            return found
    return _search_overrides(subject, channels_last=False)


def _channels_last_pays(model: nn.Module) -> bool:
    """Return False where all that trains are linear layers: flattening images for them would undo the format."""
    owners = (module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)
    return any(type(module) is not nn.Linear for module in owners)


def _search_overrides(subject: _Subject, *, channels_last: bool) -> CheckedPlan:
    """Assign wrong parameters to modules further above until all gradients are right or nothing is left to try."""
    overrides = OwnershipOverrides()
    while True:
        found = _try_plan(subject, Plan(overrides, {}, 0, channels_last))
        further = _override_wrong(subject, overrides, found.wrong) if found.wrong else None
        if further is None:
            return found
        overrides = further


def _override_wrong(subject: _Subject, overrides: OwnershipOverrides, wrong: list[str]) -> OwnershipOverrides | None:
    """Run the owner of each wrong parameter unit by unit, or if it is already, let the module above own it."""
    parameters, owners = trainable_parameters(subject.reference.model), parameter_owners(subject.model, overrides)
    names = {parameter: name for name, parameter in trainable_parameters(subject.model).items()}
    moved, looped = dict(overrides.moved), set(overrides.looped)
    for name in (names.get(parameters[each]) for each in wrong):
        mine = [owner for owner in owners if name and any(names[o.parameter] == name for o in owner.parameters)]
        if name is None or not mine:
            return None  # the network does not have it
        unlooped = {owner.name for owner in mine if owner.rule is None and not owner.looped}
        if unlooped:
            looped |= unlooped
            continue
        home = _module_above([owner.name for owner in mine])
        if home is None or moved.get(name) == home:
            return None
        moved[name] = home
    return OwnershipOverrides(moved, frozenset(looped))


def _module_above(names: list[str]) -> str | None:
    """Return the module above one module, or the lowest that contains several; None above the model itself."""
    if len(names) == 1:
        return None if names[0] == "" else names[0].rpartition(".")[0]
    shared: list[str] = []
    for parts in zip(*(name.split(".") if name else [] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _try_plan(subject: _Subject, plan: Plan) -> CheckedPlan:
    """Complete a plan with its axes and its memory, and compare its gradients with those of single units."""
    network, loss_fn, batch = plan.network(subject.model), subject.loss_fn, subject.batch
    owners = parameter_owners(network, plan.overrides)
    arranged = plan.arranged(batch)
    axes_by_module, misfits = _find_axes(network, loss_fn, arranged, owners)
    plan = replace(plan, axes_by_module=axes_by_module)
    if misfits:
        own = trainable_parameters(network)
        names = {parameter: name for name, parameter in trainable_parameters(subject.reference.model).items()}
        return CheckedPlan(plan, [names[own[name]] for name in misfits], proved=False)
    give_back_freed_memory()  # of other shapes: a large model's would lie beside what comes
    with weight_cache(network):
        with repeatable_randomness(batch.device):
            step = unit_gradients(network, loss_fn, arranged, owners, plan.axes_by_module)
        reference = subject.reference
        if reference.in_batch:
            reference = replace(reference, microbatch=arranged)  # random numbers are drawn in the order of memory
        found = compare_with_single_units(reference, step)
    units = batch.row_weights_UR.shape[0]
    plan = replace(plan, bytes_per_unit=(step.activation_bytes + found.held_bytes) // units)
    return CheckedPlan(plan, found.wrong, found.proved)


class _CallShapes(NamedTuple):
    """The shapes of a call, without its tensors: a large model's would fill the memory.

    Attributes:
        owner: the module that was called.
        inputs: the shape of each flattened input; None for what is not a tensor.
        outputs: the shape of each flattened output; None for what has no gradient.
        reached: whether the loss depends on each output; empty without a backward pass.
    """

    owner: ParameterOwner
    inputs: list[torch.Size | None]
    outputs: list[torch.Size | None]
    reached: list[bool]


def _call_shapes(
    model: nn.Module,
    loss_fn: LossFunction,
    microbatch: Microbatch,
    owners: tuple[ParameterOwner, ...],
    *,
    backward: bool,
) -> list[_CallShapes]:
    """Return the shapes of all calls of one pass."""
    calls = run_captured(model, loss_fn, microbatch, owners, backward=backward)
    return [
        _CallShapes(call.owner, call.input_shapes, call.outputs, [gradient is not None for gradient in call.gradients])
        for call in calls
    ]


def _find_axes(
    model: nn.Module, loss_fn: LossFunction, batch: Microbatch, owners: tuple[ParameterOwner, ...]
) -> tuple[AxesByModule, list[str]]:
    """Find the axes of every call from two batches of different size.

    Returns:
        The axes by module, and the parameters of modules whose rows are not in the first dimension.
    """
    names = {parameter: name for name, parameter in trainable_parameters(model).items()}
    small = _call_shapes(model, loss_fn, batch, owners, backward=True)
    larger = repeat_units(batch, units=batch.row_weights_UR.shape[0] + 1)
    large = _call_shapes(model, loss_fn, larger, owners, backward=False)
    if [call.owner.name for call in small] != [call.owner.name for call in large]:
        raise PrivacyError(
            "the model calls its modules differently for a larger batch, so a unit depends on how many others there "
            "are. Make its control flow independent of the batch size."
        )
    axes_by_module: dict[str, tuple[BatchAxes, ...]] = {}
    misfits: list[str] = []
    rows = batch.rows, larger.rows
    for one, other in zip(small, large, strict=True):
        axes = _compare_shapes(one, other, rows=rows)
        if axes is None:
            misfits += [names[owned.parameter] for owned in one.owner.parameters]
        else:
            axes_by_module[one.owner.name] = (*axes_by_module.get(one.owner.name, ()), axes)
    return axes_by_module, misfits


def _compare_shapes(small: _CallShapes, large: _CallShapes, *, rows: tuple[int, int]) -> BatchAxes | None:
    """Return the axes that explain both calls, or None if rows are not in the first dimension wherever they matter.

    They matter in all inputs, and in the outputs on which the loss depends: ``small`` knows which.
    """
    shapes = (small.inputs, large.inputs), (small.outputs, large.outputs)
    if any(len(a) != len(b) for a, b in shapes):
        return None
    inputs, outputs = (tuple(_rows_per_entry(a, b, rows) for a, b in zip(*pair, strict=True)) for pair in shapes)
    seen = [entries for entries, reached in zip(outputs, small.reached, strict=False) if reached]
    fits = _ELSEWHERE not in inputs and all(seen)
    if small.owner.rule is not None:
        fits = fits and inputs[0] == outputs[0]
    return BatchAxes(inputs, outputs) if fits else None


def _rows_per_entry(small: torch.Size | None, large: torch.Size | None, rows: tuple[int, int]) -> RowsPerEntry:
    if small == large:
        return None
    if small is None or large is None or len(small) == 0 or small[1:] != large[1:]:
        return _ELSEWHERE
    entries, rest = divmod(small[0], rows[0])
    return _ELSEWHERE if rest or large[0] != entries * rows[1] else entries


def check_model(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: RowTree,
    targets: RowTree,
    *,
    rows_per_unit: int = 1,
    own_code: bool = True,
) -> list[Finding]:
    """Examine whether a model with this loss can be trained privately; the model is left as it was.

    Args:
        model: the model, in the mode in which it will train.
        loss_fn: from outputs and targets to one loss per row.
        inputs: a few rows, at least those of one unit: a tensor, or a dict, tuple or list of tensors.
        targets: as many targets.
        rows_per_unit: neighbouring rows that belong to one unit.
        own_code: whether model and loss may be anyone's code, so that a proof is needed; see ``plan_for``.

    Returns:
        Everything found: mixing units, code that can't be proved to keep rows apart, moving buffers, wrong gradients,
        losses that don't split into rows (fatal); frozen and unused parameters, and how the proof was found (not
        fatal).

    Raises:
        ArgumentError: there is no complete unit, or not one target per row.

    Guarantee: without a fatal finding, the engine's gradients of these rows are those of single units.
    """
    rows = _rows_to_check(inputs, targets, rows_per_unit)
    unfit = unfit_parts(model) if own_code else []
    if unfit:
        return unfit
    idle = list(_idle_parameters(model))
    try:
        trial = try_forward(model, loss_fn, rows)
    except ArgumentError as error:
        return [*idle, Finding(module=LOSS, problem="does not split into rows", remedy=str(error))]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
        problem = f"can't be run on these rows: {_problem_and_remedy(error)[0]}"
        return [*idle, Finding(module="the model", problem=problem, remedy="Check their shape.")]
    findings = [*idle, *moving_state(model, trial.moved)]
    if not trial.is_finite:
        problem = "gives losses that are not finite, so that nothing can be checked"
        return [*findings, Finding(module="the model", problem=problem, remedy="Check its weights and inputs.")]
    mixing = mixing_units(model, find_mixing(model, loss_fn, rows))
    findings += mixing
    if mixing and own_code and not any(uses_batch_statistics(module) for module in model.modules()):
        findings += [finding for finding in proof_findings(model, loss_fn, rows) if finding.fatal]  # names the line
    if not mixing and trainable_parameters(model):
        findings += _check_gradients(model, loss_fn, rows, draws_random=trial.draws_random)
        findings += _unused_parameters(model, loss_fn, rows)
    if own_code and not any(finding.fatal for finding in findings):
        findings += proof_findings(model, loss_fn, rows)
    return findings


def proof_findings(model: nn.Module, loss_fn: LossFunction, rows: Microbatch) -> list[Finding]:
    """Return how it was proved that no row influences another, or the refusal (fatal).

    Args:
        model: the model.
        loss_fn: one loss per row.
        rows: rows of the shapes in use.
    """
    try:
        with clear_refusals(), model_restored(model):
            proof = prove(model, loss_fn, rows)
            check_faithful(model, loss_fn, proof, rows)
    except DPVisionError as error:
        problem, remedy = _problem_and_remedy(error)
        return [Finding(module="the model", problem=problem, remedy=remedy)]
    problem = f"no row influences another: proved by following {proof.operations} operations of its graph"
    return [Finding(module="the model", problem=problem, remedy="This graph is what a step runs.", fatal=False)]


def require_private_ready(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: RowTree,
    targets: RowTree,
    *,
    rows_per_unit: int = 1,
    own_code: bool = True,
) -> list[Finding]:
    """Run ``check_model`` and refuse a model with fatal findings.

    Args:
        model: see ``check_model``, as for the other arguments.
        loss_fn: one loss per row.
        inputs: a few rows.
        targets: as many targets.
        rows_per_unit: rows of one unit.
        own_code: whether a proof is needed.

    Returns:
        The findings that are not fatal.

    Raises:
        PrivacyError: names all fatal findings.
    """
    findings = check_model(model, loss_fn, inputs, targets, rows_per_unit=rows_per_unit, own_code=own_code)
    refuse(findings, saying="the model is not ready for private training: ")
    return findings


def _rows_to_check(inputs: RowTree, targets: RowTree, rows_per_unit: int) -> Microbatch:
    """Return the first few units; two at least, because one has no other to depend on."""
    tensors = [*row_tensors(inputs), *row_tensors(targets)]
    counts = {x.shape[0] if x.dim() else 0 for x in tensors}
    units = min(counts, default=0) // rows_per_unit
    if not units or len(counts) > 1:
        raise ArgumentError(
            f"check_model needs the rows of at least one unit (rows_per_unit={rows_per_unit}) and as many targets, got "
            f"{' and '.join(str(tuple(x.shape)) for x in tensors)}."
        )
    whole = slice(units * rows_per_unit)
    weights = torch.ones(units, rows_per_unit, device=tensors[0].device)
    given = Microbatch(map_tensors(lambda x: x[whole], inputs), map_tensors(lambda x: x[whole], targets), weights)
    return repeat_units(given, units=max(2, min(units, _MOST_CHECKED_UNITS)))


def _idle_parameters(model: nn.Module) -> Iterator[Finding]:
    """Yield what does not train: everything (fatal), or frozen parameters by module."""
    if not trainable_parameters(model):
        remedy = "Set requires_grad on those that should learn."
        yield Finding(module="the model", problem="has no trainable parameter", remedy=remedy)
    for name, module in model.named_modules():
        frozen = [own for own, parameter in module.named_parameters(recurse=False) if not parameter.requires_grad]
        if frozen:
            problem = f"frozen, stays as it is: {', '.join(frozen)}"
            yield Finding(module=module_label(name, module), problem=problem, remedy="Nothing, if meant.", fatal=False)


def _check_gradients(model: nn.Module, loss_fn: LossFunction, rows: Microbatch, *, draws_random: bool) -> list[Finding]:
    """Compare every parameter's gradient with that of a unit by itself, in float64 where the model allows it."""
    two = repeat_units(rows, units=2)
    try:
        found = find_plan(*_in_float64(model, loss_fn, two), evaluate=draws_random)
        if draws_random:
            # Drawing inside a module that must be run again shows only when it draws.
            owners = parameter_owners(model, found.plan.overrides)
            with model_restored(model), repeatable_randomness(rows.device):
                unit_gradients(model, loss_fn, two, owners, found.plan.axes_by_module)
    except (PrivacyError, RuntimeError) as error:
        problem, remedy = _problem_and_remedy(error)
        return [Finding(module="the model", problem=problem, remedy=remedy)]
    return wrong_gradients(model, found.wrong)


def _unused_parameters(model: nn.Module, loss_fn: LossFunction, rows: Microbatch) -> Iterator[Finding]:
    """Yield trainable parameters on which the loss does not depend."""
    parameters, modules = trainable_parameters(model), dict(model.named_modules())
    with torch.enable_grad(), model_restored(model), repeatable_randomness(rows.device):
        losses = row_losses(model, loss_fn, rows)
    gradients: tuple[Tensor | None, ...] = (None,) * len(parameters)
    if losses.requires_grad:
        gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            owner = name.rpartition(".")[0]
            problem = f"the loss does not depend on {name}: it gets a zero gradient and learns only noise"
            remedy = "Use it, freeze it or remove it."
            yield Finding(module=module_label(owner, modules[owner]), problem=problem, remedy=remedy, fatal=False)


def _in_float64(
    model: nn.Module, loss_fn: LossFunction, rows: Microbatch
) -> tuple[nn.Module, LossFunction, Microbatch]:
    """Return a float64 copy with its rows, or the model itself where it can't be copied or does not run in float64."""
    inputs, targets = (map_tensors(_doubled, tree) for tree in (rows.inputs, rows.targets))
    doubled = Microbatch(inputs, targets, rows.row_weights_UR)
    try:
        double = copy.deepcopy(model).double()
        try_forward(double, loss_fn, doubled)
    except (RuntimeError, TypeError, NotImplementedError):
        return model, loss_fn, rows
    return double, loss_fn, doubled


def _doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _problem_and_remedy(error: Exception) -> tuple[str, str]:
    """Split an error's message into problem and remedy, each on one line."""
    problem, _, remedy = " ".join(str(error).split()).partition(". ")
    return problem, remedy or "Train it without privacy once to see the cause."
