"""Scores against scikit-learn and published values, intervals that cover, and what is kept apart or left out."""

from __future__ import annotations

import numpy as np
import pytest

from dpvision.errors import ArgumentError
from dpvision.scoring import (
    FEWEST_UNITS,
    Floats,
    OperatingPoint,
    Ranking,
    Scored,
    accuracy_against_chance,
    auc,
    auc_interval,
    average_precision,
    bootstrap,
    compare,
    cross_entropy,
    falls,
    finding_metrics,
    fit_temperature,
    fitting_part,
    mean_of_shares,
    parse_operating_point,
    wilson,
)

sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")


def binary(count: int = 200, *, shift: float = 1.0, seed: int = 0) -> tuple[Floats, np.ndarray]:
    """Scores with many ties, and flags."""
    random = np.random.default_rng(seed)
    positive = random.random(count) < 0.3
    return np.round(random.normal(size=count) + shift * positive, 1), positive


def scored(rows: int = 300, classes: int = 3, *, gain: float = 1.5, seed: int = 1, owners: int | None = None) -> Scored:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, rows)
    logits = random.normal(size=(rows, classes)) + gain * np.eye(classes)[labels]
    units = np.arange(rows) if owners is None else np.arange(rows) % owners
    names = tuple(f"class {k}" for k in range(classes))
    return Scored(logits_NK=logits, labels_N=labels, units_N=units, class_names=names)


@pytest.mark.parametrize("seed", range(5))
def test_auc_and_average_precision_are_those_of_scikit_learn(seed: int) -> None:
    scores, positive = binary(seed=seed)
    assert auc(scores, positive) == pytest.approx(sklearn_metrics.roc_auc_score(positive, scores), abs=1e-12)
    known = sklearn_metrics.average_precision_score(positive, scores)
    assert average_precision(scores, positive) == pytest.approx(known, abs=1e-12)


def test_weights_count_rows_several_times_as_scikit_learn_does() -> None:
    scores, positive = binary(80)
    weights = np.random.default_rng(3).integers(0, 4, (4, 80)).astype(float)
    ranking = Ranking(scores, positive)
    for row, value, precision in zip(weights, ranking.auc(weights), ranking.average_precision(weights), strict=True):
        assert value == pytest.approx(sklearn_metrics.roc_auc_score(positive, scores, sample_weight=row), abs=1e-12)
        known = sklearn_metrics.average_precision_score(positive, scores, sample_weight=row)
        assert precision == pytest.approx(known, abs=1e-12)


def test_the_summary_is_that_of_scikit_learn() -> None:
    data = scored()
    found, probabilities = data.summary(), data.probabilities()
    predicted = data.logits_NK.argmax(1)
    one_hot = np.eye(3)[data.labels_N]
    assert found["accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(data.labels_N, predicted))
    assert found["balanced_accuracy"] == pytest.approx(
        sklearn_metrics.balanced_accuracy_score(data.labels_N, predicted)
    )
    assert found["auc"] == pytest.approx(sklearn_metrics.roc_auc_score(data.labels_N, probabilities, multi_class="ovr"))
    known = sklearn_metrics.average_precision_score(one_hot, probabilities, average="macro")
    assert found["average_precision"] == pytest.approx(known)
    for name, (low, high) in found["intervals"].items():
        assert low < found[name] < high


def test_the_confusion_matrix_is_scikit_learns_without_its_small_cells() -> None:
    data = scored(400)
    known = sklearn_metrics.confusion_matrix(data.labels_N, data.logits_NK.argmax(1))
    assert data.confusion() == [[int(n) if n >= FEWEST_UNITS else None for n in row] for row in known]
    owned = scored(400, owners=9)
    assert owned.confusion() == [[None] * 3] * 3  # many images, but of nine people


def test_wilson_and_delong_are_the_published_intervals() -> None:
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    # By hand: positives {3, 2}, negatives {1, 2.5}: AUC 0.75, structural components (1, .5) and (1, .5).
    low, high = auc_interval(np.array([3, 2, 1, 2.5]), np.array([True, True, False, False])) or (0, 0)
    half = 1.959964 * np.sqrt(0.125 / 2 + 0.125 / 2) / (0.75 * 0.25)
    assert (low, high) == pytest.approx(tuple(1 / (1 + np.exp(-(np.log(3) + s * half))) for s in (-1, 1)), abs=1e-6)


def test_a_perfect_score_still_has_an_interval() -> None:
    positive = np.arange(40) < 20
    low, high = auc_interval(positive.astype(float), positive) or (0, 0)
    assert low < 0.9 < high == 1
    mean, (below, above) = mean_of_shares([20, 30], [20, 30])
    assert mean == above == 1
    assert 0.8 < below < 1


def test_intervals_hold_the_true_value_about_95_times_in_100() -> None:
    # 400 draws: below 88 % or above 99.5 % by chance with a probability under 1e-6 if the level is 95 %.
    hits = {"auc": 0, "bootstrap": 0}
    truth = 0.7602499  # Phi(1 / sqrt 2)
    random = np.random.default_rng(11)
    for _ in range(400):
        positive = np.arange(120) < 50
        scores = random.normal(size=120) + positive
        for name, found in (
            ("auc", auc_interval(scores, positive)),
            ("bootstrap", bootstrap(Ranking(scores, positive).auc, np.arange(120), cost=10**6)),
        ):
            assert found is not None
            hits[name] += found[0] <= truth <= found[1]
    assert all(0.88 * 400 <= count <= 0.995 * 400 for count in hits.values()), hits


def test_images_of_few_patients_have_a_wider_interval() -> None:
    labels = np.repeat(np.arange(2), 150)
    units = np.arange(300) // 10
    logits = np.where((units % 3 == 0)[:, None], -1.0, 1.0) * np.eye(2)[labels]  # a third of the patients is wrong
    names = ("a", "b")
    apart = Scored(logits_NK=logits, labels_N=labels, units_N=np.arange(300), class_names=names).accuracy_interval()
    together = Scored(logits_NK=logits, labels_N=labels, units_N=units, class_names=names).accuracy_interval()
    assert apart is not None
    assert together is not None
    assert together[1] - together[0] > 2 * (apart[1] - apart[0])


def test_the_bootstrap_gives_the_same_interval_again() -> None:
    assert scored(owners=50).summary() == scored(owners=50).summary()


def test_fitted_values_come_from_another_half_than_the_reported_ones() -> None:
    data = scored(400, 2, owners=80)
    fitting = fitting_part(data.labels_N, data.units_N)
    assert not set(data.units_N[fitting]) & set(data.units_N[~fitting])
    assert 0.4 < fitting.mean() < 0.6
    before = data.calibration()["temperature"]
    changed = data.logits_NK.copy()
    changed[~fitting] *= -7  # the reported half
    other = Scored(logits_NK=changed, labels_N=data.labels_N, units_N=data.units_N, class_names=data.class_names)
    assert other.calibration()["temperature"]["value"] == before["value"]
    point = OperatingPoint("youden")
    one, two = data.operating_point(point, 1), other.operating_point(point, 1)
    assert one is not None
    assert two is not None
    assert one["threshold"] == two["threshold"]
    assert one["sensitivity"] != two["sensitivity"]


def test_a_temperature_undoes_logits_that_are_too_large() -> None:
    # The labels are drawn from the softmax of the logits divided by 4, so that 4 is the best temperature.
    random = np.random.default_rng(5)
    logits = 6 * random.normal(size=(20_000, 3))
    odds = np.exp(logits / 4)
    labels = (random.random((20_000, 1)) > (odds / odds.sum(1, keepdims=True)).cumsum(1)).sum(1)
    # 20,000 rows: a standard error of about 0.04.
    assert fit_temperature(logits, labels) == pytest.approx(4, abs=0.25)
    assert cross_entropy(logits / 4, labels) < cross_entropy(logits, labels)


def test_an_operating_point_reaches_what_it_asks_for() -> None:
    scores, positive = binary(500)
    for wanted in (0.5, 0.8, 0.95, 1.0):
        called = scores >= OperatingPoint("sensitivity", wanted).threshold(scores, positive)
        assert called[positive].mean() >= wanted
        called = scores >= OperatingPoint("specificity", wanted).threshold(scores, positive)
        assert (~called[~positive]).mean() >= wanted
    fpr, tpr, _ = sklearn_metrics.roc_curve(positive, scores)
    called = scores >= OperatingPoint("youden").threshold(scores, positive)
    assert called[positive].mean() - called[~positive].mean() == pytest.approx((tpr - fpr).max())


@pytest.mark.parametrize("text", ["", "youden=1", "sensitivity", "sensitivity=2", "threshold=nan", "auc=0.5"])
def test_a_wrong_operating_point_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="operating point"):
        parse_operating_point(text)


def test_small_groups_and_classes_are_left_out() -> None:
    data = scored(60)
    found = data.by_group(["small"] * 9 + ["large"] * 51)
    assert found["small"] is None
    assert found["large"] is not None
    assert found["large"]["count"] == 51
    few = Scored(
        logits_NK=data.logits_NK,
        labels_N=(np.arange(60) < 9).astype(int),
        units_N=data.units_N,
        class_names=("a", "b", "c"),
    )
    assert few.by_class() == {"a": few.by_class()["a"], "b": None, "c": None}


def test_rows_that_are_not_finite_are_wrong_and_certain() -> None:
    data = scored(100, 2)
    logits = data.logits_NK.copy()
    logits[:] = np.nan
    broken = Scored(logits_NK=logits, labels_N=data.labels_N, units_N=data.units_N, class_names=data.class_names)
    found = broken.summary()
    assert found["accuracy"] == found["auc"] == 0
    assert broken.calibration()["temperature"] is None


def test_missing_findings_are_left_out_of_their_own_metrics_only() -> None:
    random = np.random.default_rng(2)
    labels = (random.random((200, 3)) < 0.4).astype(float)
    scores = random.normal(size=(200, 3)) + labels
    masked = labels.copy()
    masked[:50, 0] = np.nan
    masked[5:, 2] = np.nan
    whole, found = (finding_metrics(scores, each, ("a", "b", "c")) for each in (labels, masked))
    assert found["findings"]["b"] == whole["findings"]["b"]
    assert found["findings"]["c"] is None
    known = sklearn_metrics.roc_auc_score(labels[50:, 0], scores[50:, 0])
    assert found["findings"]["a"]["auc"] == pytest.approx(known)
    assert found["auc"] == pytest.approx(np.mean([found["findings"][name]["auc"] for name in "ab"]))
    with pytest.raises(ArgumentError, match="0, 1 or NaN"):
        finding_metrics(scores, labels + 0.5, ("a", "b", "c"))


@pytest.mark.parametrize(
    ("score", "interval", "better"),
    [(0.7, (0.6, 0.8), "yes"), (0.6, (0.49, 0.7), "cannot tell"), (0.5, (0.4, 0.6), "no"), (0.7, None, "cannot tell")],
)
def test_better_than_chance_needs_the_whole_interval(score: float, interval: tuple | None, better: str) -> None:
    assert compare(score, interval, 0.5, "always a").better == better


def test_chance_is_the_most_frequent_class() -> None:
    found = accuracy_against_chance(0.9, {"ill": 90, "well": 10})
    assert found is not None
    assert (found.chance, found.constant, found.better) == (0.9, "always ill", "no")
    assert accuracy_against_chance(0.9, {}) is None


def test_only_a_clear_fall_is_a_fall() -> None:
    assert falls([0.5, 0.827, 0.657], 200) == 1
    assert falls([0.5, 0.7, 0.69], 10_000) is None  # less than 2 points
    assert falls([0.5, 0.7, 0.65], 100) is None  # within the noise of 100 images
    assert falls([0.5, 0.6, 0.7], 100) is None
    assert falls([0.4], 100) is None


def test_saturated_probabilities_do_not_tie_the_ranking() -> None:
    data = scored(200, 2)
    large = Scored(
        logits_NK=100 * data.logits_NK, labels_N=data.labels_N, units_N=data.units_N, class_names=data.class_names
    )
    assert large.summary()["auc"] == data.summary()["auc"]
    both = large.by_class()
    assert both["class 0"] is not None
    assert both["class 1"] is not None
    assert both["class 0"]["auc"] == pytest.approx(both["class 1"]["auc"])
