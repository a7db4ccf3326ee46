"""What every command does with its figures and its errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from dpvision.checks import DPVisionError


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error that the user can act on into one line on stderr and exit code 2."""
    try:
        yield
    except DPVisionError as error:
        fail(str(error))


def fail(message: str) -> None:
    """Print one line on stderr and leave with exit code 2."""
    typer.echo(f"error: {printable(message)}", err=True)
    raise typer.Exit(2)


def printable(text: str) -> str:
    """``text`` on one line, with control characters (a hostile file name's, say) made visible."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text.replace("\n", " "))


def print_json(values: Mapping[str, Any]) -> None:
    """Machine-readable figures on stdout."""
    json.dump(values, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
