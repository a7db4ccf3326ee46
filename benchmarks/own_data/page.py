"""docs/evidence/defaults.md from the log of the study."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

MARK = "<!-- table -->"
Row = dict[str, Any]


def write_page(log: Path, output: Path) -> None:
    """Replace the tables of the page, which are between two marks, by those of the log."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    before, _, rest = output.read_text().partition(MARK)
    _, _, after = rest.partition(MARK)
    output.write_text(f"{before}{MARK}\n{tables(rows)}\n{MARK}{after}")


def tables(rows: Sequence[Row]) -> str:
    """The summary and one line per cell."""
    parts = []
    for part, words in (("kept_out", "Kept out of the fit"), ("fit", "Part of the fit")):
        for pretrained in (False, True):
            some = [row for row in rows if row["part"] == part and row["pretrained"] == pretrained]
            if some:
                title = f"{words}, {'EfficientNet-Lite0' if pretrained else 'scattering'} features"
                parts.append(f"### {title}\n\n{summary(some)}\n\n{table(some)}")
    return "\n\n".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """How far the default is below the best of the grid, and its last point below the best of its curve."""
    behind = [fmean(row["grid_best"]) - fmean(row["default"]) for row in rows if "grid_best" in row]
    falls = [max(row["curve"]) - row["curve"][-1] for row in rows]
    below = [row["key"] for row in rows if fmean(row["default"]) + 2 * spread(row) < row["majority"]]
    text = f"{len(rows)} cells, n = 3 each. "
    if behind:
        text += (
            f"Default below the best of the grid: {fmean(behind):.1f} points on average, {max(behind):.1f} at worst. "
        )
    text += (
        f"Last point below the best of its own (mean) curve: {fmean(falls):.1f} on average, {max(falls):.1f} at worst. "
    )
    return text + f"Significantly below a constant prediction: {', '.join(below) or 'none'}."


def spread(row: Row) -> float:
    """Standard error of the mean of the default's runs, with that of the test set."""
    mean = fmean(row["default"]) / 100
    return (stdev(row["default"]) ** 2 / 3 + 1e4 * mean * (1 - mean) / row["test_rows"]) ** 0.5


def table(rows: Iterable[Row]) -> str:
    """One line per cell."""
    lines = [
        "| dataset (classes) | units | epsilon | default | best of grid | without privacy | majority |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda each: (each["source"], each["num_units"], each["epsilon"])):
        best = shown(row["grid_best"]) if "grid_best" in row else "-"
        cell = f"{row['source']} ({row['classes']}) | {row['num_units']:,} | {row['epsilon']:g}"
        found = f"{shown(row['default'])} | {best} | {row.get('baseline', '-')} | {row['majority']:.1f}"
        lines.append(f"| {cell} | {found} |")
    return "\n".join(lines)


def shown(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{fmean(values):.1f} ± {stdev(values):.1f}"
