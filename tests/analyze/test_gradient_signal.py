"""Gradients of single images against a loop, and slices of the loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpvision import Mechanism
from dpvision.analyze import gradient_statistics, loss_slice, random_direction


def row_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.fixture
def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)).double()
    return model, torch.randn(9, 1, 6, 6, dtype=torch.float64), torch.arange(9) % 3


MECHANISM = Mechanism(
    num_units=100, expected_batch_size=10.0, steps=5, noise_multiplier=2.0, clip_norm=0.8, adjacency="add_remove"
)


def test_norms_and_signal_are_those_of_a_loop(small: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, inputs, targets = small
    found = gradient_statistics(model, row_loss, inputs, targets, mechanism=MECHANISM)
    rows = []
    for image, target in zip(inputs, targets, strict=True):
        gradients = torch.autograd.grad(row_loss(model(image[None]), target[None])[0], tuple(model.parameters()))
        rows.append([gradient.flatten() for gradient in gradients])
    whole = torch.stack([torch.cat(row) for row in rows])
    norms = whole.norm(dim=1)
    assert found.norms == pytest.approx(norms.tolist(), rel=1e-9)
    assert found.clipped == pytest.approx(float((norms > 0.8).double().mean()))
    clipped = [torch.stack([row[i] for row in rows]) * (0.8 / norms).clamp(max=1)[:, None] for i in range(len(rows[0]))]
    pairs = [float(((each.sum(0).square().sum()) - each.square().sum()) / (9 * 8)) for each in clipped]
    assert [layer.signal for layer in found.layers] == pytest.approx([max(0, each) ** 0.5 for each in pairs])
    noise = 2.0 * 0.8 / 10 * 18**0.5  # the first weight has 18 numbers
    assert found.layers[0].noise == pytest.approx(noise)
    assert found.layers[0].ratio == pytest.approx(found.layers[0].signal / noise)


def test_without_privacy_nothing_is_clipped_and_nothing_is_noise(small: tuple[nn.Module, Tensor, Tensor]) -> None:
    found = gradient_statistics(small[0], row_loss, small[1], small[2], mechanism=None)
    assert found.clipped is None
    assert all(layer.noise is None for layer in found.layers)


def test_a_slice_passes_through_the_loss_of_the_model(small: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, inputs, targets = small
    direction = random_direction(model, torch.Generator().manual_seed(0))
    found = loss_slice(model, row_loss, (inputs, targets), [direction], name="x", offsets=(-0.5, 0.0, 0.5))
    assert found.losses[1] == pytest.approx(float(row_loss(model(inputs), targets).detach().mean()))
    plane = loss_slice(model, row_loss, (inputs, targets), [direction] * 2, name="x", offsets=(-0.25, 0.25))
    assert plane.losses == pytest.approx((found.losses[0], found.losses[1], found.losses[1], found.losses[2]))


def test_filters_of_a_random_direction_have_the_norms_of_the_models(small: tuple[nn.Module, Tensor, Tensor]) -> None:
    model = small[0]
    direction = random_direction(model, torch.Generator().manual_seed(0))
    own = model.get_parameter("0.weight").flatten(1).norm(dim=1)
    torch.testing.assert_close(direction["0.weight"].flatten(1).norm(dim=1), own.detach())
    assert not direction["0.bias"].any()
