"""Losses of one row that depend on other rows."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clean_models import dice_of_each_image, masks
from hostile_table import COIN, HOSTILE, IN_BATCH, PLACE, WIDTH, hostile
from model_cases import CLASSES, Case, Own, cross_entropy, vectors

# ------------------------------------------------------------------------------------------------ losses over the batch


class Features(nn.Sequential):
    """Eight features of each row."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8))


def loss_case(name: str, why: str, loss_fn: Callable[[Tensor, Tensor], Tensor], **facts: bool) -> None:
    """Enter a plain model with a loss."""

    def make() -> Own:
        return Own(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)), loss_fn, vectors)

    HOSTILE.append(Case(f"loss: {name}", why, make, **facts))


def _info_nce(outputs: Tensor, targets: Tensor) -> Tensor:
    z = F.normalize(outputs, dim=1)
    return F.cross_entropy(z @ z.t() / 0.1, torch.arange(z.shape[0]), reduction="none")


def _supervised_contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    same = (targets[:, None] == targets[None]).to(outputs.dtype)
    return -((outputs @ outputs.t()).log_softmax(1) * same).sum(1) / same.sum(1)


def _hardest_triplet(outputs: Tensor, targets: Tensor) -> Tensor:
    far = torch.cdist(outputs, outputs + 0.01)
    same = targets[:, None] == targets[None]
    return F.relu((far * same).amax(1) - (far + 1e3 * same).amin(1) + 1)


def _class_frequencies(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets) / torch.bincount(targets, minlength=CLASSES)[targets]


def _soft_dice(outputs: Tensor, targets: Tensor) -> Tensor:
    truth, chances = F.one_hot(targets, CLASSES).to(outputs.dtype), outputs.softmax(1)
    dice = (2 * (truth * chances).sum(0) + 1) / ((truth + chances).sum(0) + 1)
    return (1 - dice.mean()).expand(targets.shape[0])


def _centred_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    truth = F.one_hot(targets, CLASSES).to(outputs.dtype)
    return -((0.9 * truth + 0.1 * truth.mean(0)) * outputs.log_softmax(1)).sum(1)


def _mean_for_all(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = cross_entropy(outputs, targets)
    return losses.mean().expand_as(losses)


def _hard_examples(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = cross_entropy(outputs, targets)
    return losses * (losses >= losses.median())


def _broadcast(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, :1] - targets.to(outputs.dtype)).square().mean(1)


def _prototypes(outputs: Tensor, targets: Tensor) -> Tensor:
    truth = F.one_hot(targets, CLASSES).to(outputs.dtype)
    centres = truth.t() @ outputs / (truth.sum(0)[:, None] + 1)
    return (outputs - centres[targets]).square().sum(1)


def _decorrelated(outputs: Tensor, targets: Tensor) -> Tensor:
    penalty = (outputs.t() @ outputs - torch.eye(CLASSES)).square().sum()
    return cross_entropy(outputs, targets) + 0.1 * penalty


def _first_row_doubled(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = torch.ones_like(targets, dtype=outputs.dtype)
    weights[0] = 2.0
    return cross_entropy(outputs, targets) * weights


def _mixed_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * cross_entropy(outputs, targets) + 0.5 * cross_entropy(outputs, targets.roll(1))


def _targets_overwritten(outputs: Tensor, targets: Tensor) -> Tensor:
    targets.copy_(targets.flip(0))
    return cross_entropy(outputs, targets)


loss_case("InfoNCE", IN_BATCH, _info_nce)
loss_case("supervised contrast", IN_BATCH, _supervised_contrast)
loss_case("triplets of the batch", IN_BATCH, _hardest_triplet)
loss_case("Dice over the batch", IN_BATCH, _soft_dice)
loss_case("weights by class frequency", IN_BATCH, _class_frequencies)
loss_case("labels smoothed by the batch's mean", IN_BATCH, _centred_labels)
loss_case("the mean for every row", "every row's loss is the sum over all", _mean_for_all)
loss_case("the mean as a factor", IN_BATCH, lambda o, y: cross_entropy(o, y) * cross_entropy(o, y).detach().mean())
loss_case("hard examples only", "which rows count depends on all", _hard_examples)
loss_case("broadcast by mistake", "(n, 1) minus (n,) is (n, n)", _broadcast)
loss_case("prototypes of the batch", IN_BATCH, _prototypes)
loss_case("decorrelation", IN_BATCH, _decorrelated)
loss_case("first row doubled", PLACE, _first_row_doubled)
loss_case("divided by the number of rows", PLACE, lambda o, y: cross_entropy(o, y) / y.shape[0])
loss_case(
    "weights by a line over the batch", PLACE, lambda o, y: cross_entropy(o, y) * torch.linspace(0, 1, y.shape[0])
)
loss_case("targets of another row", "mixup of targets", _mixed_targets)
loss_case("targets overwritten", "the caller's targets change", _targets_overwritten)
loss_case("rows in another order", "losses are weighted by place", lambda o, y: cross_entropy(o, y).flip(0))
loss_case("losses sorted", "losses are weighted by place", lambda o, y: cross_entropy(o, y).sort().values)
loss_case("outputs softmaxed over rows", IN_BATCH, lambda o, y: -o.log_softmax(0).gather(1, y[:, None])[:, 0])
loss_case("losses softmaxed", IN_BATCH, lambda o, y: cross_entropy(o, y) * cross_entropy(o, y).softmax(0).detach())
loss_case("reduced", "one number for all rows", F.cross_entropy)
loss_case("summed as one row", "one number for all rows", lambda o, y: F.cross_entropy(o, y, reduction="sum")[None])
loss_case("two losses per row", "more losses than rows", lambda o, y: torch.cat([cross_entropy(o, y)] * 2))
loss_case("one column", "honest: losses of shape (n, 1)", lambda o, y: cross_entropy(o, y)[:, None])
loss_case(
    "Python's coin", COIN, lambda o, y: cross_entropy(o, y) * (1 + (random.random() < 0.3)), random=True, refused=True
)
loss_case("average precision", IN_BATCH, lambda o, y: (o[:, :1] - o[:, 0]).sigmoid().mean(1))
loss_case(
    "distillation from the batch",
    IN_BATCH,
    lambda o, y: F.kl_div(o.log_softmax(1), o.mean(0).softmax(0).detach().expand_as(o), reduction="none").sum(1),
)
loss_case(
    "mutual information", IN_BATCH, lambda o, y: cross_entropy(o, y) - torch.special.entr(o.softmax(1).mean(0)).sum()
)


@hostile("loss: Dice over the batch of masks", IN_BATCH)
def dice_over_the_batch() -> Own:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        chances, truth = outputs.softmax(1)[:, 1], targets.to(outputs.dtype)
        dice = (2 * (chances * truth).sum() + 1) / (chances.sum() + truth.sum() + 1)
        return dice_of_each_image(outputs, targets) * dice.detach()

    return Own(nn.Conv2d(3, 2, 3, padding=1), loss, masks)
