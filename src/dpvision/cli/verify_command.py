"""``dpvision verify``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpvision.cli.console import print_json, printable, user_errors
from dpvision.privacy.mechanism import rounded_up

if TYPE_CHECKING:
    from dpvision.release.verify import Verification


def verify(
    path: Annotated[Path, typer.Argument(help="A run folder, its release folder, or a certificate beside its ledger.")],
    key: Annotated[
        Path | None,
        typer.Option(help="The public key by which the release must be signed. Example: --key hospital.key.pub"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON on stdout.")] = False,
) -> None:
    """Recompute every figure from the ledger alone, and name whatever was changed.

    Exit code 0: all is in order. 1: problems, one a line. 2: nothing to verify there.

    Example: dpvision verify runs/demo-1
    """
    from dpvision.release.sign import load_public_key
    from dpvision.release.verify import verify as check

    with user_errors():
        found = check(path, key=None if key is None else load_public_key(key))
    if json:
        print_json(found.to_dict())
    else:
        for line in _lines(found):
            typer.echo(printable(line))
    if not found.ok:
        raise typer.Exit(1)


def _lines(found: Verification) -> list[str]:
    lines = [f"PROBLEM: {problem}" for problem in found.problems]
    if found.epsilon is not None and found.epsilon_rdp is not None:
        lines.append(
            f"The ledger's {found.steps} steps spend epsilon {rounded_up(found.epsilon, digits=6)} by PLD "
            f"({rounded_up(found.epsilon_rdp, digits=6)} by RDP) at delta {found.delta:g}, "
            f"{found.adjacency} of one {found.privacy_unit}."
        )
    if not found.ok:
        return [
            *lines,
            f"{len(found.problems)} problem{'s' * (len(found.problems) != 1)}: do not rely on this release.",
        ]
    lines += [f"Not for release: {stamp}" for stamp in found.stamps]
    if found.signed_by is not None:
        known = "the given key" if found.signer_is_known else "an unknown key: compare it with what its owner says"
        lines.append(f"Signed by {found.signed_by}, {known}.")
    else:
        lines.append("Not signed: whoever rewrote ledger, certificate and manifest together would not be noticed.")
    return [*lines, "In order: the files are as they were written, and the certificate claims what the ledger shows."]
