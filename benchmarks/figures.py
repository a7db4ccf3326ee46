"""What a run measured, and the ratios that follow from it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, final

from benchmarks.contender import Kind
from benchmarks.contenders import REFERENCE
from benchmarks.workload import Workload
from dpvision.errors import ArgumentError
from dpvision.storage.files import disk_errors

NATIVE: Final = "dpvision-native"
PLAIN: Final = "dpvision-plain"
UNCLIPPED: Final = "dpvision-unclipped"


@final
@dataclass(frozen=True, kw_only=True)
class Target:
    """The most that a private step may take, in ratios to the ordinary eager step; None where nothing is demanded."""

    ratio: float
    memory_ratio: float | None = None
    plain_ratio: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender: seconds of every timed step, bytes beyond model and data, or why there are none."""

    contender: str
    label: str
    kind: Kind
    all_seconds: tuple[float, ...] = ()
    fails: str | None = None
    memory_bytes: int | None = None
    memory_fails: str | None = None

    @property
    def seconds(self) -> float | None:
        """The median."""
        return statistics.median(self.all_seconds) if self.all_seconds else None


@final
@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything about one workload."""

    suite: str
    workload: Workload
    flops: int
    rows: tuple[Row, ...]
    breakdown: Mapping[str, float] = field(default_factory=dict)
    target: Target | None = None

    def row(self, name: str) -> Row | None:
        """A contender's row, if it took part."""
        return next((row for row in self.rows if row.contender == name), None)

    def seconds(self, name: str) -> float | None:
        """A contender's median."""
        row = self.row(name)
        return None if row is None else row.seconds

    def ratio(self, name: str) -> float | None:
        """A contender's time as a multiple of the ordinary eager step's."""
        return _quotient(self.seconds(name), self.seconds(REFERENCE))

    def ratio_to_fastest(self, name: str) -> float | None:
        """A contender's time as a multiple of the fastest ordinary variant's."""
        return _quotient(self.seconds(name), self.seconds(self.fastest_ordinary or ""))

    def memory_ratio(self, name: str) -> float | None:
        """A contender's memory as a multiple of the ordinary eager step's."""
        mine, ordinary = self.row(name), self.row(REFERENCE)
        if mine is None or ordinary is None:
            return None
        return _quotient(mine.memory_bytes, ordinary.memory_bytes)

    def share_of(self, name: str, peak_flops: float) -> float | None:
        """How much of the machine's matrix-product peak a contender reaches with the ordinary step's operations."""
        seconds = self.seconds(name)
        return None if seconds is None else self.flops / seconds / peak_flops

    @property
    def fastest_ordinary(self) -> str | None:
        """The ordinary variant with the least median."""
        return self._fastest("ordinary")

    @property
    def fastest_peer(self) -> str | None:
        """The peer with the least median."""
        return self._fastest("peer")

    @property
    def headline(self) -> str:
        """The contender that stands for this library: native, or plain where there are no kernels."""
        return NATIVE if self.seconds(NATIVE) is not None else PLAIN

    @property
    def privacy_cost(self) -> float | None:
        """How much longer the private step takes than the same engine's without clipping and noise, as a share."""
        quotient = _quotient(self.seconds(NATIVE), self.seconds(UNCLIPPED))
        return None if quotient is None else quotient - 1

    @property
    def met(self) -> bool | None:
        """Whether every demand was met; None where nothing is demanded, or something demanded was not measured."""
        if self.target is None:
            return None
        demands = (
            (self.ratio(self.headline), self.target.ratio),
            (self.memory_ratio(self.headline), self.target.memory_ratio),
            (self.ratio(PLAIN), self.target.plain_ratio),
        )
        verdicts = [None if found is None else found <= most for found, most in demands if most is not None]
        if False in verdicts:
            return False
        return None if None in verdicts else True

    @property
    def faster_than_peers(self) -> bool | None:
        """Whether the private step takes less time than every peer's; None without a timed peer."""
        mine, theirs = self.seconds(self.headline), self.seconds(self.fastest_peer or "")
        return None if mine is None or theirs is None else mine < theirs

    @property
    def smaller_than_peers(self) -> bool | None:
        """Whether the private step takes less memory than every peer's; None where no peer's is known."""
        mine = self.row(self.headline)
        theirs = [row.memory_bytes for row in self.rows if row.kind == "peer" and row.memory_bytes is not None]
        return None if mine is None or mine.memory_bytes is None or not theirs else mine.memory_bytes < min(theirs)

    def _fastest(self, kind: Kind) -> str | None:
        timed = [(row.seconds, row.contender) for row in self.rows if row.kind == kind and row.seconds is not None]
        return min(timed)[1] if timed else None


@final
@dataclass(frozen=True, kw_only=True)
class Figures:
    """One run of the benchmark: the machine by its features, and a result for each workload."""

    machine: Mapping[str, str | int]
    threads: int
    repeats: int
    peak_flops: float
    results: tuple[Result, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: what was measured, and what follows from it."""
        return {
            "machine": dict(self.machine),
            "threads": self.threads,
            "repeats": self.repeats,
            "peak_gflops": self.peak_flops / 1e9,
            "results": [_plain_values(result, self.peak_flops) for result in self.results],
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Figures:
        """The inverse of ``to_dict``: reads what was measured; what follows from it is worked out again."""
        try:
            return Figures(
                machine=values["machine"],
                threads=values["threads"],
                repeats=values["repeats"],
                peak_flops=values["peak_gflops"] * 1e9,
                results=tuple(_result(result) for result in values["results"]),
            )
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"not the figures of a benchmark: {type(error).__name__} {error}.") from error


def load(path: Path) -> Figures:
    """The figures that ``--json`` or a page left in a file."""
    with disk_errors(f"read {path.name}"):
        content = path.read_bytes()
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ArgumentError(f"{path.name} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ArgumentError(f"not the figures of a benchmark: {path.name} holds a {type(values).__name__}.")
    return Figures.from_dict(values)


def joined(runs: Sequence[Figures]) -> Figures:
    """Several runs on one machine as one; a workload that was measured again has its newest figures.

    Refuses runs that can't be compared.
    """
    first = runs[0]
    for other in runs[1:]:
        if (other.machine, other.threads) != (first.machine, first.threads):
            raise ArgumentError("figures can be joined only if they come from one machine and number of threads.")
    newest = {(result.suite, result.workload): result for run in runs for result in run.results}
    suites = list(dict.fromkeys(suite for suite, _ in newest))
    return replace(
        first,
        repeats=min(run.repeats for run in runs),
        peak_flops=max(run.peak_flops for run in runs),
        results=tuple(sorted(newest.values(), key=lambda result: suites.index(result.suite))),
    )


def _plain_values(result: Result, peak_flops: float) -> dict[str, Any]:
    return {
        "suite": result.suite,
        "workload": asdict(result.workload),
        "flops": result.flops,
        "target": None if result.target is None else asdict(result.target),
        "met": result.met,
        "privacy_cost": result.privacy_cost,
        "fastest_ordinary": result.fastest_ordinary,
        "fastest_peer": result.fastest_peer,
        "faster_than_peers": result.faster_than_peers,
        "smaller_than_peers": result.smaller_than_peers,
        "breakdown": dict(result.breakdown),
        "rows": [_row_values(result, row, peak_flops) for row in result.rows],
    }


def _row_values(result: Result, row: Row, peak_flops: float) -> dict[str, Any]:
    share = result.share_of(row.contender, peak_flops)
    return {
        **asdict(row),
        "seconds": row.seconds,
        "ratio": result.ratio(row.contender),
        "ratio_to_fastest_ordinary": result.ratio_to_fastest(row.contender),
        "memory_ratio": result.memory_ratio(row.contender),
        "gflops": None if share is None else share * peak_flops / 1e9,
        "share_of_peak": share,
    }


def _result(values: Mapping[str, Any]) -> Result:
    return Result(
        suite=values["suite"],
        workload=Workload(**values["workload"]),
        flops=values["flops"],
        rows=tuple(_row(row) for row in values["rows"]),
        breakdown=values["breakdown"],
        target=None if values["target"] is None else Target(**values["target"]),
    )


def _row(values: Mapping[str, Any]) -> Row:
    stored = {each.name: values[each.name] for each in fields(Row)}
    return Row(**{**stored, "all_seconds": tuple(values["all_seconds"])})


def _quotient(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
