"""Ready-made searches: each is a search that can be asked for, over the values that its paper names."""

from __future__ import annotations

import pytest

from dpvision import models
from dpvision.errors import ArgumentError
from dpvision.tune.ready_made import READY_MADE, ready_made
from dpvision.tune.search_plan import parse_settings


@pytest.mark.parametrize("name", READY_MADE)
def test_every_ready_made_search_has_settings_and_a_space_in_order(name: str) -> None:
    settings = parse_settings(ready_made(name))
    assert settings.parsed_space().texts


def test_the_study_of_components_is_the_papers() -> None:
    settings = parse_settings(ready_made("component_study"))
    assert (settings.sampler, settings.trials, settings.pruner) == ("tpe", 15, "patience")
    assert settings.parsed_space().texts == {
        "privacy.clip_norm": "float:0.1:10",
        "privacy.epochs": "choice:15,30",
    }


def test_groups_by_stage_are_four_choices_and_the_largest_is_a_network() -> None:
    space = ready_made("group_sizes_by_stage")["space"]
    assert list(space) == [f"option.groups.{stage}" for stage in range(1, 5)]
    assert set(space.values()) == {"choice:32,8,16,64,2048"}
    assert models.count_parameters("resnet9", groups="8,16,32,2048") == 2_447_946


def test_an_unknown_search_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="no ready-made search 'group_size'") as caught:
        ready_made("group_size")
    assert "group_sizes" in str(caught.value)
