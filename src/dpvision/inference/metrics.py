"""Metrics of classifiers: accuracy, loss, calibration, by class and by group, with 95 % intervals and chance.

Accuracy and loss are cheap and measured at every point of a curve. Everything with an interval (``Metrics.to_dict``) is
computed from the kept outputs when it is asked for; ``dpvision.scoring`` has the formulas.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpvision.data.normalisation import Normalisation
from dpvision.data.store import ImageStore, dense_units
from dpvision.errors import DataError, shown
from dpvision.inference.predict import shared_outputs
from dpvision.models.losses import finding_loss
from dpvision.ranks import ALONE, Ranks
from dpvision.scoring import (
    FEWEST_UNITS,
    GUESSING,
    Comparison,
    OperatingPoint,
    Scored,
    accuracy_against_chance,
    compare,
    finding_metrics,
)
from dpvision.storage.files import read_file

CALIBRATION_BINS = 15
_TOP5_NEEDS_CLASSES = 6
LARGEST_LOSS = -math.log(sys.float_info.min)  # of the smallest probability that a float64 can hold: 708.4


@final
@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics of a classifier on one set of images; all are finite.

    Attributes:
        accuracy: share of correct answers, 0 to 1.
        top5: share of images whose class is among the five best scores; None below six classes.
        loss: mean cross-entropy; a loss that is not finite counts as 708.4.
        calibration: expected calibration error over 15 equal bins of confidence, 0 to 1.
        per_class: accuracy by class; None for a class without images.
        per_class_count: images by class.
        count: number of images.
        scored: the outputs that all this was measured on; None where they were not kept.
    """

    accuracy: float
    top5: float | None
    loss: float
    calibration: float
    per_class: Mapping[str, float | None]
    per_class_count: Mapping[str, int]
    count: int
    scored: Scored | None = field(default=None, repr=False, compare=False)

    def headline(self) -> dict[str, float | None]:
        """The most important metrics, the first one first."""
        return {"accuracy": self.accuracy, "top5": self.top5}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: also what ``scored`` gives, with intervals and chance."""
        cheap = asdict(replace(self, scored=None))
        del cheap["scored"]
        return cheap if self.scored is None else {**cheap, **details_of(self.scored)}

    def comparison(self) -> Comparison | None:
        """Whether the accuracy is better than always answering the most frequent class."""
        interval = None if self.scored is None else self.scored.accuracy_interval()
        return accuracy_against_chance(self.accuracy, self.per_class_count, interval)


@final
@dataclass(frozen=True, kw_only=True)
class FindingMetrics:
    """Metrics of a multi-label classifier on one set of images; all are finite.

    Attributes:
        mean_auc: mean AUC over the findings that have one; None if none has.
        mean_average_precision: the same of the average precision.
        loss: mean over images of the sum over known labels, divided by the number of findings.
        findings: AUC and average precision of each finding, with 95 % intervals; None below 10 units on either side.
        intervals: 95 % interval of ``mean_auc`` and ``mean_average_precision``.
        count: number of images.
        outputs: scores (N, F), labels (N, F), the unit of each row, and the names, for metrics of groups.
    """

    mean_auc: float | None
    mean_average_precision: float | None
    loss: float
    findings: Mapping[str, dict[str, Any] | None]
    intervals: Mapping[str, list[float] | None]
    count: int
    outputs: tuple[Any, Any, Any, tuple[str, ...]] | None = field(default=None, repr=False, compare=False)

    def headline(self) -> dict[str, float | None]:
        """The most important metrics, the first one first."""
        return {"mean_auc": self.mean_auc}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = asdict(replace(self, outputs=None))
        del found["outputs"]
        return found

    def comparison(self) -> Comparison | None:
        """Whether the mean AUC is better than guessing; None if no finding has an AUC."""
        if self.mean_auc is None:
            return None
        interval = self.intervals.get("mean_auc")
        return compare(self.mean_auc, None if interval is None else (interval[0], interval[1]), 0.5, GUESSING)

    def by_group(self, groups: Sequence[str]) -> dict[str, dict[str, Any] | None]:
        """Metrics of each group of rows, by name; None for one with fewer than 10 units."""
        if self.outputs is None:
            return {}
        scores_NF, labels_NF, units_N, names = self.outputs
        found: dict[str, dict[str, Any] | None] = {}
        for name in sorted(set(groups)):
            rows = np.array(groups, dtype=object) == name
            few = len(np.unique(units_N[rows])) < FEWEST_UNITS
            part = None if few else finding_metrics(scores_NF[rows], labels_NF[rows], names, units_N=units_N[rows])
            found[name] = None if part is None else {"count": int(rows.sum()), **part}
        return found


def details_of(scored: Scored, *, point: OperatingPoint | None = None, positive: str | None = None) -> dict[str, Any]:
    """Return everything that has an interval, for JSON; all values are finite.

    Args:
        scored: outputs and classes of a public test set.
        point: how the threshold is chosen; Youden's rule by default.
        positive: the positive class of the operating point; by default the second one of two classes. Without it,
            more classes have no operating point.

    Returns:
        ``balanced_accuracy``, ``auc``, ``average_precision``, ``intervals`` and ``chance`` of these and of the
        accuracy; ``classes``, ``confusion``, ``reliability``, ``temperature`` and ``operating_point``.

    Raises:
        DataError: there is no class ``positive``.
    """
    names = scored.class_names
    if positive is not None and positive not in names:
        raise DataError(f"the positive class must be one of {', '.join(names)}, got {positive}.")
    number = names.index(positive) if positive is not None else 1 if len(names) == 2 else None
    summary = scored.summary()
    del summary["accuracy"]  # measured already
    return {
        **summary,
        "classes": scored.by_class(),
        "confusion": scored.confusion(),
        **scored.calibration(),
        "operating_point": None
        if number is None
        else scored.operating_point(point or OperatingPoint("youden"), number),
    }


def evaluate(
    model: nn.Module,
    store: ImageStore,
    normalisation: Normalisation,
    *,
    parameters: Mapping[str, Tensor] | None = None,
    ranks: Ranks = ALONE,
) -> Metrics | FindingMetrics:
    """Measure a classifier on every image of a public store.

    Args:
        model: left unchanged.
        store: images with one class each.
        normalisation: the pixel constants that the model was trained with.
        parameters: replaces the model's own where given, such as averaged ones.
        ranks: processes that compute outputs; the others call ``shared_outputs`` at the same time.
    """
    outputs = shared_outputs(model, store.images, normalisation.apply, parameters=parameters, ranks=ranks)
    return _measured(outputs, store)


def evaluate_features(
    rest: nn.Module, features: Tensor, store: ImageStore, *, parameters: Mapping[str, Tensor] | None = None
) -> Metrics | FindingMetrics:
    """Measure a classifier on the features of its frozen backbone: as ``evaluate`` on the whole model, up to rounding.

    Args:
        rest: the layers after the backbone.
        features: output of the backbone for every image of ``store``, in its order.
        store: the public images' labels and classes.
        parameters: replaces those of ``rest`` where given.
    """
    return _measured(shared_outputs(rest, features, Tensor.float, parameters=parameters), store)


def _measured(logits: Tensor, store: ImageStore) -> Metrics | FindingMetrics:
    """Metrics of classes, or of findings."""
    if not store.multi_label:
        return metrics_of(logits, store.labels, store.class_names, owners=store.owners)
    _require_matching(logits, store.labels, store.class_names)
    losses = finding_loss(logits.double(), store.labels.double())
    scores = logits.double().nan_to_num(0.0).numpy()
    labels, names = store.labels.double().numpy(), store.class_names
    units = np.arange(len(labels)) if store.owners is None else dense_units(store.owners).numpy()
    found = finding_metrics(scores, labels, names, units_N=units)
    return FindingMetrics(
        mean_auc=found["auc"],
        mean_average_precision=found["average_precision"],
        loss=float(losses.where(losses.isfinite(), LARGEST_LOSS).mean()),
        findings=found["findings"],
        intervals={f"mean_{name}": interval for name, interval in found["intervals"].items()},
        count=len(labels),
        outputs=(scores, labels, units, names),
    )


def metrics_of(
    logits: Tensor, labels: Tensor, class_names: tuple[str, ...], *, owners: Sequence[str] | None = None
) -> Metrics:
    """Compute the metrics of outputs (N, classes) and labels (N,).

    A row that is not finite counts as a wrong answer with full confidence.

    Args:
        logits: the model's outputs.
        labels: the true classes.
        class_names: names of the classes.
        owners: the owner of each row, such as a patient: intervals then treat all rows of an owner as one draw.

    Raises:
        DataError: there are no images, class names repeat, or the outputs have another number of classes.
    """
    _require_matching(logits, labels, class_names)
    logits, labels = logits.double(), labels.long()
    probabilities = logits.softmax(dim=1)
    usable = probabilities.isfinite().all(dim=1)
    correct = (logits.argmax(dim=1) == labels) & usable
    confidence = probabilities.amax(dim=1).where(usable, 1.0)
    losses = functional.cross_entropy(logits, labels, reduction="none")
    counts = torch.bincount(labels, minlength=len(class_names)).tolist()
    hits = torch.bincount(labels, weights=correct.double(), minlength=len(class_names)).tolist()
    shares = [hit / count if count else None for hit, count in zip(hits, counts, strict=True)]
    return Metrics(
        accuracy=_share(correct),
        top5=_top5(logits, labels, usable),
        loss=float(losses.where(losses.isfinite(), LARGEST_LOSS).mean()),
        calibration=_calibration_error(confidence, correct),
        per_class=dict(zip(class_names, shares, strict=True)),
        per_class_count=dict(zip(class_names, counts, strict=True)),
        count=len(labels),
        scored=Scored(
            logits_NK=logits.numpy(),
            labels_N=labels.numpy(),
            units_N=np.arange(len(labels)) if owners is None else dense_units(owners).numpy(),
            class_names=class_names,
        ),
    )


def read_groups(file: Path) -> dict[str, str]:
    """Read a CSV of two columns, image and group; the first line is a heading.

    Args:
        file: the image is named by its file, by ``row N`` or N (from 0), or by its owner.

    Raises:
        DataError: the file can't be read, a line has not two columns, or an image is named twice.
    """
    try:
        lines = list(csv.reader(read_file(file).decode().splitlines()))[1:]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"--groups {shown(file)} is not a CSV file: {error}.") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 2):
        if len(line) != 2 or not all(line):
            raise DataError(f"--groups {shown(file)} must have two columns, image and group: line {number} has not.")
        if line[0] in found:
            raise DataError(f"--groups {shown(file)} names {line[0]!r} twice, the second time in line {number}.")
        found[line[0]] = line[1]
    return found


def groups_of_rows(groups: Mapping[str, str], store: ImageStore) -> list[str]:
    """Return the group of each row of a store.

    Raises:
        DataError: a row has no group.
    """
    found: list[str] = []
    for row, name in enumerate(store.row_names):
        keys = (name, name.rpartition("/")[2], str(row), *(() if store.owners is None else (store.owners[row],)))
        known = next((groups[key] for key in keys if key in groups), None)
        if known is None:
            raise DataError(f"--groups must have a group for every image, it has none for {name}.")
        found.append(known)
    return found


def _require_matching(logits: Tensor, labels: Tensor, class_names: tuple[str, ...]) -> None:
    if len(labels) == 0:
        raise DataError("the test set must have at least one image, got none. Name another with --test.")
    if len(set(class_names)) < len(class_names):
        raise DataError(f"class names must differ, got {', '.join(class_names)}.")
    if logits.ndim != 2 or logits.shape[1] != len(class_names):
        raise DataError(
            f"the model's outputs must have one column a class, got shape {tuple(logits.shape)} for "
            f"{len(class_names)} classes. Evaluate on data with the classes that the model was trained for."
        )


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def _top5(logits: Tensor, labels: Tensor, usable: Tensor) -> float | None:
    if logits.shape[1] < _TOP5_NEEDS_CLASSES:
        return None
    hit = (logits.topk(5, dim=1).indices == labels[:, None]).any(dim=1)
    return _share(hit & usable)


def _calibration_error(confidence: Tensor, correct: Tensor) -> float:
    """Mean over images of |confidence − accuracy| of their bin; bins are (0, 1/15], (1/15, 2/15], … (14/15, 1]."""
    bins = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    gap = torch.zeros(CALIBRATION_BINS, dtype=torch.float64)
    gap.index_add_(0, bins, confidence - correct.double())
    return float(gap.abs().sum() / len(correct))
