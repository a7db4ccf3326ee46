"""Who takes part: a name, and a way to make one whole training step for a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, final

from benchmarks.workload import Workload
from dpvision.errors import DPVisionError

Step = Callable[[], float | None]
"""Takes one training step. One that runs in a process of its own tells the seconds that the step itself took."""
Kind = Literal["ordinary", "private", "unclipped", "peer"]

LEARNING_RATE: Final = 0.01
MOMENTUM: Final = 0.9
CLIP_NORM: Final = 1.0
NOISE_MULTIPLIER: Final = 1.0


class NoSuchModelError(DPVisionError):
    """A contender has no counterpart of the model: its row stays empty, which is no failure."""


@final
@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to take a training step. ``compiles`` marks those that are left out unless they are asked for.

    ``memory`` is a way of its own to the peak memory, for those that a process of this library can't measure.
    """

    name: str
    label: str
    kind: Kind
    make: Callable[[Workload], Step]
    compiles: bool = False
    memory: Callable[[Workload], int] | None = None
