"""Max-pools of stride 1 against PyTorch's, by itself and inside a fast twin."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from dpvision import kernels as native
from dpvision.config import Performance
from dpvision.errors import ArgumentError
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.gradients.fast import fast_twin
from dpvision.gradients.fast.small_layers import FastMaxPool
from dpvision.gradients.plan import plan_for
from dpvision.kernels import pool
from grads_support import relative_error

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.reason()}")

SIZES = [(1, 1), (1, 5), (5, 1), (2, 2), (3, 4), (7, 9)]
CHANNELS = [1, 3, 8, 13, 16, 67]
BAD = (float("nan"), float("inf"), -float("inf"))


def pictures(rows: int, channels: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Random pictures, channels-last in memory, with few different numbers: so that windows have equals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (rows, *size, channels), generator=generator).float().permute(0, 3, 1, 2)


def output_like(x: Tensor, window: int, seed: int = 1) -> Tensor:
    """Pictures of the size that a pool of ``x`` has."""
    height, width = (size - (3 - window) for size in x.shape[2:])
    return pictures(x.shape[0], x.shape[1], (height, width), seed)


def expected(x: Tensor, dy: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """PyTorch's output and input gradient."""
    x = x.detach().clone().requires_grad_()
    y = F.max_pool2d(x, window, stride=1, padding=pool.PADDING[window])
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
    x = pictures(rows, channels, size)
    dy = output_like(x, window)
    y, index = pool.forward(x, window=window)
    dx = pool.backward(dy, index, window=window)
    true_y, true_dx = (dy, x) if rows == 0 else expected(x, dy, window)
    assert index.dtype == torch.uint8
    assert torch.equal(y, true_y)
    assert torch.equal(dx, true_dx)  # sums of small whole numbers are exact in any order
    for found in (y, dx):
        assert found.permute(0, 2, 3, 1).is_contiguous()


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("bad", BAD)
def test_nan_and_infinity_win_and_lose_as_in_pytorch(bad: float, window: int) -> None:
    x = pictures(4, 11, (6, 7))
    dy = output_like(x, window)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.2] = bad
    x[3] = bad
    y, index = pool.forward(x, window=window)
    true_y, true_dx = expected(x, dy, window)
    torch.testing.assert_close(y, true_y, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(pool.backward(dy, index, window=window), true_dx)


def test_the_index_says_which_of_nine_won() -> None:
    x = torch.zeros(1, 1, 3, 3)
    for k in range(9):
        x.zero_().view(9)[k] = 1.0
        assert pool.forward(x)[1][0, 0, 1, 1] == k


@pytest.mark.parametrize("window", [2, 3])
def test_one_rows_values_do_not_reach_another_row(window: int) -> None:
    x = pictures(3, 5, (4, 6))
    before = pool.forward(x, window=window)
    x[1] = float("nan")
    for found, was in zip(pool.forward(x, window=window), before, strict=True):
        assert torch.equal(found[[0, 2]], was[[0, 2]])


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, dy = (torch.randn(5, 9, 8, 19, generator=torch.Generator().manual_seed(s)).permute(0, 3, 1, 2) for s in (0, 1))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        y, index = pool.forward(x)
        results.append((y, index, pool.backward(dy, index)))
    for one, other in pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_the_kernels_cannot_read_is_refused() -> None:
    x = pictures(2, 4, (5, 6))
    _, index = pool.forward(x)
    for bad in (x.contiguous(), x.double(), x[:, :2], x[:, :, ::2], x[0]):
        assert not pool.takes(bad)
        with pytest.raises(ArgumentError, match="x must be a channels-last"):
            pool.forward(bad)
        with pytest.raises(ArgumentError, match="dy must be a channels-last"):
            pool.backward(bad, index)
    for thin in (pictures(2, 4, (1, 6)), pictures(2, 4, (6, 1))):
        assert not pool.takes(thin, window=2)
        with pytest.raises(ArgumentError, match="window of 2 must fit"):
            pool.forward(thin, window=2)
    for wrong in (index.contiguous(), index.long(), index[:1], index[:, :2]):
        with pytest.raises(ArgumentError, match="index must be what forward gave"):
            pool.backward(x, wrong)


def test_fake_tensors_see_the_shapes_and_no_kernel() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 5, 6, 3).permute(0, 3, 1, 2)
        y, index = pool.forward(x)
        dx = pool.backward(y, index)
    for found in (y, index, dx):
        assert (found.shape, found.stride()) == (x.shape, x.stride())
    assert index.dtype == torch.uint8


def test_operators_keep_the_rules_of_torch_library() -> None:
    x = pictures(2, 3, (5, 6))
    for window in (2, 3):
        y, index = pool.forward(x, window=window)
        for name, arguments in (("forward", (x, window)), ("backward", (y, index, window))):
            operator = getattr(torch.ops.dpvision, f"pool_{name}").default
            torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("true_layer", [nn.MaxPool2d(3, stride=1, padding=1), nn.MaxPool2d(2, stride=1)])
@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.contiguous(), lambda x: x.double(), lambda x: x[:0]])
def test_the_layer_gives_what_pytorchs_gives_whatever_the_layout(change, true_layer: nn.MaxPool2d) -> None:
    x = change(pictures(2, 5, (4, 6))).requires_grad_()
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


def test_a_twin_with_such_pools_gives_the_plain_clipped_sum() -> None:
    model, generator = smooth_network(), torch.Generator().manual_seed(0)
    twin = fast_twin(model)
    assert twin is not None
    assert sum(isinstance(layer, FastMaxPool) for layer in twin.modules()) == 2
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
    assert fast_twin(nn.Sequential(nn.Sequential(others[0]), nn.Flatten())) is None
