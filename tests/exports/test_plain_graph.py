"""The plain graph computes what the model computes, from operations that every runtime has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bright_model import bright_model
from dpvision.exports.plain_graph import PlainGraph, PlainResize, PlainScattering
from dpvision.inference import predict_masks, predict_probabilities
from dpvision.models.backbone import Resize
from dpvision.models.scattering import Scattering
from released_models import released_model


def pixels(count: int, shape: tuple[int, int, int]) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, size=(count, *shape), dtype=np.uint8))


@pytest.mark.parametrize(
    ("size", "scales", "angles"),
    [((8, 8), 2, 8), ((28, 28), 2, 8), ((32, 32), 1, 8), ((37, 52), 2, 4), ((80, 72), 3, 4)],
)
def test_scattering_by_matrices_equals_the_transform(size: tuple[int, int], scales: int, angles: int) -> None:
    scattering = Scattering(size, scales=scales, angles=angles)
    x = torch.randn(18, 1, *size, generator=torch.Generator().manual_seed(0))  # more rows than are taken at a time
    found, expected = PlainScattering(scattering)(x), scattering(x)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 2e-6  # some units of float32's last place; features are about 1


@pytest.mark.parametrize(("old", "new"), [(32, 56), (60, 24), (17, 17)])
def test_a_resize_by_matrices_equals_the_layer(old: int, new: int) -> None:
    layer = Resize(new)
    x = torch.randn(2, 3, old, old + 4, generator=torch.Generator().manual_seed(0))
    assert (PlainResize((old, old + 4), layer)(x) - layer(x)).abs().max() < 5e-6


def test_the_graph_has_neither_complex_numbers_nor_kernels_of_ours() -> None:
    released = released_model("scatter_linear", side=8, standardise="whitened", pool=2)
    program = torch.export.export(PlainGraph(released).eval(), (pixels(2, released.image_shape),))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(name.startswith("aten.") or "getitem" in name for name in targets), targets
    assert not {name for name in targets if "fft" in name or "complex" in name}


@pytest.mark.parametrize("findings", [False, True])
def test_the_graph_gives_the_probabilities_of_predict(findings: bool) -> None:
    released = released_model("linear", side=8, findings=findings)
    images = pixels(5, released.image_shape)
    found, logits = PlainGraph(released)(images)
    expected = predict_probabilities(released.model, images, released.normalisation, findings=findings)
    assert (found - expected).abs().max() < 1e-6
    assert logits.shape == (5, 10)
    assert (not findings) == bool(torch.allclose(found.sum(1), torch.ones(5)))


@pytest.mark.parametrize("classes", [2, 3])
def test_the_likeliest_class_of_each_pixel_is_the_mask_of_predict(classes: int) -> None:
    released = bright_model(classes=classes)
    images = pixels(4, released.image_shape) // 64 * 64 + 20  # far from where two classes are equally likely
    found, _ = PlainGraph(released)(images)
    assert found.shape == (4, classes, *released.image_shape[1:])
    assert torch.equal(found.argmax(1).byte(), predict_masks(released.model, images, released.normalisation))


def test_the_model_itself_is_left_unchanged() -> None:
    released = released_model("vgg16_conv3", side=8, resize_to=12)
    before = {name: type(module) for name, module in released.model.named_modules()}
    graph = PlainGraph(released)
    assert {name: type(module) for name, module in released.model.named_modules()} == before
    assert any(isinstance(module, PlainResize) for module in graph.modules())
    assert all(parameter.requires_grad for parameter in released.model.parameters())
