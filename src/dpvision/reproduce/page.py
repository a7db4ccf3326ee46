"""The table as Markdown: the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dpvision.rounding import rounded_up

_NOTHING = "–"


def markdown(values: Mapping[str, Any]) -> str:
    """The page of a job, made of the figures that are also in its JSON."""
    lines = [f"# {values['title']}", ""]
    if values["smoke_test"]:
        lines += [f"**{values['smoke_test'].capitalize()}.**", ""]
    if values["interrupted"]:
        lines += ["Interrupted: the same command goes on.", ""]
    lines += [*table_lines(values["rows"]), "", *_notes(values), "", "![Paper and ours](table.svg)", ""]
    return "\n".join([*lines, "## Commands", "", "```", *_commands(values), "```", ""])


def table_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table itself."""
    yield "| row | epsilon | paper, % | median | mean ± std | best | n | epsilon of all its runs by themselves |"
    yield "| --- | --: | --: | --: | --: | --: | --: | --: |"
    for row in rows:
        if row["n"] == 0 and row["failed"]:
            cells = ["failed", _NOTHING, _NOTHING]
        else:
            cells = [_number(row["median"]), _mean(row), _number(row["best"])]
        first = [f"{row['label']}{_mark(row)}", _epsilon(row["epsilon"]), _number(row["paper"], digits=4)]
        yield f"| {' | '.join([*first, *cells, str(row['n']), _together(row)])} |"


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
    yield ""
    yield from release_lines(values)
    yield ""
    yield from failure_lines(values)
    yield from stamp_lines(values)
    for row in values["rows"]:
        yield f"- {row['label']}: paper: {row['paper_words']}"


def release_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """What all runs that lie in the folder cost together."""
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
    """The runs that failed. Why may depend on private data: it was said when they were run, and is not written."""
    for row in values["rows"]:
        for failure in row["failed"]:
            yield f"- failed: {row['label']}, run {failure['repeat']}: {failure['kind']}"


def stamp_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """The rows that must not be released, and why."""
    for row in values["rows"]:
        for stamp in dict.fromkeys(stamp for run in row["runs"] for stamp in run["stamps"]):
            yield f"- not for release: {row['label']}: {stamp}"


def _commands(values: Mapping[str, Any]) -> Iterator[str]:
    yield f"dpvision reproduce {values['table']} --scale {values['scale']} --repeats {values['repeats']}"
    end = {"cpu": " --scale cpu", "paper": "", "quick": " --quick"}[values["scale"]]
    for row in values["rows"]:
        yield f"{row['command']}{end}"
