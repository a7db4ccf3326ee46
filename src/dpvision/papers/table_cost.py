"""The privacy cost of all runs in a folder together: finished, failed, stopped and earlier runs alike.

Costs are read from the ledgers and composed by PLD, dataset by dataset. A run whose cost cannot be read voids the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from dpvision.accounting import guarantee
from dpvision.config import RunConfig, parse_config
from dpvision.errors import ArgumentError, DPVisionError
from dpvision.papers.recipe_data import subset_sources
from dpvision.privacy.ledger import Entry, charges_of, read_ledger, require_mark
from dpvision.privacy.mechanism import Adjacency, Event
from dpvision.release.schema import parse_certificate
from dpvision.release.statements import HAND_SEEDED_STAMPS, NO_PRIVACY, stamps_of
from dpvision.storage.files import parse_object, read_file
from dpvision.storage.run_folder import CERTIFICATE, RunFolder

UNREADABLE = "what it spent can't be read from its ledger and configuration"


@final
@dataclass(frozen=True, kw_only=True)
class Bill:
    """What one run has spent, by its ledger.

    ``source`` names the dataset, or None where that cannot be known. ``voids`` are the reasons why the charges prove
    nothing.
    """

    run: str
    source: str | None
    charges: tuple[tuple[Event, int], ...] = ()
    delta: float | None = None
    adjacency: Adjacency = "add_remove"
    privacy_unit: str = "example"
    voids: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        """Name of the recipe."""
        return self.run.split("/")[0]


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
    found = (_read_bill(path.parent, path.parent.relative_to(runs).as_posix(), passed) for path in releases)
    return tuple(bill for bill in found if bill is not None)


def _read_bill(run: Path, name: str, passed: frozenset[str]) -> Bill | None:
    """Read one run; None if it spent nothing. ``passed`` are stamps that do not void."""
    folder = RunFolder.open(run)
    try:
        marks = folder.known_marks()
        if not marks and not folder.ledger_path.exists():
            return None  # nothing is released before there is a ledger
        entries = read_ledger(folder.ledger_path)
        for length, head in marks.values():
            require_mark(entries, length=length, head=head, path=folder.ledger_path)
        header, charges = entries[0].payload, charges_of(entries)
        if header["delta"] is not None and not charges:
            return None
        config = parse_config(folder.read_config())
        stamps = _stamps(folder, entries, config)
    except DPVisionError:
        return Bill(run=name, source=None, voids=(UNREADABLE,))
    return Bill(
        run=name,
        source=_dataset_name(config),
        charges=charges,
        delta=header["delta"],
        adjacency=header["adjacency"],
        privacy_unit=header["privacy_unit"],
        voids=tuple(stamp for stamp in stamps if stamp not in passed),
    )


def _stamps(folder: RunFolder, entries: tuple[Entry, ...], config: RunConfig) -> tuple[str, ...]:
    """Return the reasons against a release: those in the ledger, and those of the certificate if there is one."""
    private = entries[0].payload["delta"] is not None
    found = stamps_of(entries, config.mechanism if private else None)
    path = folder.release / CERTIFICATE
    if path.exists():
        found = [*found, *parse_certificate(parse_object(read_file(path), name=str(path))).stamps]
    return tuple(dict.fromkeys(found))


def _dataset_name(config: RunConfig) -> str:
    """Return the name of the dataset; parts of CIFAR-100 are CIFAR-100."""
    source = Path(config.data.source).name
    return "cifar100" if source in subset_sources() else source


def composed(bills: Sequence[Bill]) -> dict[str, Any]:
    """Compose the costs of runs that are released together.

    Args:
        bills: Costs of at least one run.

    Returns:
        Number of runs, epsilon, delta, adjacency, and ``void``: why there is no epsilon, or None.

    Guarantee:
        Epsilon is an upper bound by PLD on all charges together, at the largest of the deltas.
    """
    void = _void(bills)
    deltas = [bill.delta for bill in bills if bill.delta is not None]
    delta = None if void is not None else max(deltas)
    epsilon = None
    if delta is not None:
        charges = tuple(charge for bill in bills for charge in bill.charges)
        epsilon = _epsilon(charges, delta, bills[0].adjacency)
        void = None if epsilon is not None else f"no finite epsilon can be proved at delta {delta:g}"
    adjacency = None if epsilon is None else bills[0].adjacency
    return {"runs": len(bills), "epsilon": epsilon, "delta": delta, "adjacency": adjacency, "void": void}


def _void(bills: Sequence[Bill]) -> str | None:
    """Return why there is no epsilon for all of them together; runs without privacy are named first."""
    found = sorted(((bill, why) for bill in bills for why in bill.voids), key=lambda pair: pair[1] != NO_PRIVACY)
    if found:
        bill, why = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"run {bill.run}: {why}{more}"
    if len({(bill.adjacency, bill.privacy_unit) for bill in bills}) > 1:
        return "its runs protect different units or by different adjacencies, which have no common epsilon"
    return None


@lru_cache(maxsize=1024)
def _epsilon(charges: tuple[tuple[Event, int], ...], delta: float, adjacency: Adjacency) -> float | None:
    """Compute epsilon, cached because a table is written after every run; None where none can be proved."""
    try:
        epsilon = guarantee(charges, delta=delta, adjacency=adjacency).epsilon
    except ArgumentError:
        return None
    return epsilon if math.isfinite(epsilon) else None


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
