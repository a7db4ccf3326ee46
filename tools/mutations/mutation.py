"""What a breakage is."""

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


def mutations(tests: str, file: str, *changes: tuple[str, str, str]) -> tuple[Mutation, ...]:
    """Several changes of one file that the same test file (below tests/) must notice."""
    found = tuple(f"tests/{name}.py" for name in tests.split())
    return tuple(Mutation(name, file, old, new, found) for name, old, new in changes)
