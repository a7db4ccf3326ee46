"""``dpvision models`` and ``dpvision recipes``: what can be found by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dpvision.cli.console import print_json, user_errors

if TYPE_CHECKING:
    from dpvision.papers import Recipe


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


def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe's name: all that is known of it.")] = None,
    json: Json = False,
) -> None:
    """List the recipes paper by paper: name, the paper's figure, ours. With NAME: its command, figures, differences.

    Example: dpvision recipes cifar10-scaleresnet9-eps3
    """
    with user_errors():
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
        _table(("name", "paper", "ours"), rows, header=False)


def _table(columns: tuple[str, ...], rows: Sequence[Mapping[str, object]], *, header: bool = True) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        # A row a line, however long, for grep and for files.
        console.width = _UNBROKEN
    table = Table(box=None, pad_edge=False, show_header=header)
    for column in columns:
        figures = all(isinstance(row[column], int) for row in rows)
        table.add_column(column, justify="right" if figures else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{row[c]:,}" if isinstance(row[c], int) else str(row[c]) for c in columns))
    console.print(table)
