"""Weighted sums of gradients: few outputs from their factors, or formed ones into a running sum."""

# N rows, I in, O out, U units, D entries

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpvision.errors import ArgumentError
from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient
from dpvision.gradients.rules.convolution import ConvolutionGradient, geometry_of
from dpvision.gradients.rules.linear import LinearGradient
from dpvision.kernels import accumulate, skinny
from dpvision.kernels.compile import build

pytestmark = pytest.mark.skipif(build().library is None, reason=f"no native kernels: {build().reason}")

PIECE = 16384  # of the kernel


def rows(count: int, columns: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count + columns + outputs)
    a, g = torch.randn(count, columns, generator=generator), torch.randn(count, outputs, generator=generator)
    return a, g, torch.rand(count, generator=generator, dtype=torch.float64)


def exact(a: Tensor, g: Tensor, factor: Tensor) -> Tensor:
    return (g.double() * factor[:, None]).mT @ a.double()


# ---- skinny.outer_sum


@pytest.mark.parametrize("outputs", [1, 2, 5, 6, 10])
@pytest.mark.parametrize("columns", [1, 7, 8, 16, 25, 511, 513, 1100])
@pytest.mark.parametrize("count", [0, 1, 31, 33, 100])
def test_the_sum_is_that_of_the_outer_products(count: int, columns: int, outputs: int) -> None:
    a, g, factor = rows(count, columns, outputs)
    got = skinny.outer_sum(a, g, factor)
    assert (got.dtype, got.shape) == (torch.float64, (outputs, columns))
    # 32 float32 additions and the rounding of factor · g: 6e-8 each of terms of about 1, at random.
    torch.testing.assert_close(got, exact(a, g, factor), rtol=0, atol=1e-5)


def test_long_sums_are_added_up_in_float64() -> None:
    count = 1 << 16
    a, g, factor = torch.full((count, 9), 1.0), torch.full((count, 1), 0.1), torch.ones(count, dtype=torch.float64)
    wanted = count * float(torch.tensor(0.1))
    assert float((skinny.outer_sum(a, g, factor) / wanted - 1).abs().max()) < 3e-7  # all in float32: 1e-5 or worse


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_factor_zero_is_not_looked_at(bad: float) -> None:
    a, g, factor = rows(70, 40, 3)
    factor[[0, 33, 69]] = 0.0
    clean = skinny.outer_sum(a, g, factor)
    a[[0, 69]], g[33] = bad, bad
    assert torch.equal(skinny.outer_sum(a, g, factor), clean)


def test_the_number_of_threads_changes_no_bit_of_the_sum() -> None:
    a, g, factor = rows(300, 1100, 10)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(skinny.outer_sum(a, g, factor))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_rows_that_do_not_fit_are_refused() -> None:
    a, g, factor = rows(6, 4, 3)
    assert skinny.takes(a, g)
    wide = torch.zeros(6, skinny.MOST_OUTPUTS + 1)
    for arguments in [
        (a.double(), g, factor),
        (a, g.double(), factor),
        (a, g, factor.float()),
        (a[:5], g, factor),
        (a, g, factor[:5]),
        (a.mT, g, factor),
        (a, wide, factor),
    ]:
        with pytest.raises(ArgumentError):
            skinny.outer_sum(*arguments)
    assert not skinny.takes(a, wide)
    assert not skinny.takes(a[:, ::2], g)


def test_the_operator_tells_its_shape() -> None:
    operator = torch.ops.dpvision.outer_sum.default
    torch.library.opcheck(operator, rows(3, 5, 2), test_utils=("test_schema", "test_faketensor"))


# ---- accumulate.add_weighted


@pytest.mark.parametrize("units", [0, 1, 7, 8, 9, 17])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (PIECE + 3,), (3, PIECE)])
def test_units_are_added_in_float64(units: int, shape: tuple[int, ...]) -> None:
    parts, factor = torch.randn(units, *shape), torch.rand(units, dtype=torch.float64)
    total = torch.randn(shape, dtype=torch.float64)
    wanted = total + torch.tensordot(factor, parts.double(), dims=1)
    accumulate.add_weighted(total, parts, factor)
    torch.testing.assert_close(total, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_unit_with_factor_zero_is_not_looked_at(bad: float) -> None:
    parts, factor = torch.randn(11, 100), torch.rand(11, dtype=torch.float64)
    factor[[0, 9]] = 0.0
    clean, total = torch.zeros(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    accumulate.add_weighted(clean, parts, factor)
    parts[[0, 9]] = bad
    accumulate.add_weighted(total, parts, factor)
    assert torch.equal(total, clean)


@pytest.mark.parametrize(("units", "entries"), [(9, 3 * PIECE + 1), (40, 4099), (2100, 65)])
def test_the_number_of_threads_changes_no_bit_of_a_running_sum(units: int, entries: int) -> None:
    parts, factor = torch.randn(units, entries), torch.rand(units, dtype=torch.float64)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        total = torch.ones(entries, dtype=torch.float64)
        accumulate.add_weighted(total, parts, factor)
        found.append(total)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_sums_that_do_not_fit_are_refused() -> None:
    total, parts, factor = torch.zeros(4, dtype=torch.float64), torch.zeros(2, 4), torch.zeros(2, dtype=torch.float64)
    accumulate.add_weighted(total, parts, factor)
    for arguments in [
        (total.float(), parts, factor),
        (total, parts.double(), factor),
        (total, parts, factor.float()),
        (total[:3], parts, factor),
        (total, parts, factor[:1]),
        (total, parts.mT, factor),
        (total[::2], parts[:, :2].contiguous(), factor),
    ]:
        with pytest.raises(ArgumentError):
            accumulate.add_weighted(*arguments)


# ---- in use


def counted(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[None]:
    calls, real = [], getattr(module, name)

    def noted(*arguments: Tensor) -> object:
        calls.append(None)
        return real(*arguments)

    monkeypatch.setattr(module, name, noted)
    return calls


@pytest.mark.parametrize("positions", [1, 3])
def test_a_linear_layer_with_few_outputs_uses_the_kernel(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, skinny, "outer_sum")
    a, g, _ = rows(12 * positions, 40, 10)
    factor, dead = torch.rand(12, dtype=torch.float64), torch.arange(12) == 5
    share = LinearGradient(a.view(12, positions, 40), g.view(12, positions, 10))
    a.view(12, positions, 40)[5] = math.nan
    got = share.weighted_sum(factor, dead)
    monkeypatch.setattr(skinny, "takes", lambda a, g: False)
    torch.testing.assert_close(got, share.weighted_sum(factor, dead), rtol=1e-5, atol=1e-6)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_gradients_go_straight_into_the_running_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, accumulate, "add_weighted")
    gradient, factor, dead = torch.randn(6, 3, 5, dtype=dtype), torch.rand(6, dtype=torch.float64), torch.arange(6) == 2
    wanted = 2 * torch.tensordot(factor.masked_fill(dead, 0.0), gradient.double(), dims=1)
    gradient[2] = math.nan
    first = MaterialisedGradient(gradient).add_weighted_sum(None, factor, dead)
    total = MaterialisedGradient(gradient).add_weighted_sum(first, factor, dead)
    assert total.dtype == torch.float64
    assert len(calls) == (2 if dtype == torch.float32 else 0)
    torch.testing.assert_close(total, wanted, rtol=0, atol=1e-14)


class Remembered(LayerGradient):
    """Gives out the same sum each time."""

    def __init__(self, part: Tensor) -> None:
        self.part = part

    def norms_sq(self) -> Tensor:
        return self.part.new_ones(1)

    def weighted_sum(self, factor_U: Tensor, nonfinite_U: Tensor | None) -> Tensor:
        return self.part

    def per_unit(self) -> Tensor:
        return self.part[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_share_keeps_its_own_sum_when_it_is_the_first_of_a_running_one(dtype: torch.dtype) -> None:
    share, factor = Remembered(torch.ones(3, 4, dtype=dtype)), torch.ones(1, dtype=torch.float64)
    total = share.add_weighted_sum(share.add_weighted_sum(None, factor, None), factor, None)
    assert torch.equal(total, torch.full((3, 4), 2.0, dtype=torch.float64))
    assert torch.equal(share.part, torch.ones(3, 4, dtype=dtype))


def test_a_convolutions_running_sum_is_the_same_in_every_layout() -> None:
    module = nn.Conv2d(3, 4, 3, bias=False)
    x, dy = torch.randn(5, 3, 8, 8), torch.randn(5, 4, 6, 6)
    factor, total, found = torch.rand(5, dtype=torch.float64), None, []
    for last in (False, True, False):
        arranged = x.contiguous(memory_format=torch.channels_last) if last else x
        share = ConvolutionGradient(arranged, dy, geometry_of(module, module.weight.detach()), 5)
        assert share.formed() is not None
        found.append(share.weighted_sum(factor, None).double())
        total = share.add_weighted_sum(total, factor, None)
    assert total is not None
    torch.testing.assert_close(total, sum(found, torch.zeros(4, 3, 3, 3, dtype=torch.float64)), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(0, 5, 3), (1, 1, 1), (3, 7, 2), (5, 520, 10), (8, 2048, 6)])
def test_the_output_and_the_rows_squares_are_those_of_float64(
    rows: int, columns: int, outputs: int, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    weight = torch.randn(outputs, columns, generator=generator)
    shift = torch.randn(outputs, generator=generator) if bias else None
    y, squares = skinny.forward(x, weight, shift)
    true = torch.nn.functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
    # Sums of up to 2048 products in float32 lanes: a few units in the last place of ‖x‖‖w‖.
    torch.testing.assert_close(y.double(), true, atol=2e-6 * columns**0.5 + 1e-6, rtol=1e-5)
    torch.testing.assert_close(squares, x.double().square().sum(1), atol=0, rtol=1e-6)


def test_the_output_does_not_depend_on_threads_and_a_nan_stays_in_its_row() -> None:
    x = torch.randn(301, 700, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(10, 700, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(skinny.forward(x, weight, None))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    broken = x.clone()
    broken[4, 3] = float("nan")
    y, squares = skinny.forward(broken, weight, None)
    rest = [n for n in range(301) if n != 4]
    assert bool(y[4].isnan().all())
    assert bool(squares[4].isnan())
    assert torch.equal(y[rest], found[0][0][rest])
    assert torch.equal(squares[rest], found[0][1][rest])


def test_a_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(ArgumentError, match="for 4 inputs"):
        skinny.forward(torch.ones(2, 4), torch.ones(3, 5), None)


@pytest.mark.parametrize("shape", [(3, 3, 1, 1), (3, 3, 5, 7), (3, 3, 16, 24), (1, 1, 3, 9), (3, 3, 0, 4)])
def test_sums_of_filters_go_back_to_the_order_of_a_weight(shape: tuple[int, ...]) -> None:
    sums = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = accumulate.to_weight_order(sums)
    assert torch.equal(found, sums.permute(3, 2, 0, 1))
    assert found.is_contiguous()
    assert torch.equal(accumulate.to_weight_order(sums.float()), sums.float().permute(3, 2, 0, 1))
