"""Activations at joins and layers, against values computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpvision import models
from dpvision.analyze import Joins, activation_distributions, activation_norms, first_activation
from dpvision.errors import ArgumentError


def joins_of(name: str, *, channels: int = 3, side: int = 32, **options: object) -> list[tuple[str, str, list[str]]]:
    model = models.create(name, in_channels=channels, num_classes=2, seed=0, **options)
    found = Joins(model, torch.zeros(1, channels, side, side)).found
    return [(each.name, each.kind, list(each.nodes)) for each in found]


@pytest.mark.parametrize(("name", "paths"), [("resnet9", 3), ("scaleresnet9", 4)])
def test_both_residual_blocks_of_resnet9_are_found(name: str, paths: int) -> None:
    assert joins_of(name, groups=8) == [
        (block, "residual block", ["V_F", "V_R", "V_A", "V_AS"][:paths]) for block in ("res1", "res2")
    ]


def test_scalelinknet_has_four_blocks_and_two_long_skips_with_norms() -> None:
    found = joins_of("scalelinknet9", channels=1, width=8, groups=4)
    assert [name for name, kind, _ in found if kind == "long skip"] == ["long skip 1", "long skip 2"]
    assert [name for name, kind, _ in found if kind == "residual block"] == ["res1", "res2", "res3", "res4"]
    assert all(paths == ["V_F", "V_R", "V_A", "V_AS"] for _, _, paths in found)


def test_long_skips_of_unet_are_concatenations() -> None:
    found = joins_of("unet9", channels=1, width=8, groups=4)
    assert sum(kind == "long skip" for _, kind, _ in found) == 2


@pytest.mark.parametrize(("name", "count"), [("wrn16_4", 6), ("resnet18", 8), ("scaleresnet50", 16)])
def test_every_block_of_a_residual_network_is_found(name: str, count: int) -> None:
    found = joins_of(name)
    assert len(found) == count
    assert {kind for _, kind, _ in found} == {"residual block"}


def test_dense_connections_are_found_too() -> None:
    assert {kind for _, kind, _ in joins_of("smoothnet")} == {"dense connection"}


def test_moments_are_those_of_the_block_run_by_hand() -> None:
    model = models.create("scaleresnet9", seed=0, groups=8).eval()
    inputs = torch.randn(70, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = {(each.join.name, each.path): each for each in activation_distributions(model, inputs)}
    with torch.no_grad():
        block: nn.Module = model.get_submodule("res1")
        x = model.get_submodule("conv2")(model.get_submodule("conv1")(inputs))
        branch = block.get_submodule("branch")(x)
        values = {"V_R": x, "V_F": branch, "V_A": x + branch, "V_AS": block(x)}
    for path, value in values.items():
        each, exact = found["res1", path], value.double()
        assert each.mean == pytest.approx(float(exact.mean()), abs=1e-5)
        assert each.std == pytest.approx(float(exact.std(correction=0)), rel=1e-5)
        standard = (exact - exact.mean()) / exact.std(correction=0)
        assert each.skew == pytest.approx(float(standard.pow(3).mean()), abs=1e-3)
        assert each.norm == pytest.approx(float(exact.flatten(1).norm(dim=1).mean()), rel=1e-5)
        assert sum(each.counts) == value.numel()
        assert len(each.edges) == len(each.counts) + 1


def test_the_conv_path_is_v_f_even_if_the_code_adds_the_other_way_round() -> None:
    class Block(nn.Module):
        def __init__(self, swapped: bool) -> None:
            super().__init__()
            self.conv, self.swapped = nn.Conv2d(2, 2, 3, padding=1), swapped

        def forward(self, x: Tensor) -> Tensor:
            x = x.relu()
            return x + self.conv(x) if self.swapped else self.conv(x) + x

    for swapped in (True, False):
        join = Joins(nn.Sequential(nn.Conv2d(1, 2, 1), Block(swapped)), torch.zeros(1, 1, 4, 4)).found[0]
        assert "conv" in join.nodes["V_F"]
        assert "relu" in join.nodes["V_R"]


def test_a_network_without_joins_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no residual addition"):
        Joins(models.create("shoefit_cnn", in_channels=1, seed=0), torch.zeros(1, 1, 28, 28))


def test_norms_of_layers_are_means_over_images() -> None:
    model = models.create("shoefit_cnn", in_channels=1, seed=0)
    inputs = torch.randn(70, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    norms = activation_norms(model, inputs)
    expected = torch.tanh(model.get_submodule("0")(inputs)).flatten(1).norm(dim=1).mean().detach()
    assert first_activation(model, norms) == "1"
    assert norms["1"] == pytest.approx(float(expected), rel=1e-5)
    assert model.training  # the mode is restored


def test_the_first_activation_comes_after_a_norm() -> None:
    model = models.create("resnet9", seed=0, groups=8)
    assert first_activation(model, activation_norms(model, torch.randn(2, 3, 16, 16))) == "conv1.2"
