"""Partial sums: the fixed order in which a step's clipped gradients are added, whatever the number of processes.

A step's micro-batches are numbered, and cut into P contiguous parts (P a power of two, a setting of the run). Each part
is added up from left to right, by one process. The parts are then added along one binary tree: 0+1, 2+3 …, then
(0+1)+(2+3), and so on. A process owns contiguous parts, adds up every branch of the tree that it owns whole, and sends
those to rank 0, which finishes the tree. Floating-point addition is not associative, but no order of additions depends
on the number of processes, so no bit does either. With P = 1 this is one running sum over all micro-batches.

Units are never divided: a unit's rows are in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import torch
from torch import Tensor, nn

from dpvision.privacy.values import groups_by_size
from dpvision.ranks import LEADER, Ranks

Sums = dict[str, Tensor]
_TOGETHER: Final = 1 << 22  # numbers in a message: small parameters travel together


class Branch(NamedTuple):
    """The sum of parts ``first`` … ``first + size - 1``; None where no part has a micro-batch."""

    first: int
    size: int
    sums: Sums | None


@final
@dataclass(frozen=True)
class Share:
    """The parts of a step that one process adds up.

    Attributes:
        parts: the number of parts of a step, a power of two.
        rank: of the process.
        size: the number of processes.
    """

    parts: int
    rank: int = 0
    size: int = 1

    @property
    def own_parts(self) -> range:
        """The parts of this process: contiguous, none twice, and empty where there are more processes than parts."""
        return range(self.rank * self.parts // self.size, (self.rank + 1) * self.parts // self.size)

    def start(self, part: int, microbatches: int) -> int:
        """Return the first micro-batch of a part."""
        return part * microbatches // self.parts

    def own_microbatches(self, microbatches: int) -> range:
        """Return the numbers of this process's micro-batches, of all that the step has."""
        own = self.own_parts
        return range(self.start(own.start, microbatches), self.start(own.stop, microbatches))

    def part_of(self, microbatch: int, microbatches: int) -> int:
        """Return the part that a micro-batch belongs to."""
        return next(p for p in self.own_parts if microbatch < self.start(p + 1, microbatches))

    def branches(self, microbatches: int) -> Iterator[tuple[int, int, bool]]:
        """Yield first part, size and whether it holds a micro-batch, of each branch that this process sends."""
        tree = SumTree()
        for part in self.own_parts:
            filled = self.start(part, microbatches) < self.start(part + 1, microbatches)
            tree.push(Branch(part, 1, {} if filled else None))
        for first, size, sums in tree.branches:
            yield first, size, sums is not None


WHOLE: Final = Share(1)
"""One process that adds everything up in one sum."""


@final
class SumTree:
    """Branches from left to right; two halves of one larger branch are added as soon as both are there."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []

    def push(self, branch: Branch) -> None:
        """Add the next branch on the right; its tensors are used up."""
        while self.branches:
            left = self.branches[-1]
            if left.size != branch.size or left.first % (2 * left.size):
                break
            branch = Branch(left.first, 2 * left.size, _added(left.sums, branch.sums))
            self.branches.pop()
        self.branches.append(branch)

    def total(self) -> Sums | None:
        """Return the sum of all parts, which must all have been pushed; None if every part is empty."""
        ((_, _, sums),) = self.branches
        return sums


def send_branches(tree: SumTree, ranks: Ranks) -> None:
    """Send the branches that a process has added up to rank 0; empty ones are not sent."""
    for _, _, sums in tree.branches:
        if sums is not None:
            _send(sums, ranks, to=LEADER)


def receive_branches(
    tree: SumTree, ranks: Ranks, parameters: Mapping[str, nn.Parameter], share: Share, count: int
) -> None:
    """Receive the branches of all other processes, in the order of their parts, and add them to rank 0's tree.

    Args:
        tree: with rank 0's own branches.
        ranks: the processes.
        parameters: the parameters whose gradients are sent, by name.
        share: rank 0's share.
        count: the number of micro-batches of the step.
    """
    for rank in range(1, ranks.size):
        for first, size, filled in Share(share.parts, rank, ranks.size).branches(count):
            tree.push(Branch(first, size, _received(ranks, rank, parameters) if filled else None))


def exchange_branches(
    tree: SumTree,
    ranks: Ranks,
    parameters: Mapping[str, nn.Parameter],
    share: Share,
    count: int,
    owners: Mapping[str, int],
) -> SumTree:
    """Give every owner the branches of its parameters, in the order of their parts; all ranks call this.

    Args:
        tree: of this process; it is used up.
        ranks: the processes.
        parameters: the parameters whose gradients are added, by name.
        share: of this process.
        count: the number of micro-batches of the step.
        owners: the rank that owns each parameter.

    Returns:
        The tree of the parameters that this process owns: the additions of ``receive_branches``, in its order.
    """
    whole = SumTree()
    for owner in range(ranks.size):
        owned = {name: parameter for name, parameter in parameters.items() if owners[name] == owner}
        for rank in range(ranks.size) if owned else ():
            if rank == ranks.rank:
                for first, size, sums in tree.branches:
                    mine = None if sums is None else {name: sums.pop(name) for name in owned}
                    if rank == owner:
                        whole.push(Branch(first, size, mine))
                    elif mine is not None:
                        _send(mine, ranks, to=owner)
            elif ranks.rank == owner:
                for first, size, filled in Share(share.parts, rank, ranks.size).branches(count):
                    whole.push(Branch(first, size, _received(ranks, rank, owned) if filled else None))
    return whole


def _send(sums: Sums, ranks: Ranks, *, to: int) -> None:
    """Send the sums of one branch; each is freed once it is sent."""
    for names in _messages({name: each.numel() for name, each in sums.items()}):
        ranks.send(torch.cat([sums.pop(name).view(-1) for name in names]), to=to)


def _received(ranks: Ranks, rank: int, parameters: Mapping[str, nn.Parameter]) -> Sums:
    """Receive one branch. What a message that is too short leaves open is NaN, to which no noise is added."""
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    sums: Sums = {}
    for names in _messages(sizes):
        row = ranks.receive(
            torch.full((sum(sizes[name] for name in names),), torch.nan, dtype=torch.float64), rank=rank
        )
        for name, piece in zip(names, row.split([sizes[name] for name in names]), strict=True):
            sums[name] = piece.view(parameters[name].shape).to(parameters[name].device)
    return sums


def _messages(sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    return groups_by_size(sizes, most=_TOGETHER)


def _added(left: Sums | None, right: Sums | None) -> Sums | None:
    """Add two branches, in the memory of the left one."""
    if left is None or right is None:
        return left if right is None else right
    return {name: left[name].add_(right[name]) for name in left}
