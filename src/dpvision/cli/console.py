"""What every command does with its results and its errors: JSON on stdout, one line on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from dpvision.errors import DPVisionError, brief, printable
from dpvision.ranks import RankError

PROBLEMS_FOUND = 1
"""Exit code of a command that ran, and found that something is wrong."""
INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""
_UNBROKEN = 1_000


@contextmanager
def user_errors(wording: Callable[[str], str] = str) -> Iterator[None]:
    """Turn an error that the user can act on into one line on stderr and exit code 2.

    Errors of the system about files and memory are such errors too, wherever they come from.

    Args:
        wording: what to make of a message before it is printed.
    """
    try:
        yield
    except RankError as error:
        if error.told:
            raise typer.Exit(2) from error  # rank 0 prints it
        fail(wording(str(error)))
    except DPVisionError as error:
        fail(wording(str(error)))
    except BrokenPipeError:
        raise  # the reader of our output has closed it, and needs no message
    except OSError as error:
        fail(f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}.")
    except MemoryError:
        fail("Out of memory. Use a smaller --image-size, --model or --microbatch-size.")


def fail(message: str) -> None:
    """Print one line on stderr and leave with exit code 2."""
    rank = os.environ.get("RANK", "0")
    say(f"error: {message}" if rank == "0" else f"error of rank {rank}: {message}")
    raise typer.Exit(2)


def say(text: str) -> None:
    """Print one line on stderr: stdout carries results only."""
    typer.echo(printable(text.replace("\n", " ")), err=True)


def known_device(name: str) -> str:
    """Refuse a --device that torch can't use here, before anything is read."""
    if name == "cpu":
        return name
    import torch

    try:
        usable = torch.device(name).type in ("cpu", "cuda") and torch.empty(0, device=name) is not None
    except (RuntimeError, AssertionError):
        usable = False
    if not usable:
        raise typer.BadParameter(f"torch can't use the device {brief(name)} here. Choose cpu.")
    return name


def print_json(values: Mapping[str, Any]) -> None:
    """Print results on stdout, for programs."""
    json.dump(values, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def print_results(values: Mapping[str, Any], lines: Iterable[str], *, json: bool) -> None:
    """Print results on stdout: JSON for programs, or lines for people."""
    if json:
        print_json(values)
        return
    for line in lines:
        typer.echo(printable(line))


def print_table(columns: tuple[str, ...], rows: Sequence[Mapping[str, object]], *, header: bool = True) -> None:
    """Print a table on stdout.

    Args:
        columns: keys of the rows, which are the headings too.
        rows: the values; columns of whole numbers are right-aligned.
        header: whether to print the headings.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def cell(value: object) -> Text:
        """A name of a folder may hold brackets, which are no markup, and bytes that can't be printed."""
        return Text(f"{value:,}" if isinstance(value, int) else printable(value))

    console = Console()
    if not console.is_terminal:
        # One line for each row, however long, for grep and for files.
        console.width = _UNBROKEN
    table = Table(box=None, pad_edge=False, show_header=header)
    for column in columns:
        figures = all(isinstance(row[column], int) for row in rows)
        table.add_column(column, justify="right" if figures else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row[c]) for c in columns))
    console.print(table)
