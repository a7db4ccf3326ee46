"""An estimate of the privacy loss from how far the scores of canaries lie apart. An estimate, not a bound. No torch.

If scores with and without a canary are Gaussian, an attacker faces the trade-off of Gaussian differential privacy with
mu = distance of the means / standard deviation. Noisy training over many steps is close to that, and no proof says
how close it is in one run: so this may raise an alarm, but never certify anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpvision.accounting.pld import gaussian_deltas
from dpvision.checks import ArgumentError, Problems

_FEWEST = 10
_PRECISION = 1e-9


@final
@dataclass(frozen=True, kw_only=True)
class GaussianEstimate:
    """Mu and its one-sided lower limit at ``confidence``; the epsilons are those of Gaussian privacy at ``delta``."""

    mu: float
    mu_lower: float
    epsilon: float
    epsilon_lower: float
    delta: float
    confidence: float


def gaussian_epsilon(mu: float, *, delta: float) -> float:
    """The epsilon of Gaussian privacy ``mu`` at ``delta``: 0 where delta alone covers it."""
    problems = Problems()
    problems.not_negative("mu", mu)
    problems.probability("delta", delta)
    problems.raise_if_any()

    def excess(epsilon: float) -> float:
        return float(gaussian_deltas(mu, np.array([epsilon]))[0]) - delta

    if excess(0.0) <= 0:
        return 0.0
    # delta(epsilon) <= Phi(mu / 2 - epsilon / mu), so that epsilon is at most this.
    low, high = 0.0, mu * mu / 2 + mu * float(-stats.norm.ppf(delta)) + 1
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def gaussian_estimate(
    scores: NDArray[np.float64], included: NDArray[np.bool_], *, delta: float, confidence: float = 0.999
) -> GaussianEstimate:
    """Mu from the scores of canaries that were in and of those that were not.

    The limit counts the error of the means and of the deviation (delta method); 0 if they can't be told apart.
    """
    inside, outside = scores[included], scores[~included]
    if min(len(inside), len(outside)) < _FEWEST:
        raise ArgumentError(f"an estimate needs at least {_FEWEST} canaries on either side. Use more canaries.")
    variances = float(inside.var(ddof=1)), float(outside.var(ddof=1))
    pooled = sum(variances) / 2
    gap = float(inside.mean() - outside.mean())
    if pooled == 0:
        mu = math.inf if gap else 0.0
        return GaussianEstimate(mu=mu, mu_lower=mu, epsilon=mu, epsilon_lower=mu, delta=delta, confidence=confidence)
    mu = max(0.0, gap / math.sqrt(pooled))
    of_means = (variances[0] / len(inside) + variances[1] / len(outside)) / pooled
    of_deviation = mu * mu / (2 * (len(scores) - 2))
    mu_lower = max(0.0, mu - float(stats.norm.ppf(confidence)) * math.sqrt(of_means + of_deviation))
    return GaussianEstimate(
        mu=mu,
        mu_lower=mu_lower,
        epsilon=gaussian_epsilon(mu, delta=delta),
        epsilon_lower=gaussian_epsilon(mu_lower, delta=delta),
        delta=delta,
        confidence=confidence,
    )
