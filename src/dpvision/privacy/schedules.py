"""What a user can set: typed, frozen, and refused where a setting would have no effect.

The learning rate as a function of the step, and of public metrics where that was declared.

Averages of the parameters over steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, final

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from dpvision.errors import ArgumentError, Problems

# More is a mistake, and far more would not fit into a float32.
LARGEST = 1e6
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, strict=True)]
AtLeastOne = Annotated[int, Field(ge=1, strict=True)]


class _Settings(BaseModel):
    """A frozen model without unknown fields, in which only some fields matter for each kind."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def _refuse_idle(self, *, kind: str, used: set[str], optional: set[str]) -> None:
        """Refuse every field of ``optional`` that differs from its default although ``kind`` does not use it.

        By value, not by whether it was given: settings read back from their own JSON must pass.
        """
        fields = type(self).model_fields
        idle = [name for name in sorted(optional - used) if getattr(self, name) != fields[name].default]
        if idle:
            given = ", ".join(f"{name}={getattr(self, name)}" for name in idle)
            raise ValueError(f"{kind} does not use {given}. Leave it out, or choose another kind.")


_OPTIMIZER_USES: dict[str, set[str]] = {
    "sgd": {"momentum", "nesterov"},
    "adam": {"betas", "eps"},
    "adamw": {"betas", "eps"},
    "nadam": {"betas", "eps", "momentum_decay"},
    "rmsprop": {"momentum", "eps", "smoothing", "centered"},
}


class OptimizerSettings(_Settings):
    """The update rule. Defaults are torch's; ``weight_decay=None`` means torch's own (0.01 for adamw, else 0)."""

    name: Literal["sgd", "adam", "adamw", "nadam", "rmsprop"] = "sgd"
    learning_rate: Positive
    weight_decay: NotNegative | None = None
    momentum: BelowOne = 0.0
    nesterov: bool = False
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: Positive = 1e-8
    momentum_decay: NotNegative = 4e-3
    smoothing: BelowOne = 0.99
    centered: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._refuse_idle(
            kind=self.name, used=_OPTIMIZER_USES[self.name], optional=set.union(*_OPTIMIZER_USES.values())
        )
        if self.nesterov and not self.momentum > 0:
            raise ValueError(f"nesterov needs momentum > 0, got {self.momentum}. Set momentum, such as 0.9.")
        return self

    @property
    def effective_weight_decay(self) -> float:
        """The weight decay that is applied."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.name == "adamw" else 0.0


_SCHEDULE_USES: dict[str, set[str]] = {
    "constant": set(),
    "step": {"every_steps", "factor"},
    "cosine": {"final_fraction"},
    "plateau": {"factor", "patience", "goal", "public_metric"},
}


class ScheduleSettings(_Settings):
    """The learning rate over steps, as a multiple of the optimizer's ``learning_rate``.

    Any kind can begin with ``warmup_steps`` of linear rise. ``plateau`` multiplies by ``factor`` after more than
    ``patience`` reports in a row without improvement, which looks at a metric: ``public_metric=True`` declares that it
    is computed on public data alone, and the certificate repeats the declaration.
    """

    kind: Literal["constant", "step", "cosine", "plateau"] = "constant"
    warmup_steps: Count = 0
    every_steps: AtLeastOne | None = None
    factor: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.1
    final_fraction: Share = 0.0
    patience: Count = 10
    goal: Literal["max", "min"] = "min"
    public_metric: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._refuse_idle(kind=self.kind, used=_SCHEDULE_USES[self.kind], optional=set.union(*_SCHEDULE_USES.values()))
        if self.kind == "step" and self.every_steps is None:
            raise ValueError("a step schedule needs every_steps, got none. Say after how many steps the rate drops.")
        if self.kind == "plateau" and not self.public_metric:
            raise ValueError(
                "a plateau schedule looks at a metric, which would leak if it came from private data. Set "
                "public_metric=true to declare that it is computed on public data, or choose cosine."
            )
        return self


_AVERAGING_USES: dict[str, set[str]] = {"none": set(), "ema": {"decay", "start_step"}, "polyak": {"start_step"}}


class AveragingSettings(_Settings):
    """Averaged parameters beside the trained ones: post-processing, so they cost no privacy.

    ``ema`` with De et al.'s warm-up: after update t (counted from ``start_step``) the average keeps the share
    ``min(decay, (1 + t) / (10 + t))`` of itself. ``polyak`` is the plain mean over all updates from ``start_step`` on.
    """

    kind: Literal["none", "ema", "polyak"] = "none"
    decay: BelowOne = 0.9999
    start_step: Count = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        uses = _AVERAGING_USES
        self._refuse_idle(kind=f"averaging {self.kind}", used=uses[self.kind], optional=set.union(*uses.values()))
        return self


_LEAST_IMPROVEMENT = 1e-4  # relative, as in torch's ReduceLROnPlateau


@final
class Schedule:
    """The learning rate of each step. Only a plateau schedule has state: what was reported to it."""

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
        """The rate used at ``step``, counted from zero."""
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
        """Feed the plateau schedule; every other kind ignores it. A value that is not a number is no improvement.

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
        """What a resumed run needs, as plain values."""
        return {
            "best": self._best,
            "reports_since_best": self._reports_since_best,
            "reductions": self._reductions,
        }

    def load_state(self, values: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self._best = values["best"]
        self._reports_since_best = values["reports_since_best"]
        self._reductions = values["reductions"]


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
