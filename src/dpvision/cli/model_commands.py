"""``dpvision check`` and ``dpvision models``: can this model be trained privately, and which models are there?"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dpvision.cli.console import PROBLEMS_FOUND, print_json, print_table
from dpvision.cli.flags import Json, ModelOptions, parse_options
from dpvision.errors import ArgumentError, Problems, printable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dpvision.gradients.separability import Finding


DEFAULT_CHANNELS, DEFAULT_SIDE, DEFAULT_CLASSES = 3, 32, 10
_SHOWN = 4


class Subject(NamedTuple):
    """The model to check, and the shape and classes of the images that it is checked with."""

    model: nn.Module
    in_channels: int
    side: int
    num_classes: int
    own_code: bool = False

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.in_channels, self.side, self.side


def check(
    model: Annotated[str, typer.Argument(help="Name of a model, FILE.py:FUNCTION or MODULE:FUNCTION.")],
    in_channels: Annotated[int | None, typer.Option(help="Channels of an image. Default: the model's or 3.")] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Side of an image in pixels. Default: the model's or 32.")
    ] = None,
    num_classes: Annotated[int | None, typer.Option(help="Number of classes. Default: the model's or 10.")] = None,
    option: ModelOptions = None,
    json: Json = False,
) -> None:
    """Check on synthetic images that a model can be trained privately: no mixing of units, exact gradients.

    FUNCTION returns the model; it takes no argument, or num_classes, in_channels and image_size by name. Exit code 0:
    ready; 1: problems found; 2: there is no such model.

    Example: dpvision check my_model.py:make --in-channels 1 --image-size 28
    """
    # What a user's code prints must not mix with the JSON.
    with redirect_stdout(sys.stderr):
        options = parse_options(option)
        subject = find_model(model, in_channels, image_size, num_classes, options)
        findings = _inspect(subject)
        fatal = any(finding.fatal for finding in findings)
        changes, open_problems = _mended(subject) if fatal else ([], [])
    if json:
        rows = [{"module": f.module, "problem": f.problem, "remedy": f.remedy, "fatal": f.fatal} for f in findings]
        mends = [str(change) for change in changes] if changes and not open_problems else None
        tried = {"image_shape": subject.image_shape, "num_classes": subject.num_classes}
        print_json({"model": model, **tried, "ready": not fatal, "findings": rows, "make_private_ready": mends})
    else:
        _say_findings(findings)
        typer.echo(f"{printable(model)} is {'NOT ' if fatal else ''}ready for private training")
        _say_changes(changes, open_problems)
    if fatal:
        raise typer.Exit(PROBLEMS_FOUND)


def models(json: Json = False) -> None:
    """List the models: name, parameters, paper, purpose; with --json also input sizes and options with defaults.

    Example: dpvision models --json
    """
    from dataclasses import asdict

    from dpvision.models import catalogue

    entries = [
        {**{k: v for k, v in asdict(entry).items() if not callable(v)}, "options": entry.options}
        for entry in catalogue()
    ]
    if json:
        print_json({"models": entries})
        return
    print_table(("name", "parameters", "paper", "purpose"), entries)


def _say_findings(findings: Iterable[Finding]) -> None:
    grouped = _grouped((f.module, ("problem" if f.fatal else "note", f.problem, f.remedy)) for f in findings)
    for (kind, problem, remedy), modules in grouped.items():
        typer.echo(printable(f"{kind}: {_named(modules)}: {problem}. {remedy}"))


def _say_changes(changes: Iterable[Any], open_problems: list[Finding]) -> None:
    grouped = _grouped((change.module or "the model", (change.what, change.why)) for change in changes)
    if grouped:
        enough = "would make it ready" if not open_problems else "would help, but not be enough"
        typer.echo(f"model, changes = dpvision.models.make_private_ready(model) {enough}:")
    for (what, why), modules in grouped.items():
        typer.echo(printable(f"  {_named(modules)}: {what} ({why})"))
    if grouped and open_problems:
        typer.echo("What would stay:")
        _say_findings(open_problems)


def _grouped(pairs: Iterable[tuple[str, tuple[str, ...]]]) -> dict[tuple[str, ...], list[str]]:
    """The modules with the same text, in the order of first mention: a ResNet has dozens of equal norms."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for module, said in pairs:
        grouped.setdefault(said, []).append(module)
    return grouped


def _named(modules: list[str]) -> str:
    """Some of the modules; all of them are in the JSON."""
    more = len(modules) - _SHOWN
    return ", ".join(modules[:_SHOWN]) + (f" and {more} more (--json names them)" if more > 0 else "")


def _inspect(subject: Subject) -> list[Finding]:
    """Check first that the model returns scores for such images, then that it can be trained privately."""
    from dpvision.gradients.plan import check_model
    from dpvision.gradients.separability import Finding
    from dpvision.models import output_problem
    from dpvision.training.stages import inspect_model, synthetic_rows

    inputs, targets = synthetic_rows(subject.image_shape, subject.num_classes, "cpu")
    maps = output_problem(subject.model, inputs, subject.num_classes, maps=True)
    problem = output_problem(subject.model, inputs, subject.num_classes)
    if problem is not None:
        remedy = f"{problem[1]} For other images: --in-channels, --image-size, --num-classes."
        return [Finding(module="the model", problem=problem[0], remedy=remedy)]
    if maps is not None:
        return inspect_model(
            subject.model,
            image_shape=subject.image_shape,
            num_classes=subject.num_classes,
            own_code=subject.own_code,
        )
    return check_model(subject.model, _map_loss, inputs, targets, own_code=subject.own_code)


def _map_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """One smooth value for each image, for models that return maps; any loss that does not mix images would do."""
    return (outputs - targets[:, None, None, None]).square().flatten(1).mean(1)


def _mended(subject: Subject) -> tuple[list[Any], list[Finding]]:
    """What ``make_private_ready`` would change, and the problems that it would leave."""
    from dpvision.models import make_private_ready

    ready, changes = make_private_ready(subject.model)
    left = [finding for finding in _inspect(subject._replace(model=ready)) if finding.fatal]
    return changes, left


def find_model(
    name: str,
    in_channels: int | None,
    side: int | None,
    num_classes: int | None,
    options: dict[str, bool | int | float | str],
) -> Subject:
    """Return the registered model with its own defaults, or what the user's function returns.

    Args:
        name: a registered name, FILE.py:FUNCTION or MODULE:FUNCTION.
        in_channels: channels of an image; None takes the model's own, or 3.
        side: side of an image in pixels; None takes the model's own up to 32, or 32.
        num_classes: classes; None takes the model's own, or 10.
        options: options of a registered model.

    Raises:
        ArgumentError: there is no such model, or a value is out of range.
    """
    problems = Problems()
    for flag, value in (("--in-channels", in_channels), ("--image-size", side), ("--num-classes", num_classes)):
        problems.count(flag, 1 if value is None else value)
    problems.raise_if_any()
    if ":" in name or name.endswith(".py"):
        from dpvision.models import create_own
        from dpvision.own_code import load_code

        if options:
            raise ArgumentError("--option is for registered models: set it in your function.")
        shape = in_channels or DEFAULT_CHANNELS, side or DEFAULT_SIDE, side or DEFAULT_SIDE
        classes = num_classes or DEFAULT_CLASSES
        own = create_own(load_code(name, kind="model"), num_classes=classes, image_shape=shape, seed=0)
        return Subject(own, shape[0], shape[1], classes, own_code=True)
    from dpvision.models import create, entry

    found = entry(name)
    channels = found.in_channels if in_channels is None else in_channels
    classes = found.num_classes if num_classes is None else num_classes
    # Larger images would only take longer: whether units mix does not depend on the size.
    side = min(found.image_size, DEFAULT_SIDE) if side is None else side
    sized = {"image_size": side} if "image_size" in found.options else {}
    model = create(name, in_channels=channels, num_classes=classes, seed=0, **{**sized, **options})
    return Subject(model, channels, side, classes)
