"""Watch one forward pass: what every module with a owner was given, and where its output gradient will appear.

The model is not changed: parameters stay in the graph, and the backward pass, asked only for the gradients at the
capture_calls outputs, skips every parameter gradient by itself.

Where the rows are in what a module is given and returns: seen by giving the model two batches of different size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpvision.errors import PrivacyError
from dpvision.gradients.ownership import ParameterOwner


@final
@dataclass(eq=False)
class CapturedCall:
    """One call of a module: inputs, and for each output tensor the place of its gradient in the graph.

    ``outputs`` (shapes) and ``gradients`` follow the flattened output; ``None`` is for what has no gradient. A module
    that takes its parameters once for each row has these in the place of outputs, in the order of ``names``. ``y`` is
    the output itself, of a module that asks for it to be kept.
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

    def check_untouched(self) -> None:
        """Refuse inputs that were overwritten after the module read them: the gradient would be of something else."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise PrivacyError(
                f"the input or output of {self.owner.label} was changed in place, so its gradient can't be computed. "
                "Replace the in-place operation on that tensor by an ordinary one."
            )


@contextmanager
def capture_calls(owners: tuple[ParameterOwner, ...]) -> Iterator[list[CapturedCall]]:
    """Record the calls of all modules with a owner; whatever happens inside, no hook outlives the block."""
    calls: list[CapturedCall] = []
    handles: list[Any] = []
    try:
        for owner in owners:
            handles += _watch(owner, calls)
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def backpropagate(calls: list[CapturedCall], losses: Tensor, weights: Tensor) -> None:
    """Give every call the gradient of the weighted loss at its outputs; ``None`` where the loss does not see them."""
    edges = [edge for call in calls for edge in call.edges]
    if not losses.requires_grad or not edges:
        return
    found = iter(torch.autograd.grad(losses, edges, grad_outputs=weights, allow_unused=True))
    for call in calls:
        call.gradients = [None if output is None else next(found) for output in call.outputs]


def _watch(owner: ParameterOwner, calls: list[CapturedCall]) -> list[Any]:
    if hasattr(owner.module, "per_row"):
        return [owner.module.register_forward_pre_hook(_before_per_row(owner, calls), with_kwargs=True)]
    if owner.rule is not None:
        # First in line: hooks of the user may replace the output, and their work is not the layer's.
        return [owner.module.register_forward_hook(_after_rule(owner, calls), with_kwargs=True, prepend=True)]
    entries: list[_Entry] = []
    return [
        owner.module.register_forward_pre_hook(_before_any(entries), with_kwargs=True, prepend=True),
        owner.module.register_forward_hook(_after_any(owner, calls, entries), with_kwargs=True),
    ]


@final
@dataclass(frozen=True)
class _Entry:
    """What a module was given, before its own hooks or its forward could change it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[tuple[Tensor, int]]


def _after_rule(owner: ParameterOwner, calls: list[CapturedCall]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        if not output.requires_grad:
            return None
        # Writing into a view in place cuts the old node out of the graph, so a view is copied first.
        seen = output.clone() if output._is_view() else output
        inputs = (args[0] if args else kwargs.get("input", next(iter(kwargs.values()))),)
        call = _record(owner, _Entry(inputs, {}, _versions(inputs)), [seen])
        if getattr(owner.module, "keeps_output", False):
            call.y = seen.detach()
            call.versions.append((seen, seen._version))  # overwritten later, it would say something else
        calls.append(call)
        return seen

    return hook


def _before_per_row(owner: ParameterOwner, calls: list[CapturedCall]) -> Callable[..., Any]:
    """Give the module its parameters once for each row: the loss's gradient at these is each row's own."""
    wanted = {name for target in owner.targets for name in target.names}

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        per_row: dict[str, Tensor] = module.per_row(args[0].shape[0])
        mine = {name: rows for name, rows in per_row.items() if name in wanted}
        call = _record(owner, _Entry(args[:1], {}, _versions(args[:1])), list(mine.values()))
        call.names = tuple(mine)
        calls.append(call)
        return args, {**kwargs, "per_row": per_row}

    return hook


def _before_any(entries: list[_Entry]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entries.append(_Entry(args, kwargs, _versions((args, kwargs))))

    return hook


def _after_any(owner: ParameterOwner, calls: list[CapturedCall], entries: list[_Entry]) -> Callable[..., Any]:
    def hook(_: nn.Module, __: tuple[Any, ...], ___: dict[str, Any], output: Any) -> Any:
        entry = entries.pop()
        leaves, structure = tree_flatten(output)
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            return None
        # Copies keep the outputs apart: otherwise one output's gradient would include its use inside another.
        leaves = [leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves]
        calls.append(_record(owner, entry, leaves))
        return tree_unflatten(leaves, structure)

    return hook


def _record(owner: ParameterOwner, entry: _Entry, leaves: list[Any]) -> CapturedCall:
    outputs = [leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]
    edges = [get_gradient_edge(output) for output in outputs if output is not None]
    shapes = [None if output is None else output.shape for output in outputs]
    return CapturedCall(owner, entry.args, entry.kwargs, shapes, edges, entry.versions)


def _versions(values: Any) -> list[tuple[Tensor, int]]:
    return [(leaf, leaf._version) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


Place = int | None
"""Entries of a tensor's first dimension per row; ``None`` for a value without rows, zero for rows somewhere else."""

_ELSEWHERE: Final = 0


@final
@dataclass(frozen=True)
class BatchAxes:
    """One call's inputs and outputs, flattened."""

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]


AxesByModule = Mapping[str, tuple[BatchAxes, ...]]
"""By module name, the axes of each of its calls in a forward pass."""


@final
@dataclass(frozen=True, eq=False)
class CallShapes:
    """What is left of a call when its tensors are gone: a large model's would fill the memory.

    ``reached`` says of each output whether the loss depends on it; empty where nobody looked.
    """

    owner: ParameterOwner
    inputs: tuple[torch.Size | None, ...]
    outputs: tuple[torch.Size | None, ...]
    reached: tuple[bool, ...]

    @staticmethod
    def from_call(call: CapturedCall) -> CallShapes:
        """The shapes of one call."""
        reached = tuple(gradient is not None for gradient in call.gradients)
        return CallShapes(call.owner, tuple(_input_shapes(call)), tuple(call.outputs), reached)


def compare(small: CallShapes, large: CallShapes, *, rows: tuple[int, int]) -> BatchAxes | None:
    """The axes that explains both calls, or ``None`` if rows are not in front everywhere they matter.

    They matter in all inputs, and in the outputs on which the loss depends: ``small`` knows which.
    """
    shapes = (small.inputs, large.inputs), (small.outputs, large.outputs)
    if any(len(a) != len(b) for a, b in shapes):
        return None
    inputs, outputs = (tuple(_place(a, b, rows) for a, b in zip(*pair, strict=True)) for pair in shapes)
    seen = [place for place, reached in zip(outputs, small.reached, strict=False) if reached]
    fits = _ELSEWHERE not in inputs and all(seen)
    if small.owner.rule is not None:
        fits = fits and inputs[0] == outputs[0]
    return BatchAxes(inputs, outputs) if fits else None


def check(call: CapturedCall, axes: BatchAxes, rows: int) -> None:
    """Refuse a call whose shapes are not those of its axes at this number of rows."""
    shapes = [*_input_shapes(call), *call.outputs]
    places = [*axes.inputs, *axes.outputs]
    matter = [True] * len(axes.inputs) + [gradient is not None for gradient in call.gradients]
    fits = len(shapes) == len(places) == len(matter) and all(
        _fits(shape, place, rows) for shape, place, it_does in zip(shapes, places, matter, strict=True) if it_does
    )
    if call.reaches_loss and not fits:
        raise unexpected(call)


def unexpected(call: CapturedCall) -> PrivacyError:
    """The error for a call that the model did not make when it was checked."""
    return PrivacyError(
        f"{call.owner.label} was called differently than when the model was checked, so the rows of its units are not "
        "known. Make the model's control flow independent of its inputs' values."
    )


def _fits(shape: torch.Size | None, place: Place, rows: int) -> bool:
    return place is None or (shape is not None and len(shape) > 0 and shape[0] == place * rows != 0)


def _input_shapes(call: CapturedCall) -> list[torch.Size | None]:
    leaves = tree_leaves((call.args, call.kwargs))
    return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]


def _place(small: torch.Size | None, large: torch.Size | None, rows: tuple[int, int]) -> Place:
    if small == large:
        return None
    if small is None or large is None or len(small) == 0 or small[1:] != large[1:]:
        return _ELSEWHERE
    place, rest = divmod(small[0], rows[0])
    return _ELSEWHERE if rest or large[0] != place * rows[1] else place
