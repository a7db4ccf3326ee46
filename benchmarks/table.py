"""Figures as tables: lines for a terminal, rows for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from benchmarks.figures import Figures, Result, Row
from dpvision.papers.table_page import markdown_table

NOTHING: Final = "–"
_MEBIBYTE: Final = 2**20


def ratio(value: float | None) -> str:
    """A ratio with two decimals, three below a tenth."""
    if value is None:
        return NOTHING
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def milliseconds(seconds: float | None) -> str:
    """A time in milliseconds, to about three figures."""
    if seconds is None:
        return NOTHING
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def mebibytes(count: float | None) -> str:
    """Memory in MiB."""
    return NOTHING if count is None else f"{count / _MEBIBYTE:,.0f}"


def percent(share: float | None) -> str:
    """A share in whole percent, with one decimal below ten."""
    if share is None:
        return NOTHING
    return f"{share:.0%}" if abs(share) >= 0.0995 else f"{share:.1%}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column aligned left and the others right."""
    return "\n".join(markdown_table(columns, rows)) + "\n"


def plural(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def machine_line(figures: Figures) -> str:
    """The machine in one line, by its features."""
    facts = figures.machine
    caches = (f"{name[:2].upper()} {facts[name]}" for name in ("l2_cache", "l3_cache") if name in facts)
    machine = ", ".join([plural(int(facts["cores"]), "core"), str(facts["simd"]), *caches, f"torch {facts['torch']}"])
    peak = f"peak of float32 matrix products {figures.peak_flops / 1e9:.0f} GF/s"
    return (
        f"{machine}; {plural(figures.threads, 'thread')}; {peak}; "
        f"medians of {plural(figures.repeats, 'interleaved round')}"
    )


def terminal_lines(figures: Figures) -> Iterator[str]:
    """Everything, one line at a time."""
    yield machine_line(figures)
    for result in figures.results:
        yield ""
        yield result.workload.title
        yield f"  {'':46}{'ms':>9}{'× eager':>9}{'× fastest':>11}{'% of peak':>11}{'MiB':>8}{'× eager':>9}"
        for row in result.rows:
            yield _terminal_row(result, row, figures.peak_flops)
        yield from _terminal_notes(result)


def _terminal_row(result: Result, row: Row, peak: float) -> str:
    name = row.contender
    if row.fails is not None:
        return f"  {row.label:46}fails: {row.fails}"
    share, times = result.share_of(name, peak), result.ratio_to_fastest(name)
    return (
        f"  {row.label:46}{milliseconds(row.seconds):>9}{ratio(result.ratio(name)):>9}{ratio(times):>11}"
        f"{percent(share):>11}{mebibytes(row.memory_bytes):>8}{ratio(result.memory_ratio(name)):>9}"
    )


def _terminal_notes(result: Result) -> Iterator[str]:
    if result.breakdown:
        total = sum(result.breakdown.values()) or 1.0
        parts = (f"{part} {percent(seconds / total)}" for part, seconds in result.breakdown.items())
        yield f"  of a private step: {', '.join(parts)}"
    if result.privacy_cost is not None:
        yield f"  privacy costs {percent(result.privacy_cost)} of the same engine's step without clipping and noise"
    if result.target is not None:
        yield f"  target {demanded(result)}: {verdict(result)}"


def demanded(result: Result) -> str:
    """What is demanded of a workload."""
    target = result.target
    if target is None:
        return NOTHING
    memory = "" if target.memory_ratio is None else f", memory ≤ {target.memory_ratio:g}"
    plain = "" if target.plain_ratio is None else f", plain ≤ {target.plain_ratio:g}"
    return f"≤ {target.ratio:g}{memory}{plain}"


def verdict(result: Result) -> str:
    """Whether it was met."""
    if result.target is None:
        return NOTHING
    return {True: "met", False: "not met", None: "not measured"}[result.met]


def below_peers(result: Result) -> str:
    """In what a private step stays below every peer."""
    if result.fastest_peer is None:
        return NOTHING
    verdicts = (("time", result.faster_than_peers), ("memory", result.smaller_than_peers))
    return ", ".join(f"{what} {'yes' if holds else 'no'}" for what, holds in verdicts if holds is not None)
