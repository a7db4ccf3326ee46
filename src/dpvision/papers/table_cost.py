"""What the ledgers in a folder of runs cost together: finished, failed, stopped and earlier runs alike."""

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

    ``source`` names the pictures, and is None where that can't be known. ``voids`` are the reasons why the charges
    prove nothing.
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
        """Whose run it is."""
        return self.run.split("/")[0]


def read_bills(folder: Path, *, smoke_test: bool = False) -> tuple[Bill, ...]:
    """The bill of every run below ``folder``/runs that has spent anything, whoever asked for it and however it ended.

    Seeds set by hand void, except in a ``smoke_test``, whose pictures are made up and which says that it means nothing.

    Guarantee: a run that spent something is among them; if what it spent can't be told, it voids.
    """
    passed = HAND_SEEDED_STAMPS if smoke_test else frozenset[str]()
    runs = folder / "runs"
    releases = sorted(path for path in runs.rglob("release") if path.is_dir())
    found = (_read_bill(path.parent, path.parent.relative_to(runs).as_posix(), passed) for path in releases)
    return tuple(bill for bill in found if bill is not None)


def _read_bill(run: Path, name: str, passed: frozenset[str]) -> Bill | None:
    """``passed`` are stamps that do not void."""
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
        source=_pictures_of(config),
        charges=charges,
        delta=header["delta"],
        adjacency=header["adjacency"],
        privacy_unit=header["privacy_unit"],
        voids=tuple(stamp for stamp in stamps if stamp not in passed),
    )


def _stamps(folder: RunFolder, entries: tuple[Entry, ...], config: RunConfig) -> tuple[str, ...]:
    """Reasons against a release: those that the ledger shows, and those of the certificate, if it came to one."""
    private = entries[0].payload["delta"] is not None
    found = stamps_of(entries, config.mechanism if private else None)
    path = folder.release / CERTIFICATE
    if path.exists():
        found = [*found, *parse_certificate(parse_object(read_file(path), name=str(path))).stamps]
    return tuple(dict.fromkeys(found))


def _pictures_of(config: RunConfig) -> str:
    """A name for whose pictures were seen; parts of CIFAR-100 are CIFAR-100."""
    source = Path(config.data.source).name
    return "cifar100" if source in subset_sources() else source


def composed(bills: Sequence[Bill]) -> dict[str, Any]:
    """What these runs, one at least, guarantee if all of them are released; ``void`` says why they don't.

    Guarantee: an upper bound by PLD on all charges together, at the largest of the deltas. None with ``void``.
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
    """Why there is no epsilon for all of them together; no privacy is named first."""
    found = sorted(((bill, why) for bill in bills for why in bill.voids), key=lambda pair: pair[1] != NO_PRIVACY)
    if found:
        bill, why = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"run {bill.run}: {why}{more}"
    if len({(bill.adjacency, bill.privacy_unit) for bill in bills}) > 1:
        return "its runs protect different units or by different adjacencies, which have no common figure"
    return None


@lru_cache(maxsize=1024)
def _epsilon(charges: tuple[tuple[Event, int], ...], delta: float, adjacency: Adjacency) -> float | None:
    """Kept, because a table is written anew after every run; None where rounding does not let one be proved."""
    try:
        epsilon = guarantee(charges, delta=delta, adjacency=adjacency).epsilon
    except ArgumentError:
        return None
    return epsilon if math.isfinite(epsilon) else None


def released_together(bills: Sequence[Bill]) -> dict[str, Any]:
    """The same for all runs of a folder, dataset by dataset, and how many of them have no privacy at all.

    A run whose data can't be known may have seen any of them, so it voids all.
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
