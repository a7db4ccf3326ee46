"""Scattering by its kernel: the numbers of the plain transform, every image separately, and inside a fused copy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpvision import kernels, models
from dpvision.config import Performance
from dpvision.errors import ArgumentError
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.gradients.fast.small_layers import FastScattering
from dpvision.gradients.ordinary import fused_forward
from dpvision.gradients.plan import plan_for
from dpvision.kernels.channels_last import laid_out
from dpvision.kernels.scatter import scatter
from dpvision.models.scattering import Scattering
from grads_support import relative_error

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no native kernels: {kernels.reason()}")

# Padded sides with the factors 2 to 5, 7, 11, 13, 29, 61 and two times 7; lines shorter and longer than columns.
CASES = [
    ((32, 32), 2, 8),
    ((28, 28), 2, 8),
    ((20, 37), 2, 8),
    ((8, 12), 2, 5),
    ((16, 16), 1, 6),
    ((9, 4), 1, 1),
    ((30, 45), 3, 4),
    ((52, 20), 2, 2),
    ((24, 112), 2, 2),
    ((40, 32), 4, 2),
    ((44, 20), 2, 2),
    ((108, 8), 2, 1),
    ((118, 4), 1, 1),
    ((4, 94), 1, 1),
]


def images(rows: int, colours: int, size: tuple[int, int]) -> Tensor:
    """Pixels in 0..1."""
    return torch.rand(rows, colours, *size, generator=torch.Generator().manual_seed(rows))


def by_kernel(layer: Scattering, x_NCHW: Tensor) -> Tensor:
    """What the kernel gives, or an error: the layer's own way is not taken."""
    wavelets, blurs = layer.tables()
    return scatter(x_NCHW, wavelets, blurs, layer.padding)


@pytest.mark.parametrize(("size", "scales", "angles"), CASES)
@pytest.mark.parametrize("colours", [1, 3])
def test_it_is_the_plain_transform(size: tuple[int, int], scales: int, angles: int, colours: int) -> None:
    layer, x = Scattering(size, scales=scales, angles=angles), images(5, colours, size)
    true = layer.double()(x.double())
    # Two Fourier transforms there and back in float32: about 3e-7 of the largest value. The plain way has as much.
    assert (by_kernel(layer.float(), x) - true).abs().max() < 1e-6 * true.abs().max()


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 11])
def test_any_number_of_images_fits(rows: int) -> None:
    layer, x = Scattering((8, 8)), images(rows, 3, (8, 8))
    torch.testing.assert_close(by_kernel(layer, x), layer(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_bit_depends_on_neighbours_or_threads(threads: int) -> None:
    layer, x = Scattering((12, 16)), images(11, 2, (12, 16))
    torch.set_num_threads(threads)
    features = by_kernel(layer, x)
    torch.set_num_threads(1)
    for image, found in zip(x, features, strict=True):
        assert torch.equal(by_kernel(layer, image[None])[0], found)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_broken_image_breaks_itself_alone(bad: float) -> None:
    layer, x = Scattering((12, 16)), images(6, 2, (12, 16))
    before = by_kernel(layer, x)
    x[4, 0, 5, 5] = bad
    after = by_kernel(layer, x)
    others = [0, 1, 2, 3, 5]
    assert torch.equal(after[others], before[others])
    assert torch.equal(after[4, 81:], before[4, 81:])
    assert not after[4, :81].isfinite().all()


@pytest.mark.parametrize("colours", [1, 2])
def test_the_output_has_the_layout_of_the_image(colours: int) -> None:
    layer, x = Scattering((12, 16)), images(3, colours, (12, 16))
    dense = by_kernel(layer, x)
    assert dense.is_contiguous()
    inside_out = laid_out(x)
    assert by_kernel(layer, inside_out).permute(0, 2, 3, 1).is_contiguous()
    upside_down = x.flip(2).transpose(2, 3).contiguous().transpose(2, 3)
    for same in (inside_out, x[:, :, ::2].repeat_interleave(2, 2).copy_(x), torch.stack([x, x], -1)[..., 0]):
        assert torch.equal(by_kernel(layer, same), dense)
    assert torch.equal(by_kernel(layer, upside_down), by_kernel(layer, upside_down.contiguous()))


def test_what_does_not_fit_goes_through_the_layer_itself() -> None:
    layer = Scattering((8, 8))
    x = images(2, 1, (8, 8))
    for odd in (torch._neg_view(x), x.clone().requires_grad_()):
        assert not scatter.takes(odd, *layer.tables(), layer.padding)
        assert torch.equal(FastScattering(layer)(odd), layer(odd))
    with pytest.raises(ArgumentError, match="scatter needs float32 images"):
        by_kernel(layer, x.double())
    twice = Scattering((8, 8)).double()
    assert torch.equal(FastScattering(twice)(x.double()), twice(x.double()))
    with pytest.raises(ArgumentError, match="images must be"):
        FastScattering(layer)(images(1, 1, (8, 9)))


def test_a_side_with_a_large_prime_factor_goes_through_the_layer_itself() -> None:
    layer, x = Scattering((130, 8), scales=1, angles=1), images(1, 1, (130, 8))
    wavelets, _ = layer.tables()
    assert wavelets[0].shape[1] == 2 * 67
    assert not scatter.takes(x, *layer.tables(), layer.padding)
    assert torch.equal(FastScattering(layer)(x), layer(x))


def test_tables_that_do_not_belong_together_are_refused() -> None:
    layer, x = Scattering((12, 16)), images(2, 1, (12, 16))
    wavelets, blurs = layer.tables()
    left, right, top, bottom = layer.padding
    wrong = [
        (x, wavelets[:2], blurs, layer.padding),
        (x, wavelets, blurs[:3], layer.padding),
        (x, wavelets, [], layer.padding),
        (x, [wavelets[0][0], *wavelets[1:]], blurs, layer.padding),
        (x, [wavelets[0], wavelets[1], wavelets[2][:, :-1].contiguous()], blurs, layer.padding),
        (x, [wavelets[0], wavelets[1][:-1], wavelets[2]], blurs, layer.padding),
        (x, [wavelets[0], wavelets[1], wavelets[2].double()], blurs, layer.padding),
        (x, wavelets, [*blurs[:3], blurs[3][:, :-1].contiguous()], layer.padding),
        (x, wavelets, [*blurs[:3], blurs[3].half()], layer.padding),
        (x, wavelets, [*blurs[:3], blurs[3].mT.contiguous().mT], layer.padding),
        (x, wavelets, blurs, layer.padding[:3]),
        (x, wavelets, blurs, (left + 1, right, top, bottom)),
        (x, wavelets, blurs, (-5, left + right + 5, top, bottom)),
        (x[:, :, :4], wavelets, blurs, (left, right, 12, 4)),
        (x[:, :, :, :4], wavelets, blurs, (16, 4, top, bottom)),
    ]
    odd = [torch.zeros(8, *sides) for sides in ((22, 24), (22, 24), (11, 12))]
    odd_blurs = [torch.zeros(shape) for shape in ((3, 22), (4, 24), (3, 11), (4, 12))]
    wrong.append((x, odd, odd_blurs, (left, right, 5, 5)))
    for images_and_tables in wrong:
        with pytest.raises(ArgumentError):
            scatter(*images_and_tables)


@pytest.mark.parametrize("name", ["scatter_linear", "scatter_cnn"])
def test_a_model_uses_it_and_has_the_same_clipped_sum(name: str) -> None:
    model = models.create(name, in_channels=3, num_classes=4, image_size=8)
    batch = Rows(images(6, 3, (8, 8)), torch.arange(6) % 4, 1)
    loss = nn.CrossEntropyLoss(reduction="none")
    plan = plan_for(model, loss, next(batch.microbatches(1)), Performance(kernels="native"))
    assert plan.fused_copy is not None
    assert sum(isinstance(module, FastScattering) for module in plan.fused_copy.modules()) == 1
    fast, plain = (
        clipped_sum_of_batch(model, loss, batch, clip_norm=0.3, performance=Performance(kernels=kind)).gradients
        for kind in ("native", "plain")
    )
    assert relative_error(fast, plain) < 1e-4  # GroupNorm enlarges what rounding does to faint channels


def test_a_models_outputs_alone_come_from_it() -> None:
    model = models.create("scatter_linear", in_channels=1, num_classes=4, image_size=8).eval()
    x = images(6, 1, (8, 8))
    with torch.no_grad(), fused_forward(model, x[:2]) as forward:
        assert forward is not model
        torch.testing.assert_close(forward(x), model(x), atol=1e-4, rtol=1e-4)
