"""Run the rows of a table, one after the other, and write the results beside the paper's.

Everything is in one folder: ``runs/RECIPE/REPEAT`` and ``table.json``, ``table.md``, ``table.svg``, and where the paper
has a figure ``figure.png``, ``.svg``, ``.csv`` and ``.json``. An interrupted job continues where it stopped. Every run
is a release of its own; ``table_cost`` composes what all of them spend.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final

from dpvision.analyze.figures import write_chart
from dpvision.config import RunConfig, parse_config, required
from dpvision.errors import ArgumentError, DPVisionError, Problems, TamperError
from dpvision.papers import find_recipe
from dpvision.papers.quick import MEANS_NOTHING, quick_config
from dpvision.papers.recipe import Recipe, changed
from dpvision.papers.recipe_data import place_data, with_draw
from dpvision.papers.table_cost import read_bills, released_together
from dpvision.papers.table_figures import table_chart
from dpvision.papers.table_page import draw_table, markdown
from dpvision.papers.tables import Row, Table
from dpvision.release.composition import Bill, composed
from dpvision.release.verify import verify
from dpvision.storage.files import disk_errors, parse_object, read_file, write_atomically
from dpvision.storage.run_folder import CERTIFICATE, METRICS, RunFolder
from dpvision.training import RunCallback, resume_training, train


@final
@dataclass(frozen=True)
class CurvePoint:
    """Accuracy in percent during training. ``epsilon`` is None without privacy."""

    epochs: float
    epsilon: float | None
    accuracy: float


@final
@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One finished run, read from its release. ``accuracy`` is in percent; for masks it is the mean Dice."""

    repeat: int
    run: str
    accuracy: float
    top5: float | None
    certificate: dict[str, Any]
    curve: tuple[CurvePoint, ...] = ()

    @property
    def epsilon(self) -> float | None:
        """Epsilon of this run alone; None without privacy."""
        return self.certificate["epsilon"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "repeat": self.repeat,
            "run": self.run,
            "accuracy": self.accuracy,
            "top5": self.top5,
            "epsilon": self.epsilon,
            "delta": self.certificate["delta"],
            "steps": self.certificate["steps_taken"],
            "for_release": self.certificate["for_release"],
            "stamps": list(self.certificate["stamps"]),
        }


@final
@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run that failed. ``reason`` may depend on private data, so only ``kind`` is written to files."""

    repeat: int
    kind: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values without the reason, for JSON."""
        return {"repeat": self.repeat, "kind": self.kind}


@final
@dataclass(frozen=True, kw_only=True)
class RowResult:
    """The results of a row; ``bills`` are the costs of all runs of its recipe in the folder."""

    row: Row
    runs: tuple[RunResult, ...] = ()
    failures: tuple[Failure, ...] = ()
    bills: tuple[Bill, ...] = ()

    @property
    def accuracies(self) -> list[float]:
        """Accuracies in percent, in the order of the repeats."""
        return [run.accuracy for run in self.runs]

    @property
    def median(self) -> float | None:
        """Median accuracy in percent; None without runs."""
        return statistics.median(self.accuracies) if self.runs else None

    @property
    def mean(self) -> float | None:
        """Mean accuracy in percent; None without runs."""
        return statistics.fmean(self.accuracies) if self.runs else None

    @property
    def std(self) -> float | None:
        """Standard deviation of the sample; None with fewer than two runs."""
        return statistics.stdev(self.accuracies) if len(self.runs) > 1 else None

    @property
    def best(self) -> float | None:
        """Largest accuracy in percent: chosen on the test set, so it is biased."""
        return max(self.accuracies, default=None)

    @property
    def top5(self) -> float | None:
        """Median top-5 accuracy in percent; None where it means nothing."""
        found = [run.top5 for run in self.runs if run.top5 is not None]
        return statistics.median(found) if found else None

    @property
    def noise_multiplier(self) -> float | None:
        """Noise of the first run, which is that of all; None without privacy."""
        mechanism = self.runs[0].certificate.get("mechanism") if self.runs else None
        return None if mechanism is None else mechanism["noise_multiplier"]

    @property
    def epsilon(self) -> float | None:
        """Largest epsilon of the single runs; None without privacy."""
        return max((run.epsilon for run in self.runs if run.epsilon is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        recipe = self.row.recipe
        return {
            "row": self.row.name,
            "label": self.row.label,
            "command": recipe.command,
            "paper": recipe.accuracy,
            "paper_top5": recipe.top5,
            "paper_words": recipe.paper,
            "epsilon": self.epsilon,
            "n": len(self.runs),
            "median": self.median,
            "mean": self.mean,
            "std": self.std,
            "best": self.best,
            "top5": self.top5,
            "together": composed(self.bills) if self.bills else None,
            "runs": [run.to_dict() for run in self.runs],
            "failed": [failure.to_dict() for failure in self.failures],
        }


def is_begun(run: Path) -> bool:
    """Return whether the folder holds anything of a run."""
    return run.is_dir() and any(run.iterdir())


def is_finished(run: Path) -> bool:
    """Return whether the run in that folder was released after the last planned step."""
    folder = RunFolder.open(run)
    if not (folder.release / CERTIFICATE).exists():
        return False
    curve = _read(folder.release / METRICS).get("curve")
    config: RunConfig = parse_config(folder.read_config())
    return bool(curve) and curve[-1].get("step") == config.privacy.steps


def read_result(run: Path, *, repeat: int) -> RunResult:
    """Read the result of a finished run from its release.

    Args:
        run: The run's folder.
        repeat: Number of the repeat, from 1.

    Returns:
        Accuracy and certificate.

    Raises:
        TamperError: The release does not verify.
        DPVisionError: The release states no accuracy and no Dice.
    """
    found = verify(run)
    if not found.ok:
        raise TamperError(f"{run} is not in order: {found.problems[0]}")
    folder = RunFolder.open(run)
    release, plan = folder.release, parse_config(folder.read_config()).privacy
    metrics = _read(release / METRICS)
    final_metrics = metrics.get("final", {})
    share = final_metrics.get("dice", final_metrics.get("accuracy"))
    if not isinstance(share, float):
        raise DPVisionError(f"{run} has no accuracy and no Dice in its {METRICS}.")
    top5 = final_metrics.get("top5")
    rate = required(plan.expected_batch_size, "expected_batch_size") / required(plan.num_units, "num_units")
    curve = tuple(
        CurvePoint(rate * point["step"], point["epsilon"] if plan.enabled else None, 100 * _share_of(point))
        for point in metrics.get("curve", ())
    )
    return RunResult(
        repeat=repeat,
        run=str(run),
        accuracy=100 * share,
        top5=None if top5 is None else 100 * top5,
        certificate=_read(release / CERTIFICATE),
        curve=curve,
    )


def _share_of(metrics: dict[str, Any]) -> float:
    """Return accuracy, or for masks the mean Dice, as a share."""
    return metrics["dice"] if "dice" in metrics else metrics["accuracy"]


def _read(path: Path) -> dict[str, Any]:
    return parse_object(read_file(path), name=str(path))


SCALES: Final = ("paper", "cpu", "quick")
JSON, PAGE, CHART = "table.json", "table.md", "table.svg"


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run.

    Args:
        table: The table.
        folder: Where runs and results are written.
        scale: ``paper``, ``cpu`` (reduced versions) or ``quick`` (smoke test on synthetic images).
        repeats: Runs per row, at least 1.
        rows: Names or patterns of rows; empty means all.
        own_sources: Whether each repeat starts from a run of the earlier recipe of its own, on its own draw of classes
            where its data is such a draw; otherwise one run gives its weights to all rows and repeats.
        device: ``cpu`` or ``cuda``.

    Raises:
        ArgumentError: A value is out of range.
    """

    table: Table
    folder: Path
    scale: str = "paper"
    repeats: int = 1
    rows: tuple[str, ...] = ()
    own_sources: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        problems = Problems()
        problems.count("repeats", self.repeats)
        problems.require(self.scale in SCALES, f"--scale must be one of {', '.join(SCALES)}, got {self.scale!r}.")
        problems.raise_if_any()

    def run_folder(self, recipe: Recipe, repeat: int) -> Path:
        """Return the folder of a run of that recipe."""
        return self.folder / "runs" / recipe.name / str(repeat)

    def asked(self, recipe: Recipe) -> RunConfig:
        """Return the configuration at this scale without paths of this machine, as it is recorded."""
        if self.scale == "quick":
            return changed(recipe.config, name=f"{recipe.name}-quick")
        return recipe.at(self.scale)

    def config(self, recipe: Recipe, repeat: int = 1) -> RunConfig:
        """Return the configuration at this scale with the paths of its data."""
        if self.scale == "quick":
            return quick_config(recipe.config, self.folder.resolve() / "made-up")
        return place_data(with_draw(self.asked(recipe), repeat if self.own_sources else 1))

    def source_of(self, repeat: int) -> int:
        """Return the number of the run that gives its weights to that repeat."""
        return repeat if self.own_sources else 1


@final
@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a job, and the files that state them.

    ``sources`` are runs that gave initial weights to others; ``bills`` are the costs of all runs in the folder.
    """

    job: Job
    results: tuple[RowResult, ...]
    sources: tuple[RunResult, ...] = ()
    bills: tuple[Bill, ...] = ()
    interrupted: bool
    written: tuple[Path, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether any run failed."""
        return any(result.failures for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        job = self.job
        return {
            "table": job.table.name,
            "title": job.table.title,
            "scale": job.scale,
            "smoke_test": MEANS_NOTHING if job.scale == "quick" else None,
            "repeats": job.repeats,
            "own_sources": job.own_sources,
            "interrupted": self.interrupted,
            "rows": [result.to_dict() for result in self.results],
            "sources": [run.to_dict() for run in self.sources],
            **released_together(self.bills),
        }


@dataclass
class _Progress:
    """Results so far, by row."""

    runs: dict[str, list[RunResult]] = field(default_factory=dict)
    failures: dict[str, list[Failure]] = field(default_factory=dict)
    sources: dict[tuple[str, int], RunResult] = field(default_factory=dict)


class _Stopped(Exception):
    """A run was asked to stop."""


class Unfinished(DPVisionError):
    """A run ended before the last step of its plan."""


def reproduce(job: Job, *, callback: RunCallback | None = None) -> Report:
    """Run what has not been run yet, and write the table.

    Finished runs are read from their releases, started ones are resumed. A run that fails is recorded and does not stop
    the others; its reason goes to ``callback`` only. The files are written after every run, so an interruption loses
    nothing.

    Args:
        job: What to run.
        callback: Receives progress and messages.

    Returns:
        The results, and whether the job was interrupted.

    Raises:
        ArgumentError: The folder holds runs of another configuration of a row, or a row does not exist.
    """
    callback = callback or RunCallback()
    rows = job.table.choose(job.rows)
    for row in rows:
        _require_same(job, row.recipe)
    progress = _Progress()
    interrupted = False
    try:
        for repeat in range(1, job.repeats + 1):
            for row in rows:
                _run_row(job, row, repeat, progress, callback)
                _write(_report(job, rows, progress, interrupted=False), chart=False)
    except (_Stopped, KeyboardInterrupt):
        interrupted = True
    return _write(_report(job, rows, progress, interrupted=interrupted), chart=True)


def _require_same(job: Job, recipe: Recipe) -> None:
    """Refuse a folder in which this recipe was run with another configuration."""
    path = job.folder / "runs" / recipe.name / "recipe.json"
    if path.exists() and read_file(path) != _asked_text(job, recipe).encode():
        raise ArgumentError(
            f"{path.parent} holds runs of another configuration of {recipe.name} (another scale or version). "
            "Choose another --output."
        )


def _asked_text(job: Job, recipe: Recipe) -> str:
    try:
        return job.asked(recipe).to_json()
    except ArgumentError:  # no version at this scale: said where the row is run
        return ""


def _run_row(job: Job, row: Row, repeat: int, progress: _Progress, callback: RunCallback) -> None:
    """Run a row once and record its result, or why there is none."""
    started = time.monotonic()
    try:
        source_run = (row.recipe.after or "", job.source_of(repeat))
        if row.recipe.after is not None and source_run not in progress.sources:
            source = find_recipe(row.recipe.after)
            _require_same(job, source)
            progress.sources[source_run] = _result_of(job, source, job.source_of(repeat), callback)
        result = _result_of(job, row.recipe, repeat, callback)
    except (DPVisionError, RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        failure = Failure(repeat=repeat, kind=type(error).__name__, reason=reason)
        progress.failures.setdefault(row.name, []).append(failure)
        callback.message(f"{row.label}, run {repeat}: failed: {reason}")
        return
    progress.runs.setdefault(row.name, []).append(result)
    seconds = time.monotonic() - started
    callback.message(f"{row.label}, run {repeat}: {result.accuracy:.2f} % ({seconds:.0f} s)")


def _result_of(job: Job, recipe: Recipe, repeat: int, callback: RunCallback) -> RunResult:
    run = job.run_folder(recipe, repeat)
    if is_begun(run):
        _finish(run, lambda: resume_training(run, device=job.device, callback=callback))
    else:
        config = job.config(recipe, repeat)
        if recipe.after is not None and config.transfer is not None:
            source = job.run_folder(find_recipe(recipe.after), job.source_of(repeat)).resolve()
            config = changed(config, transfer={"weights": str(source)})
        _note_asked(job, recipe)
        # A smoke test must never pass for a release: a seed set by hand stamps it.
        seed = repeat if job.scale == "quick" else None
        _finish(run, lambda: train(config, run=run, seed=seed, device=job.device, callback=callback))
    return read_result(run, repeat=repeat)


def _note_asked(job: Job, recipe: Recipe) -> None:
    path = job.folder / "runs" / recipe.name / "recipe.json"
    with disk_errors(f"write {path}"):
        write_atomically(path, _asked_text(job, recipe).encode())


def _finish(run: Path, go: Callable[[], Any]) -> None:
    """Run to the last planned step, unless that was done before."""
    if is_begun(run) and is_finished(run):
        return
    outcome = go().outcome
    if outcome == "stopped":
        raise _Stopped
    if outcome != "finished":
        raise Unfinished(
            f"{run} spent its budget before the last step of its plan: it forked, and repeated steps were charged. "
            "It gives no result; more --repeats give another run."
        )


def _report(job: Job, rows: tuple[Row, ...], progress: _Progress, *, interrupted: bool) -> Report:
    bills = read_bills(job.folder, smoke_test=job.scale == "quick")
    results = tuple(
        RowResult(
            row=row,
            runs=tuple(progress.runs.get(row.name, ())),
            failures=tuple(progress.failures.get(row.name, ())),
            bills=tuple(bill for bill in bills if bill.recipe == row.name),
        )
        for row in rows
    )
    sources = tuple(run for (name, _), run in progress.sources.items() if name not in {row.name for row in rows})
    return Report(job=job, results=results, sources=sources, bills=bills, interrupted=interrupted)


def _write(report: Report, *, chart: bool) -> Report:
    values = report.to_dict()
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    contents = {JSON: text.encode(), PAGE: markdown(values).encode()}
    if chart:
        contents[CHART] = draw_table(values)
    folder = report.job.folder
    with disk_errors(f"write the table into {folder}"):
        for name, content in contents.items():
            write_atomically(folder / name, content)
    written = [folder / name for name in contents]
    figure = table_chart(report.job.table, report.results) if chart else None
    if figure is not None:
        written += write_chart(folder, figure, stamps=[values["smoke_test"]] if values["smoke_test"] else ())
    return replace(report, written=tuple(written))
