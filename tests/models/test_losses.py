"""Losses: known values, one value a row, empty masks, bounded gradients, and batch Dice refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum
from dpvision.gradients.plan import require_private_ready
from dpvision.models.losses import (
    LOSSES,
    LossName,
    MaskLoss,
    classification_loss,
    finding_loss,
    loss_for,
    outputs_for,
    pixel_cross_entropy,
    soft_dice_loss,
)

SURE = 40.0  # a score whose probability is 1 to rounding

OF_MASKS = tuple(loss for loss in LOSSES if loss != "binary_cross_entropy")


def rows(count: int, maps: int, *, classes: int, seed: int = 0, side: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn((count, maps, side, side), generator=generator, dtype=torch.float64)
    return scores, torch.randint(classes, (count, side, side), generator=generator)


def test_classification_keeps_its_cross_entropy_bit_for_bit() -> None:
    scores, targets = torch.randn(7, 5), torch.arange(7) % 5
    found = loss_for("classification", "cross_entropy", 5)(scores, targets)
    assert torch.equal(found, F.cross_entropy(scores, targets, reduction="none"))
    assert loss_for("classification", "cross_entropy", 5) is classification_loss


def test_soft_dice_has_the_values_that_its_definition_gives() -> None:
    scores = torch.tensor([[[[SURE, SURE], [-SURE, -SURE]]]], dtype=torch.float64)
    for mask, both in (([[1, 1], [0, 0]], 2), ([[1, 0], [1, 0]], 1), ([[0, 0], [1, 1]], 0)):
        expected = 1 - (2 * both + 1) / (2 + 2 + 1)
        assert float(soft_dice_loss(scores, torch.tensor([mask]))) == pytest.approx(expected, abs=1e-9)


def test_an_empty_mask_asks_for_an_empty_prediction() -> None:
    empty = torch.zeros(1, 4, 4, dtype=torch.int64)
    nothing, everything = (torch.full((1, 1, 4, 4), score, dtype=torch.float64) for score in (-SURE, SURE))
    assert float(soft_dice_loss(nothing, empty)) == pytest.approx(0.0, abs=1e-9)
    assert float(soft_dice_loss(everything, empty)) == pytest.approx(16 / 17)


def test_several_classes_are_averaged_and_the_background_is_left_out() -> None:
    targets = torch.tensor([[[1, 1], [2, 0]]])
    scores = SURE * F.one_hot(torch.tensor([[[1, 1], [1, 0]]]), 3).permute(0, 3, 1, 2).double()
    first, second = 1 - (2 * 2 + 1) / (3 + 2 + 1), 1 - (0 + 1) / (0 + 1 + 1)
    assert float(soft_dice_loss(scores, targets)) == pytest.approx((first + second) / 2)


def test_one_map_equals_two_maps_of_which_the_first_is_zero() -> None:
    scores, targets = rows(3, 1, classes=2)
    two = torch.cat([torch.zeros_like(scores), scores], 1)
    assert torch.allclose(pixel_cross_entropy(scores, targets), pixel_cross_entropy(two, targets))
    assert torch.allclose(soft_dice_loss(scores, targets), soft_dice_loss(two, targets))


@pytest.mark.parametrize("classes", [2, 4])
def test_the_sum_is_the_sum(classes: int) -> None:
    maps = outputs_for("segmentation", classes)
    scores, targets = rows(3, maps, classes=classes)
    found = {loss: loss_for("segmentation", loss, classes)(scores, targets) for loss in OF_MASKS}
    assert torch.equal(found["dice_cross_entropy"], found["dice"] + found["cross_entropy"])


@pytest.mark.parametrize("loss", OF_MASKS)
@pytest.mark.parametrize("classes", [2, 3])
def test_a_row_has_the_same_loss_whoever_is_beside_it(loss: LossName, classes: int) -> None:
    function = loss_for("segmentation", loss, classes)
    scores, targets = rows(4, outputs_for("segmentation", classes), classes=classes)
    together = function(scores, targets)
    alone = torch.cat([function(scores[row : row + 1], targets[row : row + 1]) for row in range(4)])
    assert together.shape == (4,)
    assert torch.allclose(together, alone, rtol=0, atol=1e-12)


@given(
    loss=st.sampled_from(OF_MASKS),
    classes=st.integers(2, 4),
    size=st.sampled_from([0.0, 1.0, 1e3, 1e30]),
    filled=st.sampled_from(["empty", "full", "one pixel", "random"]),
    seed=st.integers(0, 99),
)
def test_every_loss_is_finite_with_a_bounded_gradient(
    loss: LossName, classes: int, size: float, filled: str, seed: int
) -> None:
    """Each pixel moves the loss by at most 2 per unit of its score, whatever the mask and the scores."""
    scores, targets = rows(2, outputs_for("segmentation", classes), classes=classes, seed=seed)
    scores = (scores * size).float().requires_grad_()
    targets = {
        "empty": torch.zeros_like(targets),
        "full": torch.ones_like(targets),
        "one pixel": F.pad(torch.ones_like(targets[:, :1, :1]), (0, 5, 0, 5)),
        "random": targets,
    }[filled]
    values = loss_for("segmentation", loss, classes)(scores, targets)
    (gradient,) = torch.autograd.grad(values.sum(), scores)
    assert bool(values.isfinite().all())
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) <= 2


def test_equal_settings_give_equal_losses_and_others_differ() -> None:
    """The engine keeps plans by their loss: a new object must not mean a new plan, nor another loss the same one."""
    kinds: list[Any] = [loss_for("segmentation", loss, classes) for loss in OF_MASKS for classes in (2, 3)]
    again: list[Any] = [loss_for("segmentation", loss, classes) for loss in OF_MASKS for classes in (2, 3)]
    assert kinds == again
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(
    ("task", "loss", "classes", "says"),
    [
        ("classification", "dice", 3, "cross_entropy"),
        ("segmentation", "focal", 3, "dice_cross_entropy"),
        ("segmentation", "dice", 1, "two classes"),
    ],
)
def test_what_does_not_fit_is_refused(task: Any, loss: Any, classes: int, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        loss_for(task, loss, classes)


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 2, 4, 4), (2, 1, 4, 8), (2, 1)])
def test_outputs_that_would_broadcast_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="unet9"):
        MaskLoss("dice", 1)(torch.zeros(shape), torch.zeros(2, 4, 4, dtype=torch.int64))


# ---- Dice summed over the batch: the papers' own code


def batch_dice(outputs: Tensor, targets: Tensor) -> Tensor:
    """One number for all rows, as segmentation libraries have it."""
    p, t = outputs[:, 0].sigmoid(), targets.to(outputs.dtype)
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum() + 1e-7)


def spread_batch_dice(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same number, handed out once a row."""
    return batch_dice(outputs, targets).expand(len(outputs))


def shared_batch_dice(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each row's share of the numerator over a common denominator: it looks like a loss by row."""
    p, t = outputs[:, 0].sigmoid(), targets.to(outputs.dtype)
    return 1 / len(p) - 2 * (p * t).sum((1, 2)) / (p.sum() + t.sum() + 1e-7)


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 1))


@pytest.mark.parametrize("rows_per_unit", [1, 2])
@pytest.mark.parametrize("loss", [batch_dice, spread_batch_dice, shared_batch_dice])
def test_dice_summed_over_the_batch_is_refused_and_the_message_says_why(loss: Any, rows_per_unit: int) -> None:
    inputs, targets = torch.randn(4, 1, 6, 6), torch.randint(2, (4, 6, 6))
    with pytest.raises(PrivacyError, match="one loss per row") as refused:
        require_private_ready(small_net(), loss, inputs, targets, rows_per_unit=rows_per_unit)
    if loss is not batch_dice:
        assert "clipping bounds nothing" in str(refused.value)
        assert "Dice of each" in str(refused.value)
    with pytest.raises((PrivacyError, ArgumentError), match="one loss per row"):
        clipped_sum(small_net(), loss, inputs, targets, clip_norm=1.0, rows_per_unit=rows_per_unit)


@pytest.mark.parametrize("loss", OF_MASKS)
def test_our_own_losses_are_ready_for_private_training(loss: LossName) -> None:
    inputs, targets = torch.randn(4, 1, 6, 6), torch.randint(2, (4, 6, 6))
    assert require_private_ready(small_net(), loss_for("segmentation", loss, 2), inputs, targets) == []


def test_batch_dice_would_break_the_bound() -> None:
    """Why it is refused: taking one row away moves the others' gradients, so the sum moves by more than one clip."""
    inputs, targets = torch.randn(4, 1, 6, 6, dtype=torch.float64), torch.randint(2, (4, 6, 6))
    targets[0] = 1

    def clipped_by_hand(keep: slice) -> Tensor:
        model = small_net().double()
        losses = shared_batch_dice(model(inputs[keep]), targets[keep])
        found = []
        for loss in losses:
            each = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            gradient = torch.cat([part.flatten() for part in each])
            found.append(gradient * min(1.0, 1e-3 / float(gradient.norm())))
        return torch.stack(found).sum(0)

    moved = float((clipped_by_hand(slice(None)) - clipped_by_hand(slice(1, None))).norm())
    assert math.isfinite(moved)
    assert moved > 1e-3 * (1 + 1e-6)


def test_a_missing_finding_has_no_loss_and_no_gradient() -> None:
    outputs = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1, 0, math.nan, 1], [math.nan] * 4, [0, 0, 1, 1]], dtype=torch.float64)
    found = finding_loss(outputs, targets)
    (gradient,) = torch.autograd.grad(found.sum(), outputs)
    assert found[1] == 0
    assert gradient[0, 2] == 0
    assert not gradient[1].any()
    assert gradient[2].all()


def test_a_missing_finding_leaves_the_divisor_and_the_other_findings_alone() -> None:
    outputs = torch.randn(1, 5, dtype=torch.float64)
    whole = torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    masked = whole.clone()
    masked[0, 3] = math.nan
    lost = F.binary_cross_entropy_with_logits(outputs[0, 3], whole[0, 3]) / 5
    assert float(finding_loss(outputs, whole) - finding_loss(outputs, masked)) == pytest.approx(float(lost), rel=1e-12)


def test_findings_are_clipped_by_row_whatever_is_missing() -> None:
    outputs, targets = torch.randn(6, 3), (torch.rand(6, 3) > 0.5).float()
    targets[2] = math.nan
    together = finding_loss(outputs, targets)
    assert all(torch.equal(together[i : i + 1], finding_loss(outputs[i : i + 1], targets[i : i + 1])) for i in range(6))
    with pytest.raises(ArgumentError, match="rows, findings"):
        finding_loss(outputs, targets[:, :2])
