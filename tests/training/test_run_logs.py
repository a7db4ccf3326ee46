"""Logs for other programs: what they hold, what they never hold, and that a resumed run continues them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dpvision
from dpvision.errors import ArgumentError
from dpvision.training import Callbacks, CsvLog, RunCallback, TensorBoardLog, resume_training, train
from dpvision.training.run_logs import MlflowLog, WandbLog, log_callback, public_values
from tiny_runs import StopAfter, tiny_config, write_images

POINT = {"step": 7, "epsilon": 0.5, "accuracy": 0.75, "top5": None, "raw": {"accuracy": 0.7}, "unsafe_loss": 3.0}


def started(callback: RunCallback, *, done: int = 0) -> RunCallback:
    callback.started(name="linear", steps=12, done=done, choices=())
    return callback


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_log_takes_finite_numbers_and_nothing_unsafe() -> None:
    assert public_values(POINT) == {"epsilon": 0.5, "accuracy": 0.75}
    assert public_values({"step": 1, "loss": float("nan"), "better": True, "name": "x"}) == {}


@pytest.fixture(scope="module")
def cut_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with logs that stopped after step 9 of 12, and was resumed from the checkpoint of step 8."""
    folder = tmp_path_factory.mktemp("logs")
    config = tiny_config(write_images(folder / "pictures.npz"), evaluations=12)
    run = folder / "run"
    with pytest.raises(ConnectionAbortedError):
        train(config, run=run, callback=Callbacks(log_callback("csv, tensorboard", run), StopAfter(9)))
    resume_training(run, callback=log_callback(None, run))
    return run


def test_a_csv_log_is_the_released_curve_and_a_resumed_run_continues_it(cut_run: Path) -> None:
    curve = json.loads((cut_run / "release" / "metrics.json").read_text())["curve"]
    found = rows(cut_run / "logs" / "metrics.csv")
    assert list(found[0]) == ["step", "epsilon", "accuracy", "loss"], "three classes have no top-5 accuracy"
    assert [int(row["step"]) for row in found] == list(range(1, 13))
    for row, point in zip(found, curve, strict=True):
        assert {name: float(value) for name, value in row.items()} == {name: point[name] for name in row}


def test_tensorboard_reads_the_log_back_with_each_step_once_and_no_times(cut_run: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(cut_run / "logs"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["privacy/epsilon", "test/accuracy", "test/loss"]
    curve = json.loads((cut_run / "release" / "metrics.json").read_text())["curve"]
    for tag, name in (("privacy/epsilon", "epsilon"), ("test/accuracy", "accuracy"), ("test/loss", "loss")):
        found = events.Scalars(tag)
        assert [(e.step, e.value) for e in found] == [(p["step"], pytest.approx(p[name])) for p in curve]
        assert {e.wall_time % 1 for e in found} == {0.0}
        assert len({e.wall_time for e in found}) <= 2, "one time for each part of the run"


def test_log_files_are_outside_the_release(cut_run: Path) -> None:
    assert dpvision.verify(cut_run).ok
    assert not list((cut_run / "release").glob("*events*"))


def test_a_foreign_csv_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("name,age\nann,3\n")
    with pytest.raises(ArgumentError, match="not a log of dpvision"):
        CsvLog(path)
    assert path.read_text() == "name,age\nann,3\n"


def test_a_new_run_replaces_an_old_log(tmp_path: Path) -> None:
    for step in (3, 7):
        started(CsvLog(tmp_path / "log.csv")).evaluated({**POINT, "step": step})
        started(TensorBoardLog(tmp_path / "events")).evaluated({**POINT, "step": step})
    assert [row["step"] for row in rows(tmp_path / "log.csv")] == ["7"]
    assert len(list((tmp_path / "events").iterdir())) == 1


@pytest.mark.parametrize("kinds", ["tensorbord", "csv,,", "", "csv;wandb"])
def test_an_unknown_kind_of_log_is_named(kinds: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--log must name some of csv, tensorboard, wandb, mlflow"):
        log_callback(kinds, tmp_path)


@pytest.mark.parametrize(("kind", "package"), [(WandbLog, "wandb"), (MlflowLog, "mlflow")])
def test_a_missing_package_is_named_with_the_remedy(kind: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ArgumentError, match=f"--log {package} needs the package: pip install {package}"):
        kind("run")


class _Heard:
    """A stand-in for both services: what it is given, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __enter__(self) -> _Heard:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append("end")

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append("end")


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_services_get_all_points_at_the_end_and_not_before(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = _Heard()
    module: Any = ModuleType(package)
    module.Settings = SimpleNamespace
    module.init = lambda *, name, settings: heard.calls.append((name, settings.x_disable_stats)) or heard
    module.start_run = lambda *, run_name, log_system_metrics: heard.calls.append((run_name, True)) or heard
    module.log_metrics = heard.log
    monkeypatch.setitem(sys.modules, package, module)
    log = started(log_callback(package, Path("runs/mine-1")))
    log.evaluated(POINT)
    log.stepped(done=8, epsilon_bound=0.6)
    assert heard.calls == [], "the time of arrival would tell how long the steps took"
    log.finished()
    assert heard.calls == [("mine-1", True), (7, {"privacy/epsilon": 0.5, "test/accuracy": 0.75}), "end"]


def test_a_service_that_fails_is_a_warning_after_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", module)
    log = started(MlflowLog("mine"))
    log.evaluated(POINT)
    with pytest.warns(UserWarning, match="mlflow did not take the log of mine"):
        log.finished()


class Keep(RunCallback):
    """Keeps the points that it is told."""

    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []

    def evaluated(self, point: dict[str, Any]) -> None:
        self.points.append(point)


def test_the_baseline_without_privacy_is_in_no_log(tmp_path: Path) -> None:
    config = tiny_config(write_images(tmp_path / "pictures.npz"))
    run, keep = tmp_path / "run", Keep()
    result = train(
        config.model_copy(update={"baseline": True}), run=run, callback=Callbacks(keep, log_callback("csv", run))
    )
    assert keep.points == result.metrics["curve"]
    assert [float(row["epsilon"]) for row in rows(run / "logs" / "metrics.csv")] == [
        point["epsilon"] for point in result.metrics["curve"]
    ]


def test_points_of_a_run_hold_epsilon_and_public_metrics_alone(tmp_path: Path) -> None:
    keep = Keep()
    train(tiny_config(write_images(tmp_path / "pictures.npz")), run=tmp_path / "run", callback=keep)
    names = {"step", "epsilon", "accuracy", "top5", "loss"}
    assert [set(point) for point in keep.points] == [names, names, names | {"raw"}]


def own_run(folder: Path, **more: Any) -> dpvision.PrivateRun:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    facts = {"target_epsilon": 3.0, "delta": 1e-3, "num_units": 60, "expected_batch_size": 20, "steps": 4}
    mechanism = dpvision.Mechanism.calibrated(**facts, clip_norm=0.5)
    return dpvision.PrivateRun(model, torch.optim.SGD(model.parameters(), lr=0.1), mechanism, folder, **more)


def step_all(run: dpvision.PrivateRun, most: int = 9) -> None:
    rows = torch.randn(60, 4, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 2
    for batch, _ in zip(run.batches(rows), range(most), strict=False):
        run.step(batch, lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="none"))


def test_an_own_loop_records_public_metrics_in_its_curve_and_logs(tmp_path: Path) -> None:
    with own_run(tmp_path / "run", callback=CsvLog(tmp_path / "log.csv"), checkpoint_every=1) as run:
        step_all(run, most=2)
        run.record({"accuracy": 0.6, "f1": 0.5}, measured_on="public scans")
        spent = run.epsilon_spent
        for bad in ({}, {"epsilon": 1.0}, {"unsafe_loss": 1.0}, {"accuracy": 7.0}, {"accuracy": float("nan")}):
            with pytest.raises(ArgumentError):
                run.record(bad, measured_on="public scans")
        with pytest.raises(ArgumentError):
            run.record({"accuracy": 0.6}, measured_on="")
    model = nn.Linear(4, 2)
    again = dpvision.PrivateRun.resume(
        tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), callback=CsvLog(tmp_path / "log.csv")
    )
    step_all(again)
    again.record({"accuracy": 0.8}, measured_on="public scans")
    result = again.release({"accuracy": 0.8}, evaluated_on="public scans")
    first, last = result.metrics["curve"]
    assert first == {"step": 2, "epsilon": spent, "accuracy": 0.6, "f1": 0.5}
    assert last["step"] == 4
    assert last["epsilon"] == pytest.approx(result.certificate["epsilon"])
    found = rows(tmp_path / "log.csv")
    assert [(row["step"], row["accuracy"], row["f1"]) for row in found] == [("2", "0.6", "0.5"), ("4", "0.8", "")]
    assert "public scans, declared public" in {each["how"] for each in result.certificate["declared"]}
    assert dpvision.verify(tmp_path / "run").ok
