"""The fused GroupNorm + activation kernels and the moments, against float64 PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dpvision.errors import ArgumentError
from dpvision.kernels import moments, norm_act
from dpvision.kernels.compile import build
from dpvision.kernels.norm_act import Chain

pytestmark = pytest.mark.skipif(build().library is None, reason=f"no native kernels: {build().reason}")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "mish": functional.mish,
    "tanh": torch.tanh,
    "silu": functional.silu,
    "selu": functional.selu,
    "elu": functional.elu,
}
SHAPES = [(1, 1), (3, 5), (7, 7), (32, 32), (2, 9)]
CHANNELS_GROUPS = [(1, 1), (3, 1), (3, 3), (8, 2), (12, 3), (12, 12), (40, 10), (64, 16), (64, 1)]
# Sums of up to 65,536 float32 products through two passes err by a few 1e-7; ten times that is a wrong formula.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    channels: int
    groups: int
    size: tuple[int, int]
    activation: str
    norm_first: bool
    pool: bool

    @property
    def shape_of_output(self) -> tuple[int, int]:
        height, width = self.size
        return (height // 2, width // 2) if self.pool else self.size


def cases() -> list[Case]:
    """Every activation, order and pooling; shapes and channels in turn, so that all meet in the end."""
    found: list[Case] = []
    for channels, groups in CHANNELS_GROUPS:
        for size in SHAPES:
            for number, activation in enumerate(FUNCTIONS):
                norm_first = (number + len(found)) % 2 == 0
                pool = min(size) >= 2 and (number // 2 + channels + size[0]) % 2 == 0
                found.append(Case(channels, groups, size, activation, norm_first, pool))
    for activation in FUNCTIONS:
        for flags in range(4):
            found.append(Case(24, 6, (5, 6), activation, bool(flags & 1), bool(flags & 2)))
    return found


def picture(rows: int, channels: int, size: tuple[int, int], *, seed: int = 0) -> Tensor:
    """Channels-last, on a grid of 1/32: equal values tie exactly, and unequal ones do not tie by rounding."""
    height, width = size
    x = torch.empty_strided((rows, channels, height, width), (channels * height * width, 1, width * channels, channels))
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).mul(32).round().div(32))
    return x


def affine(channels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(channels, generator=generator), torch.randn(channels, generator=generator)


def by_torch(case: Case, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    act = FUNCTIONS[case.activation]
    if case.norm_first:
        y = act(torch.group_norm(x, case.groups, gamma, beta, 1e-5))
    else:
        y = torch.group_norm(act(x), case.groups, gamma, beta, 1e-5)
    return functional.max_pool2d(y, 2) if case.pool else y


def chain_of(case: Case) -> Chain:
    return Chain(case.groups, 1e-5, case.activation, case.norm_first, case.pool)


def by_kernel(
    case: Case, x: Tensor, gamma: Tensor | None, beta: Tensor | None, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return norm_act.forward(x, gamma, beta, chain_of(case), residual)


def gradients(
    case: Case, dy: Tensor, x: Tensor, gamma: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    _, mean_NG, rstd_NG = by_kernel(case, x, gamma, beta)
    return norm_act.backward(dy, x, gamma, beta, mean_NG, rstd_NG, chain_of(case))


def gradients_by_torch(case: Case, dy: Tensor, x: Tensor, gamma: Tensor, beta: Tensor) -> list[Tensor]:
    """dx, dgamma_NC, dbeta_NC in float64, one row at a time."""
    found: list[tuple[Tensor, ...]] = []
    for n in range(x.shape[0]):
        leaves = [t.double().requires_grad_() for t in (x[n : n + 1], gamma, beta)]
        y = by_torch(case, *leaves)
        found.append(torch.autograd.grad(y, leaves, dy[n : n + 1].double()))
    dx, dgamma, dbeta = zip(*found, strict=True)
    return [torch.cat(dx), torch.stack(dgamma), torch.stack(dbeta)]


def error(got: Tensor, wanted: Tensor, scale: float = 0.0) -> float:
    return float((got.double() - wanted.double()).norm() / max(float(wanted.double().norm()), scale))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_output_and_gradients_are_those_of_float64_torch(case: Case) -> None:
    x, (gamma, beta) = picture(3, case.channels, case.size), affine(case.channels)
    residual = picture(3, case.channels, case.shape_of_output, seed=1)
    dy = picture(3, case.channels, case.shape_of_output, seed=2)
    y, _, _ = by_kernel(case, x, gamma, beta, residual)
    wanted = by_torch(case, x.double(), gamma.double(), beta.double()) + residual.double()
    assert error(y, wanted) < TOLERANCE
    # A gradient can cancel to nearly nothing, so errors are also measured against what it is the rest of.
    parts = 0.01 * float(dy.norm()) * max(float(by_kernel(case, x, gamma, beta)[2].max()), 1.0)
    found, exact = gradients(case, dy, x, gamma, beta), gradients_by_torch(case, dy, x, gamma, beta)
    for got, right in zip(found, exact, strict=True):
        assert error(got, right, parts) < TOLERANCE


@pytest.mark.parametrize("norm_first", [True, False])
def test_no_gamma_and_beta_means_one_and_zero(norm_first: bool) -> None:
    case = Case(12, 3, (5, 4), "mish", norm_first, False)
    x, dy = picture(2, 12, (5, 4)), picture(2, 12, (5, 4), seed=2)
    one, zero = torch.ones(12), torch.zeros(12)
    for got, wanted in zip(by_kernel(case, x, None, None), by_kernel(case, x, one, zero), strict=True):
        assert torch.equal(got, wanted)
    for got, wanted in zip(gradients(case, dy, x, None, None), gradients(case, dy, x, one, zero), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_activations_are_right_from_tiny_to_huge_values(activation: str) -> None:
    size = torch.logspace(-6, 1.9, 4096, dtype=torch.float64).float()
    x = torch.cat([size, -size]).view(1, 1, 1, -1)
    # A group's own mean and variance cancel: with gamma = stddev and beta = mean, the norm is the identity.
    case = Case(1, 1, (1, x.shape[3]), activation, True, False)
    _, mean_NG, rstd_NG = by_kernel(case, x, None, None)
    z = ((x - mean_NG.item()) * rstd_NG.item()).contiguous()
    y, _, _ = by_kernel(case, x, None, None)
    wanted = FUNCTIONS[activation](z.double())
    assert float(((y.double() - wanted).abs() / (wanted.abs() + 1e-30)).max()) < 1e-6


@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_a_large_offset_costs_no_more_digits_than_in_torch(activation: str) -> None:
    case = Case(16, 4, (17, 16), activation, True, False)
    x, (gamma, beta) = picture(2, 16, (17, 16)) + 1000.0, affine(16)
    exact = by_torch(case, x.double(), gamma.double(), beta.double())
    ours, torchs = by_kernel(case, x, gamma, beta)[0], by_torch(case, x, gamma, beta)
    assert error(ours, exact) <= max(error(torchs, exact), 1e-6)


def test_statistics_keep_their_digits_under_a_huge_offset() -> None:
    x = picture(2, 16, (20, 20)) + 4096.0  # the grid of 1/32 is still exact in float32
    _, mean_NG, rstd_NG = by_kernel(Case(16, 4, (20, 20), "none", True, False), x, None, None)
    groups = x.double().unflatten(1, (4, 4)).flatten(2).reshape(2, 4, -1)
    assert torch.equal(mean_NG, groups.mean(2).float())
    assert error(rstd_NG, (groups.var(2, correction=0) + 1e-5).rsqrt()) < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("activation", list(FUNCTIONS))
def test_a_row_that_is_not_finite_says_so_and_touches_no_other(bad: float, pool: bool, activation: str) -> None:
    for norm_first in (True, False):
        case = Case(12, 3, (4, 5), activation, norm_first, pool)
        x, (gamma, beta) = picture(3, 12, (4, 5)), affine(12)
        dy = picture(3, 12, case.shape_of_output, seed=2)
        clean = [*by_kernel(case, x, gamma, beta), *gradients(case, dy, x, gamma, beta)]
        x[1, 4, 0, 0] = bad
        hurt = [*by_kernel(case, x, gamma, beta), *gradients(case, dy, x, gamma, beta)]
        for before, after in zip(clean, hurt, strict=True):
            assert torch.equal(before[0], after[0])
            assert torch.equal(before[2], after[2])
        wanted = by_torch(case, x, gamma, beta)
        assert torch.equal(hurt[0][1].isfinite(), wanted[1].isfinite())


def test_a_gradient_that_is_not_finite_stays_in_its_row() -> None:
    case = Case(16, 4, (4, 4), "relu", True, False)
    x, dy, (gamma, beta) = picture(3, 16, (4, 4)), picture(3, 16, (4, 4), seed=2), affine(16)
    clean = gradients(case, dy, x, gamma, beta)
    dy[1] = math.nan
    for before, after in zip(clean, gradients(case, dy, x, gamma, beta), strict=True):
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[2], after[2])
        assert after[1].isnan().any()


@pytest.mark.parametrize("norm_first", [True, False])
def test_of_equal_values_in_a_window_the_first_gets_the_gradient(norm_first: bool) -> None:
    case = Case(8, 8, (4, 4), "none", norm_first, True)
    x = torch.zeros(1, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    x[:, :, 2:, 2:] = 1.0
    dy, (gamma, beta) = picture(1, 8, (2, 2), seed=2), affine(8)
    wanted = gradients_by_torch(case, dy, x, gamma, beta)
    assert error(gradients(case, dy, x, gamma, beta)[0], wanted[0]) < TOLERANCE


@pytest.mark.parametrize("case", cases()[::23], ids=str)
def test_the_number_of_threads_changes_no_bit(case: Case) -> None:
    x, (gamma, beta) = picture(5, case.channels, case.size), affine(case.channels)
    dy = picture(5, case.channels, case.shape_of_output, seed=2)
    found: list[list[Tensor]] = []
    for count in (1, 2):
        with threads(count):
            found.append([*by_kernel(case, x, gamma, beta), *gradients(case, dy, x, gamma, beta)])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("case", cases()[::29], ids=str)
def test_calling_directly_and_through_the_dispatcher_is_the_same(case: Case) -> None:
    x, (gamma, beta) = picture(2, case.channels, case.size), affine(case.channels)
    dy = picture(2, case.channels, case.shape_of_output, seed=2)
    through = [*by_kernel(case, x, gamma, beta), *gradients(case, dy, x, gamma, beta)]
    with torch.no_grad():
        directly = [*by_kernel(case, x, gamma, beta), *gradients(case, dy, x, gamma, beta)]
    for one, two in zip(through, directly, strict=True):
        assert torch.equal(one, two)


def test_no_rows_give_no_rows() -> None:
    case = Case(8, 2, (4, 4), "mish", True, True)
    y, mean_NG, rstd_NG = by_kernel(case, picture(0, 8, (4, 4)), None, None)
    assert (y.shape, mean_NG.shape, rstd_NG.shape) == ((0, 8, 2, 2), (0, 2), (0, 2))
    assert gradients(case, picture(0, 8, (2, 2)), picture(0, 8, (4, 4)), None, None)[1].shape == (0, 8)


def test_what_the_kernels_do_not_take_is_said_and_refused() -> None:
    x = picture(2, 12, (4, 4))
    plain = Chain(3, 1e-5)
    assert norm_act.takes(x, plain)
    assert norm_act.takes(picture(2, 12, (1, 1)), plain)
    assert not norm_act.takes(picture(2, 12, (1, 4)), replace(plain, pool=True))
    assert not norm_act.takes(x, replace(plain, groups=5))
    assert not norm_act.takes(x.double(), plain)
    assert not norm_act.takes(x.contiguous(), plain)
    plain = Chain(3, 1e-5, "relu")
    for x_bad, chain in [
        (x.contiguous(), plain),
        (x.double(), plain),
        (x[0], plain),
        (x, replace(plain, groups=5)),
        (x, replace(plain, groups=0)),
        (x, replace(plain, activation="swish")),
        (picture(2, 12, (1, 4)), replace(plain, pool=True)),
    ]:
        with pytest.raises(ArgumentError):
            norm_act.forward(x_bad, None, None, chain)
    with pytest.raises(ArgumentError, match="residual"):
        norm_act.forward(x, None, None, plain, picture(2, 12, (2, 2)))
    with pytest.raises(ArgumentError, match="gamma"):
        norm_act.forward(x, torch.ones(11), None, plain)
    with pytest.raises(ArgumentError, match="mean"):
        norm_act.backward(x, x, None, None, x, x, plain)


def test_the_operators_tell_shapes_and_strides_without_running() -> None:
    x, settings = picture(2, 12, (5, 4)), [3, 2, 1, 1]
    gamma, beta = affine(12)
    forward = torch.ops.dpvision.norm_act_forward.default
    torch.library.opcheck(
        forward, (x, gamma, beta, None, 1e-5, settings), test_utils=("test_schema", "test_faketensor")
    )
    _, mean_NG, rstd_NG = forward(x, gamma, beta, None, 1e-5, settings)
    arguments = (picture(2, 12, (2, 2)), x, gamma, beta, mean_NG, rstd_NG, settings)
    backward = torch.ops.dpvision.norm_act_backward.default
    torch.library.opcheck(backward, arguments, test_utils=("test_schema", "test_faketensor"))
    sums = torch.ops.dpvision.channel_sums.default
    torch.library.opcheck(sums, (x,), test_utils=("test_schema", "test_faketensor"))
    of_convolution = torch.ops.dpvision.convolution_moments.default
    torch.library.opcheck(of_convolution, (x, x, torch.rand(2, 5, 4)), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("channels", [1, 3, 8, 12, 64])
@pytest.mark.parametrize("size", SHAPES)
def test_convolution_moments_are_those_of_float64_torch(channels: int, size: tuple[int, int]) -> None:
    dy, y, box = picture(3, channels, size), picture(3, channels, size, seed=1), torch.rand(3, *size)
    sums_NMO = moments.convolution_moments(dy, y, box)
    g, product = dy.double(), dy.double() * y.double()
    terms = torch.stack([g, product, g * box.double()[:, None], product.abs()], dim=1)
    assert sums_NMO.dtype == torch.float64
    # Against the sum of the terms' sizes, because the sums themselves cancel.
    errors = (sums_NMO - terms.sum((3, 4))).abs() / terms.abs().sum((3, 4)).clamp_min(1e-30)
    assert float(errors.max()) < 1e-6
    assert torch.equal(moments.channel_sums(dy), g.sum((2, 3)).float())  # sums on a grid of 1/32 are exact


def test_moments_do_not_depend_on_threads_and_keep_rows_apart() -> None:
    dy, y, box = picture(5, 12, (7, 6)), picture(5, 12, (7, 6), seed=1), torch.rand(5, 7, 6)
    with threads(1):
        alone = moments.convolution_moments(dy, y, box), moments.channel_sums(dy)
    with threads(2):
        assert torch.equal(moments.convolution_moments(dy, y, box), alone[0])
        assert torch.equal(moments.channel_sums(dy), alone[1])
    dy[2, 3, 0, 0] = math.nan
    hurt = moments.convolution_moments(dy, y, box)
    others = [0, 1, 3, 4]
    assert torch.equal(hurt[others], alone[0][others])
    assert hurt[2, :, 3].isnan().all()
    assert moments.channel_sums(dy)[2, 3].isnan()


def test_moments_refuse_other_layouts() -> None:
    x = picture(2, 12, (4, 4))
    assert moments.takes(x)
    assert not moments.takes(x.contiguous())
    with pytest.raises(ArgumentError, match="dy must be"):
        moments.channel_sums(x.contiguous())
    with pytest.raises(ArgumentError, match="box must be"):
        moments.convolution_moments(x, x, torch.rand(2, 4, 5))
