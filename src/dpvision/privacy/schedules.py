"""The learning rate of each step, and averages of the parameters over steps.

Their settings are sections of ``dpvision.config``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from dpvision.config import AveragingSettings, ScheduleSettings
from dpvision.errors import ArgumentError, Problems

_LEAST_IMPROVEMENT = 1e-4  # relative, as in torch's ReduceLROnPlateau


@final
class Schedule:
    """The learning rate of each step. Only a plateau schedule has state: the metrics reported to it.

    Args:
        settings: the kind of schedule.
        base_rate: the optimizer's learning rate, above zero.
        total_steps: the steps of the whole run.
    """

    def __init__(self, settings: ScheduleSettings, *, base_rate: float, total_steps: int) -> None:
        problems = Problems()
        problems.positive("learning_rate", base_rate)
        problems.count("total_steps", total_steps)
        problems.raise_if_any()
        self._settings = settings
        self._base_rate = base_rate
        self._total_steps = total_steps
        self._best: float | None = None
        self._reports_since_best = 0
        self._reductions = 0

    def learning_rate(self, step: int) -> float:
        """Return the rate used at ``step``, counted from zero."""
        if type(step) is not int or step < 0:
            raise ArgumentError(f"step must be a whole number >= 0, got {step!r}.")
        warmup = self._settings.warmup_steps
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        return self._base_rate * rise * self._decay(step)

    def _decay(self, step: int) -> float:
        settings = self._settings
        if settings.kind == "step" and settings.every_steps is not None:
            return settings.factor ** (step // settings.every_steps)
        if settings.kind == "cosine":
            length = max(1, self._total_steps - settings.warmup_steps)
            progress = min(1.0, max(0, step - settings.warmup_steps) / length)
            return settings.final_fraction + (1 - settings.final_fraction) * (1 + math.cos(math.pi * progress)) / 2
        if settings.kind == "plateau":
            return settings.factor**self._reductions
        return 1.0

    def report_public_metric(self, value: float) -> None:
        """Feed the plateau schedule; every other kind ignores it. NaN is not an improvement.

        Guarantee: none of its own; the settings have declared (``public_metric``) that ``value`` is public.
        """
        if self._settings.kind != "plateau":
            return
        if math.isfinite(value) and (self._best is None or self._improves(value, self._best)):
            self._best, self._reports_since_best = value, 0
            return
        self._reports_since_best += 1
        if self._reports_since_best > self._settings.patience:
            self._reductions += 1
            self._reports_since_best = 0

    def _improves(self, value: float, best: float) -> bool:
        if self._settings.goal == "max":
            return value > best * (1 + _LEAST_IMPROVEMENT)
        return value < best * (1 - _LEAST_IMPROVEMENT)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain values."""
        return {
            "best": self._best,
            "reports_since_best": self._reports_since_best,
            "reductions": self._reductions,
        }

    def load_state(self, values: dict[str, Any]) -> None:
        """Continue from ``state``."""
        self._best = values["best"]
        self._reports_since_best = values["reports_since_best"]
        self._reductions = values["reductions"]


@final
class Average:
    """A second set of parameters that follows the first: post-processing, without privacy cost.

    Args:
        settings: the kind of average.
        parameters: the initial parameters, which are copied.
    """

    def __init__(self, settings: AveragingSettings, parameters: Mapping[str, Tensor]) -> None:
        self._settings = settings
        kept = {} if settings.kind == "none" else parameters
        self.values: dict[str, Tensor] = {name: value.detach().clone() for name, value in kept.items()}

    def kept_share(self, step: int) -> float:
        """Return the weight of the old average in the update of ``step``; zero before ``start_step``."""
        update = step - self._settings.start_step
        if update < 0:
            return 0.0
        if self._settings.kind == "polyak":
            return update / (update + 1)
        return min(self._settings.decay, (1 + update) / (10 + update))

    @torch.no_grad()
    def update(self, parameters: Mapping[str, Tensor], step: int) -> None:
        """Include the parameters after ``step``."""
        share = self.kept_share(step)
        for name, average in self.values.items():
            average.lerp_(parameters[name].detach(), 1 - share)
