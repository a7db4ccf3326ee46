"""``dpvision recipes`` and ``dpvision reproduce``: settings and tables of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpvision.cli.console import INTERRUPTED, PROBLEMS_FOUND, print_results, print_table, say
from dpvision.cli.flags import Json, Machine, set_threads

if TYPE_CHECKING:
    from dpvision.papers import Recipe
    from dpvision.papers.reproduce import Report


def recipes(
    name: Annotated[str | None, typer.Argument(help="Name of a recipe, to show all of it.")] = None,
    json: Json = False,
) -> None:
    """List the recipes by paper: name, the paper's result, ours. With NAME: its command, results and differences.

    Example: dpvision recipes cifar10-scaleresnet9-eps3
    """
    from dpvision.papers import all_recipes, find_recipe

    found = all_recipes() if name is None else (find_recipe(name),)
    if json or name is not None:
        print_results({"recipes": [recipe.to_dict() for recipe in found]}, found[0].lines(), json=json)
    else:
        _print_by_paper(found)


def _print_by_paper(found: tuple[Recipe, ...]) -> None:
    for source in dict.fromkeys(recipe.source for recipe in found):
        typer.echo(f"{source}:")
        rows = [{"name": f"  {r.name}", "paper": r.paper, "ours": r.ours} for r in found if r.source == source]
        print_table(("name", "paper", "ours"), rows, header=False)


def reproduce(
    on: Machine,
    table: Annotated[str | None, typer.Argument(help="Which table; --list shows them.")] = None,
    scale: Annotated[str, typer.Option(help="paper, cpu (reduced versions) or quick (smoke test).")] = "paper",
    repeats: Annotated[int, typer.Option(help="Runs of each row, >= 1. Each is a release of its own.")] = 1,
    rows: Annotated[str | None, typer.Option(help="Names of rows, separated by commas; * matches anything.")] = None,
    own_sources: Annotated[
        bool, typer.Option("--own-sources", help="Each repeat trains initial weights of its own, on its own classes.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Default: reproduce/TABLE, with -cpu or -quick after it.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the tables, or the rows of one, and stop.")] = False,
) -> None:
    """Run a paper's table or figure again: table.md, table.json and table.svg, the paper's results beside ours.

    Where the paper has a figure, it is drawn too: figure.png, .svg, .csv and .json.

    The same command continues where it was interrupted. Exit code 1: a row failed; the others were run.

    Example: dpvision reproduce shoefit-table5 --scale cpu --repeats 3
    """
    if show or table is None:
        _list(table, json=on.json)
        return
    set_threads(on.threads)
    from dpvision.cli.progress import TerminalProgress
    from dpvision.papers.reproduce import Job
    from dpvision.papers.reproduce import reproduce as run_table
    from dpvision.papers.tables import find_table

    folder = output or Path("reproduce") / (table if scale == "paper" else f"{table}-{scale}")
    patterns = tuple(part.strip() for part in (rows or "").split(",") if part.strip())
    job = Job(
        table=find_table(table),
        folder=folder,
        scale=scale,
        repeats=repeats,
        rows=patterns,
        own_sources=own_sources,
        device=on.device,
    )
    report = run_table(job, callback=TerminalProgress())
    _print(report, json=on.json)
    if report.interrupted:
        say("interrupted; the same command continues")
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(PROBLEMS_FOUND)


def _list(table: str | None, *, json: bool) -> None:
    from dpvision.papers.tables import all_tables, find_table

    tables = all_tables() if table is None else (find_table(table),)
    described = [
        {
            "name": each.name,
            "title": each.title,
            "rows": [{"name": row.name, "label": row.label, "paper": row.recipe.accuracy} for row in each.rows],
        }
        for each in tables
    ]
    lines = [f"{each.name}: {each.title}, {len(each.rows)} rows" for each in tables]
    if table is not None:
        lines += [f"  {row.name}  {row.label}; paper: {row.recipe.paper}" for row in tables[0].rows]
    print_results({"tables": described}, lines, json=json)


def _print(report: Report, *, json: bool) -> None:
    from dpvision.papers.table_page import failure_lines, release_lines, table_lines

    values = report.to_dict()
    files = [str(path) for path in report.written]
    lines = [*table_lines(values["rows"]), "", *failure_lines(values), *release_lines(values)]
    lines += [values["smoke_test"]] if values["smoke_test"] else []
    print_results({**values, "files": files}, [*lines, f"written: {', '.join(files)}"], json=json)
