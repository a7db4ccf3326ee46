"""Figures of a search: heat map, parallel coordinates, importance, and accuracy over epsilon.

They show every trial, so they may be written only where every trial is charged by composition (see ``trial_table``).
matplotlib is imported here only.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from dpvision.errors import ArgumentError
from dpvision.storage.files import write_atomically
from dpvision.tune.trial_table import (
    TrialRow,
    Value,
    groups_of,
    importance,
    is_numeric,
    is_scored,
    ordered_groups,
    pareto_front,
    setting_names,
)

PublishedPoint = tuple[str, float, float]
"""A result of a paper: its citation, epsilon, and accuracy from 0 to 1."""
_COLOURS: Final = "viridis"
_GREY: Final = "0.75"
_LOG_SPAN: Final = 20.0
_LONGEST: Final = 26
_FEW: Final = 7


def heat_map(rows: Sequence[TrialRow], *, x: str | None = None, y: str | None = None, score: str = "score") -> Figure:
    """Draw the mean score over two settings; each cell also says how many trials it holds.

    Args:
        rows: the trials; those without a score are left out.
        x: setting of the horizontal axis. Default: the most important one.
        y: setting of the vertical axis. Default: the second.
        score: the name of the score.

    Raises:
        ArgumentError: there are not two settings that differ between trials, or no such setting.
    """
    scored = _scored(rows)
    names = list(importance(scored))
    for name in (x, y):
        if name is not None and name not in names:
            raise ArgumentError(f"a heat map needs settings that differ between trials, got {name!r} of {names}.")
    left = [name for name in names if name not in (x, y)]
    x = x or (left.pop(0) if left else None)
    y = y or (left.pop(0) if left else None)
    if x is None or y is None:
        raise ArgumentError(f"a heat map needs two settings that differ between trials, got {names}.")
    columns, of_x = _grouped(scored, x)
    lines, of_y = _grouped(scored, y)
    sums, counts = np.zeros((len(lines), len(columns))), np.zeros((len(lines), len(columns)), dtype=int)
    for row, column, line in zip(scored, of_x, of_y, strict=True):
        sums[lines.index(line), columns.index(column)] += row.score or 0.0
        counts[lines.index(line), columns.index(column)] += 1
    means = np.ma.masked_where(counts == 0, sums / np.maximum(counts, 1))
    figure = Figure(figsize=(2.2 + 0.95 * len(columns), 1.6 + 0.62 * len(lines)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(means, origin="lower", aspect="auto", cmap=_COLOURS)
    low, high = float(means.min()), float(means.max())
    for (line, column), count in np.ndenumerate(counts):
        if count:
            dark = means[line, column] < (low + high) / 2
            text = f"{100 * means[line, column]:.1f}" + (f"\nn = {count}" if counts.max() > 1 else "")
            axes.text(column, line, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xticks(range(len(columns)), columns, rotation=30 if max(map(len, columns)) > 7 else 0)
    axes.set_yticks(range(len(lines)), lines)
    axes.set(xlabel=x, ylabel=y)
    figure.colorbar(image, ax=axes, format=lambda value, _: f"{100 * value:.3g} %", label=f"mean {score}")
    return figure


def parallel_coordinates(rows: Sequence[TrialRow], *, score: str = "score") -> Figure:
    """Draw every trial as a line over its settings and its score; the colour is the score, trials without one are grey.

    Args:
        rows: the trials.
        score: the name of the score.

    Raises:
        ArgumentError: no setting differs between trials, or no trial has a score.
    """
    scored = _scored(rows)
    names = setting_names(rows)
    if not names:
        raise ArgumentError("parallel coordinates need a setting that differs between trials.")
    names = [name for name in importance(scored) if name in names] or names
    figure = Figure(figsize=(2.2 + 1.7 * (len(names) + 1), 4.6), layout="constrained")
    axes = figure.add_subplot()
    places = {name: _axis(axes, number, [row.settings[name] for row in rows]) for number, name in enumerate(names)}
    scores = np.array([row.score for row in scored], dtype=float)
    scale = Normalize(float(scores.min()), float(scores.max()) or 1.0)
    heights = _axis(axes, len(names), [float(value) for value in scores], percent=True, log=False)
    colours = colormaps[_COLOURS]
    of_scores = dict(zip((row.number for row in scored), heights, strict=True))
    order = sorted(range(len(rows)), key=lambda index: (rows[index].score or 0.0) if is_scored(rows[index]) else -1.0)
    for index in order:
        row = rows[index]
        points = [places[name][index] for name in names]
        if is_scored(row):
            points.append(of_scores[row.number])
            axes.plot(points, color=colours(scale(row.score or 0.0)), linewidth=1.6, alpha=0.85)
        else:
            axes.plot(points, color=_GREY, linewidth=1, linestyle="--", zorder=0)
    axes.set(xlim=(-0.15, len(names) + 0.45), ylim=(-0.06, 1.06), yticks=[])
    axes.set_xticks(range(len(names) + 1), [*map(_short, names), score])
    axes.tick_params(axis="x", length=0, pad=8)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.colorbar(
        ScalarMappable(scale, colours), ax=axes, format=lambda value, _: f"{100 * value:.3g} %", label=score, shrink=0.9
    )
    return figure


def importance_chart(rows: Sequence[TrialRow], *, score: str = "score") -> Figure:
    """Draw the share of the scores' variance that each setting explains by itself (``trial_table.importance``).

    Args:
        rows: the trials; those without a score are left out.
        score: the name of the score.

    Raises:
        ArgumentError: no trial has a score, or no setting differs between trials.
    """
    scored = _scored(rows)
    shares = importance(scored)
    if not shares:
        raise ArgumentError("importance needs a setting that differs between trials.")
    figure = Figure(figsize=(7.0, 1.5 + 0.42 * len(shares)), layout="constrained")
    axes = figure.add_subplot()
    names = list(shares)[::-1]
    axes.barh(names, [100 * shares[name] for name in names], color="C0", height=0.62)
    for place, name in enumerate(names):
        axes.text(100 * shares[name] + 1, place, f"{100 * shares[name]:.0f} %", va="center", fontsize="small")
    axes.set(xlim=(0, 110), xlabel=f"variance of the {score} explained by the setting alone, %")
    axes.set_title(f"{len(scored)} trials; interactions are not seen", loc="left", fontsize="small")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def score_over_epsilon(
    rows: Sequence[TrialRow],
    *,
    published: Sequence[PublishedPoint] = (),
    score: str = "accuracy",
    result: tuple[float, float] | None = None,
) -> Figure:
    """Draw the score of every trial over its own epsilon, with the Pareto front, the result and those of papers.

    Args:
        rows: the trials; those without a score or an epsilon are left out.
        published: results of papers, marked with stars and cited below the chart.
        score: the name of the score.
        result: epsilon of the whole search, and the score from 0 to 1 of what is released.

    Raises:
        ArgumentError: no trial has a score and an epsilon.
    """
    known = [row for row in _scored(rows) if row.epsilon is not None]
    if not known:
        raise ArgumentError("no trial has a score and an epsilon: there is nothing to draw.")
    figure = Figure(figsize=(7.4, 5.2), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(visible=True, alpha=0.3)
    axes.plot(
        [row.epsilon or 0.0 for row in known], [100 * (row.score or 0.0) for row in known], "o", color="C0", alpha=0.55,
        markersize=5, label="trials",
    )  # fmt: skip
    front = pareto_front(known)
    ends = [*(row.epsilon or 0.0 for row in front), max(row.epsilon or 0.0 for row in known)]
    heights = [*(100 * (row.score or 0.0) for row in front), 100 * (front[-1].score or 0.0)]
    axes.step(ends, heights, where="post", color="C1", linewidth=1.8, label="Pareto front")
    axes.plot(ends[:-1], heights[:-1], "o", color="C1", markersize=7)
    if result is not None:
        axes.plot(
            [result[0]], [100 * result[1]], "s", color="black", markersize=8, label="the release: the whole search"
        )
    sources = list(dict.fromkeys(source for source, _, _ in published))
    for number, source in enumerate(sources):
        mine = [(epsilon, 100 * reached) for cited, epsilon, reached in published if cited == source]
        marker = "*^sDvPX"[number % 7]
        size = 12 if marker == "*" else 8
        axes.plot(
            *zip(*sorted(mine), strict=True), marker, color=f"C{2 + number % 8}", markersize=size,
            markeredgecolor="black", markeredgewidth=0.5, label=source,
        )  # fmt: skip
    axes.set(xlabel="epsilon (of a trial: alone; the search costs more)", ylabel=f"{score}, %")
    axes.set_xlim(left=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    return figure


def write_figures(
    rows: Sequence[TrialRow],
    folder: Path,
    *,
    published: Sequence[PublishedPoint] = (),
    score: str = "accuracy",
    result: tuple[float, float] | None = None,
) -> list[Path]:
    """Write every figure that the trials allow, as PNG and SVG.

    Args:
        rows: the trials of a search that is priced by composition: the figures show all of them.
        folder: where to write; it is created. Files of these names are replaced.
        published: results of papers for the chart over epsilon.
        score: the name of the score.
        result: epsilon of the whole search, and the score from 0 to 1 of what is released.

    Returns:
        The files. A figure that needs more settings, scores or epsilons than there are is left out.
    """
    drawings = {
        "heat-map": lambda: heat_map(rows, score=score),
        "parallel-coordinates": lambda: parallel_coordinates(rows, score=score),
        "importance": lambda: importance_chart(rows, score=score),
        f"{score}-over-epsilon": lambda: score_over_epsilon(rows, published=published, score=score, result=result),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, draw in drawings.items():
        try:
            figure = draw()
        except ArgumentError:
            continue
        for kind in ("png", "svg"):
            content = io.BytesIO()
            figure.savefig(content, format=kind, dpi=120)
            path = folder / f"{name.replace(' ', '-')}.{kind}"
            write_atomically(path, content.getvalue())
            written.append(path)
    return written


def _scored(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """The trials that have a score."""
    found = [row for row in rows if is_scored(row)]
    if not found:
        raise ArgumentError("no trial has a score: there is nothing to draw.")
    return found


def _grouped(rows: Sequence[TrialRow], name: str) -> tuple[list[str], list[str]]:
    """The groups of a setting in their order, and the group of each trial."""
    values = [row.settings[name] for row in rows]
    groups = groups_of(values, most=6)
    return ordered_groups(values, groups), groups


def _axis(axes: Axes, place: int, values: Sequence[Value], *, percent: bool = False, log: bool = True) -> list[float]:
    """Draw a vertical axis with its ends or its values, and return the height of each value, from 0 to 1."""
    axes.axvline(place, color="0.4", linewidth=1, zorder=1)
    if not is_numeric(values):
        names = sorted({str(value) for value in values})
        heights = {each: number / max(1, len(names) - 1) for number, each in enumerate(names)}
        for each, height in heights.items():
            _tick(axes, place, height, _short(each))
        return [heights[str(value)] for value in values]
    numbers = np.array(values, dtype=float)
    low, high = float(numbers.min()), float(numbers.max())
    if log and low > 0 and high / low >= _LOG_SPAN:
        scaled = (np.log(numbers) - np.log(low)) / (np.log(high) - np.log(low))
        middle = float(np.sqrt(low * high))
    else:
        scaled = (numbers - low) / ((high - low) or 1.0)
        middle = (low + high) / 2
    few = dict(zip(numbers.tolist(), scaled.tolist(), strict=True))
    ticks = few if len(few) <= _FEW else {low: 0.0, middle: 0.5, high: 1.0}
    for value, height in ticks.items():
        text = f"{value:g}" if len(few) <= _FEW else f"{value:.3g}"
        _tick(axes, place, height, f"{100 * value:.1f} %" if percent else text)
    return [float(each) for each in scaled]


def _tick(axes: Axes, place: int, height: float, text: str) -> None:
    box: Any = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
    axes.text(place + 0.03, height, text, fontsize=8, va="center", bbox=box, zorder=4)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
