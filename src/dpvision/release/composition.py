"""The privacy cost of several runs together, from their ledgers: composed by PLD, never the largest of them.

A run whose cost cannot be read, or that has no guarantee, voids the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from dpvision.accounting import guarantee
from dpvision.errors import ArgumentError, DPVisionError
from dpvision.privacy.ledger import Entry, charges_of, read_ledger, require_mark
from dpvision.privacy.mechanism import Adjacency, Event, Mechanism
from dpvision.release.schema import parse_certificate
from dpvision.release.search_claim import search_bounds, search_cost
from dpvision.release.statements import NO_PRIVACY, stamps_of
from dpvision.storage.files import parse_object, read_file
from dpvision.storage.run_folder import CERTIFICATE, SEARCH_LEDGER, RunFolder

UNREADABLE = "what it spent can't be read from its ledger and configuration"


@final
@dataclass(frozen=True, kw_only=True)
class Bill:
    """What one run has spent, by its ledger.

    ``source`` names the dataset, or None where that cannot be known. ``voids`` are the reasons why the charges prove
    nothing. ``run_id`` and ``head`` identify the run and the state of its ledger; ``earlier`` are the identifiers of
    private runs that its initial weights come from, whose charges are not in this ledger. ``epsilon`` is set for a
    search whose price is no composition of charges: then it stands for them.
    """

    run: str
    source: str | None
    charges: tuple[tuple[Event, int], ...] = ()
    delta: float | None = None
    adjacency: Adjacency = "add_remove"
    privacy_unit: str = "example"
    voids: tuple[str, ...] = ()
    run_id: str = ""
    head: str = ""
    earlier: tuple[str, ...] = ()
    epsilon: float | None = None

    @property
    def recipe(self) -> str:
        """Name of the recipe, for runs of ``dpvision reproduce``."""
        return self.run.split("/")[0]


def read_bill(run: Path, name: str, *, passed: frozenset[str] = frozenset()) -> Bill | None:
    """Read what one run has spent, however it ended.

    Args:
        run: The run's folder.
        name: What the result calls it.
        passed: Stamps that do not void.

    Returns:
        The cost; None if the run spent nothing. That of the result of a search is the cost of the whole search.

    Guarantee:
        The ledger's chain is checked, and it holds everything that checkpoints and certificates state of it. A run
        whose cost cannot be read is void.
    """
    folder = RunFolder.open(run)
    try:
        searched = folder.release / SEARCH_LEDGER
        if searched.exists():
            return _search_bill(folder, read_ledger(searched), name, passed)
        marks = folder.known_marks()
        if not marks and not folder.ledger_path.exists():
            return None  # nothing is released before there is a ledger
        entries = read_ledger(folder.ledger_path)
        for length, head in marks.values():
            require_mark(entries, length=length, head=head, path=folder.ledger_path)
        header, charges = entries[0].payload, charges_of(entries)
        if header["delta"] is not None and not charges:
            return None
        config = parse_object(folder.read_config(), name=str(folder.release))
        stamps = _stamps(folder, entries)
        return Bill(
            run=name,
            source=_source(config, entries),
            charges=charges,
            delta=header["delta"],
            adjacency=header["adjacency"],
            privacy_unit=header["privacy_unit"],
            voids=tuple(stamp for stamp in stamps if stamp not in passed),
            run_id=str(header.get("run_id", "")),
            head=entries[-1].hash,
            earlier=tuple(_earlier(config.get("transfer"))),
        )
    except (DPVisionError, AttributeError, KeyError, TypeError):
        return Bill(run=name, source=None, voids=(UNREADABLE,))


def _search_bill(folder: RunFolder, search: tuple[Entry, ...], name: str, passed: frozenset[str]) -> Bill | None:
    """Read what a search has spent: all its trials, whichever of them is released."""
    header, charges = search[0].payload, charges_of(search)
    if not charges:
        return None
    bounds, accountant = search_bounds(search)
    finished = (folder.release / CERTIFICATE).exists()
    config: dict[str, Any] = {}
    stamps: tuple[str, ...] = ("its search is not finished: dpvision tune --resume continues it",)
    run: tuple[Entry, ...] = ()
    if finished:
        run = read_ledger(folder.ledger_path)
        search_cost(search, run)  # refuses a run of another search
        config = parse_object(folder.read_config(), name=str(folder.release))
        stamps = _stamps(folder, run, searched=True)
    return Bill(
        run=name,
        source=_source(config, run) if finished else None,
        charges=charges,
        delta=header["delta"],
        adjacency=header["adjacency"],
        privacy_unit=header["privacy_unit"],
        voids=tuple(stamp for stamp in stamps if stamp not in passed),
        run_id=str(run[0].payload["run_id"]) if run else str(header["run_id"]),
        head=search[-1].hash,
        earlier=tuple(_earlier(config.get("transfer"))),
        epsilon=None if accountant == "pld" else bounds.epsilon,
    )


def _stamps(folder: RunFolder, entries: tuple[Entry, ...], *, searched: bool = False) -> tuple[str, ...]:
    """Return the reasons against a release: those in the ledger, and those of the certificate if there is one."""
    header = entries[0].payload
    planned = None
    if header["delta"] is not None:
        names = set(Mechanism.__dataclass_fields__) & header.keys()
        planned = Mechanism(**{name: header[name] for name in names})
    found = stamps_of(entries, planned, searched=searched)
    path = folder.release / CERTIFICATE
    if path.exists():
        found = [*found, *parse_certificate(parse_object(read_file(path), name=str(path))).stamps]
    return tuple(dict.fromkeys(found))


def _source(config: dict[str, Any], entries: tuple[Entry, ...]) -> str | None:
    """Return the name of the data; None where it is not known, or a fork changed it."""
    named = {Path(config["data"]["source"]).name} if "data" in config else set[str]()
    named |= {entry.payload["how"] for entry in entries if entry.payload.get("what") == "training data"}
    return named.pop() if len(named) == 1 else None


def _earlier(transfer: Any) -> Iterator[str]:
    """Follow initial weights back to the private runs that they come from."""
    while transfer is not None and transfer["prior"] is not None:
        if transfer["prior"]["epsilon"] is not None:
            yield str(transfer["prior"]["run_id"])
        transfer = transfer["prior"]["transfer"]


def composed(bills: Sequence[Bill], *, delta: float | None = None) -> dict[str, Any]:
    """Compose the costs of runs that are released together.

    Args:
        bills: Costs of at least one run.
        delta: The delta of the sum. Default: the largest of theirs.

    Returns:
        Number of runs, epsilon, delta, adjacency, and ``void``: why there is no epsilon, or None.

    Guarantee:
        Epsilon is an upper bound by PLD on all charges together.
    """
    void = _void(bills)
    if void is None and bills[0].epsilon is not None:  # a search by itself
        (bill,) = bills
        same = delta in (None, bill.delta)
        void = None if same else f"run {bill.run}: its search has a price at delta {bill.delta:g} alone"
        epsilon, adjacency = (bill.epsilon, bill.adjacency) if same else (None, None)
        return {"runs": 1, "epsilon": epsilon, "delta": bill.delta, "adjacency": adjacency, "void": void}
    deltas = [bill.delta for bill in bills if bill.delta is not None]
    at = None if void is not None else delta or max(deltas)
    epsilon = None
    if at is not None:
        charges = tuple(charge for bill in bills for charge in bill.charges)
        epsilon = _epsilon(charges, at, bills[0].adjacency)
        void = None if epsilon is not None else f"no finite epsilon can be proved at delta {at:g}"
    adjacency = None if epsilon is None else bills[0].adjacency
    return {"runs": len(bills), "epsilon": epsilon, "delta": at, "adjacency": adjacency, "void": void}


def _void(bills: Sequence[Bill]) -> str | None:
    """Return why there is no epsilon for all of them together; runs without privacy are named first."""
    found = sorted(((bill, why) for bill in bills for why in bill.voids), key=lambda pair: pair[1] != NO_PRIVACY)
    if found:
        bill, why = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"run {bill.run}: {why}{more}"
    other = next((bill for bill in bills if bill.epsilon is not None), None)
    if len(bills) > 1 and other is not None:
        return f"run {other.run}: the price of its search is no composition, and does not add up with other runs"
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


def spent_together(bills: Sequence[Bill], *, disjoint: bool = False) -> dict[str, Any]:
    """Compose runs on any data: what all of them reveal about one unit that may be in the data of each.

    Args:
        bills: Costs of at least one run.
        disjoint: Whether the user declares that data of different names share no unit. Runs on data of one name still
            add up, and those on unknown data add to every name.

    Returns:
        As ``composed``, with ``disjoint`` and ``groups``: the sum of each name of data.

    Raises:
        ArgumentError: The same run is given twice.

    Guarantee:
        Epsilon is an upper bound for each unit: the sum of all runs, or, of data declared disjoint, the largest of the
        sums. All are at the smallest of the deltas, so that the sum is at least each single epsilon. It is
        void if the initial weights of a run come from a private run that is not among them.
    """
    seen: dict[str, str] = {}
    for bill in bills:
        if bill.head and bill.head in seen:
            raise ArgumentError(f"{seen[bill.head]} and {bill.run} are the same run: give it once.")
        seen[bill.head] = bill.run
    deltas = [bill.delta for bill in bills if bill.delta is not None]
    delta = min(deltas, default=None)
    known = {bill.run_id for bill in bills}
    missing = [(bill.run, run) for bill in bills for run in bill.earlier if run not in known]
    everything = composed(bills, delta=delta)
    if missing and everything["void"] is None:
        run, prior = missing[0]
        void = f"run {run}: its initial weights come from the private run {prior}, which is not given: give it too"
        return {**everything, "epsilon": None, "void": void, "disjoint": disjoint, "groups": []}
    if not disjoint:
        return {**everything, "disjoint": False, "groups": []}
    names = sorted({bill.source for bill in bills if bill.source is not None})
    groups = [
        {"source": name, **composed([bill for bill in bills if bill.source in (name, None)], delta=delta)}
        for name in names
    ]
    if not groups or everything["void"] is not None:
        return {**everything, "disjoint": True, "groups": groups}
    worst = max(groups, key=lambda group: math.inf if group["epsilon"] is None else group["epsilon"])
    return {**everything, "epsilon": worst["epsilon"], "void": worst["void"], "disjoint": True, "groups": groups}
