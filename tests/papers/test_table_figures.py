"""The figures of tables: curves, accuracy over a setting, heat maps, each with the paper's and other works' points."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpvision.analyze.figures import write_chart
from dpvision.papers.reproduce import CurvePoint, RowResult, RunResult
from dpvision.papers.table_figures import table_chart
from dpvision.papers.tables import Kind, Plot, Row, Table, all_tables, find_table

TANH, RELU = "mnist-shoefit-tanh", "mnist-shoefit-relu"
CURVE = (CurvePoint(1.0, 0.5, 60.0), CurvePoint(2.0, 1.0, 70.0))


def run(accuracy: float, *, repeat: int = 1, noise: float | None = 1.5, shift: float = 0.0) -> RunResult:
    curve = tuple(replace(point, accuracy=point.accuracy + shift) for point in CURVE)
    certificate = {"epsilon": 1.0, "mechanism": None if noise is None else {"noise_multiplier": noise}}
    return RunResult(repeat=repeat, run="r", accuracy=accuracy, top5=None, certificate=certificate, curve=curve)


def table(kind: Kind, *, published: tuple[tuple[str, float, float], ...] = ()) -> Table:
    rows = (Row("tanh", TANH, "tanh", 4.0), Row("relu", RELU, "relu", 8.0))
    plot = Plot(kind=kind, x="filters", series="activation", published=published)
    return Table(name="t", title="A title", rows=rows, plot=plot)


def results(found: Table, *, noise: float | None = 1.5) -> list[RowResult]:
    first, second = found.rows
    runs = (run(70.0, noise=noise), run(74.0, repeat=2, noise=noise, shift=10.0))
    return [RowResult(row=first, runs=runs), RowResult(row=second, runs=(run(50.0, noise=noise),))]


def points(found: Table, given: list[RowResult], folder: Path) -> list[dict[str, str]]:
    chart = table_chart(found, given)
    assert chart is not None
    names = [path.name for path in write_chart(folder, chart)]
    assert names == [f"figure.{kind}" for kind in ("png", "svg", "csv", "json")]
    assert json.loads((folder / "figure.json").read_text())["rows"]
    with (folder / "figure.csv").open() as file:
        return list(csv.DictReader(file))


def test_accuracy_over_a_setting_has_a_line_a_series_the_papers_and_other_works(tmp_path: Path) -> None:
    found = table("over", published=(("Abadi et al. 2016", 2.0, 67.0),))
    rows = [tuple(row.values()) for row in points(found, results(found), tmp_path)]
    assert rows == [
        ("tanh", "4.0", "72.0"),
        ("relu", "8.0", "50.0"),
        ("paper: tanh", "4.0", "98.1"),
        ("paper: relu", "8.0", "96.6"),
        ("Abadi et al. 2016", "2.0", "67.0"),
    ]


@pytest.mark.parametrize(("kind", "x"), [("epochs", ("1.0", "2.0")), ("epsilon", ("0.5", "1.0"))])
def test_curves_are_the_mean_over_the_runs_of_a_row(kind: Kind, x: tuple[str, str], tmp_path: Path) -> None:
    found = table(kind)
    rows = [tuple(row.values()) for row in points(found, results(found), tmp_path)]
    assert rows == [("tanh", x[0], "65.0"), ("tanh", x[1], "75.0"), ("relu", x[0], "60.0"), ("relu", x[1], "70.0")]


def test_runs_without_privacy_have_no_curve_over_epsilon_and_no_noise() -> None:
    found = table("epsilon")
    curve = tuple(replace(point, epsilon=None) for point in CURVE)
    plain = [RowResult(row=row, runs=(replace(run(50.0), curve=curve),)) for row in found.rows]
    assert table_chart(found, plain) is None
    noisy = table("noise")
    assert table_chart(noisy, results(noisy, noise=None)) is None


def test_the_best_setting_of_each_line_is_stated(tmp_path: Path) -> None:
    found = replace(table("over"), rows=(Row("a", TANH, "one", 4.0), Row("b", RELU, "one", 8.0)))
    points(found, results(found), tmp_path)
    best = json.loads((tmp_path / "figure.json").read_text())["best_x"]
    assert best == {"one": 4.0, "paper: one": 4.0}


def test_accuracy_over_the_noise_of_the_runs(tmp_path: Path) -> None:
    found = table("noise")
    rows = [tuple(row.values()) for row in points(found, results(found, noise=2.5), tmp_path)]
    assert rows == [("tanh", "2.5", "72.0"), ("relu", "2.5", "50.0")]


def test_a_heat_map_has_a_cell_a_row(tmp_path: Path) -> None:
    found = table("heat")
    rows = [tuple(row.values()) for row in points(found, results(found), tmp_path)]
    assert rows == [("tanh", "4", "72.0"), ("relu", "8", "50.0")]


def test_there_is_no_figure_without_runs_or_without_a_plot() -> None:
    found = table("over")
    assert table_chart(found, [RowResult(row=row) for row in found.rows]) is None
    assert table_chart(replace(found, plot=None), results(found)) is None


@pytest.mark.parametrize("found", [t for t in all_tables() if t.plot is not None], ids=lambda t: t.name)
def test_every_row_of_a_table_with_a_figure_has_a_place_in_it(found: Table) -> None:
    assert found.plot is not None
    if found.plot.kind in ("epochs", "epsilon"):
        assert len({row.series for row in found.rows}) == len(found.rows)
        return
    places: list[tuple[Any, ...]] = [(row.series, row.x) for row in found.rows]
    assert all(row.x is not None for row in found.rows)
    assert len(set(places)) == len(places), "two rows at one place"


def test_the_figures_of_the_papers_are_there() -> None:
    kinds = {table.name: table.plot.kind for table in all_tables() if table.plot is not None}
    assert kinds["scalenorm-figure3.3"] == "epochs"
    assert kinds["shoefit-activation"] == "epsilon"
    assert kinds["batch-lr-grid"] == "heat"
    assert (kinds["de-noise"], kinds["de-compute"]) == ("noise", "over")
    plot = find_table("smoothnet-figure2").plot
    assert plot is not None
    assert {name for name, _, _ in plot.published} >= {"De et al. 2022", "Papernot et al. 2020"}
