"""What the privacy proof needs of the clipped sum: bounded contributions, whatever the units hold."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import grads_reference as reference
from dpvision.config import Performance
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients import ordinary
from dpvision.gradients.clipped_sum import clipped_sum, clipped_sum_of_batch
from dpvision.gradients.ordinary import ordinary_gradient
from dpvision.models.layers import WSConv2d
from dpvision.privacy.values import ClippedSum
from grads_support import PaddedDraw, Root, cross_entropy, distance, relative_error, total_norm, wavy_loss

CLIP_NORMS = (0.37, 2.5)


class Token(nn.Module):
    """A bare parameter, for the fallback."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((channels, 1, 1), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.token


def small_cnn() -> nn.Module:
    """Layers whose norms come from Gram matrices, from formed gradients, from closed forms and from the fallback."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        Token(4),
        WSConv2d(4, 4, 3),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 48, 3),
        nn.Flatten(),
        nn.Linear(48, 5),
    )


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 6, 6, generator=generator) * 3, torch.randint(0, 5, (count,), generator=generator)


def without(inputs: Tensor, unit: int, rows_per_unit: int) -> Tensor:
    return torch.cat([inputs[: unit * rows_per_unit], inputs[(unit + 1) * rows_per_unit :]])


@pytest.mark.parametrize("clip_norm", CLIP_NORMS)
@pytest.mark.parametrize("rows_per_unit", [1, 4])
def test_one_unit_moves_the_sum_by_at_most_clip_norm(clip_norm: float, rows_per_unit: int) -> None:
    model = seeded(small_cnn)
    sharp = lambda outputs, targets: 50 * cross_entropy(outputs, targets)  # noqa: E731
    for pair in range(6):
        inputs, targets = rows(8 * rows_per_unit, seed=pair)
        arguments = {"clip_norm": clip_norm, "rows_per_unit": rows_per_unit, "microbatch_size": 3}
        full = clipped_sum(model, sharp, inputs, targets, **arguments).gradients
        less = (without(inputs, pair, rows_per_unit), without(targets, pair, rows_per_unit))
        moved = distance(full, clipped_sum(model, sharp, *less, **arguments).gradients)
        # Rounding of two float32 sums of eight units each, 1e-6 of their size.
        assert moved <= clip_norm * (1 + 1e-5)
        assert moved >= 0.9 * clip_norm  # the loss is so steep that every unit is clipped


def test_a_single_clipped_unit_has_exactly_the_clip_norm_and_never_more() -> None:
    model = seeded(small_cnn)
    inputs, targets = rows(30, seed=5)
    for unit in range(30):
        one = slice(unit, unit + 1)
        gradient = clipped_sum(model, cross_entropy, inputs[one] * 10, targets[one], clip_norm=0.01).gradients
        assert 0.01 * (1 - 1e-5) <= total_norm(gradient) <= 0.01


def test_a_unit_below_the_clip_norm_is_not_scaled() -> None:
    model = seeded(small_cnn)
    inputs, targets = rows(1)
    found = clipped_sum(model, cross_entropy, inputs, targets, clip_norm=1e4).gradients
    loss = cross_entropy(model(inputs), targets).sum()
    true = dict(zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    assert relative_error(found, true) < 1e-6


def test_all_parameters_together_are_clipped_not_each_by_itself() -> None:
    model = seeded(small_cnn)
    inputs, targets = rows(1)
    gradient = clipped_sum(model, cross_entropy, inputs, targets, clip_norm=0.01).gradients
    assert all(total_norm({"": part}) < 0.01 for part in gradient.values())
    assert total_norm(gradient) == pytest.approx(0.01, rel=1e-5)


@pytest.mark.parametrize("views", [1, 2, 5])
def test_views_of_one_image_are_averaged_and_clipped_once(views: int) -> None:
    model = seeded(small_cnn).double()
    inputs, targets = rows(views)
    inputs, targets = inputs.double(), targets[:1].expand(views)
    found = clipped_sum(model, cross_entropy, inputs, targets, clip_norm=0.2, rows_per_unit=views).gradients
    assert total_norm(found) <= 0.2
    loss = cross_entropy(model(inputs), targets).mean()
    true = dict(zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    true = {name: part * min(1.0, 0.2 / total_norm(true)) for name, part in true.items()}
    assert relative_error(found, true) < 1e-10


@pytest.mark.parametrize("rows_per_unit", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_the_micro_batch_size_does_not_change_the_result(rows_per_unit: int, padded: bool) -> None:
    model = seeded(small_cnn).double()
    inputs, targets = rows(7 * rows_per_unit)
    inputs = inputs.double()
    true = reference.clipped_sum_by_loop(
        model, cross_entropy, inputs, targets, clip_norm=0.4, rows_per_unit=rows_per_unit
    ).gradients
    for size in (1, 2, 3, 7, 16, None):
        found = _sum(model, inputs, targets, size, rows_per_unit, padded).gradients
        # The weights of three rows, a third each, are float32 in a padded draw.
        assert relative_error(found, true) < (1e-7 if padded and rows_per_unit == 3 else 1e-10)


def _sum(
    model: nn.Module, inputs: Tensor, targets: Tensor, size: int | None, rows_per_unit: int, padded: bool
) -> ClippedSum:
    if not padded:
        return clipped_sum(
            model, cross_entropy, inputs, targets, clip_norm=0.4, rows_per_unit=rows_per_unit, microbatch_size=size
        )
    draw = PaddedDraw(inputs, targets, rows_per_unit)
    performance = Performance(microbatch_size=size)
    return clipped_sum_of_batch(model, cross_entropy, draw, clip_norm=0.4, performance=performance)


def test_memory_allowed_to_a_micro_batch_does_not_change_the_result() -> None:
    model = seeded(small_cnn).double()
    inputs, targets = rows(9)
    sums = [
        clipped_sum_of_batch(
            model,
            cross_entropy,
            PaddedDraw(inputs.double(), targets),
            clip_norm=0.4,
            performance=Performance(memory_mib=memory),
        ).gradients
        for memory in (1, 4096)
    ]
    assert relative_error(sums[0], sums[1]) < 1e-10


@pytest.mark.parametrize("padding", [0.0, 1e30, math.nan, math.inf])
def test_padding_units_contribute_exactly_zero(padding: float) -> None:
    model = seeded(small_cnn)
    inputs, targets = rows(3)
    performance = Performance(microbatch_size=8)
    draw = PaddedDraw(inputs, targets, padding=padding)
    padded = clipped_sum_of_batch(model, cross_entropy, draw, clip_norm=0.4, performance=performance).gradients
    plain = clipped_sum(model, cross_entropy, inputs, targets, clip_norm=0.4).gradients
    assert relative_error(padded, plain) < 1e-6
    nothing = PaddedDraw(inputs[:0], targets[:0])
    empty = clipped_sum_of_batch(model, cross_entropy, nothing, clip_norm=0.4, performance=performance)
    assert all(not part.any() and part.shape == padded[name].shape for name, part in empty.gradients.items())


BAD_UNITS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan input": lambda x: torch.full_like(x, math.nan),
    "one nan pixel": lambda x: x.index_put((torch.tensor(0), torch.tensor(1), torch.tensor(2)), torch.tensor(math.nan)),
    "infinite input": lambda x: torch.full_like(x, math.inf),
    "overflowing input": lambda x: x * 1e38,
}


@pytest.mark.parametrize("rows_per_unit", [1, 2])
@pytest.mark.parametrize("bad", BAD_UNITS)
@pytest.mark.parametrize("path", ["auto", "ghost", "formed"])
def test_a_unit_that_is_not_finite_contributes_exactly_zero(
    bad: str, path: str, rows_per_unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path != "auto":
        for module in ("convolution", "linear", "embedding"):
            monkeypatch.setattr(f"dpvision.gradients.rules.{module}.ghost_pays", lambda **_: path == "ghost")
    model = seeded(small_cnn)
    inputs, targets = rows(4 * rows_per_unit)
    spoiled = inputs.clone()
    spoiled[rows_per_unit] = BAD_UNITS[bad](inputs[rows_per_unit])
    arguments = {"clip_norm": 0.4, "rows_per_unit": rows_per_unit}
    found = clipped_sum(model, cross_entropy, spoiled, targets, **arguments, microbatch_size=4).gradients
    rest = clipped_sum(
        model, cross_entropy, without(inputs, 1, rows_per_unit), without(targets, 1, rows_per_unit), **arguments
    ).gradients
    assert all(torch.isfinite(part).all() for part in found.values())
    assert relative_error(found, rest) < 1e-5


def test_an_infinite_gradient_of_finite_outputs_contributes_zero() -> None:
    model = seeded(Root)
    inputs = torch.randn(5, 3)
    inputs[2] = 0.0
    arguments = {"clip_norm": 0.4}
    found = clipped_sum(model, wavy_loss, inputs, torch.zeros(5), **arguments).gradients
    keep = [0, 1, 3, 4]
    rest = clipped_sum(model, wavy_loss, inputs[keep], torch.zeros(4), **arguments).gradients
    assert torch.isfinite(found["first.weight"]).all()
    assert relative_error(found, rest) < 1e-6


def test_a_model_whose_weights_are_not_finite_gives_zeros_and_not_nan() -> None:
    model = seeded(small_cnn)
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = math.nan
    inputs, targets = rows(3)
    assert total_norm(clipped_sum(model, cross_entropy, inputs, targets, clip_norm=1.0).gradients) == 0.0


def test_gradients_that_cancel_inside_a_unit_do_not_escape_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram matrices add up large terms of both signs: rounding must not make a unit look smaller than it is."""
    monkeypatch.setattr("dpvision.gradients.rules.linear.ghost_pays", lambda **_: True)
    model = nn.Linear(64, 64, bias=False)
    generator = torch.Generator().manual_seed(0)
    for exponent in range(9):
        half = torch.randn(1, 40, 64, generator=generator)
        twin = half + 10.0**-exponent * torch.randn(1, 40, 64, generator=generator)
        inputs = torch.cat([half, twin], 1)
        sign = torch.cat([torch.ones(40), -torch.ones(40)])[:, None]
        direction = torch.randn(40, 64, generator=generator).repeat(2, 1)
        opposed = lambda outputs, _, s=sign, d=direction: (outputs * s * d).sum((1, 2))  # noqa: E731
        found = clipped_sum(model, opposed, inputs, torch.zeros(1), clip_norm=1e-3).gradients
        assert total_norm(found) <= 1e-3 * (1 + 1e-4)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, math.inf])
def test_a_clip_norm_that_clips_nothing_is_refused(clip_norm: float) -> None:
    inputs, targets = rows(2)
    with pytest.raises(ArgumentError, match="clip_norm must be a finite number > 0"):
        clipped_sum(seeded(small_cnn), cross_entropy, inputs, targets, clip_norm=clip_norm)


@pytest.mark.parametrize(
    "loss_fn",
    [
        F.cross_entropy,
        lambda outputs, targets: cross_entropy(outputs, targets).sum(),
        lambda outputs, targets: cross_entropy(outputs, targets)[:, None],
        lambda outputs, targets: cross_entropy(outputs, targets)[:-1],
        lambda outputs, targets: 1.0,
    ],
)
def test_a_loss_that_is_not_one_per_row_is_refused(loss_fn: Callable[..., Tensor]) -> None:
    inputs, targets = rows(4)
    with pytest.raises(ArgumentError, match="loss_fn must return one loss per row"):
        clipped_sum(seeded(small_cnn), loss_fn, inputs, targets, clip_norm=1.0)


def test_rows_that_do_not_fit_their_units_are_refused() -> None:
    inputs, targets = rows(5)
    model = seeded(small_cnn)
    with pytest.raises(ArgumentError, match="multiple of rows_per_unit=2, got 5"):
        clipped_sum(model, cross_entropy, inputs, targets, clip_norm=1.0, rows_per_unit=2)
    with pytest.raises(ArgumentError, match="as many rows"):
        clipped_sum(model, cross_entropy, inputs, targets[:3], clip_norm=1.0)
    with pytest.raises(ArgumentError, match="rows_per_unit must be a whole number"):
        clipped_sum(model, cross_entropy, inputs, targets, clip_norm=1.0, rows_per_unit=0)
    with pytest.raises(ArgumentError, match="microbatch_size must be a whole number"):
        clipped_sum(model, cross_entropy, inputs, targets, clip_norm=1.0, microbatch_size=0)


def test_without_clipping_the_sum_is_the_ordinary_gradient() -> None:
    model = seeded(small_cnn).double()
    inputs, targets = rows(7)
    draw = PaddedDraw(inputs.double(), targets)
    performance = Performance(microbatch_size=3)
    clipped = clipped_sum_of_batch(model, cross_entropy, draw, clip_norm=1e9, performance=performance).gradients
    ordinary = ordinary_gradient(model, cross_entropy, draw, divisor=5.0, performance=performance)
    assert relative_error({name: part / 5.0 for name, part in clipped.items()}, ordinary) < 1e-10


def test_a_model_that_the_engine_refuses_is_tried_once_and_again_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def refuse(*_: object, own_code: bool) -> None:
        tried.append(1)
        raise PrivacyError("it mixes")

    monkeypatch.setattr(ordinary, "plan_for", refuse)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    draw = PaddedDraw(torch.randn(6, 3), torch.zeros(6))
    for _ in range(3):
        ordinary_gradient(model, wavy_loss, draw, divisor=6.0, performance=Performance())
    assert len(tried) == 1
    model[1].requires_grad_(False)
    ordinary_gradient(model, wavy_loss, draw, divisor=6.0, performance=Performance())
    assert len(tried) == 2


def test_the_ordinary_gradient_allows_batch_norm_and_moves_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    draw = PaddedDraw(torch.randn(6, 3), torch.zeros(6))
    found = ordinary_gradient(model, wavy_loss, draw, divisor=6.0, performance=Performance(microbatch_size=6))
    model.train()
    loss = wavy_loss(model(draw.inputs), draw.targets).mean()
    true = dict(zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    assert relative_error(found, true) < 1e-5
    assert int(model[1].num_batches_tracked) == 2
    with pytest.raises(ArgumentError, match="divisor"):
        ordinary_gradient(model, wavy_loss, draw, divisor=0.0, performance=Performance())


def test_the_result_says_nothing_of_its_values() -> None:
    inputs, targets = rows(2)
    text = repr(clipped_sum(seeded(small_cnn), cross_entropy, inputs, targets, clip_norm=0.5))
    assert text == "ClippedSum(12 parameters, clip_norm=0.5, sensitive)"


def test_a_sum_is_the_same_inside_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    images, labels = torch.randn(6, 3, 8, 8), torch.randint(0, 4, (6,))

    def total() -> dict[str, torch.Tensor]:
        loss_fn = nn.CrossEntropyLoss(reduction="none")
        return dict(clipped_sum(model, loss_fn, images, labels, clip_norm=1.0).gradients)  # pyright: ignore

    plain = total()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = total()
    assert all(torch.equal(plain[name], inside[name]) for name in plain)
