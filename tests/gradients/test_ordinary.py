"""Outputs by fast layers: the model's own, or else the model itself is used."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dpvision import kernels
from dpvision.gradients import ordinary
from dpvision.gradients.ordinary import fused_forward
from dpvision.models import create

needs_native = pytest.mark.skipif(not kernels.available(), reason="no native kernels here")
_NETWORKS = ("resnet9", "scaleresnet9", "wrn16_4", "shoefit_cifar")


def rows_of(count: int) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def network(name: str = "resnet9") -> nn.Module:
    return create(name, num_classes=10, in_channels=3, seed=0).eval()


@pytest.mark.parametrize("name", _NETWORKS)
def test_the_outputs_are_the_models(name: str) -> None:
    model, rows = network(name), rows_of(5)
    with fused_forward(model, rows[:2]) as quick, torch.no_grad():
        torch.testing.assert_close(quick(rows), model(rows), rtol=1e-4, atol=1e-4)


@needs_native
def test_fast_layers_are_used_where_they_agree() -> None:
    model = network()
    with fused_forward(model, rows_of(2)) as quick:
        assert quick is not model


@needs_native
def test_layers_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module) -> nn.Module:
        other = copy.deepcopy(model)
        with torch.no_grad():
            next(other.parameters()).add_(0.1)
        return other

    monkeypatch.setattr(ordinary, "fused_copy", wrong)
    model = network()
    with fused_forward(model, rows_of(2)) as quick:
        assert quick is model


class Viewing(nn.Module):
    """Flattens by ``view``, which channels-last pictures do not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(8 * 32 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).view(len(x), -1))


def test_a_model_that_needs_the_other_layout_gets_it() -> None:
    model, rows = Viewing().eval(), rows_of(3)
    with fused_forward(model, rows) as quick, torch.no_grad():
        assert quick is model
        torch.testing.assert_close(quick(rows), model(rows))


def test_a_model_that_gives_no_numbers_is_left_alone() -> None:
    model = network()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with fused_forward(model, rows_of(2)) as quick:
        assert quick is model


def test_new_weights_are_seen_by_the_next_block() -> None:
    model, rows = network(), rows_of(3)
    for _ in range(2):
        with fused_forward(model, rows) as quick, torch.no_grad():
            torch.testing.assert_close(quick(rows), model(rows), rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
