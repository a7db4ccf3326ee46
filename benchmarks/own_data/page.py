"""docs/evidence/defaults.md from the log of the study."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

MARK = "<!-- table -->"
Row = dict[str, Any]
IDENTITY = {"key", "of", "part", "source", "num_units", "epsilon", "pretrained"}
"""What a row of one-shot heads does not change in the row of its cell."""


def write_page(log: Path, output: Path) -> None:
    """Replace the tables of the page, which are between two marks, by those of the log."""
    rows = read_rows(log)
    before, _, rest = output.read_text().partition(MARK)
    _, _, after = rest.partition(MARK)
    output.write_text(f"{before}{MARK}\n{tables(rows)}\n{MARK}{after}")


def read_rows(log: Path) -> list[Row]:
    """Read the cells of a log."""
    return merged([json.loads(line) for line in log.read_text().splitlines()])


def merged(rows: Sequence[Row]) -> list[Row]:
    """One row per cell: one-shot heads join it, and a cell that was run again has its last run."""
    cells: dict[str, Row] = {}
    for row in rows:
        of = row.get("of", row["key"])
        found = cells.setdefault(of, {})
        cells[of] = found | {name: value for name, value in row.items() if "of" not in row or name not in IDENTITY}
    return [row for row in cells.values() if "default" in row]


def tables(rows: Sequence[Row]) -> str:
    """For each part of the datasets a summary, and one line per cell, both kinds of features side by side."""
    parts = []
    for part, words in (("kept_out", "Kept out of the fit"), ("fit", "Part of the fit")):
        own, pretrained = (
            [row for row in rows if row["part"] == part and row["pretrained"] == kind] for kind in (False, True)
        )
        if own or pretrained:
            lines = [summary(some, name) for some, name in ((own, "Scattering"), (pretrained, "Pretrained")) if some]
            parts.append("\n\n".join((f"### {words}", *lines, table(own, pretrained))))
    return "\n\n".join(parts)


def place(row: Row) -> tuple[str, int, float]:
    """What the cells with and without pretrained weights have in common."""
    return row["source"], row["num_units"], row["epsilon"]


def summary(rows: Sequence[Row], name: str) -> str:
    """How far the default is below the best of the grid, and its last point below the best of its curve."""
    behind = [fmean(row["grid_best"]) - fmean(row["default"]) for row in rows if "grid_best" in row]
    curves = [max(row["curve"]) - row["curve"][-1] for row in rows]
    runs = [fall for row in rows for fall in row["falls"]]
    below = [row["key"] for row in rows if fmean(row["default"]) + 2 * spread(row) < row["majority"]]
    shot = [fmean(one_shot(row)) - fmean(row["default"]) for row in rows if one_shot(row)]
    parts = [f"- *{name} features*: {len(rows)} cells, n = 3 each."]
    if behind:
        counted = fmean(max(0.0, value) for value in behind)
        parts.append(
            f"Default below the best of the grid ({len(behind)} cells): {fmean(behind):.1f} points on average "
            f"({counted:.1f} where cells above it count as zero), {max(behind):.1f} at worst."
        )
    parts.append(
        f"Last point below the best of the cell's mean curve: {fmean(curves):.1f} on average, {max(curves):.1f} at "
        f"worst; of a single run's curve: {fmean(runs):.1f} and {max(runs):.1f}."
    )
    if shot:
        wins = sum(value > 0 for value in shot)
        parts.append(
            f"One-shot head below the default: {-fmean(shot):.1f} points on average, above it in {wins} of {len(shot)}"
            " cells."
        )
    parts.append(f"Significantly below a constant prediction: {', '.join(below) or 'none'}.")
    return "\n  ".join(parts)


def one_shot(row: Row) -> Sequence[float]:
    """The runs of the better one-shot head, which favours it; nothing where none was run."""
    return max((row[name] for name in ("class_means", "least_squares") if name in row), key=fmean, default=())


def spread(row: Row) -> float:
    """Standard error of the mean of the default's runs, with that of the test set."""
    mean = fmean(row["default"]) / 100
    return (stdev(row["default"]) ** 2 / 3 + 1e4 * mean * (1 - mean) / row["test_rows"]) ** 0.5


def table(own: Iterable[Row], pretrained: Iterable[Row]) -> str:
    """One line per cell; the columns of pretrained weights stay empty where there is no such run."""
    names = "default | pretrained | one-shot | grid | pretrained grid | no privacy | pretrained, no privacy | majority"
    lines = [f"| dataset (classes) | units | ε | {names} |", "|---" * 11 + "|"]
    rows, others = ({place(row): row for row in some} for some in (own, pretrained))
    for cell in sorted(rows | others):
        row, other = rows.get(cell, {}), others.get(cell, {})
        known = row or other
        runs = (
            row.get("default"),
            other.get("default"),
            one_shot(row),
            row.get("grid_best"),
            other.get("grid_best"),
        )
        single = [f"{each['baseline']:.1f}" if "baseline" in each else "-" for each in (row, other)]
        facts = f"{known['source']} ({known['classes']}) | {known['num_units']:,} | {known['epsilon']:g}"
        values = (*(shown(each) for each in runs), *single, f"{known['majority']:.1f}")
        lines.append(f"| {facts} | {' | '.join(values)} |")
    return "\n".join(lines)


def shown(values: Sequence[float] | None) -> str:
    """Mean and standard deviation; a dash where there are no runs."""
    return f"{fmean(values):.1f} ± {stdev(values):.1f}" if values else "-"
