"""After a step, finished or not, the model is exactly as it was, and nothing of one draw is left for the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import grads_reference as reference
from dpvision.config import Performance
from dpvision.errors import PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum, clipped_sum_of_batch
from dpvision.gradients.plan import check_model
from dpvision.privacy.values import Microbatch
from grads_support import PaddedDraw, assert_same_traces, cross_entropy, relative_error, traces_of


class Keeper(nn.Module):
    """Keeps what it saw, as some models do, and has a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(4)), None
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        self.fresh = x * 2
        return x * self.weight * self.table


def model_of_many_kinds() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), Keeper(), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)))
    model.add_module("head", nn.Linear(4, 5))
    model[0].bias.requires_grad_(False)
    model[3].eval()
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)
    model.head.register_forward_hook(lambda *_: None)
    return model


def rows(count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, generator=generator), torch.randint(0, 5, (count,), generator=generator)


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_a_step_leaves_no_trace_in_the_model(microbatch_size: int | None) -> None:
    model, before_draw = model_of_many_kinds(), torch.get_rng_state()
    before = traces_of(model)
    clipped_sum(model, cross_entropy, *rows(), clip_norm=0.3, microbatch_size=microbatch_size)
    assert_same_traces(before, traces_of(model))
    assert model[1].seen is None
    assert torch.equal(before_draw, torch.get_rng_state())


def test_a_model_check_leaves_no_trace_even_where_it_finds_something() -> None:
    model = model_of_many_kinds().append(nn.BatchNorm1d(5))
    before, before_draw = traces_of(model), torch.get_rng_state()
    assert any(finding.fatal for finding in check_model(model, cross_entropy, *rows()))
    after = traces_of(model)
    before.pop("versions"), after.pop("versions")  # restoring writes; values are what matters
    assert_same_traces(before, after)
    assert torch.equal(before_draw, torch.get_rng_state())


def test_a_refused_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    before = traces_of(model)
    with pytest.raises(PrivacyError):
        clipped_sum(model, cross_entropy, *rows(), clip_norm=0.3)
    after = traces_of(model)
    before.pop("versions"), after.pop("versions")  # restoring writes; values are what matters
    assert_same_traces(before, after)


class Interrupting(nn.Module):
    """Raises in the middle of the n-th forward or backward pass."""

    def __init__(self) -> None:
        super().__init__()
        # In a function: settings of a model or of an object in it that change make the engine examine it again.
        self.trap: Any = lambda: None
        self.trap.countdown, self.trap.error, self.trap.late = 10**9, KeyboardInterrupt, False

    def tick(self) -> None:
        self.trap.countdown -= 1
        if self.trap.countdown == 0:
            raise self.trap.error("now")

    def forward(self, x: Tensor) -> Tensor:
        if not self.trap.late:
            self.tick()
        elif x.requires_grad:
            x.register_hook(lambda _: self.tick())
        return x * 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
@pytest.mark.parametrize("late", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("moment", [1, 2, 3])
def test_an_interrupted_step_leaves_nothing_for_the_next(error: type[BaseException], late: bool, moment: int) -> None:
    model = model_of_many_kinds().append(Interrupting())
    stop = model[-1].trap
    undisturbed = clipped_sum(model, cross_entropy, *rows(), clip_norm=0.3, microbatch_size=2).gradients
    before = traces_of(model)
    stop.error, stop.late, stop.countdown = error, late, moment
    with pytest.raises(error, match="now"):
        clipped_sum(model, cross_entropy, *rows(), clip_norm=0.3, microbatch_size=2)
    assert_same_traces(before, traces_of(model))
    stop.late = False
    again = clipped_sum(model, cross_entropy, *rows(), clip_norm=0.3, microbatch_size=2).gradients
    assert all(torch.equal(again[name], undisturbed[name]) for name in again)


class BreakingDraw(PaddedDraw):
    """A draw whose data fails after the first piece."""

    def microbatches(self, units: int) -> Iterator[Microbatch]:
        yield next(super().microbatches(units))
        raise OSError("the disk is gone")


def test_a_draw_that_breaks_off_gives_no_sum_and_the_next_draw_is_whole() -> None:
    model = model_of_many_kinds()
    performance = Performance(microbatch_size=2)
    before = traces_of(model)
    with pytest.raises(OSError, match="the disk is gone"):
        clipped_sum_of_batch(model, cross_entropy, BreakingDraw(*rows()), clip_norm=0.3, performance=performance)
    assert_same_traces(before, traces_of(model))
    draw = PaddedDraw(*rows())
    found = clipped_sum_of_batch(model, cross_entropy, draw, clip_norm=0.3, performance=performance).gradients
    assert relative_error(found, clipped_sum(model, cross_entropy, *rows(), clip_norm=0.3).gradients) < 1e-6


def test_a_step_works_where_gradients_are_switched_off() -> None:
    model = model_of_many_kinds()
    with torch.no_grad():
        inside = clipped_sum(model, cross_entropy, *rows(), clip_norm=0.3).gradients
    outside = clipped_sum(model, cross_entropy, *rows(), clip_norm=0.3).gradients
    assert all(torch.equal(inside[name], outside[name]) for name in inside)
    assert not any(part.requires_grad for part in inside.values())


def test_inputs_and_targets_are_not_changed() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).relu_()

    inputs, targets = rows()
    copies = inputs.clone(), targets.clone()
    clipped_sum(Greedy(), cross_entropy, inputs, targets, clip_norm=0.3)
    assert torch.equal(inputs, copies[0])
    assert torch.equal(targets, copies[1])
    assert not inputs.requires_grad


def test_a_layer_whose_input_is_overwritten_later_is_refused_by_name() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1.0
            out = self.first(h)
            h.add_(1.0)
            return self.second(out)

    with pytest.raises(PrivacyError, match=r"the input or output of first \(Linear\) was changed in place"):
        clipped_sum(Overwriting(), cross_entropy, *rows(), clip_norm=0.3)


def test_shared_modules_keep_their_parameters() -> None:
    """``functional_call`` leaves its own tensors behind in a module that it reaches under two names."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b, self.head = nn.Sequential(self.a, nn.Tanh()), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.b(self.a(x)) @ self.a.weight)

    model = Shared()
    before = traces_of(model)
    clipped_sum(model, cross_entropy, *rows(), clip_norm=0.3)
    assert not check_model(model, cross_entropy, *rows())
    reference.clipped_sum_by_func(model, cross_entropy, *rows(), clip_norm=0.3)
    assert_same_traces(before, traces_of(model))


def test_the_plan_of_a_model_does_not_keep_it_alive() -> None:
    import gc
    import weakref

    model = model_of_many_kinds()
    clipped_sum(model, cross_entropy, *rows(), clip_norm=0.3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
