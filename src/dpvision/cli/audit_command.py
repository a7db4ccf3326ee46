"""``dpvision audit``: try to break a run's guarantee, or the step path that all runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpvision.cli.console import print_json, printable, user_errors
from dpvision.errors import ArgumentError

if TYPE_CHECKING:
    from dpvision.audit import Subject


PROBLEMS_FOUND = 1


def audit(
    run: Annotated[Path | None, typer.Argument(help="A run's folder. Left out: give --model or --recipe.")] = None,
    mechanism: Annotated[bool, typer.Option("--mechanism", help="Test the step path: clip, noise, draws.")] = False,
    canaries: Annotated[int | None, typer.Option(help="Train once with so many canaries and look for them.")] = None,
    black_box: Annotated[
        bool, typer.Option("--black-box", help="Canaries are pictures; only losses are seen.")
    ] = False,
    members: Annotated[str | None, typer.Option(help="Pictures trained on. Default: the run's own.")] = None,
    non_members: Annotated[str | None, typer.Option(help="Pictures not trained on. Default: its test split.")] = None,
    shadows: Annotated[int, typer.Option(help="Also train so many shadow models, for a likelihood-ratio attack.")] = 0,
    ordinary_shadows: Annotated[bool, typer.Option("--ordinary-shadows", help="Shadows without privacy.")] = False,
    model: Annotated[str | None, typer.Option(help="A model of the catalogue, under a small plan.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe's model and plan.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="A model's option, as name=value.")] = None,
    confidence: Annotated[float, typer.Option(help="Of the bound on epsilon.")] = 0.95,
    no_attach: Annotated[bool, typer.Option("--no-attach", help="Leave the run's release as it is.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print figures as JSON on stdout.")] = False,
) -> None:
    """Attack a finished run, look for canaries in a run made for that, or test the mechanism.

    A run alone is attacked by membership inference: that needs its pictures, and the figures stay in private/. With
    --mechanism or --canaries its settings are tried on made-up pictures, and the result is attached to its certificate.
    Exit code 0: nothing found. 1: a claim is refuted, or a check failed. 2: there is nothing to audit.

    Example: dpvision audit runs/demo-1 --mechanism --canaries 1000
    """
    with user_errors():
        on_made_up = mechanism or canaries is not None
        _require_one(run, model=model, recipe=recipe, option=option)
        attack_flags = {"--members": members, "--non-members": non_members, "--shadows": shadows}
        _require_fitting(run, on_made_up=on_made_up, attack_flags=attack_flags, black_box=black_box, canaries=canaries)
        if on_made_up:
            subject = _subject(run, model=model, recipe=recipe, option=option)
            documents = list(_on_made_up(subject, mechanism, canaries, black_box=black_box, confidence=confidence))
        else:
            documents = [_membership(_given(run), members, non_members, shadows, ordinary=ordinary_shadows)]
        _show(documents, json=json)
        if on_made_up and run is not None and not no_attach:
            _attach(run, documents)
        if not all(document.get("passed", True) for document in documents):
            raise typer.Exit(PROBLEMS_FOUND)


def _require_one(run: Path | None, *, model: str | None, recipe: str | None, option: list[str] | None) -> None:
    """Exactly one thing to audit."""
    given = [name for name, value in (("a run", run), ("--model", model), ("--recipe", recipe)) if value is not None]
    if len(given) != 1:
        raise ArgumentError(f"name one of a run, --model and --recipe, got {' and '.join(given) or 'none'}.")
    if option and model is None:
        raise ArgumentError("--option belongs to --model.")


def _require_fitting(
    run: Path | None, *, on_made_up: bool, attack_flags: dict[str, Any], black_box: bool, canaries: int | None
) -> None:
    """Flags that would have no effect are refused."""
    if run is None and not on_made_up:
        raise ArgumentError("say what to audit: --mechanism, --canaries N, or the folder of a run.")
    idle = [name for name, value in attack_flags.items() if value and on_made_up]
    if idle:
        raise ArgumentError(
            f"{', '.join(idle)} belong to the attack on a run, which --mechanism and --canaries replace."
        )
    if black_box and canaries is None:
        raise ArgumentError("--black-box says how to look for canaries: give --canaries too.")


def _given(run: Path | None) -> Path:
    if run is None:
        raise ArgumentError("name the folder of a run.")
    return run


def _subject(run: Path | None, *, model: str | None, recipe: str | None, option: list[str] | None) -> Subject:
    from dpvision.audit import config_of_model, subject_of_config, subject_of_run
    from dpvision.cli.run_settings import parse_options

    if run is not None:
        return subject_of_run(run)
    if recipe is not None:
        from dpvision.papers import find_recipe

        return subject_of_config(find_recipe(recipe).config)
    return subject_of_config(config_of_model(str(model), parse_options(option)))


def _on_made_up(
    subject: Subject, mechanism: bool, canaries: int | None, *, black_box: bool, confidence: float
) -> Iterator[dict[str, Any]]:
    from dpvision.audit import audit_with_canaries, canary_document, check_mechanism, mechanism_document

    if mechanism:
        typer.echo("testing the mechanism on made-up pictures …", err=True)
        yield mechanism_document(subject, check_mechanism(subject))
    if canaries is not None:
        typer.echo(f"training {subject.config.mechanism.steps} steps with {canaries} canaries …", err=True)
        sight = "black" if black_box else "white"
        found = audit_with_canaries(subject, canaries=canaries, sight=sight, confidence=confidence)
        yield canary_document(subject, found)


def _membership(
    run: Path, members: str | None, non_members: str | None, shadows: int, *, ordinary: bool
) -> dict[str, Any]:
    from dpvision.audit import keep_private, loss_attack, membership_document, shadow_attack, sides_of
    from dpvision.inference.load import load_model

    released = load_model(run)
    sides = sides_of(run, released, members=members, others=non_members)
    audits = [loss_attack(released, sides)]
    if shadows:
        audits.append(shadow_attack(run, sides, shadows=shadows, private=not ordinary, say=_say))
    document = membership_document(audits, released.certificate)
    _say(printable(f"kept in {keep_private(run, document)}: figures of private pictures, don't publish them"))
    return document


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _attach(run: Path, documents: list[dict[str, Any]]) -> None:
    from dpvision.audit import attach_audits

    _say(printable(f"attached to the certificate: {attach_audits(run, documents)}"))


def _show(documents: list[dict[str, Any]], *, json: bool) -> None:
    if json:
        print_json({"audits": documents})
        return
    for line in (line for document in documents for line in _lines(document)):
        typer.echo(printable(line))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield f"{document['kind']}:"
    for check in document.get("checks", ()):
        yield f"  {'ok  ' if check['passed'] else 'FAIL'} {check['name']}: {check['finding']}"
    for attack in document.get("attacks", ()):
        yield from _attack_lines(attack, document["most_true_positives"])
    for name in ("shows", "estimate_shows", "does_not_show"):
        if name in document:
            yield f"  {document[name]}"


def _attack_lines(attack: dict[str, Any], most: dict[str, float | None]) -> Iterator[str]:
    area = f"area {attack['area']:.3f} ({attack['area_low']:.3f} to {attack['area_high']:.3f}; guessing is 0.5)"
    yield f"  {attack['method']}: {area}, {attack['members']} members, {attack['others']} others"
    for at in attack["at_rates"]:
        bound = most[str(at["false_positive_rate"])]
        allowed = "" if bound is None else f"; the guarantee allows {bound:.2%}"
        share = f"{at['true_positive_rate']:.2%} ({at['low']:.2%} to {at['high']:.2%})"
        yield f"    {share} of the members at {at['false_positive_rate']:.1%} false positives{allowed}"
    for name, each in attack["by_class"].items():
        yield f"    {name}: {'too few pictures' if each is None else 'area ' + format(each['area'], '.3f')}"
