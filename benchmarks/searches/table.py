"""The tables of docs/evidence/searches.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.searches.arms import TASKS, WAYS

Row = dict[str, Any]
WORDS = {
    "default": "defaults, no search",
    "uncharged": "the papers' way: best of the trials, uncharged",
    "composition": "all trials composed",
    "best_of": "best of a random number of trials",
    "share": "random trials with a fifth of the budget, then a final run",
    "linear_scaling": "linear scaling with a fifth of the budget, then a final run",
}


def tables(rows: Sequence[Row]) -> str:
    """One table for each task that has rows."""
    return "\n\n".join(
        f"### {name}\n\n{_table([row for row in rows if row['task'] == name])}"
        for name in TASKS
        if any(row["task"] == name for row in rows)
    )


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| way | accuracy, % | against the default | true epsilon | n | CPU seconds of one |",
        "|---|---|---|---|---|---|",
    ]
    default = [100 * row["accuracy"] for row in rows if row["way"] == "default"]
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        if not mine:
            continue
        values = [100 * row["accuracy"] for row in mine]
        seconds = fmean(row["cpu_seconds"] for row in mine)
        against = "" if way == "default" else _difference(values, default)
        lines.append(
            f"| {WORDS[way]} | {_spread(values)} | {against} | {_epsilon(mine)} | {len(mine)} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def _difference(values: Sequence[float], default: Sequence[float]) -> str:
    """The difference of the means with its standard error."""
    if min(len(values), len(default)) < 2:
        return ""
    error = math.sqrt(stdev(values) ** 2 / len(values) + stdev(default) ** 2 / len(default))
    return f"{fmean(values) - fmean(default):+.2f} ± {error:.2f}".replace("-", "−")


def _epsilon(rows: Sequence[Row]) -> str:
    if "composed" in rows[0]:
        composed, best_of = (fmean(row[name] for row in rows) for name in ("composed", "best_of"))
        return f"{composed:.2f} (claimed {rows[0]['epsilon']:.2f}; as best of a random number {best_of:.2f})"
    return f"{max(row['epsilon'] for row in rows):.3f}"
