"""What the page is made of: the public files of a run, checked before use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dpvision.certificate import NO_PRIVACY, Certificate, parse_certificate
from dpvision.checks import ArgumentError, DataError
from dpvision.runfolder import CERTIFICATE, CONFIG, METRICS, parse_object, read_file

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
    accuracy: _Share


@final
class FinalMetrics(_Facts):
    """The released model on public data."""

    accuracy: _Share
    top5: _Share | None = None
    loss: float | None = None
    calibration: _Share | None = None
    per_class: dict[str, _Share | None] = {}
    per_class_count: dict[str, _Count] = {}
    count: _Count | None = None
    evaluated_on: str = "a public test set"
    weights: str | None = None

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
    def _none_without_accuracy(cls, value: object) -> object:
        """A run that was stopped before its first evaluation has no figures."""
        return None if isinstance(value, dict) and "accuracy" not in value else value


@final
@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything that the page may know of a run."""

    name: str
    certificate: Certificate
    metrics: Metrics | None
    config: dict[str, Any] | None


def read_run(run: Path) -> RunFacts:
    """The public facts of a run folder.

    Guarantee: opens release/certificate.json, metrics.json and config.json, and nothing else; never private/.
    """
    certificate = _read(run, CERTIFICATE)
    if certificate is None:
        raise DataError(
            f"{run} is not a finished run: it has no release/{CERTIFICATE}. Give the folder that dpvision train made."
        )
    metrics = _read(run, METRICS)
    return RunFacts(
        name=run.resolve().name,
        certificate=checked_certificate(certificate),
        metrics=None if metrics is None else checked_metrics(metrics),
        config=_read(run, CONFIG),
    )


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


def _read(run: Path, name: str) -> dict[str, Any] | None:
    """A JSON object of the release, or None when there is no such file."""
    path = run / "release" / name
    if not path.exists() and not path.is_symlink():
        return None
    return parse_object(read_file(path), name=str(path))
