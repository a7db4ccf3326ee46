"""What the runs of a table show: the figures of finished ones, statistics over repeats, and what came to nothing."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from dpvision.checks import DPVisionError, TamperError
from dpvision.config import RunConfig, parse_config
from dpvision.reproduce.bills import Bill, composed
from dpvision.reproduce.table import Row
from dpvision.runfolder import CERTIFICATE, METRICS, RunFolder, parse_object, read_file
from dpvision.verify import verify


@final
@dataclass(frozen=True, kw_only=True)
class Figures:
    """One finished run, read from its release. ``accuracy`` is in percent; for masks it is the Dice of a picture."""

    repeat: int
    run: str
    accuracy: float
    top5: float | None
    certificate: dict[str, Any]

    @property
    def epsilon(self) -> float | None:
        """What this run alone guarantees; None without privacy."""
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
    """A run that did not come to its end. ``reason`` may depend on private data: only ``kind`` is written down."""

    repeat: int
    kind: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """What may be told of it."""
        return {"repeat": self.repeat, "kind": self.kind}


@final
@dataclass(frozen=True, kw_only=True)
class RowResult:
    """A row with what its runs showed; ``bills`` are those of all runs of its recipe that lie in the folder."""

    row: Row
    runs: tuple[Figures, ...] = ()
    failures: tuple[Failure, ...] = ()
    bills: tuple[Bill, ...] = ()

    @property
    def accuracies(self) -> list[float]:
        """In percent, in the order of the repeats."""
        return [run.accuracy for run in self.runs]

    @property
    def median(self) -> float | None:
        """The middle one."""
        return statistics.median(self.accuracies) if self.runs else None

    @property
    def mean(self) -> float | None:
        """The mean."""
        return statistics.fmean(self.accuracies) if self.runs else None

    @property
    def std(self) -> float | None:
        """The standard deviation of the sample; one run has none."""
        return statistics.stdev(self.accuracies) if len(self.runs) > 1 else None

    @property
    def best(self) -> float | None:
        """The largest: a look at the test set chose it."""
        return max(self.accuracies, default=None)

    @property
    def epsilon(self) -> float | None:
        """What the costliest of the runs guarantees by itself."""
        return max((run.epsilon for run in self.runs if run.epsilon is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        recipe = self.row.recipe
        return {
            "row": self.row.name,
            "label": self.row.label,
            "command": recipe.command,
            "paper": recipe.accuracy,
            "paper_words": recipe.paper,
            "epsilon": self.epsilon,
            "n": len(self.runs),
            "median": self.median,
            "mean": self.mean,
            "std": self.std,
            "best": self.best,
            "together": composed(self.bills) if self.bills else None,
            "runs": [run.to_dict() for run in self.runs],
            "failed": [failure.to_dict() for failure in self.failures],
        }


def is_begun(run: Path) -> bool:
    """Whether there is something of a run in that folder."""
    return run.is_dir() and any(run.iterdir())


def is_finished(run: Path) -> bool:
    """Whether the run in that folder was released after the last step of its plan."""
    folder = RunFolder.open(run)
    if not (folder.release / CERTIFICATE).exists():
        return False
    curve = _read(folder.release / METRICS).get("curve")
    config: RunConfig = parse_config(folder.read_config())
    return bool(curve) and curve[-1].get("step") == config.privacy.steps


def read_figures(run: Path, *, repeat: int) -> Figures:
    """The figures of a finished run. A release that does not verify is refused."""
    found = verify(run)
    if not found.ok:
        raise TamperError(f"{run} is not in order: {found.problems[0]}")
    release = RunFolder.open(run).release
    final_metrics = _read(release / METRICS).get("final", {})
    figure = final_metrics.get("dice", final_metrics.get("accuracy"))
    if not isinstance(figure, float):
        raise DPVisionError(f"{run} has no accuracy and no Dice in its {METRICS}.")
    top5 = final_metrics.get("top5")
    return Figures(
        repeat=repeat,
        run=str(run),
        accuracy=100 * figure,
        top5=None if top5 is None else 100 * top5,
        certificate=_read(release / CERTIFICATE),
    )


def _read(path: Path) -> dict[str, Any]:
    return parse_object(read_file(path), name=str(path))


def json_text(values: dict[str, Any]) -> str:
    """Readable JSON."""
    return json.dumps(values, indent=2, allow_nan=False) + "\n"
