"""Averages of the parameters over steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from dpvision.optim.settings import AveragingSettings


@final
class Average:
    """A second set of parameters that follows the first. It begins as a copy of the initial ones."""

    def __init__(self, settings: AveragingSettings, parameters: Mapping[str, Tensor]) -> None:
        self._settings = settings
        kept = {} if settings.kind == "none" else parameters
        self.values: dict[str, Tensor] = {name: value.detach().clone() for name, value in kept.items()}

    def kept_share(self, step: int) -> float:
        """How much of the average survives the update of ``step``. Before ``start_step`` it is a plain copy."""
        update = step - self._settings.start_step
        if update < 0:
            return 0.0
        if self._settings.kind == "polyak":
            return update / (update + 1)
        return min(self._settings.decay, (1 + update) / (10 + update))

    @torch.no_grad()
    def update(self, parameters: Mapping[str, Tensor], step: int) -> None:
        """Take in the parameters that ``step`` left."""
        share = self.kept_share(step)
        for name, average in self.values.items():
            average.lerp_(parameters[name].detach(), 1 - share)
