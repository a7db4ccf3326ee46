"""Whole networks against the float64 loop: the ways in which models use their parameters, and random ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpvision.flow import Microbatch
from dpvision.grads import Performance, clipped_sum, clipped_sum_of_batch, oracle
from dpvision.grads.admission import plan_for
from dpvision.grads.duties import duties_of
from dpvision.models import create
from dpvision.models.layers import ScalarGain, WSConv2d
from grads_support import PaddedDraw, cross_entropy, relative_error, wavy_loss


def agrees(model: nn.Module, inputs: Tensor, *, rows_per_unit: int = 1, tolerance: float = 1e-10) -> bool:
    targets = torch.linspace(0, 1, inputs.shape[0], dtype=torch.float64)
    for clip_norm in (0.1, 1e6):
        arguments = {"clip_norm": clip_norm, "rows_per_unit": rows_per_unit}
        found = clipped_sum(model, wavy_loss, inputs, targets, **arguments, microbatch_size=2).gradients
        true = oracle.clipped_sum_by_loop(model, wavy_loss, inputs, targets, **arguments).gradients
        if not relative_error(found, true) <= tolerance:
            return False
    return True


def pictures(rows: int = 6, channels: int = 3, size: int = 5) -> Tensor:
    return torch.randn(rows, channels, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sequences(rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def features(rows: int = 6) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class TiedLayers(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class CalledThreeTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.conv = nn.Linear(6, 6), nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.conv(self.layer(x)[:, None])[:, 0]) + x
        return x


class TwoNamesOneModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Sequential(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class TwoNamesOneParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6))
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.a) * self.b


class BehindItsOwnersBack(nn.Module):
    """The encoder's weight is used again by the decoder, without calling the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t()))


class OwnAndChilds(nn.Module):
    """A bare parameter that is also a child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(6, 6)
        self.own = self.child.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.child(x)) @ self.own + x


class InPlace(nn.Module):
    """In-place activations on fresh outputs and on views, and an in-place residual addition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True)
        self.mid, self.linear = nn.Conv2d(4, 4, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.conv(x)), 0.3, inplace=True)
        out = self.mid(h)
        out += h
        return self.linear(out).tanh_()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Mish())
        self.gain, self.token = ScalarGain(0.3), nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain(self.inner(x + self.token))


class NestedBare(nn.Module):
    """Blocks with bare parameters of their own around children with rules, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.blocks = nn.Sequential(Residual(), nn.Sequential(Residual(), nn.Conv2d(3, 2, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.scale


class Attention(nn.Module):
    """Positions looked up without a batch, attention with a projection that is never called as a module."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.position = nn.Embedding(4, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)
        self.token, self.head = nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position(torch.arange(4)) + self.token
        x = x if self.batch_first else x.transpose(0, 1)
        x, _ = self.attention(x, x, value=x, need_weights=False)
        return self.head(x).mean(1 if self.batch_first else 0)


class Recurrent(nn.Module):
    """Tuple outputs; time in front or rows in front."""

    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.cell, self.head = kind(6, 5, batch_first=batch_first), nn.Linear(5, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.cell(x if self.batch_first else x.transpose(0, 1))
        last = state[0] if isinstance(state, tuple) else state
        return self.head(out.mean(1 if self.batch_first else 0)) + last[0][:, :3]


class Windows(nn.Module):
    """Several entries in front for each row, rows together; and the same with rows apart."""

    def __init__(self, rows_together: bool) -> None:
        super().__init__()
        self.layer, self.rows_together = nn.Linear(6, 6), rows_together

    def forward(self, x: Tensor) -> Tensor:
        if self.rows_together:
            return self.layer(x.flatten(0, 1)).unflatten(0, (-1, 4)).tanh()
        return self.layer(x.transpose(0, 1).reshape(-1, 6)).unflatten(0, (4, -1)).transpose(0, 1).tanh()


class TwoOutputs(nn.Module):
    """Outputs that use each other inside, in a dictionary; inputs by keyword; a value that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor, *, table: Tensor, power: int) -> dict[str, Any]:
            y = torch.tanh(x * self.weight + table)
            return {"y": y, "z": y**power, "note": "no tensor"}

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x, table=torch.linspace(0, 1, 6, dtype=x.dtype), power=2)
        return out["y"] + 3 * out["z"].cos()


class ValueFlow(nn.Module):
    """Control flow on values: no batching rule can run it, so it is run unit by unit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        rows = [row * self.weight if float(row.sum()) > 0 else row - self.weight for row in x]
        return torch.tanh(torch.stack(rows))


class Recomputed(nn.Module):
    """Activations that are thrown away and computed again on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), TwoNamesOneParameter(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) + x


class ByKeyword(nn.Module):
    """Layers called with their input as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.standardised, self.up = nn.Conv2d(3, 4, 3), WSConv2d(4, 4, 3), nn.ConvTranspose2d(4, 3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.standardised(x_NCHW=self.conv(input=x).tanh())
        return self.up(input=h, output_size=[7, 7])


class Flattening(nn.Module):
    """Reshapes in a way that only one memory format allows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).tanh()
        return self.head(h.view(h.shape[0], -1))


class SideChannel(nn.Module):
    """A module that also hands out a value through an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ValueFlow()
        self.child = self.Child()

    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.kept = nn.Parameter(torch.randn(6)), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.kept = torch.tanh(x * self.weight)
            return self.kept + x

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) * self.child.kept


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3)), nn.Tanh(), nn.Conv2d(6, 2, 1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tied layers": (TiedLayers, features),
    "a module called three times": (CalledThreeTimes, features),
    "one module under two names": (TwoNamesOneModule, features),
    "one parameter under two names": (TwoNamesOneParameter, features),
    "a weight used behind its owner's back": (BehindItsOwnersBack, features),
    "a parameter that is also a child's": (OwnAndChilds, features),
    "in-place activations and additions": (InPlace, pictures),
    "nested bare parameters": (NestedBare, pictures),
    "attention, rows first": (lambda: Attention(True), sequences),
    "attention, time first": (lambda: Attention(False), sequences),
    "lstm, rows first": (lambda: Recurrent(nn.LSTM, True), sequences),
    "lstm, time first": (lambda: Recurrent(nn.LSTM, False), sequences),
    "gru, rows first": (lambda: Recurrent(nn.GRU, True), sequences),
    "windows of one row together": (lambda: Windows(True), sequences),
    "windows of one row apart": (lambda: Windows(False), sequences),
    "two outputs, keyword inputs": (TwoOutputs, features),
    "control flow on values": (ValueFlow, features),
    "a side channel": (SideChannel, features),
    "recomputed activations": (Recomputed, features),
    "layers called by keyword": (ByKeyword, pictures),
    "a view that depends on the memory format": (Flattening, pictures),
    "weight norm": (weight_norm, pictures),
    "batch norm in evaluation mode": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()), pictures),
    "standardised convolutions": (
        lambda: nn.Sequential(WSConv2d(3, 8, 3, stride=2), nn.Mish(), WSConv2d(8, 4, 3), nn.GroupNorm(2, 4)),
        pictures,
    ),
}


@pytest.mark.parametrize("rows_per_unit", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_way_of_using_a_parameter_gives_the_gradients_of_single_units(name: str, rows_per_unit: int) -> None:
    make, rows = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make().double()
    assert agrees(model, rows(), rows_per_unit=rows_per_unit)


def test_rows_are_not_mistaken_for_positions_when_their_numbers_are_equal() -> None:
    """Six time steps, six rows, micro-batches of six: shapes alone can't tell which is which."""
    model = Recurrent(nn.LSTM, False).double()
    inputs = torch.randn(6, 6, 6, dtype=torch.float64)
    targets = torch.linspace(0, 1, 6, dtype=torch.float64)
    found = clipped_sum(model, wavy_loss, inputs, targets, clip_norm=0.1, microbatch_size=6).gradients
    true = oracle.clipped_sum_by_loop(model, wavy_loss, inputs, targets, clip_norm=0.1).gradients
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
        true = oracle.clipped_sum_by_loop(model, wavy_loss, features(rows), targets, clip_norm=0.1).gradients
        assert relative_error(found, true) < 1e-10


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
    assert not plan.exceptions.moved
    assert not plan.exceptions.looped
    assert plan.channels_last
    assert all(duty.rule is not None for duty in duties_of(model, plan.exceptions))


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


# Random networks: a list of blocks that keep (rows, 4, 6, 6) pictures as they are, and a head.
def _block(kind: str, seed: int) -> nn.Module:
    groups = (1, 2, 4)[seed % 3]
    return {
        "conv": lambda: nn.Conv2d(4, 4, (1, 3, 5)[seed % 3], padding="same", groups=groups, bias=bool(seed % 2)),
        "strided": lambda: nn.Sequential(nn.Conv2d(4, 6, 2, stride=2), nn.ConvTranspose2d(6, 4, 2, stride=2)),
        "reflect": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode=("reflect", "circular")[seed % 2]),
        "standardised": lambda: WSConv2d(4, 4, 3, groups=groups, gain=bool(seed % 2)),
        "group": lambda: nn.GroupNorm(groups, 4),
        "instance": lambda: nn.InstanceNorm2d(4, affine=True),
        "layer": lambda: nn.LayerNorm((6, 6)),
        "columns": lambda: nn.Linear(6, 6),
        "mish": nn.Mish,
        "tanh": nn.Tanh,
        "prelu": lambda: nn.PReLU((1, 4)[seed % 2]),
        "gain": lambda: ScalarGain(0.5),
        "residual": lambda: _Sum(_block("conv", seed + 1), nn.Tanh()),
        "token": _Token,
    }[kind]()


class _Sum(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class _Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.token


KINDS = ["conv", "strided", "reflect", "standardised", "group", "instance", "layer", "columns"]
KINDS += ["mish", "tanh", "prelu", "gain", "residual", "token", "again"]
recipes = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11)), min_size=1, max_size=6)


def _network(recipe: list[tuple[str, int]]) -> nn.Module:
    layers: list[nn.Module] = []
    for kind, seed in recipe:
        if kind == "again":
            layers.append(layers[seed % len(layers)] if layers else nn.Tanh())
        else:
            layers.append(_block(kind, seed))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)).double()


def _check_random_network(recipe: list[tuple[str, int]], rows_per_unit: int, units: int, frozen: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(len(recipe))
        model = _network(recipe)
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(index != frozen)
        inputs = torch.randn(units * rows_per_unit, 4, 6, 6, dtype=torch.float64)
    assert agrees(model, inputs, rows_per_unit=rows_per_unit)


_quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}


@settings(max_examples=25, **_quiet)
@given(recipe=recipes, rows_per_unit=st.integers(1, 3), units=st.integers(1, 4), frozen=st.integers(0, 9))
def test_random_networks_agree_with_the_loop(
    recipe: list[tuple[str, int]], rows_per_unit: int, units: int, frozen: int
) -> None:
    _check_random_network(recipe, rows_per_unit, units, frozen)


@pytest.mark.slow
@settings(max_examples=400, **_quiet)
@given(recipe=recipes, rows_per_unit=st.integers(1, 3), units=st.integers(1, 6), frozen=st.integers(0, 9))
def test_many_random_networks_agree_with_the_loop(
    recipe: list[tuple[str, int]], rows_per_unit: int, units: int, frozen: int
) -> None:
    _check_random_network(recipe, rows_per_unit, units, frozen)
