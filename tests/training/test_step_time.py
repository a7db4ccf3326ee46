"""The measured time of a private step is that of real steps, on synthetic images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.mechanism import Mechanism
from dpvision.training import step_time
from dpvision.training.step_time import StepTime, measure_step


def small_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def test_a_model_is_measured_by_private_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "LARGEST_BATCH", 32)
    model = small_model()
    before = [parameter.clone() for parameter in model.parameters()]
    found = measure_step(model, image_shape=(1, 4, 4), num_classes=3, views=2)
    assert found.largest_batch == 32
    assert found.parameters == 51
    assert found.threads == torch.get_num_threads()
    assert found.seconds_fixed >= 0
    assert found.seconds_per_unit >= 0
    assert found.seconds_fixed + found.seconds_per_unit > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_time_of_a_plan_is_a_line_over_the_batch() -> None:
    pace = StepTime(seconds_fixed=0.5, seconds_per_unit=0.01, largest_batch=8, parameters=1, threads=1, native=False)
    mechanism = Mechanism(num_units=1000, expected_batch_size=50, clip_norm=1.0, noise_multiplier=1.0, steps=20)
    assert pace.seconds(mechanism) == pytest.approx(20 * (0.5 + 0.01 * 50))


def test_a_model_that_mixes_units_is_not_measured() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    with pytest.raises(PrivacyError):
        measure_step(model, image_shape=(1, 4, 4), num_classes=3)


def test_a_model_without_scores_is_refused_in_one_line() -> None:
    with pytest.raises(ArgumentError, match="the step can't be measured"):
        measure_step(small_model(), image_shape=(1, 4, 4), num_classes=7)
