"""The Winograd kernels against float64 convolutions of PyTorch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input, conv2d_weight

from dpvision import kernels
from dpvision.errors import ArgumentError
from dpvision.kernels import winograd
from dpvision.kernels.ops import Kernel

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no native kernels: {kernels.reason()}")

SIZES = [(1, 1), (3, 5), (4, 4), (7, 9), (33, 17)]
CHANNELS = [(16, 16), (64, 32), (16, 20), (67, 64), (33, 17), (1, 16), (5, 3)]
# Float32 rounding, enlarged by the transforms' factors of up to 8: about 1e-6 in fact.
TOLERANCE = 1e-5


def images(rows: int, channels: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Random images, channels-last in memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *size, channels, generator=generator).permute(0, 3, 1, 2)


def filters(in_channels: int, out_channels: int, seed: int = 1) -> Tensor:
    return torch.randn(out_channels, in_channels, 3, 3, generator=torch.Generator().manual_seed(seed))


def summed(x: Tensor, dy: Tensor, factor: Tensor) -> Tensor:
    """What is added to a sum of zeros, with room behind it for a kernel that writes too far."""
    shape = torch.Size((3, 3, x.shape[1], dy.shape[1]))
    total = torch.zeros(shape.numel() + 64, dtype=torch.float64)[: shape.numel()].view(shape)
    winograd.add_gradient(total, x, dy, factor)
    return total


def error(found: Tensor, expected: Tensor) -> float:
    """Relative L2 error."""
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-300))


def row_gradients(x_NCHW: Tensor, dy_NOHW: Tensor) -> Tensor:
    """Each row's weight gradient in float64, by PyTorch, as (N, 3, 3, I, O)."""
    gradients = [
        conv2d_weight(x[None].double(), (dy.shape[0], x.shape[0], 3, 3), dy[None].double(), padding=1)
        for x, dy in zip(x_NCHW, dy_NOHW, strict=True)
    ]
    shape = (0, 3, 3, x_NCHW.shape[1], dy_NOHW.shape[1])
    return torch.stack(gradients).permute(0, 3, 4, 2, 1) if gradients else torch.zeros(shape, dtype=torch.float64)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("size", SIZES)
def test_the_convolution_is_that_of_pytorch(size: tuple[int, int], channels: tuple[int, int], rows: int) -> None:
    x, weight = images(rows, channels[0], size), filters(*channels)
    bias = torch.randn(channels[1], generator=torch.Generator().manual_seed(2))
    transformed = winograd.transform(weight, backward=False)
    for given in (bias, None):
        expected = conv2d(x.double(), weight.double(), None if given is None else given.double(), padding=1)
        found = winograd.convolve(x, transformed, given)
        assert error(found, expected) <= TOLERANCE
        assert found.permute(0, 2, 3, 1).is_contiguous()


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("size", SIZES)
def test_with_backward_filters_the_convolution_is_the_input_gradient(
    size: tuple[int, int], channels: tuple[int, int]
) -> None:
    dy, weight = images(3, channels[1], size), filters(*channels)
    shape = (3, channels[0], *size)
    expected = conv2d_input(shape, weight.double(), dy.double(), padding=1)
    assert error(winograd.convolve(dy, winograd.transform(weight, backward=True), None), expected) <= TOLERANCE


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 7])
@pytest.mark.parametrize("channels", [*CHANNELS, (129, 144)])
@pytest.mark.parametrize("size", SIZES)
def test_filters_that_are_transformed_in_passing_give_the_same_bits(
    size: tuple[int, int], channels: tuple[int, int], rows: int, backward: bool
) -> None:
    x, weight = images(rows, channels[1 if backward else 0], size), filters(*channels)
    bias = torch.randn(channels[0 if backward else 1], generator=torch.Generator().manual_seed(2))
    for given in (bias, None):
        expected = winograd.convolve(x, winograd.transform(weight, backward=backward), given)
        found = winograd.convolve(x, winograd.RawFilters(weight, backward), given)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize(("units", "rows_per_unit"), [(0, 1), (1, 1), (3, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("size", SIZES)
def test_unit_gradients_are_those_of_pytorch(
    size: tuple[int, int], channels: tuple[int, int], units: int, rows_per_unit: int
) -> None:
    x, dy = (images(units * rows_per_unit, count, size, seed) for seed, count in enumerate(channels))
    expected = row_gradients(x, dy).unflatten(0, (units, rows_per_unit)).sum(1)
    gradient, moments = winograd.unit_gradients(x, dy, None, units)
    assert error(gradient, expected) <= TOLERANCE
    assert gradient.is_contiguous()
    assert moments.shape == (units, 1, channels[1])


@pytest.mark.parametrize("rows", [0, 1, 3, 12])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("size", SIZES)
def test_the_summed_gradient_is_the_weighted_sum_over_rows(
    size: tuple[int, int], channels: tuple[int, int], rows: int
) -> None:
    x, dy = (images(rows, count, size, seed) for seed, count in enumerate(channels))
    factor = torch.linspace(-0.5, 2.0, rows)
    expected = torch.einsum("n,n...->...", factor.double(), row_gradients(x, dy))
    assert error(summed(x, dy, factor), expected) <= TOLERANCE


def test_gradients_are_added_to_a_total_in_float64() -> None:
    """Numbers that a float32 total would have lost, and nothing but rounding of the added part itself."""
    x, dy, factor = images(3, 33, (7, 9)), images(3, 17, (7, 9), 1), torch.tensor([0.5, -1.0, 2.0])
    before = torch.randn(3, 3, 33, 17, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 1e9
    total = before.clone()
    winograd.add_gradient(total, x, dy, factor)
    assert torch.equal(total, before + summed(x, dy, factor))
    assert not torch.equal(total, before.float() + summed(x, dy, factor))


def test_what_is_not_finite_in_one_channel_stays_in_that_channel_of_the_total() -> None:
    """Nor does it get behind the total: what a panel has beyond its channels is 0 · inf."""
    x, dy = images(2, 5, (7, 9)), images(2, 3, (7, 9), 1)
    x[:, [1, 4]] = float("inf")
    memory = torch.zeros(3 * 3 * 5 * 3 + 64, dtype=torch.float64)
    total = memory[:-64].view(3, 3, 5, 3)
    winograd.add_gradient(total, x, dy, torch.ones(2))
    assert not total[:, :, [1, 4]].isfinite().any()
    assert total[:, :, [0, 2, 3]].isfinite().all()
    assert not memory[-64:].any()


@pytest.mark.parametrize("channels", [(64, 48), (67, 64), (33, 17), (5, 3)])
@pytest.mark.parametrize("size", SIZES)
def test_moments_are_those_of_the_gradient_that_is_returned(size: tuple[int, int], channels: tuple[int, int]) -> None:
    x, dy = (images(6, count, size, seed) for seed, count in enumerate(channels))
    z = torch.randn(3, 3, *channels, generator=torch.Generator().manual_seed(2))
    gradient, moments = winograd.unit_gradients(x, dy, z, 3)
    exact = gradient.double().flatten(1, 3)
    inner = exact * z.double().flatten(0, 2)
    # Runs of 144 float32 terms: for squares relative to the sum, for the others to the sum of magnitudes.
    assert moments.dtype == torch.float64
    torch.testing.assert_close(moments[:, 0], exact.square().sum(1), rtol=1e-6, atol=0)
    assert ((moments[:, 1] - exact.sum(1)).abs() <= 1e-6 * exact.abs().sum(1)).all()
    assert ((moments[:, 2] - inner.sum(1)).abs() <= 1e-6 * inner.abs().sum(1)).all()
    alone, squares = winograd.unit_gradients(x, dy, None, 3)
    assert torch.equal(alone, gradient)
    assert torch.equal(squares, moments[:, :1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_factor_zero_contributes_nothing_whatever_it_holds(bad: float) -> None:
    x, dy = images(3, 16, (7, 9)), images(3, 32, (7, 9), 1)
    factor = torch.tensor([0.5, 0.0, 2.0])
    expected = summed(x, dy, factor)
    x[1], dy[1] = bad, bad
    assert torch.equal(summed(x, dy, factor), expected)
    assert torch.equal(summed(x[1:2], dy[1:2], factor[1:2]), torch.zeros(3, 3, 16, 32).double())


def test_a_row_with_another_factor_is_not_hidden() -> None:
    x, dy = images(2, 16, (5, 5)), images(2, 16, (5, 5), 1)
    x[1] = float("nan")
    assert summed(x, dy, torch.ones(2)).isnan().all()


def test_gradients_can_go_into_memory_that_is_there_already() -> None:
    x, dy = images(4, 32, (9, 6)), images(4, 16, (9, 6), 1)
    expected, moments = winograd.unit_gradients(x, dy, None, 2)
    memory = torch.full((2, 3, 3, 32, 16), float("nan"))
    found, found_moments = winograd.unit_gradients(x, dy, None, 2, into_UKKIO=memory)
    assert found is memory
    assert torch.equal(memory, expected)
    assert torch.equal(found_moments, moments)


def test_one_units_values_do_not_reach_another_unit() -> None:
    x, dy = images(3, 32, (9, 6)), images(3, 32, (9, 6), 1)
    expected, moments = winograd.unit_gradients(x, dy, None, 3)
    x[1] = float("nan")
    found, found_moments = winograd.unit_gradients(x, dy, None, 3)
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(found_moments[[0, 2]], moments[[0, 2]])
    weight = filters(32, 16)
    for given in (winograd.transform(weight, backward=False), winograd.RawFilters(weight, False)):
        assert winograd.convolve(x, given, None)[[0, 2]].isfinite().all()


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (33, 33)])
@pytest.mark.parametrize("channels", [(48, 64), (35, 50)])
@pytest.mark.parametrize("rows", [1, 5])
def test_results_do_not_depend_on_the_number_of_threads(
    rows: int, channels: tuple[int, int], size: tuple[int, int]
) -> None:
    x, dy, weight = images(rows, channels[0], size), images(rows, channels[1], size, 1), filters(*channels)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        transformed = winograd.transform(weight, backward=False)
        gradient, moments = winograd.unit_gradients(x, dy, torch.ones(3, 3, *channels), rows)
        together, _ = winograd.unit_gradients(x, dy, None, 1)
        added = summed(x, dy, torch.linspace(0.1, 1, rows))
        y, raw = (winograd.convolve(x, some, None) for some in (transformed, winograd.RawFilters(weight, False)))
        results.append((transformed.values, y, raw, gradient, moments, together, added))
    for one, other in pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_rows_output_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = images(17, 32, (9, 10)), filters(32, 16)
    for given in (winograd.transform(weight, backward=False), winograd.RawFilters(weight, False)):
        together = winograd.convolve(x, given, None)
        assert torch.equal(together, torch.cat([winograd.convolve(row[None], given, None) for row in x]))


def test_filters_may_lie_in_memory_in_any_order() -> None:
    weight = filters(32, 16)
    turned = weight.contiguous(memory_format=torch.channels_last)
    for backward in (False, True):
        expected = winograd.transform(weight, backward=backward)
        assert torch.equal(winograd.transform(turned, backward=backward).values, expected.values)
        x = images(2, 16 if backward else 32, (5, 6))
        assert torch.equal(
            winograd.convolve(x, winograd.RawFilters(turned, backward), None), winograd.convolve(x, expected, None)
        )


def test_filters_are_filled_up_with_zeros() -> None:
    for backward, channels in ((False, (5, 17)), (True, (17, 5))):
        transformed = winograd.transform(filters(*channels), backward=backward)
        assert (transformed.out_channels, transformed.values.shape) == (17, (36, 2, 5, 16))
        assert torch.equal(transformed.values[:, 1, :, 1:], torch.zeros(36, 5, 15))


def test_kernels_take_any_number_of_channels_but_none() -> None:
    assert winograd.takes_channels(in_channels=16, out_channels=48)
    assert winograd.takes_channels(in_channels=67, out_channels=1)
    assert not winograd.takes_channels(in_channels=0, out_channels=16)
    assert not winograd.takes_channels(in_channels=16, out_channels=0)


@pytest.mark.parametrize("channels", [(5, 3), (33, 17)])
def test_nothing_beyond_a_pixels_channels_is_read_or_written(channels: tuple[int, int]) -> None:
    """Images and gradients lie between NaNs, which must neither get in nor be overwritten."""
    weight, border = filters(*channels), 64

    def bordered(*shape: int) -> tuple[Tensor, Tensor]:
        count = torch.Size(shape).numel()
        memory = torch.full((count + 2 * border,), float("nan"))
        return memory, memory[border : border + count].view(shape)

    x_memory, x = bordered(2, 7, 9, channels[0])
    dy_memory, dy = bordered(2, 7, 9, channels[1])
    memory, gradient = bordered(2, 3, 3, *channels)
    x.normal_(generator=torch.Generator().manual_seed(0))
    dy.normal_(generator=torch.Generator().manual_seed(1))
    x, dy = x.permute(0, 3, 1, 2), dy.permute(0, 3, 1, 2)
    _, moments = winograd.unit_gradients(x, dy, torch.ones(3, 3, *channels), 2, into_UKKIO=gradient)
    for whole in (x_memory, dy_memory, memory):
        assert whole[:border].isnan().all()
        assert whole[-border:].isnan().all()
    _, bordered_weight = bordered(*weight.shape)
    bordered_weight.copy_(weight)
    for backward, given, bias in ((False, x, torch.ones(channels[1])), (True, dy, None)):
        kept = winograd.convolve(given, winograd.transform(bordered_weight, backward=backward), bias)
        raw = winograd.convolve(given, winograd.RawFilters(bordered_weight, backward), bias)
        assert kept.isfinite().all()
        assert raw.isfinite().all()
    assert all(part.isfinite().all() for part in (gradient, moments))


def test_images_filters_and_totals_that_do_not_fit_are_refused() -> None:
    x, transformed = images(2, 16, (4, 4)), winograd.transform(filters(16, 16), backward=False)
    unfit = (x.contiguous(), x[:, :8], x[:, :, ::2], x[0])
    wrong_filters = (
        winograd.Filters(transformed.values, 17),
        winograd.Filters(transformed.values[:, :, :8], 16),
        *(winograd.RawFilters(torch.zeros(shape), False) for shape in ((16, 16, 1, 1), (0, 16, 3, 3), (16, 3, 3))),
        winograd.RawFilters(filters(32, 16), False),
    )
    fit = (transformed, winograd.RawFilters(filters(16, 16), False))
    wrong: list[tuple[object, ...]] = [
        *((winograd.convolve, bad, each, None) for bad in (*unfit, images(2, 32, (4, 4))) for each in fit),
        *((winograd.convolve, x, bad, None) for bad in wrong_filters),
        *((winograd.convolve, x, each, torch.zeros(32)) for each in fit),
        *((winograd.unit_gradients, bad, x, None, 2) for bad in unfit),
        (winograd.unit_gradients, x, x, None, 3),
        (winograd.unit_gradients, x, x, None, 0),
        (winograd.unit_gradients, x, x, torch.zeros(16, 16, 3, 3), 2),
        (winograd.unit_gradients, x, x[:1], None, 1),
        (winograd.add_gradient, torch.zeros(3, 3, 16, 17).double(), x, x, torch.ones(2)),
        (winograd.add_gradient, torch.zeros(16, 16, 3, 3).double(), x, x, torch.ones(2)),
        (winograd.add_gradient, torch.zeros(3, 3, 16, 16).double(), x, x[:1], torch.ones(2)),
        (winograd.add_gradient, torch.zeros(3, 3, 16, 16).double(), x, x, torch.ones(3)),
    ]
    for kernel, *arguments in wrong:
        assert isinstance(kernel, Kernel)
        assert not kernel.takes(*arguments)
        with pytest.raises(ArgumentError, match="float32 image"):
            kernel(*arguments)
    for bad in (torch.zeros(1, 3, 3, 16, 16), torch.zeros(2, 3, 3, 16, 16).transpose(3, 4), torch.zeros(2, 9, 16, 16)):
        assert not winograd.unit_gradients.takes(x, x, None, 2, into_UKKIO=bad)
    for bad in (torch.zeros(16, 16, 1, 1), torch.zeros(0, 16, 3, 3), torch.zeros(16, 3, 3)):
        with pytest.raises(ArgumentError, match="3×3"):
            winograd.transform(bad, backward=False)


def test_an_image_of_one_pixel_may_have_any_strides() -> None:
    x, transformed = images(2, 16, (1, 1)), winograd.transform(filters(16, 16), backward=False)
    assert torch.equal(
        winograd.convolve(x.clone().contiguous(), transformed, None), winograd.convolve(x, transformed, None)
    )
