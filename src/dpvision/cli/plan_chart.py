"""The chart of ``dpvision plan --plot``, and the published settings that it shows beside a plan.

The chart has two panels over the expected batch size: the noise multiplier, and the noise on the mean gradient with its
lower limit. matplotlib is imported here only, so that accounting itself stays free of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Final, final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter

from dpvision.accounting import PlanRow, effective_noise
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Mechanism, rounded_up

# Source → num_units, delta, expected batch size, and epsilon → (noise multiplier, steps). All counted by RDP under
# add_remove. The pair quoted for WRN-16-4 at epsilon 8 (noise 3, 2468 steps) spends 7.05 by RDP, so it is left out.
_SETTINGS: Final[dict[str, tuple[int, float, float, dict[float, tuple[float, int]]]]] = {
    "De et al. 2022, WRN-16-4, CIFAR-10": (
        50_000,
        1e-5,
        4096,
        {1: (10, 875), 2: (6, 1125), 3: (5, 1593), 4: (4, 1687), 6: (3, 1843)},
    ),
    "De et al. 2022, WRN-40-4, CIFAR-10": (
        50_000,
        1e-5,
        16_384,
        {1: (40, 906), 2: (24, 1156), 3: (20, 1656), 4: (16, 1765), 6: (12, 2007), 8: (9.4, 2000)},
    ),
    "De et al. 2022, NF-ResNet-50, ImageNet": (1_271_167, 8e-7, 16_384, {8: (2.5, 71_589)}),
}


@final
@dataclass(frozen=True, kw_only=True)
class Published:
    """Batch size, steps and noise that a paper used at an epsilon, which it computed by RDP under add_remove."""

    source: str
    epsilon: float
    delta: float
    mechanism: Mechanism


def _published(source: str, epsilon: float) -> Published:
    num_units, delta, batch, chosen = _SETTINGS[source]
    noise, steps = chosen[epsilon]
    mechanism = Mechanism(
        num_units=num_units, expected_batch_size=batch, clip_norm=1.0, noise_multiplier=noise, steps=steps
    )
    return Published(source=source, epsilon=epsilon, delta=delta, mechanism=mechanism)


PUBLISHED: Final = tuple(_published(source, epsilon) for source in _SETTINGS for epsilon in _SETTINGS[source][3])


def published_settings(*, num_units: int, target_epsilon: float, delta: float) -> tuple[Published, ...]:
    """Return the settings that papers chose for this number of units, epsilon and delta; usually none."""
    return tuple(
        setting
        for setting in PUBLISHED
        if setting.mechanism.num_units == num_units
        and math.isclose(setting.epsilon, target_epsilon)
        and math.isclose(setting.delta, delta)
    )


def draw_plan(rows: Sequence[PlanRow], path: Path, *, published: Sequence[Published] = ()) -> None:
    """Write the chart to ``path``; the ending (.png, .svg, .pdf) chooses the format."""
    if not rows:
        raise ArgumentError("a plan must have at least one row to be drawn, got none.")
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    noise_axes, effective_axes = figure.subplots(1, 2)
    panels: tuple[tuple[Axes, Callable[[Mechanism], float]], ...] = (
        (noise_axes, attrgetter("noise_multiplier")),
        (effective_axes, effective_noise),
    )
    for number, (label, line) in enumerate(_lines(rows).items()):
        colour, sizes = f"C{number}", [row.mechanism.expected_batch_size for row in line]
        for axes, height in panels:
            axes.plot(sizes, [height(row.mechanism) for row in line], color=colour, label=label)
            for row in line:  # a batch that is large enough has a filled mark
                face = colour if row.batch_is_enough else "white"
                point = ([row.mechanism.expected_batch_size], [height(row.mechanism)])
                axes.plot(*point, marker="o", color=colour, markerfacecolor=face)
        effective_axes.plot(sizes, [row.full_batch_noise for row in line], color=colour, linestyle=":", linewidth=1)
    for setting in published:
        note = f"{setting.source.split(', ')[1]}, {setting.mechanism.steps} steps"
        for axes, height in panels:
            place = (setting.mechanism.expected_batch_size, height(setting.mechanism))
            axes.plot(*place, marker="*", markersize=13, color="black", linestyle="")
            axes.annotate(note, place, (-6, 8), textcoords="offset points", fontsize="x-small", ha="right")
    batches = sorted({item.mechanism.expected_batch_size for item in (*rows, *published)})
    _dress(noise_axes, "noise_multiplier σ", batches)
    _dress(effective_axes, "effective noise σ / expected_batch_size", batches)
    noise_axes.legend(fontsize="small")
    effective_axes.legend(handles=_marks(stars=bool(published)), fontsize="x-small")
    spent = rows[0].guarantee
    figure.suptitle(
        f"epsilon ≤ {rounded_up(max(row.guarantee.epsilon for row in rows))}, delta {rounded_up(spent.delta)}, "
        f"{rows[0].mechanism.num_units} units ({spent.adjacency})"
    )
    figure.savefig(path, dpi=120)


def _marks(*, stars: bool) -> list[Line2D]:
    """What the marks mean."""
    filled = Line2D([], [], color="grey", marker="o", label="enough: a larger batch gains under 10 % here")
    hollow = Line2D([], [], color="grey", marker="o", markerfacecolor="white", label="a larger batch still pays")
    floor = Line2D([], [], color="grey", linestyle=":", label="every unit in each of these steps")
    star = Line2D([], [], color="black", marker="*", markersize=11, linestyle="", label="chosen by De et al. 2022")
    return [filled, hollow, floor, star] if stars else [filled, hollow, floor]


def _lines(rows: Sequence[PlanRow]) -> dict[str, list[PlanRow]]:
    """Rows of equal steps, or of about equal epochs, make a line from small to large batch."""
    by_steps = [f"{row.mechanism.steps} steps" for row in rows]
    by_epochs = [f"{float(f'{row.mechanism.epochs:.2g}'):g} epochs" for row in rows]
    labels = by_steps if len(set(by_steps)) < len(set(by_epochs)) else by_epochs
    lines: dict[str, list[PlanRow]] = {}
    for label, row in sorted(zip(labels, rows, strict=True), key=lambda pair: pair[1].mechanism.epochs):
        lines.setdefault(label, []).append(row)
    return {label: sorted(line, key=lambda row: row.mechanism.expected_batch_size) for label, line in lines.items()}


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
