"""A picture of a plan: how noise falls with the batch, and what training longer costs."""

# pyright: reportUnknownMemberType=false
# matplotlib's stubs leave keyword arguments untyped.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpvision.accounting.plan import PlanRow
from dpvision.checks import ArgumentError


def draw_plan(rows: Sequence[PlanRow], path: Path) -> None:
    """Write the picture to ``path``; the ending (.png, .svg, .pdf) chooses the format."""
    if not rows:
        raise ArgumentError("a plan must have at least one row to be drawn, got none.")
    figure = Figure(figsize=(9, 4), layout="constrained")
    noise_axes, effective_axes = figure.subplots(1, 2)
    for label, line in _lines(rows).items():
        batches = [row.expected_batch_size for row in line]
        noise_axes.plot(batches, [row.noise_multiplier for row in line], marker="o", label=label)
        effective_axes.plot(batches, [row.effective_noise for row in line], marker="o", label=label)
    _dress(noise_axes, "noise_multiplier σ")
    _dress(effective_axes, "σ / expected_batch_size")
    effective_axes.legend(fontsize="small")
    spent = rows[0].guarantee
    figure.suptitle(
        f"epsilon ≤ {max(row.guarantee.epsilon for row in rows):.4g}, delta {spent.delta:g}, "
        f"{rows[0].num_units} units ({spent.adjacency})"
    )
    figure.savefig(path, dpi=120)


def _lines(rows: Sequence[PlanRow]) -> dict[str, list[PlanRow]]:
    """Rows of about equal epochs make a line, from small to large batch."""
    lines: dict[str, list[PlanRow]] = {}
    for row in sorted(rows, key=lambda row: (row.epochs, row.expected_batch_size)):
        lines.setdefault(f"{row.epochs:.2g} epochs", []).append(row)
    return {label: sorted(line, key=lambda row: row.expected_batch_size) for label, line in lines.items()}


def _dress(axes: Axes, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("expected_batch_size")
    axes.set_title(title)
    axes.grid(visible=True, which="both", alpha=0.3)
