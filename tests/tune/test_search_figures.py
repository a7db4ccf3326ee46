"""Tables and figures of trials: what they show, and what they leave out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dpvision.errors import ArgumentError
from dpvision.tune.search_figures import (
    heat_map,
    importance_chart,
    parallel_coordinates,
    score_over_epsilon,
    write_figures,
)
from dpvision.tune.trial_table import TrialRow, groups_of, importance, ordered_groups, pareto_front


def trials(count: int = 40) -> list[TrialRow]:
    """Trials whose score depends on the rate, a little on the activation, and not on the batch."""
    draw = random.Random(0)
    rows = []
    for number in range(count):
        rate, name = draw.uniform(0, 1), draw.choice(["tanh", "relu"])
        settings: dict[str, Any] = {"rate": rate, "activation": name, "batch": draw.choice([64, 128]), "fixed": 3}
        score = 0.5 + 0.3 * rate + (0.03 if name == "tanh" else 0.0) + draw.gauss(0, 0.01)
        pruned = number % 10 == 9
        state = "pruned" if pruned else "complete"
        rows.append(TrialRow(number, settings, None if pruned else score, draw.choice([1.0, 2.0]), state))
    return rows


def test_importance_orders_settings_by_the_variance_they_explain() -> None:
    shares = importance(trials(200))
    assert list(shares) == ["rate", "activation", "batch"]
    assert shares["rate"] > 0.85
    assert shares["batch"] < 0.05
    assert importance([]) == {}
    equal = [TrialRow(number, {"a": number}, 0.5, 1.0) for number in range(4)]
    assert importance(equal) == {"a": 0.0}


def test_many_numbers_are_grouped_into_intervals_of_equally_many_trials() -> None:
    values = list(range(100))
    groups = groups_of(values, most=4)
    assert [groups.count(group) for group in ordered_groups(values, groups)] == [25, 25, 25, 25]
    assert groups_of([1, 2.5, 1]) == ["1", "2.5", "1"]
    assert ordered_groups([10, 9], groups_of([10, 9])) == ["9", "10"]
    assert groups_of([True, False]) == ["True", "False"]


def test_the_pareto_front_holds_what_no_trial_beats_in_both() -> None:
    rows = [
        TrialRow(0, {}, 0.7, 1.0),
        TrialRow(1, {}, 0.8, 1.0),
        TrialRow(2, {}, 0.75, 2.0),
        TrialRow(3, {}, 0.9, 3.0),
        TrialRow(4, {}, 0.95, 0.5, "failed"),
        TrialRow(5, {}, None, 0.5),
    ]
    assert [row.number for row in pareto_front(rows)] == [1, 3]


def test_a_heat_map_shows_the_two_most_important_settings_and_the_mean_of_each_cell() -> None:
    rows = [TrialRow(n, {"a": n % 2, "b": n // 2 % 2}, 0.5 + 0.1 * (n % 2), 1.0) for n in range(8)]
    axes = heat_map(rows).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("a", "b")
    assert [text.get_text() for text in axes.texts] == ["50.0\nn = 2", "60.0\nn = 2"] * 2
    assert heat_map(rows, x="b").axes[0].get_xlabel() == "b"
    with pytest.raises(ArgumentError, match="got 'c'"):
        heat_map(rows, x="c")


def test_parallel_coordinates_draw_every_trial_and_those_without_a_score_in_grey() -> None:
    rows = trials()
    axes = parallel_coordinates(rows).axes[0]
    lines = [line for line in axes.lines if len(line.get_xdata()) > 2]  # pyright: ignore
    assert len(lines) == len(rows)
    assert sum(line.get_color() == "0.75" for line in lines) == 4
    assert [text.get_text() for text in axes.get_xticklabels()] == [*importance(rows), "score"]


def test_the_chart_over_epsilon_shows_the_price_of_the_search_and_cites_every_paper() -> None:
    papers = [("A. Author 2020", 1.0, 0.7), ("B. Writer 2021", 2.0, 0.8)]
    figure = score_over_epsilon(trials(), published=papers, result=(3.0, 0.9))
    lines, labels = figure.axes[0].get_legend_handles_labels()
    whole = "the release: the whole search"
    assert labels == ["trials", "Pareto front", whole, "A. Author 2020", "B. Writer 2021"]
    assert lines[labels.index(whole)].get_xydata().tolist() == [[3.0, 90.0]]


def test_all_figures_are_written_and_those_without_data_left_out(tmp_path: Path) -> None:
    written = write_figures(trials(), tmp_path / "figures")
    assert len(written) == 8
    assert all(path.stat().st_size > 1000 for path in written)
    alone = [TrialRow(n, {"a": n}, 0.5 + n / 10, None) for n in range(3)]
    names = {path.stem for path in write_figures(alone, tmp_path / "few")}
    assert names == {"parallel-coordinates", "importance"}
    assert write_figures([], tmp_path / "none") == []


@pytest.mark.parametrize("draw", [heat_map, importance_chart, parallel_coordinates, score_over_epsilon])
def test_trials_without_scores_are_refused_in_one_line(draw: Any) -> None:
    with pytest.raises(ArgumentError, match="nothing to draw"):
        draw([TrialRow(0, {"a": 1}, None, 1.0, "failed")])
