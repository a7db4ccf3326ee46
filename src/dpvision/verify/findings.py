"""What a check collects."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from dpvision.checks import ArgumentError, DPVisionError, TamperError
from dpvision.runfolder import RunFolder, json_bytes, parse_object, read_file

_T = TypeVar("_T")


@final
@dataclass(frozen=True)
class Place:
    """Where things lie. ``whole``: a release, of which no file may be missing."""

    release: Path
    certificate: Path
    whole: bool
    run: RunFolder | None = None


@final
class Findings:
    """Collects every problem; what can't be read is one of them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def require(self, holds: bool, problem: str) -> None:
        """Note the problem unless the rule holds."""
        if not holds:
            self.problems.append(problem)

    @contextmanager
    def noted(self) -> Generator[None]:
        """Turn an error inside the block into a problem."""
        try:
            yield
        except (DPVisionError, ArithmeticError, ValueError) as error:
            self.problems.append(str(error))

    def attempt(self, read: Callable[[], _T]) -> _T | None:
        """The value of ``read``, or None and a problem."""
        with self.noted():
            return read()
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, if the file is as it was written.

    The very bytes that we would write: a key that is there twice means one thing to us and another to others.
    """
    content = read_file(path)
    values = parse_object(content, name=str(path))
    if rewritten(values) != content:
        raise TamperError(f"{path} is not as it was written: reformatted, or a key is there twice.")
    return values


def rewritten(values: dict[str, Any]) -> bytes | None:
    """The very bytes that we would write; None if we could not."""
    try:
        return json_bytes(values)
    except (ArgumentError, RecursionError):
        return None
