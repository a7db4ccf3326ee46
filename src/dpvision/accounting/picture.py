"""A picture of a plan: how noise falls with the batch, and what training longer costs."""

# pyright: reportUnknownMemberType=false
# matplotlib's stubs leave keyword arguments untyped.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

from dpvision.accounting.plan import PlanRow
from dpvision.checks import ArgumentError


def draw_plan(rows: Sequence[PlanRow], path: Path) -> None:
    """Write the picture to ``path``; the ending (.png, .svg, .pdf) chooses the format."""
    if not rows:
        raise ArgumentError("a plan must have at least one row to be drawn, got none.")
    figure = Figure(figsize=(9, 4), layout="constrained")
    noise_axes, effective_axes = figure.subplots(1, 2)
    for label, line in _lines(rows).items():
        sizes = [row.expected_batch_size for row in line]
        noise_axes.plot(sizes, [row.noise_multiplier for row in line], marker="o", label=label)
        effective_axes.plot(sizes, [row.effective_noise for row in line], marker="o", label=label)
    batches = sorted({row.expected_batch_size for row in rows})
    _dress(noise_axes, "noise_multiplier σ", batches)
    _dress(effective_axes, "effective noise σ / expected_batch_size", batches)
    effective_axes.legend(fontsize="small")
    spent = rows[0].guarantee
    figure.suptitle(
        f"epsilon ≤ {max(row.guarantee.epsilon for row in rows):.5g}, delta {spent.delta:g}, "
        f"{rows[0].num_units} units ({spent.adjacency})"
    )
    figure.savefig(path, dpi=120)


def _lines(rows: Sequence[PlanRow]) -> dict[str, list[PlanRow]]:
    """Rows of equal steps, or of about equal epochs, make a line from small to large batch."""
    by_steps, by_epochs = (
        [f"{row.steps} steps" for row in rows],
        [f"{float(f'{row.epochs:.2g}'):g} epochs" for row in rows],
    )
    labels = by_steps if len(set(by_steps)) < len(set(by_epochs)) else by_epochs
    lines: dict[str, list[PlanRow]] = {}
    for label, row in sorted(zip(labels, rows, strict=True), key=lambda pair: pair[1].epochs):
        lines.setdefault(label, []).append(row)
    return {label: sorted(line, key=lambda row: row.expected_batch_size) for label, line in lines.items()}


def _dress(axes: Axes, title: str, batches: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(batches, [f"{batch:g}" for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
    axes.tick_params(axis="y", which="minor", labelsize="x-small")
    axes.set_xlabel("expected_batch_size")
    axes.set_title(title)
    axes.grid(visible=True, which="both", alpha=0.3)
