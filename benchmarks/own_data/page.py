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
    rows = merged([json.loads(line) for line in log.read_text().splitlines()])
    before, _, rest = output.read_text().partition(MARK)
    _, _, after = rest.partition(MARK)
    output.write_text(f"{before}{MARK}\n{tables(rows)}\n{MARK}{after}")


def merged(rows: Sequence[Row]) -> list[Row]:
    """One row per cell: one-shot heads join it, and of a cell that was run again the first default stays beside it."""
    cells: dict[str, Row] = {}
    for row in rows:
        of = row.get("of", row["key"])
        found = cells.setdefault(of, {})
        if "default" in row and "default" in found and row["default"] != found["default"]:
            found.setdefault("first", found["default"])
        cells[of] = found | {name: value for name, value in row.items() if "of" not in row or name not in IDENTITY}
    return [row for row in cells.values() if "default" in row]


def tables(rows: Sequence[Row]) -> str:
    """The summary and one line per cell."""
    parts = []
    for part, words in (("kept_out", "Kept out of the fit"), ("fit", "Part of the fit")):
        own, other = (
            [row for row in rows if row["part"] == part and row["pretrained"] == kind] for kind in (False, True)
        )
        if own:
            beside = {place(row): row["default"] for row in other}
            joined = [row | {"beside": beside[place(row)]} if place(row) in beside else row for row in own]
            parts.append(f"### {words}, scattering features\n\n{summary(own)}\n\n{table(joined)}")
        if other:
            parts.append(f"### {words}, EfficientNet-Lite0 features\n\n{summary(other)}\n\n{table(other)}")
    return "\n\n".join(parts)


def place(row: Row) -> tuple[str, int, float]:
    """What the cells with and without pretrained weights have in common."""
    return row["source"], row["num_units"], row["epsilon"]


def summary(rows: Sequence[Row]) -> str:
    """How far the default is below the best of the grid, and its last point below the best of its curve."""
    behind = [fmean(row["grid_best"]) - fmean(row["default"]) for row in rows if "grid_best" in row]
    falls = [max(row["curve"]) - row["curve"][-1] for row in rows]
    below = [row["key"] for row in rows if fmean(row["default"]) + 2 * spread(row) < row["majority"]]
    shot = [fmean(one_shot(row)) - fmean(row["default"]) for row in rows if one_shot(row)]
    beside = sum("grid_best" in row for row in rows)
    parts = [f"{len(rows)} cells, n = 3 each."]
    if behind:
        some = f"{fmean(behind):.1f} points on average, {max(behind):.1f} at worst"
        parts.append(f"Default below the best of the grid ({beside} cells): {some}.")
    parts.append(
        f"Last point below the best of its own (mean) curve: {fmean(falls):.1f} on average, {max(falls):.1f} at worst."
    )
    if shot:
        some = (
            f"{-fmean(shot):.1f} points on average, above it in {sum(value > 0 for value in shot)} of {len(shot)} cells"
        )
        parts.append(f"One-shot head below the default: {some}.")
    parts.append(f"Significantly below a constant prediction: {', '.join(below) or 'none'}.")
    return "\n".join(parts)


def one_shot(row: Row) -> Sequence[float]:
    """The runs of the better one-shot head, which favours it; nothing where none was run."""
    return max((row[name] for name in ("class_means", "least_squares") if name in row), key=fmean, default=())


def spread(row: Row) -> float:
    """Standard error of the mean of the default's runs, with that of the test set."""
    mean = fmean(row["default"]) / 100
    return (stdev(row["default"]) ** 2 / 3 + 1e4 * mean * (1 - mean) / row["test_rows"]) ** 0.5


def table(rows: Iterable[Row]) -> str:
    """One line per cell."""
    names = "default | first rule | pretrained | one-shot | best of grid | without privacy | majority"
    lines = [f"| dataset (classes) | units | ε | {names} |", "|---" * 10 + "|"]
    for row in sorted(rows, key=lambda each: (each["source"], each["num_units"], each["epsilon"])):
        cell = f"{row['source']} ({row['classes']}) | {row['num_units']:,} | {row['epsilon']:g}"
        runs = (row["default"], row.get("first"), row.get("beside"), one_shot(row), row.get("grid_best"))
        baseline = f"{row['baseline']:.1f}" if "baseline" in row else "-"
        lines.append(f"| {cell} | {' | '.join(shown(each) for each in runs)} | {baseline} | {row['majority']:.1f} |")
    return "\n".join(lines)


def shown(values: Sequence[float] | None) -> str:
    """Mean and standard deviation; a dash where there are no runs."""
    return f"{fmean(values):.1f} ± {stdev(values):.1f}" if values else "-"
