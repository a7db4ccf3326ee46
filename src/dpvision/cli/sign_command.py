"""``dpvision keygen`` and ``dpvision sign``: who says that a release is theirs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dpvision.cli.console import print_json, printable, user_errors


def keygen(
    file: Annotated[Path, typer.Argument(help="Where to write the private key; the public one goes to FILE.pub.")],
    password: Annotated[
        bool,
        typer.Option("--password", help="Encrypt the key; DPVISION_KEY_PASSWORD or a prompt gives the password."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print paths and fingerprint as JSON on stdout.")] = False,
) -> None:
    """Make an Ed25519 key pair for signing releases. Keep FILE secret; give FILE.pub to whoever verifies.

    Example: dpvision keygen ~/hospital.key --password
    """
    with user_errors():
        from dpvision.release.sign import make_keys

        secret = _password(confirm=True).encode() if password else None
        public, name = make_keys(file, password=secret)
    if json:
        print_json({"private_key": str(file), "public_key": str(public), "fingerprint": name})
        return
    typer.echo(f"private key: {printable(str(file))} (keep it secret)")
    typer.echo(f"public key:  {printable(str(public))}")
    typer.echo(f"fingerprint: {name}")


def sign(
    run: Annotated[Path, typer.Argument(help="A run folder, or its release folder.")],
    key: Annotated[Path, typer.Option(help="The private key. Example: --key ~/hospital.key")],
    json: Annotated[bool, typer.Option("--json", help="Print path and fingerprint as JSON on stdout.")] = False,
) -> None:
    """Sign a release that is in order: release/signature.json then vouches for every file of it.

    Example: dpvision sign runs/demo-1 --key ~/hospital.key
    """
    with user_errors():
        from dpvision.release.verify import sign_release

        path, name = sign_release(run, key, ask_password=lambda: _password(confirm=False))
    if json:
        print_json({"signature": str(path), "fingerprint": name})
        return
    typer.echo(f"signed: {printable(str(path))}")
    typer.echo(f"by:     {name}")


def _password(*, confirm: bool) -> str:
    from dpvision.release.sign import PASSWORD_VARIABLE

    given = os.environ.get(PASSWORD_VARIABLE)
    if given is not None:
        return given
    return typer.prompt("password of the key", hide_input=True, confirmation_prompt=confirm, err=True)
