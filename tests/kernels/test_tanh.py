"""tanh by its kernel: close to the exact one, every number by itself, and inside a fast twin."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from dpvision import kernels as native
from dpvision.config import Performance
from dpvision.errors import ArgumentError
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.gradients.fast.small_layers import FastTanh
from dpvision.gradients.plan import plan_for
from dpvision.kernels import tanh as kernel
from grads_support import relative_error

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.reason()}")


def everywhere() -> Tensor:
    """Numbers of all magnitudes and both signs."""
    sizes = torch.logspace(-45, 38, 20_001, dtype=torch.float64).float()
    return torch.cat([-sizes, torch.zeros(1), sizes, torch.linspace(-10, 10, 40_001)])


def test_it_is_the_exact_one_to_a_few_units_in_the_last_place() -> None:
    x = everywhere()
    exact = torch.tanh(x.double())
    error = (kernel.tanh(x).double() - exact).abs()
    # Beyond 1e-38 a float32 has no full precision.
    assert (error <= 4 * torch.finfo(torch.float32).eps * exact.abs() + 2e-45).all()


def test_nan_and_infinity_are_those_of_pytorch() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0])
    torch.testing.assert_close(kernel.tanh(x), torch.tanh(x), equal_nan=True)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4095, 4097, 40_001])
def test_no_bit_depends_on_neighbours_or_threads(count: int) -> None:
    x = everywhere()[20_000 : 20_000 + count].clone()
    found: list[Tensor] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(kernel.tanh(x))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    for place in range(0, count, 997):
        assert torch.equal(kernel.tanh(x[place : place + 1]), found[0][place : place + 1])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 5, 3, 7), (4, 1, 6, 6), (0, 3, 2, 2)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_shape_and_memory_order_stay(shape: tuple[int, ...], channels_last: bool) -> None:
    x = torch.randn(shape)
    if channels_last and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    y = kernel.tanh(x)
    assert (y.shape, y.stride()) == (x.shape, x.stride())
    torch.testing.assert_close(y, torch.tanh(x))


def test_what_does_not_fit_is_refused_by_the_kernel_and_not_by_the_layer() -> None:
    for x in (torch.randn(4, 6)[:, ::2], torch.randn(3).double(), torch.randn(3).bfloat16()):
        assert not kernel.takes(x)
        with pytest.raises(ArgumentError, match="x must be float32"):
            kernel.tanh(x)
        assert torch.equal(FastTanh()(x), torch.tanh(x))
    negative = torch._neg_view(torch.randn(3))
    assert not kernel.takes(negative)
    assert torch.equal(FastTanh()(negative), torch.tanh(negative))


def test_the_gradient_is_that_of_pytorch() -> None:
    x, dy = torch.randn(3, 5, 4, 4, requires_grad=True), torch.randn(3, 5, 4, 4)
    found, true = (torch.autograd.grad(act(x), x, dy)[0] for act in (FastTanh(), torch.tanh))
    assert relative_error({"x": found}, {"x": true}) < 1e-6


def test_the_gradient_has_the_layout_of_the_output() -> None:
    x = torch.randn(3, 5, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    (dx,) = torch.autograd.grad(FastTanh()(x).flatten(1), x, torch.randn(3, 80))
    assert dx.stride() == x.stride()


def test_it_can_be_traced_without_numbers() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        y = torch.ops.dpvision.tanh(x)
    assert (y.shape, y.stride()) == (x.shape, x.stride())


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
