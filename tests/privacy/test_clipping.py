"""Flat, automatic and per-layer clipping: three routes agree, and no unit adds more than the clip norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import grads_reference as reference
from dpvision import kernels as native
from dpvision.config import Performance
from dpvision.errors import ArgumentError
from dpvision.gradients.clipped_sum import clipped_sum, clipped_sum_of_batch
from dpvision.gradients.ownership import trainable_parameters
from dpvision.models.layers import ScalarGain, WSConv2d
from dpvision.privacy.clipping import GAMMA, Clipper, FactorLimits, clip_factors
from dpvision.privacy.mechanism import CLIPPINGS, Clipping
from grads_networks import NETWORKS
from grads_support import PaddedDraw, Root, cross_entropy, distance, relative_error, total_norm, wavy_loss

NEW: tuple[Clipping, ...] = ("automatic", "per_layer")
CLIP_NORMS = (0.05, 2.5)
KERNELS = ["plain", pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason="no kernels"))]
each_style = pytest.mark.parametrize("clipping", CLIPPINGS)


class Token(nn.Module):
    """A bare parameter, for the fallback."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((channels, 1, 1), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.token


class Unused(nn.Module):
    """A layer that the loss never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x


def every_kind() -> nn.Module:
    """Winograd, standardised with and without Winograd, norms, ghost norms, a fallback, a shared and an idle layer."""
    shared = nn.Conv2d(8, 8, 1)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Mish(),
        WSConv2d(8, 8, 3),
        nn.Tanh(),
        shared,
        Token(8),
        shared,
        ScalarGain(0.7),
        WSConv2d(8, 8, 3, stride=2),
        Unused(),
        nn.Conv2d(8, 48, 3),
        nn.Flatten(),
        nn.Linear(48, 5),
    )


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 6, 6, generator=generator) * torch.linspace(0.1, 3, count)[:, None, None, None]
    return inputs.to(dtype), torch.randint(0, 5, (count,), generator=generator)


def without(x: Tensor, unit: int, rows_per_unit: int) -> Tensor:
    return torch.cat([x[: unit * rows_per_unit], x[(unit + 1) * rows_per_unit :]])


def by_layer(gradients: dict[str, Tensor]) -> dict[str, float]:
    """The length of each layer's part."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, part in gradients.items():
        layers.setdefault(name.rpartition(".")[0], {})[name] = part
    return {layer: total_norm(parts) for layer, parts in layers.items()}


# ---- three routes


@each_style
@pytest.mark.parametrize("rows_per_unit", [1, 3])
@pytest.mark.parametrize("clip_norm", CLIP_NORMS)
def test_the_three_routes_meet(clipping: Clipping, rows_per_unit: int, clip_norm: float) -> None:
    model = seeded(every_kind).double()
    inputs, targets = rows(5 * rows_per_unit, dtype=torch.float64)
    arguments: Any = {"clip_norm": clip_norm, "clipping": clipping, "rows_per_unit": rows_per_unit}
    true = reference.clipped_sum_by_loop(model, cross_entropy, inputs, targets, **arguments).gradients
    found = clipped_sum(model, cross_entropy, inputs, targets, **arguments, microbatch_size=2).gradients
    other = reference.clipped_sum_by_func(model, cross_entropy, inputs, targets, **arguments).gradients
    assert total_norm(true) > 0.1 * clip_norm
    assert relative_error(found, true) < 1e-10
    assert relative_error(other, true) < 1e-10


@pytest.mark.parametrize("clipping", NEW)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows_per_unit", [1, 2])
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_every_way_to_run_it_gives_the_same_sum(
    clipping: Clipping, kernels: Any, rows_per_unit: int, microbatch_size: int | None
) -> None:
    model = seeded(every_kind)
    inputs, targets = rows(7 * rows_per_unit)
    true = reference.clipped_sum_by_loop(
        model, cross_entropy, inputs, targets, clip_norm=0.3, clipping=clipping, rows_per_unit=rows_per_unit
    )
    draw = PaddedDraw(inputs, targets, rows_per_unit, padding=math.nan)
    performance = Performance(kernels=kernels, microbatch_size=microbatch_size)
    found = clipped_sum_of_batch(model, cross_entropy, draw, clip_norm=0.3, clipping=clipping, performance=performance)
    assert relative_error(found.gradients, true.gradients) < 1e-4  # float32, with Winograd's transforms


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_used_in_every_way_we_know_are_clipped_layer_by_layer(name: str) -> None:
    make, some_rows = NETWORKS[name]
    model, inputs = seeded(make).double(), some_rows()
    targets = torch.linspace(0, 1, inputs.shape[0], dtype=torch.float64)
    arguments: Any = {"clip_norm": 0.1, "clipping": "per_layer", "rows_per_unit": 2}
    found = clipped_sum(model, wavy_loss, inputs, targets, **arguments, microbatch_size=2).gradients
    true = reference.clipped_sum_by_loop(model, wavy_loss, inputs, targets, **arguments).gradients
    assert relative_error(found, true) < 1e-10


# ---- sensitivity


@each_style
@pytest.mark.parametrize("rows_per_unit", [1, 3])
@pytest.mark.parametrize("kernels", KERNELS)
def test_one_unit_moves_the_sum_by_at_most_clip_norm(clipping: Clipping, rows_per_unit: int, kernels: Any) -> None:
    model = seeded(every_kind)
    performance = Performance(kernels=kernels, microbatch_size=3)
    sharp = lambda outputs, targets: 1e3 * cross_entropy(outputs, targets)  # noqa: E731

    def clipped(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        draw = PaddedDraw(inputs, targets, rows_per_unit)
        found = clipped_sum_of_batch(model, sharp, draw, clip_norm=0.37, clipping=clipping, performance=performance)
        return dict(found.gradients)

    inputs, targets = rows(6 * rows_per_unit)
    full = clipped(inputs, targets)
    for unit in range(6):
        moved = distance(full, clipped(without(inputs, unit, rows_per_unit), without(targets, unit, rows_per_unit)))
        # Rounding of two sums of six units, partly float32.
        assert 0.5 * 0.37 <= moved <= 0.37 * (1 + 1e-5)


@settings(max_examples=25, deadline=None)
@given(
    clipping=st.sampled_from(CLIPPINGS),
    steepness=st.floats(-15, 15),
    clip_norm=st.floats(1e-6, 1e6),
    seed=st.integers(0, 10_000),
    frozen=st.integers(-1, 5),
)
def test_no_single_unit_is_ever_longer_than_clip_norm(
    clipping: Clipping, steepness: float, clip_norm: float, seed: int, frozen: int
) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)), seed)
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index != frozen)
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(2, 4, generator=generator), torch.rand(2, generator=generator)
    scaled_loss = lambda outputs, y: 10.0**steepness * wavy_loss(outputs, y)  # noqa: E731
    both = clipped_sum(model, scaled_loss, inputs, targets, clip_norm=clip_norm, clipping=clipping).gradients
    one, other = (
        clipped_sum(model, scaled_loss, inputs[k : k + 1], targets[k : k + 1], clip_norm=clip_norm, clipping=clipping)
        for k in (0, 1)
    )
    # A single unit's sum is rounded to float32 once more at the end.
    assert total_norm(one.gradients) <= clip_norm * (1 + 1e-6)
    assert total_norm(other.gradients) <= clip_norm * (1 + 1e-6)
    assert distance(both, dict(one.gradients)) <= clip_norm * (1 + 1e-5)


@settings(max_examples=100, deadline=None)
@given(
    clipping=st.sampled_from(CLIPPINGS),
    norms=st.lists(st.floats(0, 1e150), min_size=1, max_size=4),
    bound=st.floats(1e-12, 1e12),
)
def test_a_factor_times_its_norm_never_passes_the_bound(clipping: Clipping, norms: list[float], bound: float) -> None:
    norm_U = torch.tensor(norms, dtype=torch.float64)
    counted_U = torch.ones(len(norms), dtype=torch.bool)
    limits = FactorLimits.for_bound(bound, frozenset({torch.float32}), clipping=clipping)
    factor_U = clip_factors(norm_U.square(), counted_U, limits)
    assert bool((factor_U * norm_U <= bound * (1 - 2e-6)).logical_or(factor_U == 1).all())
    assert bool((factor_U * norm_U <= bound).all())
    assert bool((factor_U >= 0).all())
    assert bool((factor_U <= (bound / GAMMA if clipping == "automatic" else 1.0)).all())
    assert not clip_factors(norm_U, ~counted_U, limits).any()


# ---- each style is what it says


def test_automatic_clipping_divides_every_gradient_by_its_norm_plus_gamma() -> None:
    assert GAMMA == 0.01
    model = nn.Linear(1, 1, bias=False)
    for size in (1e-12, 1e-3, 0.01, 1.0, 1e6):
        found = clipped_sum(
            model, lambda y, _: y[:, 0], torch.tensor([[size]]), torch.zeros(1), clip_norm=2.0, clipping="automatic"
        ).gradients["weight"]
        assert float(found) == pytest.approx(2.0 * size / (size + 0.01), rel=1e-5)


@each_style
def test_a_gradient_of_zero_adds_zero(clipping: Clipping) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    nothing = lambda outputs, _: 0.0 * outputs.sum(1)  # noqa: E731
    found = clipped_sum(model, nothing, torch.ones(2, 3), torch.zeros(2), clip_norm=2.0, clipping=clipping)
    assert total_norm(found.gradients) == 0.0


def test_per_layer_clipping_gives_each_of_l_layers_the_clip_norm_over_root_l() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))
    steep = lambda outputs, y: 1e4 * wavy_loss(outputs, y)  # noqa: E731
    found = clipped_sum(model, steep, torch.randn(1, 3), torch.zeros(1), clip_norm=0.6, clipping="per_layer")
    parts = by_layer(dict(found.gradients))
    assert len(parts) == 3  # weight and bias of a layer are one part
    assert list(parts.values()) == pytest.approx([0.6 / math.sqrt(3)] * 3, rel=1e-5)
    assert total_norm(found.gradients) <= 0.6


def test_a_long_layer_does_not_shorten_the_others() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loud, self.quiet = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return 1e4 * self.loud(x)[:, 0] + self.quiet(x)[:, 0]

    inputs = torch.tensor([[0.03, 0.04]])
    arguments: Any = {"clip_norm": 1.0}
    whole = clipped_sum(Beside(), lambda y, _: y, inputs, torch.zeros(1), **arguments).gradients
    parts = clipped_sum(Beside(), lambda y, _: y, inputs, torch.zeros(1), **arguments, clipping="per_layer").gradients
    assert total_norm({"": whole["quiet.weight"]}) < 1e-3
    assert total_norm({"": parts["quiet.weight"]}) == pytest.approx(0.05, rel=1e-5)
    assert total_norm({"": parts["loud.weight"]}) == pytest.approx(1 / math.sqrt(2), rel=1e-5)


def test_the_number_of_layers_is_a_fact_of_the_model() -> None:
    """Layers that the loss does not see count; frozen ones don't; shared parameters belong to their first owner."""
    model = every_kind()
    layers = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert len(layers) == 10
    assert Clipper.for_parameters(
        trainable_parameters(model), clip_norm=2.0, clipping="per_layer"
    ).bound == 2.0 / math.sqrt(10)
    model.get_submodule("13").requires_grad_(False)
    assert Clipper.for_parameters(
        trainable_parameters(model), clip_norm=2.0, clipping="per_layer"
    ).bound == 2.0 / math.sqrt(9)
    for clipping in ("flat", "automatic"):
        assert (
            Clipper.for_parameters(
                trainable_parameters(model), clip_norm=2.0, clipping=cast("Clipping", clipping)
            ).bound
            == 2.0
        )
    tied = NETWORKS["tied layers"][0]()
    assert sorted(
        Clipper.for_parameters(trainable_parameters(tied), clip_norm=1.0, clipping="per_layer").groups.values()
    ) == [
        "first",
        "first",
        "second",
    ]


# ---- units that are not finite, padding, empty draws


@each_style
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_unit_that_is_not_finite_adds_exactly_zero(clipping: Clipping, bad: float, kernels: Any) -> None:
    model = seeded(every_kind)
    inputs, targets = rows(4)
    spoiled = inputs.clone()
    spoiled[1] = bad
    performance = Performance(kernels=kernels, microbatch_size=4)
    found, rest = (
        clipped_sum_of_batch(
            model, cross_entropy, PaddedDraw(x, y), clip_norm=0.4, clipping=clipping, performance=performance
        ).gradients
        for x, y in ((spoiled, targets), (without(inputs, 1, 1), without(targets, 1, 1)))
    )
    assert all(torch.isfinite(part).all() for part in found.values())
    assert relative_error(found, rest) < 1e-5


@each_style
def test_a_unit_that_is_not_finite_in_one_layer_is_left_out_of_all(clipping: Clipping) -> None:
    model = seeded(Root)
    inputs = torch.zeros(1, 3)
    found = clipped_sum(model, wavy_loss, inputs, torch.zeros(1), clip_norm=0.4, clipping=clipping).gradients
    assert total_norm(found) == 0.0


@each_style
def test_an_empty_draw_is_a_sum_of_zeros(clipping: Clipping) -> None:
    inputs, targets = rows(2)
    draw = PaddedDraw(inputs[:0], targets[:0])
    model = seeded(every_kind)
    found = clipped_sum_of_batch(
        model, cross_entropy, draw, clip_norm=0.4, clipping=clipping, performance=Performance()
    )
    assert all(not part.any() for part in found.gradients.values())


def test_a_style_that_does_not_exist_is_refused() -> None:
    inputs, targets = rows(2)
    with pytest.raises(ArgumentError, match="clipping must be one of flat, automatic, per_layer, got 'psac'"):
        clipped_sum(
            seeded(every_kind), cross_entropy, inputs, targets, clip_norm=1.0, clipping=cast("Clipping", "psac")
        )
