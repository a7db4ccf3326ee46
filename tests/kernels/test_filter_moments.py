"""Squares, sums and inner products of filters' gradients by a kernel: those of float64, each filter by itself."""

# U units, O filters, D entries, M moments

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpvision import kernels as native
from dpvision.config import Performance
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch
from dpvision.gradients.layer_gradient import LayerGradient
from dpvision.gradients.rules import weight_standardisation
from dpvision.gradients.rules.rule import LayerCall
from dpvision.kernels.filter_moments import filter_moments
from dpvision.models.layers import WSConv2d
from grads_support import relative_error

pytestmark = pytest.mark.skipif(not native.available(), reason=f"no native kernels: {native.reason()}")


def numbers(units: int, outputs: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gradients and directions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(units, outputs, depth, generator=generator), torch.randn(outputs, depth, generator=generator)


def found(e_UOD: Tensor, z_OD: Tensor) -> Tensor:
    moments_UMO = filter_moments(e_UOD, z_OD)
    assert moments_UMO is not None
    return moments_UMO


def true_moments(e_UOD: Tensor, z_OD: Tensor) -> Tensor:
    e, z = e_UOD.double(), z_OD.double()
    return torch.stack([e.square().sum(2), e.sum(2), (e * z).sum(2)], 1)


@pytest.mark.parametrize("depth", [0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 33, 4609])
@pytest.mark.parametrize(("units", "outputs"), [(0, 3), (1, 1), (3, 0), (1, 5), (5, 1), (3, 7)])
def test_moments_are_those_of_float64(units: int, outputs: int, depth: int) -> None:
    e_UOD, z_OD = numbers(units, outputs, depth)
    got, true = found(e_UOD, z_OD), true_moments(e_UOD, z_OD)
    assert (got.dtype, got.shape) == (torch.float64, (units, 3, outputs))
    torch.testing.assert_close(got[:, 0], true[:, 0], rtol=1e-14, atol=0)
    # These two can cancel: what is left of them is as exact as their largest parts.
    torch.testing.assert_close(got[:, 1:], true[:, 1:], rtol=1e-14, atol=1e-15 * max(1, depth))


def test_no_moment_underflows_or_overflows_or_hides_small_numbers_beside_large_ones() -> None:
    rows = [[1e-30, 1e-38, 0.0, 0.0, 0.0], [3e38, 1e38, 3e38, 1.0, 0.0], [1.0, 1e-6, 1e-6, 1e-9, 1.0]]
    e_UOD, z_OD = torch.tensor(rows)[:, None], torch.tensor([[3e-38, 3e38, 1e-6, 1.0, -1.0]])
    torch.testing.assert_close(found(e_UOD, z_OD), true_moments(e_UOD, z_OD), rtol=1e-14, atol=0)


def test_a_gradient_that_hardly_varies_has_its_exact_sum() -> None:
    """In float32 such a sum is rounded the same way again and again."""
    e_UOD, z_OD = torch.full((1, 1, 1 << 14), 1 + 2**-20), torch.ones(1, 1 << 14)
    assert found(e_UOD, z_OD).flatten().tolist() == [(1 + 2**-20) ** 2 * 2**14, *[(1 + 2**-20) * 2**14] * 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 19, 20, 22])
def test_a_number_that_is_not_finite_shows_in_its_own_unit_and_filter_only(bad: float, place: int) -> None:
    e_UOD, z_OD = numbers(3, 4, 23)
    before = found(e_UOD, z_OD)
    e_UOD[1, 2, place] = bad
    got = found(e_UOD, z_OD)
    assert not torch.isfinite(got[1, :, 2]).any()
    got[1, :, 2] = before[1, :, 2]
    assert torch.equal(got, before)


@pytest.mark.parametrize(("units", "outputs", "depth"), [(2, 3, 5), (5, 7, 4609), (1, 257, 1031), (67, 1, 1031)])
def test_no_bit_depends_on_the_number_of_threads_or_on_neighbours(units: int, outputs: int, depth: int) -> None:
    e_UOD, z_OD = numbers(units, outputs, depth)
    before, got = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        got.append(found(e_UOD, z_OD))
    torch.set_num_threads(before)
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])
    alone = found(e_UOD[-1:, -1:].contiguous(), z_OD[-1:])
    assert torch.equal(alone[0, :, 0], got[0][-1, :, -1])


def test_what_the_kernel_cannot_read_is_left_to_the_plain_way() -> None:
    e_UOD, z_OD = numbers(2, 4, 6)
    others = (e_UOD.double(), e_UOD.half(), e_UOD[:, :, ::2], e_UOD.mT, e_UOD[0], e_UOD[:, :2], e_UOD.to("meta"))
    assert [filter_moments(other, z_OD) for other in others] == [None] * len(others)
    directions = (z_OD.double(), z_OD.T.contiguous().T, z_OD[:, :3].contiguous(), z_OD[0], z_OD.to("meta"))
    assert [filter_moments(e_UOD, other) for other in directions] == [None] * len(directions)
    with native.switched_off():
        assert filter_moments(e_UOD, z_OD) is None


# ---- in the rule


def shares_of(layer: WSConv2d, x_NCHW: Tensor) -> dict[str, LayerGradient]:
    """Shares of a loss whose output gradient is the same each time."""
    with torch.no_grad():
        y = layer(x_NCHW)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    wanted = frozenset({"weight", "gain"})
    return weight_standardisation.standardised(
        LayerCall(module=layer, x=x_NCHW, dy=dy, units=x_NCHW.shape[0], wanted=wanted)
    )


LAYERS = {
    "pointwise": lambda: WSConv2d(6, 9, 1),
    "grouped": lambda: WSConv2d(8, 12, 3, groups=4),
    "strided": lambda: WSConv2d(5, 7, 3, stride=2),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_rule_gives_the_same_norms_and_sums_with_and_without_it(name: str, *, channels_last: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(4, layer.in_channels, 8, 8)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    factor_U, nonfinite_U = torch.tensor([0.5, 0.0, 1.0, 0.25], dtype=torch.float64), torch.tensor([0, 1, 0, 0]).bool()
    native_shares = shares_of(layer, x)
    with native.switched_off():
        plain_shares = shares_of(layer, x)
        plain_norms = {key: share.norms_sq() for key, share in plain_shares.items()}
    for key, share in native_shares.items():
        plain = plain_shares[key]  # in float32, each a sum of hundreds of numbers that may cancel
        torch.testing.assert_close(share.norms_sq(), plain_norms[key], rtol=1e-4, atol=0)
        sums = [part.finish(part.add_weighted_sum(None, factor_U, nonfinite_U)) for part in (share, plain)]
        torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(share.per_unit(), plain.per_unit(), rtol=1e-4, atol=1e-4, check_dtype=False)


def test_norm_and_sum_of_the_gains_are_of_the_same_numbers() -> None:
    torch.manual_seed(0)
    layer = LAYERS["pointwise"]()
    gain = shares_of(layer, torch.randn(4, 6, 8, 8))["gain"]
    norms_sq = gain.norms_sq()
    for unit, only in enumerate(torch.eye(4, dtype=torch.float64)):
        summed = gain.add_weighted_sum(None, only, None)
        assert float(summed.square().sum()) == pytest.approx(float(norms_sq[unit]), rel=1e-14)


def bottleneck() -> nn.Sequential:
    """Pointwise, grouped and strided convolutions, as in an NFNet."""
    torch.manual_seed(0)
    pooled = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(80, 3))
    layers = (WSConv2d(3, 16, 3, stride=2), WSConv2d(16, 8, 1), WSConv2d(8, 8, 3, groups=4), WSConv2d(8, 20, 1))
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.SiLU())), *pooled)


def test_a_network_uses_it_and_has_the_plain_clipped_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def watched(e_UOD: Tensor, z_OD: Tensor) -> Tensor | None:
        moments_UMO = filter_moments(e_UOD, z_OD)
        calls.append(moments_UMO is not None)
        return moments_UMO

    monkeypatch.setattr(weight_standardisation, "filter_moments", watched)
    model, generator = bottleneck(), torch.Generator().manual_seed(0)
    rows, loss = Rows(torch.randn(6, 3, 16, 16, generator=generator), torch.arange(6) % 3, 1), nn.CrossEntropyLoss
    fast, plain = (
        clipped_sum_of_batch(
            model, loss(reduction="none"), rows, clip_norm=0.3, performance=Performance(kernels=kernels)
        ).gradients
        for kernels in ("native", "plain")
    )
    assert True in calls
    assert False in calls
    assert relative_error(fast, plain) < 1e-5  # both form gradients in float32
