"""Where the rows are in what a module is given and returns: seen by giving the model two batches of different size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpvision.checks import PrivacyError
from dpvision.grads.capture import Call

Share = int | None
"""Entries of a tensor's first dimension per row, or ``None`` for a value that has no rows."""


@final
@dataclass(frozen=True)
class Layout:
    """One call's inputs and outputs, flattened."""

    inputs: tuple[Share, ...]
    outputs: tuple[Share, ...]


Layouts = Mapping[str, tuple[Layout, ...]]
"""By module name, the layout of each of its calls in a forward pass."""


def compare(small: Call, large: Call, *, rows: tuple[int, int]) -> Layout | None:
    """The layout that explains both calls, or ``None`` if rows are not in front everywhere they occur."""
    try:
        inputs = _shares(_input_shapes(small), _input_shapes(large), rows)
        outputs = _shares(small.outputs, large.outputs, rows)
    except _NotInFrontError:
        return None
    fits = all(share is not None for share, out in zip(outputs, small.outputs, strict=True) if out is not None)
    if small.duty.rule is not None:
        fits = fits and inputs[0] == outputs[0]
    return Layout(inputs, outputs) if fits else None


def check(call: Call, layout: Layout, rows: int) -> None:
    """Refuse a call whose shapes are not those of its layout at this number of rows."""
    shapes = [*_input_shapes(call), *call.outputs]
    expected = [*layout.inputs, *layout.outputs]
    fits = len(shapes) == len(expected) and all(
        share is None or shape is None or (len(shape) > 0 and shape[0] == share * rows)
        for shape, share in zip(shapes, expected, strict=True)
    )
    if not fits:
        raise unexpected(call)


def unexpected(call: Call) -> PrivacyError:
    """The error for a call that the model did not make when it was checked."""
    return PrivacyError(
        f"{call.duty.label} was called differently than when the model was checked, so the rows of its units are not "
        "known. Make the model's control flow independent of its inputs' values."
    )


class _NotInFrontError(Exception):
    """The sizes grow with the batch in some other way than in front."""


def _input_shapes(call: Call) -> list[torch.Size | None]:
    leaves = tree_leaves((call.args, call.kwargs))
    return [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]


def _shares(small: list[torch.Size | None], large: list[torch.Size | None], rows: tuple[int, int]) -> tuple[Share, ...]:
    if len(small) != len(large):
        raise _NotInFrontError
    return tuple(_share(a, b, rows) for a, b in zip(small, large, strict=True))


def _share(small: torch.Size | None, large: torch.Size | None, rows: tuple[int, int]) -> Share:
    if small == large:
        return None
    if small is None or large is None or len(small) == 0 or small[1:] != large[1:]:
        raise _NotInFrontError
    share, rest = divmod(small[0], rows[0])
    if rest or large[0] != share * rows[1]:
        raise _NotInFrontError
    return share
