"""``dpvision doctor``: what this installation has and lacks."""

from __future__ import annotations

import typer

from dpvision.cli.console import PROBLEMS_FOUND, print_results
from dpvision.cli.flags import Json


def doctor(json: Json = False) -> None:
    """Print versions, devices, threads, kernels, data and extras, and for what is missing the command that fixes it.

    Exit code 0: everything required is there; 1: something required is broken.

    Example: dpvision doctor
    """
    from dpvision.doctor import examine

    found = examine()
    print_results(found.to_dict(), found.lines(), json=json)
    if not found.ok:
        raise typer.Exit(PROBLEMS_FOUND)
