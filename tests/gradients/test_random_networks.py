"""Random networks against the float64 loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpvision.models.layers import ScalarGain, WSConv2d
from grads_networks import agrees, overrides_of


# Random networks: a list of blocks that keep (rows, 4, 6, 6) pictures as they are, and a head.
def _block(kind: str, seed: int) -> nn.Module:
    groups = (1, 2, 4)[seed % 3]
    return {
        "conv": lambda: nn.Conv2d(4, 4, (1, 3, 5)[seed % 3], padding="same", groups=groups, bias=bool(seed % 2)),
        "strided": lambda: nn.Sequential(nn.Conv2d(4, 6, 2, stride=2), nn.ConvTranspose2d(6, 4, 2, stride=2)),
        "reflect": lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode=("reflect", "circular")[seed % 2]),
        "standardised": lambda: WSConv2d(4, 4, 3, groups=groups, affine=("gain", "bias") if seed % 2 else ("bias",)),
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
    overrides = overrides_of(model, inputs, rows_per_unit)
    assert not overrides.moved
    assert not overrides.looped


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
