"""A lower bound on epsilon from one training run: guesses on which canaries were in it (Steinke et al. 2023). No torch.

Each of m canaries is put into the data by its own fair coin. Whoever sees the model then guesses r of the coins. If
training is (epsilon, delta)-private for adding or removing one unit, the number of right guesses is hardly larger than
a Binomial(r, e^epsilon / (1 + e^epsilon)) variable: many right guesses refute the epsilon.

An estimate of the privacy loss from how far the scores of canaries lie apart. An estimate, not a bound. No torch.

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
from dpvision.errors import ArgumentError, Problems

GUESSED_SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the canaries that are guessed, fixed before any score is seen. Trying several costs confidence."""

_PRECISION = 1e-6


@final
@dataclass(frozen=True, kw_only=True)
class OneRunBound:
    """What the guesses prove: with ``confidence``, training is not (epsilon, delta)-private below ``epsilon_lower``.

    ``largest_refutable`` is what the same canaries would have given had every guess been right.
    """

    canaries: int
    guesses: int
    right: int
    epsilon_lower: float
    largest_refutable: float
    delta: float
    confidence: float


def p_value(*, canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The most that the probability of so many right guesses can be under (epsilon, delta) privacy.

    Guarantee: holds for every training procedure, every way to score and any dependence between canaries
    (Steinke, Nasr and Jagielski 2023, Theorem 5.2 and Corollary 5.4).
    """
    rate = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, rate))
    if right == 0 or delta == 0:
        return min(1.0, tail)
    # Mass of the i counts just below ``right``, averaged over i: what a delta of failures could lift over it.
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, rate))
    lifted = float((below / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * lifted)


def epsilon_lower_bound(*, canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """The largest epsilon that so many right guesses refute with this confidence; 0 if none.

    Guarantee: what is returned is refuted itself, and with it everything below, because privacy at a smaller epsilon
    implies privacy at this one.
    """
    problems = Problems()
    problems.count("canaries", canaries)
    problems.require(0 <= right <= guesses <= canaries, f"need right <= guesses <= canaries, got {right}, {guesses}.")
    problems.require(0 <= delta < 1, f"delta must lie in [0, 1), got {delta}.")
    problems.probability("confidence", confidence)
    problems.raise_if_any()

    def refuted(epsilon: float) -> bool:
        p = p_value(canaries=canaries, guesses=guesses, right=right, epsilon=epsilon, delta=delta)
        return p < 1 - confidence

    if guesses == 0 or not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def one_run_bound(
    scores: NDArray[np.float64], included: NDArray[np.bool_], *, delta: float, confidence: float = 0.95
) -> OneRunBound:
    """The best bound over a few fixed numbers of guesses: the highest scores are called in, the lowest out.

    Guarantee: the confidence is split evenly over the numbers that are tried (Bonferroni), so that picking the best
    of them is honest.
    """
    canaries = len(scores)
    order = np.argsort(scores, kind="stable")
    sides = sorted({max(1, int(canaries * share) // 2) for share in GUESSED_SHARES})
    each = 1 - (1 - confidence) / len(sides)

    def bound(side: int, right: int) -> float:
        return epsilon_lower_bound(canaries=canaries, guesses=2 * side, right=right, delta=delta, confidence=each)

    rights = [int(included[order[-side:]].sum() + (~included[order[:side]]).sum()) for side in sides]
    tried = [(bound(side, right), side, right) for side, right in zip(sides, rights, strict=True)]
    epsilon_lower, side, right = max(tried)
    return OneRunBound(
        canaries=canaries,
        guesses=2 * side,
        right=right,
        epsilon_lower=epsilon_lower,
        largest_refutable=max(bound(each_side, 2 * each_side) for each_side in sides),
        delta=delta,
        confidence=confidence,
    )


_FEWEST = 10
_PRECISION_of_gaussian = 1e-9


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
    while high - low > _PRECISION_of_gaussian * high:
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
