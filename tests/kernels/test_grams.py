"""Norms of weight gradients from shifted Gram matrices, against the gradients themselves in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dpvision.errors import ArgumentError
from dpvision.kernels import grams
from dpvision.kernels.compile import build

pytestmark = pytest.mark.skipif(build().library is None, reason=f"no native kernels: {build().reason}")

SIZES = [(1, 1), (1, 5), (5, 1), (2, 2), (3, 5), (4, 4), (8, 8), (7, 9), (16, 17)]


def gram(x_UCHW: Tensor) -> Tensor:
    x_UTC = x_UCHW.flatten(2).mT
    return torch.bmm(x_UTC, x_UTC.mT).contiguous()


def pictures(units: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(units, 6, *size, generator=generator), torch.randn(units, 4, *size, generator=generator)


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
    x, dy = pictures(3, size)
    got = grams.shifted_gram_norms_sq(gram(x), gram(dy), *size)
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
    got = grams.shifted_gram_norms_sq(gram(x), gram(dy), 4, 4)
    assert float(got) >= float(norms_sq_of_gradients(x, dy))


def test_what_rounding_may_have_hidden_is_added_and_a_negative_sum_is_not() -> None:
    # Two positions side by side: both windows hold both of them, so each inner product is x_gram's trace, or the one
    # entry off the diagonal that has a shift inside the picture.
    x_gram = torch.tensor([[[2.0, 1.0], [1.0, 3.0]]])
    dy_gram = torch.tensor([[[1.0, -9.0], [-9.0, 1.0]]])
    diagonal = (2.0 + 3.0) * 1.0 * 2
    assert float(grams.shifted_gram_norms_sq(x_gram, dy_gram, 1, 2)) == 16 * 2.0**-23 * diagonal


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [(0, 0), (0, 15), (7, 9)])
def test_a_unit_that_is_not_finite_says_so_and_touches_no_other(bad: float, place: tuple[int, int]) -> None:
    x, dy = pictures(3, (4, 4))
    x_gram, dy_gram = gram(x), gram(dy)
    clean = grams.shifted_gram_norms_sq(x_gram, dy_gram, 4, 4)
    for hurt in (x_gram, dy_gram):
        spoilt = hurt.clone()
        spoilt[1, place[0], place[1]] = bad
        pair = (spoilt, dy_gram) if hurt is x_gram else (x_gram, spoilt)
        got = grams.shifted_gram_norms_sq(*pair, 4, 4)
        assert not got[1].isfinite()
        assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_the_number_of_threads_changes_no_bit() -> None:
    x, dy = pictures(5, (7, 9))
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(grams.shifted_gram_norms_sq(gram(x), gram(dy), 7, 9))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])


def test_other_shapes_and_types_are_refused() -> None:
    x, dy = pictures(2, (3, 5))
    x_gram, dy_gram = gram(x), gram(dy)
    assert grams.takes(x_gram)
    assert not grams.takes(x_gram.double())
    for arguments in [
        (x_gram, dy_gram, 3, 4),
        (x_gram, dy_gram[:1], 3, 5),
        (x_gram.double(), dy_gram, 3, 5),
        (x_gram, dy_gram.mT[:, ::2], 3, 5),
        (x_gram, dy_gram, 15, 0),
    ]:
        with pytest.raises(ArgumentError):
            grams.shifted_gram_norms_sq(*arguments)


def test_no_units_give_no_norms_and_the_operator_tells_its_shape() -> None:
    none = torch.empty(0, 4, 4)
    assert grams.shifted_gram_norms_sq(none, none, 2, 2).shape == (0,)
    x, dy = pictures(2, (3, 5))
    operator = torch.ops.dpvision.shifted_gram_norms_sq.default
    torch.library.opcheck(operator, (gram(x), gram(dy), 3, 5), test_utils=("test_schema", "test_faketensor"))
