"""``dpvision evaluate`` and ``dpvision predict``: a released model at work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpvision.cli.output import print_json, printable, user_errors

Run = Annotated[Path, typer.Argument(help="A run's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print figures as JSON on stdout.")]


def evaluate(
    run: Run,
    test: Annotated[str | None, typer.Option(help="Public pictures. Default: the run's own test split.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where known datasets lie.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Accuracy of a released model on public pictures.

    Example: dpvision evaluate runs/demo-1 --json
    """
    with user_errors():
        from dpvision.evaluate import evaluate as measure
        from dpvision.training.released import load_released, test_pictures

        released = load_released(run)
        store = test_pictures(run, released, test=test, data_dir=data_dir)
        metrics = measure(released.model.to(device), store, released.normalisation, device=device)
        if json:
            print_json({"evaluated_on": store.name, **metrics.to_dict()})
            return
        typer.echo(f"{printable(store.name)}: accuracy {metrics.accuracy:.2%} of {metrics.count} pictures")
        for name, share in metrics.per_class.items():
            typer.echo(f"  {printable(name):24} {'no pictures' if share is None else f'{share:.2%}'}")


def predict(
    run: Run,
    pictures: Annotated[list[Path], typer.Argument(help="Picture files.")],
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip pictures that can't be read.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """What a released model sees in pictures.

    Example: dpvision predict runs/demo-1 scan1.png scan2.png
    """
    with user_errors():
        from dpvision.data import load_pictures
        from dpvision.evaluate import predict as probabilities_of
        from dpvision.training.released import load_released

        released = load_released(run)
        images, names, skipped = load_pictures(pictures, image_shape=released.image_shape, skip_bad=skip_bad)
        rows = probabilities_of(released.model.to(device), images, released.normalisation, device=device)
        answers = [
            {"picture": name, "class": released.class_names[int(row.argmax())], "probability": float(row.max())}
            for name, row in zip(names, rows, strict=True)
        ]
        if json:
            print_json({"predictions": answers, "skipped": [list(pair) for pair in skipped]})
            return
        for answer in answers:
            typer.echo(f"{printable(answer['picture'])}: {printable(answer['class'])} ({answer['probability']:.1%})")
        for name, reason in skipped:
            typer.echo(f"skipped {printable(name)}: {printable(reason)}", err=True)
