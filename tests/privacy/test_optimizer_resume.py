"""A resumed run continues bit for bit, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpvision.config import AveragingSettings, OptimizerSettings, ScheduleSettings
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.optimizer import Optimizer
from optim_cases import (
    AVERAGES,
    OPTIMIZERS,
    SCHEDULES,
    Net,
    assert_equal_bits,
    door,
    private_grad,
    weights,
)


def run(optimizer: Optimizer, model: Net, start: int, stop: int) -> None:
    for step in range(start, stop):
        optimizer.step(private_grad(model, step))
        if optimizer._schedule._settings.kind == "plateau":
            optimizer.report_public_metric([0.5, 0.6, 0.4, 0.5, 0.55, 0.3, 0.7, 0.1][step])


def settings_of(rule: dict[str, Any], schedule: dict[str, Any], averaging: dict[str, Any]) -> dict[str, Any]:
    return {
        "settings": OptimizerSettings(learning_rate=0.05, **rule),
        "schedule": ScheduleSettings(**schedule),
        "averaging": AveragingSettings(**averaging),
    }


@pytest.mark.parametrize("averaging", AVERAGES, ids=lambda value: value["kind"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda value: value["kind"])
@pytest.mark.parametrize("rule", OPTIMIZERS, ids=lambda value: "-".join(map(str, value.values())))
def test_interrupted_run_equals_uninterrupted_run(
    rule: dict[str, Any], schedule: dict[str, Any], averaging: dict[str, Any], tmp_path: Path
) -> None:
    chosen = settings_of(rule, schedule, averaging)
    model = Net()
    whole = door(model, **chosen)
    run(whole, model, 0, 8)
    for stop in (0, 1, 4):
        first = Net()
        optimizer = door(first, **chosen)
        run(optimizer, first, 0, stop)
        tensors, values = optimizer.state()
        save_file(tensors, tmp_path / "state.safetensors")
        text = json.dumps(values, allow_nan=False)
        second = Net()
        second.load_state_dict(weights(first))
        resumed = door(second, **chosen)
        resumed.load_state(load_file(tmp_path / "state.safetensors"), json.loads(text))
        assert resumed.steps_taken == stop
        run(resumed, second, stop, 8)
        assert_equal_bits(weights(second), weights(model))
        assert_equal_bits(resumed.averaged_parameters() or {}, whole.averaged_parameters() or {})
        assert_equal_bits(resumed.state()[0], whole.state()[0])
        assert resumed.state()[1] == whole.state()[1]


def test_resume_is_exact_in_float64_too() -> None:
    for rule in OPTIMIZERS:
        settings = OptimizerSettings(learning_rate=0.05, **rule)
        model, second = Net(dtype=torch.float64), Net(dtype=torch.float64)
        optimizer = door(model, settings=settings)
        run(optimizer, model, 0, 3)
        second.load_state_dict(weights(model))
        resumed = door(second, settings=settings)
        resumed.load_state(*optimizer.state())
        run(optimizer, model, 3, 6)
        run(resumed, second, 3, 6)
        assert_equal_bits(weights(second), weights(model))


def saved_adam() -> tuple[Net, dict[str, Tensor], dict[str, Any]]:
    model = Net()
    optimizer = door(model, settings=OptimizerSettings(name="adam", learning_rate=0.1))
    run(optimizer, model, 0, 2)
    return model, *optimizer.state()


def test_a_saved_state_is_a_copy() -> None:
    model = Net()
    optimizer = door(
        model, averaging=AveragingSettings(kind="ema"), settings=OptimizerSettings(name="adam", learning_rate=1)
    )
    run(optimizer, model, 0, 1)
    tensors, _ = optimizer.state()
    copies = {name: value.clone() for name, value in tensors.items()}
    run(optimizer, model, 1, 3)
    assert_equal_bits(tensors, copies)


def test_a_state_loaded_onto_other_weights_is_refused() -> None:
    _, tensors, values = saved_adam()
    model = Net()
    optimizer = door(model, settings=OptimizerSettings(name="adam", learning_rate=0.1))
    with pytest.raises(PrivacyError, match=r"not what the saved step left: gain, first\.weight, first\.bias\. Load"):
        optimizer.load_state(tensors, values)
    assert optimizer.steps_taken == 0


def test_weights_that_moved_between_save_and_load_are_named() -> None:
    for name in ("gain", "frozen.weight", "constant"):
        model, tensors, values = saved_adam()
        dict(model.state_dict(keep_vars=True))[name].data.mul_(1.001)
        with pytest.raises(PrivacyError, match=f"saved step left: {name}. Load"):
            door(model, settings=OptimizerSettings(name="adam", learning_rate=0.1)).load_state(tensors, values)


def test_a_state_that_does_not_fit_is_refused() -> None:
    model, tensors, values = saved_adam()
    adam = OptimizerSettings(name="adam", learning_rate=0.1)
    with pytest.raises(ArgumentError, match="the saved state is of adam, but the optimizer is sgd"):
        door(model).load_state(tensors, values)
    with pytest.raises(ArgumentError, match="average/gain"):
        door(model, settings=adam, averaging=AveragingSettings(kind="ema")).load_state(tensors, values)
    name = "optimizer/exp_avg/first.weight"
    for wrong in (
        {key: value for key, value in tensors.items() if key != name},
        {**tensors, name: torch.zeros(3)},
        {**{key: value for key, value in tensors.items() if key != name}, name + "x": tensors[name]},
    ):
        with pytest.raises(ArgumentError, match=f"{name}.* missing, unknown or of another shape"):
            door(model, settings=adam).load_state(wrong, values)
