"""The privacy cost of all runs in a folder together: finished, failed, stopped and earlier runs alike.

Costs are read from the ledgers and composed by PLD (``release.composition``), dataset by dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpvision.papers.recipe_data import subset_of
from dpvision.release.composition import Bill, composed, read_bill
from dpvision.release.statements import HAND_SEEDED_STAMPS, NO_PRIVACY


def read_bills(folder: Path, *, smoke_test: bool = False) -> tuple[Bill, ...]:
    """Read the cost of every run below ``folder``/runs that has spent anything, however it ended.

    Args:
        folder: Folder of a job.
        smoke_test: Whether the runs are smoke tests on synthetic images; then seeds set by hand do not void.

    Returns:
        One entry per run, in the order of their paths.

    Guarantee:
        Every run that spent something is included; one whose cost cannot be read is void.
    """
    passed = HAND_SEEDED_STAMPS if smoke_test else frozenset[str]()
    runs = folder / "runs"
    releases = sorted(path for path in runs.rglob("release") if path.is_dir())
    found = (read_bill(path.parent, path.parent.relative_to(runs).as_posix(), passed=passed) for path in releases)
    return tuple(replace(bill, source=_dataset_name(bill.source)) for bill in found if bill is not None)


def _dataset_name(source: str | None) -> str | None:
    """Return the name of the dataset; parts of CIFAR-100 are CIFAR-100."""
    return "cifar100" if source is not None and subset_of(source) is not None else source


def released_together(bills: Sequence[Bill]) -> dict[str, Any]:
    """Compose all runs of a folder, dataset by dataset, and count those without privacy.

    A run whose data is unknown may have used any dataset, so it voids all of them.
    """
    by_source: dict[str, list[Bill]] = {}
    for bill in bills:
        if bill.source is not None:
            by_source.setdefault(bill.source, []).append(bill)
    unknown = [bill for bill in bills if bill.source is None]
    if unknown and not by_source:
        by_source = {"unknown data": []}
    return {
        "together": [{"source": source, **composed([*group, *unknown])} for source, group in by_source.items()],
        "without_privacy": sum(NO_PRIVACY in bill.voids for bill in bills),
    }
