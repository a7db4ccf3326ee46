"""Every unit's own gradient over one micro-batch: one forward, one backward, then a rule for each captured call.

Three parts. ``capture_calls`` hooks the modules that own parameters and records what each was given and where its
output gradient will appear; the model is not changed, and the backward pass is asked only for these gradients, so that
it skips every parameter gradient by itself. ``BatchAxes`` says where the rows are in what a module is given and
returns, and every call is checked against it. ``unit_gradients`` turns each call into layer gradients: by the rule of
its layer type, or for any other module by running that one module again for each unit (``torch.func``, or a loop).

Shapes: U units, R rows per unit, N = U·R rows.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dpvision.config import Precision
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients.devices import forked_generators, generator_states, rounding, widened
from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient, sum_of_calls
from dpvision.gradients.ownership import ParameterOwner
from dpvision.gradients.rules import LayerCall
from dpvision.kernels.channels_last import laid_out
from dpvision.privacy.values import Microbatch, RowTree, map_tensors, row_tensors

LossFunction = Callable[[Any, Any], Tensor]
"""From the model's outputs and the targets to one loss per row."""

RowsPerEntry = int | None
"""Entries of a tensor's first dimension per row; None for a value without rows, 0 for rows in another dimension."""


@final
@dataclass(eq=False)
class CapturedCall:
    """One call of a module that owns parameters.

    Attributes:
        owner: the module and its parameters.
        args: positional inputs, as the module was given them.
        kwargs: keyword inputs.
        outputs: the shape of each flattened output; None for what has no gradient.
        edges: where the gradients of the outputs that have one will appear in the graph.
        versions: inputs and their version counters, to notice changes in place.
        gradients: the loss's gradient at each output, after ``backpropagate``.
        names: names of parameters that the module takes once for each row; then these take the place of outputs.
        y: the output itself, for a module with ``keeps_output``.
    """

    owner: ParameterOwner
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Size | None]
    edges: list[GradientEdge]
    versions: list[tuple[Tensor, int]]
    gradients: list[Tensor | None] = field(default_factory=list)
    names: tuple[str, ...] = ()
    y: Tensor | None = None

    @property
    def reaches_loss(self) -> bool:
        """Whether the loss depends on any output."""
        return any(gradient is not None for gradient in self.gradients)

    @property
    def input_shapes(self) -> list[torch.Size | None]:
        """The shape of each flattened input; None for what is not a tensor."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]

    @property
    def nbytes(self) -> int:
        """Memory of inputs and output gradients."""
        tensors = [*(tensor for tensor, _ in self.versions), *self.gradients]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def widen(self) -> None:
        """Take inputs, output and gradients of 16 bits to float32, exactly, for all that is computed from them."""
        self.args, self.kwargs = tree_map(widened, (self.args, self.kwargs))
        self.y, *self.gradients = map(widened, (self.y, *self.gradients))

    def check_untouched(self) -> None:
        """Raise if an input was overwritten after the module read it: the gradient would be of something else."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise PrivacyError(
                f"the input or output of {self.owner.label} was changed in place, so its gradient can't be computed. "
                "Replace the in-place operation on that tensor by an ordinary one."
            )


@contextmanager
def capture_calls(owners: tuple[ParameterOwner, ...]) -> Iterator[list[CapturedCall]]:
    """Record the calls of all owners inside the block. No hook outlives the block, whatever happens in it."""
    calls: list[CapturedCall] = []
    with ExitStack() as hooks:
        for owner in owners:
            for handle in _hooks(owner, calls):
                hooks.enter_context(handle)
        yield calls


def _hooks(owner: ParameterOwner, calls: list[CapturedCall]) -> list[Any]:
    """Register the hooks that append each call of ``owner`` to ``calls``; return their handles."""
    module = owner.module
    if hasattr(module, "per_row"):
        return [module.register_forward_pre_hook(_before_per_row(owner, calls), with_kwargs=True)]
    if owner.rule is not None:
        # First in line: hooks of the user may replace the output, and their work is not the layer's.
        return [module.register_forward_hook(_after_rule(owner, calls), with_kwargs=True, prepend=True)]
    entries: list[_Inputs] = []
    return [
        module.register_forward_pre_hook(_before_any(entries), with_kwargs=True, prepend=True),
        module.register_forward_hook(_after_any(owner, calls, entries), with_kwargs=True),
    ]


@final
class _Inputs:
    """What a module was given, before its own hooks or its forward could change it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        self.args, self.kwargs = args, kwargs or {}
        leaves = tree_leaves((self.args, self.kwargs))
        self.versions = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]


def _after_rule(owner: ParameterOwner, calls: list[CapturedCall]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        if not output.requires_grad:
            return None
        # Writing into a view in place cuts the old node out of the graph, so a view is copied first.
        seen = output.clone() if output._is_view() else output
        inputs = _Inputs((args[0] if args else kwargs.get("input", next(iter(kwargs.values()))),))
        call = _record(owner, inputs, [seen])
        if getattr(owner.module, "keeps_output", False):
            call.y = seen.detach()
            call.versions.append((seen, seen._version))  # overwritten later, it would say something else
        calls.append(call)
        return seen

    return hook


def _before_per_row(owner: ParameterOwner, calls: list[CapturedCall]) -> Callable[..., Any]:
    """Give the module its parameters once for each row: the loss's gradient at these is each row's own."""
    wanted = {name for owned in owner.parameters for name in owned.names}

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        per_row: dict[str, Tensor] = module.per_row(args[0].shape[0])
        mine = {name: rows for name, rows in per_row.items() if name in wanted}
        call = _record(owner, _Inputs(args[:1]), list(mine.values()))
        call.names = tuple(mine)
        calls.append(call)
        return args, {**kwargs, "per_row": per_row}

    return hook


def _before_any(entries: list[_Inputs]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entries.append(_Inputs(args, kwargs))

    return hook


def _after_any(owner: ParameterOwner, calls: list[CapturedCall], entries: list[_Inputs]) -> Callable[..., Any]:
    def hook(_: nn.Module, __: tuple[Any, ...], ___: dict[str, Any], output: Any) -> Any:
        inputs = entries.pop()
        leaves, structure = tree_flatten(output)
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            return None
        # Copies keep the outputs apart: otherwise one output's gradient would include its use inside another.
        leaves = [leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]
        calls.append(_record(owner, inputs, leaves))
        return tree_unflatten(leaves, structure)

    return hook


def _record(owner: ParameterOwner, inputs: _Inputs, leaves: list[Any]) -> CapturedCall:
    outputs = [leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]
    edges = [get_gradient_edge(output) for output in outputs if output is not None]
    shapes = [None if output is None else output.shape for output in outputs]
    return CapturedCall(owner, inputs.args, inputs.kwargs, shapes, edges, inputs.versions)


def run_captured(
    model: nn.Module,
    loss_fn: LossFunction,
    microbatch: Microbatch,
    owners: tuple[ParameterOwner, ...],
    *,
    backward: bool = True,
    precision: Precision = "float32",
) -> list[CapturedCall]:
    """Run one forward pass, and one backward pass if asked, and return the calls of all owners.

    Raises:
        PrivacyError: an input of a captured module was changed in place.
    """
    with torch.enable_grad(), capture_calls(owners) as calls:
        with rounding(microbatch.device, precision):
            losses = row_losses(model, loss_fn, microbatch)
        if precision != "float32":
            losses = losses.float()  # weights of rows are not rounded to 16 bits
    for call in calls:
        call.check_untouched()
    if backward:
        # Without hooks: a model that recomputes activations on the way back calls its modules again.
        backpropagate(calls, losses, microbatch.row_weights_UR.reshape(-1).to(losses.dtype))
    return calls


def backpropagate(calls: list[CapturedCall], losses: Tensor, weights: Tensor) -> None:
    """Give every call the gradient of the weighted loss at its outputs; None where the loss does not depend on them."""
    edges = [edge for call in calls for edge in call.edges]
    if not losses.requires_grad or not edges:
        return
    found = iter(torch.autograd.grad(losses, edges, grad_outputs=weights, allow_unused=True))
    for call in calls:
        call.gradients = [None if output is None else next(found) for output in call.outputs]


def call_model(model: Callable[..., Any], inputs: RowTree) -> Any:
    """Call the model with a tensor as it is, with a dict by keyword, with a tuple or a list by position."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


class StepFunction(ABC):
    """A loss that calls the model by itself, in the place of a loss function of outputs and targets."""

    @abstractmethod
    def losses(self, model: Callable[..., Any], inputs: RowTree, targets: RowTree) -> Tensor:
        """Return one loss per row."""

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Refuse: there is no loss of outputs alone."""
        del outputs, targets
        raise ArgumentError("this loss calls the model by itself: use losses_of.")


def losses_of(model: Callable[..., Any], loss_fn: LossFunction, inputs: RowTree, targets: RowTree) -> Any:
    """Return what model and loss give for rows."""
    if isinstance(loss_fn, StepFunction):
        return loss_fn.losses(model, inputs, targets)
    return loss_fn(call_model(model, inputs), targets)


def row_losses(model: Callable[..., Any], loss_fn: LossFunction, microbatch: Microbatch) -> Tensor:
    """Run the model and the loss on a micro-batch.

    Args:
        model: a module or a function of the inputs, called as ``call_model`` says.
        loss_fn: from outputs and targets to one loss per row.
        microbatch: the rows.

    Returns:
        One loss per row, shape (N,).

    Raises:
        ArgumentError: ``loss_fn`` returned anything else; a mean or a sum over rows can't be split into units.
    """
    rows = microbatch.row_weights_UR.numel()
    if microbatch.rows != rows:
        raise ArgumentError(f"row_weights_UR must have one entry per row, got {rows} for {microbatch.rows}.")
    losses: Any = losses_of(model, loss_fn, microbatch.inputs, microbatch.targets)
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ArgumentError(
            f"loss_fn must return one loss per row, shape ({rows},), got {shape}. "
            "Use reduction='none' and average within each row."
        )
    return losses


def with_channels_last(microbatch: Microbatch) -> Microbatch:
    """Return the micro-batch with images in channels-last memory format; other inputs stay as they are."""
    if not any(map(_is_image, row_tensors(microbatch.inputs))):
        return microbatch
    return replace(microbatch, inputs=map_tensors(lambda x: laid_out(x) if _is_image(x) else x, microbatch.inputs))


def _is_image(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_floating_point()


@final
@dataclass(frozen=True)
class BatchAxes:
    """Where the rows are in one call's flattened inputs and outputs."""

    inputs: tuple[RowsPerEntry, ...]
    outputs: tuple[RowsPerEntry, ...]

    def check(self, call: CapturedCall, rows: int) -> None:
        """Raise if the shapes of a call are not those expected for this number of rows.

        Outputs matter only where the loss depends on them.
        """
        shapes = [*call.input_shapes, *call.outputs]
        expected = [*self.inputs, *self.outputs]
        matter = [True] * len(self.inputs) + [gradient is not None for gradient in call.gradients]
        fits = len(shapes) == len(expected) == len(matter) and all(
            _fits(shape, entries, rows)
            for shape, entries, it_does in zip(shapes, expected, matter, strict=True)
            if it_does
        )
        if call.reaches_loss and not fits:
            raise _unexpected(call)


AxesByModule = Mapping[str, tuple[BatchAxes, ...]]
"""By module name, the axes of each of its calls in a forward pass."""


def _fits(shape: torch.Size | None, entries: RowsPerEntry, rows: int) -> bool:
    return entries is None or (shape is not None and len(shape) > 0 and shape[0] == entries * rows != 0)


def _unexpected(call: CapturedCall) -> PrivacyError:
    """Return the error for a call that the model did not make when it was checked."""
    return PrivacyError(
        f"{call.owner.label} was called differently than when the model was checked, so the rows of its units are not "
        "known. Make the model's control flow independent of its inputs' values."
    )


def axes_of_calls(calls: list[CapturedCall], axes_by_module: AxesByModule) -> list[BatchAxes]:
    """Return the axes of each call, by its order among the calls of its module."""
    counts: Counter[str] = Counter()
    found: list[BatchAxes] = []
    for call in calls:
        known = axes_by_module.get(call.owner.name, ())
        order = counts[call.owner.name]
        counts[call.owner.name] += 1
        if order >= len(known) and len(set(known)) != 1:
            raise _unexpected(call)
        found.append(known[min(order, len(known) - 1)])
    return found


@final
@dataclass(frozen=True, eq=False)
class UnitGradients:
    """Every unit's gradient of its own loss. Sensitive.

    Attributes:
        layer_gradients: by parameter; parameters on which the loss does not depend are absent.
        activation_bytes: memory of the captured inputs and output gradients.
    """

    layer_gradients: dict[nn.Parameter, LayerGradient]
    activation_bytes: int


def unit_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    microbatch: Microbatch,
    owners: tuple[ParameterOwner, ...],
    axes_by_module: AxesByModule,
    *,
    precision: Precision = "float32",
) -> UnitGradients:
    """Compute the gradients of all units of a micro-batch, each as if the unit were alone.

    Args:
        model: the network to run.
        loss_fn: one loss per row.
        microbatch: the rows, with their weights within their units.
        owners: the modules whose calls are captured.
        axes_by_module: where the rows are in their inputs and outputs.
        precision: of the layers; what follows from their inputs and output gradients is computed in float32.

    Returns:
        The gradient of each unit's weighted loss, by parameter.

    Raises:
        PrivacyError: a module was called in another way than when the model was checked.

    Guarantee: exact for a model that passed ``plan_for``: row n contributes to unit n // R and to no other.
    """
    units = microbatch.row_weights_UR.shape[0]
    calls = run_captured(model, loss_fn, microbatch, owners, precision=precision)
    found: dict[nn.Parameter, list[LayerGradient]] = {}
    with torch.no_grad():
        for call, axes in zip(calls, axes_of_calls(calls, axes_by_module), strict=True):
            axes.check(call, microbatch.rows)
            if precision != "float32":
                call.widen()
            for parameter, layer_gradient in _layer_gradients(call, axes, units).items():
                found.setdefault(parameter, []).append(layer_gradient)
        total = {parameter: sum_of_calls(parts) for parameter, parts in found.items()}
    return UnitGradients(total, sum(call.nbytes for call in calls))


def _layer_gradients(call: CapturedCall, axes: BatchAxes, units: int) -> dict[nn.Parameter, LayerGradient]:
    """Turn one call into layer gradients: by its rule, or by running the module again."""
    if not call.reaches_loss:
        return {}
    owner = call.owner
    if owner.rule is None:
        return _recomputed_gradients(call, axes, units)
    gradient = call.gradients[0]
    if gradient is None:
        return {}
    wanted = frozenset(name for owned in owner.parameters for name in owned.names)
    per_row = {name: rows for name, rows in zip(call.names, call.gradients, strict=False) if rows is not None}
    by_name = owner.rule(LayerCall(owner.module, call.args[0].detach(), gradient, units, wanted, per_row, call.y))
    return {owned.parameter: by_name[name] for owned in owner.parameters for name in owned.names}


def _recomputed_gradients(call: CapturedCall, axes: BatchAxes, units: int) -> dict[nn.Parameter, LayerGradient]:
    """Run the module again for each unit; parameters that it does not own are constants."""
    with warnings.catch_warnings(), _no_random_draws(call), attributes_restored(call.owner.module):
        # vmap warns about operations that it runs one by one; no one can act on it.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        per_unit = _by_loop(call, axes, units) if call.owner.looped else _by_vmap_or_loop(call, axes, units)
    owned = (owned.parameter for owned in call.owner.parameters)
    return {parameter: MaterialisedGradient(gradient) for parameter, gradient in zip(owned, per_unit, strict=True)}


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
    batched = [index for index, entries in enumerate(axes.inputs) if entries is not None]
    values = tuple(owned.parameter.detach() for owned in call.owner.parameters)

    def one_unit(inputs: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
        mine = list(leaves)
        for index, value in zip(batched, inputs, strict=True):
            mine[index] = value
        args, kwargs = tree_unflatten(mine, structure)

        def outputs(*parameters: Tensor) -> list[Tensor]:
            named = zip(call.owner.parameters, parameters, strict=True)
            replaced = {name: value for owned, value in named for name in owned.names}
            # Names are given one by one: a parameter tied to a module below belongs to that module.
            return _wanted(call, functional_call(call.owner.module, replaced, args, kwargs, tie_weights=False))

        return vjp(outputs, *values)[1](gradients)

    inputs = [leaves[index].unflatten(0, (units, -1)) for index in batched]
    gradients = [gradient.unflatten(0, (units, -1)) for gradient in _present(call.gradients)]
    return [found.detach() for found in vmap(one_unit, randomness="different")(inputs, gradients)]


def _by_loop(call: CapturedCall, axes: BatchAxes, units: int) -> list[Tensor]:
    parameters = [owned.parameter for owned in call.owner.parameters]
    found = [parameter.detach().new_zeros((units, *parameter.shape)) for parameter in parameters]
    leaves, structure = _constants(call)
    for unit in range(units):
        mine = [
            leaf if entries is None else leaf.unflatten(0, (units, -1))[unit]
            for leaf, entries in zip(leaves, axes.inputs, strict=True)
        ]
        args, kwargs = tree_unflatten(mine, structure)
        with torch.enable_grad():
            outputs = _wanted(call, call.owner.module(*args, **kwargs))
        gradients = [gradient.unflatten(0, (units, -1))[unit] for gradient in _present(call.gradients)]
        gradients = torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)
        for total, gradient in zip(found, gradients, strict=True):
            if gradient is not None:
                total[unit] = gradient
    return found


def _constants(call: CapturedCall) -> tuple[list[Any], Any]:
    """Return the call's inputs, flattened and detached, and how to put them together again."""
    leaves, structure = tree_flatten((call.args, call.kwargs))
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure


def _wanted(call: CapturedCall, output: Any) -> list[Tensor]:
    """Return the outputs on which the loss depends."""
    return [leaf for leaf, gradient in zip(tree_leaves(output), call.gradients, strict=True) if gradient is not None]


def _present(gradients: list[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


@contextmanager
def _no_random_draws(call: CapturedCall) -> Iterator[None]:
    """Raise if the module draws random numbers: run again, it would draw others."""
    device = call.owner.parameters[0].parameter.device
    with forked_generators(device):
        before = generator_states(device)
        yield
        after = generator_states(device)
    if not all(map(torch.equal, before, after)):
        raise PrivacyError(
            f"{call.owner.label} draws random numbers and owns parameters without a rule: run again for each unit, "
            "it would draw others. Move the dropout into a module outside of it, or set it to zero."
        )


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what the block writes into modules' attributes, such as a stored activation or a replaced buffer."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its attributes belong to the compiled code; a plan refuses it
        tables: tuple[dict[str, Any], ...] = (vars(module), module._buffers, module._parameters)
        before += [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, then in before:
            for name in table.keys() - then.keys():
                del table[name]
            table.update(then)
