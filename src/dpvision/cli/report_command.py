"""``dpvision report``: the page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpvision.cli.console import print_json, printable, user_errors


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    output: Annotated[
        Path | None, typer.Option(help="Where to write the page. Default: RUN/release/report.html.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print figures as JSON on stdout.")] = False,
) -> None:
    """Write one self-contained HTML page about a run: the guarantee in plain words, accuracy, what was charged.

    Example: dpvision report runs/demo-1
    """
    with user_errors():
        from dpvision.release.report import figures_of, write_report

        path = write_report(run, output=output)
        if json:
            print_json({"report": str(path), **figures_of(run)})
        else:
            typer.echo(f"report: {printable(str(path))}")
