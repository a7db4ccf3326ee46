"""Figures with their data: each is written as PNG and SVG, and its numbers as CSV and JSON.

A stamp, where there is one, is printed in the figure itself and is a field of the JSON file.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpvision.errors import ArgumentError
from dpvision.storage.files import disk_errors, write_atomically

COLOURS: Final = ("#1f6f8b", "#c8553d", "#588157", "#7b5ea7", "#b8860b", "#6b6b6b")
FORMATS: Final = ("png", "svg", "csv", "json")
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "dpvision",
    "svg.fonttype": "none",
}
Draw = Callable[[Figure], None]


@final
@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure and the numbers that it shows.

    Attributes:
        name: of its files, without an ending.
        title: printed above it.
        draw: draws into an empty matplotlib figure.
        rows: its numbers as a table, for CSV; rows may lack columns.
        values: everything, for JSON.
        size: width and height in inches.
    """

    name: str
    title: str
    draw: Draw
    rows: Sequence[Mapping[str, Any]]
    values: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[float, float] = (7.0, 4.0)


def write_chart(folder: Path, chart: Chart, *, stamps: Sequence[str] = (), mode: int = 0o644) -> list[Path]:
    """Write a figure as NAME.png, NAME.svg, NAME.csv and NAME.json.

    Equal inputs give equal bytes.

    Args:
        folder: where to write; it is made if it is missing.
        chart: the figure.
        stamps: what a reader must know, printed in the figure and kept in the JSON file.
        mode: permissions of the files.

    Returns:
        The four files.

    Raises:
        ArgumentError: the figure has no numbers.
        DPVisionError: a file can't be written.
    """
    if not chart.rows:
        raise ArgumentError(f"{chart.name} has nothing to show.")
    content = {**_images(chart, stamps), "csv": _csv(chart.rows), "json": _json(chart, stamps)}
    written: list[Path] = []
    with disk_errors(f"write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for ending in FORMATS:
            path = folder / f"{chart.name}.{ending}"
            write_atomically(path, content[ending], mode=mode)
            written.append(path)
    return written


def _images(chart: Chart, stamps: Sequence[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=chart.size, layout="constrained", dpi=150)
        chart.draw(figure)
        heading = "\n".join([chart.title, *stamps])
        figure.suptitle(heading, fontsize=10, color="#a00000" if stamps else "black")
        for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            stream = io.BytesIO()
            figure.savefig(stream, format=ending, metadata=metadata)
            found[ending] = stream.getvalue()
    return found


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


def _json(chart: Chart, stamps: Sequence[str]) -> bytes:
    values = {
        "figure": chart.name,
        "title": chart.title,
        "stamps": list(stamps),
        **(chart.values or {"rows": chart.rows}),
    }
    return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()


@final
@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: its label and its points, in the order of x. ``dashed`` marks a run without privacy or a level."""

    label: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    marker: str = "o"


def curve_chart(
    name: str,
    title: str,
    lines: Sequence[Line],
    *,
    axes_titles: tuple[str, str],
    log_x: bool = False,
    values: Mapping[str, Any] | None = None,
) -> Chart:
    """Overlay the curves of several runs.

    Args:
        name: of the files.
        title: of the figure.
        lines: at least one curve; a single point is drawn as a marker.
        axes_titles: names of the x and the y axis.
        log_x: whether x is logarithmic.
        values: more for the JSON file.

    Returns:
        The figure.
    """
    x_title, y_title = axes_titles

    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        for index, line in enumerate(lines):
            colour = COLOURS[index % len(COLOURS)]
            if not line.points:
                continue
            style = "--" if line.dashed else "-"
            x, y = zip(*line.points, strict=True)
            axes.plot(x, y, style, marker=line.marker, markersize=3.5, color=colour, label=line.label)
        axes.set(xlabel=x_title, ylabel=y_title)
        if log_x:
            axes.set_xscale("log")
        axes.legend(fontsize=8)

    rows = [{"series": line.label, x_title: x, y_title: y} for line in lines for x, y in line.points]
    return Chart(name=name, title=title, draw=draw, rows=rows, values={**(values or {}), "rows": rows})


def heat_map(
    name: str, title: str, cells: Mapping[tuple[str, str], float], *, axes_titles: tuple[str, str, str]
) -> Chart:
    """Draw a grid of values, such as accuracy over learning rate and batch size.

    Args:
        name: of the files.
        title: of the figure.
        cells: the value at (row, column); missing cells stay empty.
        axes_titles: names of the rows, the columns and the values.

    Returns:
        The figure.
    """
    of_rows, of_columns, of_values = axes_titles
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    grid = np.full((len(rows), len(columns)), np.nan)
    for (row, column), value in cells.items():
        grid[rows.index(row), columns.index(column)] = value

    def draw(figure: Figure) -> None:
        axes: Axes = figure.subplots()
        image = axes.imshow(grid, aspect="auto", cmap="viridis")
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(xlabel=of_columns, ylabel=of_rows)
        axes.grid(visible=False)
        for i, j in zip(*np.nonzero(~np.isnan(grid)), strict=True):
            axes.text(j, i, f"{grid[i, j]:.1f}", ha="center", va="center", color="white", fontsize=8)
        figure.colorbar(image, label=of_values)

    table = [{of_rows: row, of_columns: column, of_values: value} for (row, column), value in cells.items()]
    return Chart(name=name, title=title, draw=draw, rows=table, values={"rows": table})
