"""The trials of a search as a table: what figures and summaries are made of.

A table of all trials may be written only where every trial is charged by composition. Under the price of releasing the
best of a random number of trials, no table and no figure may leave ``private/``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from dpvision.tune.space import Value

State = Literal["complete", "pruned", "failed", "running"]
_MOST_GROUPS = 5


@final
@dataclass(frozen=True)
class TrialRow:
    """One trial of a search.

    Attributes:
        number: its number, from zero.
        settings: the searched settings and their values in this trial.
        score: accuracy, Dice or AUC from 0 to 1, higher is better; None if the trial has none.
        epsilon: the trial's own epsilon, which is not that of the search; None without privacy.
        state: how it ended.
    """

    number: int
    settings: Mapping[str, Value]
    score: float | None
    epsilon: float | None
    state: State = "complete"


def is_scored(row: TrialRow) -> bool:
    """Whether the trial was completed with a finite score."""
    return row.state == "complete" and row.score is not None and math.isfinite(row.score)


def setting_names(rows: Sequence[TrialRow]) -> list[str]:
    """Return the settings that every row has and that differ between rows, in the order of the first row."""
    if not rows:
        return []
    shared = [name for name in rows[0].settings if all(name in row.settings for row in rows)]
    return [name for name in shared if len({row.settings[name] for row in rows}) > 1]


def is_numeric(values: Sequence[Value]) -> bool:
    """Whether all values are numbers (a bool is not) and finite."""
    return all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values)


def groups_of(values: Sequence[Value], *, most: int = _MOST_GROUPS) -> list[str]:
    """Return a group for each value: the value itself, or an interval where there are many numbers.

    Args:
        values: one value a trial.
        most: numbers with more different values than this are divided into this many intervals of about equally many
            trials, at least 2.

    Returns:
        The name of each value's group.
    """
    if not is_numeric(values):
        return [str(value) for value in values]
    numbers = np.array(values, dtype=float)
    if len(set(numbers.tolist())) <= most:
        return [f"{number:.4g}" for number in numbers]
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, most + 1)))
    places = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, len(edges) - 2)
    return [f"{edges[place]:.3g}–{edges[place + 1]:.3g}" for place in places]


def ordered_groups(values: Sequence[Value], groups: Sequence[str]) -> list[str]:
    """Return the different groups, numbers by size and other values by name."""
    least: dict[str, Value] = {}
    for value, group in zip(values, groups, strict=True):
        if group not in least or (is_numeric([value]) and float(value) < float(least[group])):
            least[group] = value
    if is_numeric(list(least.values())):
        return sorted(least, key=lambda group: float(least[group]))
    return sorted(least)


def importance(rows: Sequence[TrialRow]) -> dict[str, float]:
    """Estimate how much of the scores' variance each setting explains by itself.

    Trials are grouped by the value of the setting, many numbers by intervals. The share of the variance that lies
    between the groups is corrected for the number of groups (epsilon squared: 1 - (n - 1) / (n - k) * (1 - R²)), so
    that a setting without influence gets about 0. Interactions of settings are not seen, and TPE draws more trials
    near good values: a small importance does not prove that a setting does not matter.

    Args:
        rows: the trials; those without a score are left out.

    Returns:
        The share, from 0 to 1, of each setting that differs between trials, the largest first. All are 0 if the scores
        are equal or there are too few trials.
    """
    scored = [row for row in rows if is_scored(row)]
    scores = np.array([row.score for row in scored], dtype=float)
    found: dict[str, float] = {}
    for name in setting_names(scored):
        groups = groups_of([row.settings[name] for row in scored])
        found[name] = _explained(scores, groups)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _explained(scores: np.ndarray, groups: Sequence[str]) -> float:
    """Epsilon squared of a grouping, at least 0."""
    names = sorted(set(groups))
    total = float(((scores - scores.mean()) ** 2).sum())
    if total <= 0 or len(scores) <= len(names) or len(names) < 2:
        return 0.0
    members = np.array(groups)
    within = sum(float(((scores[members == name] - scores[members == name].mean()) ** 2).sum()) for name in names)
    return max(0.0, 1 - (len(scores) - 1) / (len(scores) - len(names)) * within / total)


def pareto_front(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the trials that no other trial beats in both epsilon and score, by rising epsilon.

    Args:
        rows: the trials; those without a score or an epsilon are left out.
    """
    known = [row for row in rows if is_scored(row) and row.epsilon is not None]
    front: list[TrialRow] = []
    best = -math.inf
    for row in sorted(known, key=lambda row: (row.epsilon or 0.0, -(row.score or 0.0), row.number)):
        if (row.score or 0.0) > best:
            best = row.score or 0.0
            front.append(row)
    return front
