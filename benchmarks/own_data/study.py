"""The cells of the study: one dataset, number of units and epsilon, with default, grid, baseline and majority.

Every cell is simulated (``heads.py``) on features that the model itself computes. Unwhitened features are computed once
per dataset; pooling and whitening are linear, so every point of the grid follows from them. Rows go to a JSON lines
file, and cells that are in it already are not run again.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch.nn import functional

from benchmarks.own_data.features import MOST_PRETRAINED, MOST_SCATTERED, PRETRAINED, contrast_features, features
from benchmarks.own_data.heads import Head, HeadData, delta_for, noise_for, simulate
from benchmarks.own_data.one_shot import class_means, least_squares
from benchmarks.own_data.sources import BY_NAME
from dpvision.models import efficientnet, scattering
from dpvision.models.scattering import WhitenedPaths
from dpvision.training import defaults

SIDE = 32
RATES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)
CLIPS = (0.1, 0.5)
FEATURES = tuple(itertools.product((2, 4), (0.3, 3.0, 10.0)))
"""60 points: 5 rates (times the default's) × 2 clip norms × 6 features (pool, ridge)."""
MOST_GRID_UNITS = 3000
"""Larger cells have the default alone: a grid would take hours."""
SEEDS, FRESH = (0, 1, 2), (100, 101, 102)
POINTS = 10


@final
@dataclass(frozen=True)
class Cell:
    """One setting of the study; ``pretrained`` cells use frozen EfficientNet-Lite0 features."""

    source: str
    num_units: int
    epsilon: float
    pretrained: bool = False

    @property
    def key(self) -> str:
        """What a row of the results is found by."""
        return f"{self.source} {self.num_units} {self.epsilon:g} {'pretrained' if self.pretrained else 'own'}"


def default_head(cell: Cell, *, width: int, classes: int) -> Head:
    """What ``training.defaults`` chooses: the same functions that the run calls."""
    n, delta = cell.num_units, delta_for(cell.num_units)
    mu = defaults.gaussian_mu(cell.epsilon, delta)
    full = defaults.full_signal(n, epsilon=cell.epsilon, delta=delta)
    offset = defaults.head_offset(classes, signal=full, pretrained=cell.pretrained)
    steps, clip = defaults.HEAD_STEPS, defaults.head_clip_norm(width, pretrained=cell.pretrained, offset=offset)
    plan = defaults.HeadPlan(
        features=width,
        classes=classes,
        batch=float(n),
        steps=steps,
        clip_norm=clip,
        delta=delta,
        pretrained=cell.pretrained,
        offset=offset,
    )
    estimate = defaults.estimated_noise(n, batch=float(n), steps=steps, mu=mu)
    signal = defaults.plan_signal(n, batch=float(n), steps=steps, noise_multiplier=estimate)
    noise = noise_for(n, float(n), steps, cell.epsilon, delta)
    kept = efficientnet.KEPT_OFFSET if cell.pretrained else scattering.KEPT_OFFSET
    rate = defaults.head_rate(plan, signal=signal)
    return Head(rate, clip, steps, noise_multiplier=noise, offset=plan.offset, kept=kept if plan.offset else 0.0)


def default_features(cell: Cell) -> HeadData:
    """The features that the default model has for this cell."""
    if cell.pretrained:
        options = {"resize_to": defaults.PRETRAINED_IMAGE_SIZE}
        return features(cell.source, PRETRAINED, options, side=224, most=MOST_PRETRAINED)
    signal = defaults.full_signal(cell.num_units, epsilon=cell.epsilon, delta=delta_for(cell.num_units))
    pool = defaults.HEAD_POOL if signal < defaults.FULL_RESOLUTION else defaults.MOST_REGIONS
    return whitened(cell, pool=pool, ridge=defaults.whitening_ridge(signal))


def whitened(cell: Cell, *, pool: int, ridge: float) -> HeadData:
    """Pool and whiten kept features, as ``WhitenedPaths`` and the LayerNorm behind it do."""
    most = max(MOST_SCATTERED, cell.num_units)
    kept = contrast_features(cell.source, side=SIDE, pool=max(pool, defaults.HEAD_POOL), most=most)
    colours, paths = kept.train_x.shape[1:3]

    def finished(x: torch.Tensor) -> torch.Tensor:
        pooled = functional.adaptive_avg_pool2d(x.flatten(1, 2), pool).unflatten(1, (colours, paths))
        out = WhitenedPaths.apply_whitening(pooled, colours=colours, ridge=ridge)
        return functional.layer_norm(out, out.shape[1:])

    return HeadData(finished(kept.train_x), kept.train_y, finished(kept.test_x), kept.test_y, kept.num_classes)


def measure(cell: Cell, *, grid: bool) -> dict[str, Any]:
    """Run one cell: default (n = 3), majority; with ``grid`` its best (n = 1, winner again, n = 3) and the baseline."""
    started = time.perf_counter()
    whole = default_features(cell)
    head = default_head(cell, width=whole.train_x.shape[1], classes=whole.num_classes)
    curves = np.concatenate(
        [simulate(whole.first(cell.num_units, seed=seed), [head], seeds=[seed], points=POINTS) for seed in SEEDS],
        axis=1,
    )[:, :, 0]
    majority = 100 * torch.bincount(whole.test_y).max().item() / len(whole.test_y)
    row = facts(cell) | {
        "classes": whole.num_classes,
        "signal": defaults.full_signal(cell.num_units, epsilon=cell.epsilon, delta=delta_for(cell.num_units)),
        "majority": round(majority, 2),
        "default": rounded(curves[-1]),
        "curve": rounded(curves.mean(1)),
        "falls": rounded(curves.max(0) - curves[-1]),
        "test_rows": len(whole.test_y),
    }
    if grid:
        row |= best_of_grid(cell, whole)
        row["baseline"] = round(regression(whole.first(cell.num_units, seed=SEEDS[0])), 2)
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def facts(cell: Cell) -> dict[str, Any]:
    """The columns that say which cell a row is of."""
    return {
        "key": cell.key,
        "part": BY_NAME[cell.source].part,
        "source": cell.source,
        "num_units": cell.num_units,
        "epsilon": cell.epsilon,
        "pretrained": cell.pretrained,
    }


def rounded(values: Iterable[float]) -> list[float]:
    """Percentages to two digits."""
    return [round(float(value), 2) for value in values]


def measure_one_shot(cell: Cell) -> dict[str, Any]:
    """Run both one-shot heads on the default's features, on the same draws of units as the default (n = 3)."""
    whole = default_features(cell)
    noise = 1 / defaults.gaussian_mu(cell.epsilon, delta_for(cell.num_units))
    parts = [(whole.first(cell.num_units, seed=seed), seed) for seed in SEEDS]
    return facts(cell) | {
        "key": f"{cell.key} one_shot",
        "of": cell.key,
        "class_means": rounded(class_means(data, noise=noise, seed=seed) for data, seed in parts),
        "least_squares": rounded(least_squares(data, noise=noise, seed=seed) for data, seed in parts),
    }


def best_of_grid(cell: Cell, whole: HeadData) -> dict[str, Any]:
    """Try every point once, then the best one on fresh seeds."""
    best: tuple[float, tuple[Any, ...]] = (-1.0, ())
    kinds: Sequence[Any] = (None,) if cell.pretrained else FEATURES
    for kind in kinds:
        data = whole if kind is None else whitened(cell, pool=kind[0], ridge=kind[1])
        heads = list(_grid_heads(data, cell))
        found = simulate(data.first(cell.num_units, seed=SEEDS[0]), [head for _, head in heads], seeds=[SEEDS[0]])
        for (point, _), accuracy in zip(heads, found[-1][0], strict=True):
            best = max(best, (float(accuracy), (kind, *point)), key=lambda each: each[0])
    kind, rate, clip = best[1]
    data = whole if kind is None else whitened(cell, pool=kind[0], ridge=kind[1])
    head = dict(_grid_heads(data, cell))[(rate, clip)]
    again = [simulate(data.first(cell.num_units, seed=s), [head], seeds=[s])[-1][0][0] for s in FRESH]
    point = {"features": kind, "rate": rate, "clip": clip}
    return {"grid_best": rounded(again), "grid_point": point}


def _grid_heads(data: HeadData, cell: Cell) -> Iterator[tuple[tuple[float, float], Head]]:
    """Heads of every rate and clip norm; the rate is relative to the one that puts the default's noise on a logit.

    None has an offset, so that the grid shows what a plain head can reach.
    """
    width = data.train_x.shape[1]
    own = replace(default_head(cell, width=width, classes=data.num_classes), offset=0.0, kept=0.0)
    rates = RATES if not cell.pretrained else tuple(2.0**power for power in range(-15, 15))
    for rate, clip in itertools.product(rates, CLIPS):
        clip_norm = clip * math.sqrt(width)
        yield (
            (rate, clip),
            replace(own, clip_norm=clip_norm, learning_rate=own.learning_rate * own.clip_norm / clip_norm * rate),
        )


def regression(data: HeadData) -> float:
    """Accuracy of scikit-learn's logistic regression on the same features, without privacy; C by cross-validation.

    With fewer rows than features it is trained in the span of the rows, where its ridge leaves the weights anyway.
    """
    from sklearn.linear_model import LogisticRegressionCV

    scale = math.sqrt(data.train_x.shape[1])
    if len(data.train_x) < data.train_x.shape[1]:
        basis = torch.linalg.qr(data.train_x.T).Q
        data = replace(data, train_x=data.train_x @ basis, test_x=data.test_x @ basis)
    model = LogisticRegressionCV(
        Cs=[1.0, 10.0, 100.0], cv=3, max_iter=200, l1_ratios=(0,), use_legacy_attributes=False, scoring="accuracy"
    )
    model.fit(data.train_x.numpy() / scale, data.train_y.numpy())
    return 100 * float(model.score(data.test_x.numpy() / scale, data.test_y.numpy()))


def run_cells(cells: Sequence[Cell], log: Path, *, grid: bool) -> None:
    """Run the cells that ``log`` does not have yet, and append a row for each."""
    done = logged(log)
    for cell in cells:
        if cell.key in done:
            continue
        row = measure(cell, grid=grid and cell.num_units <= MOST_GRID_UNITS)
        append(log, row)
        print(cell.key, row["default"], row.get("grid_best"), row.get("baseline"), f"{row['seconds']} s", flush=True)


def run_one_shot(cells: Sequence[Cell], log: Path) -> None:
    """Run the one-shot heads of the cells that ``log`` has a default, but no one-shot head of."""
    done = logged(log)
    for cell in cells:
        if cell.key in done and f"{cell.key} one_shot" not in done:
            row = measure_one_shot(cell)
            append(log, row)
            print(row["key"], row["class_means"], row["least_squares"], flush=True)


def logged(log: Path) -> set[str]:
    """The keys of the rows in a log."""
    return {json.loads(line)["key"] for line in log.read_text().splitlines()} if log.exists() else set()


def append(log: Path, row: dict[str, Any]) -> None:
    """Add a row to a log."""
    with log.open("a") as file:
        file.write(json.dumps(row) + "\n")
