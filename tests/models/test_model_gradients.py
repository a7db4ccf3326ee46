"""The catalogue through the engine: clipped sums equal the torch.func reference, by rules alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpvision import models
from dpvision.config import OptimizerSettings
from dpvision.gradients.clipped_sum import clipped_sum
from dpvision.gradients.ownership import parameter_owners
from dpvision.gradients.plan import check_model, plan_for
from dpvision.gradients.rules import rule_for
from dpvision.models import initialisation
from dpvision.models.layers import WSConv2d
from dpvision.models.nfnet import F0, F3, NFNetSize, nf_resnet, nfnet
from dpvision.models.registry import _checked
from dpvision.models.wrn import WideResNet
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.noise import noisy_mean
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import Microbatch
from grads_reference import clipped_sum_by_func

Build = Callable[[], nn.Module]


def row_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy a row; maps are averaged over their pixels first."""
    scores = outputs if outputs.dim() == 2 else outputs.flatten(2).mean(2)
    return functional.cross_entropy(scores, targets, reduction="none")


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def scale_of(gradients: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in gradients.values()))


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return scale_of({name: found[name] - expected[name] for name in expected}) / scale_of(expected)


def add_clipped(total: dict[str, Tensor], gradients: Sequence[Tensor], *, clip_norm: float) -> None:
    """Add one unit's gradient, scaled down to ``clip_norm`` if it is longer."""
    unit = dict(zip(total, gradients, strict=True))
    factor = min(1.0, clip_norm / scale_of(unit))
    for name, gradient in unit.items():
        total[name] += gradient * factor


def from_catalogue(name: str, **options: object) -> Build:
    return lambda: models.create(name, num_classes=3, in_channels=2, seed=0, **options)


def narrow_wrn(**options: object) -> Build:
    def build() -> nn.Module:
        with initialisation.seeded(0):
            return WideResNet(num_classes=3, in_channels=2, depth=10, width=1, **options).build()

    return build


def narrow_nfnet(size: NFNetSize, **options: object) -> Build:
    """All blocks of F0 or F3, with their projections, pools and groups, at most a sixteenth as wide."""
    thin = replace(size, stem=(4, 4, 4, 8), widths=(16, 16, 24, 24), group_width=4, features=16)

    def build() -> nn.Module:
        with initialisation.seeded(0):
            return nfnet(num_classes=3, in_channels=2, size=thin, **{"skip_gain": 0.5, **options})

    return build


# (id, model, pixels): the whole catalogue, at widths and sizes where float64 takes a moment.
CASES: list[tuple[str, Build, int]] = [
    ("linear", from_catalogue("linear", image_size=6), 6),
    ("shoefit_cnn", from_catalogue("shoefit_cnn", image_size=14), 14),
    ("doermann_cnn", from_catalogue("doermann_cnn", image_size=14), 14),
    ("tempered_cnn", from_catalogue("tempered_cnn", image_size=8), 8),
    ("scaleresnet9", from_catalogue("scaleresnet9"), 8),
    ("resnet9, act_norm, frozen", from_catalogue("resnet9", order="act_norm", norm="frozen"), 8),
    ("wrn, de", narrow_wrn(), 8),
    ("wrn, de, odd size", narrow_wrn(), 7),
    ("wrn, skip_init", narrow_wrn(skip_init=True), 8),
    ("wrn, plain", narrow_wrn(layout="plain", scale_norm=True), 8),
    ("wrn, no ws", narrow_wrn(weight_standardised=False), 8),
    ("smoothnet", from_catalogue("smoothnet", width=1.0, depth=2.0), 16),
    ("nfnet, as deep as F0", narrow_nfnet(F0), 32),
    ("scatter_linear", from_catalogue("scatter_linear", image_size=8), 8),
    ("scatter_linear, fine", from_catalogue("scatter_linear", image_size=8, fine=True), 8),
    ("scatter_cnn", from_catalogue("scatter_cnn", image_size=8), 8),
]
SLOW_CASES: list[tuple[str, Build, int]] = [
    ("resnet9", from_catalogue("resnet9"), 8),
    ("shoefit_allconv", from_catalogue("shoefit_allconv"), 8),
    ("shoefit_cifar", from_catalogue("shoefit_cifar", image_size=8), 8),
    ("efficientnet_lite0", from_catalogue("efficientnet_lite0"), 32),
    ("vgg16_conv3", from_catalogue("vgg16_conv3"), 16),
    ("resnet18", from_catalogue("resnet18"), 8),
    ("resnet34", from_catalogue("resnet34"), 32),
    ("resnet50", from_catalogue("resnet50"), 32),
    ("scaleresnet50", from_catalogue("scaleresnet50"), 32),
    ("wrn16_4", from_catalogue("wrn16_4"), 16),
    ("wrn40_4", from_catalogue("wrn40_4"), 8),
    ("wrn28_10", from_catalogue("wrn28_10"), 8),
    ("scalewrn16_4", from_catalogue("scalewrn16_4"), 16),
    ("densenet121", from_catalogue("densenet121"), 32),
    ("densenet121, scale_norm", from_catalogue("densenet121", scale_norm=True), 32),
    ("efficientnet_b0", from_catalogue("efficientnet_b0"), 32),
    ("nf_resnet50", from_catalogue("nf_resnet50"), 32),
    ("nf_resnet101", from_catalogue("nf_resnet101"), 32),
    ("nf_resnet152", from_catalogue("nf_resnet152"), 32),
    ("nf_resnet200", from_catalogue("nf_resnet200"), 32),
    ("nfnet_f0", from_catalogue("nfnet_f0", skip_gain=0.5), 32),
    ("nfnet, as deep as F3", narrow_nfnet(F3), 32),
    ("unet9", from_catalogue("unet9", groups=1), 16),
    ("scaleunet9", from_catalogue("scaleunet9", groups=1), 16),
    ("linknet9", from_catalogue("linknet9", groups=1), 16),
    ("scalelinknet9", from_catalogue("scalelinknet9", groups=1), 16),
]


# torch.func would hold the gradients of all units of this one at once, in float64: it has a test of its own.
BY_PLAIN_AUTOGRAD = "nfnet_f3"


def check_against_reference(build: Build, size: int) -> None:
    model = build().double()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 2, size, size, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 0])
    # A clip norm among the units' norms, so that clipping acts; two rows a unit.
    for rows_per_unit, clip_norm in ((1, 0.5), (2, 1e6)):
        arguments = (model, row_losses, inputs, targets)
        ours = clipped_sum(*arguments, clip_norm=clip_norm, rows_per_unit=rows_per_unit).gradients
        expected = clipped_sum_by_func(*arguments, clip_norm=clip_norm, rows_per_unit=rows_per_unit).gradients
        assert ours.keys() == expected.keys() == dict(model.named_parameters()).keys()
        assert scale_of(expected) > 0
        assert relative_error(ours, expected) <= 1e-10


@pytest.mark.parametrize(("build", "size"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_clipped_sums_equal_the_reference(build: Build, size: int) -> None:
    check_against_reference(build, size)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "size"), [pytest.param(*case[1:], id=case[0]) for case in SLOW_CASES])
def test_clipped_sums_of_large_models_equal_the_reference(build: Build, size: int) -> None:
    check_against_reference(build, size)


def test_every_model_of_the_catalogue_is_compared() -> None:
    compared = {case[0] for case in (*CASES, *SLOW_CASES)} | {BY_PLAIN_AUTOGRAD}
    assert {entry.name for entry in models.catalogue()} <= compared


@pytest.mark.slow
def test_the_clipped_sum_of_nfnet_f3_is_that_of_single_units() -> None:
    """255 million parameters: float32, two units, one at a time; 9 GiB and a minute and a half of one core."""
    model = models.create(BY_PLAIN_AUTOGRAD, num_classes=3, in_channels=2, skip_gain=0.5, seed=0)
    x, targets = noise(2, 2, 32, 32), torch.tensor([0, 1])
    parameters = dict(model.named_parameters())
    expected = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for unit in range(2):
        losses = row_losses(model(x[unit : unit + 1]), targets[unit : unit + 1])
        add_clipped(expected, torch.autograd.grad(losses.sum(), list(parameters.values())), clip_norm=0.5)
    ours = clipped_sum(model, row_losses, x, targets, clip_norm=0.5).gradients
    # Float32 through 150 convolutions: 2e-6 was measured.
    assert relative_error(ours, expected) <= 1e-4


def dropping_resnet() -> nn.Module:
    with initialisation.seeded(0):
        return nf_resnet(num_classes=3, in_channels=2, depth=50, stochastic_depth=0.6)


# Random layers switched on, high enough to act in every batch.
dropping_nfnet = narrow_nfnet(F0, stochastic_depth=0.6, dropout=0.4)


@pytest.mark.parametrize("build", [pytest.param(dropping_resnet, marks=pytest.mark.slow), dropping_nfnet])
def test_stochastic_depth_and_dropout_are_admitted(build: Build) -> None:
    findings = check_model(build().train(), row_losses, noise(2, 2, 32, 32), torch.tensor([0, 1]))
    assert [str(finding) for finding in findings] == []


def test_units_are_clipped_one_by_one_under_stochastic_depth_and_dropout() -> None:
    """One forward of the same draws; autograd gives each unit's gradient by itself."""
    model = dropping_nfnet().double().train()
    x, targets = noise(4, 2, 32, 32, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    parameters = dict(model.named_parameters())
    with initialisation.seeded(5):
        ours = clipped_sum(model, row_losses, x, targets, clip_norm=0.5, microbatch_size=4).gradients
    with initialisation.seeded(5):
        losses = row_losses(model(x), targets)
    expected = {key: torch.zeros_like(value) for key, value in parameters.items()}
    for loss in losses:
        add_clipped(expected, torch.autograd.grad(loss, list(parameters.values()), retain_graph=True), clip_norm=0.5)
    assert relative_error(ours, expected) <= 1e-10
    with initialisation.seeded(6):
        other_draws = clipped_sum(model, row_losses, x, targets, clip_norm=0.5, microbatch_size=4).gradients
    assert relative_error(other_draws, expected) > 0.1


def test_equal_units_have_draws_of_their_own_and_a_changed_unit_moves_no_other() -> None:
    model = dropping_nfnet().train()
    x = noise(1, 2, 32, 32).repeat(8, 1, 1, 1)
    with torch.no_grad(), initialisation.seeded(5):
        before = model(x)
    # Eight equal images: with one draw for all of them their scores would be equal.
    assert len({tuple(row) for row in before.tolist()}) == 8
    x[3] = 3 * x[3].flip(-1) + 1
    with torch.no_grad(), initialisation.seeded(5):
        after = model(x)
    others = [row for row in range(8) if row != 3]
    torch.testing.assert_close(after[others], before[others], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(after[3], before[3], rtol=1e-2)


def test_wrn16_4_trains_privately_through_the_rules_alone() -> None:
    model = models.create("wrn16_4", num_classes=2, in_channels=1, seed=0)
    # Noise with a bright half, the upper or the lower one.
    x, targets = noise(8, 1, 8, 8), torch.tensor([0, 1] * 4)
    x[0::2, :, :4] += 2
    x[1::2, :, 4:] += 2
    # Little noise for few images: that the loss falls shows the way of the gradients, not of the privacy.
    mechanism = Mechanism(num_units=8, expected_batch_size=8.0, clip_norm=1.0, noise_multiplier=1e-3, steps=4)
    optimizer = Optimizer(model, settings=OptimizerSettings(learning_rate=0.5), total_steps=4, private=True)
    with torch.no_grad():
        before = row_losses(model(x), targets).mean()
    for step in range(4):
        clipped = clipped_sum(model, row_losses, x, targets, clip_norm=1.0)
        optimizer.step(noisy_mean(clipped, mechanism, Keys(bytes(32), "test"), step=step))
    with torch.no_grad():
        assert row_losses(model(x), targets).mean() < 0.5 * before
    plan = plan_for(model, row_losses, Microbatch(x, targets, torch.ones(8, 1)))
    assert not plan.overrides.moved
    assert not plan.overrides.looped
    owners = parameter_owners(model, plan.overrides)
    assert all(owner.rule is not None for owner in owners)
    assert sum(isinstance(owner.module, WSConv2d) for owner in owners) == 16


@pytest.mark.parametrize("name", [entry.name for entry in models.catalogue()])
def test_every_layer_with_parameters_has_a_rule(name: str) -> None:
    with torch.device("meta"):
        model = _checked(name, num_classes=10, in_channels=3, options={})()
    without = [
        path
        for path, module in model.named_modules()
        if list(module.parameters(recurse=False)) and rule_for(module) is None
    ]
    assert without == []
