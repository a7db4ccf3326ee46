"""``dpvision models`` and ``dpvision recipes``: what can be found by name."""

from __future__ import annotations

from typing import Annotated

import typer

from dpvision.cli.output import print_json, user_errors

_UNBROKEN = 1_000
Json = Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")]


def models(json: Json = False) -> None:
    """List the models: name, parameters, paper, purpose; as JSON also input sizes and options with their defaults.

    Example: dpvision models --json
    """
    with user_errors():
        from dataclasses import asdict

        from dpvision.models import catalogue

        entries = [
            {**{k: v for k, v in asdict(entry).items() if not callable(v)}, "options": entry.options}
            for entry in catalogue()
        ]
        if json:
            print_json({"models": entries})
            return
        _table(("name", "parameters", "paper", "purpose"), entries)


def recipes(json: Json = False) -> None:
    """List the recipes: name, what it trains, the paper's figure, ours.

    Example: dpvision recipes
    """
    with user_errors():
        from dpvision.recipes import all_recipes

        entries = [
            {"name": r.name, "summary": r.summary, "paper": r.paper, "ours": r.ours, "config": r.config.model_dump()}
            for r in all_recipes()
        ]
        if json:
            print_json({"recipes": entries})
            return
        _table(("name", "summary", "paper", "ours"), entries)


def _table(columns: tuple[str, ...], rows: list[dict[str, object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        # A row a line, however long, for grep and for files.
        console.width = _UNBROKEN
    table = Table(box=None, pad_edge=False)
    for column in columns:
        figures = all(isinstance(row[column], int) for row in rows)
        table.add_column(column, justify="right" if figures else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{row[c]:,}" if isinstance(row[c], int) else str(row[c]) for c in columns))
    console.print(table)
