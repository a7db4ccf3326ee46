"""A reproduced table as a chart and as Markdown: the paper's accuracy beside ours, row by row.

``svg_chart`` and ``markdown_table`` are also used by the benchmarks.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpvision.privacy.mechanism import rounded_up

# pyright: reportUnknownMemberType=false
# matplotlib's stubs leave keyword arguments untyped.


_INK, _SOFT, _RULE = "#18212b", "#55616e", "#e1e5ea"
_OURS, _PAPER = "#1c5d99", "#c4561a"
_APART: Final = 0.16


def svg_chart(draw: Callable[[Figure, Axes], None], *, width: float, height: float) -> bytes:
    """Draw a chart as SVG in which text stays text, and equal values give equal bytes.

    Args:
        draw: Draws into the figure and its only axes.
        width: Inches.
        height: Inches.

    Returns:
        The content of an .svg file.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpvision", "font.size": 10}):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure, figure.subplots())
        content = io.BytesIO()
        figure.savefig(content, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return content.getvalue()


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, the first column aligned left and the others right."""
    for line in (columns, ["---", *["--:"] * (len(columns) - 1)], *rows):
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in line)
        yield f"| {' | '.join(cells)} |"


def draw_table(values: Mapping[str, Any]) -> bytes:
    """Draw a table as SVG: dots are single runs, the bar is mean ± one standard deviation of the sample.

    Args:
        values: ``Report.to_dict()``.
    """
    rows = values["rows"]

    def draw(_: Figure, axes: Axes) -> None:
        _draw_paper(axes, rows)
        _draw_ours(axes, rows)
        _dress(axes, values)

    return svg_chart(draw, width=8.5, height=1.4 + 0.36 * len(rows))


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


_NOTHING = "–"


def markdown(values: Mapping[str, Any]) -> str:
    """Return the Markdown page of a job.

    Args:
        values: ``Report.to_dict()``, as in its JSON file.
    """
    lines = [f"# {values['title']}", ""]
    if values["smoke_test"]:
        lines += [f"**{values['smoke_test'].capitalize()}.**", ""]
    if values["interrupted"]:
        lines += ["Interrupted: the same command continues.", ""]
    lines += [*table_lines(values["rows"]), "", *_notes(values), "", "![Paper and ours](table.svg)", ""]
    return "\n".join([*lines, "## Commands", "", "```", *_commands(values), "```", ""])


def table_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table itself."""
    columns = ["row", "epsilon", "paper, %", "median", "mean ± std", "best", "n"]
    top5 = any(row["paper_top5"] is not None for row in rows)
    columns += ["paper, top-5", "median, top-5"] if top5 else []
    cells_of = []
    for row in rows:
        if row["n"] == 0 and row["failed"]:
            cells = ["failed", _NOTHING, _NOTHING]
        else:
            cells = [_number(row["median"]), _mean(row), _number(row["best"])]
        first = [f"{row['label']}{_mark(row)}", _epsilon(row["epsilon"]), _number(row["paper"], digits=4)]
        more = [_number(row["paper_top5"], digits=4), _number(row["top5"])] if top5 else []
        cells_of.append([*first, *cells, str(row["n"]), *more, _together(row)])
    yield from markdown_table((*columns, "epsilon of all its runs by themselves"), cells_of)


def _mark(row: Mapping[str, Any]) -> str:
    return "" if all(run["for_release"] for run in row["runs"]) else " (not for release)"


def _together(row: Mapping[str, Any]) -> str:
    together = row["together"]
    if together is None:
        return _NOTHING
    return "void" if together["void"] else _epsilon(together["epsilon"])


def _mean(row: Mapping[str, Any]) -> str:
    if row["mean"] is None or row["std"] is None:
        return _number(row["mean"])
    return f"{row['mean']:.2f} ± {row['std']:.2f}"


def _number(value: float | None, *, digits: int | None = None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.{digits}g}" if digits else f"{value:.2f}"


def _epsilon(value: float | None) -> str:
    return _NOTHING if value is None else rounded_up(value)


def _notes(values: Mapping[str, Any]) -> Iterator[str]:
    scale = {"cpu": "the reduced versions for two cores", "paper": "the papers' settings", "quick": "smoke tests"}
    ours = "Ours: accuracy (Dice for masks) on the public test set after the last step, in percent."
    yield f"Scale: {scale[values['scale']]}. {ours}"
    yield "The standard deviation is the sample's; the best of several runs was chosen by a look at the test set."
    if values["own_sources"]:
        yield "Each repeat has initial weights of its own, so the spread includes that of pre-training."
    yield ""
    yield from release_lines(values)
    yield ""
    yield from failure_lines(values)
    yield from stamp_lines(values)
    for row in values["rows"]:
        yield f"- {row['label']}: paper: {row['paper_words']}"


def release_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what all runs in the folder cost together."""
    yield "Every run is a release of its own, with an epsilon of its own. Released together, all runs in this folder"
    yield "compose, also those that failed, were stopped or are not in this table:"
    for each in values["together"]:
        runs = f"{_runs(each['runs'])} on {each['source']}"
        if each["void"]:
            yield f"- {runs}: void, {each['void']}"
        else:
            bound = f"epsilon {rounded_up(each['epsilon'])} at delta {rounded_up(each['delta'])} ({each['adjacency']})"
            yield f"- {runs}: {bound}, by PLD over all ledgers"


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"


def failure_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the runs that failed, without reasons: those may depend on private data and are not written."""
    for row in values["rows"]:
        for failure in row["failed"]:
            yield f"- failed: {row['label']}, run {failure['repeat']}: {failure['kind']}"


def stamp_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows that must not be released, and why."""
    for row in values["rows"]:
        for stamp in dict.fromkeys(stamp for run in row["runs"] for stamp in run["stamps"]):
            yield f"- not for release: {row['label']}: {stamp}"


def _commands(values: Mapping[str, Any]) -> Iterator[str]:
    own = " --own-sources" if values["own_sources"] else ""
    yield f"dpvision reproduce {values['table']} --scale {values['scale']} --repeats {values['repeats']}{own}"
    end = {"cpu": " --scale cpu", "paper": "", "quick": " --quick"}[values["scale"]]
    for row in values["rows"]:
        yield f"{row['command']}{end}"
