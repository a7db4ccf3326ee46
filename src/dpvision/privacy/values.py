"""The values that travel through a step, in one direction: Batch → ClippedSum → PrivateGrad.

The types are the guarantee's plumbing: only ``noise.noisy_mean`` opens a ``ClippedSum``, once, and only it makes a
``PrivateGrad``; a private optimizer accepts nothing else. ``repr`` prints no private value.

Shapes: U units, R rows per unit. Rows of one unit are neighbours: row ``u * R + r`` belongs to unit ``u``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.sampling import Sampling

PROOF_OF_NOISE = object()
"""Given to ``PrivateGrad`` by ``noise.noisy_mean``, and by nothing else."""


RowTree = Any
"""Rows: a tensor, or a dict, tuple or list of such, nested as needed. Every tensor has its rows in dimension 0."""


def row_tensors(rows: RowTree) -> list[Tensor]:
    """Return all tensors of a tree of rows, in a fixed order.

    Raises:
        ArgumentError: something in it is neither a tensor nor None.
    """
    leaves = [leaf for leaf in tree_leaves(rows) if leaf is not None]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ArgumentError(
                f"inputs and targets must be tensors, or dicts, tuples or lists of tensors, got {type(leaf).__name__}."
            )
    return leaves


def rows_digest(*trees: RowTree) -> bytes:
    """Return the SHA-256 of the shapes, types and values of rows. Sensitive."""
    digest = hashlib.sha256()
    for tensor in (each for tree in trees for each in row_tensors(tree)):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
        digest.update(values.view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def map_tensors(change: Callable[[Tensor], Tensor], rows: RowTree) -> RowTree:
    """Return the tree with every tensor changed; the structure stays."""

    def changed(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(changed, rows)


def number_of_rows(rows: RowTree) -> int:
    """Return the number of rows, equal in all tensors.

    Raises:
        ArgumentError: there is no tensor, or the numbers differ.
    """
    shapes = [tensor.shape for tensor in row_tensors(rows)]
    counts = {shape[0] if len(shape) else -1 for shape in shapes}
    if len(counts) != 1 or -1 in counts:
        shown = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ArgumentError(f"inputs must have the same number of rows in all their tensors, got shapes {shown}.")
    return counts.pop()


@final
@dataclass(frozen=True)
class Microbatch:
    """A fixed-shape piece of a draw. Sensitive.

    Attributes:
        inputs: U·R rows: a tensor, or a dict, tuple or list of tensors. A model is called with a tensor as it is, with
            a dict by keyword, with a tuple or list by position.
        targets: as many targets, in the same forms.
        row_weights_UR: the weights with which rows enter their unit's loss: they sum to one in a real unit and to zero
            in a padding unit.
    """

    inputs: RowTree
    targets: RowTree
    row_weights_UR: Tensor

    @property
    def rows(self) -> int:
        """The number of rows, U·R."""
        return number_of_rows(self.inputs)

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return row_tensors(self.inputs)[0].device

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(x.shape)) for x in row_tensors(self.inputs))
        return f"Microbatch(inputs={shapes}, sensitive)"


class Batch(Protocol):
    """One draw of units. It owns the whole draw; nothing of it outlives the step."""

    @property
    def sampling(self) -> Sampling:
        """How the units were chosen."""
        ...

    @property
    def drawn_batch_size(self) -> int:
        """The number of drawn units. Sensitive."""
        ...

    def microbatches(self, units: int, only: range | None = None) -> Iterator[Microbatch]:
        """Yield the draw in pieces of exactly ``units`` units, the last one padded. An empty draw yields nothing.

        Args:
            units: of a piece.
            only: numbers of the pieces to yield, from zero; all by default. The others are not read.
        """
        ...


def chosen_starts(units: int, size: int, only: range | None) -> range:
    """Return where the chosen pieces of ``size`` units begin, of ``units`` in all."""
    pieces = -(-units // size)
    chosen = range(pieces) if only is None else only
    return range(chosen.start * size, min(chosen.stop, pieces) * size, size)


@final
class ClippedSum:
    """The exact sum over units of their clipped gradients. Sensitive: ``noise.noisy_mean`` opens it, once.

    Args:
        gradients: the sums by parameter name.
        clip_norm: the L2 bound on one unit's contribution.
        disposable: whether nothing else holds these tensors and no two share memory, so that the release may
            overwrite them.

    Guarantee: adding or removing one unit moves it by at most ``clip_norm`` in L2.
    """

    __slots__ = ("clip_norm", "disposable", "gradients", "taken")

    def __init__(self, gradients: Mapping[str, Tensor], clip_norm: float, *, disposable: bool = False) -> None:
        self.gradients: Mapping[str, Tensor] = gradients
        self.clip_norm = clip_norm
        self.disposable = disposable
        self.taken = False

    def take(self) -> dict[str, Tensor]:
        """Return the sums and remove them from here, so that noise is drawn once for each and memory is freed.

        Raises:
            PrivacyError: they were taken before.
        """
        if self.taken:
            raise PrivacyError("this sum has been released: a second time would be another release. Compute it again.")
        sums, self.gradients, self.taken = dict(self.gradients), {}, True
        return sums

    def __repr__(self) -> str:
        return f"ClippedSum({len(self.gradients)} parameters, clip_norm={self.clip_norm}, sensitive)"


@final
class PrivateGrad:
    """A noisy gradient, already divided by the public divisor: safe to use and to keep.

    Args:
        gradients: the noisy means by parameter name.
        step: the step that they belong to.
        proof: ``PROOF_OF_NOISE``.

    Raises:
        PrivacyError: made by anything but ``noise.noisy_mean``.
    """

    __slots__ = ("gradients", "step")

    def __init__(self, gradients: Mapping[str, Tensor], step: int, *, proof: object) -> None:
        if proof is not PROOF_OF_NOISE:
            raise PrivacyError("only noise.noisy_mean makes a PrivateGrad.")
        self.gradients = gradients
        self.step = step

    def __repr__(self) -> str:
        return f"PrivateGrad({len(self.gradients)} parameters, step={self.step})"


@final
class OrdinaryGrad:
    """A mean gradient without noise: no guarantee. Only an optimizer made for ordinary training takes it."""

    __slots__ = ("gradients", "step")

    def __init__(self, gradients: Mapping[str, Tensor], step: int) -> None:
        self.gradients = gradients
        self.step = step


def groups_by_size(sizes: Mapping[str, int], *, most: int) -> Iterator[tuple[str, ...]]:
    """Yield names in order, as many at once as stay within ``most`` numbers together, and at least one.

    Args:
        sizes: numbers of each parameter, by name.
        most: the limit for a group of several.
    """
    names: tuple[str, ...] = ()
    numbers = 0
    for name, size in sizes.items():
        if names and numbers + size > most:
            yield names
            names, numbers = (), 0
        names, numbers = (*names, name), numbers + size
    if names:
        yield names
