"""Several runs on one self-contained HTML page: results over epsilon, and the epsilon of all runs together.

templates/comparison.html.jinja has the text and markup, charts.py the drawing, composition.py the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any, final

from markupsafe import Markup

from dpvision.errors import ArgumentError, printable
from dpvision.privacy.mechanism import rounded_up
from dpvision.release.composition import Bill, spent_together
from dpvision.release.report import environment, score_text
from dpvision.release.run_states import RunSummary, describe_run
from dpvision.release.verify import verify
from dpvision.storage.files import write_page
from dpvision.storage.run_folder import RunFolder

_NOTHING: Mapping[str, Any] = {"runs": 0, "epsilon": 0.0, "delta": None, "adjacency": None, "void": None}
_MOST_RUNS = 100


@final
@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Runs and what they spend together.

    Attributes:
        runs: the runs, in the order in which they were given.
        names: what the page calls each of them.
        together: the sum, as ``composition.spent_together`` gives it.
        others: where that is void because of some runs, the sum of the others; else None.
    """

    runs: tuple[RunSummary, ...]
    names: tuple[str, ...]
    together: Mapping[str, Any]
    others: Mapping[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; nothing is rounded."""
        runs = [run.to_dict() for run in self.runs]
        return {"runs": runs, "together": dict(self.together), "of_the_others": self.others and dict(self.others)}

    def lines(self) -> Iterator[str]:
        """The comparison for the terminal, one line for each run and the sum last."""
        for name, run in zip(self.names, self.runs, strict=True):
            row = run.to_row()
            yield f"{name}: {row['data']}, {row['model']}, epsilon {row['epsilon']}, {row['result']}, {row['state']}"
        yield f"together: {sum_text(self.together)}"
        if self.others is not None:
            yield f"the other {self.others['runs']}: {sum_text(self.others)}"


def sum_text(total: Mapping[str, Any]) -> str:
    """A sum in words; epsilon and delta are rounded up."""
    if total["void"] is not None:
        return f"no epsilon ({total['void']})"
    if total["delta"] is None:
        return "nothing was spent"
    return f"epsilon {rounded_up(total['epsilon'])} at delta {rounded_up(total['delta'])}"


def compare_runs(paths: Sequence[Path], *, disjoint: bool = False, output: Path) -> tuple[Path, RunComparison]:
    """Compare runs and write the page.

    Args:
        paths: Folders of runs; each run once. A run with a certificate is verified.
        disjoint: Whether the user declares that data of different names have no unit in common.
        output: Where to write the page.

    Returns:
        The path of the page, and what it shows.

    Raises:
        ArgumentError: A folder is not that of a run, a run is given twice, or data that are declared disjoint are the
            same.

    Guarantee:
        The epsilon of all runs is an upper bound by PLD on every charge in their ledgers. It is never stated if one of
        the runs has no guarantee or does not verify.
    """
    if len(paths) > _MOST_RUNS:
        raise ArgumentError(f"at most {_MOST_RUNS} runs can be compared, got {len(paths)}.")
    runs = tuple(_verified(describe_run(path)) for path in paths)
    names = tuple(_names(paths))
    bills = [replace(run.bill, run=name) for run, name in zip(runs, names, strict=True) if run.bill is not None]
    if disjoint:
        _refuse_equal_data(runs, names)
    together = spent_together(bills, disjoint=disjoint) if bills else {**_NOTHING, "disjoint": disjoint, "groups": []}
    sound = [bill for bill in bills if not bill.voids]
    others = spent_together(sound, disjoint=disjoint) if sound and len(sound) < len(bills) else None
    found = RunComparison(runs=runs, names=names, together=together, others=others)
    write_page(output, _render(found).encode())
    return output, found


def _names(paths: Sequence[Path]) -> Iterator[str]:
    """Name each run by its folder, or by its path where two folders have the same name."""
    short = [printable(path.resolve().name) for path in paths]
    return (name if short.count(name) == 1 else printable(path) for name, path in zip(short, paths, strict=True))


def _verified(run: RunSummary) -> RunSummary:
    """The run as it is, or as failed if its release does not verify."""
    if run.facts is None or run.state == "failed":
        return run
    problems = verify(run.path).problems
    if not problems:
        return run
    why = f"it does not verify: {problems[0]}"
    bill = run.bill or Bill(run=run.path.name, source=None)
    return replace(run, state="failed", why=why, bill=replace(bill, voids=(why, *bill.voids)))


def _refuse_equal_data(runs: Sequence[RunSummary], names: Sequence[str]) -> None:
    """Refuse a declaration that is visibly wrong: the same images under two names. Only the runs' owner can see it."""
    known: list[tuple[str, str | None, str]] = []
    for run, name in zip(runs, names, strict=True):
        folder = RunFolder(run.path)
        if folder.key_path.exists() and run.bill is not None:
            known.append((name, run.bill.source, folder.load_key().bindings[-1].get("data", name)))
    for (one, source, data), (other, other_source, other_data) in combinations(known, 2):
        if source != other_source and data == other_data:
            raise ArgumentError(f"--disjoint is wrong: {one} and {other} were trained on the same images.")


def _render(found: RunComparison) -> str:
    """The page as text."""
    style = "".join(files("dpvision.release").joinpath(f"templates/{name}.css").read_text() for name in _STYLES)
    rows = [_row(number + 1, name, run) for number, (name, run) in enumerate(zip(found.names, found.runs, strict=True))]
    return (
        environment()
        .get_template("comparison.html.jinja")
        .render(
            style=Markup(style),  # noqa: S704 (our own files)
            rows=rows,
            together=found.together,
            others=found.others,
            charts=_charts(rows),
            unit=next((run.bill.privacy_unit for run in found.runs if run.bill is not None), "example"),
        )
    )


_STYLES = ("report", "comparison")


def _row(number: int, name: str, run: RunSummary) -> dict[str, Any]:
    """What the table and the charts show of a run."""
    final = None if run.facts is None else run.facts.final
    metrics = None if run.facts is None else run.facts.metrics
    points = [] if metrics is None else [(p.epsilon, p.score) for p in metrics.curve if p.epsilon is not None]
    if final is not None and run.epsilon is not None and not points:
        points = [(run.epsilon, final.score)]
    return {
        "number": number,
        "name": name,
        "run": run,
        "final": final,
        "score": None if final is None else score_text(final, final.score),
        "comparison": None if final is None else final.comparison,
        "chance": None if final is None or final.comparison is None else score_text(final, final.comparison.chance),
        "score_name": None if run.facts is None or final is None else run.facts.score_name,
        "points": sorted(points),
    }


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Markup]]:
    """One chart for each kind of score."""
    from dpvision.release.charts import Series, comparison_chart

    charts = []
    for name in dict.fromkeys(row["score_name"] for row in rows if row["score_name"] is not None):
        chosen = [row for row in rows if row["score_name"] == name]
        series = [Series(row["number"], tuple(row["points"]), row["final"].score) for row in chosen]
        charts.append((name, comparison_chart(series, score_name=name)))
    return charts
