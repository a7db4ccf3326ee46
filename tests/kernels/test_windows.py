"""Per-unit gradients of convolutions from their windows, against float64 PyTorch."""

# N rows, U units, C in, O out

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpvision.errors import ArgumentError
from dpvision.gradients.rules.convolution import ConvolutionGradient, geometry_of
from dpvision.kernels import switched_off, windows
from dpvision.kernels.compile import build

pytestmark = pytest.mark.skipif(build().library is None, reason=f"no native kernels: {build().reason}")

Pair = tuple[int, int]


def picture(rows: int, channels: int, size: Pair, *, seed: int = 0) -> Tensor:
    height, width = size
    x = torch.empty_strided((rows, channels, height, width), (channels * height * width, 1, width * channels, channels))
    return x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


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
    assert windows.takes(x, dy, units=units, kernel=kernel, groups=groups)
    got, squares = windows.unit_gradients(x, dy, units=units, kernel=kernel, stride=stride, groups=groups)
    wanted = by_torch(x, dy, units=units, kernel=kernel, stride=stride, groups=groups)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    torch.testing.assert_close(squares, got.double().square().sum((1, 2)), rtol=3e-6, atol=0)


@pytest.mark.parametrize(("kernel", "stride"), [((8, 8), (2, 2)), ((4, 4), (2, 2)), ((1, 1), (1, 1)), ((3, 2), (1, 3))])
@pytest.mark.parametrize(("channels", "outputs"), [(1, 16), (16, 32), (3, 7), (5, 1), (20, 9)])
def test_gradients_and_norms_are_those_of_single_units(kernel: Pair, stride: Pair, channels: int, outputs: int) -> None:
    height, width = 3, 4
    size = ((height - 1) * stride[0] + kernel[0], (width - 1) * stride[1] + kernel[1])
    for units, rows in ((1, 1), (3, 1), (2, 3)):
        x = picture(units * rows, channels, size)
        check(x, picture(units * rows, outputs, (height, width), seed=1), units=units, kernel=kernel, stride=stride)


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
    x, dy = picture(units * rows, channels, reach), picture(units * rows, outputs, size, seed=1)
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
    rim = picture(units * rows, channels, (reach[0] + 2, reach[1] + 1))[:, :, : reach[0], : reach[1]]
    dy = picture(units * rows, channels, size, seed=1)
    for x in (picture(units * rows, channels, reach), rim):
        check(x, dy, units=units, kernel=kernel, stride=stride, groups=channels)


def test_long_sums_over_a_large_picture_lose_nothing() -> None:
    """Terms cancel each other but for one. On the way their sums are too long for float32, which rounds 12349 up."""
    x, dy = picture(1, 2, (130, 130)), picture(1, 2, (128, 128))
    x[:] = 12349.0
    dy[:, :, :64], dy[:, :, 64:96], dy[:, :, 96:] = 1.0, -2.0, 0.0
    dy[:, :, 127, 127] = 1.0
    for wide in (False, True):
        if wide:  # the same numbers in one line
            x, dy = picture(1, 2, (3, 128 * 128 + 2)), dy.permute(0, 2, 3, 1).reshape(1, 1, -1, 2).permute(0, 3, 1, 2)
            x[:] = 12349.0
        got, squares = windows.unit_gradients(x, dy, units=1, kernel=(3, 3), stride=(1, 1), groups=2)
        assert torch.equal(got, torch.full((1, 2, 9), 12349.0))
        assert float(squares) == 18 * 12349.0**2


def test_units_and_channels_with_kernels_of_their_own_stay_apart_on_any_number_of_threads() -> None:
    x, dy = picture(4, 19, (8, 9)), picture(4, 19, (6, 7), seed=1)
    settings = {"units": 4, "kernel": (3, 3), "stride": (1, 1), "groups": 19}
    alone, squares = windows.unit_gradients(x, dy, **settings)
    x[1, 3], dy[2, 18] = float("nan"), float("inf")
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        got, others = windows.unit_gradients(x, dy, **settings)
        assert torch.equal(got[[0, 3]], alone[[0, 3]])
        assert torch.equal(others[[0, 3]], squares[[0, 3]])
        assert torch.equal(got[1, 4:], alone[1, 4:])
        assert torch.equal(got[2, :18], alone[2, :18])
        assert not others[1:3].isfinite().any()


def test_other_groups_and_widths_have_no_kernel() -> None:
    x, dy = picture(2, 6, (8, 8)), picture(2, 6, (6, 6), seed=1)
    assert windows.takes(x, dy, units=2, kernel=(3, 3), groups=6)
    assert not windows.takes(x, dy, units=2, kernel=(3, 3), groups=3)
    assert not windows.takes(x, picture(2, 12, (6, 6)), units=2, kernel=(3, 3), groups=6)
    assert not windows.takes(x, picture(2, 6, (8, 5)), units=2, kernel=(1, 4), groups=6)
    assert not windows.takes(x[:0], dy[:0], units=0, kernel=(3, 3), groups=6)


# ---- windows of all channels

# Laid out (a line of a window has 9 numbers), and read from the input in halves (8) and whole panels (64).
WINDOWS = [(3, (3, 3)), (2, (4, 4)), (1, (8, 8)), (16, (4, 4))]


@pytest.mark.parametrize(("channels", "kernel"), WINDOWS)
@pytest.mark.parametrize("outputs", [5, 8])
def test_a_rim_that_no_window_sees_may_be_there(channels: int, kernel: Pair, outputs: int) -> None:
    size = (2 * 2 + kernel[0], 3 * 2 + kernel[1])
    whole = picture(4, channels, (size[0] + 2, size[1] + 2))
    seen = whole[:, :, : size[0], : size[1]]
    check(seen, picture(4, outputs, (3, 4), seed=1), units=4, kernel=kernel, stride=(2, 2))
    check(seen, picture(4, outputs, (3, 4), seed=1), units=2, kernel=kernel, stride=(2, 2))


@pytest.mark.parametrize(("channels", "kernel"), WINDOWS)
def test_units_stay_apart_whatever_they_hold(channels: int, kernel: Pair) -> None:
    x, dy = picture(4, channels, (3 + kernel[0], 3 + kernel[1])), picture(4, 5, (4, 4), seed=1)
    alone, squares = windows.unit_gradients(x, dy, units=4, kernel=kernel, stride=(1, 1))
    x[1], dy[2] = float("nan"), float("inf")
    got, others = windows.unit_gradients(x, dy, units=4, kernel=kernel, stride=(1, 1))
    assert torch.equal(got[[0, 3]], alone[[0, 3]])
    assert torch.equal(others[[0, 3]], squares[[0, 3]])
    assert not others[1:3].isfinite().any()


def test_the_number_of_threads_changes_no_bit() -> None:
    x, dy = picture(7, 5, (9, 9)), picture(7, 11, (4, 4), seed=1)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(windows.unit_gradients(x, dy, units=7, kernel=(3, 3), stride=(2, 2)))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    x, dy = picture(4, 3, (6, 6)), picture(4, 5, (4, 4), seed=1)
    assert windows.takes(x, dy, units=4, kernel=(3, 3))
    for a, g in ((x.contiguous(), dy), (x, dy.contiguous()), (x.double(), dy), (x[0], dy[0])):
        assert not windows.takes(a, g, units=4, kernel=(3, 3))
    large = picture(1, 64, (40, 40)), picture(1, 4, (38, 38))
    assert not windows.takes(*large, units=1, kernel=(3, 3))
    with switched_off():
        assert not windows.takes(x, dy, units=4, kernel=(3, 3))
    for units, kernel, stride in ((3, (3, 3), (1, 1)), (4, (3, 3), (2, 2)), (4, (4, 3), (1, 1))):
        with pytest.raises(ArgumentError, match="takes"):
            windows.unit_gradients(x, dy, units=units, kernel=kernel, stride=stride)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("layer", [nn.Conv2d(6, 6, 4, stride=2), nn.Conv2d(6, 6, (4, 3), stride=2, groups=6)])
def test_a_share_takes_the_kernel_and_agrees_with_the_plain_one(layer: nn.Conv2d, rows: int) -> None:
    x = picture(6, 6, (8, 7 if layer.groups > 1 else 8))
    dy = picture(6, 6, (3, 3), seed=1)

    def share() -> ConvolutionGradient:
        return ConvolutionGradient(x, dy, geometry_of(layer, layer.weight.detach()), 6 // rows)

    with switched_off():
        plain, plain_norms = share().per_unit(), share().norms_sq()
    torch.testing.assert_close(share().per_unit(), plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(share().norms_sq(), plain_norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("groups", [1, 6])
def test_windows_with_gaps_go_another_way(groups: int) -> None:
    layer = nn.Conv2d(6, 6, 3, dilation=2, groups=groups)
    x, dy = picture(4, 6, (8, 8)), picture(4, 6, (4, 4), seed=1)
    found = ConvolutionGradient(x, dy, geometry_of(layer, layer.weight.detach()), 4).per_unit()
    for unit in range(4):
        weight = layer.weight.detach().double().requires_grad_()
        y = nn.functional.conv2d(x[unit : unit + 1].double(), weight, dilation=2, groups=groups)
        (true,) = torch.autograd.grad(y, weight, dy[unit : unit + 1].double())
        torch.testing.assert_close(found[unit].double(), true, rtol=1e-5, atol=1e-5)


def test_pictures_that_windows_do_not_see_wholly_are_refused() -> None:
    x, dy = picture(4, 6, (8, 8)), picture(4, 6, (4, 4), seed=1)
    for groups in (1, 6):
        with pytest.raises(ArgumentError, match="takes"):
            windows.unit_gradients(x, dy, units=4, kernel=(3, 3), stride=(1, 1), groups=groups)


def test_tiny_gradients_still_have_a_norm() -> None:
    layer = nn.Conv2d(2, 4, 2)
    x, dy = torch.full((1, 2, 3, 3), 1e-30), torch.full((1, 4, 2, 2), 1e-10)
    x, dy = x.contiguous(memory_format=torch.channels_last), dy.contiguous(memory_format=torch.channels_last)
    share = ConvolutionGradient(x, dy, geometry_of(layer, layer.weight.detach()), 1)
    true = float(share.per_unit().double().square().sum())
    assert float(share.norms_sq()) >= true * (1 - 4e-6)
