"""Settings, schedules and averages against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from dpvision.config import AveragingSettings, OptimizerSettings, ScheduleSettings
from dpvision.errors import ArgumentError
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.schedules import Schedule
from optim_cases import (
    AVERAGES,
    OPTIMIZERS,
    SCHEDULES,
    SGD,
    Net,
    door,
    private_grad,
    trainable,
)


@pytest.mark.parametrize(
    ("settings", "kwargs", "message"),
    [
        (OptimizerSettings, {"learning_rate": 0}, "greater than 0"),
        (OptimizerSettings, {"learning_rate": math.nan}, "finite"),
        (OptimizerSettings, {"learning_rate": math.inf}, "finite"),
        (OptimizerSettings, {"learning_rate": 1, "momentum": 1.0}, "less than 1"),
        (OptimizerSettings, {"learning_rate": 1, "momentun": 0.9}, "Extra inputs"),
        (OptimizerSettings, {"learning_rate": 1, "name": "lion"}, "'sgd'"),
        (OptimizerSettings, {"learning_rate": 1, "name": "adam", "momentum": 0.9}, "adam does not use momentum=0.9"),
        (OptimizerSettings, {"learning_rate": 1, "betas": (0.5, 0.5), "centered": True}, "sgd does not use betas="),
        (OptimizerSettings, {"learning_rate": 1, "name": "adamw", "nesterov": True}, "does not use nesterov=True"),
        (OptimizerSettings, {"learning_rate": 1, "nesterov": True}, "nesterov needs momentum > 0"),
        (OptimizerSettings, {"learning_rate": 1, "weight_decay": -1}, "greater than or equal to 0"),
        (ScheduleSettings, {"kind": "step"}, "needs every_steps"),
        (ScheduleSettings, {"kind": "step", "every_steps": 0}, "greater than or equal to 1"),
        (ScheduleSettings, {"kind": "cosine", "factor": 0.5}, "cosine does not use factor=0.5"),
        (ScheduleSettings, {"warmup_steps": 1.5}, "valid integer"),
        (ScheduleSettings, {"warmup_steps": -1}, "greater than or equal to 0"),
        (ScheduleSettings, {"kind": "plateau"}, "public_metric=true"),
        (ScheduleSettings, {"kind": "constant", "public_metric": True}, "does not use public_metric"),
        (AveragingSettings, {"kind": "ema", "decay": 1.0}, "less than 1"),
        (AveragingSettings, {"kind": "polyak", "decay": 0.5}, "averaging polyak does not use decay=0.5"),
        (AveragingSettings, {"start_step": 3}, "averaging none does not use start_step=3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**kwargs)


def test_settings_survive_json_and_are_frozen() -> None:
    for settings in (
        *(OptimizerSettings(learning_rate=0.1, **kwargs) for kwargs in OPTIMIZERS),
        *(ScheduleSettings(**kwargs) for kwargs in SCHEDULES),
        *(AveragingSettings(**kwargs) for kwargs in AVERAGES),
    ):
        assert type(settings).model_validate_json(settings.model_dump_json()) == settings
    with pytest.raises(ValidationError, match="frozen"):
        SGD.learning_rate = 1.0  # type: ignore[misc]


def rates(steps: int = 10, **kwargs: Any) -> list[float]:
    schedule = Schedule(ScheduleSettings(**kwargs), base_rate=2.0, total_steps=steps)
    return [schedule.learning_rate(step) for step in range(steps)]


def test_constant_step_and_warmup_rates_by_hand() -> None:
    assert rates(3) == [2.0, 2.0, 2.0]
    assert rates(5, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates(7, kind="step", every_steps=3, factor=0.5) == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.5]
    assert rates(4, kind="step", every_steps=2, factor=0.5, warmup_steps=2) == [1.0, 2.0, 1.0, 1.0]


def test_cosine_rates_by_hand() -> None:
    half = math.sqrt(0.5)
    expected = [2.0, 1 + half, 1.0, 1 - half]
    assert rates(4, kind="cosine") == pytest.approx(expected)
    assert rates(6, kind="cosine", warmup_steps=2) == pytest.approx([1.0, 2.0, *expected[0:4]])
    assert rates(4, kind="cosine", final_fraction=0.5)[2] == pytest.approx(1.5)
    beyond = Schedule(ScheduleSettings(kind="cosine", final_fraction=0.25), base_rate=2.0, total_steps=4)
    assert beyond.learning_rate(4) == beyond.learning_rate(400) == 0.5
    assert rates(2, kind="cosine", warmup_steps=5) == pytest.approx([0.4, 0.8])


@pytest.mark.parametrize("goal", ["min", "max"])
def test_plateau_reduces_as_torchs_own(goal: str) -> None:
    values = [1.0, 0.9, 0.95, 0.9, 0.9, 0.89999, 0.5, 0.6, 0.7, 0.8, 0.4, 1.0, 1.2, 1.1, 1.1, 1.1, 1.19]
    parameter = nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([parameter], lr=2.0)
    torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(plain, mode=goal, factor=0.5, patience=2)  # type: ignore[arg-type]
    settings = ScheduleSettings(kind="plateau", public_metric=True, factor=0.5, patience=2, goal=goal)  # type: ignore[arg-type]
    ours = Schedule(settings, base_rate=2.0, total_steps=100)
    for step, value in enumerate(values):
        torchs.step(value)
        ours.report_public_metric(value)
        assert ours.learning_rate(step) == pytest.approx(plain.param_groups[0]["lr"])
    assert ours.learning_rate(0) < 2.0


def test_a_metric_that_is_not_a_number_is_no_improvement() -> None:
    schedule = Schedule(ScheduleSettings(kind="plateau", public_metric=True, patience=1), base_rate=1.0, total_steps=9)
    for value in (math.nan, math.nan):
        schedule.report_public_metric(value)
    assert schedule.learning_rate(0) == 0.1
    json.dumps(schedule.state(), allow_nan=False)


def test_schedules_without_a_declared_metric_ignore_it() -> None:
    for kwargs in SCHEDULES[:3]:
        optimizer = door(Net(), schedule=ScheduleSettings(**kwargs))
        before = [optimizer.learning_rate(step) for step in range(10)]
        for value in (1.0, 2.0, 3.0):
            optimizer.report_public_metric(value)
        assert [optimizer.learning_rate(step) for step in range(10)] == before
        assert optimizer.state()[1] == door(Net(), schedule=ScheduleSettings(**kwargs)).state()[1]


def test_nonsense_steps_and_totals_are_refused() -> None:
    for step in (-1, 0.5, True):
        with pytest.raises(ArgumentError, match="whole number >= 0"):
            door(Net()).learning_rate(step)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="total_steps"):
        Optimizer(Net(), settings=SGD, total_steps=0, private=True)


def follow(averaging: AveragingSettings, steps: int) -> tuple[list[Tensor], dict[str, Tensor] | None]:
    model = Net(dtype=torch.float64)
    optimizer = door(model, averaging=averaging)
    path = [model.first.weight.detach().clone()]
    for step in range(steps):
        optimizer.step(private_grad(model, step))
        path.append(model.first.weight.detach().clone())
    return path, optimizer.averaged_parameters()


@pytest.mark.parametrize(("decay", "steps"), [(0.9999, 9), (0.3, 9), (0.3, 1)])
def test_ema_equals_a_direct_loop_with_the_warm_up_of_de_et_al(decay: float, steps: int) -> None:
    path, averaged = follow(AveragingSettings(kind="ema", decay=decay), steps)
    expected = path[0]
    for update, weight in enumerate(path[1:]):
        share = min(decay, (1 + update) / (10 + update))
        expected = share * expected + (1 - share) * weight
    assert averaged is not None
    torch.testing.assert_close(averaged["first.weight"], expected, rtol=1e-12, atol=1e-12)


def test_averages_start_where_they_are_told() -> None:
    for kind in ("ema", "polyak"):
        path, averaged = follow(AveragingSettings(kind=kind, start_step=5), 5)  # type: ignore[arg-type]
        assert averaged is not None
        assert torch.equal(averaged["first.weight"], path[-1])  # a plain copy until then
    path, averaged = follow(AveragingSettings(kind="ema", start_step=2), 4)
    first = 0.1 * path[2] + 0.9 * path[3]
    assert averaged is not None
    torch.testing.assert_close(averaged["first.weight"], 2 / 11 * first + 9 / 11 * path[4], rtol=1e-12, atol=1e-12)


def test_polyak_is_the_plain_mean_of_what_the_steps_left() -> None:
    path, averaged = follow(AveragingSettings(kind="polyak", start_step=3), 9)
    assert averaged is not None
    torch.testing.assert_close(averaged["first.weight"], torch.stack(path[4:]).mean(0), rtol=1e-12, atol=1e-12)


def test_averages_name_the_trainable_parameters_and_are_copies() -> None:
    model = Net()
    optimizer = door(model, averaging=AveragingSettings(kind="ema"))
    averaged = optimizer.averaged_parameters()
    assert averaged is not None
    assert averaged.keys() == trainable(model).keys()
    averaged["gain"].add_(1)
    assert optimizer.averaged_parameters()["gain"] != averaged["gain"]  # type: ignore[index]
    assert door(Net()).averaged_parameters() is None
