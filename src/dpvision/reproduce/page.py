"""The table as Markdown: the paper's figures beside ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

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
    yield "| row | epsilon | paper, % | median | mean ± std | best | n | epsilon of all its runs |"
    yield "| --- | --: | --: | --: | --: | --: | --: | --: |"
    for row in rows:
        if row["n"] == 0 and row["failed"]:
            cells = ["failed", _NOTHING, _NOTHING]
        else:
            cells = [_number(row["median"]), _mean(row), _number(row["best"])]
        together = None if row["together"] is None else row["together"]["epsilon"]
        first = [row["label"], _epsilon(row["epsilon"]), _number(row["paper"], digits=4)]
        yield f"| {' | '.join([*first, *cells, str(row['n']), _epsilon(together)])} |"


def _mean(row: Mapping[str, Any]) -> str:
    if row["mean"] is None or row["std"] is None:
        return _number(row["mean"])
    return f"{row['mean']:.2f} ± {row['std']:.2f}"


def _number(value: float | None, *, digits: int | None = None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.{digits}g}" if digits else f"{value:.2f}"


def _epsilon(value: float | None) -> str:
    """Rounded up: a bound that is shown must be one."""
    return _NOTHING if value is None else f"{math.ceil(value * 1000) / 1000:g}"


def _notes(values: Mapping[str, Any]) -> Iterator[str]:
    scale = {"cpu": "the reduced versions for two cores", "paper": "the papers' settings", "quick": "smoke tests"}
    yield f"Scale: {scale[values['scale']]}. Ours: accuracy on the public test set after the last step, in percent."
    yield "The standard deviation is the sample's; the best of several runs was chosen by a look at the test set."
    yield ""
    yield from release_lines(values)
    yield ""
    yield from failure_lines(values)
    for row in values["rows"]:
        yield f"- {row['label']}: paper: {row['paper_words']}"


def release_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """What the runs cost together."""
    yield "Every run is a release of its own with an epsilon of its own. Released together, they compose:"
    for each in values["together"]:
        bound = f"epsilon {_epsilon(each['epsilon'])} at delta {each['delta']:g}"
        yield f"- {_runs(each['runs'])} with privacy on {each['source']}: {bound} (PLD over all ledgers)"
    if values["without_privacy"]:
        yield f"- {_runs(values['without_privacy'])} without privacy: no guarantee for whoever is in their data"


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"


def failure_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """The runs that failed, and why."""
    for row in values["rows"]:
        for failure in row["failed"]:
            yield f"- failed: {row['label']}, run {failure['repeat']}: {failure['reason']}"


def _commands(values: Mapping[str, Any]) -> Iterator[str]:
    yield f"dpvision reproduce {values['table']} --scale {values['scale']} --repeats {values['repeats']}"
    end = {"cpu": " --scale cpu", "paper": "", "quick": " --quick"}[values["scale"]]
    for row in values["rows"]:
        yield f"{row['command']}{end}"
