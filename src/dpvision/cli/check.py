"""``dpvision check``: can this model be trained privately, and if not, what stands in the way?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpvision.cli.output import print_json, printable, user_errors

if TYPE_CHECKING:
    from torch import nn

PROBLEMS_FOUND = 1


def check(
    model: Annotated[str, typer.Argument(help="A catalogue name, FILE.py:FUNCTION or MODULE:FUNCTION.")],
    in_channels: Annotated[int, typer.Option(help="Channels of a picture.")] = 3,
    image_size: Annotated[int, typer.Option(help="Side of a picture.")] = 32,
    num_classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    option: Annotated[list[str] | None, typer.Option(help="A catalogue model's option, as name=value.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print findings as JSON on stdout.")] = False,
) -> None:
    """Try a model on made-up pictures: mixing, moving buffers, wrong or missing gradients, each named.

    Exit code 0: ready; 1: problems found. Example: dpvision check my_model.py:make --in-channels 1 --image-size 28
    """
    with user_errors():
        from dpvision.cli.settings import parse_options
        from dpvision.training.session import inspect_model

        network = _find(model, in_channels=in_channels, num_classes=num_classes, options=parse_options(option))
        findings = inspect_model(network, image_shape=(in_channels, image_size, image_size), num_classes=num_classes)
        fatal = any(finding.fatal for finding in findings)
        changes = _changes(network, (in_channels, image_size, image_size), num_classes) if fatal else None
        if json:
            rows = [{"module": f.module, "problem": f.problem, "remedy": f.remedy, "fatal": f.fatal} for f in findings]
            print_json({"model": model, "ready": not fatal, "findings": rows, "make_private_ready": changes})
        else:
            for finding in findings:
                kind = "problem" if finding.fatal else "note"
                typer.echo(f"{kind}: {printable(str(finding))}")
            typer.echo(f"{printable(model)} is {'NOT ' if fatal else ''}ready for private training")
            if changes:
                typer.echo("dpvision.models.make_private_ready(model) would make it ready:")
                for change in changes:
                    typer.echo(f"  {printable(change)}")
        if fatal:
            raise typer.Exit(PROBLEMS_FOUND)


def _changes(network: nn.Module, image_shape: tuple[int, int, int], num_classes: int) -> list[str] | None:
    """What ``make_private_ready`` would change, if that is enough to make the model ready; else None."""
    from dpvision.models import make_private_ready
    from dpvision.training.session import inspect_model

    ready, changes = make_private_ready(network)
    findings = inspect_model(ready, image_shape=image_shape, num_classes=num_classes)
    return None if any(finding.fatal for finding in findings) else [str(change) for change in changes]


def _find(name: str, *, in_channels: int, num_classes: int, options: dict[str, bool | int | float | str]) -> nn.Module:
    """The catalogue's model, or what the user's function returns."""
    if ":" not in name:
        from dpvision.models import create

        return create(name, in_channels=in_channels, num_classes=num_classes, seed=0, **options)
    return _from_code(*name.rsplit(":", 1))


def _from_code(place: str, attribute: str) -> nn.Module:
    import importlib
    import importlib.util

    from torch import nn

    from dpvision.checks import ArgumentError

    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise ImportError(f"{place} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        found = getattr(module, attribute)
        model = found if isinstance(found, nn.Module) else found()
    except Exception as error:
        raise ArgumentError(f"can't make a model from {place}:{attribute}: {type(error).__name__}: {error}.") from error
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"{place}:{attribute} must give a torch.nn.Module, got {type(model).__name__}.")
    return model
