"""The catalogue through the engine: clipped sums equal the torch.func reference, by rules alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpvision import models
from dpvision.grads import clipped_sum
from dpvision.grads.reference import clipped_sum_by_func
from dpvision.grads.rules import rule_for
from dpvision.models import initialise
from dpvision.models.catalogue import _checked
from dpvision.models.wrn import WideResNet

Build = Callable[[], nn.Module]


def row_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy a row; maps are averaged over their pixels first."""
    scores = outputs if outputs.dim() == 2 else outputs.flatten(2).mean(2)
    return functional.cross_entropy(scores, targets, reduction="none")


def from_catalogue(name: str, **options: object) -> Build:
    return lambda: models.create(name, num_classes=3, in_channels=2, seed=0, **options)


def narrow_wrn(**options: object) -> Build:
    def build() -> nn.Module:
        with initialise.seeded(0):
            return WideResNet(num_classes=3, in_channels=2, depth=10, width=1, **options).build()

    return build


# (id, model, pixels): the whole catalogue, at widths and sizes where float64 takes a moment.
CASES: list[tuple[str, Build, int]] = [
    ("linear", from_catalogue("linear", image_size=6), 6),
    ("shoefit_cnn", from_catalogue("shoefit_cnn", image_size=14), 14),
    ("doermann_cnn", from_catalogue("doermann_cnn", image_size=14), 14),
    ("tempered_cnn", from_catalogue("tempered_cnn", image_size=8), 8),
    ("scaleresnet9", from_catalogue("scaleresnet9"), 8),
    ("wrn, de", narrow_wrn(), 8),
    ("wrn, de, odd size", narrow_wrn(), 7),
    ("wrn, skip_init", narrow_wrn(skip_init=True), 8),
    ("wrn, plain", narrow_wrn(layout="plain", scale_norm=True), 8),
    ("wrn, no ws", narrow_wrn(weight_standardised=False), 8),
    ("smoothnet", from_catalogue("smoothnet", width=1.0, depth=2.0), 16),
    ("scatter_linear", from_catalogue("scatter_linear", image_size=8), 8),
    ("scatter_cnn", from_catalogue("scatter_cnn", image_size=8), 8),
]
SLOW_CASES: list[tuple[str, Build, int]] = [
    ("resnet9", from_catalogue("resnet9"), 8),
    ("shoefit_allconv", from_catalogue("shoefit_allconv"), 8),
    ("shoefit_cifar", from_catalogue("shoefit_cifar", image_size=8), 8),
    ("resnet18", from_catalogue("resnet18"), 8),
    ("resnet34", from_catalogue("resnet34"), 32),
    ("resnet50", from_catalogue("resnet50"), 32),
    ("scaleresnet50", from_catalogue("scaleresnet50"), 32),
    ("wrn16_4", from_catalogue("wrn16_4"), 16),
    ("wrn40_4", from_catalogue("wrn40_4"), 8),
    ("wrn28_10", from_catalogue("wrn28_10"), 8),
    ("scalewrn16_4", from_catalogue("scalewrn16_4"), 16),
    ("densenet121", from_catalogue("densenet121"), 32),
    ("efficientnet_b0", from_catalogue("efficientnet_b0"), 32),
    ("nf_resnet50", from_catalogue("nf_resnet50"), 32),
    ("nf_resnet200", from_catalogue("nf_resnet200"), 32),
    ("nfnet_f0", from_catalogue("nfnet_f0", skip_gain=0.5), 32),
    ("unet9", from_catalogue("unet9", groups=1), 16),
    ("scaleunet9", from_catalogue("scaleunet9", groups=1), 16),
    ("linknet9", from_catalogue("linknet9", groups=1), 16),
    ("scalelinknet9", from_catalogue("scalelinknet9", groups=1), 16),
]


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
        scale = torch.sqrt(sum((value**2).sum() for value in expected.values()))
        error = torch.sqrt(sum(((ours[name] - expected[name]) ** 2).sum() for name in expected))
        assert scale > 0
        assert error <= 1e-10 * scale


@pytest.mark.parametrize(("build", "size"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_clipped_sums_equal_the_reference(build: Build, size: int) -> None:
    check_against_reference(build, size)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "size"), [pytest.param(*case[1:], id=case[0]) for case in SLOW_CASES])
def test_clipped_sums_of_large_models_equal_the_reference(build: Build, size: int) -> None:
    check_against_reference(build, size)


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
