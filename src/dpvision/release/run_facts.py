"""The public files of a finished run, parsed and checked: what a report and the terminal summary are made of.

Only release/certificate.json, metrics.json and config.json are read, and the example images if the certificate
declares them public. Nothing here reads private/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dpvision.errors import ArgumentError, DataError, validation_message
from dpvision.release.schema import Certificate, parse_certificate
from dpvision.release.statements import NO_PRIVACY, SHOWN_IMAGES_NAMES, test_images_without_epsilon
from dpvision.scoring import GUESSING, Comparison, accuracy_against_chance, compare, falls
from dpvision.storage.files import parse_object, read_file
from dpvision.storage.run_folder import CERTIFICATE, CONFIG, EXAMPLES, METRICS, Example, parse_examples

_Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=0)]


class _Facts(BaseModel):
    """Frozen, with finite numbers. Unknown keys are ignored, so that files of newer versions can be shown."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class _Scored(_Facts):
    """Scores on public test data: Dice for segmentation, accuracy for classification, mean AUC for findings."""

    accuracy: _Share | None = None
    dice: _Share | None = None
    mean_auc: _Share | None = None

    @model_validator(mode="after")
    def _has_a_score(self) -> Self:
        if self.accuracy is None and self.dice is None and self.mean_auc is None:
            raise ValueError("there is neither accuracy nor dice nor mean_auc")
        return self

    @property
    def score(self) -> float:
        """The headline metric."""
        return next(each for each in (self.dice, self.accuracy, self.mean_auc) if each is not None)


@final
class TrainingPoint(_Scored):
    """Scores after ``step`` training steps."""

    step: _Count
    epsilon: float | None = Field(default=None, ge=0)


@final
class ClassOverlap(_Facts):
    """Dice of one class."""

    dice: _Share


_Interval = tuple[_Share, _Share]


@final
class ClassScores(_Facts):
    """One class against the rest."""

    auc: _Share
    auc_interval: _Interval | None = None
    average_precision: _Share
    average_precision_interval: _Interval | None = None
    sensitivity: _Share | None = None
    sensitivity_interval: _Interval | None = None
    specificity: _Share | None = None
    specificity_interval: _Interval | None = None
    prevalence: _Share


@final
class FindingScores(_Facts):
    """One finding of a multi-label classifier, on the images whose label is known."""

    auc: _Share
    auc_interval: _Interval | None = None
    average_precision: _Share
    average_precision_interval: _Interval | None = None
    chance: _Share
    count: _Count
    positives: _Count


@final
class OperatingScores(_Facts):
    """Sensitivity and specificity at a threshold that was fitted on another part of the test data."""

    rule: str
    positive: str
    threshold: float
    log_odds: float | None = None
    sensitivity: _Share | None = None
    sensitivity_interval: _Interval | None = None
    specificity: _Share | None = None
    specificity_interval: _Interval | None = None
    fitted_on: _Count
    reported_on: _Count


@final
class TemperatureSide(_Facts):
    """Loss, and mean confidence minus accuracy, with or without the temperature."""

    loss: float
    overconfidence: Annotated[float, Field(ge=-1, le=1)]


@final
class Temperature(_Facts):
    """A temperature that was fitted on another part of the test data than the one it is reported on."""

    value: Annotated[float, Field(gt=0)]
    before: TemperatureSide
    after: TemperatureSide
    fitted_on: _Count
    reported_on: _Count


@final
class ReliabilityBin(_Facts):
    """Confidence and accuracy of the images in one bin of confidence."""

    confidence: _Share
    accuracy: _Share
    interval: _Interval
    count: _Count


@final
class Baseline(_Facts):
    """The non-private baseline: its accuracy (or Dice) on the same test data, and what it is, in words."""

    accuracy: _Share | None = None
    dice: _Share | None = None
    mean_auc: _Share | None = None
    what: str

    @property
    def score(self) -> float | None:
        """Accuracy, Dice or mean AUC."""
        return next((each for each in (self.dice, self.accuracy, self.mean_auc) if each is not None), None)


@final
class FinalMetrics(_Scored):
    """The released model on public data."""

    iou: _Share | None = None
    dice_per_patient: _Share | None = None
    iou_per_patient: _Share | None = None
    pixel_accuracy: _Share | None = None
    baseline_dice: _Share | None = None
    baseline_dice_per_patient: _Share | None = None
    top5: _Share | None = None
    loss: float | None = None
    calibration: _Share | None = None
    per_class: dict[str, _Share | ClassOverlap | None] = {}
    per_class_count: dict[str, _Count] = {}
    per_patient: dict[str, _Share] | None = None
    count: _Count | None = None
    evaluated_on: str = "a public test set"
    weights: str | None = None
    balanced_accuracy: _Share | None = None
    auc: _Share | None = None
    average_precision: _Share | None = None
    intervals: dict[str, _Interval | None] = {}
    chance: dict[str, float | str] = {}
    classes: dict[str, ClassScores | None] = {}
    confusion: tuple[tuple[_Count | None, ...], ...] = ()
    reliability: tuple[ReliabilityBin, ...] = ()
    temperature: Temperature | None = None
    operating_point: OperatingScores | None = None
    findings: dict[str, FindingScores | None] = {}
    mean_average_precision: _Share | None = None

    @property
    def comparison(self) -> Comparison | None:
        """Whether the score is better than the best constant prediction; None if that is not known."""
        if self.accuracy is None and self.dice is None:
            return compare(self.score, self.intervals.get("mean_auc"), 0.5, GUESSING)
        if self.dice is not None:
            if self.baseline_dice is None:
                return None
            return compare(self.dice, self.intervals.get("dice"), self.baseline_dice, "the best constant mask")
        interval = self.intervals.get("accuracy")
        if "accuracy" in self.intervals and interval is None and self.accuracy is not None and self.per_class_count:
            # Too few patients for an interval: the images of one patient are not independent.
            name = max(self.per_class_count, key=lambda key: self.per_class_count[key])
            share = self.per_class_count[name] / max(1, sum(self.per_class_count.values()))
            return compare(self.accuracy, None, share, f"always {name}")
        return accuracy_against_chance(self.score, self.per_class_count, interval)

    @property
    def class_shares(self) -> dict[str, float]:
        """Accuracy or Dice of each class that was measured."""
        known = {name: each.dice if isinstance(each, ClassOverlap) else each for name, each in self.per_class.items()}
        return {name: share for name, share in known.items() if share is not None}

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
    baseline: Baseline | None = None

    @property
    def fall(self) -> tuple[TrainingPoint, TrainingPoint] | None:
        """The best and the last point of a curve that falls clearly; None if it does not."""
        best = falls([point.score for point in self.curve], self.final.images if self.final else None)
        return None if best is None else (self.curve[best], self.curve[-1])

    @field_validator("final", mode="before")
    @classmethod
    def _none_without_a_score(cls, value: object) -> object:
        """A run that was stopped before its first evaluation has no metrics."""
        if not isinstance(value, dict) or {"accuracy", "dice"} & value.keys():
            return value
        return None if value.get("mean_auc") is None else value

    @field_validator("curve", mode="before")
    @classmethod
    def _points_with_a_score(cls, value: object) -> object:
        """Leave out points without a score: no finding had enough test images for an AUC."""
        if not isinstance(value, (list, tuple)):
            return value
        empty = {"mean_auc": None}
        return [each for each in value if not (isinstance(each, dict) and empty.items() <= each.items())]


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
        return score_name(self.final) if self.final is not None or not by_pixel else "Dice"

    @property
    def final(self) -> FinalMetrics | None:
        """The metrics of the finished model."""
        return self.metrics.final if self.metrics else None


def score_name(final: FinalMetrics | None) -> str:
    """The name of the headline metric: Dice, mean AUC or accuracy."""
    if final is not None and final.dice is not None:
        return "Dice"
    return "accuracy" if final is None or final.accuracy is not None else "mean AUC"


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
    found = None if metrics is None else checked_metrics(parse_object(metrics, name=str(release / METRICS)))
    if found is not None and checked.search is not None:
        # Those of the chosen run alone, which are not the guarantee at any point.
        curve = tuple(point.model_copy(update={"epsilon": None}) for point in found.curve)
        found = found.model_copy(update={"curve": curve})
    return RunFacts(
        name=run.resolve().name,
        certificate=checked,
        metrics=found,
        config=None if config is None else parse_object(config, name=str(release / CONFIG)),
        examples=() if examples is None else parse_examples(examples, name=str(release / EXAMPLES)),
    )


def images_are_public(certificate: Certificate) -> bool:
    """Whether test images themselves may be shown, not only metrics that were measured on them."""
    return any(entry.what in SHOWN_IMAGES_NAMES for entry in certificate.declared)


def tests_on_held_out_images(certificate: Certificate) -> bool:
    """Whether the test images are of the same source as the training images: no epsilon covers them."""
    return test_images_without_epsilon(certificate.declared) is not None


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
