"""Whole networks against the float64 loop: the ways in which models use their parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import grads_reference as reference
from dpvision.config import Performance
from dpvision.errors import PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum, clipped_sum_of_batch
from dpvision.gradients.ownership import parameter_owners
from dpvision.gradients.plan import plan_for
from dpvision.models import create
from dpvision.models.layers import WSConv2d
from dpvision.privacy.values import Microbatch
from grads_networks import (
    NETWORKS,
    BehindItsOwnersBack,
    Recurrent,
    TiedLayers,
    TwoNamesOneParameter,
    agrees,
    features,
    overrides_of,
    pictures,
)
from grads_support import PaddedDraw, cross_entropy, relative_error, wavy_loss

UNUSUAL = {
    "a weight used behind its owner's back",
    "attention, rows first",
    "attention, time first",
    "lstm, rows first",
    "lstm, time first",
    "gru, rows first",
    "windows of one row apart",
    "a side channel",
    "weight norm",
}


@pytest.mark.parametrize("rows_per_unit", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_way_of_using_a_parameter_gives_the_gradients_of_single_units(name: str, rows_per_unit: int) -> None:
    make, rows = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make().double()
    assert agrees(model, rows(), rows_per_unit=rows_per_unit)
    overrides = overrides_of(model, rows(), rows_per_unit)
    assert bool(overrides.moved or overrides.looped) == (name in UNUSUAL)


def test_rows_are_not_mistaken_for_positions_when_their_numbers_are_equal() -> None:
    """Six time steps, six rows, micro-batches of six: shapes alone can't tell which is which."""
    model = Recurrent(nn.LSTM, False).double()
    inputs = torch.randn(6, 6, 6, dtype=torch.float64)
    targets = torch.linspace(0, 1, 6, dtype=torch.float64)
    found = clipped_sum(model, wavy_loss, inputs, targets, clip_norm=0.1, microbatch_size=6).gradients
    true = reference.clipped_sum_by_loop(model, wavy_loss, inputs, targets, clip_norm=0.1).gradients
    assert relative_error(found, true) < 1e-10


def test_a_table_without_rows_is_not_split_when_it_is_as_long_as_the_batch() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = self.Inner()

        class Inner(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 6))

            def forward(self, x: Tensor, table: Tensor) -> Tensor:
                return torch.tanh(x[:, None] * self.weight + table).flatten(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, torch.linspace(0, 1, 24, dtype=x.dtype).view(4, 6))

    model = Shifted().double()
    for rows in (4, 8):
        targets = torch.linspace(0, 1, rows, dtype=torch.float64)
        found = clipped_sum(model, wavy_loss, features(rows), targets, clip_norm=0.1, microbatch_size=rows).gradients
        true = reference.clipped_sum_by_loop(model, wavy_loss, features(rows), targets, clip_norm=0.1).gradients
        assert relative_error(found, true) < 1e-10


class Wandering(nn.Module):
    """Calls its layer in another way when a value is large, which no trial run on small values can know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.max()) < 100 else self.layer(torch.cat([x, x]))[: x.shape[0]]


def test_a_call_that_was_not_seen_when_the_model_was_checked_is_refused() -> None:
    model, targets = Wandering().double(), torch.zeros(6).double()
    clipped_sum(model, wavy_loss, features(), targets, clip_norm=1.0)
    with pytest.raises(PrivacyError, match=r"layer \(Linear\) was called differently"):
        clipped_sum(model, wavy_loss, features() + 1000, targets, clip_norm=1.0)


def test_hooks_of_the_user_do_not_disturb_the_gradients() -> None:
    model = nn.Sequential(nn.Linear(6, 6), TwoNamesOneParameter(), nn.Linear(6, 3)).double()
    for layer in model:
        layer.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        layer.register_forward_hook(lambda _, __, output: output.tanh() * 3)
    assert agrees(model, features())


@pytest.mark.parametrize("name", ["shoefit_cnn", "resnet9", "scaleresnet9", "wrn16_4"])
def test_models_of_the_catalogue_need_no_exception(name: str) -> None:
    """Every parameter has a rule, in the faster memory format: the fallback would be slow."""
    model = create(name, in_channels=1 if name == "shoefit_cnn" else 3, seed=0)
    size = 28 if name == "shoefit_cnn" else 16
    rows = Microbatch(torch.zeros(1, 1 if size == 28 else 3, size, size), torch.zeros(1).long(), torch.ones(1, 1))
    plan = plan_for(model, cross_entropy, rows)
    assert not plan.overrides.moved
    assert not plan.overrides.looped
    assert plan.channels_last
    assert all(owner.rule is not None for owner in parameter_owners(model, plan.overrides))


def test_the_memory_format_does_not_change_the_result() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, groups=1),
        nn.GroupNorm(2, 8),
        nn.Mish(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2),
        nn.MaxPool2d(2),
        WSConv2d(8, 4, 3),
        nn.Flatten(),
        nn.LazyLinear(3),
    ).double()
    model(pictures(2, size=9))
    targets = torch.linspace(0, 1, 6, dtype=torch.float64)
    draw = PaddedDraw(pictures(6, size=9), targets)
    sums = [
        clipped_sum_of_batch(
            model,
            wavy_loss,
            draw,
            clip_norm=0.1,
            performance=Performance(channels_last=channels_last, microbatch_size=4),
        ).gradients
        for channels_last in (False, True)
    ]
    assert relative_error(sums[1], sums[0]) < 1e-10


def test_frozen_parameters_are_absent_and_unused_ones_are_zero() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model[0].weight.requires_grad_(False)
    model.add_module("unused", nn.Identity())
    model.unused.extra = nn.Linear(2, 2).double()
    found = clipped_sum(model, wavy_loss, features(), torch.zeros(6).double(), clip_norm=0.1).gradients
    assert list(found) == ["0.bias", "2.weight", "2.bias", "unused.extra.weight", "unused.extra.bias"]
    assert not found["unused.extra.weight"].any()
    assert found["0.bias"].any()
    assert agrees(model, features())


def test_changing_what_is_trainable_between_steps_is_noticed() -> None:
    model = TiedLayers().double()
    assert agrees(model, features())
    model.first.bias.requires_grad_(False)
    assert agrees(model, features())
    model.second.weight = nn.Parameter(model.second.weight.detach().clone())
    assert agrees(model, features())
    model.second = BehindItsOwnersBack().double()
    assert agrees(model, features())


def test_a_model_without_trainable_parameters_gives_an_empty_sum() -> None:
    model = nn.Linear(6, 3).requires_grad_(False)
    assert clipped_sum(model, wavy_loss, features().float(), torch.zeros(6), clip_norm=1.0).gradients == {}
