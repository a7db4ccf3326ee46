"""Squared norms and clip factors by kernels: what the plain way gives, for odd shapes and for what is not finite."""

# U units, D entries

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn

from dpvision import kernels
from dpvision.gradients.layer_gradient import LayerGradient, MaterialisedGradient, sum_of_squares
from dpvision.gradients.ownership import trainable_parameters
from dpvision.kernels import clip_factors, squares
from dpvision.kernels.compile import build
from dpvision.privacy import clipping as clip
from dpvision.privacy.clipping import Clipper, FactorLimits
from dpvision.privacy.mechanism import CLIPPINGS, Clipping

pytestmark = pytest.mark.skipif(build().library is None, reason=f"no native kernels: {build().reason}")

each_style = pytest.mark.parametrize("clipping", CLIPPINGS)


# ---- squares


@pytest.mark.parametrize("shape", [(0,), (5,), (0, 3), (3, 0), (1, 1), (7, 3), (2, 15), (2, 16), (3, 17), (4, 2, 9, 5)])
def test_squares_are_those_of_float64(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    got = squares_of(x)
    assert (got.dtype, got.shape) == (torch.float64, shape[:1])
    torch.testing.assert_close(
        got, x.double().reshape(shape[0], math.prod(shape[1:])).square().sum(1), rtol=1e-14, atol=0
    )


def squares_of(x: Tensor) -> Tensor:
    found = squares.unit_squares(x)
    assert found is not None
    return found


def test_squares_neither_underflow_nor_overflow_nor_hide_small_numbers_beside_large_ones() -> None:
    x = torch.tensor([[1e-30, 1e-38, 0.0], [3e38, 1e38, 1.0], [1.0, 1e-6, 1e-6]])
    torch.testing.assert_close(squares_of(x), x.double().square().sum(1), rtol=1e-15, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 18])
def test_a_number_that_is_not_finite_shows_in_its_own_unit_only(bad: float, place: int) -> None:
    x = torch.ones(3, 19)
    x[1, place] = bad
    assert torch.isfinite(squares_of(x)).tolist() == [True, False, True]


def test_squares_do_not_depend_on_the_number_of_threads() -> None:
    x, before = torch.randn(257, 1031), torch.get_num_threads()
    found: list[Tensor] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(squares_of(x))
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_norms_use_the_kernel_where_they_can() -> None:
    x = torch.randn(6, 700)
    with kernels.switched_off():
        plain = sum_of_squares(x)
    torch.testing.assert_close(sum_of_squares(x), plain, rtol=3e-6, atol=0)
    assert torch.equal(sum_of_squares(x), squares_of(x))
    for other in (x[:, ::2], x.mT, x.double(), x.half()):
        assert squares.unit_squares(other) is None
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
def test_factors_are_those_of_the_plain_way(clipping: Clipping, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    norms_sq = [torch.rand(37, generator=generator, dtype=torch.float64) * 10.0 ** (4 * i - 8) for i in range(count)]
    norms_sq[0][:3] = torch.tensor([0.0, 1e-300, 1e300], dtype=torch.float64)
    real_U = torch.rand(37, generator=generator) < 0.8
    limits = FactorLimits.for_bound(0.7, frozenset({torch.float32}), clipping=clipping)
    got = clip_factors.clip_factors(norms_sq, real_U, **asdict(limits))
    assert got is not None
    wanted = clip.clip_factors(torch.stack(norms_sq).sum(0), real_U, limits)
    torch.testing.assert_close(got, wanted, rtol=1e-14, atol=0)
    assert not got[~real_U].any()
    norm_U = torch.stack(norms_sq).sum(0).sqrt()
    assert bool((got * norm_U <= 0.7 * (1 - 2e-6)).logical_or(got == 1).all())
    assert bool((got * norm_U <= 0.7).all())


def by_kernel(norms_sq: list[Tensor], real_U: Tensor, *, least: float = 0.0) -> Tensor | None:
    return clip_factors.clip_factors(norms_sq, real_U, below=1.0, added=0.0, most=1.0, least=least)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.1])
@pytest.mark.parametrize("real", [True, False])
def test_units_without_a_norm_are_left_to_the_plain_way(bad: float, *, real: bool) -> None:
    real_U = torch.tensor([True, real, True])
    assert by_kernel(parts([1.0, 1.0, 4.0], [0.0, bad, 0.0]), real_U) is None


def test_a_factor_that_floats_would_round_up_is_zero() -> None:
    norms_sq, real_U = parts([1e20, 1e74, 1e76, 1e90]), torch.ones(4, dtype=torch.bool)
    limits = FactorLimits(below=1.0, added=0.0, most=1.0, least=torch.finfo(torch.float32).tiny)
    found = by_kernel(norms_sq, real_U, least=limits.least)
    assert found is not None
    for factor_U in (found, clip.clip_factors(norms_sq[0], real_U, limits)):
        assert factor_U.tolist() == pytest.approx([1e-10, 1e-37, 0.0, 0.0], abs=0.0)


def test_other_norms_are_left_to_the_plain_way() -> None:
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
