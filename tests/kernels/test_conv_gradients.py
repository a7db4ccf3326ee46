"""Per-unit gradients of convolutions and what their norms need, against float64 PyTorch and autograd.

Shapes: N rows, U units, C in, O out, D entries of a filter, M moments.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpvision import kernels
from dpvision.config import Performance
from dpvision.errors import ArgumentError
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.gradients.layer_gradient import LayerGradient
from dpvision.gradients.rules import weight_standardisation
from dpvision.gradients.rules.convolution import ConvolutionGradient, geometry_of
from dpvision.gradients.rules.rule import LayerCall
from dpvision.gradients.rules.weight_standardisation import Standardisation
from dpvision.kernels.conv_gradients import (
    channel_sums,
    convolution_moments,
    filter_moments,
    gram_norms_sq,
    pull_back,
    window_gradients,
)
from dpvision.models.layers import WSConv2d
from grads_support import relative_error

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no native kernels: {kernels.reason()}")

Pair = tuple[int, int]


def image(rows: int, channels: int, size: Pair, *, seed: int = 0) -> Tensor:
    """Random images, channels-last in memory."""
    return torch.randn(rows, *size, channels, generator=torch.Generator().manual_seed(seed)).permute(0, 3, 1, 2)


def by_torch(x: Tensor, dy: Tensor, *, units: int, kernel: Pair, stride: Pair, groups: int) -> Tensor:
    """(U, O, kernel height · kernel width · C of a group) in float64, one unit at a time."""
    found = []
    for rows, gradients in zip(x.chunk(units), dy.chunk(units), strict=True):
        weight = torch.zeros(dy.shape[1], x.shape[1] // groups, *kernel, dtype=torch.float64, requires_grad=True)
        y = nn.functional.conv2d(rows.double(), weight, stride=stride, groups=groups)
        (gradient,) = torch.autograd.grad(y, weight, gradients.double())
        found.append(gradient.permute(0, 2, 3, 1).flatten(1))
    return torch.stack(found)


def check(x: Tensor, dy: Tensor, *, units: int, kernel: Pair, stride: Pair, groups: int = 1) -> None:
    assert window_gradients.takes(x, dy, units=units, kernel=kernel, stride=stride, groups=groups)
    got, squares = window_gradients(x, dy, units=units, kernel=kernel, stride=stride, groups=groups)
    wanted = by_torch(x, dy, units=units, kernel=kernel, stride=stride, groups=groups)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    torch.testing.assert_close(squares, got.double().square().sum((1, 2)), rtol=3e-6, atol=0)


@pytest.mark.parametrize(("kernel", "stride"), [((8, 8), (2, 2)), ((4, 4), (2, 2)), ((1, 1), (1, 1)), ((3, 2), (1, 3))])
@pytest.mark.parametrize(("channels", "outputs"), [(1, 16), (16, 32), (3, 7), (5, 1), (20, 9)])
def test_gradients_and_norms_are_those_of_single_units(kernel: Pair, stride: Pair, channels: int, outputs: int) -> None:
    height, width = 3, 4
    size = ((height - 1) * stride[0] + kernel[0], (width - 1) * stride[1] + kernel[1])
    for units, rows in ((1, 1), (3, 1), (2, 3)):
        x = image(units * rows, channels, size)
        check(x, image(units * rows, outputs, (height, width), seed=1), units=units, kernel=kernel, stride=stride)


@given(
    units=st.integers(1, 3),
    rows=st.integers(1, 2),
    channels=st.integers(1, 20),
    outputs=st.integers(1, 20),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_gives_the_same(
    units: int, rows: int, channels: int, outputs: int, kernel: Pair, stride: Pair, size: Pair
) -> None:
    reach = ((size[0] - 1) * stride[0] + kernel[0], (size[1] - 1) * stride[1] + kernel[1])
    x, dy = image(units * rows, channels, reach), image(units * rows, outputs, size, seed=1)
    check(x, dy, units=units, kernel=kernel, stride=stride)


# ---- a kernel for every channel


@given(
    units=st.integers(1, 3),
    rows=st.integers(1, 2),
    channels=st.integers(2, 40),
    kernel=st.tuples(st.integers(1, 7), st.sampled_from([3, 5, 7])),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
@settings(max_examples=60, deadline=None)
def test_channels_with_kernels_of_their_own_give_the_same(
    units: int, rows: int, channels: int, kernel: Pair, stride: Pair, size: Pair
) -> None:
    reach = ((size[0] - 1) * stride[0] + kernel[0], (size[1] - 1) * stride[1] + kernel[1])
    rim = image(units * rows, channels, (reach[0] + 2, reach[1] + 1))[:, :, : reach[0], : reach[1]]
    dy = image(units * rows, channels, size, seed=1)
    for x in (image(units * rows, channels, reach), rim):
        check(x, dy, units=units, kernel=kernel, stride=stride, groups=channels)


def test_long_sums_over_a_large_image_lose_nothing() -> None:
    """Terms cancel each other but for one. On the way their sums are too long for float32, which rounds 12349 up."""
    x, dy = image(1, 2, (130, 130)), image(1, 2, (128, 128))
    x[:] = 12349.0
    dy[:, :, :64], dy[:, :, 64:96], dy[:, :, 96:] = 1.0, -2.0, 0.0
    dy[:, :, 127, 127] = 1.0
    for wide in (False, True):
        if wide:  # the same numbers in one line
            x, dy = image(1, 2, (3, 128 * 128 + 2)), dy.permute(0, 2, 3, 1).reshape(1, 1, -1, 2).permute(0, 3, 1, 2)
            x[:] = 12349.0
        got, squares = window_gradients(x, dy, units=1, kernel=(3, 3), stride=(1, 1), groups=2)
        assert torch.equal(got, torch.full((1, 2, 9), 12349.0))
        assert float(squares) == 18 * 12349.0**2


def test_units_and_channels_with_kernels_of_their_own_stay_apart_on_any_number_of_threads() -> None:
    x, dy = image(4, 19, (8, 9)), image(4, 19, (6, 7), seed=1)
    settings = {"units": 4, "kernel": (3, 3), "stride": (1, 1), "groups": 19}
    alone, squares = window_gradients(x, dy, **settings)
    x[1, 3], dy[2, 18] = float("nan"), float("inf")
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        got, others = window_gradients(x, dy, **settings)
        assert torch.equal(got[[0, 3]], alone[[0, 3]])
        assert torch.equal(others[[0, 3]], squares[[0, 3]])
        assert torch.equal(got[1, 4:], alone[1, 4:])
        assert torch.equal(got[2, :18], alone[2, :18])
        assert not others[1:3].isfinite().any()


def test_other_groups_and_widths_have_no_kernel() -> None:
    x, dy = image(2, 6, (8, 8)), image(2, 6, (6, 6), seed=1)
    assert window_gradients.takes(x, dy, units=2, kernel=(3, 3), stride=(1, 1), groups=6)
    assert not window_gradients.takes(x, dy, units=2, kernel=(3, 3), stride=(1, 1), groups=3)
    assert not window_gradients.takes(x, image(2, 12, (6, 6)), units=2, kernel=(3, 3), stride=(1, 1), groups=6)
    assert not window_gradients.takes(x, image(2, 6, (8, 5)), units=2, kernel=(1, 4), stride=(1, 1), groups=6)
    assert not window_gradients.takes(x[:0], dy[:0], units=0, kernel=(3, 3), stride=(1, 1), groups=6)


# ---- windows of all channels

# Laid out (a line of a window has 9 numbers), and read from the input in halves (8) and whole panels (64).
WINDOWS = [(3, (3, 3)), (2, (4, 4)), (1, (8, 8)), (16, (4, 4))]


@pytest.mark.parametrize(("channels", "kernel"), WINDOWS)
@pytest.mark.parametrize("outputs", [5, 8])
def test_a_rim_that_no_window_sees_may_be_there(channels: int, kernel: Pair, outputs: int) -> None:
    size = (2 * 2 + kernel[0], 3 * 2 + kernel[1])
    whole = image(4, channels, (size[0] + 2, size[1] + 2))
    seen = whole[:, :, : size[0], : size[1]]
    check(seen, image(4, outputs, (3, 4), seed=1), units=4, kernel=kernel, stride=(2, 2))
    check(seen, image(4, outputs, (3, 4), seed=1), units=2, kernel=kernel, stride=(2, 2))


@pytest.mark.parametrize(("channels", "kernel"), WINDOWS)
def test_units_stay_apart_whatever_they_hold(channels: int, kernel: Pair) -> None:
    x, dy = image(4, channels, (3 + kernel[0], 3 + kernel[1])), image(4, 5, (4, 4), seed=1)
    alone, squares = window_gradients(x, dy, units=4, kernel=kernel, stride=(1, 1))
    x[1], dy[2] = float("nan"), float("inf")
    got, others = window_gradients(x, dy, units=4, kernel=kernel, stride=(1, 1))
    assert torch.equal(got[[0, 3]], alone[[0, 3]])
    assert torch.equal(others[[0, 3]], squares[[0, 3]])
    assert not others[1:3].isfinite().any()


def test_what_does_not_fit_is_refused() -> None:
    x, dy = image(4, 3, (6, 6)), image(4, 5, (4, 4), seed=1)
    assert window_gradients.takes(x, dy, units=4, kernel=(3, 3), stride=(1, 1))
    for a, g in ((x.contiguous(), dy), (x, dy.contiguous()), (x.double(), dy), (x[0], dy[0])):
        assert not window_gradients.takes(a, g, units=4, kernel=(3, 3), stride=(1, 1))
    large = image(1, 64, (40, 40)), image(1, 4, (38, 38))
    assert not window_gradients.takes(*large, units=1, kernel=(3, 3), stride=(1, 1))
    with kernels.switched_off():
        assert not window_gradients.takes(x, dy, units=4, kernel=(3, 3), stride=(1, 1))
    for units, kernel, stride in ((3, (3, 3), (1, 1)), (4, (3, 3), (2, 2)), (4, (4, 3), (1, 1))):
        with pytest.raises(ArgumentError, match="takes"):
            window_gradients(x, dy, units=units, kernel=kernel, stride=stride)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("layer", [nn.Conv2d(6, 6, 4, stride=2), nn.Conv2d(6, 6, (4, 3), stride=2, groups=6)])
def test_a_share_takes_the_kernel_and_agrees_with_the_plain_one(layer: nn.Conv2d, rows: int) -> None:
    x = image(6, 6, (8, 7 if layer.groups > 1 else 8))
    dy = image(6, 6, (3, 3), seed=1)

    def share() -> ConvolutionGradient:
        return ConvolutionGradient(x, dy, geometry_of(layer, layer.weight.detach()), 6 // rows)

    with kernels.switched_off():
        plain, plain_norms = share().per_unit(), share().norms_sq()
    torch.testing.assert_close(share().per_unit(), plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(share().norms_sq(), plain_norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("groups", [1, 6])
def test_windows_with_gaps_go_another_way(groups: int) -> None:
    layer = nn.Conv2d(6, 6, 3, dilation=2, groups=groups)
    x, dy = image(4, 6, (8, 8)), image(4, 6, (4, 4), seed=1)
    found = ConvolutionGradient(x, dy, geometry_of(layer, layer.weight.detach()), 4).per_unit()
    for unit in range(4):
        weight = layer.weight.detach().double().requires_grad_()
        y = nn.functional.conv2d(x[unit : unit + 1].double(), weight, dilation=2, groups=groups)
        (true,) = torch.autograd.grad(y, weight, dy[unit : unit + 1].double())
        torch.testing.assert_close(found[unit].double(), true, rtol=1e-5, atol=1e-5)


def test_images_that_windows_do_not_see_wholly_are_refused() -> None:
    x, dy = image(4, 6, (8, 8)), image(4, 6, (4, 4), seed=1)
    for groups in (1, 6):
        with pytest.raises(ArgumentError, match="takes"):
            window_gradients(x, dy, units=4, kernel=(3, 3), stride=(1, 1), groups=groups)


def test_tiny_gradients_still_have_a_norm() -> None:
    layer = nn.Conv2d(2, 4, 2)
    x, dy = torch.full((1, 2, 3, 3), 1e-30), torch.full((1, 4, 2, 2), 1e-10)
    x, dy = x.contiguous(memory_format=torch.channels_last), dy.contiguous(memory_format=torch.channels_last)
    share = ConvolutionGradient(x, dy, geometry_of(layer, layer.weight.detach()), 1)
    true = float(share.per_unit().double().square().sum())
    assert float(share.norms_sq()) >= true * (1 - 4e-6)


SIZES = [(1, 1), (1, 5), (5, 1), (2, 2), (3, 5), (4, 4), (8, 8), (7, 9), (16, 17)]


def gram(x_UCHW: Tensor) -> Tensor:
    x_UTC = x_UCHW.flatten(2).mT
    return torch.bmm(x_UTC, x_UTC.mT).contiguous()


def pair_of_images(units: int, size: Pair) -> tuple[Tensor, Tensor]:
    return image(units, 6, size, seed=3), image(units, 4, size, seed=4)


def norms_sq_of_gradients(x: Tensor, dy: Tensor) -> Tensor:
    found = []
    for x_CHW, dy_OHW in zip(x.double(), dy.double(), strict=True):
        weight = torch.zeros(4, 6, 3, 3, dtype=torch.float64, requires_grad=True)
        y = torch.conv2d(x_CHW[None], weight, padding=1)
        (gradient,) = torch.autograd.grad(y, weight, dy_OHW[None])
        found.append(gradient.square().sum())
    return torch.stack(found)


@pytest.mark.parametrize("size", SIZES)
def test_norms_are_those_of_the_weight_gradients(size: tuple[int, int]) -> None:
    x, dy = pair_of_images(3, size)
    got = gram_norms_sq(gram(x), gram(dy), *size)
    wanted = norms_sq_of_gradients(x, dy)
    assert got.dtype == torch.float64
    # Above by what is added for rounding, 16 · 1.2e-7 of the diagonal, which is about as large as the sum itself.
    assert bool((got >= wanted * (1 - 1e-6)).all())
    assert bool((got <= wanted * (1 + 1e-5)).all())


def test_a_gradient_that_cancels_is_not_reported_below_its_size() -> None:
    x = torch.ones(1, 6, 4, 4)
    dy = torch.zeros(1, 4, 4, 4)
    dy[0, :, 1, 1], dy[0, :, 2, 2] = 1000.0, -1000.0
    dy[0, 0, 1, 2] = 1e-3
    got = gram_norms_sq(gram(x), gram(dy), 4, 4)
    assert float(got) >= float(norms_sq_of_gradients(x, dy))


def test_what_rounding_may_have_hidden_is_added_and_a_negative_sum_is_not() -> None:
    # Two positions side by side: both windows hold both of them, so each inner product is x_gram's trace, or the one
    # entry off the diagonal that has a shift inside the image.
    x_gram = torch.tensor([[[2.0, 1.0], [1.0, 3.0]]])
    dy_gram = torch.tensor([[[1.0, -9.0], [-9.0, 1.0]]])
    diagonal = (2.0 + 3.0) * 1.0 * 2
    assert float(gram_norms_sq(x_gram, dy_gram, 1, 2)) == 16 * 2.0**-23 * diagonal


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [(0, 0), (0, 15), (7, 9)])
def test_a_unit_that_is_not_finite_says_so_and_touches_no_other(bad: float, place: tuple[int, int]) -> None:
    x, dy = pair_of_images(3, (4, 4))
    x_gram, dy_gram = gram(x), gram(dy)
    clean = gram_norms_sq(x_gram, dy_gram, 4, 4)
    for hurt in (x_gram, dy_gram):
        spoilt = hurt.clone()
        spoilt[1, place[0], place[1]] = bad
        pair = (spoilt, dy_gram) if hurt is x_gram else (x_gram, spoilt)
        got = gram_norms_sq(*pair, 4, 4)
        assert not got[1].isfinite()
        assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_other_shapes_and_types_are_refused() -> None:
    x, dy = pair_of_images(2, (3, 5))
    x_gram, dy_gram = gram(x), gram(dy)
    for arguments in [
        (x_gram, dy_gram, 3, 4),
        (x_gram, dy_gram[:1], 3, 5),
        (x_gram, dy_gram.mT[:, ::2], 3, 5),
        (x_gram, dy_gram, 15, 0),
    ]:
        with pytest.raises(ArgumentError, match="positive sizes"):
            gram_norms_sq(*arguments)


def numbers(units: int, outputs: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gradients and directions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(units, outputs, depth, generator=generator), torch.randn(outputs, depth, generator=generator)


def true_moments(e_UOD: Tensor, z_OD: Tensor) -> Tensor:
    e, z = e_UOD.double(), z_OD.double()
    return torch.stack([e.square().sum(2), e.sum(2), (e * z).sum(2)], 1)


@pytest.mark.parametrize("depth", [0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 33, 4609])
@pytest.mark.parametrize(("units", "outputs"), [(0, 3), (1, 1), (3, 0), (1, 5), (5, 1), (3, 7)])
def test_moments_are_those_of_float64(units: int, outputs: int, depth: int) -> None:
    e_UOD, z_OD = numbers(units, outputs, depth)
    got, true = filter_moments(e_UOD, z_OD), true_moments(e_UOD, z_OD)
    assert (got.dtype, got.shape) == (torch.float64, (units, 3, outputs))
    torch.testing.assert_close(got[:, 0], true[:, 0], rtol=1e-14, atol=0)
    # These two can cancel: what is left of them is as exact as their largest parts.
    torch.testing.assert_close(got[:, 1:], true[:, 1:], rtol=1e-14, atol=1e-15 * max(1, depth))


def test_no_moment_underflows_or_overflows_or_hides_small_numbers_beside_large_ones() -> None:
    rows = [[1e-30, 1e-38, 0.0, 0.0, 0.0], [3e38, 1e38, 3e38, 1.0, 0.0], [1.0, 1e-6, 1e-6, 1e-9, 1.0]]
    e_UOD, z_OD = torch.tensor(rows)[:, None], torch.tensor([[3e-38, 3e38, 1e-6, 1.0, -1.0]])
    torch.testing.assert_close(filter_moments(e_UOD, z_OD), true_moments(e_UOD, z_OD), rtol=1e-14, atol=0)


def test_a_gradient_that_hardly_varies_has_its_exact_sum() -> None:
    """In float32 such a sum is rounded the same way again and again."""
    e_UOD, z_OD = torch.full((1, 1, 1 << 14), 1 + 2**-20), torch.ones(1, 1 << 14)
    assert filter_moments(e_UOD, z_OD).flatten().tolist() == [(1 + 2**-20) ** 2 * 2**14, *[(1 + 2**-20) * 2**14] * 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 19, 20, 22])
def test_a_number_that_is_not_finite_shows_in_its_own_unit_and_filter_only(bad: float, place: int) -> None:
    e_UOD, z_OD = numbers(3, 4, 23)
    before = filter_moments(e_UOD, z_OD)
    e_UOD[1, 2, place] = bad
    got = filter_moments(e_UOD, z_OD)
    assert not torch.isfinite(got[1, :, 2]).any()
    got[1, :, 2] = before[1, :, 2]
    assert torch.equal(got, before)


def test_other_filters_and_directions_are_left_to_plain_operations() -> None:
    e_UOD, z_OD = numbers(2, 4, 6)
    for other in (e_UOD[:, :, ::2], e_UOD.mT, e_UOD[0], e_UOD[:, :2]):
        assert filter_moments.attempt(other, z_OD) is None
    for other in (z_OD.T.contiguous().T, z_OD[:, :3].contiguous(), z_OD[0]):
        assert filter_moments.attempt(e_UOD, other) is None


# ---- in the rule


def shares_of(layer: WSConv2d, x_NCHW: Tensor) -> dict[str, LayerGradient]:
    """Shares of a loss whose output gradient is the same each time."""
    with torch.no_grad():
        y = layer(x_NCHW)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    wanted = frozenset({"weight", "gain"})
    return weight_standardisation.standardised(
        LayerCall(module=layer, x=x_NCHW, dy=dy, units=x_NCHW.shape[0], wanted=wanted)
    )


LAYERS = {
    "pointwise": lambda: WSConv2d(6, 9, 1),
    "grouped": lambda: WSConv2d(8, 12, 3, groups=4),
    "strided": lambda: WSConv2d(5, 7, 3, stride=2),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_rule_gives_the_same_norms_and_sums_with_and_without_it(name: str, *, channels_last: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(4, layer.in_channels, 8, 8)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    factor_U, nonfinite_U = torch.tensor([0.5, 0.0, 1.0, 0.25], dtype=torch.float64), torch.tensor([0, 1, 0, 0]).bool()
    native_shares = shares_of(layer, x)
    with kernels.switched_off():
        plain_shares = shares_of(layer, x)
        plain_norms = {key: share.norms_sq() for key, share in plain_shares.items()}
    for key, share in native_shares.items():
        plain = plain_shares[key]  # in float32, each a sum of hundreds of numbers that may cancel
        torch.testing.assert_close(share.norms_sq(), plain_norms[key], rtol=1e-4, atol=0)
        sums = [part.finish(part.add_weighted_sum(None, factor_U, nonfinite_U)) for part in (share, plain)]
        torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(share.per_unit(), plain.per_unit(), rtol=1e-4, atol=1e-4, check_dtype=False)


def test_norm_and_sum_of_the_gains_are_of_the_same_numbers() -> None:
    torch.manual_seed(0)
    layer = LAYERS["pointwise"]()
    gain = shares_of(layer, torch.randn(4, 6, 8, 8))["gain"]
    norms_sq = gain.norms_sq()
    for unit, only in enumerate(torch.eye(4, dtype=torch.float64)):
        summed = gain.add_weighted_sum(None, only, None)
        assert float(summed.square().sum()) == pytest.approx(float(norms_sq[unit]), rel=1e-14)


def bottleneck() -> nn.Sequential:
    """Pointwise, grouped and strided convolutions, as in an NFNet."""
    torch.manual_seed(0)
    pooled = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(80, 3))
    layers = (WSConv2d(3, 16, 3, stride=2), WSConv2d(16, 8, 1), WSConv2d(8, 8, 3, groups=4), WSConv2d(8, 20, 1))
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.SiLU())), *pooled)


def test_a_network_uses_it_and_has_the_plain_clipped_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, fits = [], filter_moments._fits
    monkeypatch.setattr(filter_moments, "_fits", lambda *arguments: calls.append(fits(*arguments)) or calls[-1])
    model, generator = bottleneck(), torch.Generator().manual_seed(0)
    rows, loss = Rows(torch.randn(6, 3, 16, 16, generator=generator), torch.arange(6) % 3, 1), nn.CrossEntropyLoss
    fast, plain = (
        clipped_sum_of_batch(
            model, loss(reduction="none"), rows, clip_norm=0.3, performance=Performance(kernels=kind)
        ).gradients
        for kind in ("native", "plain")
    )
    assert True in calls
    assert relative_error(fast, plain) < 1e-5  # both form gradients in float32


SHAPES = [(1, 1, 1), (3, 8, 1), (7, 5, 3), (4, 1, 3), (2, 17, 5), (300, 64, 3), (0, 3, 3)]


def case(outputs: int, inputs: int, kernel: int, *, inside: bool) -> tuple[Standardisation, Tensor]:
    """Filters, one of them too small to count as varying, and a sum in the order of a weight or of windows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, kernel, kernel, generator=generator)
    weight[:1] *= 1e-6
    gain_O = torch.rand(outputs, generator=generator) + 0.5
    e = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    ordered = e.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if inside else e
    return Standardisation.from_layer(weight, gain_O, 1e-4), ordered


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inside", [False, True])
def test_the_kernel_gives_what_plain_operations_gives_in_the_same_memory(
    shape: tuple[int, int, int], *, inside: bool
) -> None:
    facts, e = case(*shape, inside=inside)
    true = facts.pull_back(e.flatten(1)).view(e.shape)
    place = e.data_ptr()
    found = facts.pulled_back(e)
    assert found.is_contiguous()
    assert found.data_ptr() == place
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("inside", [False, True])
def test_it_agrees_with_autograd_in_float64(*, inside: bool) -> None:
    facts, e = case(6, 4, 3, inside=inside)
    raw = facts.weight_OD.double().requires_grad_()
    centred = raw - raw.mean(1, keepdim=True)
    s_O = centred.square().sum(1).clamp(min=1e-4).rsqrt()
    gain_O = (facts.scale_O / facts.s_O).double()
    (true,) = torch.autograd.grad(centred * (s_O * gain_O)[:, None], raw, e.flatten(1))
    torch.testing.assert_close(facts.pulled_back(e).flatten(1), true, rtol=1e-5, atol=1e-4)  # s is rounded to float32


def test_what_the_kernel_cannot_read_goes_plain_operations() -> None:
    facts, e = case(6, 4, 3, inside=False)
    facts_O = (facts.mean_O, facts.s_O, facts.scale_O, facts.live_O)
    doubles = (facts.mean_O.double(), *facts_O[1:])
    assert pull_back.attempt(e.float(), facts.weight_OD, facts_O) is None
    assert pull_back.attempt(e.transpose(0, 1).contiguous().transpose(0, 1), facts.weight_OD, facts_O) is None
    assert pull_back.attempt(e, facts.weight_OD.double(), facts_O) is None
    assert pull_back.attempt(e, facts.weight_OD, doubles) is None
    assert pull_back.attempt(e.to("meta"), facts.weight_OD, facts_O) is None
    assert pull_back.attempt(e, facts.weight_OD[:, :9].contiguous(), facts_O) is None
    assert pull_back.attempt(e, facts.weight_OD, (facts.mean_O[:3], *facts_O[1:])) is None
    true = facts.pull_back(e.flatten(1)).view(e.shape)
    odd = e.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(facts.pulled_back(odd), true, rtol=1e-12, atol=1e-13)
    with kernels.switched_off():
        assert pull_back.attempt(e, facts.weight_OD, facts_O) is None
        torch.testing.assert_close(facts.pulled_back(e), true, rtol=1e-12, atol=1e-13)


# ---- sums over positions


def grid_image(rows: int, channels: int, size: Pair) -> Tensor:
    """On a grid of 1/32, so that sums are exact."""
    return image(rows, channels, size).mul(32).round().div(32)


@pytest.mark.parametrize("channels", [1, 3, 8, 12, 64])
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 7), (32, 32), (2, 9)])
def test_convolution_moments_are_those_of_float64_torch(channels: int, size: tuple[int, int]) -> None:
    dy, y, box = grid_image(3, channels, size), image(3, channels, size, seed=1), torch.rand(3, *size)
    sums_NMO = convolution_moments(dy, y, box)
    g, product = dy.double(), dy.double() * y.double()
    terms = torch.stack([g, product, g * box.double()[:, None], product.abs()], dim=1)
    assert sums_NMO.dtype == torch.float64
    # Against the sum of the terms' sizes, because the sums themselves cancel.
    errors = (sums_NMO - terms.sum((3, 4))).abs() / terms.abs().sum((3, 4)).clamp_min(1e-30)
    assert float(errors.max()) < 1e-6
    assert torch.equal(channel_sums(dy), g.sum((2, 3)).float())  # sums on a grid of 1/32 are exact
