"""The linear scaling rule: find the product of learning rate and steps at two small epsilons, extrapolate to a larger.

Panda et al. (arXiv 2212.04486) observe that the best ``r = learning rate × steps`` grows about linearly with epsilon.
Two cheap stages of trials, each at its own small epsilon, give two points of the line. Every trial and every score is
charged; the fit itself is post-processing. Steps are the same in all stages, so the rate alone is extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dpvision.errors import ArgumentError

_LARGEST_FACTOR = 4.0


def best_rate(points: Sequence[tuple[float, float]]) -> float:
    """Return the rate with the best score, by a parabola through the best point and its neighbours in log rate.

    Args:
        points: pairs of rate and score, at least one.
    """
    if not points:
        raise ArgumentError("no trial of a stage ended, so that nothing can be extrapolated.")
    rates, scores = (np.array(column) for column in zip(*sorted(points), strict=True))
    top = int(np.argmax(scores))
    if 0 < top < len(rates) - 1:
        x, y = np.log(rates[top - 1 : top + 2]), scores[top - 1 : top + 2]
        second, first, _ = np.polyfit(x - x[1], y, 2)
        if second < 0:
            shift = float(np.clip(-first / (2 * second), x[0] - x[1], x[2] - x[1]))
            return float(rates[top] * math.exp(shift))
    return float(rates[top])


def extrapolated_rate(
    trials: Sequence[tuple[float, float, bool]],
    *,
    epsilons: tuple[float, float, float],
    within: tuple[float, float],
) -> float:
    """Return the learning rate of the final run.

    Args:
        trials: rate, score and whether the trial belongs to the second stage.
        epsilons: of one trial of the first stage, of the second, and of the final run, each alone.
        within: the searched range: the line through the best of few noisy trials may point anywhere.

    Returns:
        The rate on the line through both stages, kept within a factor of 4 of the second stage's, and in the range.
    """
    low = best_rate([(rate, score) for rate, score, second in trials if not second])
    high = best_rate([(rate, score) for rate, score, second in trials if second])
    first, second, last = epsilons
    if not second > first:
        return high
    rate = high + (high - low) / (second - first) * (last - second)
    least, most = max(within[0], high / _LARGEST_FACTOR), min(within[1], high * _LARGEST_FACTOR)
    return min(max(rate, least), most)
