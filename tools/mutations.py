"""The breakages that ``tools.mutants`` applies: each makes a printed epsilon false, and some test must notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Mutation:
    """Replace ``old`` by ``new`` in ``file`` (below src/dpvision); ``tests`` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS: tuple[Mutation, ...] = ()
