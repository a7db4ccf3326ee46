"""The building blocks: standardised filters, SAME padding, activations, norms, initial weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpvision import models
from dpvision.errors import ArgumentError
from dpvision.models import initialisation
from dpvision.models.layers import (
    Norm,
    OffsetLinear,
    SamePad2d,
    ScalarGain,
    SqueezeExcite,
    StochasticDepth,
    WSConv2d,
    norm_per_stage,
    same_padding,
)
from dpvision.models.nfnet import same_average_pool


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "expected"),
    [
        (32, 3, 2, (0, 1)),  # FACTS §6: the odd pixel goes to the bottom and the right
        (32, 3, 1, (1, 1)),
        (33, 3, 2, (1, 1)),
        (28, 8, 2, (3, 3)),  # FACTS §5
        (224, 7, 2, (2, 3)),
        (32, 1, 2, (0, 0)),
        (5, 2, 2, (0, 1)),
    ],
)
def test_same_padding_is_that_of_jax(size: int, kernel: int, stride: int, expected: tuple[int, int]) -> None:
    assert same_padding(size, kernel=kernel, stride=stride) == expected


@pytest.mark.parametrize("size", [5, 6, 7, 8])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_layers_give_the_size_divided_and_rounded_up(size: int, stride: int) -> None:
    x = torch.randn(2, 4, size, size + 1)
    expected = (math.ceil(size / stride), math.ceil((size + 1) / stride))
    for layer in (
        WSConv2d(4, 6, 3, stride=stride),
        nn.Sequential(SamePad2d(3, stride=stride, value=-math.inf), nn.MaxPool2d(3, stride)),
        nn.Sequential(SamePad2d(3, stride=stride), nn.Conv2d(4, 6, 3, stride=stride)),
    ):
        assert tuple(layer(x).shape[-2:]) == expected


def test_same_pooling_ignores_the_padding() -> None:
    x = -torch.ones(1, 1, 5, 5)
    pool = nn.Sequential(SamePad2d(3, stride=2, value=-math.inf), nn.MaxPool2d(3, 2))
    assert torch.equal(pool(x), -torch.ones(1, 1, 3, 3))
    assert torch.equal(same_average_pool()(x), -torch.ones(1, 1, 3, 3))


def test_standardised_filters_have_zero_mean_and_the_norm_of_their_gain() -> None:
    conv = WSConv2d(6, 8, 3, groups=2)
    with torch.no_grad():
        conv.weight.mul_(3).add_(torch.randn(8, 1, 1, 1))
        assert conv.gain is not None
        conv.gain.uniform_(0.5, 2)
    filters = conv.standardised_weight().flatten(1)
    torch.testing.assert_close(filters.mean(1), torch.zeros(8), atol=1e-6, rtol=0)
    torch.testing.assert_close(filters.norm(dim=1), conv.gain)


def test_standardisation_follows_the_formula_even_for_tiny_filters() -> None:
    conv = WSConv2d(3, 2, 3, affine=()).double()
    with torch.no_grad():
        conv.weight[1].mul_(1e-4)  # var · fan_in is under 1e-4: the floor holds
    for raw, used in zip(conv.weight, conv.standardised_weight(), strict=True):
        variance = ((raw - raw.mean()) ** 2).mean()
        torch.testing.assert_close(used, (raw - raw.mean()) / torch.sqrt(torch.clamp(variance * 27, min=1e-4)))


def test_a_standardised_convolution_is_a_convolution_with_its_standardised_weight() -> None:
    conv, x = WSConv2d(3, 5, 3, stride=2), torch.randn(2, 3, 8, 8)
    expected = functional.conv2d(functional.pad(x, (0, 1, 0, 1)), conv.standardised_weight(), conv.bias, stride=2)
    torch.testing.assert_close(conv(x), expected)
    assert {name: tuple(p.shape) for name, p in conv.named_parameters()} == {
        "weight": (5, 3, 3, 3),
        "gain": (5,),
        "bias": (5,),
    }


def test_the_switches_of_a_standardised_convolution_remove_parameters() -> None:
    assert [name for name, _ in WSConv2d(3, 5, 3, affine=()).named_parameters()] == ["weight"]
    torch.testing.assert_close(WSConv2d(3, 5, 3, padding=0)(torch.zeros(1, 3, 8, 8)), torch.zeros(1, 5, 6, 6))
    with pytest.raises(ArgumentError, match="groups must divide"):
        WSConv2d(3, 5, 3, groups=2)


def test_a_scalar_gain_is_one_number() -> None:
    gain = ScalarGain(0.5)
    assert gain.gain.shape == ()
    assert torch.equal(gain(torch.full((2, 3), 4.0)), torch.full((2, 3), 2.0))


def test_an_offset_is_learned_in_training_and_left_out_of_predictions() -> None:
    layer, x = OffsetLinear(3, 2, length=5.0), torch.randn(4, 3)
    assert not layer(x).any()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(2, 3))
        layer.bias.copy_(torch.tensor([1.0, -2.0]))
    torch.testing.assert_close(layer(x), x @ layer.weight.T + torch.tensor([5.0, -10.0]))
    torch.testing.assert_close(layer.eval()(x), x @ layer.weight.T)
    with pytest.raises(ArgumentError, match="length must be"):
        OffsetLinear(3, 2, length=0.0)


def test_predictions_can_keep_a_share_of_an_offset() -> None:
    layer, x = OffsetLinear(3, 2, length=5.0, kept=0.3), torch.randn(4, 3)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([1.0, -2.0]))
    torch.testing.assert_close(layer(x), torch.tensor([5.0, -10.0]).expand(4, 2))
    torch.testing.assert_close(layer.eval()(x), torch.tensor([1.5, -3.0]).expand(4, 2))
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ArgumentError, match="kept must be"):
            OffsetLinear(3, 2, length=5.0, kept=share)


def test_squeeze_and_excitation_gates_by_spatial_means() -> None:
    gate, x = SqueezeExcite(4, 2, activation=nn.ReLU(), factor=2.0), torch.randn(3, 4, 5, 6)
    factor = 2 * torch.sigmoid(gate.expand(torch.relu(gate.reduce(x.mean((2, 3))))))
    torch.testing.assert_close(gate(x), x * factor[:, :, None, None])


def test_stochastic_depth_drops_whole_rows_in_training_only() -> None:
    drop, x = StochasticDepth(0.5), torch.ones(64, 2, 3, 3)
    assert torch.equal(drop.eval()(x), x)
    with initialisation.seeded(0):
        y = drop.train()(x)
    assert {tuple(row.unique().tolist()) for row in y} == {(0.0,), (2.0,)}


def test_a_tempered_sigmoid_with_two_two_one_is_tanh() -> None:
    x = torch.linspace(-4, 4, 101)
    torch.testing.assert_close(models.activation("tempered_sigmoid")(x), torch.tanh(x))
    torch.testing.assert_close(models.activation("tempered_sigmoid(1, 1, 0)")(x), torch.sigmoid(x))
    torch.testing.assert_close(models.activation("tempered_sigmoid(3,2,.5)")(x), 3 * torch.sigmoid(2 * x) - 0.5)


@pytest.mark.parametrize("name", ["nf_relu", "nf_gelu"])
def test_nf_activations_have_unit_variance_on_normal_input(name: str) -> None:
    # By quadrature over the normal density; the constant of the NF papers for ReLU is itself 0.07 % off.
    x = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    density = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    y = models.activation(name)(x)
    mean = (y * density).sum()
    assert abs(((y - mean) ** 2 * density).sum().item() - 1) < 2e-3


@pytest.mark.parametrize("name", models.ACTIVATIONS)
def test_no_activation_works_in_place(name: str) -> None:
    x = torch.randn(8)
    before = x.clone()
    models.activation(name)(x)
    assert torch.equal(x, before)


def test_layer_and_instance_norm_are_group_norm_with_one_and_with_all_groups() -> None:
    x = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(Norm("layer").make(8)(x), functional.layer_norm(x, x.shape[1:]))
    torch.testing.assert_close(Norm("instance").make(8)(x), functional.instance_norm(x))
    assert isinstance(Norm("batch").make(8), nn.BatchNorm2d)
    assert isinstance(Norm("none").make(8), nn.Identity)


def test_group_counts_are_clamped_or_the_common_divisor() -> None:
    assert Norm("group", 32).make(16).num_groups == 16
    assert Norm("group", 32, "gcd").make(24).num_groups == 8
    with pytest.raises(ArgumentError, match="groups must divide the 24 channels"):
        Norm("group", 16).make(24)
    assert [norm.groups for norm in norm_per_stage("group", (1, 2, 3), stages=3)] == [1, 2, 3]


def test_glorot_initialisation_is_that_of_keras() -> None:
    model = models.create("shoefit_cnn", in_channels=1, seed=0)
    conv = model[3]
    bound = math.sqrt(6 / (16 * 16 + 32 * 16))
    assert conv.weight.abs().max() <= bound
    assert conv.weight.abs().max() > 0.99 * bound
    assert all(not layer.bias.any() for layer in initialisation.weighted_layers(model))


def test_truncated_normals_are_cut_at_two_deviations_and_corrected() -> None:
    layer = nn.Linear(400, 400)
    with initialisation.seeded(0):
        initialisation.truncated_normal(layer)
    # 160,000 draws: the standard deviation is known to 0.2 %, ten times finer than the bound.
    assert abs(layer.weight.std().item() * 20 - 1) < 0.02
    assert layer.weight.abs().max().item() <= 2 / 0.8796 / 20
    with initialisation.seeded(0):
        initialisation.truncated_normal(layer, corrected=False)
    assert abs(layer.weight.std().item() * 20 - 0.8796) < 0.02


def test_mean_var_draws_each_layer_with_its_sources_statistics() -> None:
    source, model = (models.create("shoefit_cifar", seed=seed) for seed in (1, 2))
    with torch.no_grad():
        source[2].weight.mul_(0.5).add_(0.3)
    with initialisation.seeded(3):
        initialisation.mean_var(model, source)
    # 9,216 draws of standard deviation 0.03: both statistics within six standard errors.
    std = source[2].weight.std().item()
    assert abs(model[2].weight.mean().item() - source[2].weight.mean().item()) < 6 * std / 96
    assert abs(model[2].weight.std().item() / std - 1) < 6 / math.sqrt(2 * 9216)
    assert not torch.equal(model[2].weight, source[2].weight)
    with pytest.raises(ArgumentError, match="same layers"):
        initialisation.mean_var(model, models.create("shoefit_allconv", seed=0))


@pytest.mark.parametrize("scheme", initialisation.SCHEMES)
def test_every_scheme_redraws_every_weight(scheme: str) -> None:
    model = models.create("shoefit_cnn", in_channels=1, seed=0)
    before = {name: p.clone() for name, p in model.named_parameters() if name.endswith("weight")}
    with initialisation.seeded(9):
        initialisation.initialise(model, scheme)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
