"""Runs for tests of tables: smoke tests, and folders that look as if a run had spent something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpvision.papers.reproduce import Job
from dpvision.papers.tables import Row, Table
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import Event
from dpvision.release.statements import NOT_FOR_RELEASE
from dpvision.storage.run_folder import RunFolder
from dpvision.training.start import ledger_header
from tiny_runs import tiny_config

TANH, RELU = "mnist-shoefit-tanh", "mnist-shoefit-relu"
TWO = Table(name="two", title="Two rows", rows=(Row("tanh", TANH), Row("relu", RELU)))
PLANNED = 5
STEP = Event(sample_rate=20 / 60, noise_multiplier=1.3)


def quick(folder: Path, **changes: Any) -> Job:
    """Two smoke tests."""
    return Job(**{"table": TWO, "folder": folder, "scale": "quick", **changes})


def spend(run: Path, *, source: str = "mnist", steps: int = 3, reasons: tuple[str, ...] = (), **privacy: Any) -> None:
    """A run that was killed after so many steps at ``STEP``; ``reasons`` stand against a release."""
    settings = {"steps": PLANNED, "privacy_unit": "example", **privacy}
    config = tiny_config(Path(source), privacy=settings)
    with RunFolder.create(run) as folder:
        ledger = Ledger.create(folder.ledger_path, ledger_header(config, "a run", hand_seeded=False))
        for reason in reasons:
            ledger.note("declare", {"what": NOT_FOR_RELEASE, "how": reason})
        for step in range(steps if config.privacy.enabled else 0):
            ledger.charge(config.mechanism.step_event, step=step)
        folder.write_config(config.public().to_json())
