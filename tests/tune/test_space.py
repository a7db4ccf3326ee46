"""A search space is read from text, and what is wrong with it is said in one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dpvision.errors import ArgumentError
from dpvision.tune.space import absolute_space, check_space, parse_space, read_space, with_settings
from tiny_searches import search_config


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({}, "at least one setting"),
        ({"learning_rat": "log:0.1:1"}, "learning_rate"),
        ({"num_units": "int:1:9"}, "not a setting that can be searched"),
        ({"delta": "log:1e-6:1e-3"}, "not a setting that can be searched"),
        ({"noise_multiplier": "log:1:2"}, "not a setting that can be searched"),
        ({"data.source": "choice:a,b"}, "not a setting that can be searched"),
        ({"clip_norm": "log:2:1"}, "empty"),
        ({"clip_norm": "log:1:1"}, "empty"),
        ({"clip_norm": "log:0:1"}, "above 0"),
        ({"clip_norm": "log:1"}, "log:LOW:HIGH"),
        ({"clip_norm": "log:1:nan"}, "log:LOW:HIGH"),
        ({"clip_norm": "normal:1:2"}, "must begin with"),
        ({"steps": "int:1.5:3"}, "whole numbers"),
        ({"option.groups": "choice:"}, "different values"),
        ({"steps": "int:1:5", "epochs": "int:1:5"}, "exclude each other"),
        ({"learning_rate": "log:0.1:1", "optimizer.learning_rate": "log:0.1:1"}, "twice"),
        ({"momentum": "float:0:0.9:1"}, "2 to 64"),
        ({"option.groups.1": "choice:8,16", "option.groups.3": "choice:8,16"}, "every stage"),
        ({"option.groups.1": "choice:8,16", "option.groups": "choice:8,16"}, "every stage"),
        ({"option.groups.0": "choice:8,16"}, "from 1 on"),
        ({"option.": "choice:8,16"}, "option.NAME"),
        ({"transfer.source": "choice:a,b"}, "not a setting that can be searched"),
    ],
)
def test_a_wrong_space_is_refused_with_its_reason(texts: dict[str, str], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        parse_space(texts)


def test_a_value_that_the_configuration_refuses_is_refused_before_the_search(tmp_path: Path) -> None:
    space = parse_space({"momentum": "float:0:1.5"})
    with pytest.raises(ArgumentError, match="momentum"):
        check_space(search_config(tmp_path / "x.npz"), space)


def test_draws_lie_in_their_range_and_log_draws_are_uniform_in_log() -> None:
    space = parse_space({"learning_rate": "log:0.01:4", "steps": "int:2:5", "optimizer.name": "choice:sgd,adam"})
    drawn = [space.drawn([i / 1000, i / 1000, i / 1000]) for i in range(1000)]
    rates = [float(each["optimizer.learning_rate"]) for each in drawn]
    assert min(rates) >= 0.01
    assert max(rates) <= 4
    assert math.isclose(rates[500], math.sqrt(0.01 * 4), rel_tol=1e-9)
    assert [[each["privacy.steps"] for each in drawn].count(n) for n in (2, 3, 4, 5)] == [250] * 4
    assert [each["optimizer.name"] for each in drawn].count("sgd") == 500


def test_a_range_in_units_of_the_default_becomes_a_range_of_values(tmp_path: Path) -> None:
    space = parse_space({"learning_rate": "times:0.1:10:3", "clip_norm": "log:0.5:2"})
    defaults = with_settings(search_config(tmp_path / "x.npz"), {"learning_rate": 2.0})
    texts = absolute_space(space, defaults)
    assert texts == {"optimizer.learning_rate": "log:0.2:20:3", "privacy.clip_norm": "log:0.5:2"}


def test_a_grid_has_every_combination_with_both_ends() -> None:
    grid = parse_space({"learning_rate": "log:0.1:10:3", "steps": "int:1:4:2"}).grid()
    assert [each["privacy.steps"] for each in grid] == [1, 4] * 3
    assert [round(float(each["optimizer.learning_rate"]), 9) for each in grid[::2]] == [0.1, 1.0, 10.0]


def test_settings_enter_the_configuration_and_epochs_replace_steps(tmp_path: Path) -> None:
    base = search_config(tmp_path / "x.npz")
    config = with_settings(base, {"learning_rate": 0.3, "epochs": 4, "option.image_size": 16})
    assert config.optimizer is not None
    assert config.model is not None
    assert (config.optimizer.learning_rate, config.privacy.epochs, config.privacy.steps) == (0.3, 4, None)
    assert config.model.options == {"image_size": 16}


def test_an_option_by_stage_becomes_one_text(tmp_path: Path) -> None:
    space = parse_space({f"option.groups.{stage}": "choice:8,16" for stage in (2, 1, 3)})
    assert space.points == 8
    settings = {"option.groups.2": 16, "option.groups.1": 8, "option.groups.3": 32}
    assert set(settings) == {dimension.name for dimension in space.dimensions}
    config = with_settings(search_config(tmp_path / "x.npz"), settings)
    assert config.model is not None
    assert config.model.options["groups"] == "8,16,32"


def test_only_batch_steps_and_epochs_change_what_a_trial_costs() -> None:
    assert parse_space({"epochs": "int:1:5"}).changes_cost
    assert parse_space({"expected_batch_size": "int:16:64"}).changes_cost
    assert not parse_space({"clip_norm": "log:0.1:1", "learning_rate": "log:0.1:1"}).changes_cost


def test_a_space_is_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text('[space]\nlearning_rate = "log:0.1:1"\noptimizer.name = ["sgd", "adam"]\n')
    assert parse_space(read_space(file)).texts == {
        "optimizer.learning_rate": "log:0.1:1",
        "optimizer.name": "choice:sgd,adam",
    }
    file.write_text("[other]\n")
    with pytest.raises(ArgumentError, match=r"\[space\]"):
        read_space(file)
