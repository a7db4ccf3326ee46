"""docs/evidence/benchmarks.md: figures, a chart and the command that made them, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Final

from benchmarks.chart import bar_chart
from benchmarks.contenders import REFERENCE, contender
from benchmarks.contenders_jax import JAX
from benchmarks.figures import PLAIN, Figures, Result
from benchmarks.suites import SUITES
from benchmarks.table import (
    NOTHING,
    below_peers,
    demanded,
    machine_line,
    markdown,
    mebibytes,
    milliseconds,
    percent,
    ratio,
    verdict,
)
from benchmarks.workload import Workload
from dpvision.errors import ArgumentError
from dpvision.storage.files import disk_errors, write_atomically

_READING: Final = """\
Every contender takes whole training steps on the same rows. A private step is clipped sum, noise and optimizer; an
ordinary step is forward, backward and SGD with momentum. All contenders run interleaved, in a new order every round.
Steps that take less than a tenth of a second are taken several at a time. Values are medians over the rounds.
*× eager* is the time as a multiple of ordinary eager PyTorch, *× fastest ordinary* as a multiple of the fastest
ordinary variant that took part. Memory is the peak of two steps beyond model, data and program code, in a separate
process. The first step counts, so a compiled variant includes its compiler. Opacus draws its noise from torch's
ordinary generator; our noise has full tails and costs more. Where Opacus does not support augmented views, they are
averaged from its per-row gradients. jax-privacy takes part where its environment is named (`--jax-python`):
a few networks, written in JAX, run in a separate process after their outputs were found equal to PyTorch's.
It compiles in a step that is not timed. A dash: it has no such model, or did not take part.

Shares of the peak count the operations of an ordinary step's convolutions and matrix products. Winograd's method needs
fewer, so a private step may exceed 100 %.
"""

_MOST_CHARTED: Final = 16
KEPT: Final = "<!-- Notes. Everything below this line stays when the page is written anew. -->"


def require_writable(path: Path) -> None:
    """Refuse, before anything is timed, a page that could not be written afterwards."""
    if path.suffix != ".md":
        raise ArgumentError(f"write must name a Markdown file (….md), got {str(path)!r}.")
    if not path.parent.is_dir():
        raise ArgumentError(f"write must name a file in a folder that exists, got {str(path)!r}.")


def _charted(results: Sequence[Result]) -> Sequence[Result]:
    """All of a short page; of a long one, the first suites that fit a picture."""
    ends = [i for i in range(1, len(results)) if results[i].suite != results[i - 1].suite]
    if len(results) <= _MOST_CHARTED or not ends:
        return results
    return results[: max((end for end in ends if end <= _MOST_CHARTED), default=ends[0])]


def write_page(figures: Figures, path: Path) -> None:
    """The page at ``path``, its chart (.svg) and all raw figures (.json) beside it; the page last."""
    chart = path.with_suffix(".svg")
    raw = json.dumps(figures.to_dict(), indent=1, allow_nan=False) + "\n"
    contents = {
        path.with_suffix(".json"): raw.encode(),
        chart: bar_chart(_charted(figures.results)),
        path: f"{page(figures, chart=chart.name)}\n{_notes(path)}".encode(),
    }
    with disk_errors(f"write {path.name}"):
        for place, content in contents.items():
            write_atomically(place, content)


def _notes(path: Path) -> str:
    """What people wrote below the line that keeps it, or that line alone."""
    with disk_errors(f"read {path.name}"):
        before = path.read_text() if path.is_file() else ""
    _, _, notes = before.partition(KEPT)
    return f"{KEPT}{notes or chr(10)}"


def page(figures: Figures, *, chart: str) -> str:
    """The whole page as Markdown."""
    opening = [
        "# Benchmarks\n",
        f"{machine_line(figures)}.\n",
        f"```\n{command(figures)}\n```\n",
        f"![Time of a training step, ordinary eager PyTorch = 1]({chart})\n",
        _READING,
    ]
    parts = [section for suite, results in _by_suite(figures) for section in _sections(suite, results, figures)]
    return "\n".join([*opening, *parts])


def command(figures: Figures) -> str:
    """What to type to measure the same again."""
    suites = tuple(dict.fromkeys(result.suite for result in figures.results))
    what = f"--suite {','.join(suites)}" if set(suites) <= set(SUITES) else _flags(figures.results[0].workload)
    names = _names(figures.results)
    compiles = " --compile" if any(contender(name).compiles for name in names) else ""
    guests = " --jax-python PYTHON" if JAX in names else ""
    return f"python -m benchmarks {what}{compiles}{guests} --threads {figures.threads} --repeats {figures.repeats}"


def _flags(workload: Workload) -> str:
    given = {name.replace("_", "-"): value for name, value in asdict(workload).items() if value is not None}
    return " ".join(f"--{name} {value}" for name, value in given.items())


def _by_suite(figures: Figures) -> Iterator[tuple[str, list[Result]]]:
    for suite, results in groupby(figures.results, key=lambda result: result.suite):
        yield suite, list(results)


def _sections(suite: str, results: Sequence[Result], figures: Figures) -> Iterator[str]:
    yield f"## {suite[:1].upper()}{suite[1:]}\n"
    yield _headline(results)
    if suite == "scaling":
        yield "### Time and memory as the batch grows\n"
        yield _growth(results)
    yield "### Every contender, × eager\n"
    yield _everybody(results)
    yield "### Peak memory, MiB beyond model, data and code\n"
    yield _memory(results)
    if any(result.breakdown for result in results):
        yield "### Where a private step's time goes\n"
        yield _breakdown(results)
    yield "### Distance from the machine's matrix-product peak, and what privacy costs\n"
    yield _peak(results, figures.peak_flops)
    yield from _failures(results)


def _headline(results: Sequence[Result]) -> str:
    columns = ("workload", "eager, ms", "fastest ordinary", "private step × eager", "× fastest ordinary")
    columns += ("plain × eager", "best peer × eager", "memory × eager", "below every peer", "target", "")
    return markdown(columns, (_headline_row(result) for result in results))


def _headline_row(result: Result) -> list[str]:
    fastest, peer = result.fastest_ordinary or REFERENCE, result.fastest_peer
    return [
        result.workload.title,
        milliseconds(result.seconds(REFERENCE)),
        f"{ratio(result.ratio(fastest))} ({fastest})",
        f"**{ratio(result.ratio(result.headline))}**",
        ratio(result.ratio_to_fastest(result.headline)),
        ratio(result.ratio(PLAIN)),
        NOTHING if peer is None else f"{ratio(result.ratio(peer))} ({peer})",
        ratio(result.memory_ratio(result.headline)),
        below_peers(result),
        demanded(result),
        verdict(result),
    ]


def _growth(results: Sequence[Result]) -> str:
    """One line a batch: the time of one unit and the memory stay where they are, if all is well."""
    columns = ("batch", "eager, ms", "private, ms", "private, µs a unit", "eager, MiB", "private, MiB")
    return markdown(columns, (_growth_row(result) for result in results))


def _growth_row(result: Result) -> list[str]:
    ordinary, private = result.row(REFERENCE), result.row(result.headline)
    seconds = None if private is None else private.seconds
    return [
        f"{result.workload.batch:,}",
        milliseconds(result.seconds(REFERENCE)),
        milliseconds(seconds),
        NOTHING if seconds is None else f"{1e6 * seconds / result.workload.batch:.1f}",
        mebibytes(None if ordinary is None else ordinary.memory_bytes),
        mebibytes(None if private is None else private.memory_bytes),
    ]


def _names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(row.contender for result in results for row in result.rows))


def _everybody(results: Sequence[Result]) -> str:
    names = _names(results)
    return markdown(
        ("workload", *names),
        ([result.workload.title, *(_cell(result, name) for name in names)] for result in results),
    )


def _cell(result: Result, name: str) -> str:
    row = result.row(name)
    return "fails" if row is not None and row.fails is not None else ratio(result.ratio(name))


def _memory(results: Sequence[Result]) -> str:
    names = _names(results)

    def cell(result: Result, name: str) -> str:
        row = result.row(name)
        return NOTHING if row is None else "fails" if row.memory_fails is not None else mebibytes(row.memory_bytes)

    rows = ([result.workload.title, *(cell(result, name) for name in names)] for result in results)
    return markdown(("workload", *names), rows)


def _breakdown(results: Sequence[Result]) -> str:
    parts = next(list(result.breakdown) for result in results if result.breakdown)
    rows = []
    for result in results:
        found = result.breakdown
        total = sum(found.values()) or 1.0
        shares = [percent(found[part] / total) if part in found else NOTHING for part in parts]
        rows.append([result.workload.title, *shares])
    return markdown(("workload", *parts), rows)


def _peak(results: Sequence[Result], peak: float) -> str:
    columns = ("workload", "GF in an ordinary step", "eager", "fastest ordinary", "private", "privacy costs")
    rows = (
        [
            result.workload.title,
            f"{result.flops / 1e9:,.3g}",
            percent(result.share_of(REFERENCE, peak)),
            percent(result.share_of(result.fastest_ordinary or REFERENCE, peak)),
            percent(result.share_of(result.headline, peak)),
            percent(result.privacy_cost),
        ]
        for result in results
    )
    return markdown(columns, rows)


def _failures(results: Sequence[Result]) -> Iterator[str]:
    lines = [
        f"- {result.workload.title}, {row.label}: {reason}"
        for result in results
        for row in result.rows
        for reason in dict.fromkeys((row.fails, row.memory_fails))
        if reason is not None
    ]
    if lines:
        yield "### What failed\n"
        yield "\n".join(lines) + "\n"
