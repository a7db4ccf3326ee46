"""Losses that mix units by their targets, and sums that could round past the clip norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.errors import PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum

ROWS, CLASSES = 12, 4


def rows() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, CLASSES))
    return model, torch.randn(ROWS, 6, generator=generator), torch.arange(ROWS) % CLASSES


def good_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def loss_weighted_by_all_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    return good_loss(outputs, targets) * (0.01 + (targets == 1).sum())


def loss_centred_over_the_batch(outputs: Tensor, targets: Tensor) -> Tensor:
    return good_loss(outputs - outputs.mean(0), targets)


@pytest.mark.parametrize("loss", [loss_weighted_by_all_targets, loss_centred_over_the_batch])
def test_a_loss_that_mixes_units_is_refused_by_targets_as_by_inputs(loss: object) -> None:
    model, inputs, targets = rows()
    with pytest.raises(PrivacyError, match="loss_fn: mixes units"):
        clipped_sum(model, loss, inputs, targets, clip_norm=0.5)  # pyright: ignore[reportArgumentType]


def test_a_model_that_was_admitted_with_one_loss_is_tried_again_with_another() -> None:
    model, inputs, targets = rows()
    clipped_sum(model, good_loss, inputs, targets, clip_norm=0.5)
    with pytest.raises(PrivacyError, match="mixes units"):
        clipped_sum(model, loss_centred_over_the_batch, inputs, targets, clip_norm=0.5)


def test_positions_that_cancel_do_not_push_a_unit_past_the_clip_norm() -> None:
    """Large gradients that nearly cancel over positions: norm and sum must come from the same rounded numbers."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(8, 8, bias=False)
    half = torch.randn(64, 8, 8, generator=generator) * 1e3
    inputs = torch.cat([half, half * (1 + 1e-6)], dim=1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        signs = torch.cat([torch.ones(8), -torch.ones(8)])
        return (outputs.sum(2) * signs).sum(1) * 1e3

    for unit in range(64):
        one = clipped_sum(model, loss, inputs[unit : unit + 1], torch.zeros(1), clip_norm=0.3)
        norm = float(one.gradients["weight"].double().norm())
        assert norm <= 0.3 * (1 + 1e-5)
