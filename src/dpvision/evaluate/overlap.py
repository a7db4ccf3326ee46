"""Dice and IoU from counts of pixels, of pictures or of whole patients.

Shapes: N rows (pictures or patients), F classes but the background, H × W or P pixels, T thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

_ROWS_AT_A_TIME = 64
_THRESHOLDS = (*(step / 20 for step in range(1, 21)), 2.0)  # the last one is nowhere reached: an empty mask


@final
@dataclass(frozen=True, eq=False)
class Overlap:
    """How many pixels of each class were predicted, are there, and both. Whole numbers in float64."""

    both_NF: Tensor
    predicted_NF: Tensor
    true_NF: Tensor

    @property
    def dice_NF(self) -> Tensor:
        """2·both / (predicted + true); 1 where neither has a pixel: nothing was there, and nothing was claimed."""
        return _ratio(2 * self.both_NF, self.predicted_NF + self.true_NF)

    @property
    def iou_NF(self) -> Tensor:
        """both / either; 1 where neither has a pixel."""
        return _ratio(self.both_NF, self.predicted_NF + self.true_NF - self.both_NF)

    def of_groups(self, group_N: Tensor, groups: int) -> Overlap:
        """The counts of all rows of each group together."""

        def added(x_NF: Tensor) -> Tensor:
            return x_NF.new_zeros(groups, *x_NF.shape[1:]).index_add_(0, group_N, x_NF)

        return Overlap(added(self.both_NF), added(self.predicted_NF), added(self.true_NF))


def overlap(predicted_NHW: Tensor, true_NHW: Tensor, num_classes: int) -> Overlap:
    """The counts of each picture for every class but the first, which is the background."""

    def count(flags_NHW: Tensor) -> Tensor:
        return flags_NHW.sum((1, 2)).double()

    found, there, both = [], [], []
    for number in range(1, num_classes):
        mine, real = predicted_NHW == number, true_NHW == number
        found.append(count(mine))
        there.append(count(real))
        both.append(count(mine & real))
    return Overlap(torch.stack(both, 1), torch.stack(found, 1), torch.stack(there, 1))


def joined(parts: Sequence[Overlap]) -> Overlap:
    """The counts of several batches, one below the other."""
    return Overlap(
        torch.cat([part.both_NF for part in parts]),
        torch.cat([part.predicted_NF for part in parts]),
        torch.cat([part.true_NF for part in parts]),
    )


def dice_of_images(predicted_NHW: Tensor, true_NHW: Tensor, num_classes: int) -> Tensor:
    """The Dice of each picture, averaged over the classes but the background: float64 (N,)."""
    return overlap(predicted_NHW, true_NHW, num_classes).dice_NF.mean(1)


def constant_dice(
    true_NHW: Tensor, num_classes: int, group_N: Tensor | None, groups: int
) -> tuple[float, float | None]:
    """The Dice of the best constant answer, over pictures and over groups: the same mask whatever the picture shows.

    The constant is the mean of these very masks, cut at the threshold that suits them best. A constant from training
    masks would do worse, and would have to be paid for; one that these masks chose can only be too good.
    """
    by_class = [_constant_of_class(true_NHW, number, group_N, groups) for number in range(1, num_classes)]
    means = torch.tensor(by_class, dtype=torch.float64).mean(0).tolist()
    return means[0], None if group_N is None else means[1]


def _constant_of_class(true_NHW: Tensor, number: int, group_N: Tensor | None, groups: int) -> tuple[float, float]:
    parts = true_NHW.flatten(1).split(_ROWS_AT_A_TIME)
    mean_P = torch.stack([(part == number).sum(0) for part in parts]).sum(0).double() / len(true_NHW)
    masks_PT = torch.stack([mean_P >= threshold for threshold in _THRESHOLDS], 1).float()
    both_NT = torch.cat([(part == number).float() @ masks_PT for part in parts]).double()
    true_NT = torch.cat([(part == number).sum(1).double() for part in parts])[:, None].expand_as(both_NT)
    counts = Overlap(both_NT, masks_PT.sum(0).double().expand_as(both_NT), true_NT)
    of_images = float(counts.dice_NF.mean(0).amax())
    if group_N is None:
        return of_images, of_images
    return of_images, float(counts.of_groups(group_N, groups).dice_NF.mean(0).amax())


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below.clamp(min=1), 1.0)
