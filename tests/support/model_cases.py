"""What the tables of clean and hostile models share: the form of a case, its rows and its losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 4
SIDE = 8

RowMaker = Callable[[int, torch.Generator], tuple[Any, Any]]
"""From a number of rows and a generator to inputs and targets."""


CLEANUP = ExitStack()
"""What cases change outside of their model is undone here; close it after each case."""


def _nothing(model: nn.Module, loss_fn: Any) -> None:
    """Change nothing between two calls."""


@dataclass(frozen=True)
class Own:
    """Somebody's own code, as it would be given to dpvision.

    Attributes:
        model: the module, in training mode.
        loss_fn: one loss per row, or so it claims.
        rows: makes inputs and targets.
        between: what its owner does between two calls.
    """

    model: nn.Module
    loss_fn: Any
    rows: RowMaker
    between: Callable[[nn.Module, Any], None] = _nothing


@dataclass(frozen=True)
class Case:
    """One line of a table.

    Attributes:
        name: what is tried, in a few words.
        why: what makes it dangerous, or why a clean model needs it, in one sentence.
        make: builds the code from torch's current seed and resets all state outside of the model.
        random: draws random numbers, so that there is no value to compare the sum with.
        refused: must be refused even where the sum happens to be exact.
        half: computes in 16 bits, so that a sum within 1 % is exact.
    """

    name: str
    why: str
    make: Callable[[], Own]
    random: bool = False
    refused: bool = False
    half: bool = False


def images(
    number: int, generator: torch.Generator, *, channels: int = 3, side: int = SIDE, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return images of normal noise and classes."""
    inputs = torch.randn(number, channels, side, side, generator=generator).to(dtype)
    return inputs, torch.randint(CLASSES, (number,), generator=generator)


def vectors(number: int, generator: torch.Generator, *, width: int = 6) -> tuple[Tensor, Tensor]:
    """Return vectors of normal noise and classes."""
    return torch.randn(number, width, generator=generator), torch.randint(CLASSES, (number,), generator=generator)


def tokens(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences of five indices below ten, and classes."""
    shape = (number, 5)
    return torch.randint(10, shape, generator=generator), torch.randint(CLASSES, (number,), generator=generator)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return one loss per row."""
    return F.cross_entropy(outputs, targets, reduction="none")
