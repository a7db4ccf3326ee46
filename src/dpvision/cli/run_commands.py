"""``dpvision runs`` and ``compare``: several runs at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpvision.cli.console import print_json, print_results, print_table, say
from dpvision.cli.flags import Json


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="A folder that holds runs.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs in a folder: data, model, epsilon, result, state.

    A run is finished, interrupted (`dpvision resume` continues it), running, unsafe (complete, but not for release) or
    failed.

    Example: dpvision runs
    """
    from dpvision.release.run_states import list_runs

    found = list_runs(folder)
    if json:
        print_json({"runs": [run.to_dict() for run in found]})
    elif found:
        rows = [run.to_row() for run in found]
        print_table(tuple(rows[0]), rows)
    else:
        say(f"no runs in {folder}.")


def compare(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    disjoint: Annotated[
        bool,
        typer.Option("--disjoint", help="Declare that data of different names have no person or image in common."),
    ] = False,
    output: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("comparison.html"),
    json: Json = False,
) -> None:
    """Write one HTML page about several runs: results over epsilon, and the epsilon of all of them together.

    The epsilons of runs add up, also on different data: a person may be in both. With --disjoint, only runs on data of
    the same name do.

    Example: dpvision compare runs/demo-1 runs/demo-2 --output comparison.html
    """
    from dpvision.release.comparison_page import compare_runs

    page, found = compare_runs(run, disjoint=disjoint, output=output)
    print_results(found.to_dict() | {"page": str(page)}, [*found.lines(), f"page: {page}"], json=json)
