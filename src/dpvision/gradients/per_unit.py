"""Per-unit gradients of any module at all, by running that one module again for each unit.

CallShapes: U units, N rows.

Every unit's own gradient over one micro-batch: forward, backward, then a rule or the fallback for each call.

CallShapes: U units, R rows per unit.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients import batch_axes
from dpvision.gradients.batch_axes import AxesByModule, BatchAxes, CapturedCall, backpropagate, capture_calls
from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient, added
from dpvision.gradients.ownership import ParameterOwner
from dpvision.gradients.rules import LayerCall
from dpvision.gradients.synthetic_batch import attributes_restored
from dpvision.kernels.channels_last import laid_out
from dpvision.privacy.values import Microbatch


def recomputed_gradients(call: CapturedCall, axes: BatchAxes, units: int) -> dict[nn.Parameter, LayerGradient]:
    """Gradients of the parameters that the call's module answers for; all others are constants to it."""
    with warnings.catch_warnings(), _same_randomness(call), attributes_restored(call.owner.module):
        # vmap tells about operations that it runs one by one; nobody can act on it.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        per_unit = _by_loop(call, axes, units) if call.owner.looped else _by_vmap_or_loop(call, axes, units)
    return {
        target.parameter: MaterialisedGradient(gradient)
        for target, gradient in zip(call.owner.targets, per_unit, strict=True)
    }


def _by_vmap_or_loop(call: CapturedCall, axes: BatchAxes, units: int) -> list[Tensor]:
    state = torch.get_rng_state()
    try:
        return _by_vmap(call, axes, units)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        # Control flow on values, a missing batching rule and the like: one unit at a time is as exact, only slower.
        torch.set_rng_state(state)
        return _by_loop(call, axes, units)


def _by_vmap(call: CapturedCall, axes: BatchAxes, units: int) -> list[Tensor]:
    leaves, structure = _constants(call)
    batched = [index for index, layer_gradient in enumerate(axes.inputs) if layer_gradient is not None]
    values = tuple(target.parameter.detach() for target in call.owner.targets)

    def one_unit(inputs: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
        mine = list(leaves)
        for index, value in zip(batched, inputs, strict=True):
            mine[index] = value
        args, kwargs = tree_unflatten(mine, structure)

        def outputs(*parameters: Tensor) -> list[Tensor]:
            named = zip(call.owner.targets, parameters, strict=True)
            replaced = {name: value for target, value in named for name in target.names}
            # Names are given one by one: a parameter tied to a module below is that module's affair.
            return _wanted(call, functional_call(call.owner.module, replaced, args, kwargs, tie_weights=False))

        return vjp(outputs, *values)[1](gradients)

    inputs = [_by_unit(leaves[index], units) for index in batched]
    gradients = [_by_unit(gradient, units) for gradient in _present(call.gradients)]
    return [found.detach() for found in vmap(one_unit, randomness="different")(inputs, gradients)]


def _by_loop(call: CapturedCall, axes: BatchAxes, units: int) -> list[Tensor]:
    parameters = [target.parameter for target in call.owner.targets]
    found = [parameter.detach().new_zeros((units, *parameter.shape)) for parameter in parameters]
    leaves, structure = _constants(call)
    for unit in range(units):
        mine = [
            leaf if layer_gradient is None else _rows_of(leaf, unit, units)
            for leaf, layer_gradient in zip(leaves, axes.inputs, strict=True)
        ]
        args, kwargs = tree_unflatten(mine, structure)
        with torch.enable_grad():
            outputs = _wanted(call, call.owner.module(*args, **kwargs))
        gradients = [_rows_of(gradient, unit, units) for gradient in _present(call.gradients)]
        gradients = torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)
        for total, gradient in zip(found, gradients, strict=True):
            if gradient is not None:
                total[unit] = gradient
    return found


def _constants(call: CapturedCall) -> tuple[list[Any], Any]:
    """The call's inputs, flattened and cut off from the graph, and how to put them together again."""
    leaves, structure = tree_flatten((call.args, call.kwargs))
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure


def _wanted(call: CapturedCall, output: Any) -> list[Tensor]:
    """The outputs on which the loss depends."""
    return [leaf for leaf, gradient in zip(tree_leaves(output), call.gradients, strict=True) if gradient is not None]


def _present(gradients: list[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _by_unit(x: Tensor, units: int) -> Tensor:
    return x.unflatten(0, (units, -1))


def _rows_of(x: Tensor, unit: int, units: int) -> Tensor:
    size = x.shape[0] // units
    return x[unit * size : (unit + 1) * size]


@contextmanager
def _same_randomness(call: CapturedCall) -> Iterator[None]:
    """Refuse a module that draws: run again, it would draw something else."""
    devices = {leaf.device for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)}
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        before = _generator_states(devices)
        yield
        after = _generator_states(devices)
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise PrivacyError(
            f"{call.owner.label} draws random numbers and owns parameters without a rule: run again for each unit, "
            "it would draw others. Move the dropout into a module outside of it, or set it to zero."
        )


def _generator_states(devices: set[torch.device]) -> list[Tensor]:
    cuda = [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"]
    return [torch.get_rng_state(), *cuda]


LossFunction = Callable[[Any, Tensor], Tensor]
"""From the model's outputs and the targets to one loss per row."""


@final
@dataclass(frozen=True, eq=False)
class UnitGradients:
    """Every unit's gradient of its own loss, by parameter. Parameters that the loss does not see are absent."""

    layer_gradients: dict[nn.Parameter, LayerGradient]
    activation_bytes: int


def unit_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    microbatch: Microbatch,
    owners: tuple[ParameterOwner, ...],
    axes_by_module: AxesByModule,
) -> UnitGradients:
    """Gradients of all units of a micro-batch, each as if the unit were alone."""
    units = microbatch.row_weights_UR.shape[0]
    calls = _watched_step(model, loss_fn, microbatch, owners)
    found: dict[nn.Parameter, list[LayerGradient]] = {}
    with torch.no_grad():
        for call, place in zip(calls, _places(calls, axes_by_module), strict=True):
            batch_axes.check(call, place, microbatch.inputs.shape[0])
            for parameter, layer_gradient in _shares_of(call, place, units).items():
                found.setdefault(parameter, []).append(layer_gradient)
        layer_gradients = {parameter: added(layer_gradients) for parameter, layer_gradients in found.items()}
    return UnitGradients(layer_gradients, sum(_bytes(call) for call in calls))


def _watched_step(
    model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, owners: tuple[ParameterOwner, ...]
) -> list[CapturedCall]:
    """One forward and one backward pass, with every call of a module with a owner recorded."""
    with torch.enable_grad(), capture_calls(owners) as calls:
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


def _bytes(call: CapturedCall) -> int:
    """What a call's inputs and output gradients take."""
    tensors = [*(tensor for tensor, _ in call.versions), *call.gradients]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def with_channels_last(microbatch: Microbatch) -> Microbatch:
    """The same pictures, each position's channels together in memory; anything but pictures stays as it is."""
    x = microbatch.inputs
    if x.dim() != 4 or not x.is_floating_point():
        return microbatch
    return replace(microbatch, inputs=laid_out(x))


def _places(calls: list[CapturedCall], axes_by_module: AxesByModule) -> list[BatchAxes]:
    """The axes of each call: by its order among the calls of its module."""
    counts: Counter[str] = Counter()
    places: list[BatchAxes] = []
    for call in calls:
        known = axes_by_module.get(call.owner.name, ())
        order = counts[call.owner.name]
        counts[call.owner.name] += 1
        if order >= len(known) and len(set(known)) != 1:
            raise batch_axes.unexpected(call)
        places.append(known[min(order, len(known) - 1)])
    return places


def _shares_of(call: CapturedCall, place: BatchAxes, units: int) -> dict[nn.Parameter, LayerGradient]:
    if not call.reaches_loss:
        return {}
    owner = call.owner
    if owner.rule is None:
        return recomputed_gradients(call, place, units)
    gradient = call.gradients[0]
    if gradient is None:
        return {}
    wanted = frozenset(name for target in owner.targets for name in target.names)
    per_row = {name: rows for name, rows in zip(call.names, call.gradients, strict=False) if rows is not None}
    layer_gradients = owner.rule(
        LayerCall(owner.module, call.args[0].detach(), gradient, units, wanted, per_row, call.y)
    )
    return {target.parameter: layer_gradients[name] for target in owner.targets for name in target.names}
