"""What a table is: rows that are recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

from dpvision.checks import ArgumentError
from dpvision.recipes import Recipe, find_recipe


@final
@dataclass(frozen=True)
class Row:
    """One line of a table: words for it, and the name of its recipe, which is also the row's own."""

    label: str
    name: str

    @property
    def recipe(self) -> Recipe:
        """What is run."""
        return find_recipe(self.name)


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """A paper's table or figure."""

    name: str
    title: str
    rows: tuple[Row, ...]

    def choose(self, patterns: Sequence[str]) -> tuple[Row, ...]:
        """The rows with these names, or all of them without any; ``*`` stands for anything."""
        if not patterns:
            return self.rows
        for pattern in patterns:
            if not any(fnmatchcase(row.name, pattern) for row in self.rows):
                names = ", ".join(row.name for row in self.rows)
                raise ArgumentError(f"--rows must name rows of {self.name}, got {pattern!r}. There are: {names}.")
        return tuple(row for row in self.rows if any(fnmatchcase(row.name, pattern) for pattern in patterns))
