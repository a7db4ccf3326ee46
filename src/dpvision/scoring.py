"""Scores of a classifier with their 95 % intervals: AUC, average precision, calibration, and the verdict on chance.

Plain numpy and scipy, without torch, so that reports and ``verify`` compute with the same functions. All intervals are
two-sided and have a level of 95 %:

- a share of images (accuracy, sensitivity, specificity): Wilson;
- a mean of shares (balanced accuracy): Wilson's intervals joined by the method of variance estimates recovery (MOVER);
- an AUC: DeLong's variance on the logit scale; Wilson with the smaller class as its sample where the AUC is 0 or 1;
- everything else, and everything where a patient has several images: percentiles of a bootstrap over privacy units
  with a fixed seed.

Shapes: N rows, K classes, B resamples, G groups of equal scores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, logit
from scipy.stats import binomtest, norm, rankdata

from dpvision.errors import ArgumentError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Interval = tuple[float, float]
Better = Literal["yes", "no", "cannot tell"]

FEWEST_UNITS: Final = 10
"""Groups and cells with fewer units are not shown."""
SMALLEST_FIT: Final = 20
"""Units that a part of the test data must have for a temperature or a threshold to be fitted or reported on it."""
RELIABILITY_BINS: Final = 10
_Z = float(norm.ppf(0.975))
_SEED = 20_230
_RESAMPLES, _FEWER_RESAMPLES, _MANY_SCORES = 1000, 200, 50_000
_VALUES_AT_A_TIME = 2_000_000
_TEMPERATURES = (0.05, 100.0)


# Intervals


def wilson(hits: float, count: int) -> Interval:
    """Return Wilson's interval of a share; ``hits`` is rounded to a whole number.

    Args:
        hits: images for which it holds, 0 to ``count``.
        count: images, at least 1.
    """
    found = binomtest(round(hits), count).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def mean_of_shares(hits: Sequence[float], counts: Sequence[int]) -> tuple[float, Interval]:
    """Return the unweighted mean of independent shares, and its interval by MOVER."""
    shares = np.array(hits, dtype=np.float64) / np.array(counts)
    ends = np.array([wilson(hit, count) for hit, count in zip(hits, counts, strict=True)])
    below, above = np.sqrt(((ends - shares[:, None]) ** 2).sum(0)) / len(shares)
    mean = float(shares.mean())
    return mean, (max(0.0, mean - float(below)), min(1.0, mean + float(above)))


def bootstrap(statistic: Callable[[Floats], Floats], units_N: NDArray[np.int64], *, cost: int) -> Interval | None:
    """Return the interval of a statistic by resampling units, with a fixed seed.

    Args:
        statistic: maps weights of rows (B, N) to values (B,). A resample without a value gives NaN and is left out.
        units_N: the unit of each row, numbered from 0. All rows of a unit are drawn together.
        cost: numbers that the statistic computes per resample; many of them give 200 resamples instead of 1,000.

    Returns:
        The interval, or None with fewer than 10 units, or where fewer than nine in ten resamples have a value.
    """
    units = int(units_N.max()) + 1 if len(units_N) else 0
    if units < FEWEST_UNITS:
        return None
    random = np.random.default_rng(_SEED)
    left = _RESAMPLES if cost <= _MANY_SCORES else _FEWER_RESAMPLES
    values: list[Floats] = []
    while left > 0:
        size = min(left, max(1, _VALUES_AT_A_TIME // len(units_N)))
        weights_BU = random.multinomial(units, np.full(units, 1 / units), size=size).astype(np.float64)
        values.append(statistic(weights_BU[:, units_N]))
        left -= size
    found = np.concatenate(values)
    known = found[np.isfinite(found)]
    if len(known) < 0.9 * len(found):
        return None
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


# Ranking


@final
class Ranking:
    """Scores of one class against the rest, sorted once for any number of weightings."""

    def __init__(self, scores_N: Floats, positive_N: Flags) -> None:
        self._order = np.argsort(-scores_N, kind="stable")
        ranked = scores_N[self._order]
        self._starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])  # of groups of equal scores
        self._positive = positive_N[self._order]

    def _groups(self, weights_BN: Floats) -> tuple[Floats, Floats]:
        """Weight of positives and negatives in each group of equal scores, best scores first: (B, G) each."""
        ranked_BN = weights_BN[:, self._order]
        positive_BG = np.add.reduceat(ranked_BN * self._positive, self._starts, axis=1)
        return positive_BG, np.add.reduceat(ranked_BN, self._starts, axis=1) - positive_BG

    def auc(self, weights_BN: Floats) -> Floats:
        """Area under the ROC curve; NaN without a positive or without a negative."""
        positive_BG, negative_BG = self._groups(weights_BN)
        positives_B, negatives_B = positive_BG.sum(1), negative_BG.sum(1)
        below_BG = negatives_B[:, None] - negative_BG.cumsum(1)
        won_B = (positive_BG * (below_BG + negative_BG / 2)).sum(1)
        return _divided(won_B, positives_B * negatives_B)

    def average_precision(self, weights_BN: Floats) -> Floats:
        """Sum of precision over the steps of recall; NaN without a positive."""
        positive_BG, negative_BG = self._groups(weights_BN)
        found_BG = positive_BG.cumsum(1)
        precision_BG = found_BG / np.maximum(found_BG + negative_BG.cumsum(1), 1e-300)
        return _divided((positive_BG * precision_BG).sum(1), positive_BG.sum(1))


def _divided(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def auc(scores_N: Floats, positive_N: Flags) -> float | None:
    """Return the area under the ROC curve, equal scores counting half; None without a positive or a negative."""
    value = float(Ranking(scores_N, positive_N).auc(np.ones((1, len(scores_N))))[0])
    return value if np.isfinite(value) else None


def average_precision(scores_N: Floats, positive_N: Flags) -> float | None:
    """Return the average precision (not interpolated); None without a positive."""
    value = float(Ranking(scores_N, positive_N).average_precision(np.ones((1, len(scores_N))))[0])
    return value if np.isfinite(value) else None


def auc_interval(scores_N: Floats, positive_N: Flags) -> Interval | None:
    """Return DeLong's interval of an AUC on the logit scale; Wilson's where it is 0 or 1, None if it has no value."""
    value, above, below = auc(scores_N, positive_N), scores_N[positive_N], scores_N[~positive_N]
    if value is None:
        return None
    m, n = len(above), len(below)
    if value in (0.0, 1.0) or min(m, n) < 2:
        return wilson(value * min(m, n), min(m, n))
    ranks = rankdata(np.r_[above, below])
    of_positive = (ranks[:m] - rankdata(above)) / n
    of_negative = 1 - (ranks[m:] - rankdata(below)) / m
    variance = of_positive.var(ddof=1) / m + of_negative.var(ddof=1) / n
    half = _Z * float(np.sqrt(variance)) / (value * (1 - value))
    centre = float(np.log(value / (1 - value)))
    return float(expit(centre - half)), float(expit(centre + half))


# Parts of the test data, temperature and threshold


def fitting_part(labels_N: NDArray[np.int64], units_N: NDArray[np.int64]) -> Flags:
    """Choose the half of the test data on which temperature and threshold are fitted; the other half is reported.

    The halves depend on public facts alone: units are ordered by a hash of their number, and every second one of each
    class (that of the unit's first row) is chosen. No unit is in both.
    """
    first = np.unique(units_N, return_index=True)[1]
    order = sorted(
        range(len(first)), key=lambda unit: hashlib.sha256(f"dpvision fitting part {unit}".encode()).digest()
    )
    chosen, seen = np.zeros(len(first), dtype=bool), dict[int, int]()
    for unit in order:
        label = int(labels_N[first[unit]])
        seen[label] = seen.get(label, 0) + 1
        chosen[unit] = seen[label] % 2 == 0
    return chosen[units_N]


def fit_temperature(logits_NK: Floats, labels_N: NDArray[np.int64]) -> float:
    """Return the temperature, 0.05 to 100, by which to divide logits so that their mean cross-entropy is smallest."""

    def loss(log_temperature: float) -> float:
        return cross_entropy(logits_NK / np.exp(log_temperature), labels_N)

    low, high = np.log(_TEMPERATURES)
    found: Any = minimize_scalar(loss, bounds=(low, high), method="bounded")
    return float(np.exp(found.x))


def cross_entropy(logits_NK: Floats, labels_N: NDArray[np.int64]) -> float:
    """Return the mean cross-entropy of logits."""
    return -float(log_softmax(logits_NK, axis=1)[np.arange(len(labels_N)), labels_N].mean())


def reliability(confidence_N: Floats, correct_N: Flags) -> list[dict[str, Any]]:
    """Return the reliability diagram: confidence and accuracy in ten equal bins of confidence.

    Returns:
        One entry per bin with at least 10 images: ``low``, ``high``, ``confidence``, ``accuracy``, ``interval`` and
        ``count``. Other bins are left out.
    """
    bins = np.clip(np.ceil(confidence_N * RELIABILITY_BINS), 1, RELIABILITY_BINS).astype(int) - 1
    found = []
    for number in range(RELIABILITY_BINS):
        inside = bins == number
        count, hits = int(inside.sum()), int(correct_N[inside].sum())
        if count >= FEWEST_UNITS:
            found.append(
                {
                    "low": number / RELIABILITY_BINS,
                    "high": (number + 1) / RELIABILITY_BINS,
                    "confidence": float(confidence_N[inside].mean()),
                    "accuracy": hits / count,
                    "interval": list(wilson(hits, count)),
                    "count": count,
                }
            )
    return found


@final
@dataclass(frozen=True)
class OperatingPoint:
    """Which threshold to use on the probability of the positive class: a rule and its value."""

    rule: Literal["youden", "sensitivity", "specificity", "threshold"]
    value: float | None = None

    def threshold(self, scores_N: Floats, positive_N: Flags) -> float:
        """Choose the threshold on these rows; a row at the threshold counts as positive.

        Youden's rule takes the largest sensitivity + specificity. A wanted sensitivity takes the largest threshold
        that reaches it, a wanted specificity the smallest one.
        """
        if self.rule == "threshold" and self.value is not None:
            return self.value
        levels = np.unique(scores_N)
        above, below = np.sort(scores_N[positive_N]), np.sort(scores_N[~positive_N])
        candidates = np.r_[levels, np.nextafter(levels[-1], np.inf)]
        sensitivity = 1 - np.searchsorted(above, candidates) / len(above)
        specificity = np.searchsorted(below, candidates) / len(below)
        if self.rule == "youden":
            return float(candidates[np.argmax(sensitivity + specificity)])
        wanted = self.value or 0.0
        if self.rule == "sensitivity":
            return float(candidates[np.flatnonzero(sensitivity >= wanted)[-1]])
        return float(candidates[np.flatnonzero(specificity >= wanted)[0]])

    def __str__(self) -> str:
        return self.rule if self.value is None else f"{self.rule}={self.value:g}"


def parse_operating_point(text: str) -> OperatingPoint:
    """Read youden, sensitivity=S, specificity=S or threshold=P.

    Raises:
        ArgumentError: it is none of them, or the value does not lie between 0 and 1.
    """
    rule, equals, number = text.partition("=")
    if rule == "youden" and not equals:
        return OperatingPoint("youden")
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if rule in ("sensitivity", "specificity", "threshold") and 0 <= value <= 1:
        return OperatingPoint(rule, value)  # pyright: ignore[reportArgumentType]
    raise ArgumentError(
        "an operating point must be youden, sensitivity=S, specificity=S or threshold=P with a number from 0 to 1, "
        f"got {text!r}."
    )


def at_threshold(scores_N: Floats, positive_N: Flags, threshold: float) -> dict[str, Any]:
    """Return sensitivity and specificity with Wilson's intervals; a side with fewer than 10 rows is None."""
    called, found = scores_N >= threshold, dict[str, Any]()
    for name, side, hit in (("sensitivity", positive_N, called), ("specificity", ~positive_N, ~called)):
        count, hits = int(side.sum()), int((side & hit).sum())
        shown = count >= FEWEST_UNITS
        found[name] = hits / count if shown else None
        found[f"{name}_interval"] = list(wilson(hits, count)) if shown else None
    return found


# Findings: labels of which several, or none, can hold


def finding_metrics(
    scores_NF: Floats, labels_NF: Floats, names: Sequence[str], *, units_N: NDArray[np.int64] | None = None
) -> dict[str, Any]:
    """Return AUC and average precision of each finding of a multi-label classifier.

    Args:
        scores_NF: one score per row and finding, larger for "present"; logits or probabilities.
        labels_NF: 1 where a finding is present, 0 where it is absent, NaN where it is missing or uncertain. NaN is
            left out of this finding's metrics, and of no other's.
        names: names of the findings.
        units_N: number of each row's unit, such as a patient; by default each row is its own. Intervals resample
            units.

    Returns:
        ``findings``: by name, AUC and average precision with their intervals, ``chance`` of the average precision
        (the share of positives) and counts; None for a finding with fewer than 10 units on either side. ``auc`` and
        ``average_precision``: their means over the findings that have a value, and ``intervals`` of the means.

    Raises:
        ArgumentError: shapes differ, a label is none of 0, 1 and NaN, or a score is not finite.
    """
    if scores_NF.shape != labels_NF.shape or scores_NF.shape[1:] != (len(names),):
        raise ArgumentError(
            f"scores and labels must be (rows, {len(names)}), got {scores_NF.shape} and {labels_NF.shape}."
        )
    if not np.isfinite(scores_NF).all():
        raise ArgumentError("scores must be finite.")
    if not (np.isnan(labels_NF) | (labels_NF == 0) | (labels_NF == 1)).all():
        raise ArgumentError("labels of findings must be 0, 1 or NaN for missing.")
    units_N = np.arange(len(labels_NF)) if units_N is None else units_N
    clustered = len(np.unique(units_N)) < len(units_N)
    found: dict[str, dict[str, Any] | None] = {}
    measured: list[tuple[Flags, Ranking]] = []
    for column, name in enumerate(names):
        known = ~np.isnan(labels_NF[:, column])
        scores, positive = scores_NF[known, column], labels_NF[known, column] == 1
        rows, positives = int(known.sum()), int(positive.sum())
        units = units_N[known]
        if min(len(np.unique(units[side])) for side in (positive, ~positive)) < FEWEST_UNITS:
            found[name] = None
            continue
        ranking, units = Ranking(scores, positive), np.unique(units, return_inverse=True)[1].reshape(-1)
        measured.append((known, ranking))
        exact = None if clustered else auc_interval(scores, positive)
        found[name] = {
            "auc": auc(scores, positive),
            "auc_interval": _listed(exact or bootstrap(ranking.auc, units, cost=rows)),
            "average_precision": average_precision(scores, positive),
            "average_precision_interval": _listed(bootstrap(ranking.average_precision, units, cost=rows)),
            "chance": positives / rows,
            "count": rows,
            "positives": positives,
        }
    shown = [each for each in found.values() if each is not None]
    means = {
        name: float(np.mean([each[name] for each in shown])) if shown else None for name in ("auc", "average_precision")
    }
    intervals: dict[str, list[float] | None] = {}
    for name in means if measured else ():
        over = [_on_known(known, getattr(ranking, name)) for known, ranking in measured]
        intervals[name] = _listed(bootstrap(_mean_over(over), units_N, cost=len(units_N) * len(over)))
    return {"findings": found, **means, "intervals": intervals}


def _on_known(known_N: Flags, statistic: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    """The statistic of a finding as a function of the weights of all rows."""
    return lambda weights_BN: statistic(weights_BN[:, known_N])


# One classifier


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Scored:
    """Logits, classes and units of a test set, and the metrics that follow from them.

    Attributes:
        logits_NK: the model's outputs; a row that is not finite counts as certain and wrong.
        labels_N: the true classes.
        units_N: the unit (patient) of each row, numbered from 0; each row is its own where owners are not known.
        class_names: names of the classes.
    """

    logits_NK: Floats
    labels_N: NDArray[np.int64]
    units_N: NDArray[np.int64]
    class_names: tuple[str, ...]

    @property
    def usable_N(self) -> Flags:
        """Rows with finite outputs."""
        return np.asarray(np.isfinite(self.logits_NK).all(1))

    def probabilities(self, temperature: float = 1.0) -> Floats:
        """Class probabilities (N, K); those of a row that is not finite are 0 for its class."""
        logits = np.where(self.usable_N[:, None], self.logits_NK, 0.0) / temperature
        found = np.exp(log_softmax(logits, axis=1))
        wrong = (np.arange(len(self.class_names)) != self.labels_N[:, None]) / max(1, len(self.class_names) - 1)
        return np.where(self.usable_N[:, None], found, wrong)

    def log_odds(self) -> Floats:
        """log(p / (1 − p)) of each class (N, K): ranks as the probability does, and does not saturate at 0 and 1."""
        logits = np.where(self.usable_N[:, None], self.logits_NK, 0.0)
        found = np.empty_like(logits)
        for k in range(logits.shape[1]):
            others = np.delete(logits, k, axis=1)
            found[:, k] = logits[:, k] - np.logaddexp.reduce(others, axis=1) if others.shape[1] else 0.0
        wrong = np.where(np.arange(logits.shape[1]) == self.labels_N[:, None], -np.inf, np.inf)
        return np.where(self.usable_N[:, None], found, wrong)

    @property
    def predicted_N(self) -> NDArray[np.int64]:
        """The most probable class of each row; the first one of equal ones."""
        return np.where(self.usable_N, self.logits_NK.argmax(1), self.probabilities().argmax(1))

    @property
    def clustered(self) -> bool:
        """Whether a unit has several rows."""
        return len(np.unique(self.units_N)) < len(self.units_N)

    def part(self, rows_N: Flags) -> Scored:
        """Only these rows; units are numbered again."""
        units = np.unique(self.units_N[rows_N], return_inverse=True)[1].reshape(-1)
        return Scored(
            logits_NK=self.logits_NK[rows_N],
            labels_N=self.labels_N[rows_N],
            units_N=units,
            class_names=self.class_names,
        )

    def chance(self) -> dict[str, Any]:
        """What the best constant prediction reaches on these rows: always the most frequent class."""
        counts = np.bincount(self.labels_N, minlength=len(self.class_names))
        present = counts[counts > 0] / len(self.labels_N)
        return {
            "accuracy": float(present.max()),
            "class": self.class_names[int(counts.argmax())],
            "balanced_accuracy": 1 / len(present),
            "auc": 0.5,
            "average_precision": float(counts[1] / counts.sum() if len(counts) == 2 else present.mean()),
        }

    def summary(self) -> dict[str, Any]:
        """Accuracy, balanced accuracy, AUC, average precision with ``intervals``, and ``chance`` beside them."""
        correct = self.predicted_N == self.labels_N
        values: dict[str, float | None] = {"accuracy": float(correct.mean())}
        intervals: dict[str, Interval | None] = {"accuracy": self.accuracy_interval()}
        counts = np.bincount(self.labels_N, minlength=len(self.class_names))
        hits = np.bincount(self.labels_N, weights=correct, minlength=len(self.class_names))
        present = counts > 0
        mean, interval = mean_of_shares(hits[present].tolist(), counts[present].tolist())
        values["balanced_accuracy"], intervals["balanced_accuracy"] = mean, interval
        if self.clustered:
            intervals["balanced_accuracy"] = bootstrap(self._balanced(correct), self.units_N, cost=len(correct))
        odds = self.log_odds()
        # With two classes the second one is the positive class, and one AUC says everything.
        classes = [1] if len(self.class_names) == 2 else np.flatnonzero(present).tolist()
        rankings = [Ranking(odds[:, k], self.labels_N == k) for k in classes]
        cost = len(correct) * len(classes)
        for name in ("auc", "average_precision"):
            each = [getattr(ranking, name) for ranking in rankings]
            macro = _mean_over(each)
            value = float(macro(np.ones((1, len(correct))))[0])
            values[name] = value if np.isfinite(value) else None
            if name == "auc" and len(classes) == 1 and not self.clustered:
                intervals[name] = auc_interval(odds[:, 1], self.labels_N == 1)
            else:
                intervals[name] = bootstrap(macro, self.units_N, cost=cost)
        return {
            **values,
            "intervals": {name: _listed(each) for name, each in intervals.items()},
            "chance": self.chance(),
        }

    def accuracy_interval(self) -> Interval | None:
        """The 95 % interval of the accuracy: Wilson's, or by resampling units where a unit has several rows."""
        return self._of_shares(self.predicted_N == self.labels_N)

    def _of_shares(self, correct_N: Flags) -> Interval | None:
        """The interval of an accuracy: Wilson, or by units where a unit has several rows."""
        if not self.clustered:
            return wilson(int(correct_N.sum()), len(correct_N))
        return bootstrap(lambda w: _divided(w @ correct_N.astype(float), w.sum(1)), self.units_N, cost=len(correct_N))

    def _balanced(self, correct_N: Flags) -> Callable[[Floats], Floats]:
        classes = np.unique(self.labels_N)

        def mean(weights_BN: Floats) -> Floats:
            of = [(self.labels_N == k).astype(float) for k in classes]
            return np.mean([_divided(weights_BN @ (one * correct_N), weights_BN @ one) for one in of], axis=0)

        return mean

    def by_class(self) -> dict[str, dict[str, Any] | None]:
        """One class against the rest: AUC, average precision, sensitivity and specificity of the predicted class.

        A class with fewer than 10 units, or with fewer than 10 outside it, is None.
        """
        odds, predicted = self.log_odds(), self.predicted_N
        found: dict[str, dict[str, Any] | None] = {}
        for k, name in enumerate(self.class_names):
            positive = self.labels_N == k
            sides = (len(np.unique(self.units_N[side])) for side in (positive, ~positive))
            if min(sides) < FEWEST_UNITS:
                found[name] = None
                continue
            scores, ranking = odds[:, k], Ranking(odds[:, k], positive)
            cost = len(positive) * len(self.class_names)
            exact = None if self.clustered else auc_interval(scores, positive)
            shares = at_threshold((predicted == k).astype(float), positive, 0.5)
            if self.clustered:
                for side, rows, hit in (
                    ("sensitivity", positive, predicted == k),
                    ("specificity", ~positive, predicted != k),
                ):
                    interval = self.part(rows)._of_shares(hit[rows])
                    shares[f"{side}_interval"] = _listed(interval)
            found[name] = {
                "auc": auc(scores, positive),
                "auc_interval": _listed(exact or bootstrap(ranking.auc, self.units_N, cost=cost)),
                "average_precision": average_precision(scores, positive),
                "average_precision_interval": _listed(bootstrap(ranking.average_precision, self.units_N, cost=cost)),
                "prevalence": float(positive.mean()),
                **shares,
            }
        return found

    def confusion(self) -> list[list[int | None]]:
        """Rows by true class and predicted class; a cell with fewer than 10 units is None."""
        predicted, classes = self.predicted_N, range(len(self.class_names))
        return [
            [_cell(self.units_N[(self.labels_N == true) & (predicted == said)]) for said in classes] for true in classes
        ]

    def calibration(self) -> dict[str, Any]:
        """The reliability diagram, and a temperature: fitted on one half, reported on the other.

        ``temperature`` is None where a half has fewer than 20 units.
        """
        fitting = fitting_part(self.labels_N, self.units_N)
        fit, rest = self.part(fitting), self.part(~fitting)
        confidence = self.probabilities().max(1)
        found: dict[str, Any] = {
            "reliability": reliability(confidence, self.predicted_N == self.labels_N),
            "temperature": None,
        }
        if not self._enough(fit, rest) or not self.usable_N.all():
            return found
        temperature = fit_temperature(fit.logits_NK, fit.labels_N)
        correct = (rest.predicted_N == rest.labels_N).astype(float)
        sides = {}
        for name, value in (("before", 1.0), ("after", temperature)):
            sure = rest.probabilities(value).max(1)
            sides[name] = {
                "loss": cross_entropy(rest.logits_NK / value, rest.labels_N),
                # Mean confidence minus accuracy: positive if the model is too sure.
                "overconfidence": float((sure - correct).mean()),
                "overconfidence_interval": _listed(
                    bootstrap(_mean_of(sure - correct), rest.units_N, cost=len(correct))
                ),
            }
        found["temperature"] = {
            "value": temperature,
            **sides,
            "fitted_on": len(fit.labels_N),
            "reported_on": len(rest.labels_N),
        }
        return found

    def operating_point(self, point: OperatingPoint, positive: int) -> dict[str, Any] | None:
        """Sensitivity and specificity at a threshold that is fitted on one half and reported on the other.

        Args:
            point: the rule. A given threshold is reported on the same half.
            positive: number of the positive class.

        Returns:
            None where a half has fewer than 20 units, or a side of it no row.
        """
        fitting = fitting_part(self.labels_N, self.units_N)
        fit, rest = self.part(fitting), self.part(~fitting)
        is_positive = fit.labels_N == positive
        if not self._enough(fit, rest) or is_positive.all() or not is_positive.any():
            return None
        # In log-odds, where sure answers still differ; a threshold that is given is a probability.
        asked = point if point.rule != "threshold" else OperatingPoint("threshold", float(logit(point.value or 0.0)))
        threshold = asked.threshold(fit.log_odds()[:, positive], is_positive)
        return {
            "rule": str(point),
            "positive": self.class_names[positive],
            "threshold": float(expit(threshold)),
            "log_odds": threshold if np.isfinite(threshold) else None,
            **at_threshold(rest.log_odds()[:, positive], rest.labels_N == positive, threshold),
            "fitted_on": len(fit.labels_N),
            "reported_on": len(rest.labels_N),
        }

    @staticmethod
    def _enough(*parts: Scored) -> bool:
        return all(len(np.unique(part.units_N)) >= SMALLEST_FIT for part in parts)

    def by_group(self, groups: Sequence[str]) -> dict[str, dict[str, Any] | None]:
        """Return ``summary`` of each group of rows, by name; None for one with fewer than 10 units."""
        names = np.array(groups, dtype=object)
        found: dict[str, dict[str, Any] | None] = {}
        for name in sorted(set(groups)):
            rows = names == name
            part = self.part(rows)
            few = len(np.unique(part.units_N)) < FEWEST_UNITS
            found[name] = None if few else {"count": int(rows.sum()), **part.summary()}
        return found


def _cell(units: NDArray[np.int64]) -> int | None:
    return len(units) if len(np.unique(units)) >= FEWEST_UNITS else None


def _listed(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _mean_over(statistics: Sequence[Callable[[Floats], Floats]]) -> Callable[[Floats], Floats]:
    return lambda weights_BN: np.mean([each(weights_BN) for each in statistics], axis=0)


def _mean_of(values_N: Floats) -> Callable[[Floats], Floats]:
    return lambda weights_BN: _divided(weights_BN @ values_N, weights_BN.sum(1))


def mean_interval(values_N: Floats, units_N: NDArray[np.int64]) -> Interval | None:
    """Return the interval of a mean over rows, such as Dice, by resampling units; None with fewer than 10."""
    return bootstrap(_mean_of(values_N), units_N, cost=len(values_N))


# The verdict


@final
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Whether a score is better than the best constant prediction on the same public test data.

    Attributes:
        better: "yes" if the whole 95 % interval (two-sided) lies above the constant's score, "no" if the score itself
            does not, else "cannot tell".
        score: accuracy or Dice.
        interval: its 95 % interval; None if there are too few units for one.
        chance: the score of the best constant prediction.
        constant: what that is: a class, or a constant mask.
    """

    better: Better
    score: float
    interval: Interval | None
    chance: float
    constant: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "better_than_chance": self.better,
            "score": self.score,
            "interval": _listed(self.interval),
            "chance": self.chance,
            "chance_is": self.constant,
        }


def compare(score: float, interval: Interval | None, chance: float, constant: str) -> Comparison:
    """Compare a score with that of the best constant prediction; see ``Comparison``."""
    better: Better = "cannot tell"
    if score <= chance:
        better = "no"
    elif interval is not None and interval[0] > chance:
        better = "yes"
    return Comparison(better=better, score=score, interval=interval, chance=chance, constant=constant)


def accuracy_against_chance(
    accuracy: float, counts: Mapping[str, int], interval: Interval | None = None
) -> Comparison | None:
    """Compare an accuracy with always answering the most frequent class.

    Args:
        accuracy: share of correct answers.
        counts: test images by class.
        interval: of the accuracy; by default Wilson's.

    Returns:
        The comparison, or None without images.
    """
    whole = sum(counts.values())
    if not whole:
        return None
    name = max(counts, key=lambda key: counts[key])
    known = interval or wilson(accuracy * whole, whole)
    return compare(accuracy, known, counts[name] / whole, f"always {name}")


GUESSING: Final = "guessing"
SMALLEST_FALL: Final = 0.02


def falls(scores: Sequence[float], count: int | None) -> int | None:
    """Return the place of the best point of a curve that ends clearly below it; None if it does not fall.

    Clearly: by at least 2 percentage points and, where the number of images is known, by more than 1.96 standard
    errors of the difference of two independent shares.
    """
    if len(scores) < 2:
        return None
    best = int(np.argmax(scores))
    top, last = scores[best], scores[-1]
    error = 0.0 if not count else _Z * float(np.sqrt((top * (1 - top) + last * (1 - last)) / count))
    return best if top - last >= max(SMALLEST_FALL, error) else None
