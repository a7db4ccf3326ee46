"""The table of hostile models, why its cases are dangerous, and what they are built from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from model_cases import CLASSES, Case, Own, cross_entropy, images, vectors

HOSTILE: list[Case] = []
"""The table. ``hostile_models`` fills it."""

WIDTH = 6


def hostile(name: str, why: str, **facts: bool) -> Callable[[Callable[[], Own]], Callable[[], Own]]:
    """Enter a function that builds a model into the table."""

    def enter(make: Callable[[], Own]) -> Callable[[], Own]:
        HOSTILE.append(Case(name, why, make, **facts))
        return make

    return enter


class Mix(Protocol):
    """What is done between two layers; it may also return how to undo it after the second one."""

    def __call__(self, x: Tensor, /) -> Any: ...


class Sandwich(nn.Module):
    """A layer, something done to its outputs, a second layer, that undone, and a head."""

    def __init__(self, mix: Mix | None = None, *, conv: bool = False) -> None:
        super().__init__()
        if mix is not None:
            self.mix = mix
        if conv:
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))
        else:
            self.first, self.second, self.head = (nn.Linear(WIDTH, size) for size in (WIDTH, WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(torch.tanh(self.first(x)))
        y, undo = mixed if isinstance(mixed, tuple) else (mixed, lambda y: y)
        return self.head(undo(torch.tanh(self.second(y))))


def linear_own(model: nn.Module, **facts: Any) -> Own:
    """Give a model vectors and cross-entropy."""
    return Own(model, facts.pop("loss_fn", cross_entropy), vectors, **facts)


def conv_own(model: nn.Module, **facts: Any) -> Own:
    """Give a model images and cross-entropy."""
    return Own(model, facts.pop("loss_fn", cross_entropy), images, **facts)


def mixes(name: str, why: str, mix: Mix, *, conv: bool | None = False, **facts: bool) -> None:
    """Enter a sandwich with this in the middle: of linear layers, of convolutions, or both (None)."""
    for is_conv in (False, True) if conv is None else (conv,):
        own = conv_own if is_conv else linear_own
        kind = ", convolutions" if is_conv else ""

        def make(own: Any = own, is_conv: bool = is_conv) -> Own:
            return own(Sandwich(mix, conv=is_conv))

        HOSTILE.append(Case(name + kind, why, make, **facts))


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# Why a case is dangerous, where several share the reason.
WRONG_ROW = "the outputs are separable, but the layer sees each unit at another unit's place"
FOLDED = "a view takes entries of one row for entries of another"
STATISTIC = "every row depends on a statistic of all rows"
PLACE = "adding a unit moves the others to another place or number"
BRANCH = "which branch is taken depends on all rows, or on their number"
WATCHED = "harmless in a trial, different in a step"
SHARED_DRAW = "one draw for each micro-batch: removing a unit moves others to another micro-batch"
COIN = "mixing with probability 0.3: a trial sees the other branch"
STATE = "one call's rows are carried into the next"
CHANGED = "proved once, changed afterwards"
LATER = "mixes only after it was proved"
BACKWARD = "the outputs are separable, the backward pass is not"
IN_BATCH = "a row's loss depends on other rows"
JIT = "its code is not Python"
BATCH_NORM = "statistics over the batch"
SEQUENCE = "the rows are taken for a sequence"
INPLACE = "written in place, past what a graph of values shows"
