"""Normalisation by name. LayerNorm is GroupNorm with one group, InstanceNorm is GroupNorm with one channel a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from torch import nn

from dpvision.checks import ArgumentError, Problems

NORMS = ("group", "layer", "instance", "batch", "none")
Groups = int | Sequence[int] | str
Rule = Literal["clamp", "gcd"]


@final
@dataclass(frozen=True)
class Norm:
    """Which normalisation to put after a layer.

    ``kind`` "batch" mixes rows: it is for ordinary (public) training only and the preflight refuses it.
    ``rule`` says how many groups C channels get: "clamp" min(groups, C) as in the ScaleNorm papers, "gcd" the greatest
    common divisor as in Opacus's replacement of BatchNorm.
    """

    kind: str = "group"
    groups: int = 32
    rule: Rule = "clamp"

    def __post_init__(self) -> None:
        problems = Problems()
        problems.require(self.kind in NORMS, f"norm must be one of {', '.join(NORMS)}, got {self.kind!r}.")
        problems.count("groups", self.groups)
        problems.raise_if_any()

    def make(self, channels: int) -> nn.Module:
        """The layer for ``channels`` channels."""
        if self.kind == "none":
            return nn.Identity()
        if self.kind == "batch":
            return nn.BatchNorm2d(channels)
        return nn.GroupNorm(self._groups_of(channels), channels)

    def _groups_of(self, channels: int) -> int:
        """How many groups ``channels`` channels get; a number that does not divide them is refused, not rounded."""
        if self.kind == "layer":
            return 1
        if self.kind == "instance":
            return channels
        if self.rule == "gcd":
            return math.gcd(self.groups, channels)
        groups = min(self.groups, channels)
        if channels % groups:
            raise ArgumentError(f"groups must divide the {channels} channels of every layer, got {self.groups}.")
        return groups


def norm_per_stage(kind: str, groups: Groups, *, stages: int, rule: Rule = "clamp") -> list[Norm]:
    """One ``Norm`` a stage: ``groups`` is one number for all stages, or one number each.

    Several numbers may also be a text such as "8,16,16,32", which a command line and a configuration can hold.
    """
    counts = [groups] * stages if isinstance(groups, int) else _numbers(groups)
    if counts is None or len(counts) != stages:
        raise ArgumentError(f"groups must be one number or {stages} numbers (one a stage), got {groups!r}.")
    return [Norm(kind, count, rule) for count in counts]


def _numbers(groups: Sequence[int] | str) -> list[int] | None:
    """The numbers of a sequence, or of a text that has them between commas; None if it has something else."""
    if not isinstance(groups, str):
        return list(groups) if isinstance(groups, Sequence) else None
    try:
        return [int(part) for part in groups.split(",")]
    except ValueError:
        return None
