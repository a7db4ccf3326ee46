"""Losses: one value per row, each from its own row alone, so that clipping bounds what a row can do.

Shapes: N rows, K classes, F findings, M maps (one for two classes, else K), H × W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor
from torch.nn import functional as F

from dpvision.config import LossName, Task
from dpvision.errors import ArgumentError, Problems

RowLoss = Callable[[Tensor, Tensor], Tensor]
LOSSES: tuple[LossName, ...] = ("cross_entropy", "dice", "dice_cross_entropy", "binary_cross_entropy")
SMOOTHING = 1.0
"""Added above and below in Dice, in pixels: an empty mask then has a loss, and no gradient grows without bound."""


def outputs_for(task: Task, num_classes: int) -> int:
    """The number of outputs (maps, for masks) that a model needs: one map distinguishes two classes of pixels."""
    return 1 if task == "segmentation" and num_classes == 2 else num_classes


def loss_for(task: Task, loss: LossName | str, num_classes: int) -> RowLoss:
    """Return the loss of a task.

    Args:
        task: "classification" or "segmentation".
        loss: "cross_entropy"; for segmentation also "dice" and "dice_cross_entropy"; for findings
            "binary_cross_entropy".
        num_classes: of the data; at least 2 for masks.

    Returns:
        A function from outputs and targets to one value per row. Equal settings give equal losses.

    Raises:
        ArgumentError: if the task does not have that loss.

    Guarantee: a row's value depends on that row's outputs and targets alone.
    """
    problems = Problems()
    problems.require(loss in LOSSES, f"loss must be one of {', '.join(LOSSES)}, got {loss!r}.")
    problems.require(
        task == "segmentation" or loss in ("cross_entropy", "binary_cross_entropy"),
        f"loss must be cross_entropy where an image has one class, got {loss!r}. Set task to segmentation for masks.",
    )
    problems.require(
        task == "classification" or num_classes >= 2, f"masks must have at least two classes, got {num_classes}."
    )
    problems.require(
        task == "classification" or loss != "binary_cross_entropy", "binary_cross_entropy is for findings of images."
    )
    problems.raise_if_any()
    if loss == "binary_cross_entropy":
        return finding_loss
    return classification_loss if task == "classification" else MaskLoss(loss, outputs_for(task, num_classes))


def classification_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, one value per row."""
    return F.cross_entropy(outputs, targets, reduction="none")


def finding_loss(outputs_NF: Tensor, targets_NF: Tensor) -> Tensor:
    """Binary cross-entropy of findings of which several, or none, can hold: one value per row.

    Args:
        outputs_NF: one logit per finding.
        targets_NF: 1 where a finding is present, 0 where it is absent, NaN where the label is missing or uncertain.

    Returns:
        The sum over a row's known findings, divided by F: the public number of findings, not that of known ones. A
        missing label has no loss and no gradient, and changes the weight of no other label. A row without any known
        label has a loss of zero.

    Raises:
        ArgumentError: the shapes differ.

    Guarantee: a row's value depends on that row's outputs and targets alone.
    """
    if outputs_NF.dim() != 2 or outputs_NF.shape != targets_NF.shape:
        raise ArgumentError(
            f"outputs and targets must both be (rows, findings), got {tuple(outputs_NF.shape)} and "
            f"{tuple(targets_NF.shape)}."
        )
    known_NF = ~targets_NF.isnan()
    wanted_NF = targets_NF.nan_to_num(0.0).to(outputs_NF.dtype)
    each_NF = F.binary_cross_entropy_with_logits(outputs_NF, wanted_NF, reduction="none")
    return (each_NF * known_NF).sum(1) / outputs_NF.shape[1]


@final
@dataclass(frozen=True)
class MaskLoss:
    """Soft Dice, cross-entropy (mean over pixels) or their sum. A value: the engine keeps its plans by it."""

    kind: LossName | str
    maps: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(N, M, H, W) scores and (N, H, W) classes → (N,)."""
        _require_maps(outputs, targets, self.maps)
        if self.kind == "cross_entropy":
            return pixel_cross_entropy(outputs, targets)
        dice = soft_dice_loss(outputs, targets)
        return dice if self.kind == "dice" else dice + pixel_cross_entropy(outputs, targets)


def soft_dice_loss(outputs_NMHW: Tensor, targets_NHW: Tensor) -> Tensor:
    """1 − (2 Σ p·t + 1) / (Σ p + Σ t + 1) over the pixels of each row, averaged over the classes but the first.

    p are probabilities, t is 1 where the class is. With an empty mask it is Σ p / (Σ p + 1): the less foreground is
    predicted the better, and nothing is divided by zero.
    """
    if outputs_NMHW.shape[1] == 1:
        p_NFHW = outputs_NMHW.sigmoid()
        t_NFHW = targets_NHW[:, None].to(p_NFHW.dtype)
    else:
        p_NFHW = outputs_NMHW.softmax(1)[:, 1:]
        classes = outputs_NMHW.shape[1]
        t_NFHW = F.one_hot(targets_NHW.long(), classes).permute(0, 3, 1, 2)[:, 1:].to(p_NFHW.dtype)
    overlap_NF = (p_NFHW * t_NFHW).sum((2, 3))
    total_NF = p_NFHW.sum((2, 3)) + t_NFHW.sum((2, 3))
    return (1 - (2 * overlap_NF + SMOOTHING) / (total_NF + SMOOTHING)).mean(1)


def pixel_cross_entropy(outputs_NMHW: Tensor, targets_NHW: Tensor) -> Tensor:
    """Cross-entropy of each row, (N,): the mean over its pixels."""
    if outputs_NMHW.shape[1] == 1:
        wanted = targets_NHW.to(outputs_NMHW.dtype)
        losses = F.binary_cross_entropy_with_logits(outputs_NMHW[:, 0], wanted, reduction="none")
    else:
        losses = F.cross_entropy(outputs_NMHW, targets_NHW.long(), reduction="none")
    return losses.mean((1, 2))


def _require_maps(outputs: Tensor, targets: Tensor, maps: int) -> None:
    """Refuse shapes that broadcasting would silently turn into another loss."""
    wanted = (targets.shape[0], maps, *targets.shape[1:])
    if targets.dim() != 3 or tuple(outputs.shape) != wanted:
        raise ArgumentError(
            f"outputs must be (rows, {maps}, height, width) for masks of {tuple(targets.shape)}, got "
            f"{tuple(outputs.shape)}. Choose a model that gives maps of the image's size, such as unet9."
        )
