"""A picture of a plan: how noise falls with the batch, where that ends, and what training longer costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter

from dpvision.accounting.budget_plan import PlanRow
from dpvision.accounting.published import Published
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import rounded_up

# pyright: reportUnknownMemberType=false
# matplotlib's stubs leave keyword arguments untyped.


def draw_plan(rows: Sequence[PlanRow], path: Path, *, published: Sequence[Published] = ()) -> None:
    """Write the picture to ``path``; the ending (.png, .svg, .pdf) chooses the format."""
    if not rows:
        raise ArgumentError("a plan must have at least one row to be drawn, got none.")
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    noise_axes, effective_axes = figure.subplots(1, 2)
    for number, (label, line) in enumerate(_lines(rows).items()):
        colour = f"C{number}"
        _draw_line(noise_axes, line, [row.noise_multiplier for row in line], label=label, colour=colour)
        _draw_line(effective_axes, line, [row.effective_noise for row in line], label=label, colour=colour)
        sizes = [row.expected_batch_size for row in line]
        effective_axes.plot(sizes, [row.full_batch_noise for row in line], color=colour, linestyle=":", linewidth=1)
    for setting in published:
        _draw_star(noise_axes, setting, setting.noise_multiplier)
        _draw_star(effective_axes, setting, setting.effective_noise)
    batches = sorted({item.expected_batch_size for item in (*rows, *published)})
    _dress(noise_axes, "noise_multiplier σ", batches)
    _dress(effective_axes, "effective noise σ / expected_batch_size", batches)
    noise_axes.legend(fontsize="small")
    effective_axes.legend(handles=list(_marks(stars=bool(published))), fontsize="x-small")
    spent = rows[0].guarantee
    figure.suptitle(
        f"epsilon ≤ {rounded_up(max(row.guarantee.epsilon for row in rows))}, delta {rounded_up(spent.delta)}, "
        f"{rows[0].num_units} units ({spent.adjacency})"
    )
    figure.savefig(path, dpi=120)


def _draw_line(axes: Axes, line: Sequence[PlanRow], heights: Sequence[float], *, label: str, colour: str) -> None:
    """One length of training; a batch that is large enough has a filled mark."""
    sizes = [row.expected_batch_size for row in line]
    axes.plot(sizes, heights, color=colour, label=label)
    for row, height in zip(line, heights, strict=True):
        face = colour if row.batch_is_enough else "white"
        axes.plot([row.expected_batch_size], [height], marker="o", color=colour, markerfacecolor=face)


def _draw_star(axes: Axes, setting: Published, height: float) -> None:
    axes.plot([setting.expected_batch_size], [height], marker="*", markersize=13, color="black", linestyle="")
    note = f"{setting.source.split(', ')[1]}, {setting.steps} steps"
    place = (setting.expected_batch_size, height)
    axes.annotate(note, place, (-6, 8), textcoords="offset points", fontsize="x-small", ha="right")


def _marks(*, stars: bool) -> Sequence[Line2D]:
    """What the marks mean."""
    filled = Line2D([], [], color="grey", marker="o", label="enough: a larger batch gains under 10 % here")
    hollow = Line2D([], [], color="grey", marker="o", markerfacecolor="white", label="a larger batch still pays")
    floor = Line2D([], [], color="grey", linestyle=":", label="every unit in each of these steps")
    star = Line2D([], [], color="black", marker="*", markersize=11, linestyle="", label="chosen by De et al. 2022")
    return (filled, hollow, floor, star) if stars else (filled, hollow, floor)


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
