"""Mistakes that other libraries make (docs/concepts/guarantee.md lists them), each with what happens here instead."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import grads_reference as reference
from dpvision.config import Performance
from dpvision.errors import DPVisionError, PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum, clipped_sum_of_batch
from dpvision.gradients.plan import require_private_ready
from grads_support import PaddedDraw, cross_entropy, relative_error, total_norm


def rows(count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, generator=generator), torch.randint(0, 5, (count,), generator=generator)


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Tanh(), nn.Linear(4, 5))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm1d(4).requires_grad_(False),
        nn.InstanceNorm1d(4, track_running_stats=True),
    ],
    ids=["batch norm without affine", "frozen batch norm in train mode", "instance norm with statistics"],
)
def test_normalisation_without_trainable_parameters_is_not_waved_through(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (4, 2)), norm, nn.Flatten(), nn.Linear(8, 5))
    with pytest.raises(PrivacyError, match="Norm1d"):
        require_private_ready(model, cross_entropy, *rows())
    with pytest.raises(PrivacyError):
        clipped_sum(model, cross_entropy, *rows(), clip_norm=1.0)


def test_one_bad_sample_does_not_turn_the_model_into_nan() -> None:
    model, (inputs, targets) = mlp(), rows()
    inputs[3] = float("inf")
    found = clipped_sum(model, cross_entropy, inputs, targets, clip_norm=0.5).gradients
    assert 0 < total_norm(found) <= 5 * 0.5
    assert all(torch.isfinite(part).all() for part in found.values())


def test_a_step_that_was_broken_off_leaves_no_gradients_for_the_next() -> None:
    model, performance = mlp(), Performance(microbatch_size=2)
    whole = PaddedDraw(*rows())

    class BrokenOff(PaddedDraw):
        def microbatches(self, units: int):  # type: ignore[no-untyped-def]
            for number, microbatch in enumerate(super().microbatches(units)):
                if number == 2:
                    raise KeyboardInterrupt
                yield microbatch

    before = clipped_sum_of_batch(model, cross_entropy, whole, clip_norm=0.5, performance=performance).gradients
    with pytest.raises(KeyboardInterrupt):
        clipped_sum_of_batch(model, cross_entropy, BrokenOff(*rows()), clip_norm=0.5, performance=performance)
    after = clipped_sum_of_batch(model, cross_entropy, whole, clip_norm=0.5, performance=performance).gradients
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_unused_parameter_is_a_note_and_a_zero_not_a_crash() -> None:
    model = mlp()
    model[2].unused = nn.Parameter(torch.ones(7))
    (note,) = require_private_ready(model, cross_entropy, *rows())
    assert "2.unused" in str(note)
    assert not clipped_sum(model, cross_entropy, *rows(), clip_norm=1.0).gradients["2.unused"].any()


def test_no_parameter_is_missing_from_the_norm() -> None:
    """Each parameter alone must be able to use up the clip norm."""
    for alone in ("0.weight", "0.bias", "2.weight", "2.bias"):
        model = mlp().double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == alone)
        inputs, targets = rows(1)
        found = clipped_sum(model, cross_entropy, inputs.double(), targets, clip_norm=1e-3).gradients
        assert list(found) == [alone]
        assert total_norm(found) == pytest.approx(1e-3, rel=1e-9)


def test_tied_weights_are_added_before_the_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 5)).double()
    model[2].weight = model[0].weight
    inputs, targets = rows()
    arguments = (model, cross_entropy, inputs.double(), targets)
    found = clipped_sum(*arguments, clip_norm=0.2).gradients
    assert list(found) == ["0.weight", "0.bias", "2.bias", "4.weight", "4.bias"]
    assert relative_error(found, reference.clipped_sum_by_loop(*arguments, clip_norm=0.2).gradients) < 1e-10


def test_no_parameter_is_silently_left_out() -> None:
    """A parameter outside of every known layer is trained like all others."""

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x / self.temperature

    found = clipped_sum(mlp(Tempered()), cross_entropy, *rows(), clip_norm=1.0).gradients
    assert found["1.temperature"] != 0


def test_every_refusal_is_one_line_for_the_user() -> None:
    for model in (mlp(nn.BatchNorm1d(4)), mlp(nn.Softmax(0))):
        with pytest.raises(DPVisionError) as refusal:
            clipped_sum(model, cross_entropy, *rows(), clip_norm=1.0)
        assert "\n" not in str(refusal.value)
