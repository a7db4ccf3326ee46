"""What could let a unit through that is longer than the clip norm: stale graphs, overwritten outputs, rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision import kernels as native
from dpvision.config import Performance
from dpvision.errors import PrivacyError
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.gradients.fast import fused_copy
from dpvision.gradients.plan import plan_for
from dpvision.models.layers import WSConv2d
from dpvision.privacy.values import Microbatch
from grads_support import relative_error, total_norm, wavy_loss

needs_kernels = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.reason()}")
AUTO, PLAIN = Performance(), Performance(kernels="plain")


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).flatten(1).sum(1)


def contribution(model: nn.Module, image: Tensor, target: Tensor, clip_norm: float, performance: Performance) -> float:
    """The length of one unit's part of the sum, in clip norms."""
    rows = Rows(image, target, 1)
    return (
        total_norm(clipped_sum_of_batch(model, weighted, rows, clip_norm=clip_norm, performance=performance).gradients)
        / clip_norm
    )


class InPlace(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


@pytest.mark.parametrize(
    "change", [lambda x: x.mul_(2.0), lambda x: F.silu(x, inplace=True).mul_(1.788)], ids=["scaled", "activated"]
)
def test_an_output_that_is_overwritten_does_not_speak_for_its_layer(change: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(WSConv2d(16, 16, 3, affine=()), InPlace(change), nn.Flatten())
    assert isinstance(model[0], WSConv2d)
    pattern = model[0].standardised_weight().detach()
    for filter_ in range(0, 16, 5):
        # An image that holds a filter's own pattern: its gradient lies along the direction that is taken out.
        image = 0.1 * torch.randn(1, 16, 4, 4)
        image[0, :, 0:3, 0:3] += 5 * pattern[filter_]
        target = torch.zeros(1, 16, 4, 4)
        target[0, filter_, 1, 1] = 1.0
        assert contribution(model, image, target.flatten(1), 1e-3, AUTO) <= 1


@pytest.mark.parametrize("kernels", ["auto", "plain"])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_gradient_that_hardly_varies_keeps_a_standardised_norm_above_its_length(stride: int, kernels: Any) -> None:
    torch.manual_seed(0)
    channels = 512 if stride == 2 else 128
    model = nn.Sequential(WSConv2d(channels, 16, 3, stride=stride, affine=()), nn.Flatten())
    size = 18
    for value in torch.linspace(1.05, 1.95, 7).tolist():
        for bump in (0.1, 0.3, 0.7):
            image = torch.full((1, channels, size, size), value)
            image[0, -1, 2:5, 2:5] *= 1 + bump
            target = torch.zeros(1, 16, size // stride, size // stride)
            target[:, :, 1, 1] = 1
            found = contribution(model, image, target.flatten(1), 1e-6, Performance(kernels=kernels))
            assert found <= 1


@pytest.mark.parametrize("performance", [AUTO, PLAIN])
@pytest.mark.parametrize("outputs", [3, 11])
@pytest.mark.parametrize("clip_norm", [2e-8, 3e-9, 1e-3])
def test_factors_below_the_smallest_float_do_not_stretch_a_gradient(
    clip_norm: float, outputs: int, performance: Performance
) -> None:
    """A gradient of 1e37 clipped to 2e-8 has a factor that float32 would round up by nearly a half."""
    model = nn.Linear(64, outputs, bias=False)
    image, target = torch.full((1, 64), 1e18), torch.full((1, outputs), 1e18)
    assert contribution(model, image, target, clip_norm, performance) <= 1


@pytest.mark.parametrize("performance", [AUTO, PLAIN], ids=["auto", "plain"])
def test_numbers_whose_squares_underflow_do_not_escape_the_clip(performance: Performance) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4, bias=False))
    image = torch.full((1, 64), 2e-23)
    target = torch.full((1, 4), 8e18)
    assert contribution(model, image, target, 1e-3, performance) <= 1


@pytest.mark.parametrize("performance", [AUTO, PLAIN], ids=["auto", "plain"])
def test_constant_gradients_are_not_rounded_beyond_the_clip_norm(performance: Performance) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Flatten())
    for value in (1.0000001, 1.1, 1.37, 1.9999):
        image, target = torch.full((1, 16, 8, 8), value), torch.full((1, 16 * 64), value)
        assert contribution(model, image, target, 1e-3, performance) <= 1


class Switching(nn.Module):
    """Reads everything that it computes with from its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU()
        self.register_buffer("mean", torch.zeros(16, 1, 1))
        self.scales, self._shift, self.plain = [1.0, 2.0], 0.0, torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.conv(x) - self.mean)) * self.scales[1] * self.plain + self._shift
        return y.flatten(1)[:, :7]


def _replace_activation(model: Any) -> None:
    model.act = nn.Mish()


def _rebind_buffer(model: Any) -> None:
    model.mean = torch.randn(16, 1, 1)


def _change_element(model: Any) -> None:
    model.scales[1] = 0.5


def _change_hidden(model: Any) -> None:
    model._shift = 3.0


def _rebind_tensor(model: Any) -> None:
    model.plain = torch.full((), 0.25)


def _add_hook(model: Any) -> None:
    model.act.register_forward_hook(lambda *_: _[2] * 0.5)


def _patch_forward(model: Any) -> None:
    model.act.forward = lambda x: x * 0.1


@needs_kernels
@pytest.mark.parametrize(
    "change",
    [
        _replace_activation,
        _rebind_buffer,
        _change_element,
        _change_hidden,
        _rebind_tensor,
        _add_hook,
        _patch_forward,
    ],
)
def test_whatever_changes_in_a_model_is_seen_by_the_next_step(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    model = Switching()
    rows = Rows(torch.randn(4, 3, 6, 6), torch.linspace(0, 1, 4), 1)

    def found(performance: Performance) -> dict[str, Tensor]:
        return clipped_sum_of_batch(model, wavy_loss, rows, clip_norm=0.5, performance=performance).gradients

    found(AUTO)
    assert plan_for(model, wavy_loss, next(rows.microbatches(1)), AUTO).fused_copy is not None
    change(model)
    assert relative_error(found(AUTO), found(PLAIN)) <= 1e-4


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(1, 3), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.norm(x)
        return self.act(self.aux)


def test_a_model_that_writes_new_attributes_has_no_fused_copy() -> None:
    assert fused_copy(nn.Sequential(Remembering()), compiled=True) is None


class Shared(nn.Module):
    """An in-place activation whose input another layer reads."""

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.norm, self.act, self.early = nn.GroupNorm(4, 16), nn.SiLU(inplace=True), early

    def forward(self, x: Tensor) -> Tensor:
        if self.early:
            y = self.norm(self.act(x))
            return y + x
        y = self.norm(x)
        x.mul_(3.0)
        return torch.tanh(y) + x


@needs_kernels
@pytest.mark.parametrize("early", [True, False])
def test_writing_in_place_into_what_others_read_means_no_fused_copy(early: bool) -> None:
    assert fused_copy(nn.Sequential(nn.Conv2d(3, 16, 3), Shared(early=early))) is None


@needs_kernels
def test_kernels_switched_off_later_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Flatten())
    one = Microbatch(torch.randn(1, 16, 6, 6), torch.zeros(1), torch.ones(1, 1))
    assert plan_for(model, wavy_loss, one).fused_copy is not None
    with native.switched_off():
        assert plan_for(model, wavy_loss, one).fused_copy is None


def test_an_overwritten_input_is_refused_by_name() -> None:
    broken = nn.Sequential(nn.Linear(4, 4), _Overwriting())
    rows = Rows(torch.randn(2, 4), torch.zeros(2), 1)
    with pytest.raises(PrivacyError, match="was changed in place"):
        clipped_sum_of_batch(broken, wavy_loss, rows, clip_norm=1.0, performance=PLAIN)


class _Overwriting(nn.Module):
    """Writes into its layer's input after the layer has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        x.mul_(2.0)
        return y + x
