"""Lists and comparisons of runs: every state is named, nothing half-readable is free, nonsense is one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dpvision.accounting import guarantee
from dpvision.cli import app
from dpvision.errors import ArgumentError, DPVisionError
from dpvision.release.comparison_page import compare_runs
from dpvision.release.run_states import describe_run, list_runs
from dpvision.storage.files import json_bytes
from dpvision.storage.run_folder import RunFolder
from dpvision.training import RunCallback, train
from report_page import Page
from reproduce_runs import STEP, spend
from tiny_runs import interrupt_run, tiny_config, write_images


def dpvision(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def one_line(result: Result) -> str:
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


class _Failing(RunCallback):
    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        raise DPVisionError("picture 17 is too bright")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind: done, stopped, failed, without privacy; nothing in this folder is changed by a test."""
    root = tmp_path_factory.mktemp("several")
    config = tiny_config(write_images(root / "scans.npz"))
    for name in ("done", "other"):
        train(config, run=root / "runs" / name)
    train(tiny_config(root / "scans.npz", privacy={"enabled": False}), run=root / "runs" / "open")
    interrupt_run(root / "runs" / "deep" / "stopped", config, after=6, seed=None)
    with pytest.raises(DPVisionError):
        train(config, run=root / "runs" / "broken", callback=_Failing())
    return root / "runs"


def copied(runs: Path, place: Path, *names: str) -> Path:
    for name in names:
        shutil.copytree(runs / name, place / Path(name).name)
    return place


def test_a_list_names_data_model_epsilon_result_and_state(runs: Path) -> None:
    found = {run.path.name: run for run in list_runs(runs)}
    assert {name: run.state for name, run in found.items()} == {
        "broken": "failed",
        "stopped": "interrupted",
        "done": "finished",
        "open": "unsafe",
        "other": "finished",
    }
    done = found["done"]
    certificate = json.loads((runs / "done" / "release" / "certificate.json").read_text())
    assert (done.data, done.model, done.steps) == ("scans.npz", "linear", (12, 12))
    assert (done.epsilon, done.delta) == (pytest.approx(certificate["epsilon"]), 1e-3)
    assert done.result is not None
    assert done.result.startswith("accuracy ")
    assert found["open"].epsilon is None
    assert found["open"].why == "trained without privacy: no guarantee"
    stopped = found["stopped"]
    assert (stopped.steps, stopped.result) == ((6, 12), None)
    assert stopped.epsilon == pytest.approx(guarantee([(STEP, 6)], delta=1e-3).epsilon)


def test_names_of_folders_are_printed_as_they_are_or_escaped(runs: Path, tmp_path: Path) -> None:
    for name in ("[", "[red]a", "b\x1b[31m", os.fsdecode(b"c\xff")):
        shutil.copytree(runs / "done", tmp_path / name / "]x")
    result = dpvision("runs", tmp_path)
    assert result.exit_code == 0, result.stderr
    for shown in ("/[/]x", "/[red]a/]x", r"/b\x1b[31m/]x", r"/c\udcff/]x"):
        assert shown in result.stdout


def test_the_reason_of_a_failure_stays_private(runs: Path) -> None:
    assert "too bright" in (runs / "broken" / "private" / "unsafe_failure.json").read_text()
    assert "too bright" not in str(describe_run(runs / "broken"))


def test_a_run_in_use_is_running(runs: Path, tmp_path: Path) -> None:
    copied(runs, tmp_path, "deep/stopped")
    with RunFolder.open(tmp_path / "stopped") as folder:
        folder.lock()
        assert describe_run(tmp_path / "stopped").state == "running"
    assert describe_run(tmp_path / "stopped").state == "interrupted"


@pytest.mark.parametrize("damage", ["ledger", "config", "certificate", "release", "cut"])
def test_a_damaged_run_has_failed_and_voids_a_sum(damage: str, runs: Path, tmp_path: Path) -> None:
    release = copied(runs, tmp_path, "done", "other") / "done" / "release"
    if damage == "release":
        shutil.rmtree(release)
    elif damage == "cut":
        (release / "ledger.jsonl").write_bytes(b"".join((release / "ledger.jsonl").read_bytes().splitlines(True)[:-1]))
    else:
        path = next(release.glob(f"{damage}.json*"))
        path.write_bytes(path.read_bytes()[:-20])
    assert describe_run(tmp_path / "done").state == "failed"
    _, found = compare_runs([tmp_path / "done", tmp_path / "other"], output=tmp_path / "page.html")
    assert found.together["epsilon"] is None
    assert found.others is not None
    assert found.others["runs"] == 1


def test_replaced_metrics_are_found_when_runs_are_compared(runs: Path, tmp_path: Path) -> None:
    path = copied(runs, tmp_path, "done") / "done" / "release" / "metrics.json"
    values = json.loads(path.read_text())
    values["final"]["accuracy"] = 0.123
    path.write_bytes(json_bytes(values))
    _, found = compare_runs([tmp_path / "done"], output=tmp_path / "page.html")
    assert found.runs[0].state == "failed"
    assert found.together["epsilon"] is None
    assert "does not verify" in (tmp_path / "page.html").read_text()


def test_a_comparison_shows_every_run_and_the_composed_epsilon(runs: Path, tmp_path: Path) -> None:
    paths = [runs / "done", runs / "other", runs / "deep" / "stopped"]
    page, found = compare_runs(paths, output=tmp_path / "page.html")
    assert found.together["epsilon"] == pytest.approx(guarantee([(STEP, 30)], delta=1e-3).epsilon)
    text = page.read_text()
    Page(text)
    for name in ("done", "other", "stopped", "6 of 12 steps", "for all runs together", "<svg"):
        assert name in text


def test_a_run_without_privacy_voids_the_sum_and_the_others_are_stated(runs: Path, tmp_path: Path) -> None:
    _, found = compare_runs([runs / "open", runs / "done"], output=tmp_path / "page.html")
    assert found.together["void"] == "run open: trained without privacy: no guarantee"
    assert found.others is not None
    assert found.others["epsilon"] == pytest.approx(guarantee([(STEP, 12)], delta=1e-3).epsilon)


def test_the_sum_of_the_others_follows_the_same_rules(runs: Path, tmp_path: Path) -> None:
    spend(tmp_path / "small", delta=1e-5)
    _, found = compare_runs([runs / "open", runs / "done", tmp_path / "small"], output=tmp_path / "page.html")
    assert found.others is not None
    assert found.others["delta"] == 1e-5, "the smallest, as for all of them"
    assert found.others["epsilon"] == pytest.approx(guarantee([(STEP, 15)], delta=1e-5).epsilon)


def test_the_same_images_under_two_names_are_not_disjoint(tmp_path: Path) -> None:
    for name in ("one", "two"):
        source = write_images(tmp_path / f"{name}.npz")
        train(tiny_config(source, privacy={"steps": 1}), run=tmp_path / "runs" / name)
    paths = [tmp_path / "runs" / name for name in ("one", "two")]
    with pytest.raises(ArgumentError, match="one and two were trained on the same images"):
        compare_runs(paths, disjoint=True, output=tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_names_of_runs_and_data_can_not_write_markup(tmp_path: Path) -> None:
    spend(tmp_path / "<b>x", source="<script>alert(1)</script>")
    page, _ = compare_runs([tmp_path / "<b>x"], output=tmp_path / "page.html")
    Page(page.read_text())
    assert "<script" not in page.read_text()
    assert "<b>x" not in page.read_text()


def test_the_commands_print_a_table_and_json(runs: Path, tmp_path: Path) -> None:
    shown = dpvision("runs", runs)
    assert shown.exit_code == 0
    assert "scans.npz  linear" in shown.stdout
    listed = json.loads(dpvision("runs", runs, "--json").stdout)["runs"]
    assert [each["state"] for each in listed] == ["failed", "interrupted", "finished", "unsafe", "finished"]
    page = tmp_path / "page.html"
    result = dpvision("compare", runs / "done", runs / "other", "--output", page, "--json")
    values = json.loads(result.stdout)
    assert values["together"]["runs"] == 2
    assert values["page"] == str(page)
    lines = dpvision("compare", runs / "done", "--output", page).stdout.splitlines()
    assert lines[0].startswith("done: scans.npz, linear, epsilon ")
    assert lines[-2].startswith("together: epsilon ")


def test_nonsense_is_one_line(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for place in ("file", "nowhere"):
        assert "is no folder" in one_line(dpvision("runs", tmp_path / place))
    assert dpvision("runs", tmp_path / "empty").stderr == f"no runs in {tmp_path / 'empty'}.\n"
    for command in ("compare", "resume"):
        for place in ("file", "nowhere", "empty"):
            assert "must be a run folder" in one_line(dpvision(command, tmp_path / place))
    assert "are the same run" in one_line(dpvision("compare", runs / "done", runs / "done"))
    assert "is a directory" in one_line(dpvision("compare", runs / "done", "--output", tmp_path)).lower()


def as_values(path: Path) -> dict[str, Any]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_listing_and_comparing_change_nothing(runs: Path, tmp_path: Path) -> None:
    before = as_values(runs)
    list_runs(runs)
    compare_runs([runs / "done", runs / "open"], output=tmp_path / "page.html")
    assert as_values(runs) == before
