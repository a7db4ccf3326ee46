"""The statistics of audits: lower bounds on epsilon, and the success of membership attacks. No torch.

``one_run_bound`` turns the scores of canaries of one training run into a proved lower bound on epsilon (Steinke, Nasr
and Jagielski 2023). Each of m canaries is put into the data by its own fair coin, and the auditor guesses r of the
coins. If training is (epsilon, delta)-private for adding or removing one unit, the number of right guesses is hardly
larger than a Binomial(r, e^epsilon / (1 + e^epsilon)) variable, so many right guesses refute the epsilon.

``gaussian_estimate`` assumes Gaussian scores: then an attacker faces the trade-off of Gaussian differential privacy
with mu = distance of the means / standard deviation. It is an estimate, not a bound: it may raise an alarm, never
certify.

``attack_metrics`` measures how well scores tell members from others: ROC, area, true positives at few false ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpvision.accounting.pld import gaussian_deltas
from dpvision.errors import ArgumentError, DataError, Problems

GUESSED_SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the canaries that are guessed, fixed before any score is seen. Trying several costs confidence."""

_PRECISION = 1e-6


@final
@dataclass(frozen=True, kw_only=True)
class OneRunBound:
    """A proved statement: with ``confidence``, training is not (epsilon, delta)-private below ``epsilon_lower``.

    ``largest_refutable`` is the bound that the same canaries would give if every guess were right.
    """

    canaries: int
    guesses: int
    right: int
    epsilon_lower: float
    largest_refutable: float
    delta: float
    confidence: float


def p_value(*, canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of at least ``right`` right guesses under (epsilon, delta) privacy.

    Args:
        canaries: Canaries that were included by a fair coin each.
        guesses: Guesses that were made, at most ``canaries``.
        right: Right guesses.
        epsilon: The claimed epsilon, at least 0.
        delta: The claimed delta, in [0, 1).

    Returns:
        An upper bound on the p-value, at most 1.

    Guarantee:
        Holds for every training procedure, every score and any dependence between canaries (Steinke, Nasr and
        Jagielski 2023, Theorem 5.2 and Corollary 5.4).
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
    """Find the largest epsilon that the guesses refute at this confidence.

    Args:
        canaries: Canaries that were included by a fair coin each, at least 1.
        guesses: Guesses that were made, at most ``canaries``.
        right: Right guesses, at most ``guesses``.
        delta: The delta of the claim, in [0, 1).
        confidence: Confidence of the bound, in (0, 1).

    Returns:
        Epsilon, to within 1e-6; 0 if no epsilon is refuted.

    Raises:
        ArgumentError: A value is out of range.

    Guarantee:
        The returned epsilon is itself refuted, and so is every smaller one, because privacy at a smaller epsilon
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
    """Compute the best bound over a few fixed numbers of guesses: the highest scores are called in, the lowest out.

    Args:
        scores: One score per canary; larger means more likely included.
        included: Whether each canary was included.
        delta: The delta of the claim, in [0, 1).
        confidence: Confidence of the bound, in (0, 1).

    Returns:
        The bound with the number of guesses that gave it.

    Guarantee:
        The confidence is split evenly over the numbers of guesses that are tried (Bonferroni), so choosing the best of
        them is valid.
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


_FEWEST_CANARIES = 10


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
    """Compute epsilon of Gaussian differential privacy.

    Args:
        mu: The shift, at least 0.
        delta: The delta, in (0, 1).

    Returns:
        Epsilon; 0 where delta alone covers the shift.

    Raises:
        ArgumentError: A value is out of range.
    """
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
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def gaussian_estimate(
    scores: NDArray[np.float64], included: NDArray[np.bool_], *, delta: float, confidence: float = 0.999
) -> GaussianEstimate:
    """Estimate mu from the scores of included and excluded canaries.

    Args:
        scores: One score per canary.
        included: Whether each canary was included; at least ten on either side.
        delta: The delta at which epsilon is stated.
        confidence: One-sided confidence of the lower limits.

    Returns:
        Estimates and lower limits. The limits count the error of the means and of the deviation (delta method).

    Raises:
        ArgumentError: There are fewer than ten canaries on a side.
    """
    inside, outside = scores[included], scores[~included]
    if min(len(inside), len(outside)) < _FEWEST_CANARIES:
        raise ArgumentError(
            f"an estimate needs at least {_FEWEST_CANARIES} canaries on either side. Use more canaries."
        )
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


FALSE_POSITIVE_RATES: Final = (0.001, 0.01, 0.1)
ROC_POINTS: Final = 200
CONFIDENCE: Final = 0.95
_FEWEST_SCORES: Final = 2


@final
@dataclass(frozen=True, kw_only=True)
class AtRate:
    """The true-positive rate at a false-positive rate, with its 95 % interval."""

    false_positive_rate: float
    true_positive_rate: float
    low: float
    high: float


@final
@dataclass(frozen=True, kw_only=True)
class Attack:
    """The success of one attack. ``area`` is 0.5 for guessing; ``roc`` are (false, true) positive rates."""

    members: int
    others: int
    area: float
    area_low: float
    area_high: float
    at_rates: tuple[AtRate, ...]
    roc: tuple[tuple[float, float], ...]


def attack_metrics(members: NDArray[np.float64], others: NDArray[np.float64]) -> Attack:
    """Measure how well a threshold on scores separates members from others.

    The threshold for a false-positive rate is taken from the scores of the others; ties with it are not accused. With
    fewer others than one over the rate, no false positive is allowed at all.

    Args:
        members: Scores of members; any number that tends to be larger for members.
        others: Scores of non-members.

    Returns:
        Area under the curve and true-positive rates, with 95 % intervals.

    Raises:
        DataError: There are fewer than two scores on a side.
    """
    if min(len(members), len(others)) < _FEWEST_SCORES:
        raise DataError(
            f"an attack needs at least {_FEWEST_SCORES} members and as many others, "
            f"got {len(members)} and {len(others)}."
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


def metrics_by_class(
    members: tuple[NDArray[np.float64], NDArray[np.int64]],
    others: tuple[NDArray[np.float64], NDArray[np.int64]],
    class_names: Sequence[str],
) -> dict[str, Attack | None]:
    """Measure the attack on each class by itself, given (scores, labels); None where there are too few images."""
    found: dict[str, Attack | None] = {}
    for number, name in enumerate(class_names):
        inside, outside = members[0][members[1] == number], others[0][others[1] == number]
        enough = min(len(inside), len(outside)) >= _FEWEST_SCORES
        found[name] = attack_metrics(inside, outside) if enough else None
    return found


def _area(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Return the probability that a member scores higher than another, ties counted half."""
    ranks = stats.rankdata(np.concatenate([members, others]))[: len(members)]
    return float((ranks.sum() - len(members) * (len(members) + 1) / 2) / (len(members) * len(others)))


def _area_error(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Return the standard error of the area (DeLong)."""
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
    """Return points of the curve at evenly spaced ranks of all scores."""
    scores = np.unique(np.concatenate([members, others]))[::-1]
    chosen = scores[np.unique(np.linspace(0, len(scores) - 1, min(ROC_POINTS, len(scores))).astype(int))]
    points = ((float((others >= t).mean()), float((members >= t).mean())) for t in chosen)
    return ((0.0, 0.0), *points)


_LEAST_DEVIATION: Final = 1e-6


def likelihood_ratio(
    target: NDArray[np.float64], confidences: NDArray[np.float64], included: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return, for each image, the log likelihood ratio of the target's confidence with and without the image.

    Means are per image; with few shadow models a deviation per image is mostly error, so one is shared.

    Args:
        target: Confidence of the attacked model in each image.
        confidences: (shadows, images) confidences of the shadow models.
        included: (shadows, images) whether the image was in that model's training data.
    """
    inside, outside = (np.where(which, confidences, np.nan) for which in (included, ~included))
    means = np.nanmean(inside, axis=0), np.nanmean(outside, axis=0)
    spreads = [
        max(_LEAST_DEVIATION, float(np.sqrt(np.nanmean(np.square(values - mean)))))
        for values, mean in zip((inside, outside), means, strict=True)
    ]
    logs = [
        -0.5 * np.square((target - mean) / spread) - np.log(spread) for mean, spread in zip(means, spreads, strict=True)
    ]
    return logs[0] - logs[1]
