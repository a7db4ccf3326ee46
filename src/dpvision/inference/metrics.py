"""Metrics of classifiers: accuracy, loss, calibration, and accuracy by class.

Also the forward pass that all metrics and predictions share (``inputs_of``, ``outputs_of``): batch by batch, in
evaluation mode, with fused layers where they agree; the model is left unchanged.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpvision.data.normalisation import Normalisation
from dpvision.data.store import ImageStore
from dpvision.errors import ArgumentError, DataError, Problems
from dpvision.gradients.ordinary import fused_forward

_AT_ONCE: Final = 64
"""Rows that go through the model together: few enough for their activations to stay in the cache."""

_COMPARED: Final = 4


def inputs_of(
    images: Tensor, normalisation: Normalisation, *, batch_size: int, device: torch.device | str
) -> Iterator[Tensor]:
    """Normalise uint8 images (N, C, H, W) batch by batch on the device."""
    return (normalisation.apply(images_B.to(device)) for images_B in images.split(counted(batch_size)))


def counted(batch_size: int) -> int:
    """Return ``batch_size``, or refuse what is no count."""
    problems = Problems()
    problems.count("batch_size", batch_size)
    problems.raise_if_any()
    return batch_size


def outputs_of(
    model: nn.Module,
    batches: Iterator[Tensor],
    *,
    device: torch.device | str,
    parameters: Mapping[str, Tensor] | None,
) -> Iterator[Tensor]:
    """Yield the model's outputs, batch by batch.

    Args:
        model: left unchanged.
        batches: normalised inputs.
        device: where the inputs are.
        parameters: replaces the model's own parameters where given, such as averaged ones.
    """
    network = copy.deepcopy(model).eval()
    network.load_state_dict(_replacements(model, parameters, device), strict=False)
    first = next(batches, None)
    if first is None:
        return
    with fused_forward(network, first[:_COMPARED]) as forward:
        for inputs in itertools.chain([first], batches):
            with torch.no_grad():
                parts = [forward(part) for part in inputs.split(_AT_ONCE)]
            yield torch.cat(parts)


def _replacements(
    model: nn.Module, parameters: Mapping[str, Tensor] | None, device: torch.device | str
) -> dict[str, Tensor]:
    """Move ``parameters`` to the device; refuse names that the model does not have."""
    if parameters is None:
        return {}
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)} | dict(model.named_buffers()).keys()
    unknown = sorted(parameters.keys() - known)
    if unknown:
        raise ArgumentError(f"parameters must be the model's own, got unknown names: {', '.join(unknown)}.")
    return {name: value.to(device) for name, value in parameters.items()}


CALIBRATION_BINS = 15
_TOP5_NEEDS_CLASSES = 6
_LARGEST_LOSS = -math.log(sys.float_info.min)  # of the smallest probability that a float64 can hold: 708.4


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
    """

    accuracy: float
    top5: float | None
    loss: float
    calibration: float
    per_class: Mapping[str, float | None]
    per_class_count: Mapping[str, int]
    count: int

    def headline(self) -> dict[str, float | None]:
        """The most important metrics, the first one first."""
        return {"accuracy": self.accuracy, "top5": self.top5}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def evaluate(
    model: nn.Module,
    store: ImageStore,
    normalisation: Normalisation,
    *,
    batch_size: int = 1024,
    device: torch.device | str = "cpu",
    parameters: Mapping[str, Tensor] | None = None,
) -> Metrics:
    """Measure a classifier on every image of a public store.

    Args:
        model: left unchanged.
        store: images with one class each.
        normalisation: the pixel constants that the model was trained with.
        batch_size: memory only.
        device: where the model is.
        parameters: replaces the model's own where given, such as averaged ones.
    """
    inputs = inputs_of(store.images, normalisation, batch_size=batch_size, device=device)
    logits = _logits(model, inputs, device=device, parameters=parameters)
    return metrics_of(logits, store.labels, store.class_names)


def evaluate_features(
    rest: nn.Module,
    features: Tensor,
    store: ImageStore,
    *,
    batch_size: int = 4096,
    device: torch.device | str = "cpu",
    parameters: Mapping[str, Tensor] | None = None,
) -> Metrics:
    """Measure a classifier on the features of its frozen backbone: as ``evaluate`` on the whole model, up to rounding.

    Args:
        rest: the layers after the backbone.
        features: output of the backbone for every image of ``store``, in its order.
        store: the public images' labels and classes.
        batch_size: memory only.
        device: where ``rest`` is.
        parameters: replaces those of ``rest`` where given.
    """
    inputs = (part.to(device, torch.float32) for part in features.split(counted(batch_size)))
    logits = _logits(rest, inputs, device=device, parameters=parameters)
    return metrics_of(logits, store.labels, store.class_names)


def predict_probabilities(
    model: nn.Module,
    images: Tensor,
    normalisation: Normalisation,
    *,
    batch_size: int = 1024,
    device: torch.device | str = "cpu",
    parameters: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Predict class probabilities of uint8 images (N, C, H, W): float32 (N, classes) on the CPU."""
    inputs = inputs_of(images, normalisation, batch_size=batch_size, device=device)
    return _logits(model, inputs, device=device, parameters=parameters).softmax(dim=1).float()


def metrics_of(logits: Tensor, labels: Tensor, class_names: tuple[str, ...]) -> Metrics:
    """Compute the metrics of outputs (N, classes) and labels (N,).

    A row that is not finite counts as a wrong answer with full confidence.

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
    per_class, per_class_count = _by_class(correct, labels, class_names)
    return Metrics(
        accuracy=_share(correct),
        top5=_top5(logits, labels, usable),
        loss=float(losses.where(losses.isfinite(), _LARGEST_LOSS).mean()),
        calibration=_calibration_error(confidence, correct),
        per_class=per_class,
        per_class_count=per_class_count,
        count=len(labels),
    )


def _logits(
    model: nn.Module,
    batches: Iterator[Tensor],
    *,
    device: torch.device | str,
    parameters: Mapping[str, Tensor] | None,
) -> Tensor:
    """The model's outputs for all rows: float64 (N, classes) on the CPU."""
    rows = outputs_of(model, batches, device=device, parameters=parameters)
    return torch.cat([part.double().cpu() for part in rows])


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


def _by_class(
    correct: Tensor, labels: Tensor, class_names: tuple[str, ...]
) -> tuple[dict[str, float | None], dict[str, int]]:
    counts = torch.bincount(labels, minlength=len(class_names)).tolist()
    hits = torch.bincount(labels, weights=correct.double(), minlength=len(class_names)).tolist()
    accuracies = [hit / count if count else None for hit, count in zip(hits, counts, strict=True)]
    return dict(zip(class_names, accuracies, strict=True)), dict(zip(class_names, counts, strict=True))


def _calibration_error(confidence: Tensor, correct: Tensor) -> float:
    """Mean over images of |confidence − accuracy| of their bin; bins are (0, 1/15], (1/15, 2/15], … (14/15, 1]."""
    bins = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    gap = torch.zeros(CALIBRATION_BINS, dtype=torch.float64)
    gap.index_add_(0, bins, confidence - correct.double())
    return float(gap.abs().sum() / len(correct))
