"""Rules of thumb: what is chosen when the user leaves things open."""

from __future__ import annotations

from typing import Any

import pytest

from dpvision.config import RunConfig, parse_config
from dpvision.training.defaults import Facts, fill_open_settings, two_digits


def asked(**privacy: Any) -> RunConfig:
    return parse_config({"data": {"source": "scans"}, "privacy": {"target_epsilon": 3.0, **privacy}})


def facts(num_units: int, shape: tuple[int, int, int] = (3, 32, 32)) -> Facts:
    return Facts(num_units=num_units, num_classes=10, image_shape=shape)


@pytest.mark.parametrize(
    ("num_units", "shape", "model"),
    [
        (1500, (3, 32, 32), "scatter_linear"),
        (1500, (3, 33, 33), "shoefit_cnn"),
        (60_000, (1, 28, 28), "shoefit_cnn"),
        (50_000, (3, 32, 32), "scaleresnet9"),
    ],
)
def test_the_model_follows_the_number_of_units_and_the_shape(num_units: int, shape: Any, model: str) -> None:
    filled, choices = fill_open_settings(asked(), facts(num_units, shape))
    assert filled.model is not None
    assert filled.model.name == model
    assert choices[0].setting == "model"


@pytest.mark.parametrize("num_units", [3, 40, 1437, 20_000, 60_000, 1_300_000])
def test_nothing_but_the_noise_stays_open_and_the_rate_is_a_rate(num_units: int) -> None:
    filled, choices = fill_open_settings(asked(), facts(num_units))
    privacy = filled.privacy
    assert privacy.num_units is not None
    assert privacy.expected_batch_size is not None
    assert 0 < privacy.expected_batch_size <= max(1, privacy.num_units / 2)
    assert privacy.delta is not None
    assert privacy.delta < 1 / privacy.num_units
    assert privacy.steps is not None
    assert 50 <= privacy.steps <= 2000
    assert privacy.noise_multiplier is None
    assert {"num_units", "delta", "steps", "clip_norm"} <= {choice.setting for choice in choices}


def test_what_the_user_gave_is_kept() -> None:
    given = asked(delta=1e-6, num_units=999, expected_batch_size=10.0, steps=7, clip_norm=0.9)
    filled, choices = fill_open_settings(given, facts(1500))
    assert filled.privacy == given.privacy
    assert not {"delta", "num_units", "steps", "clip_norm"} & {choice.setting for choice in choices}


@pytest.mark.parametrize(
    ("count", "rounded"), [(1, 1), (99, 99), (1437, 1400), (1438, 1400), (60_000, 60_000), (996, 1000)]
)
def test_a_number_read_off_the_data_is_rounded_to_two_digits(count: int, rounded: int) -> None:
    assert two_digits(count) == rounded
