"""A run that is cut off between two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpvision.training import train
from dpvision.training.callbacks import Silence


class StopAfter(Silence):
    """A power cut after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        if done == self.steps:
            raise ConnectionAbortedError


def cut_off(run: Path, config: Any, *, after: int, seed: int | None = 3) -> None:
    """Train until so many steps are taken, and no further."""
    with pytest.raises(ConnectionAbortedError):
        train(config, run=run, seed=seed, watcher=StopAfter(after))
