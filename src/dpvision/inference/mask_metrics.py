"""Metrics of segmentation: Dice and IoU by image and by patient, and the best constant mask as a baseline.

Shapes: N rows (images or patients), F classes but the background, M maps (one for two classes, else one per class),
H × W or P pixels, T thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from dpvision.data.normalisation import Normalisation
from dpvision.data.store import ImageStore, dense_units
from dpvision.errors import DataError
from dpvision.inference.metrics import LARGEST_LOSS
from dpvision.inference.predict import IMAGES_WITH_MASKS, classes_of, outputs_of
from dpvision.models.losses import MaskLoss, RowLoss, outputs_for
from dpvision.scoring import Comparison, compare, mean_interval

_ROWS_AT_A_TIME = 64
_THRESHOLDS = (*(step / 20 for step in range(21)), 2.0)  # the first is the whole image, the last an empty mask


@final
@dataclass(frozen=True, eq=False)
class Overlap:
    """Pixel counts by class: whole numbers in float64; of both at once, of the prediction, of the truth."""

    counts_3NF: Tensor

    @property
    def dice_NF(self) -> Tensor:
        """2·both / (predicted + true); 1 where neither has a pixel."""
        both, predicted, true = self.counts_3NF
        return _ratio(2 * both, predicted + true)

    @property
    def iou_NF(self) -> Tensor:
        """both / either; 1 where neither has a pixel."""
        both, predicted, true = self.counts_3NF
        return _ratio(both, predicted + true - both)

    def of_groups(self, group_N: Tensor, groups: int) -> Overlap:
        """Sum the counts over the rows of each group; ``group_N`` numbers each row's group."""
        empty = self.counts_3NF.new_zeros(3, groups, self.counts_3NF.shape[2])
        return Overlap(empty.index_add_(1, group_N, self.counts_3NF))


def overlap(predicted_NHW: Tensor, true_NHW: Tensor, num_classes: int) -> Overlap:
    """Count pixels by image for every class but the first, the background."""
    flags = ((predicted_NHW == number, true_NHW == number) for number in range(1, num_classes))
    counts_F3N = [torch.stack([(mine & real), mine, real]).sum((2, 3)) for mine, real in flags]
    return Overlap(torch.stack(counts_F3N, 2).double().cpu())


def dice_of_images(predicted_NHW: Tensor, true_NHW: Tensor, num_classes: int) -> Tensor:
    """Dice of each image, averaged over the classes but the background: float64 (N,)."""
    return overlap(predicted_NHW, true_NHW, num_classes).dice_NF.mean(1)


def constant_dice(
    true_NHW: Tensor, num_classes: int, group_N: Tensor | None, groups: int
) -> tuple[float, float | None]:
    """Dice of the best constant mask, over images and over groups.

    The constant is the mean of these masks, cut at the best of 22 thresholds, from the whole image to an empty mask. A
    constant from training masks would do worse and would cost epsilon; one chosen from the test masks is an upper
    bound.
    """
    by_class = [_constant_of_class(true_NHW, number, group_N, groups) for number in range(1, num_classes)]
    means = torch.tensor(by_class, dtype=torch.float64).mean(0).tolist()
    return means[0], None if group_N is None else means[1]


def _constant_of_class(true_NHW: Tensor, number: int, group_N: Tensor | None, groups: int) -> tuple[float, float]:
    """Dice of the best constant mask of one class, over images and over groups."""
    parts = true_NHW.flatten(1).split(_ROWS_AT_A_TIME)
    mean_P = torch.stack([(part == number).sum(0) for part in parts]).sum(0).double() / len(true_NHW)
    masks_PT = torch.stack([mean_P >= threshold for threshold in _THRESHOLDS], 1).float()
    both_NT = torch.cat([(part == number).float() @ masks_PT for part in parts]).double()
    true_NT = torch.cat([(part == number).sum(1).double() for part in parts])[:, None].expand_as(both_NT)
    counts = Overlap(torch.stack([both_NT, masks_PT.sum(0).double().expand_as(both_NT), true_NT]))
    of_images = float(counts.dice_NF.mean(0).amax())
    if group_N is None:
        return of_images, of_images
    return of_images, float(counts.of_groups(group_N, groups).dice_NF.mean(0).amax())


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below.clamp(min=1), 1.0)


@final
@dataclass(frozen=True, kw_only=True)
class MaskMetrics:
    """Metrics of a segmentation model on one set of images; all are finite, and all but the loss lie in 0..1.

    Attributes:
        dice, iou: by image, averaged over images and over the classes but the background; a class that is neither
            there nor predicted counts as 1.
        dice_per_patient, iou_per_patient: over all pixels of a patient, averaged over patients; None without owners.
        per_class: the same metrics by class.
        per_patient: Dice by patient, or None.
        pixel_accuracy: share of correct pixels.
        baseline_dice, baseline_dice_per_patient: of the best constant mask, see ``constant_dice``.
        loss: mean loss of an image.
        count: number of images.
        dice_interval: 95 %, by resampling patients, or images without owners; None with fewer than 10.
    """

    dice: float
    iou: float
    dice_per_patient: float | None
    iou_per_patient: float | None
    per_class: Mapping[str, Mapping[str, float | None]]
    per_patient: Mapping[str, float] | None
    pixel_accuracy: float
    baseline_dice: float
    baseline_dice_per_patient: float | None
    loss: float
    count: int
    dice_interval: tuple[float, float] | None = None

    def comparison(self) -> Comparison:
        """Whether the Dice is better than that of the best constant mask."""
        return compare(self.dice, self.dice_interval, self.baseline_dice, "the best constant mask")

    def headline(self) -> dict[str, float | None]:
        """The most important metrics, the first one first."""
        return {"dice": self.dice, "iou": self.iou, "dice_per_patient": self.dice_per_patient}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = asdict(self)
        interval = values.pop("dice_interval")
        intervals = {"dice": None if interval is None else list(interval)}
        return {"task": "segmentation", **values, "intervals": intervals}


def evaluate_masks(
    model: nn.Module,
    store: ImageStore,
    normalisation: Normalisation,
    *,
    loss: RowLoss | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    name_patients: bool = True,
) -> MaskMetrics:
    """Measure a segmentation model on every image of a public store.

    An image for which the model's output is not finite counts as wrong in every pixel.

    Args:
        model: left unchanged.
        store: images with masks.
        normalisation: the pixel constants that the model was trained with.
        loss: one value per row; cross-entropy by default.
        parameters: replaces the model's own where given.
        name_patients: name patients in ``per_patient``; otherwise they are numbered, best first.
    """
    if store.num_rows == 0:
        raise DataError("the test set must have at least one image, got none. Name another with --test.")
    loss = loss or MaskLoss("cross_entropy", outputs_for("segmentation", store.num_classes))
    rows = IMAGES_WITH_MASKS
    parts: list[Tensor] = []
    right, losses = 0, 0.0
    outputs = outputs_of(model, store.images, normalisation.apply, parameters=parameters, batch_size=rows)
    for maps, labels in zip(outputs, store.labels.split(rows), strict=True):
        true_NHW = labels.to(maps.device)
        _require_maps(maps, true_NHW, store.class_names)
        predicted_NHW = classes_of(maps)
        broken_N = ~maps.isfinite().flatten(1).all(1)
        predicted_NHW[broken_N] = ((true_NHW + 1) % store.num_classes)[broken_N]
        parts.append(overlap(predicted_NHW, true_NHW, store.num_classes).counts_3NF)
        right += int((predicted_NHW == true_NHW).sum())
        each_N = loss(maps.double(), true_NHW.long())
        losses += float(each_N.where(each_N.isfinite(), LARGEST_LOSS).sum())
    counts = Overlap(torch.cat(parts, 1))
    patients = None if store.owners is None else dense_units(store.owners)
    number = 0 if patients is None else int(patients.max()) + 1
    of_patients = None if patients is None else counts.of_groups(patients, number)
    baseline, baseline_of_patients = constant_dice(store.labels, store.num_classes, patients, number)
    return MaskMetrics(
        dice=float(counts.dice_NF.mean()),
        iou=float(counts.iou_NF.mean()),
        dice_per_patient=None if of_patients is None else float(of_patients.dice_NF.mean()),
        iou_per_patient=None if of_patients is None else float(of_patients.iou_NF.mean()),
        per_class=_by_class(counts, of_patients, store.class_names),
        per_patient=_by_patient(of_patients, store.owners, name_patients=name_patients),
        pixel_accuracy=right / store.labels.numel(),
        baseline_dice=baseline,
        baseline_dice_per_patient=baseline_of_patients,
        loss=losses / store.num_rows,
        count=store.num_rows,
        dice_interval=mean_interval(
            counts.dice_NF.mean(1).numpy(), np.arange(store.num_rows) if patients is None else patients.numpy()
        ),
    )


def _by_class(
    counts: Overlap, of_patients: Overlap | None, class_names: tuple[str, ...]
) -> dict[str, dict[str, float | None]]:
    """Dice and IoU of each class but the background, averaged over images and over patients."""
    found: dict[str, dict[str, float | None]] = {name: {} for name in class_names[1:]}
    for overlaps, ending in ((counts, ""), (of_patients, "_per_patient")):
        for number, metrics in enumerate(found.values()):
            metrics[f"dice{ending}"] = None if overlaps is None else float(overlaps.dice_NF.mean(0)[number])
            metrics[f"iou{ending}"] = None if overlaps is None else float(overlaps.iou_NF.mean(0)[number])
    return found


def _by_patient(of_patients: Overlap | None, owners: Any, *, name_patients: bool) -> dict[str, float] | None:
    """Dice of each patient, averaged over classes; patients are numbered where they must not be named."""
    if of_patients is None:
        return None
    dice = of_patients.dice_NF.mean(1).tolist()
    if name_patients:
        return dict(zip(dict.fromkeys(map(str, owners)), dice, strict=True))
    return {str(place): value for place, value in enumerate(sorted(dice, reverse=True), 1)}


def _require_maps(maps_NMHW: Tensor, true_NHW: Tensor, class_names: tuple[str, ...]) -> None:
    wanted = (len(true_NHW), outputs_for("segmentation", len(class_names)), *true_NHW.shape[1:])
    if true_NHW.dim() != 3 or tuple(maps_NMHW.shape) != wanted:
        raise DataError(
            f"the model's outputs must be {outputs_for('segmentation', len(class_names))} maps of the masks' size for "
            f"{len(class_names)} classes, got shape {tuple(maps_NMHW.shape)} for masks of {tuple(true_NHW.shape)}."
        )
