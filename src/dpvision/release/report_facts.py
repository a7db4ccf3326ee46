"""What the page is made of: the public files of a run, checked before use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dpvision.errors import ArgumentError, DataError
from dpvision.release.schema import Certificate, parse_certificate
from dpvision.release.statements import NO_PRIVACY, SHOWN_PICTURES
from dpvision.storage.files import parse_object, read_file
from dpvision.storage.run_folder import CERTIFICATE, CONFIG, EXAMPLES, METRICS, Example, parse_examples

_Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=0)]


class _Facts(BaseModel):
    """Frozen; numbers are finite. Unknown keys are left alone, so that a page can be made of newer figures."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


@final
class CurvePoint(_Facts):
    """The model on public data after some steps."""

    step: _Count
    epsilon: float | None = Field(default=None, ge=0)
    accuracy: _Share | None = None
    dice: _Share | None = None

    @model_validator(mode="after")
    def _has_a_score(self) -> CurvePoint:
        if self.accuracy is None and self.dice is None:
            raise ValueError("a point has neither accuracy nor dice")
        return self

    @property
    def score(self) -> float:
        """Dice, or accuracy where a picture has one class."""
        return (self.accuracy or 0.0) if self.dice is None else self.dice


@final
class ClassOverlap(_Facts):
    """How well the pixels of one class are found."""

    dice: _Share
    iou: _Share | None = None
    dice_per_patient: _Share | None = None


@final
class Overlaps(_Facts):
    """The released model on public pictures of which every pixel has a class."""

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
    """The released model on public data. ``overlaps`` instead of accuracies where every pixel has a class."""

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
    def _overlaps_by_themselves(cls, values: Any) -> Any:
        """What a mask is judged by has names of its own, some of them those of other figures."""
        if not isinstance(values, dict) or values.get("task") != "segmentation":
            return values
        return {**{key: value for key, value in values.items() if key != "per_class"}, "overlaps": values}

    @model_validator(mode="after")
    def _has_a_score(self) -> FinalMetrics:
        if (self.accuracy if self.task == "classification" else self.overlaps) is None:
            raise ValueError(f"the figures of {self.task} are missing")
        return self

    @property
    def score(self) -> float:
        """The first figure that people ask for: Dice, or accuracy where a picture has one class."""
        return (self.accuracy or 0.0) if self.overlaps is None else self.overlaps.dice

    @property
    def pictures(self) -> int | None:
        """How many pictures the figures rest on, where that is known."""
        if self.count is not None:
            return self.count
        return sum(self.per_class_count.values()) or None


@final
class Metrics(_Facts):
    """The fields of metrics.json that the page shows."""

    curve: tuple[CurvePoint, ...] = ()
    final: FinalMetrics | None = None
    train_seconds: float | None = Field(default=None, ge=0)

    @field_validator("final", mode="before")
    @classmethod
    def _none_without_a_score(cls, value: object) -> object:
        """A run that was stopped before its first evaluation has no figures."""
        return None if isinstance(value, dict) and not {"accuracy", "dice"} & value.keys() else value


@final
@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything that the page may know of a run."""

    name: str
    certificate: Certificate
    metrics: Metrics | None
    config: dict[str, Any] | None
    examples: tuple[Example, ...] = ()

    @property
    def score_name(self) -> str:
        """What the model is judged by."""
        by_pixel = (self.config or {}).get("task") == "segmentation"
        return "Dice" if by_pixel or (self.final is not None and self.final.overlaps is not None) else "accuracy"

    @property
    def final(self) -> FinalMetrics | None:
        """The figures of the finished model."""
        return self.metrics.final if self.metrics else None


def read_run(run: Path) -> RunFacts:
    """The public facts of a run folder.

    Guarantee: opens release/certificate.json, metrics.json and config.json, and nothing else; never private/. If the
    certificate declares test pictures public, it opens release/examples.safetensors too.
    """
    certificate = _read(run, CERTIFICATE)
    if certificate is None:
        raise DataError(
            f"{run} is not a finished run: it has no release/{CERTIFICATE}. Give the folder that dpvision train made."
        )
    metrics, checked = _read(run, METRICS), checked_certificate(certificate)
    return RunFacts(
        name=run.resolve().name,
        certificate=checked,
        metrics=None if metrics is None else checked_metrics(metrics),
        config=_read(run, CONFIG),
        examples=_examples(run) if pictures_are_public(checked) else (),
    )


def pictures_are_public(certificate: Certificate) -> bool:
    """Whether test pictures themselves may be seen, not only figures that were measured on them."""
    return any(entry.what == SHOWN_PICTURES for entry in certificate.declared)


def checked_certificate(values: Mapping[str, Any]) -> Certificate:
    """A certificate's fields."""
    try:
        return parse_certificate(dict(values))
    except ArgumentError as error:
        raise DataError(
            f"{CERTIFICATE} is not what dpvision writes: {error}. Check it with dpvision verify."
        ) from error


def checked_metrics(values: Mapping[str, Any]) -> Metrics:
    """The figures on public data."""
    try:
        return Metrics.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "all of it"
        raise DataError(f"{METRICS} is not what dpvision writes: {where}: {problem['msg']}.") from error


def is_private(certificate: Certificate) -> bool:
    """Whether there is a guarantee at all."""
    return certificate.epsilon is not None and certificate.delta is not None


def reasons_against_release(certificate: Certificate) -> tuple[str, ...]:
    """Why this run must not be released. In doubt there is a reason."""
    if certificate.stamps:
        return tuple(certificate.stamps)
    if not is_private(certificate):
        return (NO_PRIVACY,)
    if not certificate.for_release:
        return ("the certificate says that this run is not for release, and gives no reason",)
    return ()


def _examples(run: Path) -> tuple[Example, ...]:
    path = run / "release" / EXAMPLES
    if not path.exists() and not path.is_symlink():
        return ()
    return parse_examples(read_file(path), name=str(path))


def _read(run: Path, name: str) -> dict[str, Any] | None:
    """A JSON object of the release, or None when there is no such file."""
    path = run / "release" / name
    if not path.exists() and not path.is_symlink():
        return None
    return parse_object(read_file(path), name=str(path))
