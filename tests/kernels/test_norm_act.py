"""Fused norms, max-pools and tanh, alone and inside a fused copy of a model, against float64 PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision import kernels
from dpvision.config import Performance
from dpvision.errors import ArgumentError
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.gradients.fast import fused_copy
from dpvision.gradients.fast.small_layers import FastMaxPool, FastTanh
from dpvision.gradients.plan import plan_for
from dpvision.kernels import norm_act
from dpvision.kernels.norm_act import Chain
from grads_support import relative_error

pytestmark = pytest.mark.skipif(not kernels.available(), reason=f"no native kernels: {kernels.reason()}")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "silu": F.silu,
    "selu": F.selu,
    "elu": F.elu,
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


def image(rows: int, channels: int, size: tuple[int, int], *, seed: int = 0) -> Tensor:
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
    return F.max_pool2d(y, 2) if case.pool else y


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
    return norm_act.backward(dy, x, gamma, beta, (mean_NG, rstd_NG), chain_of(case))


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


@pytest.mark.parametrize("case", cases(), ids=str)
def test_output_and_gradients_are_those_of_float64_torch(case: Case) -> None:
    x, (gamma, beta) = image(3, case.channels, case.size), affine(case.channels)
    residual = image(3, case.channels, case.shape_of_output, seed=1)
    dy = image(3, case.channels, case.shape_of_output, seed=2)
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
    x, dy = image(2, 12, (5, 4)), image(2, 12, (5, 4), seed=2)
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
    x, (gamma, beta) = image(2, 16, (17, 16)) + 1000.0, affine(16)
    exact = by_torch(case, x.double(), gamma.double(), beta.double())
    ours, torchs = by_kernel(case, x, gamma, beta)[0], by_torch(case, x, gamma, beta)
    assert error(ours, exact) <= max(error(torchs, exact), 1e-6)


def test_statistics_keep_their_digits_under_a_huge_offset() -> None:
    x = image(2, 16, (20, 20)) + 4096.0  # the grid of 1/32 is still exact in float32
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
        x, (gamma, beta) = image(3, 12, (4, 5)), affine(12)
        dy = image(3, 12, case.shape_of_output, seed=2)
        clean = [*by_kernel(case, x, gamma, beta), *gradients(case, dy, x, gamma, beta)]
        x[1, 4, 0, 0] = bad
        hurt = [*by_kernel(case, x, gamma, beta), *gradients(case, dy, x, gamma, beta)]
        for before, after in zip(clean, hurt, strict=True):
            assert torch.equal(before[0], after[0])
            assert torch.equal(before[2], after[2])
        wanted = by_torch(case, x, gamma, beta)
        assert torch.equal(hurt[0][1].isfinite(), wanted[1].isfinite())


@pytest.mark.parametrize("norm_first", [True, False])
def test_of_equal_values_in_a_window_the_first_gets_the_gradient(norm_first: bool) -> None:
    case = Case(8, 8, (4, 4), "none", norm_first, True)
    x = torch.zeros(1, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    x[:, :, 2:, 2:] = 1.0
    dy, (gamma, beta) = image(1, 8, (2, 2), seed=2), affine(8)
    wanted = gradients_by_torch(case, dy, x, gamma, beta)
    assert error(gradients(case, dy, x, gamma, beta)[0], wanted[0]) < TOLERANCE


def test_chains_that_do_not_fit_are_refused() -> None:
    x, plain = image(2, 12, (4, 4)), Chain(3, 1e-5, "relu")
    assert norm_act.forward.takes(x, None, None, plain)
    assert norm_act.forward.takes(image(2, 12, (1, 1)), None, None, plain)
    for wrong in [
        (x.contiguous(), None, None, plain),
        (x[0], None, None, plain),
        (x, None, None, replace(plain, groups=5)),
        (x, None, None, replace(plain, groups=0)),
        (image(2, 12, (1, 4)), None, None, replace(plain, pool=True)),
        (x, None, None, plain, image(2, 12, (2, 2))),
        (x, torch.ones(11), None, plain),
        (x, None, torch.ones(11), plain),
    ]:
        with pytest.raises(ArgumentError, match="groups that divide the channels"):
            norm_act.forward(*wrong)
    with pytest.raises(ArgumentError, match="matching parameters"):
        norm_act.backward(x, x, None, None, (x, x), plain)
    with pytest.raises(ArgumentError, match="activation must be one of none, relu"):
        replace(plain, activation="swish")


# ---- max-pools of stride 1


SIZES = [(1, 1), (1, 5), (5, 1), (2, 2), (3, 4), (7, 9)]
CHANNELS = [1, 3, 8, 13, 16, 67]
BAD = (float("nan"), float("inf"), -float("inf"))


def images(rows: int, channels: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Random images, channels-last in memory, with few different numbers: so that windows have equals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (rows, *size, channels), generator=generator).float().permute(0, 3, 1, 2)


def output_like(x: Tensor, window: int, seed: int = 1) -> Tensor:
    """Images of the size that a pool of ``x`` has."""
    height, width = (size - (3 - window) for size in x.shape[2:])
    return images(x.shape[0], x.shape[1], (height, width), seed)


def expected(x: Tensor, dy: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """PyTorch's output and input gradient."""
    x = x.detach().clone().requires_grad_()
    y = F.max_pool2d(x, window, stride=1, padding=norm_act.POOL_PADDING[window])
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize(
    ("window", "size"), [*((3, size) for size in SIZES), *((2, size) for size in SIZES if min(size) > 1)]
)
def test_output_and_gradient_are_those_of_pytorch_also_among_equals(
    window: int, size: tuple[int, int], channels: int, rows: int
) -> None:
    x = images(rows, channels, size)
    dy = output_like(x, window)
    y, index = norm_act.max_pool(x, window)
    dx = norm_act.max_pool_backward(dy, index, window)
    true_y, true_dx = (dy, x) if rows == 0 else expected(x, dy, window)
    assert index.dtype == torch.uint8
    assert torch.equal(y, true_y)
    assert torch.equal(dx, true_dx)  # sums of small whole numbers are exact in any order
    for found in (y, dx):
        assert found.permute(0, 2, 3, 1).is_contiguous()


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("bad", BAD)
def test_nan_and_infinity_win_and_lose_as_in_pytorch(bad: float, window: int) -> None:
    x = images(4, 11, (6, 7))
    dy = output_like(x, window)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.2] = bad
    x[3] = bad
    y, index = norm_act.max_pool(x, window)
    true_y, true_dx = expected(x, dy, window)
    torch.testing.assert_close(y, true_y, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(norm_act.max_pool_backward(dy, index, window), true_dx)


def test_the_index_says_which_of_nine_won() -> None:
    x = torch.zeros(1, 1, 3, 3)
    for k in range(9):
        x.zero_().view(9)[k] = 1.0
        assert norm_act.max_pool(x, 3)[1][0, 0, 1, 1] == k


def test_images_and_indices_that_do_not_fit_are_refused() -> None:
    x = images(2, 4, (5, 6))
    _, index = norm_act.max_pool(x, 3)
    wrong = [(bad, 3) for bad in (x.contiguous(), x[:, :2], x[:, :, ::2], x[0])]
    wrong += [(thin, 2) for thin in (images(2, 4, (1, 6)), images(2, 4, (6, 1)))]
    for arguments in [*wrong, (x, 4)]:
        with pytest.raises(ArgumentError, match="a window of 2 or 3 fits"):
            norm_act.max_pool(*arguments)
    for bad in (x.contiguous(), x[:, :2], x[0]):
        assert not norm_act.max_pool_backward.takes(bad, index, 3)
    for bad in (index.contiguous(), index.long(), index[:1], index[:, :2]):
        with pytest.raises(ArgumentError, match="the index of max_pool"):
            norm_act.max_pool_backward(x, bad, 3)


@pytest.mark.parametrize("true_layer", [nn.MaxPool2d(3, stride=1, padding=1), nn.MaxPool2d(2, stride=1)])
@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.contiguous(), lambda x: x.double(), lambda x: x[:0]])
def test_the_layer_gives_what_pytorchs_gives_whatever_the_layout(change, true_layer: nn.MaxPool2d) -> None:
    x = change(images(2, 5, (4, 6))).requires_grad_()
    found, true = (layer(x) for layer in (FastMaxPool(FastMaxPool.window_of(true_layer) or 0), true_layer))
    assert torch.equal(found, true)
    dy = torch.randint(-3, 4, found.shape).to(x.dtype)
    (found_dx,), (true_dx,) = (torch.autograd.grad(y, x, dy) for y in (found, true))
    assert torch.equal(found_dx, true_dx)


def smooth_network() -> nn.Sequential:
    """Convolution, pool, norm and activation, as in SmoothNet, with an odd number of channels."""
    torch.manual_seed(0)
    blocks = [(3, 21), (21, 18)]
    layers = [
        layer
        for i, o in blocks
        for layer in (
            nn.Conv2d(i, o, 3, padding=1),
            nn.MaxPool2d(3, stride=1, padding=1),
            nn.GroupNorm(3, o),
            nn.SELU(),
        )
    ]
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(72, 4))


def test_a_fused_copy_with_such_pools_gives_the_plain_clipped_sum() -> None:
    model, generator = smooth_network(), torch.Generator().manual_seed(0)
    copied = fused_copy(model)
    assert copied is not None
    assert sum(isinstance(layer, FastMaxPool) for layer in copied.modules()) == 2
    rows = Rows(torch.randn(6, 3, 9, 7, generator=generator), torch.arange(6) % 4, 1)
    loss = nn.CrossEntropyLoss(reduction="none")
    plain, fast = (
        clipped_sum_of_batch(
            model,
            loss,
            rows,
            clip_norm=0.5,
            performance=Performance(kernels=kernels, microbatch_size=4),
        ).gradients
        for kernels in ("plain", "native")
    )
    assert plan_for(model, loss, next(rows.microbatches(1)), Performance(kernels="native")).fused_copy is not None
    assert relative_error(fast, plain) <= 1e-4  # Winograd's transforms lose about five bits in each of two layers


def test_other_pools_stay_as_they_are() -> None:
    others = [
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.MaxPool2d(3, stride=1),
        nn.MaxPool2d(3),
        nn.MaxPool2d((3, 5), stride=1, padding=1),
        nn.MaxPool2d(3, stride=1, padding=1, return_indices=True),
        nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True),
        nn.MaxPool2d(3, stride=1, padding=1, dilation=2),
        nn.AvgPool2d(3, stride=1, padding=1),
    ]
    assert {FastMaxPool.window_of(layer) for layer in others} == {None}
    assert FastMaxPool.window_of(nn.MaxPool2d((3, 3), stride=(1, 1), padding=(1, 1))) == 3
    assert fused_copy(nn.Sequential(nn.Sequential(others[0]), nn.Flatten())) is None


# ---- tanh


def everywhere() -> Tensor:
    """Numbers of all magnitudes and both signs."""
    sizes = torch.logspace(-45, 38, 20_001, dtype=torch.float64).float()
    return torch.cat([-sizes, torch.zeros(1), sizes, torch.linspace(-10, 10, 40_001)])


def test_it_is_the_exact_one_to_a_few_units_in_the_last_place() -> None:
    x = everywhere()
    exact = torch.tanh(x.double())
    error = (norm_act.tanh(x).double() - exact).abs()
    # Beyond 1e-38 a float32 has no full precision.
    assert (error <= 4 * torch.finfo(torch.float32).eps * exact.abs() + 2e-45).all()


def test_nan_and_infinity_are_those_of_pytorch() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    torch.testing.assert_close(norm_act.tanh(x), torch.tanh(x), equal_nan=True)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4095, 4097, 40_001])
def test_no_bit_depends_on_neighbours_or_threads(count: int) -> None:
    x = everywhere()[20_000 : 20_000 + count].clone()
    found: list[Tensor] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(norm_act.tanh(x))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for place in range(0, count, 997):
        assert torch.equal(norm_act.tanh(x[place : place + 1]), found[0][place : place + 1])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 5, 3, 7), (4, 1, 6, 6), (0, 3, 2, 2)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_shape_and_memory_order_stay(shape: tuple[int, ...], channels_last: bool) -> None:
    x = torch.randn(shape)
    if channels_last and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    y = norm_act.tanh(x)
    assert (y.shape, y.stride()) == (x.shape, x.stride())
    torch.testing.assert_close(y, torch.tanh(x))


def test_what_does_not_fit_is_refused_by_the_kernel_and_not_by_the_layer() -> None:
    for x in (torch.randn(4, 6)[:, ::2], torch.randn(3).double(), torch.randn(3).bfloat16()):
        assert not norm_act.tanh.takes(x)
        with pytest.raises(ArgumentError, match="tanh needs float32"):
            norm_act.tanh(x)
        assert torch.equal(FastTanh()(x), torch.tanh(x))
    negative = torch._neg_view(torch.randn(3))
    assert not norm_act.tanh.takes(negative)
    assert torch.equal(FastTanh()(negative), torch.tanh(negative))


def test_the_gradient_is_that_of_pytorch() -> None:
    x, dy = torch.randn(3, 5, 4, 4, requires_grad=True), torch.randn(3, 5, 4, 4)
    found, true = (torch.autograd.grad(act(x), x, dy)[0] for act in (FastTanh(), torch.tanh))
    assert relative_error({"x": found}, {"x": true}) < 1e-6


def test_the_gradient_has_the_layout_of_the_output() -> None:
    x = torch.randn(3, 5, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    (dx,) = torch.autograd.grad(FastTanh()(x).flatten(1), x, torch.randn(3, 80))
    assert dx.stride() == x.stride()


def test_a_network_with_tanh_uses_it_and_has_the_same_clipped_sum() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 3))
    batch = Rows(torch.randn(6, 2, 8, 8), torch.arange(6) % 3, 1)
    loss = nn.CrossEntropyLoss(reduction="none")
    plan = plan_for(model, loss, next(batch.microbatches(1)), Performance(kernels="native"))
    assert plan.fused_copy is not None
    assert sum(isinstance(module, FastTanh) for module in plan.fused_copy.modules()) == 2
    fast, plain = (
        clipped_sum_of_batch(model, loss, batch, clip_norm=0.3, performance=Performance(kernels=kernels)).gradients
        for kernels in ("native", "plain")
    )
    assert relative_error(fast, plain) < 1e-5
