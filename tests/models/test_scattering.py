"""The scattering transform: kymatio's numbers, and what a scattering transform must do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpvision import models
from dpvision.errors import ArgumentError
from dpvision.models.scattering import ChannelConstants, Scattering, padded_size


def waves(height: int, width: int) -> Tensor:
    """An image that needs no random generator: two crossed waves."""
    y, x = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    return (0.5 + 0.25 * torch.sin(0.9 * y + 0.4 * x) + 0.25 * torch.cos(0.3 * y * x / 7)).float()[None, None]


# Source: kymatio 0.3.0, Scattering2D(J=2, shape)(waves(*shape)).
GOLDEN = {
    (28, 28): (
        65.4926,
        {
            (0, 0, 0): 0.9017797,
            (3, 2, 4): 0.0898082,
            (8, 1, 1): 0.0070782,
            (12, 4, 0): 0.0618514,
            (17, 0, 3): 0.0011297,
            (30, 2, 2): 0.0017316,
            (80, 4, 5): 0.0003749,
        },
    ),
    (32, 32): (
        84.44538,
        {
            (0, 0, 0): 0.9012742,
            (3, 2, 4): 0.0898082,
            (8, 1, 1): 0.0070764,
            (12, 4, 0): 0.0767028,
            (17, 0, 3): 0.0011137,
            (30, 2, 2): 0.0017309,
            (80, 4, 5): 0.0003682,
        },
    ),
    (20, 37): (
        58.31682,
        {
            (0, 0, 0): 0.8982769,
            (3, 2, 4): 0.0920226,
            (8, 1, 1): 0.0070112,
            (12, 4, 0): 0.0684623,
            (17, 0, 3): 0.0011611,
            (30, 2, 2): 0.0016684,
            (80, 4, 5): 0.000834,
        },
    ),
}


@pytest.mark.parametrize("shape", GOLDEN)
def test_features_are_those_of_kymatio(shape: tuple[int, int]) -> None:
    total, picks = GOLDEN[shape]
    features = Scattering(shape)(waves(*shape))[0]
    # Float rounding of two FFTs in another order.
    assert features.double().sum().item() == pytest.approx(total, rel=1e-6)
    for (path, y, x), value in picks.items():
        assert features[path, y, x].item() == pytest.approx(value, abs=1e-6)


def test_features_equal_kymatios_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    # kymatio 0.3 does not import with current SciPy: a name is gone that only its 3-D part needs.
    monkeypatch.setattr("scipy.special.sph_harm", None, raising=False)
    kymatio = pytest.importorskip("kymatio.torch", reason="kymatio is not installed")
    for shape in ((28, 28), (32, 32), (30, 45), (16, 16)):
        for scales, angles in ((2, 8), (1, 6), (3, 4), (2, 5)):
            x = torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(0))
            expected = kymatio.Scattering2D(J=scales, shape=shape, L=angles)(x)
            ours = Scattering(shape, scales=scales, angles=angles)(x).unflatten(1, (3, -1))
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_two_scales_and_eight_angles_give_81_channels_a_colour() -> None:
    scattering = Scattering((32, 32))
    assert scattering.paths == 81
    assert scattering(torch.rand(2, 3, 32, 32)).shape == (2, 243, 8, 8)
    assert Scattering((28, 30))(torch.rand(1, 1, 28, 30)).shape == (1, 81, 7, 7)


def test_colours_are_scattered_one_by_one() -> None:
    scattering, x = Scattering((16, 16)), torch.rand(2, 3, 16, 16)
    together = scattering(x).unflatten(1, (3, 81))
    for colour in range(3):
        torch.testing.assert_close(together[:, colour], scattering(x[:, colour : colour + 1]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33])
@pytest.mark.parametrize(("colours", "size"), [(1, (8, 8)), (2, (8, 12)), (3, (16, 8)), (1, (12, 20))])
def test_the_features_of_an_image_do_not_depend_on_how_many_come_with_it(
    rows: int, colours: int, size: tuple[int, int]
) -> None:
    scattering, images = Scattering(size), torch.rand(rows, colours, *size)
    features = scattering(images)
    assert features.shape == (rows, 81 * colours, size[0] // 4, size[1] // 4)
    for image, found in zip(images, features, strict=True):
        assert torch.equal(scattering(image[None])[0], found)


def test_a_flat_image_has_no_waves() -> None:
    features = Scattering((32, 32))(torch.full((1, 1, 32, 32), 0.7))[0]
    # The blur keeps the level (up to kymatio's rounded π); Morlet wavelets have zero mean.
    torch.testing.assert_close(features[0], torch.full((8, 8), 0.7), rtol=1e-4, atol=0)
    assert features[1:].abs().max() < 1e-6


def test_moduli_scale_with_contrast_and_forget_its_sign() -> None:
    scattering, x = Scattering((32, 32)), torch.rand(1, 1, 32, 32) - 0.5
    torch.testing.assert_close(scattering(-3 * x)[:, 1:], 3 * scattering(x)[:, 1:], atol=1e-5, rtol=1e-4)


def test_turning_a_image_by_a_right_angle_permutes_the_angles() -> None:
    # Without margins that differ: an inner blob far from the edges.
    y, x = torch.meshgrid(torch.arange(33) - 16.0, torch.arange(33) - 16.0, indexing="ij")
    blob = torch.exp(-(x**2 + 0.2 * y**2) / 20)[None, None]
    scattering = Scattering((33, 33))
    first = scattering(blob)[0, 1:9].sum((1, 2))
    turned = scattering(blob.mT)[0, 1:9].sum((1, 2))
    # Angles are π(3 − i)/8 from the vertical; exchanging the axes mirrors them at π/4.
    mirrored = turned[[(2 - i) % 8 for i in range(8)]]
    torch.testing.assert_close(first, mirrored, atol=1e-4, rtol=1e-3)


def test_nothing_of_the_transform_is_learned_or_saved() -> None:
    scattering = Scattering((16, 16))
    assert not list(scattering.parameters())
    assert not scattering.state_dict()


def test_the_transform_runs_in_double_precision_under_vmap_and_with_a_gradient() -> None:
    scattering = Scattering((16, 16)).to(torch.float64)
    x = torch.rand(3, 1, 16, 16, dtype=torch.float64, requires_grad=True)
    batched = scattering(x)
    torch.testing.assert_close(torch.func.vmap(scattering)(x), batched)
    (grad,) = torch.autograd.grad(batched.sum(), x)
    assert torch.isfinite(grad).all()


def test_a_image_of_another_size_is_refused() -> None:
    with pytest.raises(ArgumentError, match="images must be"):
        Scattering((16, 16))(torch.rand(1, 1, 16, 17))


def test_padding_leaves_a_margin_on_both_sides() -> None:
    assert [padded_size(size, scales=2) for size in (28, 30, 32)] == [36, 36, 40]


def test_channel_constants_standardise_public_images() -> None:
    public = torch.rand(20, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    mean, std = models.channel_constants(Scattering((16, 16)), public)
    model = models.create(
        "scatter_linear",
        in_channels=1,
        image_size=16,
        standardise="constants",
        constants=(mean, std),
        seed=0,
    )
    assert isinstance(model, nn.Sequential)
    features = model[:2](public)
    torch.testing.assert_close(features.mean((0, 2, 3)), torch.zeros(81), atol=1e-3, rtol=0)
    torch.testing.assert_close(features.std((0, 2, 3), correction=0), torch.ones(81), atol=1e-3, rtol=0)


def test_channel_constants_travel_with_the_weights() -> None:
    options = {"in_channels": 1, "image_size": 16, "standardise": "constants", "seed": 0}
    known = models.create("scatter_linear", constants=([0.5] * 81, [2.0] * 81), **options)
    blank = models.create("scatter_linear", **options)
    blank.load_state_dict(known.state_dict())
    assert isinstance(blank[1], ChannelConstants)
    assert blank[1].mean.tolist() == [0.5] * 81
    assert blank[1].std.tolist() == [2.0] * 81


def test_constants_that_come_with_the_package_fit_coloured_images_only() -> None:
    model = models.create("scatter_linear", standardise="constants", constants="cifar100", seed=0)
    assert isinstance(model[1], ChannelConstants)
    assert len(model[1].mean) == 3 * 81
    with pytest.raises(ArgumentError, match="81 means"):
        models.create("scatter_linear", in_channels=1, standardise="constants", constants="cifar100")
    for name in ("cifar", "../constants/cifar100", ""):
        with pytest.raises(ArgumentError, match="constants must be cifar100"):
            models.create("scatter_linear", standardise="constants", constants=name)


def test_fine_features_are_those_of_the_smallest_scale_beside_the_others() -> None:
    options: dict[str, Any] = {"num_classes": 3, "in_channels": 2, "image_size": 8, "seed": 0, "groups": 1}
    images = torch.rand(4, 2, 8, 8)
    coarse = models.create("scatter_linear", **options)[:3](images)
    joined = models.create("scatter_linear", fine=True, **options)[0](images)
    fine = Scattering((8, 8), scales=1)(images)
    assert fine.shape == (4, 2 * 9, 4, 4)
    centred = fine - fine.mean((2, 3), keepdim=True)
    expected = centred / (fine.var((2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
    assert torch.equal(joined[:, : coarse.shape[1]], coarse)
    assert torch.allclose(joined[:, coarse.shape[1] :], expected.flatten(1), atol=1e-5)
