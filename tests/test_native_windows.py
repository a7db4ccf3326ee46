"""Per-unit gradients of convolutions from their windows, against float64 PyTorch."""

# N rows, U units, C in, O out

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpvision.checks import ArgumentError
from dpvision.grads.rules.conv import Correlated, geometry_of
from dpvision.native import switched_off, windows
from dpvision.native.build import build

pytestmark = pytest.mark.skipif(build().library is None, reason=f"no native kernels: {build().reason}")

Pair = tuple[int, int]


def picture(rows: int, channels: int, size: Pair, *, seed: int = 0) -> Tensor:
    height, width = size
    x = torch.empty_strided((rows, channels, height, width), (channels * height * width, 1, width * channels, channels))
    return x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


def by_torch(x: Tensor, dy: Tensor, *, units: int, kernel: Pair, stride: Pair) -> Tensor:
    """(U, O, kernel height · kernel width · C) in float64, one unit at a time."""
    found = []
    for rows, gradients in zip(x.chunk(units), dy.chunk(units), strict=True):
        weight = torch.zeros(dy.shape[1], x.shape[1], *kernel, dtype=torch.float64, requires_grad=True)
        y = nn.functional.conv2d(rows.double(), weight, stride=stride)
        (gradient,) = torch.autograd.grad(y, weight, gradients.double())
        found.append(gradient.permute(0, 2, 3, 1).flatten(1))
    return torch.stack(found)


def check(x: Tensor, dy: Tensor, *, units: int, kernel: Pair, stride: Pair) -> None:
    assert windows.takes(x, dy, units=units, kernel=kernel)
    got, squares = windows.unit_gradients(x, dy, units=units, kernel=kernel, stride=stride)
    wanted = by_torch(x, dy, units=units, kernel=kernel, stride=stride)
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
def test_a_share_takes_the_kernel_and_agrees_with_the_plain_one(rows: int) -> None:
    layer = nn.Conv2d(3, 6, 4, stride=2)
    x = picture(6, 3, (8, 8))
    dy = picture(6, 6, (3, 3), seed=1)

    def share() -> Correlated:
        return Correlated(x, dy, geometry_of(layer, layer.weight.detach()), 6 // rows)

    with switched_off():
        plain, plain_norms = share().per_unit(), share().norms_sq()
    torch.testing.assert_close(share().per_unit(), plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(share().norms_sq(), plain_norms, rtol=1e-5, atol=0)


def test_tiny_gradients_still_have_a_norm() -> None:
    layer = nn.Conv2d(2, 4, 2)
    x, dy = torch.full((1, 2, 3, 3), 1e-30), torch.full((1, 4, 2, 2), 1e-10)
    x, dy = x.contiguous(memory_format=torch.channels_last), dy.contiguous(memory_format=torch.channels_last)
    share = Correlated(x, dy, geometry_of(layer, layer.weight.detach()), 1)
    true = float(share.per_unit().double().square().sum())
    assert float(share.norms_sq()) >= true * (1 - 4e-6)
