"""PITFALLS 18: nothing but the optimizer's step moves the model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dpvision.errors import PrivacyError
from optim_cases import (
    Net,
    assert_equal_bits,
    door,
    private_grad,
    weights,
)


def set_by_data(model: Net) -> None:
    model.first.weight.data[1, 2] += 1e-7


def set_by_numpy(model: Net) -> None:
    model.first.weight.detach().numpy()[1, 2] = 3.0


def flip_two_signs(model: Net) -> None:
    model.first.weight.data.view(-1)[[1, 3]] *= -1


def swap(model: Net) -> None:
    flat = model.first.weight.data.view(-1)
    flat[[0, 5]] = flat[[5, 0]]


def replace_parameter(model: Net) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())


def replace_data(model: Net) -> None:
    model.first.weight.data = torch.zeros(4, 4)


def load_others(model: Net) -> None:
    model.first.load_state_dict(nn.Linear(4, 4).state_dict())


def turn_to_double(model: Net) -> None:
    model.first.double()


def foreign_optimizer(model: Net) -> None:
    model.first.weight.grad = torch.ones(4, 4)
    torch.optim.SGD([model.first.weight], lr=0.1).step()
    model.first.weight.grad = None


EDITS: list[Callable[[Net], None]] = [
    set_by_data,
    set_by_numpy,
    flip_two_signs,
    swap,
    replace_parameter,
    replace_data,
    load_others,
    turn_to_double,
    foreign_optimizer,
]


@pytest.mark.parametrize("edit", EDITS)
def test_a_parameter_moved_by_other_means_is_named_before_the_next_step(edit: Callable[[Net], None]) -> None:
    model = Net()
    optimizer = door(model)
    optimizer.step(private_grad(model, 0))
    optimizer.check_untouched()
    next_grad = private_grad(model, 1)
    edit(model)
    with pytest.raises(PrivacyError, match=r"moved by other means than an optimizer step: .*first\.weight"):
        optimizer.check_untouched()
    if edit not in (turn_to_double, replace_parameter):
        before = weights(model)
        with pytest.raises(PrivacyError, match="moved by other means"):
            optimizer.step(next_grad)
        assert_equal_bits(weights(model), before)
        assert optimizer.steps_taken == 1


def test_edits_before_the_first_step_of_frozen_parameters_and_of_saved_buffers_are_seen() -> None:
    for name in ("first.weight", "frozen.bias", "gain", "constant"):
        model = Net()
        optimizer = door(model)
        dict(model.state_dict(keep_vars=True))[name].data.add_(1e-6)
        with pytest.raises(PrivacyError, match=f"optimizer step: {name}. "):
            optimizer.check_untouched()


class Remembering(nn.Linear):
    """A layer whose state dict has more than parameters and buffers, and a weight other than its own."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.seen, self.shift = torch.zeros(3), 0.0
        self.register_state_dict_post_hook(self._add_shift)

    @staticmethod
    def _add_shift(module: nn.Module, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
        if module.shift:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] + module.shift

    def get_extra_state(self) -> torch.Tensor:
        return self.seen

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = state


@pytest.mark.parametrize(
    ("attribute", "value", "named"),
    [("seen", torch.ones(3), "frozen._extra_state"), ("shift", 1.0, "frozen.weight in its state_dict")],
)
def test_whatever_the_state_dict_would_release_is_watched(attribute: str, value: object, named: str) -> None:
    model = Net()
    model.frozen = Remembering().requires_grad_(False)
    optimizer = door(model)
    optimizer.step(private_grad(model, 0))
    optimizer.check_untouched()
    setattr(model.frozen, attribute, value)
    with pytest.raises(PrivacyError, match=f"optimizer step: {named}. "):
        optimizer.check_untouched()


def test_an_added_or_removed_parameter_is_seen() -> None:
    model = Net()
    optimizer = door(model)
    model.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(PrivacyError, match="extra"):
        optimizer.check_untouched()
    del model.extra, model.gain
    with pytest.raises(PrivacyError, match="gain"):
        optimizer.check_untouched()


def test_negative_zero_and_nan_are_compared_by_their_bits() -> None:
    model = nn.Linear(2, 1)
    model.weight.data = torch.tensor([[0.0, math.nan]])
    optimizer = door(model)
    optimizer.check_untouched()
    model.weight.data[0, 0] = -0.0
    with pytest.raises(PrivacyError, match="weight"):
        optimizer.check_untouched()


def test_reading_training_mode_and_unsaved_buffers_raise_no_alarm() -> None:
    model = Net()
    optimizer = door(model)
    optimizer.step(private_grad(model, 0))
    model.scratch += 1
    model.eval()
    model.first(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    optimizer.check_untouched()


def test_moving_statistics_are_refused_in_private_training_and_allowed_without() -> None:
    for private in (True, False):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = door(model, private=private)
        model(torch.randn(8, 4))
        if private:
            with pytest.raises(PrivacyError, match=r"1\.running_mean, 1\.running_var, 1\.num_batches_tracked"):
                optimizer.check_untouched()
        else:
            optimizer.check_untouched()
