"""Squared norms, clip factors and weighted sums over units: those of float64, by kernels and by plain operations.

Shapes: U units, D entries, N rows, I in, O out.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

from dpvision import kernels
from dpvision.errors import ArgumentError
from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient, sum_of_squares
from dpvision.gradients.ownership import trainable_parameters
from dpvision.gradients.rules.convolution import ConvolutionGradient, geometry_of
from dpvision.gradients.rules.linear import LinearGradient
from dpvision.kernels.ops import Kernel
from dpvision.kernels.unit_sums import (
    MOST_OUTPUTS,
    add_weighted,
    clip_factors,
    narrow_linear,
    outer_sum,
    to_weight_order,
    unit_squares,
)
from dpvision.privacy import clipping as clip
from dpvision.privacy.clipping import Clipper, FactorLimits
from dpvision.privacy.mechanism import CLIPPINGS, Clipping

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no native kernels: {kernels.reason()}")

each_style = pytest.mark.parametrize("clipping", CLIPPINGS)


# ---- squares


@pytest.mark.parametrize("shape", [(0,), (5,), (0, 3), (3, 0), (1, 1), (7, 3), (2, 15), (2, 16), (3, 17), (4, 2, 9, 5)])
def test_squares_are_those_of_float64(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    got = unit_squares(x)
    assert (got.dtype, got.shape) == (torch.float64, shape[:1])
    torch.testing.assert_close(
        got, x.double().reshape(shape[0], math.prod(shape[1:])).square().sum(1), rtol=1e-14, atol=0
    )


def test_squares_neither_underflow_nor_overflow_nor_hide_small_numbers_beside_large_ones() -> None:
    x = torch.tensor([[1e-30, 1e-38, 0.0], [3e38, 1e38, 1.0], [1.0, 1e-6, 1e-6]])
    torch.testing.assert_close(unit_squares(x), x.double().square().sum(1), rtol=1e-15, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 18])
def test_a_number_that_is_not_finite_shows_in_its_own_unit_only(bad: float, place: int) -> None:
    x = torch.ones(3, 19)
    x[1, place] = bad
    assert torch.isfinite(unit_squares(x)).tolist() == [True, False, True]


def test_norms_use_the_kernel_where_they_can() -> None:
    x = torch.randn(6, 700)
    with kernels.switched_off():
        plain = sum_of_squares(x)
    torch.testing.assert_close(sum_of_squares(x), plain, rtol=3e-6, atol=0)
    assert torch.equal(sum_of_squares(x), unit_squares(x))
    for other in (x[:, ::2], x.mT, x.double(), x.half()):
        assert unit_squares.attempt(other) is None
        torch.testing.assert_close(
            sum_of_squares(other),
            other.double().square().sum(1),
            rtol=2e-3 if other.dtype == torch.half else 3e-6,
            atol=0,
        )


# ---- factors


def parts(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


@each_style
@pytest.mark.parametrize("count", [1, 2, 5])
def test_factors_are_those_of_plain_operations(clipping: Clipping, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    norms_sq = [torch.rand(37, generator=generator, dtype=torch.float64) * 10.0 ** (4 * i - 8) for i in range(count)]
    norms_sq[0][:3] = torch.tensor([0.0, 1e-300, 1e300], dtype=torch.float64)
    real_U = torch.rand(37, generator=generator) < 0.8
    limits = FactorLimits.for_bound(0.7, frozenset({torch.float32}), clipping=clipping)
    got = clip_factors.attempt(norms_sq, real_U, **asdict(limits))
    assert got is not None
    wanted = clip.clip_factors(torch.stack(norms_sq).sum(0), real_U, limits)
    torch.testing.assert_close(got, wanted, rtol=1e-14, atol=0)
    assert not got[~real_U].any()
    norm_U = torch.stack(norms_sq).sum(0).sqrt()
    assert bool((got * norm_U <= 0.7 * (1 - 2e-6)).logical_or(got == 1).all())
    assert bool((got * norm_U <= 0.7).all())


def by_kernel(norms_sq: list[Tensor], real_U: Tensor, *, least: float = 0.0) -> Tensor | None:
    return clip_factors.attempt(norms_sq, real_U, below=1.0, added=0.0, most=1.0, least=least)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.1])
@pytest.mark.parametrize("real", [True, False])
def test_units_without_a_norm_are_left_to_plain_operations(bad: float, *, real: bool) -> None:
    real_U = torch.tensor([True, real, True])
    assert by_kernel(parts([1.0, 1.0, 4.0], [0.0, bad, 0.0]), real_U) is None


def test_a_factor_that_floats_would_round_up_is_zero() -> None:
    norms_sq, real_U = parts([1e20, 1e74, 1e76, 1e90]), torch.ones(4, dtype=torch.bool)
    limits = FactorLimits(below=1.0, added=0.0, most=1.0, least=torch.finfo(torch.float32).tiny)
    found = by_kernel(norms_sq, real_U, least=limits.least)
    assert found is not None
    for factor_U in (found, clip.clip_factors(norms_sq[0], real_U, limits)):
        assert factor_U.tolist() == pytest.approx([1e-10, 1e-37, 0.0, 0.0], abs=0.0)


def test_other_norms_are_left_to_plain_operations() -> None:
    real_U, good = torch.ones(4, dtype=torch.bool), torch.ones(4, dtype=torch.float64)

    assert by_kernel([good, good], real_U) is not None
    for wrong in (good.float(), good[:3], torch.ones(8, dtype=torch.float64)[::2], good[None]):
        assert by_kernel([good, wrong], real_U) is None
    assert by_kernel([good], real_U.double()) is None
    with kernels.switched_off():
        assert by_kernel([good], real_U) is None


@each_style
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_clipping_is_the_same_with_and_without_kernels(clipping: Clipping, bad: float | None) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    generator = torch.Generator().manual_seed(3)
    layer_gradients: dict[nn.Parameter, LayerGradient] = {
        p: MaterialisedGradient(torch.randn(9, *p.shape, generator=generator)) for p in model.parameters()
    }
    if bad is not None:
        layer_gradients[model[1].bias].per_unit()[4, 1] = bad
    real_U = torch.ones(9, dtype=torch.bool)
    real_U[8] = False
    method = Clipper.for_parameters(trainable_parameters(model), clip_norm=0.9, clipping=clipping)
    factors, nonfinite_U = method.factors(layer_gradients, real_U)
    with kernels.switched_off():
        plain, plain_nonfinite_U = method.factors(layer_gradients, real_U)
    assert set(factors) == set(plain) == set(layer_gradients)
    for parameter, factor_U in factors.items():
        torch.testing.assert_close(factor_U, plain[parameter], rtol=3e-6, atol=0)
        assert not factor_U[8]
        assert bad is None or not factor_U[4], "in all layers, because of one"
    expected = None if bad is None else [unit == 4 for unit in range(9)]
    for found in (nonfinite_U, plain_nonfinite_U):
        assert (None if found is None else found.tolist()) == expected


PIECE = 16384  # of the kernel


# ---- sums of outer products


def rows(count: int, columns: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count + columns + outputs)
    a, g = torch.randn(count, columns, generator=generator), torch.randn(count, outputs, generator=generator)
    return a, g, torch.rand(count, generator=generator, dtype=torch.float64)


def exact(a: Tensor, g: Tensor, factor: Tensor) -> Tensor:
    return (g.double() * factor[:, None]).mT @ a.double()


@pytest.mark.parametrize("outputs", [1, 2, 5, 6, 10])
@pytest.mark.parametrize("columns", [1, 7, 8, 16, 25, 511, 513, 1100])
@pytest.mark.parametrize("count", [0, 1, 31, 33, 100])
def test_the_sum_is_that_of_the_outer_products(count: int, columns: int, outputs: int) -> None:
    a, g, factor = rows(count, columns, outputs)
    got = outer_sum(a, g, factor)
    assert (got.dtype, got.shape) == (torch.float64, (outputs, columns))
    # 32 float32 additions and the rounding of factor · g: 6e-8 each of terms of about 1, at random.
    torch.testing.assert_close(got, exact(a, g, factor), rtol=0, atol=1e-5)


def test_long_sums_are_added_up_in_float64() -> None:
    count = 1 << 16
    a, g, factor = torch.full((count, 9), 1.0), torch.full((count, 1), 0.1), torch.ones(count, dtype=torch.float64)
    wanted = count * float(torch.tensor(0.1))
    assert float((outer_sum(a, g, factor) / wanted - 1).abs().max()) < 3e-7  # all in float32: 1e-5 or worse


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_factor_zero_is_not_looked_at(bad: float) -> None:
    a, g, factor = rows(70, 40, 3)
    factor[[0, 33, 69]] = 0.0
    clean = outer_sum(a, g, factor)
    a[[0, 69]], g[33] = bad, bad
    assert torch.equal(outer_sum(a, g, factor), clean)


def test_rows_that_do_not_fit_are_refused() -> None:
    a, g, factor = rows(6, 4, 3)
    assert outer_sum.takes(a, g, factor)
    wide = torch.zeros(6, MOST_OUTPUTS + 1)
    for arguments in [
        (a[:5], g, factor),
        (a, g, factor[:5]),
        (a.mT, g, factor),
        (a, wide, factor),
        (a[:, ::2], g, factor),
    ]:
        assert not outer_sum.takes(*arguments)
        with pytest.raises(ArgumentError, match="equal rows"):
            outer_sum(*arguments)
    assert not narrow_linear.takes(a, torch.zeros(MOST_OUTPUTS + 1, 4), None)
    assert not narrow_linear.takes(a, torch.zeros(3, 5), None)
    assert not narrow_linear.takes(a, torch.zeros(3, 4), torch.zeros(4))


# ---- add_weighted


@pytest.mark.parametrize("units", [0, 1, 7, 8, 9, 17])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (PIECE + 3,), (3, PIECE)])
def test_units_are_added_in_float64(units: int, shape: tuple[int, ...]) -> None:
    parts, factor = torch.randn(units, *shape), torch.rand(units, dtype=torch.float64)
    total = torch.randn(shape, dtype=torch.float64)
    wanted = total + torch.tensordot(factor, parts.double(), dims=1)
    add_weighted(total, parts, factor)
    torch.testing.assert_close(total, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_unit_with_factor_zero_is_not_looked_at(bad: float) -> None:
    parts, factor = torch.randn(11, 100), torch.rand(11, dtype=torch.float64)
    factor[[0, 9]] = 0.0
    clean, total = torch.zeros(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    add_weighted(clean, parts, factor)
    parts[[0, 9]] = bad
    add_weighted(total, parts, factor)
    assert torch.equal(total, clean)


@pytest.mark.parametrize(("units", "entries"), [(9, 3 * PIECE + 1), (40, 4099), (2100, 65)])
def test_the_number_of_threads_changes_no_bit_of_a_running_sum(units: int, entries: int) -> None:
    parts, factor = torch.randn(units, entries), torch.rand(units, dtype=torch.float64)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        total = torch.ones(entries, dtype=torch.float64)
        add_weighted(total, parts, factor)
        found.append(total)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_sums_that_do_not_fit_are_refused() -> None:
    total, parts, factor = torch.zeros(4, dtype=torch.float64), torch.zeros(2, 4), torch.zeros(2, dtype=torch.float64)
    add_weighted(total, parts, factor)
    for arguments in [
        (total[:3], parts, factor),
        (total, parts, factor[:1]),
        (total, parts.mT, factor),
        (total[::2], parts[:, :2].contiguous(), factor),
    ]:
        with pytest.raises(ArgumentError):
            add_weighted(*arguments)


# ---- in use


def counted(monkeypatch: pytest.MonkeyPatch, kernel: Kernel[..., Tensor]) -> list[None]:
    """One entry for every run of the kernel from now on."""
    calls, real = [], kernel._run
    monkeypatch.setattr(kernel, "_run", lambda *arguments: calls.append(None) or real(*arguments))
    return calls


@pytest.mark.parametrize("positions", [1, 3])
def test_a_linear_layer_with_few_outputs_uses_the_kernel(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, outer_sum)
    a, g, _ = rows(12 * positions, 40, 10)
    factor, dead = torch.rand(12, dtype=torch.float64), torch.arange(12) == 5
    share = LinearGradient(a.view(12, positions, 40), g.view(12, positions, 10))
    a.view(12, positions, 40)[5] = math.nan
    got = share.weighted_sum(factor, dead)
    with kernels.switched_off():
        torch.testing.assert_close(got, share.weighted_sum(factor, dead), rtol=1e-5, atol=1e-6)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_gradients_go_straight_into_the_running_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, add_weighted)
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
    y, squares = narrow_linear(x, weight, shift)
    true = torch.nn.functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
    # Sums of up to 2048 products in float32 lanes: a few units in the last place of ‖x‖‖w‖.
    torch.testing.assert_close(y.double(), true, atol=2e-6 * columns**0.5 + 1e-6, rtol=1e-5)
    torch.testing.assert_close(squares, x.double().square().sum(1), atol=0, rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 3, 1, 1), (3, 3, 5, 7), (3, 3, 16, 24), (1, 1, 3, 9), (3, 3, 0, 4)])
def test_sums_of_filters_go_back_to_the_order_of_a_weight(shape: tuple[int, ...]) -> None:
    sums = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = to_weight_order(sums)
    assert torch.equal(found, sums.permute(3, 2, 0, 1))
    assert found.is_contiguous()
    assert torch.equal(to_weight_order(sums.float()), sums.float().permute(3, 2, 0, 1))
