"""``dpvision recipes`` and ``dpvision reproduce``: settings and tables of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpvision.cli.console import INTERRUPTED, PROBLEMS_FOUND, print_json, print_table, say
from dpvision.cli.flags import Device, Json
from dpvision.errors import printable

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
    if json:
        print_json({"recipes": [recipe.to_dict() for recipe in found]})
    elif name is not None:
        for line in found[0].lines():
            typer.echo(line)
    else:
        _print_by_paper(found)


def _print_by_paper(found: tuple[Recipe, ...]) -> None:
    for source in dict.fromkeys(recipe.source for recipe in found):
        typer.echo(f"{source}:")
        rows = [{"name": f"  {r.name}", "paper": r.paper, "ours": r.ours} for r in found if r.source == source]
        print_table(("name", "paper", "ours"), rows, header=False)


def reproduce(
    table: Annotated[str | None, typer.Argument(help="Which table; --list shows them.")] = None,
    scale: Annotated[str, typer.Option(help="paper, cpu (reduced versions) or quick (smoke test).")] = "paper",
    repeats: Annotated[int, typer.Option(help="Runs of each row, >= 1. Each is a release of its own.")] = 1,
    rows: Annotated[str | None, typer.Option(help="Names of rows, separated by commas; * matches anything.")] = None,
    output: Annotated[Path | None, typer.Option(help="Default: reproduce/TABLE, with -cpu or -quick after it.")] = None,
    device: Device = "cpu",
    show: Annotated[bool, typer.Option("--list", help="List the tables, or the rows of one, and stop.")] = False,
    json: Json = False,
) -> None:
    """Run a paper's table again: table.md, table.json and table.svg with the paper's results beside ours.

    The same command continues where it was interrupted. Exit code 1: a row failed; the others were run.

    Example: dpvision reproduce shoefit-table5 --scale cpu --repeats 3
    """
    if show or table is None:
        _list(table, json=json)
        return
    from dpvision.cli.progress import TerminalProgress
    from dpvision.papers.reproduce import Job
    from dpvision.papers.reproduce import reproduce as run_table
    from dpvision.papers.tables import find_table

    folder = output or Path("reproduce") / (table if scale == "paper" else f"{table}-{scale}")
    patterns = tuple(part.strip() for part in (rows or "").split(",") if part.strip())
    job = Job(table=find_table(table), folder=folder, scale=scale, repeats=repeats, rows=patterns, device=device)
    report = run_table(job, callback=TerminalProgress())
    _print(report, json=json)
    if report.interrupted:
        say("interrupted; the same command continues")
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(PROBLEMS_FOUND)


def _list(table: str | None, *, json: bool) -> None:
    from dpvision.papers.tables import all_tables, find_table

    tables = all_tables() if table is None else (find_table(table),)
    if json:
        print_json({"tables": [_described(each) for each in tables]})
        return
    for each in tables:
        typer.echo(f"{each.name}: {each.title}, {len(each.rows)} rows")
        for row in each.rows if table is not None else ():
            typer.echo(f"  {row.name}  {row.label}; paper: {row.recipe.paper}")


def _described(table: Any) -> dict[str, Any]:
    rows = [{"name": row.name, "label": row.label, "paper": row.recipe.accuracy} for row in table.rows]
    return {"name": table.name, "title": table.title, "rows": rows}


def _print(report: Report, *, json: bool) -> None:
    from dpvision.papers.table_page import failure_lines, release_lines, table_lines

    values = report.to_dict()
    if json:
        print_json({**values, "files": [str(path) for path in report.written]})
        return
    for line in (*table_lines(values["rows"]), "", *failure_lines(values), *release_lines(values)):
        typer.echo(printable(line))
    if values["smoke_test"]:
        typer.echo(values["smoke_test"])
    typer.echo(f"written: {', '.join(printable(str(path)) for path in report.written)}")
