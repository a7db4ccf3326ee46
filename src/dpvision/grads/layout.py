"""Where the rows are in what a module is given and returns: seen by giving the model two batches of different size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpvision.checks import PrivacyError
from dpvision.grads.capture import Call
from dpvision.grads.duties import Duty

Place = int | None
"""Entries of a tensor's first dimension per row; ``None`` for a value without rows, zero for rows somewhere else."""

_ELSEWHERE: Final = 0


@final
@dataclass(frozen=True)
class Layout:
    """One call's inputs and outputs, flattened."""

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]


Layouts = Mapping[str, tuple[Layout, ...]]
"""By module name, the layout of each of its calls in a forward pass."""


@final
@dataclass(frozen=True, eq=False)
class Shapes:
    """What is left of a call when its tensors are gone: a large model's would fill the memory.

    ``reached`` says of each output whether the loss depends on it; empty where nobody looked.
    """

    duty: Duty
    inputs: tuple[torch.Size | None, ...]
    outputs: tuple[torch.Size | None, ...]
    reached: tuple[bool, ...]

    @staticmethod
    def of(call: Call) -> Shapes:
        """The shapes of one call."""
        reached = tuple(gradient is not None for gradient in call.gradients)
        return Shapes(call.duty, tuple(_input_shapes(call)), tuple(call.outputs), reached)


def compare(small: Shapes, large: Shapes, *, rows: tuple[int, int]) -> Layout | None:
    """The layout that explains both calls, or ``None`` if rows are not in front everywhere they matter.

    They matter in all inputs, and in the outputs on which the loss depends: ``small`` knows which.
    """
    shapes = (small.inputs, large.inputs), (small.outputs, large.outputs)
    if any(len(a) != len(b) for a, b in shapes):
        return None
    inputs, outputs = (tuple(_place(a, b, rows) for a, b in zip(*pair, strict=True)) for pair in shapes)
    seen = [place for place, reached in zip(outputs, small.reached, strict=False) if reached]
    fits = _ELSEWHERE not in inputs and all(seen)
    if small.duty.rule is not None:
        fits = fits and inputs[0] == outputs[0]
    return Layout(inputs, outputs) if fits else None


def check(call: Call, layout: Layout, rows: int) -> None:
    """Refuse a call whose shapes are not those of its layout at this number of rows."""
    shapes = [*_input_shapes(call), *call.outputs]
    places = [*layout.inputs, *layout.outputs]
    matter = [True] * len(layout.inputs) + [gradient is not None for gradient in call.gradients]
    fits = len(shapes) == len(places) == len(matter) and all(
        _fits(shape, place, rows) for shape, place, it_does in zip(shapes, places, matter, strict=True) if it_does
    )
    if call.reaches_loss and not fits:
        raise unexpected(call)


def unexpected(call: Call) -> PrivacyError:
    """The error for a call that the model did not make when it was checked."""
    return PrivacyError(
        f"{call.duty.label} was called differently than when the model was checked, so the rows of its units are not "
        "known. Make the model's control flow independent of its inputs' values."
    )


def _fits(shape: torch.Size | None, place: Place, rows: int) -> bool:
    return place is None or (shape is not None and len(shape) > 0 and shape[0] == place * rows != 0)


def _input_shapes(call: Call) -> list[torch.Size | None]:
    leaves = tree_leaves((call.args, call.kwargs))
    return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]


def _place(small: torch.Size | None, large: torch.Size | None, rows: tuple[int, int]) -> Place:
    if small == large:
        return None
    if small is None or large is None or len(small) == 0 or small[1:] != large[1:]:
        return _ELSEWHERE
    place, rest = divmod(small[0], rows[0])
    return _ELSEWHERE if rest or large[0] != place * rows[1] else place
