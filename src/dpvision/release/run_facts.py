"""The public files of a finished run, parsed and checked: what a report and the terminal summary are made of.

Only release/certificate.json, metrics.json and config.json are read, and the example images if the certificate
declares them public. Nothing here reads private/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dpvision.errors import ArgumentError, DataError, validation_message
from dpvision.release.schema import Certificate, parse_certificate
from dpvision.release.statements import NO_PRIVACY, SHOWN_IMAGES_NAMES
from dpvision.storage.files import parse_object, read_file
from dpvision.storage.run_folder import CERTIFICATE, CONFIG, EXAMPLES, METRICS, Example, parse_examples

_Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=0)]


class _Facts(BaseModel):
    """Frozen, with finite numbers. Unknown keys are ignored, so that files of newer versions can be shown."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


@final
class TrainingPoint(_Facts):
    """Scores on public test data after ``step`` training steps."""

    step: _Count
    epsilon: float | None = Field(default=None, ge=0)
    accuracy: _Share | None = None
    dice: _Share | None = None

    @model_validator(mode="after")
    def _has_a_score(self) -> TrainingPoint:
        if self.accuracy is None and self.dice is None:
            raise ValueError("a point has neither accuracy nor dice")
        return self

    @property
    def score(self) -> float:
        """Dice for segmentation, accuracy for classification."""
        return (self.accuracy or 0.0) if self.dice is None else self.dice


@final
class ClassOverlap(_Facts):
    """Dice of one class."""

    dice: _Share


@final
class Overlaps(_Facts):
    """The released model on public images with masks."""

    dice: _Share
    iou: _Share | None = None
    dice_per_patient: _Share | None = None
    iou_per_patient: _Share | None = None
    pixel_accuracy: _Share | None = None
    baseline_dice: _Share | None = None
    baseline_dice_per_patient: _Share | None = None
    per_class: dict[str, ClassOverlap] = {}
    per_patient: dict[str, _Share] | None = None


@final
class FinalMetrics(_Facts):
    """The released model on public data. Segmentation has ``overlaps`` instead of accuracies."""

    task: Literal["classification", "segmentation"] = "classification"
    accuracy: _Share | None = None
    overlaps: Overlaps | None = None
    top5: _Share | None = None
    loss: float | None = None
    calibration: _Share | None = None
    per_class: dict[str, _Share | None] = {}
    per_class_count: dict[str, _Count] = {}
    count: _Count | None = None
    evaluated_on: str = "a public test set"
    weights: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _nest_overlaps(cls, values: Any) -> Any:
        """Put the metrics of segmentation, whose ``per_class`` has another layout, into ``overlaps``."""
        if not isinstance(values, dict) or values.get("task") != "segmentation":
            return values
        return {**{key: value for key, value in values.items() if key != "per_class"}, "overlaps": values}

    @model_validator(mode="after")
    def _has_a_score(self) -> FinalMetrics:
        if (self.accuracy if self.task == "classification" else self.overlaps) is None:
            raise ValueError(f"the metrics of {self.task} are missing")
        return self

    @property
    def score(self) -> float:
        """The headline metric: Dice for segmentation, accuracy for classification."""
        return (self.accuracy or 0.0) if self.overlaps is None else self.overlaps.dice

    @property
    def images(self) -> int | None:
        """The number of test images, where it is known."""
        return self.count if self.count is not None else sum(self.per_class_count.values()) or None


@final
class Metrics(_Facts):
    """The fields of metrics.json that a report shows."""

    curve: tuple[TrainingPoint, ...] = ()
    final: FinalMetrics | None = None
    train_seconds: float | None = Field(default=None, ge=0)

    @field_validator("final", mode="before")
    @classmethod
    def _none_without_a_score(cls, value: object) -> object:
        """A run that was stopped before its first evaluation has no metrics."""
        return None if isinstance(value, dict) and not {"accuracy", "dice"} & value.keys() else value


@final
@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything that a report may know of a run."""

    name: str
    certificate: Certificate
    metrics: Metrics | None
    config: dict[str, Any] | None
    examples: tuple[Example, ...] = ()

    @property
    def score_name(self) -> str:
        """The name of the headline metric."""
        by_pixel = (self.config or {}).get("task") == "segmentation"
        return "Dice" if by_pixel or (self.final is not None and self.final.overlaps is not None) else "accuracy"

    @property
    def final(self) -> FinalMetrics | None:
        """The metrics of the finished model."""
        return self.metrics.final if self.metrics else None


def read_run(run: Path) -> RunFacts:
    """Read the public facts of a run folder.

    Args:
        run: The folder that holds release/.

    Returns:
        The checked contents of its public files.

    Raises:
        DataError: A file is missing or is not what dpvision writes.

    Guarantee:
        Opens release/certificate.json, metrics.json and config.json, and nothing else; never private/. Only if the
        certificate declares test images public, it opens release/examples.safetensors too.
    """
    certificate, metrics, config = (_content(run, name) for name in (CERTIFICATE, METRICS, CONFIG))
    if certificate is None:
        raise DataError(
            f"{run} is not a finished run: it has no release/{CERTIFICATE}. Give the folder that dpvision train made."
        )
    release = run / "release"
    checked = checked_certificate(parse_object(certificate, name=str(release / CERTIFICATE)))
    examples = _content(run, EXAMPLES) if images_are_public(checked) else None
    return RunFacts(
        name=run.resolve().name,
        certificate=checked,
        metrics=None if metrics is None else checked_metrics(parse_object(metrics, name=str(release / METRICS))),
        config=None if config is None else parse_object(config, name=str(release / CONFIG)),
        examples=() if examples is None else parse_examples(examples, name=str(release / EXAMPLES)),
    )


def images_are_public(certificate: Certificate) -> bool:
    """Whether test images themselves may be shown, not only metrics that were measured on them."""
    return any(entry.what in SHOWN_IMAGES_NAMES for entry in certificate.declared)


def checked_certificate(values: Mapping[str, Any]) -> Certificate:
    """Parse a certificate; a wrong layout is a ``DataError`` of one line."""
    try:
        return parse_certificate(dict(values))
    except ArgumentError as error:
        raise DataError(
            f"{CERTIFICATE} is not what dpvision writes: {error}. Check it with dpvision verify."
        ) from error


def checked_metrics(values: Mapping[str, Any]) -> Metrics:
    """Parse metrics.json; a wrong layout is a ``DataError`` of one line."""
    try:
        return Metrics.model_validate(dict(values))
    except ValidationError as error:
        raise DataError(f"{METRICS} is not what dpvision writes: {validation_message(error, whole='all')}.") from error


def reasons_against_release(certificate: Certificate) -> tuple[str, ...]:
    """Why this run must not be released; empty if it may be. An inconsistent certificate has a reason, too."""
    if certificate.stamps:
        return tuple(certificate.stamps)
    if certificate.epsilon is None or certificate.delta is None:
        return (NO_PRIVACY,)
    if not certificate.for_release:
        return ("the certificate says that this run is not for release, and gives no reason",)
    return ()


def _content(run: Path, name: str) -> bytes | None:
    """The bytes of a file of the release, or None if there is no such file."""
    path = run / "release" / name
    return read_file(path) if path.exists() or path.is_symlink() else None
