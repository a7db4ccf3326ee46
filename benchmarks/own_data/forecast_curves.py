"""The curves of ``training.forecast``, fitted to the rows of the study.

A curve is the share of the way from chance to 100 %, ``most · x / (x + half)``, where x is the signal per class. The
easy curve is the 90 % quantile of the default's runs and the hard one the 10 % quantile, by least pinball loss over a
grid, each dataset with the same weight. Chance is the share of the most frequent class of the test images.

``python -m benchmarks.own_data forecast`` prints them; a test compares them with the constants of the package.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

MOST = (*tuple(round(0.05 * step, 2) for step in range(2, 20)), 0.97, 0.99)
HALF = (1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 18.0, 25.0, 35.0, 50.0, 70.0, 100.0, 150.0, 200.0, 300.0)
HARD, EASY = 0.1, 0.9


def fit_curve(rows: Sequence[dict[str, Any]], quantile: float) -> tuple[float, float]:
    """Return (most, half) of the curve with the least pinball loss.

    Args:
        rows: cells of the study.
        quantile: share of the runs that lie below the curve.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("no rows to fit a curve to")
    frequency = Counter(row["source"] for row in rows)
    signal = np.array([row["signal"] / row["classes"] for row in rows])
    weight = np.array([1 / frequency[row["source"]] for row in rows])
    chance = np.array([row["majority"] / 100 for row in rows])
    share = (np.array([fmean(row["default"]) / 100 for row in rows]) - chance) / (1 - chance)

    def loss(curve: tuple[float, float]) -> float:
        above = share - curve[0] * signal / (signal + curve[1])
        return float((weight * np.maximum(quantile * above, (quantile - 1) * above)).sum())

    return min(itertools.product(MOST, HALF), key=loss)


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the easy and the hard curve of both kinds of features; pretrained ones where there are rows."""
    found = {}
    for name, kind in (("", False), ("_PRETRAINED", True)):
        some = [row for row in rows if row["pretrained"] == kind]
        if some:
            found |= {f"EASY{name}": fit_curve(some, EASY), f"HARD{name}": fit_curve(some, HARD)}
    return found


def covered(rows: Sequence[dict[str, Any]], found: dict[str, tuple[float, float]]) -> int:
    """Count the cells whose accuracy lies within the range, or misses it by less than 3 % of the way from chance."""
    count = 0
    for row in rows:
        name = "_PRETRAINED" if row["pretrained"] else ""
        chance, x = row["majority"] / 100, row["signal"] / row["classes"]
        share = (fmean(row["default"]) / 100 - chance) / (1 - chance)
        low, high = (most * x / (x + half) for most, half in (found[f"HARD{name}"], found[f"EASY{name}"]))
        count += low - 0.03 <= share <= high + 0.03
    return count
