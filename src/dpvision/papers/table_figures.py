"""The figure of a table, as its paper has it: curves, accuracy over a setting, heat maps; with other works' points.

Each is written as PNG and SVG, and its numbers as CSV and JSON, by ``analyze.figures``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from dpvision.analyze.figures import Chart, Line, curve_chart, heat_map
from dpvision.papers.tables import Plot, Table

if TYPE_CHECKING:
    from dpvision.papers.reproduce import RowResult

FIGURE: Final = "figure"
_ACCURACY: Final = "accuracy, %"
_PAPER: Final = "paper"


def table_chart(table: Table, results: Sequence[RowResult]) -> Chart | None:
    """Draw the figure of a table.

    Args:
        table: Says how it is drawn.
        results: Rows with their runs; rows without runs are left out.

    Returns:
        The figure; None if the table has none, or no run has finished. Its values name the x of each line's highest
        point, such as the best noise or number of epochs at each batch size.
    """
    plot = table.plot
    if plot is None or not any(result.runs for result in results):
        return None
    if plot.kind == "heat":
        return _heat(table, plot, results)
    if plot.kind in ("epochs", "epsilon"):
        lines = _curves(plot, results)
    else:
        lines = [*_over(plot, results), *_papers_lines(plot, results)]
    best = {line.label: max(line.points, key=lambda point: point[1])[0] for line in lines if line.points}
    lines += _published(plot)
    values = {"table": table.name, "best_x": best, "rows_of_table": [_facts(result) for result in results]}
    if not any(line.points for line in lines):
        return None
    titles = (plot.x, _ACCURACY)
    return curve_chart(FIGURE, table.title, lines, axes_titles=titles, log_x=plot.log_x, values=values)


def _facts(result: RowResult) -> dict[str, Any]:
    row = result.row
    return {"row": row.name, "series": row.series, "x": row.x, "n": len(result.runs), "std": result.std}


def _over(plot: Plot, results: Sequence[RowResult]) -> list[Line]:
    """Mean accuracy over the rows' x, or over the noise of their runs, a line for each series."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        x = result.noise_multiplier if plot.kind == "noise" else result.row.x
        if x is not None and result.mean is not None:
            found.setdefault(result.row.series, []).append((x, result.mean))
    return [Line(label=name or "ours", points=tuple(sorted(points))) for name, points in found.items()]


def _papers_lines(plot: Plot, results: Sequence[RowResult]) -> list[Line]:
    """What the paper prints for the same rows, dashed. Its noise is not that of our accountant, so it is left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in results if plot.kind == "over" else ():
        accuracy, row = result.row.recipe.accuracy, result.row
        if accuracy is not None and row.x is not None:
            found.setdefault(row.series, []).append((row.x, accuracy))
    return [
        Line(label=f"{_PAPER}: {name}" if name else _PAPER, points=tuple(sorted(points)), dashed=True, marker="D")
        for name, points in found.items()
    ]


def _curves(plot: Plot, results: Sequence[RowResult]) -> list[Line]:
    """The curve of each row: mean accuracy of its runs at each evaluation, over epochs or over epsilon."""
    lines: list[Line] = []
    for result in results:
        at: dict[float, list[float]] = {}
        for run in result.runs:
            for point in run.curve:
                x = point.epochs if plot.kind == "epochs" else point.epsilon
                if x is not None:
                    at.setdefault(round(x, 6), []).append(point.accuracy)
        points = tuple((x, statistics.fmean(values)) for x, values in sorted(at.items()))
        lines.append(Line(label=result.row.series or result.row.label, points=points))
    return lines


def _published(plot: Plot) -> list[Line]:
    """Other works, each as points without a line between them where there is one."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, x, accuracy in plot.published:
        found.setdefault(name, []).append((x, accuracy))
    return [Line(label=name, points=tuple(points), dashed=True, marker="*") for name, points in found.items()]


def _heat(table: Table, plot: Plot, results: Sequence[RowResult]) -> Chart:
    """Mean accuracy in a cell for each series and x."""
    cells: Mapping[tuple[str, str], float] = {
        (result.row.series, f"{result.row.x:g}"): result.mean
        for result in results
        if result.mean is not None and result.row.x is not None
    }
    return heat_map(FIGURE, table.title, cells, axes_titles=(plot.series, plot.x, _ACCURACY))
