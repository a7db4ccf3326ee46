"""How well scores tell members from others: ROC, area, true positives at few false ones, each with its error. No torch.

A score is any number that tends to be larger for members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpvision.checks import DataError

FALSE_POSITIVE_RATES: Final = (0.001, 0.01, 0.1)
ROC_POINTS: Final = 200
CONFIDENCE: Final = 0.95
_FEWEST: Final = 2


@final
@dataclass(frozen=True, kw_only=True)
class AtRate:
    """True positives where at most a share of the others is accused, with the 95 % interval of their share."""

    false_positive_rate: float
    true_positive_rate: float
    low: float
    high: float


@final
@dataclass(frozen=True, kw_only=True)
class Attack:
    """The figures of one attack. ``area`` is 0.5 for guessing; ``roc`` are (false, true) positive rates."""

    members: int
    others: int
    area: float
    area_low: float
    area_high: float
    at_rates: tuple[AtRate, ...]
    roc: tuple[tuple[float, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def attack_figures(members: NDArray[np.float64], others: NDArray[np.float64]) -> Attack:
    """What a threshold on the scores achieves.

    A threshold for a rate of false positives is read off the others' own scores; ties with it are not accused. A rate
    below one in so many others can't be told from zero: then nobody above the highest of them may be called wrong.
    """
    if min(len(members), len(others)) < _FEWEST:
        raise DataError(
            f"an attack needs at least {_FEWEST} members and as many others, got {len(members)} and {len(others)}."
        )
    area = _area(members, others)
    error = _area_error(members, others)
    reach = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * error
    return Attack(
        members=len(members),
        others=len(others),
        area=area,
        area_low=max(0.0, area - reach),
        area_high=min(1.0, area + reach),
        at_rates=tuple(_at_rate(members, others, rate) for rate in FALSE_POSITIVE_RATES),
        roc=_roc(members, others),
    )


def figures_by_class(
    members: tuple[NDArray[np.float64], NDArray[np.int64]],
    others: tuple[NDArray[np.float64], NDArray[np.int64]],
    class_names: Sequence[str],
) -> dict[str, Attack | None]:
    """The attack on each class by itself, given (scores, labels); None where there are too few pictures."""
    found: dict[str, Attack | None] = {}
    for number, name in enumerate(class_names):
        inside, outside = members[0][members[1] == number], others[0][others[1] == number]
        enough = min(len(inside), len(outside)) >= _FEWEST
        found[name] = attack_figures(inside, outside) if enough else None
    return found


def _area(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """The chance that a member scores higher than another, ties counted half."""
    ranks = stats.rankdata(np.concatenate([members, others]))[: len(members)]
    return float((ranks.sum() - len(members) * (len(members) + 1) / 2) / (len(members) * len(others)))


def _area_error(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Its standard error (DeLong): from how often each member beats others, and each of the others loses."""
    beaten = _shares_below(members, others)
    losing = 1 - _shares_below(others, members)
    return math.sqrt(float(beaten.var(ddof=1)) / len(members) + float(losing.var(ddof=1)) / len(others))


def _shares_below(values: NDArray[np.float64], of: NDArray[np.float64]) -> NDArray[np.float64]:
    ordered = np.sort(of)
    below, not_above = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (below + not_above) / (2 * len(of))


def _at_rate(members: NDArray[np.float64], others: NDArray[np.float64], rate: float) -> AtRate:
    allowed = math.floor(rate * len(others))
    threshold = np.sort(others)[::-1][allowed] if allowed < len(others) else -math.inf
    caught = int((members > threshold).sum())
    interval = stats.binomtest(caught, len(members)).proportion_ci(CONFIDENCE)
    return AtRate(
        false_positive_rate=rate,
        true_positive_rate=caught / len(members),
        low=float(interval.low),
        high=float(interval.high),
    )


def _roc(members: NDArray[np.float64], others: NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    """Points of the curve at evenly spaced ranks of all scores."""
    scores = np.unique(np.concatenate([members, others]))[::-1]
    chosen = scores[np.unique(np.linspace(0, len(scores) - 1, min(ROC_POINTS, len(scores))).astype(int))]
    points = ((float((others >= t).mean()), float((members >= t).mean())) for t in chosen)
    return ((0.0, 0.0), *points)
