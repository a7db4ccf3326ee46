"""The files of ``dpvision plan --curves``: three curves as PNG and SVG, and their numbers as CSV and JSON.

``accounting.plan_curves`` computes them and says what they mean.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

from dpvision.accounting import AttackRisk, PlanRow
from dpvision.accounting.budget_plan import ENOUGH
from dpvision.accounting.plan_curves import (
    USUAL_STEPS,
    EpochsPoint,
    NoisePoint,
    Target,
    epsilon_over_steps,
    least_epochs,
    noise_at_batch,
)
from dpvision.cli.plan_chart import Published
from dpvision.storage.files import write_atomically

EPSILON, NOISE, EPOCHS = "epsilon-over-steps", "noise-at-a-fixed-batch", "epochs-over-batch"
_Values = list[dict[str, Any]]


def write_curves(
    rows: Sequence[PlanRow],
    target: float | AttackRisk,
    folder: Path,
    *,
    published: Sequence[Published] = (),
    steps: int | None = None,
) -> list[Path]:
    """Compute the three curves of a plan and write them.

    Args:
        rows: The plan, at least one row.
        target: What the plan spends.
        folder: Where to write; it is created. Files of these names are replaced.
        published: Settings of papers for the same data and epsilon, which are marked.
        steps: Steps that the optimizer needs. Default: 1000.

    Returns:
        The files: curves.json, and for each curve a CSV, a PNG and an SVG.

    Raises:
        ArgumentError: A value is out of range.
    """
    first = rows[0]
    num_units, needed = first.mechanism.num_units, USUAL_STEPS if steps is None else steps
    risk = target if isinstance(target, AttackRisk) else None
    epsilon = None if isinstance(target, AttackRisk) else target
    spent = Target(delta=first.guarantee.delta, epsilon=epsilon, risk=risk, adjacency=first.mechanism.adjacency)
    batches = sorted({row.mechanism.expected_batch_size for row in rows})
    lines = _middle_rows(rows)
    by_batch = {
        row.mechanism.expected_batch_size: epsilon_over_steps(row.mechanism, delta=spent.delta) for row in lines
    }
    fixed = batches[len(batches) // 2]
    noise = noise_at_batch(num_units=num_units, expected_batch_size=fixed, target=spent)
    epochs = least_epochs(
        num_units=num_units, expected_batch_sizes=_denser(batches, num_units), target=spent, steps=needed
    )
    shown = f"attacks ≤ {target}" if risk else f"epsilon ≤ {target:g}"
    title = f"{shown} at delta {spent.delta:g}, {num_units} units"
    values: dict[str, _Values] = {
        EPSILON: [
            {
                "expected_batch_size": row.mechanism.expected_batch_size,
                "noise_multiplier": row.mechanism.noise_multiplier,
                "steps": count,
                "epsilon": at,
            }
            for row in lines
            for count, at in by_batch[row.mechanism.expected_batch_size]
        ],
        NOISE: [{"expected_batch_size": fixed, **asdict(point)} for point in noise],
        EPOCHS: [{**asdict(point), "epochs": point.epochs} for point in epochs],
    }
    figures = {
        EPSILON: _draw_epsilon(lines, by_batch, title),
        NOISE: _draw_noise(noise, fixed, title, published),
        EPOCHS: _draw_epochs(epochs, needed, title, published),
    }
    folder.mkdir(exist_ok=True)
    facts = {
        "target": str(target),
        "delta": spent.delta,
        "adjacency": spent.adjacency,
        "num_units": num_units,
        "needed_steps": needed,
    }
    files = {"curves.json": (json.dumps({**facts, "curves": values}, indent=2) + "\n").encode()}
    for name, figure in figures.items():
        files[f"{name}.csv"] = _csv(values[name])
        for kind in ("png", "svg"):
            content = io.BytesIO()
            figure.savefig(content, format=kind, dpi=120)
            files[f"{name}.{kind}"] = content.getvalue()
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def _middle_rows(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """One row for each batch size: that of the middle length."""
    by_batch: dict[float, list[PlanRow]] = {}
    for row in rows:
        by_batch.setdefault(row.mechanism.expected_batch_size, []).append(row)
    return [sorted(each, key=lambda row: row.mechanism.steps)[len(each) // 2] for _, each in sorted(by_batch.items())]


def _denser(batches: Sequence[float], num_units: int) -> list[float]:
    """The batch sizes, and those twice as large."""
    return sorted({*batches, *(2 * batch for batch in batches if 2 * batch <= num_units)})


def _csv(values: _Values) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(values[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(values)
    return text.getvalue().encode()


def _figure(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    axes = figure.add_subplot()
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _draw_epsilon(rows: Sequence[PlanRow], by_batch: dict[float, list[tuple[int, float]]], title: str) -> Figure:
    """Epsilon over the share of the steps that were taken, one line for each batch size."""
    figure, axes = _figure(title)
    for row in rows:
        mechanism = row.mechanism
        points = by_batch[mechanism.expected_batch_size]
        label = f"batch {mechanism.expected_batch_size:g}, σ {mechanism.noise_multiplier:g}, {mechanism.steps} steps"
        shares = [count / mechanism.steps for count, _ in points]
        axes.plot(shares, [epsilon for _, epsilon in points], marker=".", markersize=4, label=label)
    axes.set(xlim=(0, 1.02), xlabel="share of the planned steps", ylabel="epsilon spent (upper bound)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    return figure


def _draw_noise(points: Sequence[NoisePoint], batch: float, title: str, published: Sequence[Published]) -> Figure:
    """Signal and steps over the noise multiplier, at one batch size."""
    figure, axes = _figure(title)
    noises = [point.noise_multiplier for point in points]
    axes.plot(noises, [100 * point.share for point in points], marker="o", color="C0")
    axes.axhline(100 / ENOUGH, color="grey", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks([round(noise, 1) for noise in noises], [f"{noise:.2g}" for noise in noises])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(ylim=(0, 105), xlabel=f"noise_multiplier σ, at expected_batch_size {batch:g}")
    axes.set_ylabel("signal of all steps, % of its limit", color="C0")
    other = axes.twinx()
    other.plot(noises, [point.steps for point in points], marker="s", markersize=4, color="C1")
    other.set_yscale("log")
    other.set_ylabel("steps that the budget allows", color="C1")
    enough = next((point for point in points if point.share * ENOUGH >= 1), None)
    if enough is not None:
        axes.plot([enough.noise_multiplier], [100 * enough.share], marker="o", markersize=11, color="C0")
        axes.annotate(
            f"enough noise: σ {enough.noise_multiplier:.3g}, {enough.steps} steps\n(within 10 % of the limit)",
            (enough.noise_multiplier, 100 * enough.share),
            (14, -46),
            textcoords="offset points",
            fontsize="small",
            arrowprops={"arrowstyle": "-", "color": "grey"},
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            zorder=5,
        )
    for setting in published:
        if setting.mechanism.expected_batch_size == batch:
            noise = setting.mechanism.noise_multiplier
            axes.axvline(noise, color="black", linestyle="--", linewidth=1)
            axes.annotate(
                f"{setting.source.split(', ')[0]}: σ {noise:g}",
                (noise, 3),
                (4, 0),
                textcoords="offset points",
                fontsize="small",
            )
    return figure


def _draw_epochs(points: Sequence[EpochsPoint], steps: int, title: str, published: Sequence[Published]) -> Figure:
    """The least sensible number of epochs over the batch size."""
    figure, axes = _figure(title)
    known = [point for point in points if point.epochs_of_budget is not None]
    sizes = [point.expected_batch_size for point in points]
    axes.plot(
        [point.expected_batch_size for point in known],
        [point.epochs_of_budget for point in known],
        linestyle="--",
        color="C0",
        label="epochs until the budget is used well (accounting)",
    )
    axes.plot(
        sizes, [point.epochs_of_steps for point in points], linestyle="--", color="C1", label=f"epochs of {steps} steps"
    )
    axes.plot(
        [point.expected_batch_size for point in known],
        [point.epochs for point in known],
        marker="o",
        color="C2",
        label="least sensible length: the larger of both",
    )
    for setting in published:
        mechanism = setting.mechanism
        place = (mechanism.expected_batch_size, mechanism.epochs)
        axes.plot(*place, marker="*", markersize=13, color="black", linestyle="")
        axes.annotate(
            f"{', '.join(setting.source.split(', ')[:2])}",
            place,
            (-8, 6),
            textcoords="offset points",
            fontsize="small",
            ha="right",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set(xlabel="expected_batch_size", ylabel="epochs")
    axes.legend(fontsize="small")
    return figure
