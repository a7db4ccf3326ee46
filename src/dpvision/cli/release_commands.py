"""``dpvision verify``, ``report``, ``export``, ``sign`` and ``keygen``: what is done with a release."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpvision.cli.console import PROBLEMS_FOUND, print_results
from dpvision.cli.flags import Json, OwnModel, Threads, set_threads
from dpvision.privacy.mechanism import rounded_up

if TYPE_CHECKING:
    from dpvision.release.verify import Verification


def verify(
    path: Annotated[Path, typer.Argument(help="A run folder, its release folder, or a certificate beside its ledger.")],
    key: Annotated[
        Path | None,
        typer.Option(help="The public key by which the release must be signed. Example: --key hospital.key.pub"),
    ] = None,
    json: Json = False,
) -> None:
    """Recompute every number of a release from its ledger, and name what was changed.

    Exit code 0: all is in order. 1: problems, one per line. 2: nothing to verify there.

    Example: dpvision verify runs/demo-1
    """
    from dpvision.release.sign import load_public_key
    from dpvision.release.verify import verify as check

    found = check(path, key=None if key is None else load_public_key(key))
    print_results(found.to_dict(), _lines(found), json=json)
    if not found.ok:
        raise typer.Exit(PROBLEMS_FOUND)


def _lines(found: Verification) -> list[str]:
    """What was found, in sentences: problems first, the verdict last."""
    lines = [f"PROBLEM: {problem}" for problem in found.problems]
    if found.epsilon is not None and found.search is not None:
        of = found.search
        trials = f"{of['trials']} trials" if of["trials"] is not None else f"{of['stopping']} number of trials"
        lines.append(
            f"The search's ledger ({of['price']}, {trials}) spends epsilon {rounded_up(found.epsilon, digits=6)} at "
            f"delta {found.delta:g}, {found.adjacency} of one {found.privacy_unit}. The released run alone: "
            f"{rounded_up(of['epsilon_of_this_run_alone'], digits=6)}, which is not the guarantee."
        )
    elif found.epsilon is not None and found.epsilon_rdp is not None:
        lines.append(
            f"The ledger's {found.steps} steps spend epsilon {rounded_up(found.epsilon, digits=6)} by PLD "
            f"({rounded_up(found.epsilon_rdp, digits=6)} by RDP) at delta {found.delta:g}, "
            f"{found.adjacency} of one {found.privacy_unit}."
        )
    if not found.ok:
        count = f"{len(found.problems)} problem{'s' * (len(found.problems) != 1)}"
        return [*lines, f"{count}: do not rely on this release."]
    lines += [f"Not for release: {stamp}" for stamp in found.stamps]
    lines += [f"Limit: {limit}" for limit in found.limits]
    if found.signed_by is not None:
        known = "the given key" if found.signer_is_known else "an unknown key: compare it with what its owner says"
        lines.append(f"Signed by {found.signed_by}, {known}.")
    else:
        lines.append("Not signed: a change of ledger, certificate and manifest together would not be noticed.")
    return [*lines, "In order: the files are as they were written, and the certificate claims what the ledger shows."]


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    output: Annotated[
        Path | None, typer.Option(help="Where to write the page. Default: RUN/release/report.html.")
    ] = None,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page about a run: the guarantee in plain words, accuracy, what was charged.

    Example: dpvision report runs/demo-1
    """
    from dpvision.release.report import figures_of, write_report

    path = write_report(run, output=output)
    print_results({"report": str(path), **figures_of(run)}, [f"report: {path}"], json=json)


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its release folder.")],
    to: Annotated[str, typer.Option(help="onnx, torch-export, safetensors or monai-bundle.")] = "onnx",
    output: Annotated[
        Path | None, typer.Option(help="Where to write. Default: the run's name in the current folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    model: OwnModel = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write a released model for other programs, and compare it with the original before the file appears.

    Preprocessing but for the resize, class names, epsilon, delta and the digest of the release are in the file.

    Example: dpvision export runs/demo-1 --to onnx

    Example: dpvision export runs/liver --to monai-bundle --output liver-bundle
    """
    set_threads(threads)
    from dpvision.exports.formats import export as write

    # What a user's own code prints must not mix with the results.
    with redirect_stdout(sys.stderr):
        made = write(run, to=to, output=output, model=model, force=force)  # pyright: ignore[reportArgumentType]
    values = {
        "export": str(made.path),
        "format": made.format,
        "largest_difference": made.largest_difference,
        "facts": dict(made.facts),
        "stamps": list(made.stamps),
    }
    lines = [
        f"export: {made.path}",
        f"compared with the model: probabilities differ by at most {made.largest_difference:.1e}",
        f"input: {made.facts['preprocessing']}",
        *(f"Not for release: {stamp}" for stamp in made.stamps),
    ]
    print_results(values, lines, json=json)


def keygen(
    file: Annotated[Path, typer.Argument(help="Where to write the private key; the public one goes to FILE.pub.")],
    password: Annotated[
        bool,
        typer.Option("--password", help="Encrypt the key; DPVISION_KEY_PASSWORD or a prompt gives the password."),
    ] = False,
    json: Json = False,
) -> None:
    """Make an Ed25519 key pair for signing releases. Keep FILE secret; give FILE.pub to those who verify.

    Example: dpvision keygen ~/hospital.key --password
    """
    from dpvision.release.sign import make_keys

    secret = _password(confirm=True).encode() if password else None
    public, name = make_keys(file, password=secret)
    values = {"private_key": str(file), "public_key": str(public), "fingerprint": name}
    lines = [f"private key: {file} (keep it secret)", f"public key:  {public}", f"fingerprint: {name}"]
    print_results(values, lines, json=json)


def sign(
    run: Annotated[Path, typer.Argument(help="A run folder, or its release folder.")],
    key: Annotated[Path, typer.Option(help="The private key. Example: --key ~/hospital.key")],
    json: Json = False,
) -> None:
    """Sign a release that verifies: release/signature.json then covers every file of it.

    Example: dpvision sign runs/demo-1 --key ~/hospital.key
    """
    from dpvision.release.amend import sign_release

    path, name = sign_release(run, key, ask_password=lambda: _password(confirm=False))
    lines = [f"signed: {path}", f"by:     {name}"]
    print_results({"signature": str(path), "fingerprint": name}, lines, json=json)


def _password(*, confirm: bool) -> str:
    """The key's password, from the environment or a prompt."""
    from dpvision.release.sign import PASSWORD_VARIABLE

    given = os.environ.get(PASSWORD_VARIABLE)
    if given is not None:
        return given
    return typer.prompt("password of the key", hide_input=True, confirmation_prompt=confirm, err=True)
