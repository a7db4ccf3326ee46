"""A run as a typed value. What is None is still open; ``training.prepare`` fills it in before anything is spent."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, TypeVar, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dpvision.errors import ArgumentError, brief
from dpvision.gradients.performance import Performance
from dpvision.models.losses import LossName, Task
from dpvision.privacy.mechanism import Adjacency, Clipping, Mechanism, OrdinaryPlan
from dpvision.privacy.schedules import AveragingSettings, OptimizerSettings, ScheduleSettings

Option = bool | int | float | str
T = TypeVar("T")
MOST_SHOWN = 10
"""Problems of a configuration that one message names."""
_MECHANISM_FIELDS = ("num_units", "expected_batch_size", "clip_norm", "noise_multiplier", "steps", "privacy_unit")
_MECHANISM_CHOICES = ("adjacency", "clipping", "unit_norm")  # never open: each has a default


class _Settings(BaseModel):
    """Frozen, and strict about unknown keys: a typo is an error, not a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@final
class DataConfig(_Settings):
    """Where the pictures come from, and what a privacy unit is. ``mean`` and ``std`` are written by the run itself.

    ``masks`` holds the answers where every pixel has one. Volumes are cut along ``volume_axis``, and intensities
    outside ``window`` are cut off. ``unit_pattern`` finds the owner in a file's name. Where owners of rows are known,
    they are the units, unless ``units`` is "rows"; at most ``rows_per_unit`` of a unit's rows enter a step.
    """

    source: str
    test: str | None = None
    data_dir: str | None = None
    image_size: int | None = Field(default=None, ge=4, le=1024)
    channels: Literal[1, 3] | None = None
    skip_bad: bool = False
    holdout_fraction: float = Field(default=0.1, gt=0, lt=1)
    normalisation: Literal["auto", "published", "fixed", "none", "released"] = "auto"
    statistics_noise_multiplier: float = Field(default=8.0, gt=0)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    masks: str | None = None
    test_masks: str | None = None
    mask_classes: Literal["merged", "classes"] = "merged"
    volume_axis: Literal[0, 1, 2] = 2
    window: tuple[float, float] | None = None
    only_foreground: bool = False
    unit_column: str | None = None
    unit_csv: str | None = None
    unit_folder_level: int | None = None
    unit_pattern: str | None = None
    units: Literal["auto", "rows", "owners"] = "auto"
    rows_per_unit: int | None = Field(default=None, ge=1, le=10_000)

    @property
    def name(self) -> str:
        """What the data are called where the path to them is nobody's business."""
        return Path(self.source).name or self.source


@final
class ViewsConfig(_Settings):
    """Augmented views of every drawn picture: ``count`` of them are averaged before the unit's one clip.

    ``crop_padding`` pixels are added on every side before a random crop; ``flip`` and ``erasing`` are probabilities;
    ``rotation`` is the largest angle in degrees. Nothing here is learned from data, so views cost no epsilon.
    """

    count: int = Field(default=1, ge=1, le=64)
    crop_padding: int = Field(default=0, ge=0, le=64)
    padding: Literal["reflect", "symmetric", "zeros"] = "reflect"
    flip: float = Field(default=0.0, ge=0, le=1)
    rotation: float = Field(default=0.0, ge=0, le=180)
    erasing: float = Field(default=0.0, ge=0, le=1)


@final
class ModelConfig(_Settings):
    """A name of the catalogue and its options."""

    name: str
    options: dict[str, Option] = {}


@final
class PriorRelease(_Settings):
    """The earlier run whose release gave the first weights, as its certificate has it. Written by the run itself.

    ``data`` are names: more than one if a fork changed them. ``epsilon`` is None without privacy, and ``stamps`` are
    reasons not to release. If the run began with weights from elsewhere itself, ``transfer`` says which, and so on.
    """

    run_id: str
    data: tuple[str, ...]
    privacy_unit: str
    adjacency: Adjacency | None = None
    epsilon: float | None = None
    delta: float | None = None
    stamps: tuple[str, ...] = ()
    began_elsewhere: bool = False
    transfer: TransferConfig | None = None


@final
class TransferConfig(_Settings):
    """Where the first weights come from, and which of them are trained.

    ``weights`` is a file (.safetensors, .npz, or a torch state file, which is loaded without executing anything), the
    folder of an earlier run, or the name of a known set. ``rename`` maps prefixes of its names to ours. ``trained``
    says what learns: the new ``head``, the ``last`` so many ``stages`` (the head is one), ``all``, or the head for
    ``head_steps`` and then all. ``source`` and ``licence`` describe the data that the weights were trained on; the
    certificate repeats them. With ``initialisation`` "mean_var" layers are drawn anew with the mean and variance that
    they have there.

    ``sha256`` is the file's; left open, the run writes it, and ``prior`` too.
    """

    weights: str
    rename: dict[str, str] = {}
    trained: Literal["head", "last", "all", "head_then_all"] = "head"
    stages: int | None = Field(default=None, ge=1)
    head_steps: int | None = Field(default=None, ge=1)
    source: str | None = None
    licence: str | None = None
    initialisation: Literal["weights", "mean_var"] = "weights"
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    prior: PriorRelease | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> TransferConfig:
        if (self.stages is not None) != (self.trained == "last"):
            raise ValueError("stages must be given with trained=last, and only there")
        if (self.head_steps is not None) != (self.trained == "head_then_all"):
            raise ValueError("head_steps must be given with trained=head_then_all, and only there")
        if self.initialisation == "mean_var" and self.trained != "all":
            raise ValueError("initialisation=mean_var draws every layer anew, so it needs trained=all")
        return self


@final
class PrivacyConfig(_Settings):
    """The mechanism, or what is known of it so far.

    ``target_epsilon`` is a wall: no step may be taken that would cross it. ``privacy_unit`` is a word for what is
    protected; only a run whose units own several rows may call them by another name than ``example``.
    ``num_units`` left open is counted with noise of ``count_noise_multiplier`` and charged.
    ``most_rows_per_owner`` bounds the rows of one owner where rows are the units, so that owners get a figure too.
    """

    enabled: bool = True
    target_epsilon: float | None = Field(default=None, gt=0)
    delta: float | None = Field(default=None, gt=0, lt=1)
    noise_multiplier: float | None = Field(default=None, gt=0)
    expected_batch_size: float | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, ge=1)
    clip_norm: float | None = Field(default=None, gt=0)
    clipping: Clipping = "flat"
    unit_norm: bool = False
    num_units: int | None = Field(default=None, ge=1)
    count_noise_multiplier: float | None = Field(default=None, gt=0)
    most_rows_per_owner: int | None = Field(default=None, ge=1)
    privacy_unit: str | None = None
    adjacency: Adjacency = "add_remove"

    @model_validator(mode="after")
    def _names_a_budget(self) -> PrivacyConfig:
        if self.enabled and self.target_epsilon is None and self.noise_multiplier is None:
            raise ValueError("a private run needs target_epsilon or noise_multiplier")
        return self


@final
class RunConfig(_Settings):
    """Everything that decides what a run computes, and nothing secret: it is part of the release.

    ``task``: a class for each picture, or for each pixel (segmentation). ``cache_features``: what a frozen front makes
    of the pictures is kept in memory, on disk too, or computed anew. ``feature_precision``: how kept features are
    computed; bfloat16 is several times faster where the processor has it.
    """

    name: str = Field(default="run", pattern=r"^[^/\\\x00]{1,200}$")  # it becomes the name of a folder
    task: Task = "classification"
    loss: LossName | None = None
    data: DataConfig
    model: ModelConfig | None = None
    views: ViewsConfig = ViewsConfig()
    transfer: TransferConfig | None = None
    privacy: PrivacyConfig
    optimizer: OptimizerSettings | None = None
    schedule: ScheduleSettings = ScheduleSettings()
    averaging: AveragingSettings = AveragingSettings()
    cache_features: Literal["memory", "disk", "off"] = "memory"
    feature_precision: Literal["float32", "bfloat16"] = "float32"
    evaluations: int = Field(default=10, ge=1)
    checkpoint_every: int = Field(default=50, ge=1)
    performance: Performance = Performance()

    @model_validator(mode="after")
    def _fits_its_task(self) -> RunConfig:
        if self.task == "segmentation":
            if self.transfer is not None and self.transfer.trained not in ("all", "last"):
                raise ValueError("transfer.trained must be all or last for segmentation: its features are not kept")
            return self
        if self.data.masks is not None or self.data.test_masks is not None:
            raise ValueError("masks need task=segmentation")
        if self.loss not in (None, "cross_entropy"):
            raise ValueError(f"loss must be cross_entropy for classification, got {self.loss}")
        return self

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism of a resolved, private configuration."""
        if not self.privacy.enabled:
            raise ArgumentError("a run without privacy has no mechanism.")
        self._require_resolved(*_MECHANISM_FIELDS)
        return Mechanism(**self.privacy.model_dump(include={*_MECHANISM_FIELDS, *_MECHANISM_CHOICES}))

    @property
    def plan(self) -> Mechanism | OrdinaryPlan:
        """What is drawn and how often, with privacy or without."""
        if self.privacy.enabled:
            return self.mechanism
        self._require_resolved("num_units", "expected_batch_size", "steps")
        return OrdinaryPlan(**self.privacy.model_dump(include={"num_units", "expected_batch_size", "steps"}))

    def _require_resolved(self, *names: str) -> None:
        still_open = [name for name in names if getattr(self.privacy, name) is None]
        if still_open:
            raise ArgumentError(f"the configuration is not resolved: {', '.join(still_open)} still open.")

    def to_json(self) -> str:
        """Canonical JSON: equal configurations give equal text."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"

    def digest(self) -> str:
        """SHA-256 of what was configured; constants that the run itself released are left out."""
        configured = self.with_normalisation(None, None)
        return hashlib.sha256(configured.to_json().encode()).hexdigest()

    def public(self) -> RunConfig:
        """What is released of the configuration: names of files and folders, not where they lie."""
        paths = ("source", "test", "masks", "test_masks", "unit_csv")
        names = {name: Path(value).name for name in paths if (value := getattr(self.data, name)) is not None}
        update: dict[str, Any] = {"data": self.data.model_copy(update={**names, "data_dir": None})}
        if self.transfer is not None:
            update["transfer"] = self.transfer.model_copy(update={"weights": Path(self.transfer.weights).name})
        return self.model_copy(update=update)

    def with_normalisation(self, mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> RunConfig:
        """The same configuration with these constants for the pixels."""
        return self.model_copy(update={"data": self.data.model_copy(update={"mean": mean, "std": std})})


def parse_config(values: dict[str, Any] | str | bytes) -> RunConfig:
    """A configuration from JSON text or plain values; all problems in one line."""
    try:
        if isinstance(values, dict):
            return RunConfig.model_validate(values)
        return RunConfig.model_validate_json(values)
    except ValidationError as error:
        raise ArgumentError(one_line(error)) from error


def one_line(error: ValidationError) -> str:
    """A pydantic error as one line: where, what, and the value."""
    parts = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"]) or "configuration"
        value = problem.get("input")
        plain = isinstance(value, (int, float, str))
        shown = f", got {brief(repr(value) if isinstance(value, str) else value)}" if plain else ""
        parts.append(f"{brief(where)}: {problem['msg']}{shown}")
    more = f" and {len(parts) - MOST_SHOWN} more" if len(parts) > MOST_SHOWN else ""
    return f"{'; '.join(parts[:MOST_SHOWN])}{more}"


def required(value: T | None, name: str) -> T:
    """A setting that must have been filled in by now."""
    if value is None:
        raise ArgumentError(f"the configuration is not resolved: {name} is still open.")
    return value
