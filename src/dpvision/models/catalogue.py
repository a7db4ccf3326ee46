"""The catalogue: names → models."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dpvision.checks import ArgumentError, DPVisionError, Problems, brief
from dpvision.models.entries import ENTRIES, Entry
from dpvision.models.initialise import seeded

_BY_NAME: dict[str, Entry] = {found.name: found for found in ENTRIES}
# From here up a number may make a model that does not fit into memory, so it is counted first.
_LARGE = 1024


def catalogue() -> tuple[Entry, ...]:
    """Every architecture, family by family."""
    return ENTRIES


def entry(name: str) -> Entry:
    """The entry of that name."""
    if name not in _BY_NAME:
        close = difflib.get_close_matches(str(name), _BY_NAME, n=3)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"There are: {', '.join(_BY_NAME)}."
        raise ArgumentError(f"model must be a name of the catalogue, got {brief(name)!r}. {hint}")
    return _BY_NAME[name]


def create(
    name: str, *, num_classes: int = 10, in_channels: int = 3, seed: int | None = None, **options: Any
) -> nn.Module:
    """Build a model on the CPU, with weights drawn from ``seed`` (None: from the operating system's entropy).

    ``options`` are those of ``entry(name).options``; any other is refused. The global generator does not move.
    """
    build = _checked(name, num_classes=num_classes, in_channels=in_channels, options=options)
    with _worded(name, options):
        numbers = [num_classes, in_channels, *(value for value in options.values() if isinstance(value, int))]
        if max(numbers) > _LARGE:
            _require_memory(build)
        with torch.device("cpu"), seeded(seed):
            return build()


def count_parameters(name: str, *, num_classes: int = 10, in_channels: int = 3, **options: Any) -> int:
    """How many parameters ``create`` would make, without making them."""
    build = _checked(name, num_classes=num_classes, in_channels=in_channels, options=options)
    return _count(build)


def _count(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"), seeded(0):
        return sum(parameter.numel() for parameter in build().parameters())


def _require_memory(build: Callable[[], nn.Module]) -> None:
    """Refuse a model that this machine can't hold before it is filled with numbers."""
    needed = _count(build) * torch.float32.itemsize
    if needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise ArgumentError(f"the model would need {needed} bytes, more than this machine has. Lower its options.")


@contextmanager
def _worded(name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Options may come from anybody's file: what a model's code says of impossible ones is worded as ours."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError, MemoryError) as error:
        if isinstance(error, DPVisionError):
            raise
        reason = brief((str(error).splitlines() or [type(error).__name__])[0])
        raise ArgumentError(f"{name} can't be made with the options {brief(dict(options))}: {reason}") from error


def _checked(name: str, *, num_classes: int, in_channels: int, options: dict[str, Any]) -> Callable[[], nn.Module]:
    found = entry(name)
    problems = Problems()
    problems.count("num_classes", num_classes)
    problems.count("in_channels", in_channels)
    unknown = [key for key in options if key not in found.options]
    allowed = ", ".join(found.options) or "none"
    problems.require(not unknown, f"{name} has no option {', '.join(unknown)}. Allowed options: {allowed}.")
    problems.raise_if_any()
    return functools.partial(found.build, num_classes=num_classes, in_channels=in_channels, **options)
