"""``dpvision reproduce``: a paper's table, run again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpvision.cli.console import known_device, print_json, printable, user_errors

if TYPE_CHECKING:
    from dpvision.papers.reproduce import Report


INTERRUPTED = 130


def reproduce(
    table: Annotated[str | None, typer.Argument(help="Which table; --list shows them.")] = None,
    scale: Annotated[str, typer.Option(help="paper, cpu (reduced versions) or quick (smoke test).")] = "paper",
    repeats: Annotated[int, typer.Option(help="Runs of each row. Each is a release of its own.")] = 1,
    rows: Annotated[str | None, typer.Option(help="Names of rows, by commas; * stands for anything.")] = None,
    output: Annotated[Path | None, typer.Option(help="Default: reproduce/TABLE, with -cpu or -quick after it.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.", callback=known_device)] = "cpu",
    show: Annotated[bool, typer.Option("--list", help="List the tables, or the rows of one, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")] = False,
) -> None:
    """Run a paper's table again: table.md, table.json and table.svg with the paper's figures beside ours.

    The same command goes on where it was interrupted. Exit code 1: a row failed; the others were run.

    Example: dpvision reproduce shoefit-table5 --scale cpu --repeats 3
    """
    with user_errors():
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
        typer.echo("interrupted; the same command goes on", err=True)
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(1)


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
