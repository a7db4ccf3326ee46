"""Runs in a folder: data, model, epsilon, result, and whether each is finished. Reads public files; needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

from dpvision.errors import ArgumentError, DPVisionError
from dpvision.privacy.ledger import TRAINING, read_ledger
from dpvision.privacy.mechanism import rounded_up
from dpvision.release.composition import UNREADABLE, Bill, composed, read_bill
from dpvision.release.report import score_text
from dpvision.release.run_facts import RunFacts, read_run, reasons_against_release
from dpvision.storage.files import parse_object
from dpvision.storage.run_folder import CERTIFICATE, CONFIG, OWN_LOOP, SEARCH_LEDGER, RunFolder

State = Literal["finished", "interrupted", "running", "unsafe", "failed"]
_DEEPEST = 4
_UNFINISHED = "a search: dpvision tune --resume continues it"
_NEVER_SEARCHED = ("release", "private", "logs")


@final
@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run of a list.

    Attributes:
        path: its folder.
        data: the name of its data, if it is known.
        model: the name of its model.
        state: finished; interrupted (``dpvision resume`` continues it); running now; unsafe (complete, but not for
            release); or failed (it ended in an error, or a file is damaged).
        why: the reason of an unsafe or failed run, or that an interrupted one is a search.
        steps: training steps that were charged, and planned; None without privacy.
        epsilon: of everything in the ledger, 0 before the first charge; None without privacy.
        delta: of the guarantee.
        facts: the public files of a run that has a certificate.
        bill: what it spent; None if it spent nothing.
    """

    path: Path
    data: str | None = None
    model: str | None = None
    state: State
    why: str | None = None
    steps: tuple[int, int] | None = None
    epsilon: float | None = None
    delta: float | None = None
    facts: RunFacts | None = None
    bill: Bill | None = None

    @property
    def result(self) -> str | None:
        """The headline metric in words."""
        final = None if self.facts is None else self.facts.final
        if final is None or self.facts is None:
            return None
        return f"{self.facts.score_name} {score_text(final, final.score)}".replace("\u00a0", " ")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; epsilon and score are not rounded."""
        final = None if self.facts is None else self.facts.final
        return {
            "run": str(self.path),
            "data": self.data,
            "model": self.model,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "metric": None if final is None or self.facts is None else self.facts.score_name,
            "score": None if final is None else final.score,
            "steps": None if self.steps is None else self.steps[0],
            "planned_steps": None if self.steps is None else self.steps[1],
            "state": self.state,
            "why": self.why,
        }

    def to_row(self) -> dict[str, str]:
        """Texts for a table; epsilon is rounded up."""
        epsilon = "none" if self.epsilon is None else rounded_up(self.epsilon)
        return {
            "run": str(self.path),
            "data": self.data or "–",
            "model": self.model or "–",
            "epsilon": "–" if self.bill is None and self.state == "failed" else epsilon,
            "result": self.result or "–",
            "state": self.state if self.why is None else f"{self.state}: {self.why}",
        }


def list_runs(folder: Path) -> list[RunSummary]:
    """Describe every run in a folder and in the folders below it, ordered by path.

    Args:
        folder: The folder, or that of one run.

    Returns:
        One summary for each run, whatever became of it.

    Raises:
        ArgumentError: There is no such folder.
    """
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is no folder. Give one that holds runs, such as runs.")
    return [describe_run(path) for path in sorted(_runs_below(folder, _DEEPEST))]


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Find run folders; links are not followed, and nothing inside a run is searched."""
    if (folder / "private" / "checkpoints").is_dir() or (folder / "release" / CONFIG).exists():
        yield folder
        return
    if depth and os.access(folder, os.R_OK | os.X_OK):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink() and path.name not in _NEVER_SEARCHED:
                yield from _runs_below(path, depth - 1)


def describe_run(path: Path) -> RunSummary:
    """Describe one run; damage is a state, not an error.

    Args:
        path: The run's folder.

    Raises:
        ArgumentError: The folder is not that of a run.
    """
    if not (path / "release").is_dir() and not (path / "private").is_dir():
        raise ArgumentError(f"{path} must be a run folder: it has no release/. Give what dpvision train made.")
    search = path / "release" / SEARCH_LEDGER
    if search.exists() and not (path / "release" / CERTIFICATE).exists():
        bill = read_bill(path, path.name)
        epsilon = 0.0 if bill is None else composed([replace(bill, voids=())])["epsilon"] if bill.charges else None
        return RunSummary(path=path, state="interrupted", why=_UNFINISHED, bill=bill, epsilon=epsilon)
    try:
        folder = RunFolder.open(path)
        bill = read_bill(path, path.name)
        config = parse_object(folder.read_config(), name=str(folder.release / CONFIG))
        facts = read_run(path) if (folder.release / CERTIFICATE).exists() else None
        data, model = _texts(config)
    except DPVisionError as error:
        folder = RunFolder(path)
        state, why = ("running", None) if folder.in_use() else ("failed", str(error))
        spent = folder.ledger_path.exists() or any(folder.checkpoints.glob("*"))
        bill = Bill(run=path.name, source=None, voids=(UNREADABLE,)) if spent else None
        return RunSummary(path=path, state=state, why=why, bill=bill)
    known = RunSummary(path=path, data=data, model=model, facts=facts, bill=bill, state="failed")
    if bill is not None and UNREADABLE in bill.voids:
        return replace(known, why=UNREADABLE)
    steps, private = _steps(folder)
    epsilon, delta = (0.0 if private else None), None
    if bill is not None and private:
        spent = composed([replace(bill, voids=())])  # of the mechanism, also where a run is not for release
        epsilon, delta = spent["epsilon"], spent["delta"]
    state, why = _state(folder, facts, steps)
    return replace(known, state=state, why=why, steps=steps, epsilon=epsilon, delta=delta)


def _texts(config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The names of data and model in a configuration, as far as they are texts."""
    parts = (config.get("data"), "source"), (config.get("model"), "name")
    found = [part.get(key) if isinstance(part, dict) else None for part, key in parts]
    data, model = (value if isinstance(value, str) else None for value in found)
    return (None if data is None else Path(data).name), model or (OWN_LOOP if config.get("task") == OWN_LOOP else None)


def _steps(folder: RunFolder) -> tuple[tuple[int, int] | None, bool]:
    """Steps charged and planned, and whether the run is private."""
    if not folder.ledger_path.exists():
        return None, True
    entries = read_ledger(folder.ledger_path)
    header = entries[0].payload
    if header["delta"] is None:
        return None, False
    charged = sum(entry.kind == "charge" and entry.payload["purpose"] == TRAINING for entry in entries)
    return (charged, int(header["steps"])), True


def _state(folder: RunFolder, facts: RunFacts | None, steps: tuple[int, int] | None) -> tuple[State, str | None]:
    if folder.in_use():
        return "running", None
    if folder.failure_path.exists():
        return "failed", "it ended in an error; dpvision resume shows it"
    if facts is None:
        return "interrupted", None
    reasons = reasons_against_release(facts.certificate)
    if reasons:
        return "unsafe", reasons[0]
    return ("interrupted" if steps is not None and steps[0] < steps[1] else "finished"), None
