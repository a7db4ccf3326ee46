"""``dpvision reproduce``: rows become runs, runs become figures, and nothing is lost, invented or counted twice."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dpvision.cli import app
from dpvision.errors import ArgumentError, DPVisionError
from dpvision.papers import all_recipes, find_recipe
from dpvision.papers import reproduce as job
from dpvision.papers.reproduce import Failure, RowResult, RunResult, reproduce
from dpvision.papers.table_cost import released_together
from dpvision.papers.table_page import draw_table, markdown
from dpvision.papers.tables import Row, Table, all_tables, find_table
from dpvision.release.composition import Bill
from dpvision.training.callbacks import RunCallback, StopRequest
from reproduce_runs import RELU, STEP, TANH, TWO, quick, spend

WANTED = (
    "shoefit-table5",
    "scalenorm-table1",
    "groups-table5.3",
    "groups-tableA.1",
    "groups-tableA.2",
    "scalenorm-paper",
    "scalenorm-wide",
    "shoefit-summary",
    "smoothnet-table1",
    "smoothnet-figure2",
    "smoothnet-ratio",
    "de-nfnet",
    "de-places",
    "de-compute",
    "smoothnet-table2",
    "de-ablation",
    "transfer-table5.5",
    "shoefit-transfer",
    "epochs-table5.1",
    "scalenorm-table6.1",
    "activation-table5.2",
    "batch-lr-grid",
    "shoefit-capacity",
    "shoefit-activation",
    "shoefit-adam",
    "meanvar",
    "smoothnet-components",
)


def dpvision(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)])


def figures(accuracy: float, *, repeat: int = 1) -> RunResult:
    certificate = {"epsilon": 2.0, "delta": 1e-5, "steps_taken": 50, "for_release": True, "stamps": []}
    return RunResult(repeat=repeat, run=f"runs/{repeat}", accuracy=accuracy, top5=None, certificate=certificate)


@pytest.mark.parametrize("name", WANTED)
def test_every_table_exists_and_its_rows_are_recipes(name: str) -> None:
    rows = find_table(name).rows
    assert len(rows) >= 2
    assert len({row.label for row in rows}) == len(rows)
    assert len({row.name for row in rows}) == len(rows)
    assert {row.name for row in rows} <= {recipe.name for recipe in all_recipes()}


def test_the_docs_name_every_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "reproduce.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == {table.name for table in all_tables()}


@pytest.mark.parametrize("table", all_tables(), ids=lambda table: table.name)
def test_every_row_has_a_reduced_version_or_lacks_public_data_or_is_too_large(table: Table) -> None:
    without = [row.recipe for row in table.rows if row.recipe.cpu is None]
    assert all(recipe.needs or "wrn40_4" in recipe.name for recipe in without)


def test_the_papers_figures_stand_in_their_rows() -> None:
    # Tables of the papers: Papernot's Table 5, ScaleNorm's Table 1, SmoothNets' Table 2, De et al.'s Table 1.
    expected = {
        "shoefit-table5": [86.1, 85.1, 86.0, 85.1, 90.3, 86.3, 90.5, 88.7],
        "de-ablation": [50.8, 66.3, 70.0, 71.2, 78.4, 79.7],
        "epochs-table5.1": [69.55, 71.42, 70.61],
        "scalenorm-table6.1": [
            *(81.2, 81.3, 81.0, 81.4, 81.3, 81.1),
            *(82.1, 82.1, 81.5, 82.1, 82.2, 80.6),
            *(74.5, 73.1, 71.8, 73.5, 72.8, 71.2),
        ],
        "activation-table5.2": [71.42, 69.78, 63.77, 60.41],
        "transfer-table5.5": [76.75, 77.41, None, None, 43.37, 44.68, None, None, 32.31, 33.59, 31.62],
        "scalenorm-wide": [81.25, 82.5, 71.4, 71.8],
        "scalenorm-plain": [89.3, 89.8],
        "shoefit-summary": [99.0, 96.6, 98.1, 89.4, 81.9, 86.1, 75.0, 71.0],
        "shoefit-plain": [99.0, 99.0, 89.3, 89.4],
        "smoothnet-table1": [66.2, 71.74, 70.1, 81.4, 64.84],
        "de-imagenet": [6.9, 32.4],
        "de-nfnet": [77.6, 83.8, 84.4, 85.6, 86.0, 86.7, 88.5],
        "de-places": [54.4, 55.1, 54.3, 57.0],
        "de-finetuning": [93.1, 93.6, 94.0, 94.2, 94.8, 95.4, 96.1, 96.6],
    }
    for name, accuracies in expected.items():
        assert [row.recipe.accuracy for row in find_table(name).rows] == accuracies
    top5 = {
        "transfer-table5.5": [None, None, None, None, 70.36, 71.75, None, None, 58.82, 61.56, 57.36],
        "de-imagenet": [None, 55.8],
        "de-nfnet": [93.0, 96.7, 96.6, 97.5, 97.4, 98.0, 98.7],
        "de-places": [84.4, 84.6, 85.2, 87.1],
    }
    for name, accuracies in top5.items():
        assert [row.recipe.top5 for row in find_table(name).rows] == accuracies
    first = [row.recipe.accuracy for row in find_table("scalenorm-table1").rows]
    assert first[:6] == [64.83, 65.03, 71.42, 71.74, 72.41, 72.95]
    assert [row.recipe.accuracy for row in find_table("smoothnet-table2").rows][:5] == [73.5, 59.8, 57.7, 65.4, 54.1]


# Cells of the thesis's tables, read there again: recipe, median, mean or top-5.
CELLS = [
    ("cifar10-resnet9-eps3-groups64", 65.0, {"mean": 65.0}, None),
    ("cifar10-scaleresnet9-eps10-groups16", 73.0, {"mean": 73.0}, None),
    ("cifar10-resnet9-eps7.5-groups1", 69.7, {"mean": 69.8}, None),
    ("imagenette-resnet9-eps3-groups16", 55.5, {"mean": 55.1}, None),
    ("imagenette-scaleresnet9-eps7.5-groups64", 64.0, {"mean": 62.0}, None),
    ("imagenette-scaleresnet50-eps7.5-groups1", 44.97, {"mean": 44.5}, None),
    ("imagenette-resnet50-eps7.5-groups8", 42.2, {"mean": 41.3}, None),
    ("tiny-scaleresnet9-eps5-groups8", 15.2, {}, 36.0),
    ("tiny-resnet9-eps70-groups64", 19.5, {}, 42.3),
    ("tiny-scaleresnet9-eps10-groups1", 18.5, {}, 40.8),
    ("tiny-scaleresnet9-eps10", 19.39, {"best of 3, top-5": 42.8}, 41.83),
    ("cifar10-scaleresnet9-eps7.42", 71.8, {"best of 3": 72.4}, None),
    ("imagenette-resnet9-eps7.42", 63.8, {"best of 3": 64.4}, None),
    ("cifar10-shoefit-from-half50-eps1.48", 56.8, {"std": 1.3, "best of 10": 58.3}, None),
    ("cifar10-wrn40_4-ladder5-ema-eps8", 79.7, {"std": 0.2, "training": 81.5, "training std": 0.2}, None),
    ("liver-scalelinknet9-eps3-groups16", 82.2, {"median": 82.4}, None),
    ("liver-linknet9-eps0.5-groups32", 71.8, {"median": 71.9}, None),
]


@pytest.mark.parametrize(("name", "accuracy", "also", "top5"), CELLS)
def test_cells_of_large_tables_are_the_papers(
    name: str, accuracy: float, also: dict[str, float], top5: float | None
) -> None:
    recipe = find_recipe(name)
    assert (recipe.accuracy, dict(recipe.also), recipe.top5) == (accuracy, also, top5)


def test_the_best_groups_are_those_whose_median_the_thesis_repeats_in_its_summary() -> None:
    for name in [row.name for row in find_table("scalenorm-table1").rows if "resnet9" in row.name]:
        recipe = find_recipe(name)
        assert recipe.config.model is not None
        cell = find_recipe(f"{name}-groups{recipe.config.model.options['groups']}")
        assert recipe.accuracy is not None
        assert cell.accuracy is not None
        # The thesis contradicts itself at epsilon 3 with ScaleNorm: its 65.03 is in none of its tables.
        assert abs(recipe.accuracy - cell.accuracy) < 0.06 or name == "cifar10-scaleresnet9-eps3"


def test_statistics_are_of_the_sample() -> None:
    values = [70.0, 72.0, 77.0]
    result = RowResult(row=TWO.rows[0], runs=tuple(figures(v, repeat=i) for i, v in enumerate(values)))
    assert (result.median, result.mean, result.best) == (72.0, 73.0, 77.0)
    assert result.std == pytest.approx(statistics.stdev(values))
    assert RowResult(row=TWO.rows[0], runs=(figures(70.0),)).std is None
    empty = RowResult(row=TWO.rows[0])
    assert (empty.median, empty.mean, empty.std, empty.best) == (None, None, None, None)


def test_rows_are_chosen_by_name_or_pattern() -> None:
    assert [row.name for row in TWO.choose(("*relu",))] == [RELU]
    assert TWO.choose(()) == TWO.rows
    with pytest.raises(ArgumentError, match="nonsense"):
        TWO.choose(("nonsense",))


def test_a_table_is_run_written_and_afterwards_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = reproduce(quick(tmp_path, repeats=2))
    assert not report.interrupted
    assert not report.failed
    values = json.loads((tmp_path / "table.json").read_text())
    assert values == report.to_dict()
    assert [row["n"] for row in values["rows"]] == [2, 2]
    assert all(not run["for_release"] for row in values["rows"] for run in row["runs"]), "a smoke test is stamped"
    page = (tmp_path / "table.md").read_text()
    assert "release of its own" in page
    assert "mean nothing" in page
    assert page.count("(not for release) |") == 2
    assert (tmp_path / "table.svg").read_bytes().startswith(b"<?xml")
    (together,) = values["together"]
    assert together["runs"] == 4
    assert together["epsilon"] > max(row["together"]["epsilon"] for row in values["rows"])

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a finished run is read, not run")

    monkeypatch.setattr(job, "train", never)
    monkeypatch.setattr(job, "resume_training", never)
    assert reproduce(quick(tmp_path, repeats=2)).to_dict() == values


class Interrupting(RunCallback):
    """Ctrl-C twice, after the first step."""

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_run_is_resumed_and_charged_once(tmp_path: Path) -> None:
    report = reproduce(quick(tmp_path, rows=(TANH,)), callback=Interrupting())
    assert report.interrupted
    assert json.loads((tmp_path / "table.json").read_text())["interrupted"]
    ledger = tmp_path / "runs" / TANH / "1" / "release" / "ledger.jsonl"
    begun = ledger.read_text()
    again = reproduce(quick(tmp_path, rows=(TANH,)))
    assert not again.interrupted
    assert ledger.read_text().startswith(begun), "the same run went on"
    (run,) = again.results[0].runs
    assert run.certificate["steps_taken"] == 2
    assert run.epsilon is not None


def test_a_stopped_run_has_a_certificate_but_is_no_figure_until_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = StopRequest()

    class Asking(RunCallback):
        def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
            request.requested = True

    monkeypatch.setattr("dpvision.training.write_release.stop_on_signals", lambda: nullcontext(request))
    assert reproduce(quick(tmp_path, rows=(TANH,)), callback=Asking()).interrupted
    certificate = tmp_path / "runs" / TANH / "1" / "release" / "certificate.json"
    assert json.loads(certificate.read_text())["steps_taken"] == 1
    request.requested = False
    (result,) = reproduce(quick(tmp_path, rows=(TANH,))).results
    assert [run.certificate["steps_taken"] for run in result.runs] == [2]


def test_a_run_that_is_asked_to_stop_stops_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = type("Result", (), {"outcome": "stopped"})
    started: list[Path] = []

    def stop(*_: Any, run: Path, **__: Any) -> Any:
        started.append(run)
        return stopped

    monkeypatch.setattr(job, "train", stop)
    assert reproduce(quick(tmp_path)).interrupted
    assert len(started) == 1


def failing_for(name: str, error: BaseException, real: Callable[..., Any]) -> Callable[..., Any]:
    def train(config: Any, *, run: Path, **rest: Any) -> Any:
        if name in run.parts:
            raise error
        return real(config, run=run, **rest)

    return train


@pytest.mark.parametrize("error", [DPVisionError("the weights overflowed"), RuntimeError("out of memory\nat line 3")])
def test_a_failed_row_is_written_with_its_kind_and_the_others_go_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "train", failing_for(TANH, error, job.train))
    report = reproduce(quick(tmp_path))
    assert report.failed
    bad, good = report.results
    reason = str(error).splitlines()[0]
    assert bad.failures == (Failure(repeat=1, kind=type(error).__name__, reason=reason),)
    assert len(good.runs) == 1
    page = (tmp_path / "table.md").read_text()
    assert f"failed: tanh, run 1: {type(error).__name__}" in page
    assert reason not in page


def test_a_release_that_was_changed_is_a_failure_not_a_figure(tmp_path: Path) -> None:
    reproduce(quick(tmp_path, rows=(TANH,)))
    path = tmp_path / "runs" / TANH / "1" / "release" / "metrics.json"
    path.write_text(path.read_text().replace('"accuracy": 0.', '"accuracy": 0.9', 1))
    (result,) = reproduce(quick(tmp_path, rows=(TANH,))).results
    assert not result.runs
    assert "not in order" in result.failures[0].reason


def test_a_folder_with_another_configuration_of_a_row_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reproduce(quick(tmp_path, rows=(RELU,)))
    monkeypatch.setattr(job, "train", None)
    with pytest.raises(ArgumentError, match="Choose another --output"):
        reproduce(quick(tmp_path, scale="cpu"))


def test_a_row_without_a_reduced_version_fails_by_name(tmp_path: Path) -> None:
    large = Table(name="large", title="Large", rows=(Row("WRN-40-4", "cifar10-wrn40_4-eps8"),))
    (result,) = reproduce(quick(tmp_path, table=large, scale="cpu")).results
    assert "has no version at --scale cpu" in result.failures[0].reason


def test_first_weights_come_from_one_run_of_the_earlier_recipe_which_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("cifar100-resnet9-from-cifar10-eps10", "cifar100-scaleresnet9-from-cifar10-eps10")
    table = Table(name="t", title="T", rows=tuple(Row(name, name) for name in names))
    weights: list[str | None] = []
    finished = type("Result", (), {"outcome": "finished"})

    def note(config: Any, *, run: Path, **__: Any) -> Any:
        weights.append(None if config.transfer is None else config.transfer.weights)
        spend(run)
        return finished

    monkeypatch.setattr(job, "train", note)
    monkeypatch.setattr(job, "read_result", lambda run, *, repeat: figures(50.0, repeat=repeat))
    report = reproduce(quick(tmp_path, table=table, repeats=2))
    first = [str(tmp_path / "runs" / (find_recipe(name).after or "") / "1") for name in names]
    assert weights == [None, first[0], None, first[1], first[0], first[1]]
    (together,) = report.to_dict()["together"]
    assert together["runs"] == 4 + 2, "the runs that gave the weights are releases too"


def test_with_own_sources_each_repeat_starts_from_a_source_of_its_own_on_its_own_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "cifar10-shoefit-from-min10-eps1.04"
    before = find_recipe(name).after or ""
    asked: list[tuple[str, str, str | None]] = []

    def note(config: Any, *, run: Path, **__: Any) -> Any:
        weights = None if config.transfer is None else Path(config.transfer.weights).name
        asked.append((run.parent.name, config.data.source, weights))
        spend(run)
        return type("Result", (), {"outcome": "finished"})

    monkeypatch.setattr(job, "train", note)
    monkeypatch.setattr(job, "place_data", lambda config: config)
    monkeypatch.setattr(job, "read_result", lambda run, *, repeat: figures(50.0, repeat=repeat))
    table = Table(name="t", title="T", rows=(Row(name, name),))
    report = reproduce(quick(tmp_path, table=table, repeats=2, own_sources=True, scale="cpu"))
    assert not report.failed
    assert asked == [
        (before, "cifar100-min10.npz", None),
        (name, "cifar10", "1"),
        (before, "cifar100-min10-draw2.npz", None),
        (name, "cifar10", "2"),
    ]
    values = report.to_dict()
    assert values["own_sources"]
    assert len(values["sources"]) == 2
    assert "initial weights of its own" in markdown(values)


@pytest.mark.parametrize("changes", [{"repeats": 0}, {"scale": "large"}])
def test_a_job_that_can_not_be_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError):
        quick(tmp_path, **changes)


def made_up_values() -> dict[str, Any]:
    bills = tuple(Bill(run=f"a/{n}", source="mnist", charges=((STEP, n),), delta=1e-5) for n in (1, 2, 3))
    rows = [
        RowResult(row=Row("one", TANH), runs=(figures(70.0), figures(72.0, repeat=2)), bills=bills[:2]),
        RowResult(row=Row("two", RELU), failures=(Failure(repeat=1, kind="DataError", reason="no such data"),)),
        RowResult(row=Row("three", "cifar10-wrn16_4-tan-eps8"), runs=(figures(50.0),), bills=bills[2:]),
    ]
    head = {"table": "t", "title": "A title", "scale": "cpu", "smoke_test": None, "repeats": 2, "interrupted": False}
    head["own_sources"] = False
    return {**head, "rows": [row.to_dict() for row in rows], "sources": [], **released_together(bills)}


def test_the_page_shows_paper_ours_spread_and_failures() -> None:
    page = markdown(made_up_values())
    one, two, three = (line for line in page.splitlines() if line.startswith(("| one", "| two", "| three")))
    assert "| 98.1 | 71.00 | 71.00 ± 1.41 | 72.00 | 2 |" in one
    assert "| failed |" in two
    assert "| – | 50.00 | 50.00 | 50.00 | 1 |" in three
    assert "- failed: two, run 1: DataError" in page
    assert "no such data" not in page
    assert "- 3 runs on mnist: epsilon " in page
    assert "--scale cpu" in page


@pytest.mark.parametrize(("epsilon", "shown"), [(2.0001, "2.001"), (1000.001, "1001"), (98765.4, "9.877e+04")])
def test_a_bound_is_rounded_up_never_down(epsilon: float, shown: str) -> None:
    values = made_up_values()
    values["rows"][0]["epsilon"] = values["rows"][0]["together"]["epsilon"] = epsilon
    values["together"][0]["epsilon"] = epsilon
    page = markdown(values)
    (row,) = (line for line in page.splitlines() if line.startswith("| one |"))
    assert row.startswith(f"| one | {shown} |")
    assert row.endswith(f"| {shown} |")
    assert f"mnist: epsilon {shown} at delta" in page


def test_the_picture_is_the_same_for_the_same_figures() -> None:
    values = made_up_values()
    first = draw_table(values)
    assert first == draw_table(values)
    assert b"two (failed)" in first
    assert draw_table({**values, "rows": values["rows"][1:2]})


def test_the_command_lists_tables_and_rows() -> None:
    listed = dpvision("--list").stdout
    assert all(f"{name}: " in listed for name in WANTED)
    rows = dpvision("de-ablation", "--list").stdout
    assert "cifar10-wrn40_4-ladder0-none-eps8" in rows
    assert "50.8 %" in rows
    values = json.loads(dpvision("--list", "--json").stdout)
    assert len(values["tables"]) == len(all_tables())


def test_the_command_runs_a_row_and_gives_its_figures_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = dpvision("shoefit-activation", "--scale", "quick", "--rows", TANH, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert [row["row"] for row in values["rows"]] == [TANH]
    folder = Path("reproduce") / "shoefit-activation-quick"
    names = ["table.json", "table.md", "table.svg", *(f"figure.{kind}" for kind in ("png", "svg", "csv", "json"))]
    assert values["files"] == [str(folder / name) for name in names]
    again = dpvision("shoefit-activation", "--scale", "quick", "--rows", TANH)
    assert again.exit_code == 0
    assert "compose" in again.stdout
    assert "mean nothing" in again.stdout


@pytest.mark.parametrize(
    "arguments", ["nonsense", "de-ablation --scale huge", "de-ablation --rows x", "meanvar --repeats 0"]
)
def test_nonsense_is_one_line_exit_code_2_and_nothing_written(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = dpvision(*arguments.split())
    assert result.exit_code == 2, result.output
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert not list(tmp_path.iterdir())


def test_a_failed_row_ends_in_exit_code_1_and_an_interruption_in_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "train", failing_for(TANH, DPVisionError("the figure is 17"), job.train))
    arguments = ("shoefit-activation", "--scale", "quick", "--rows", TANH, "--output")
    failed = dpvision(*arguments, "failed")
    assert failed.exit_code == 1
    assert "failed: the figure is 17" in failed.stderr
    assert "the figure" not in failed.stdout
    monkeypatch.setattr(job, "train", failing_for(TANH, KeyboardInterrupt(), job.train))
    assert dpvision(*arguments, "interrupted").exit_code == 130
