"""The fused copy of a model: the same gradients, or no fused copy at all."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import grads_reference as reference
from dpvision import kernels
from dpvision.config import Performance
from dpvision.errors import ArgumentError
from dpvision.gradients import ordinary
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch, unclipped_sum_of_batch
from dpvision.gradients.fast import fused_copy, weight_cache
from dpvision.gradients.fast.fused_conv import CachedWSConv2d, WinogradConv, WinogradConv2d, WinogradWSConv2d
from dpvision.gradients.fast.fused_layer import CacheLimits
from dpvision.gradients.fast.fused_norm import FusedNorm
from dpvision.gradients.ordinary import ordinary_gradient
from dpvision.gradients.plan import plan_for
from dpvision.models.layers import WSConv2d
from grads_support import PaddedDraw, distance, relative_error, total_norm, wavy_loss

needs_kernels = pytest.mark.skipif(not kernels.available(), reason=f"no native kernels: {kernels.reason()}")
# Winograd's transforms lose about five bits of float32's twenty-four in each of up to three layers.
TOLERANCE = 1e-4
NATIVE, PLAIN = Performance(kernels="native"), Performance(kernels="plain")


class Block(nn.Module):
    """As torchvision writes it: functional and in-place activations, a sum in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, channels)
        self.act = nn.SiLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding="same")
        self.norm2 = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return F.silu(out)


class Residual(nn.Module):
    """Norm of a sum, as ScaleNorm has it, with the sum's other side first."""

    def __init__(self, branch: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.branch, self.norm = branch, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.branch(x))


class Again(nn.Module):
    """One convolution, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(torch.tanh(self.norm(self.conv(x)))))


def _stem(*rest: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *rest)


def _head(channels: int = 16) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 4)]


def _chain(act: nn.Module, *, norm_first: bool) -> nn.Sequential:
    norm = nn.GroupNorm(4, 32)
    order = [norm, act] if norm_first else [act, norm]
    return _stem(nn.Conv2d(16, 32, 3, padding=1), *order, *_head(32))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "torchvision style": lambda: _stem(nn.GroupNorm(16, 16), nn.Tanh(), Block(16), *_head()),
    "norm of a sum": lambda: _stem(Residual(Block(16), nn.GroupNorm(8, 16)), nn.Mish(), *_head()),
    "chain and residual": lambda: _stem(
        Residual(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Mish()), nn.Identity()),
        *_head(),
    ),
    "standardised": lambda: _stem(WSConv2d(16, 32, 3), nn.GroupNorm(4, 32), nn.Mish(), WSConv2d(32, 16, 3), *_head()),
    "standardised, bare": lambda: _stem(WSConv2d(16, 48, 3, padding=1, affine=()), nn.Tanh(), *_head(48)),
    "standardised, strided": lambda: _stem(WSConv2d(16, 16, 3, stride=2), nn.GroupNorm(1, 16), nn.SELU(), *_head()),
    "no affine": lambda: _stem(nn.GroupNorm(4, 16, affine=False), nn.ELU(), nn.Conv2d(16, 16, 3, padding=1), *_head()),
    "one layer twice": lambda: _stem(Again(), *_head()),
    "norm alone": lambda: _stem(nn.GroupNorm(4, 16), nn.GroupNorm(2, 16), nn.Conv2d(16, 16, 3, padding=1), *_head()),
    "strided and wide": lambda: _stem(nn.Conv2d(16, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.Mish(),
                                      nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU(), *_head(64)),
    **{
        f"{type(act).__name__}, norm {'first' if first else 'last'}": lambda act=act, first=first: _chain(
            act, norm_first=first
        )
        for act in (nn.Mish(), nn.Tanh(), nn.SiLU(), nn.SELU())
        for first in (True, False)
    },
}  # fmt: skip


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():  # gains and biases that are not at their first values
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model


def rows(count: int, size: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, size, size, generator=generator), torch.linspace(0, 1, count)


def sums(model: nn.Module, units: Rows, performance: Performance, clip_norm: float = 0.5) -> dict[str, Tensor]:
    return clipped_sum_of_batch(model, wavy_loss, units, clip_norm=clip_norm, performance=performance).gradients


def fused_copy_of(model: nn.Module, units: Rows, performance: Performance = NATIVE) -> nn.Module | None:
    return plan_for(model, wavy_loss, next(units.microbatches(1)), performance).fused_copy


@needs_kernels
@pytest.mark.parametrize("size", [4, 9])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_fused_copy_gives_the_clipped_sum_of_single_units(name: str, size: int) -> None:
    model, (x, y) = seeded(NETWORKS[name]), rows(6, size)
    for rows_per_unit in (1, 3):
        units = Rows(x, y, rows_per_unit)
        assert fused_copy_of(model, units) is not None
        for clip_norm in (0.5, 1e6):
            found = sums(model, units, NATIVE.model_copy(update={"microbatch_size": 4}), clip_norm)
            true = reference.clipped_sum_by_loop(
                model, wavy_loss, x, y, clip_norm=clip_norm, rows_per_unit=rows_per_unit
            )
            assert relative_error(found, true.gradients) <= TOLERANCE


@needs_kernels
def test_pools_and_kinks_are_fused_too() -> None:
    model = seeded(lambda: _stem(nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), Block(16), *_head()))
    x, y = rows(6, 10)
    # Flips at a kink are of the order of single activations; these rows have none.
    assert relative_error(sums(model, Rows(x, y, 1), NATIVE), sums(model, Rows(x, y, 1), PLAIN)) <= TOLERANCE
    layers = [layer for layer in _fused_layers(model) if isinstance(layer, FusedNorm)]
    assert [layer.chain.pool for layer in layers] == [True, False, False]


def _fused_layers(model: nn.Module) -> list[nn.Module]:
    copied = fused_copy(model)
    assert copied is not None
    return list(copied.modules())


@needs_kernels
def test_what_is_expected_to_be_fused_is_fused() -> None:
    layers = _fused_layers(seeded(NETWORKS["torchvision style"]))
    chains = [(layer.chain.activation, layer.chain.norm_first) for layer in layers if isinstance(layer, FusedNorm)]
    assert chains == [("tanh", True), ("silu", True), ("none", True)]
    assert sum(isinstance(layer, WinogradConv2d) for layer in layers) == 3
    assert not any(isinstance(layer, nn.GroupNorm | nn.SiLU) for layer in layers)
    standardised = _fused_layers(seeded(NETWORKS["standardised"]))
    assert sum(isinstance(layer, WinogradWSConv2d) for layer in standardised) == 2


class UsedTwice(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.norm, self.act, self.where = nn.GroupNorm(4, 16), nn.Mish(), where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            active = self.act(x)
            return torch.cat((self.norm(active), active), 1)
        normal = self.norm(x)
        if self.where == "itself":
            return normal + normal
        return torch.cat((self.act(normal), normal), 1)


@needs_kernels
@pytest.mark.parametrize("where", ["before", "after", "itself"])
def test_a_value_that_is_used_twice_is_not_fused_away(where: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), UsedTwice(where))
    copied = fused_copy(model)
    assert copied is not None
    x, _ = rows(3, 5)
    torch.testing.assert_close(copied(x), model(x), atol=1e-5, rtol=1e-5)


@needs_kernels
@pytest.mark.parametrize("gain", [0.0, 1e-6, 0.005, 1.0])
def test_a_standardised_filter_with_hardly_any_gain_keeps_its_exact_norm(gain: float) -> None:
    # Wide enough that norms come without forming gradients: eight positions squared per entry.
    model = seeded(lambda: _stem(WSConv2d(16, 64, 3), nn.GroupNorm(4, 64), nn.Mish(), WSConv2d(64, 64, 3), *_head(64)))
    layer = model[4]
    assert isinstance(layer, WSConv2d)
    assert layer.gain is not None
    layer.gain.data[::2] = gain
    x, y = rows(5, 4)
    found = sums(model, Rows(x, y, 1), NATIVE)
    true = reference.clipped_sum_by_loop(model, wavy_loss, x, y, clip_norm=0.5).gradients
    assert relative_error(found, true) <= TOLERANCE


@needs_kernels
def test_one_unit_moves_the_fused_copys_sum_by_at_most_clip_norm() -> None:
    for name in ("torchvision style", "standardised", "strided and wide"):
        model, (x, y) = seeded(NETWORKS[name]), rows(6, 8)
        whole = sums(model, Rows(x, y, 1), NATIVE, clip_norm=0.1)
        for unit in range(6):
            rest = [i for i in range(6) if i != unit]
            moved = distance(whole, sums(model, Rows(x[rest], y[rest], 1), NATIVE, clip_norm=0.1))
            assert moved <= 0.1 * (1 + 1e-5)
        alone = total_norm(sums(model, Rows(x[:1], y[:1], 1), NATIVE, clip_norm=0.1))
        assert 0.1 * (1 - 1e-5) <= alone <= 0.1


@needs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["torchvision style", "standardised", "strided and wide"])
def test_a_unit_that_is_not_finite_contributes_exactly_zero_to_the_fused_copys_sum(name: str, bad: float) -> None:
    model, (x, y) = seeded(NETWORKS[name]), rows(4, 8)
    broken = x.clone()
    broken[2, 0, 3, 3] = bad
    rest = [0, 1, 3]
    fused_copy_of(model, Rows(x, y, 1))
    found, true = sums(model, Rows(broken, y, 1), NATIVE), sums(model, Rows(x[rest], y[rest], 1), NATIVE)
    assert all(bool(g.isfinite().all()) for g in found.values())
    assert relative_error(found, true) <= 1e-6


@needs_kernels
@pytest.mark.parametrize("name", ["torchvision style", "standardised", "strided and wide"])
def test_absurd_numbers_do_not_escape_the_clip(name: str) -> None:
    model, (x, y) = seeded(NETWORKS[name]), rows(4, 8)
    absurd = x.clone()
    absurd[2] *= 1e30
    rest = [0, 1, 3]
    moved = distance(sums(model, Rows(absurd, y, 1), NATIVE, 0.1), sums(model, Rows(x[rest], y[rest], 1), NATIVE, 0.1))
    assert moved <= 0.1 * (1 + 1e-5)


@needs_kernels
def test_no_kernel_and_no_micro_batch_size_changes_the_result_beyond_rounding() -> None:
    model, (x, y) = seeded(NETWORKS["strided and wide"]), rows(7, 8)
    plain = sums(model, Rows(x, y, 1), PLAIN)
    for size in (1, 2, 7):
        found = sums(model, Rows(x, y, 1), Performance(kernels="native", microbatch_size=size))
        assert relative_error(found, plain) <= TOLERANCE


@needs_kernels
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_without_clipping_the_fused_copys_sum_is_the_ordinary_gradient(microbatch_size: int | None) -> None:
    performance = Performance(kernels="native", microbatch_size=microbatch_size)
    for name in ("standardised", "torchvision style"):
        model, (x, y) = seeded(NETWORKS[name]), rows(5, 8)
        found = unclipped_sum_of_batch(model, wavy_loss, Rows(x, y, 1), performance=performance)
        names = dict(model.named_parameters())
        true = torch.autograd.grad(wavy_loss(model(x), y).sum(), list(names.values()))
        assert relative_error(found, dict(zip(names, true, strict=True))) <= TOLERANCE


@needs_kernels
@pytest.mark.parametrize("rows_per_unit", [1, 2])
def test_ordinary_training_goes_through_the_fast_layers_and_gets_the_same_gradient(
    rows_per_unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (x, y) = seeded(NETWORKS["torchvision style"]), rows(6, 8)
    draw = PaddedDraw(x, y, rows_per_unit=rows_per_unit)
    by_autograd = ordinary_gradient(model, wavy_loss, draw, divisor=4.0, performance=PLAIN)
    monkeypatch.setattr(ordinary, "_by_autograd", None)  # any use of it fails now
    found = ordinary_gradient(model, wavy_loss, draw, divisor=4.0, performance=Performance(microbatch_size=4))
    assert relative_error(found, by_autograd) <= TOLERANCE
    assert {part.dtype for part in found.values()} == {torch.float32}


@pytest.mark.parametrize(
    "mixing",
    [nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)],
    ids=["the engine refuses it", "the engine has no fast layer for it"],
)
def test_ordinary_training_takes_models_that_the_engine_does_not(mixing: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), mixing, nn.Flatten(), nn.Linear(8 * 64, 3))
    x, y = rows(4, 8)
    whole = Performance(microbatch_size=4)  # BatchNorm would see the padding of a larger one
    found = ordinary_gradient(model, wavy_loss, PaddedDraw(x, y), divisor=4.0, performance=whole)
    true = torch.autograd.grad(wavy_loss(model(x), y).mean(), list(model.parameters()))
    assert relative_error(found, dict(zip(found, true, strict=True))) <= TOLERANCE


@needs_kernels
def test_weights_changed_behind_autograds_back_are_seen_by_the_next_step() -> None:
    model, (x, y) = seeded(NETWORKS["standardised"]), rows(4, 8)
    sums(model, Rows(x, y, 1), NATIVE)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    assert relative_error(sums(model, Rows(x, y, 1), NATIVE), sums(model, Rows(x, y, 1), PLAIN)) <= TOLERANCE


@needs_kernels
def test_filters_kept_by_a_step_that_broke_off_are_not_used_by_the_next() -> None:
    model, (x, y) = seeded(NETWORKS["torchvision style"]), rows(4, 8)
    copied = fused_copy_of(model, Rows(x, y, 1))
    assert copied is not None
    layers = [layer for layer in copied.modules() if isinstance(layer, WinogradConv)]
    for layer in layers:
        layer.open_cache()
        layer.filters(backward=False)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    assert relative_error(sums(model, Rows(x, y, 1), NATIVE), sums(model, Rows(x, y, 1), PLAIN)) <= TOLERANCE
    assert not any(layer.is_caching for layer in layers)


class Branching(nn.Module):
    def __init__(self, decide: Callable[[nn.Module, Tensor], bool]) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(3, 3), nn.GroupNorm(1, 3)
        self.decide, self.calls, self.depth = decide, 0, 1

    def forward(self, x: Tensor) -> Tensor:
        return (self.first if self.decide(self, x) else self.second)(x)


def _count(module: nn.Module, _: Tensor) -> bool:
    module.calls = int(module.calls) + 1  # pyright: ignore[reportAttributeAccessIssue]
    return module.calls > 3


@pytest.mark.parametrize(
    "decide",
    [
        lambda _, x: bool(x.sum() > 0),
        lambda _, x: x.shape[0] > 4,
        lambda _, __: random.random() < 0.5,
        lambda _, __: bool(torch.rand(()) < 0.5),
        _count,
    ],
    ids=["values", "batch size", "Python's generator", "torch's generator", "a counter"],
)
def test_a_model_that_decides_in_python_has_no_fused_copy(decide: Callable[[nn.Module, Tensor], bool]) -> None:
    assert fused_copy(nn.Sequential(nn.Conv2d(3, 3, 1), Branching(decide))) is None


def test_a_model_with_hooks_or_parameters_at_its_root_has_no_fused_copy() -> None:
    hooked = nn.Sequential(nn.GroupNorm(1, 3), nn.ReLU())
    assert fused_copy(hooked, compiled=True) is not None
    hooked[1].register_forward_hook(lambda *_: None)
    assert fused_copy(hooked, compiled=True) is None
    rooted = nn.Sequential(nn.GroupNorm(1, 3))
    rooted.register_parameter("scale", nn.Parameter(torch.ones(())))
    assert fused_copy(rooted, compiled=True) is None


@needs_kernels
def test_a_setting_changed_later_is_seen() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), Branching(lambda m, _: m.depth == 1), *_head())
    model[2].first, model[2].second = nn.GroupNorm(1, 16), nn.GroupNorm(16, 16)
    x, y = rows(4, 8)
    assert fused_copy_of(model, Rows(x, y, 1)) is not None
    sums(model, Rows(x, y, 1), NATIVE)
    model[2].depth = 2
    assert relative_error(sums(model, Rows(x, y, 1), NATIVE), sums(model, Rows(x, y, 1), PLAIN)) <= TOLERANCE


@needs_kernels
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = seeded(NETWORKS["torchvision style"]), rows(4, 8)
    true = sums(model, Rows(x, y, 1), PLAIN)
    right = kernels.winograd.convolve
    monkeypatch.setattr(kernels.winograd, "convolve", lambda *args: 1.5 * right(*args))
    assert fused_copy_of(model, Rows(x, y, 1)) is None
    assert relative_error(sums(model, Rows(x, y, 1), NATIVE), true) <= 1e-6


def test_without_kernels_native_is_refused_and_auto_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    monkeypatch.setattr(kernels, "reason", lambda: "switched off by DPVISION_NATIVE=0")
    model, (x, y) = seeded(NETWORKS["torchvision style"]), rows(2, 8)
    with pytest.raises(ArgumentError, match=r"native kernels are not available: switched off by DPVISION_NATIVE=0"):
        sums(model, Rows(x, y, 1), NATIVE)
    assert fused_copy_of(model, Rows(x, y, 1), Performance()) is None


@needs_kernels
def test_float64_and_strange_layouts_run_as_they_are() -> None:
    model, (x, y) = seeded(NETWORKS["torchvision style"]).double(), rows(4, 8)
    assert fused_copy_of(model, Rows(x.double(), y, 1)) is None
    narrow = seeded(NETWORKS["torchvision style"])
    assert fused_copy_of(narrow, Rows(x, y, 1), Performance(channels_last=False)) is None
    tiny, (x, y) = seeded(NETWORKS["standardised"]), rows(4, 2)
    assert (
        fused_copy_of(tiny, Rows(x, y, 1)) is not None
    )  # too small for Winograd: its layers hand over to the originals
    assert relative_error(sums(tiny, Rows(x, y, 1), NATIVE), sums(tiny, Rows(x, y, 1), PLAIN)) <= TOLERANCE


@needs_kernels
@pytest.mark.parametrize("name", ["torchvision style", "standardised"])
def test_filters_that_are_not_kept_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = seeded(NETWORKS[name]), rows(6, 8)
    kept = sums(model, Rows(x, y, 1), NATIVE)
    monkeypatch.setattr(WinogradConv, "cache_limits", CacheLimits(0, 0))
    monkeypatch.setattr(kernels.winograd, "transform", None)
    given: list[object] = []
    right = kernels.winograd.convolve
    monkeypatch.setattr(
        kernels.winograd, "convolve", lambda x, filters, b: given.append(filters) or right(x, filters, b)
    )
    again = sums(model, Rows(x, y, 1), NATIVE)
    assert given
    assert all(isinstance(filters, kernels.winograd.RawFilters) for filters in given)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@needs_kernels
@pytest.mark.parametrize(
    ("all_layers", "one_layer", "kept"),
    [
        (4, 2, [True, True, True]),
        (4, 1, [True, True, False]),
        (3, 2, [True, True, False]),
        (1, 2, [True, False, False]),
    ],
)
def test_filters_are_kept_while_there_is_room(
    all_layers: int, one_layer: int, kept: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ((16, 16), (16, 16), (16, 32))
    copied = fused_copy(nn.Sequential(*(nn.Conv2d(*channels, 3, padding=1) for channels in sizes), nn.Flatten()))
    assert copied is not None
    layers = [module for module in copied.modules() if isinstance(module, WinogradConv)]
    least = layers[0].cache_bytes
    assert [layer.cache_bytes for layer in layers] == [least, least, 2 * least]
    monkeypatch.setattr(WinogradConv, "cache_limits", CacheLimits(all_layers * least, one_layer * least))
    with weight_cache(copied):
        assert [isinstance(layer.filters(backward=False), kernels.winograd.Filters) for layer in layers] == kept


def bottlenecks() -> nn.Sequential:
    """Standardised convolutions that Winograd's method does not take; the third one's norms come from Gram matrices."""
    layers = (
        WSConv2d(3, 16, 3, stride=2),
        WSConv2d(16, 64, 1, affine=("gain",)),
        WSConv2d(64, 96, 3, stride=2, groups=2),
    )
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.SiLU())), nn.Flatten(), nn.Linear(384, 2))


@needs_kernels
@pytest.mark.parametrize("per_unit", [1, 2])
def test_standardised_filters_that_are_made_again_change_no_bit(per_unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = seeded(bottlenecks), rows(6, 8)
    kept = sums(model, Rows(x, y, per_unit), NATIVE)
    made: list[None] = []
    right = CachedWSConv2d.filters
    monkeypatch.setattr(CachedWSConv2d, "filters", lambda layer: made.append(None) or right(layer))
    monkeypatch.setattr(CachedWSConv2d, "cache_limits", CacheLimits(0, 0))
    assert fused_copy_of(model, Rows(x, y, per_unit)) is not None
    again = sums(model, Rows(x, y, per_unit), NATIVE)
    assert len(made) == 5  # forward and backward of three layers, but no gradient of images is needed
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert relative_error(again, sums(model, Rows(x, y, per_unit), PLAIN)) <= TOLERANCE


@needs_kernels
def test_a_gain_that_trains_alone_has_its_gradient_where_filters_are_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CachedWSConv2d, "cache_limits", CacheLimits(0, 0))
    model, (x, y) = seeded(bottlenecks), rows(6, 8)
    for parameter in (model[0].weight, model[0].bias):
        parameter.requires_grad_(False)
    assert fused_copy_of(model, Rows(x, y, 1)) is not None
    found, true = sums(model, Rows(x, y, 1), NATIVE), sums(model, Rows(x, y, 1), PLAIN)
    assert "0.gain" in found
    assert relative_error(found, true) <= TOLERANCE


@needs_kernels
def test_frozen_layers_are_fast_too_and_have_no_gradient() -> None:
    model, (x, y) = seeded(NETWORKS["torchvision style"]), rows(4, 8)
    block = model[3]
    assert isinstance(block, Block)
    for parameter in (*block.conv1.parameters(), *block.norm1.parameters(), block.norm2.weight):
        parameter.requires_grad_(False)
    found, true = sums(model, Rows(x, y, 1), NATIVE), sums(model, Rows(x, y, 1), PLAIN)
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert relative_error(found, true) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns itself on importing its compiler and on looking at .grad
def test_compiled_norms_give_the_same_sums() -> None:
    for name in ("torchvision style", "norm of a sum"):
        model, (x, y) = seeded(NETWORKS[name]), rows(6, 8)
        compiled = Performance(kernels="compiled", microbatch_size=4)
        assert fused_copy_of(model, Rows(x, y, 1), compiled) is not None
        assert relative_error(sums(model, Rows(x, y, 1), compiled), sums(model, Rows(x, y, 1), PLAIN)) <= TOLERANCE
