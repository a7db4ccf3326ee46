"""What every command does with its figures and its errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from dpvision.errors import DPVisionError, brief


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn an error that the user can act on into one line on stderr and exit code 2.

    What the system says of files and memory is such an error, too, wherever it comes up.
    """
    try:
        yield
    except DPVisionError as error:
        fail(str(error))
    except BrokenPipeError:
        raise  # whoever reads our output has seen enough, and needs no word about it
    except OSError as error:
        fail(f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}.")
    except MemoryError:
        fail("this machine's memory is not enough. Use smaller pictures, a smaller model or fewer of either.")


def fail(message: str) -> None:
    """Print one line on stderr and leave with exit code 2."""
    typer.echo(f"error: {printable(message)}", err=True)
    raise typer.Exit(2)


def printable(text: str) -> str:
    """``text`` on one line, with control characters (a hostile file name's, say) made visible."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text.replace("\n", " "))


def known_device(name: str) -> str:
    """A callback for --device: refuse what torch can't compute on here, before anything is read."""
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
    """Machine-readable figures on stdout."""
    json.dump(values, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
