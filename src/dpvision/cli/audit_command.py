"""``dpvision audit``: try to refute a run's guarantee, or test the mechanism that all runs share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dpvision.cli.console import PROBLEMS_FOUND, print_results, say
from dpvision.cli.flags import Json, ModelOptions, Threads, parse_options, set_threads
from dpvision.errors import ArgumentError

if TYPE_CHECKING:
    from dpvision.audit import Subject


@dataclass(frozen=True, kw_only=True)
class AuditFlags:
    """What ``dpvision audit`` is told besides the run."""

    mechanism: Annotated[bool, typer.Option("--mechanism", help="Test clipping, noise and sampling of a step.")] = False
    canaries: Annotated[int | None, typer.Option(help="Train once with this many canaries and look for them.")] = None
    black_box: Annotated[
        bool, typer.Option("--black-box", help="Canaries are images, and the attacker sees only losses.")
    ] = False
    members: Annotated[str | None, typer.Option(help="Images trained on. Default: the run's own.")] = None
    non_members: Annotated[str | None, typer.Option(help="Images not trained on. Default: its test split.")] = None
    shadows: Annotated[int, typer.Option(help="Also train this many shadow models, for a likelihood-ratio attack.")] = 0
    ordinary_shadows: Annotated[
        bool, typer.Option("--ordinary-shadows", help="Train the shadow models without privacy.")
    ] = False
    reconstruction: Annotated[
        str | None,
        typer.Option(
            help="Reconstruct training images of this published dataset from a 55K-parameter CNN, without privacy and "
            "at each of --epsilons.",
            metavar="DATASET",
        ),
    ] = None
    epsilons: Annotated[str, typer.Option(help="Epsilons of --reconstruction, separated by commas.")] = "8,3"
    targets: Annotated[int, typer.Option(help="Images that --reconstruction attacks, one training run each.")] = 20
    output: Annotated[Path, typer.Option(help="Folder for the figure of --reconstruction.")] = Path("reconstruction")
    model: Annotated[str | None, typer.Option(help="Audit a registered model with a small mechanism.")] = None
    recipe: Annotated[str | None, typer.Option(help="Audit the model and mechanism of a recipe.")] = None
    option: ModelOptions = None
    confidence: Annotated[float, typer.Option(help="Confidence of the bound on epsilon, 0 to 1.")] = 0.95
    no_attach: Annotated[bool, typer.Option("--no-attach", help="Leave the run's release as it is.")] = False
    threads: Threads = None
    json: Json = False

    @property
    def on_synthetic_images(self) -> bool:
        """Whether settings are tried on synthetic images, instead of an attack on a finished run."""
        return self.mechanism or self.canaries is not None


def audit(
    flags: AuditFlags,
    run: Annotated[Path | None, typer.Argument(help="A run's folder. Or give --model or --recipe.")] = None,
) -> None:
    """Attack a finished run, look for canaries in a run made for that, or test the mechanism.

    A run alone is attacked by membership inference: that needs its images, and the results stay in private/. With
    --mechanism or --canaries its settings are tried on synthetic images, and the result is attached to its certificate.
    Exit code 0: nothing found. 1: a claim is refuted, or a check failed. 2: there is nothing to audit.

    --reconstruction DATASET needs no run: it shows what the weights of a small network reveal about one image of a
    published dataset to someone who knows all others, beside the bound.

    Example: dpvision audit runs/demo-1 --mechanism --canaries 1000

    Example: dpvision audit --reconstruction cifar10 --epsilons 8,3
    """
    _require_consistent(run, flags)
    set_threads(flags.threads)
    if flags.reconstruction is not None:
        documents = [_reconstruction(flags.reconstruction, flags)]
    elif flags.on_synthetic_images:
        documents = list(_on_synthetic_images(_subject(run, flags), flags))
    else:
        documents = [_membership(cast("Path", run), flags)]
    lines = (line for document in documents for line in _lines(document))
    print_results({"audits": documents}, lines, json=flags.json)
    if flags.on_synthetic_images and run is not None and not flags.no_attach:
        from dpvision.audit import attach_audits

        say(f"attached to the certificate: {attach_audits(run, documents)}")
    if not all(document.get("passed", True) for document in documents):
        raise typer.Exit(PROBLEMS_FOUND)


def _require_consistent(run: Path | None, flags: AuditFlags) -> None:
    """Refuse flags that name nothing to audit, or would have no effect."""
    subjects = (("a run", run), ("--model", flags.model), ("--recipe", flags.recipe))
    if flags.reconstruction is not None:
        others = [name for name, value in subjects if value is not None]
        others += ["--mechanism or --canaries"] if flags.on_synthetic_images else []
        others += _given(flags, "option", "members", "non_members", "shadows", "no_attach")
        if others:
            raise ArgumentError(f"--reconstruction has a network and a dataset of its own: leave out {others[0]}.")
        return
    for owner, flag in _OWNERS.items():
        if not getattr(flags, owner) and _given(flags, *flag):
            raise ArgumentError(f"{_given(flags, *flag)[0]} needs --{owner}.")
    given = [name for name, value in subjects if value is not None]
    if len(given) != 1:
        raise ArgumentError(f"name one of a run, --model and --recipe, got {' and '.join(given) or 'none'}.")
    if flags.option and flags.model is None:
        raise ArgumentError("--option belongs to --model.")
    if run is None and not flags.on_synthetic_images:
        raise ArgumentError("say what to audit: --mechanism, --canaries N, or the folder of a run.")
    of_attack = {"--members": flags.members, "--non-members": flags.non_members, "--shadows": flags.shadows}
    unused = [name for name, value in of_attack.items() if value and flags.on_synthetic_images]
    if unused:
        raise ArgumentError(
            f"{', '.join(unused)} belong to the attack on a run, which --mechanism and --canaries replace."
        )


_OWNERS = {
    "reconstruction": ("epsilons", "targets", "output"),
    "canaries": ("black_box", "confidence"),
    "shadows": ("ordinary_shadows",),
}
"""Flags that have an effect with another one only."""


def _given(flags: AuditFlags, *names: str) -> list[str]:
    """Return those of these flags that differ from their defaults."""
    defaults = {each.name: each.default for each in fields(AuditFlags)}
    return [f"--{name.replace('_', '-')}" for name in names if getattr(flags, name) != defaults[name]]


def _subject(run: Path | None, flags: AuditFlags) -> Subject:
    """The model and mechanism to audit."""
    from dpvision.audit import config_of_model, subject_of_config, subject_of_run

    if run is not None:
        return subject_of_run(run)
    if flags.recipe is not None:
        from dpvision.papers import find_recipe

        return subject_of_config(find_recipe(flags.recipe).config)
    return subject_of_config(config_of_model(str(flags.model), parse_options(flags.option)))


def _on_synthetic_images(subject: Subject, flags: AuditFlags) -> Iterator[dict[str, Any]]:
    """Test the mechanism and look for canaries, as asked."""
    from dpvision.audit import audit_with_canaries, canary_document, check_mechanism, mechanism_document

    if flags.mechanism:
        say("testing the mechanism on synthetic images …")
        yield mechanism_document(subject, check_mechanism(subject))
    if flags.canaries is not None:
        say(f"training {subject.config.mechanism.steps} steps with {flags.canaries} canaries …")
        sight = "black" if flags.black_box else "white"
        found = audit_with_canaries(subject, canaries=flags.canaries, sight=sight, confidence=flags.confidence)
        yield canary_document(subject, found)


def _reconstruction(source: str, flags: AuditFlags) -> dict[str, Any]:
    """Attack models of public images by reconstruction, and draw what came out."""
    from dpvision.analyze import write_chart
    from dpvision.audit import ReconstructionPlan, reconstruct, reconstruction_chart, reconstruction_document

    try:
        epsilons = [float(text) for text in flags.epsilons.split(",") if text.strip()]
    except ValueError as error:
        raise ArgumentError(f"--epsilons must be numbers, separated by commas, got {flags.epsilons!r}.") from error
    if not all(value > 0 for value in epsilons):
        raise ArgumentError(f"--epsilons must be above 0, got {flags.epsilons!r}.")
    plan = ReconstructionPlan(source=source, targets=flags.targets)
    found = reconstruct(plan, [None, *epsilons], say=say)
    files = write_chart(flags.output, reconstruction_chart(found))
    say(f"written: {', '.join(str(path) for path in files)}")
    return reconstruction_document(plan, found)


def _membership(run: Path, flags: AuditFlags) -> dict[str, Any]:
    """Attack a finished run by membership inference."""
    from dpvision.audit import keep_private, loss_attack, membership_document, shadow_attack, sides_of
    from dpvision.inference.load import load_model

    released = load_model(run)
    sides = sides_of(run, released, members=flags.members, others=flags.non_members)
    audits = [loss_attack(released, sides)]
    if flags.shadows:
        private = not flags.ordinary_shadows
        audits.append(shadow_attack(run, sides, shadows=flags.shadows, private=private, say=say))
    document = membership_document(audits, released.certificate)
    say(f"kept in {keep_private(run, document)}: results on private images, don't publish them")
    return document


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """An audit's document as lines for people."""
    yield f"{document['kind']}:"
    for check in document.get("checks", ()):
        yield f"  {'ok  ' if check['passed'] else 'FAIL'} {check['name']}: {check['finding']}"
    for attack in document.get("attacks", ()):
        yield from _attack_lines(attack, document["most_true_positives"])
    for attack in document.get("attacks_on_images", ()):
        yield from _reconstruction_lines(attack, document["kappa"])
    for name in ("shows", "estimate_shows", "does_not_show"):
        if name in document:
            yield f"  {document[name]}"


def _attack_lines(attack: dict[str, Any], most: dict[str, float | None]) -> Iterator[str]:
    """One attack: its area under the curve, and its success at each false-positive rate beside the bound."""
    area = f"area {attack['area']:.3f} ({attack['area_low']:.3f} to {attack['area_high']:.3f}; guessing is 0.5)"
    yield f"  {attack['method']}: {area}, {attack['members']} members, {attack['others']} others"
    for at in attack["at_rates"]:
        bound = most[str(at["false_positive_rate"])]
        allowed = "" if bound is None else f"; the guarantee allows {bound:.2%}"
        share = f"{at['true_positive_rate']:.2%} ({at['low']:.2%} to {at['high']:.2%})"
        yield f"    {share} of the members at {at['false_positive_rate']:.1%} false positives{allowed}"
    for name, each in attack["by_class"].items():
        yield f"    {name}: {'too few images' if each is None else 'area ' + format(each['area'], '.3f')}"


def _reconstruction_lines(found: dict[str, Any], kappa: float) -> Iterator[str]:
    """One reconstruction: who was identified beside the bound, and the error beside a guess without the model."""
    name = "without privacy" if found["epsilon"] is None else f"epsilon {found['epsilon']:g}"
    low, high = found["interval"]
    allowed = "" if found["bound"] is None else f"; the guarantee allows {found['bound']:.1%}"
    share = f"{found['identified_by_features']:.0%} ({low:.0%} to {high:.0%}) by features, {found['identified']:.0%} by"
    yield f"  {name}: {share} pixels identified (guessing: {kappa:.1%}){allowed}"
    errors = f"{found['mean_squared_error']:.4f}, {found['prior_mean_squared_error']:.4f} for the mean image"
    yield f"    mean squared error {errors}; {found['targets']} targets, {found['models_trained']} models trained"
