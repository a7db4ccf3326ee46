"""The table as a picture: the paper's figure and ours with its spread, row by row."""

# pyright: reportUnknownMemberType=false
# matplotlib's stubs leave keyword arguments untyped.

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_INK, _SOFT, _RULE = "#18212b", "#55616e", "#e1e5ea"
_OURS, _PAPER = "#1c5d99", "#c4561a"
_APART: Final = 0.16


def draw_table(values: Mapping[str, Any]) -> bytes:
    """SVG. Dots are single runs, the bar is mean ± one standard deviation of the sample."""
    rows = values["rows"]
    # Text stays text, and the same figures give the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpvision", "font.size": 10}):
        figure = Figure(figsize=(8.5, 1.4 + 0.36 * len(rows)), layout="constrained")
        axes = figure.subplots()
        _draw_paper(axes, rows)
        _draw_ours(axes, rows)
        _dress(axes, values)
        content = io.BytesIO()
        figure.savefig(content, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def _draw_paper(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    points = [(row["paper"], place - _APART) for place, row in enumerate(rows) if row["paper"] is not None]
    if points:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "D", color=_PAPER, markersize=6, markerfacecolor="white", label="paper", linestyle="none")


def _draw_ours(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    runs = [(run["accuracy"], place + _APART) for place, row in enumerate(rows) for run in row["runs"]]
    means = [(row["mean"], place + _APART, row["std"] or 0.0) for place, row in enumerate(rows) if row["n"]]
    if not means:
        return
    x, y, spread = zip(*means, strict=True)
    axes.errorbar(x, y, xerr=spread, fmt="o", color=_OURS, markersize=6, capsize=3, label="ours, mean ± std")
    x, y = zip(*runs, strict=True)
    axes.plot(x, y, "|", color=_OURS, alpha=0.5, markersize=9, linestyle="none")


def _dress(axes: Axes, values: Mapping[str, Any]) -> None:
    labels = [row["label"] if row["n"] or not row["failed"] else f"{row['label']} (failed)" for row in values["rows"]]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel("accuracy, %", color=_SOFT)
    title = values["title"] if not values["smoke_test"] else f"{values['title']} – smoke test, means nothing"
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    axes.grid(axis="x", color=_RULE)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=_INK)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best", labelcolor=_INK)
