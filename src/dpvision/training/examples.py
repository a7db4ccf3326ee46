"""Pictures that go into the release, with their masks and what the model made of them: public ones only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpvision.config import RunConfig
from dpvision.data import ImageStore
from dpvision.evaluate import dice_of_images, predict_masks
from dpvision.runfolder import Example, examples_bytes
from dpvision.runfolder.examples import Rank
from dpvision.training.session import Session

MOST_OF_A_RANK = 3
_AT_A_TIME = 32


def may_show_pictures(config: RunConfig) -> bool:
    """Whether test pictures themselves may leave the house: only those that the user named as public.

    Units held out of the private data are declared for figures that are measured on them, and for nothing else; so is
    a test part that came with the data, unless it was named too.
    """
    return config.task == "segmentation" and config.data.test is not None


def example_file(session: Session) -> bytes | None:
    """The file of examples of a run that may show any.

    Guarantee: every pixel of it comes from the test set that the user named; of training there is only what the
    released weights say.
    """
    test = session.pictures.test
    if not may_show_pictures(session.config) or session.pictures.held_out or not test.per_pixel:
        return None
    dice = torch.cat(
        [
            dice_of_images(_predicted(session, test.images[start : start + _AT_A_TIME]), truth, test.num_classes)
            for start, truth in zip(range(0, test.num_rows, _AT_A_TIME), test.labels.split(_AT_A_TIME), strict=True)
        ]
    )
    chosen = choose_rows(dice, test)
    rows = [row for _, row in chosen]
    predicted = _predicted(session, test.images[rows])
    return examples_bytes(
        [
            Example(
                rank=rank,
                dice=float(dice[row]),
                owner=None if test.owners is None else str(test.owners[row]),
                image_CHW=test.images[row].numpy(),
                truth_HW=test.labels[row].numpy(),
                predicted_HW=mask.numpy(),
            )
            for (rank, row), mask in zip(chosen, predicted, strict=True)
        ]
    )


def choose_rows(dice: Tensor, test: ImageStore) -> list[tuple[Rank, int]]:
    """The best, the middle and the worst rows, up to three of each and none twice, of as many owners as there are.

    An empty mask is found perfectly by finding nothing: rows with something to find go first.
    """
    full: list[int] = test.labels.flatten(1).any(1).nonzero()[:, 0].tolist() or list(range(test.num_rows))
    order = sorted(full, key=lambda row: (-float(dice[row]), row))
    place = {row: number for number, row in enumerate(order)}
    count = max(1, min(MOST_OF_A_RANK, len(order) // 3))
    owners = test.owners
    best = _of_different_owners(order, owners, count)
    left = [row for row in order if row not in best]
    worst = _of_different_owners(left[::-1], owners, count)
    left = [row for row in left if row not in worst]
    nearest = sorted(left, key=lambda row: (abs(place[row] - len(order) // 2), row))
    median = sorted(_of_different_owners(nearest, owners, count), key=place.__getitem__)
    ranks: list[tuple[Rank, list[int]]] = [("best", best), ("median", median), ("worst", worst)]
    return [(rank, row) for rank, rows in ranks for row in rows]


def _of_different_owners(rows: Sequence[int], owners: Sequence[str] | None, count: int) -> list[int]:
    """The first rows, but a second one of somebody only when nobody else is near the front."""
    if owners is None:
        return list(rows[:count])
    near = rows[: max(count, len(rows) // 4)]
    seen: set[str] = set()
    first, again = [], []
    for row in near:
        (again if owners[row] in seen else first).append(row)
        seen.add(owners[row])
    return [*first, *again][:count]


def _predicted(session: Session, images: Tensor) -> Tensor:
    masks = predict_masks(
        session.model,
        images,
        session.normalisation,
        parameters=session.optimizer.averaged_parameters(),
        device=session.device,
    )
    return torch.cat(list(masks))
