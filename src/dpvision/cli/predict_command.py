"""``dpvision evaluate`` and ``dpvision predict``: use a released model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpvision.cli.console import print_json, say
from dpvision.cli.flags import Device, Json
from dpvision.errors import ArgumentError, printable

if TYPE_CHECKING:
    from dpvision.inference import MaskMetrics, Metrics
    from dpvision.inference.load import ReleasedModel


Run = Annotated[Path, typer.Argument(help="A run's folder.")]


def evaluate(
    run: Run,
    test: Annotated[str | None, typer.Option(help="Public images. Default: the run's own test split.")] = None,
    test_masks: Annotated[str | None, typer.Option(help="Their masks, for a segmentation model.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder that holds the known datasets.")] = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Measure a released model on public images: accuracy, or Dice for masks.

    Example: dpvision evaluate runs/demo-1 --json

    Example: dpvision evaluate runs/liver --test scans --test-masks masks
    """
    from dpvision.inference import evaluate as measure
    from dpvision.inference import evaluate_masks
    from dpvision.inference.load import load_model, load_test_images

    released = load_model(run)
    store = load_test_images(run, released, test=test, test_masks=test_masks, data_dir=data_dir)
    judge = evaluate_masks if store.per_pixel else measure
    metrics = judge(released.model.to(device), store, released.normalisation, device=device)
    if json:
        print_json({"evaluated_on": store.name, **metrics.to_dict()})
        return
    first, *others = _lines(metrics)
    typer.echo(f"{printable(store.name)}: {first}")
    for line in others:
        typer.echo(f"  {printable(line)}")


def predict(
    run: Run,
    images: Annotated[list[Path], typer.Argument(help="Image files, folders of them, or NIfTI volumes for masks.")],
    output: Annotated[Path | None, typer.Option(help="Folder for masks: NAME_mask.png or NAME_mask.nii.gz.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing masks.")] = False,
    window: Annotated[
        tuple[float, float] | None, typer.Option(help="Volumes: intensities from LOW to HIGH. Default: the run's own.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip images that can't be read.")] = False,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Predict with a released model: a class for each image, or a mask.

    Example: dpvision predict runs/demo-1 scan1.png scan2.png

    Example: dpvision predict runs/liver scan.nii.gz --output masks
    """
    from dpvision.inference.load import load_model

    released = load_model(run)
    draws = released.config.task == "segmentation"
    if draws and output is None:
        raise ArgumentError("this model predicts masks: name a folder for them with --output.")
    if not draws and (output is not None or force):
        raise ArgumentError("this model predicts a class for each image, no masks: leave out --output and --force.")
    if window is not None:
        released = released.with_window(window)
    if output is None:
        figures, lines, skipped = _classes(released, images, skip_bad=skip_bad, device=device)
    else:
        if output.resolve().is_relative_to(run.resolve()):
            raise ArgumentError(f"--output must lie outside the run's own folder, got {output}.")
        figures, lines, skipped = _masks(released, images, output, force=force, skip_bad=skip_bad, device=device)
    if json:
        print_json({**figures, "skipped": [list(pair) for pair in skipped]})
        return
    for line in lines:
        typer.echo(printable(line))
    for name, reason in skipped:
        say(f"skipped {name}: {reason}")


_Answer = tuple[dict[str, Any], list[str], list[tuple[str, str]]]


def _classes(released: ReleasedModel, images: list[Path], *, skip_bad: bool, device: str) -> _Answer:
    from dpvision.data import load_images
    from dpvision.inference import predict_probabilities

    loaded, names, skipped = load_images(images, image_shape=released.image_shape, skip_bad=skip_bad)
    rows = predict_probabilities(released.model.to(device), loaded, released.normalisation, device=device)
    answers = [
        {"picture": name, "class": released.class_names[int(row.argmax())], "probability": float(row.max())}
        for name, row in zip(names, rows, strict=True)
    ]
    lines = [f"{each['picture']}: {each['class']} ({each['probability']:.1%})" for each in answers]
    return {"predictions": answers}, lines, list(skipped)


def _masks(
    released: ReleasedModel, images: list[Path], output: Path, *, force: bool, skip_bad: bool, device: str
) -> _Answer:
    from dpvision.inference.predict import write_masks

    files, skipped = write_masks(released, images, output, force=force, skip_bad=skip_bad, device=device)
    answers = [{"picture": str(file.source), "mask": str(file.path), "shares": file.shares} for file in files]
    lines = [
        f"{file.path}: {', '.join(f'{name} {share:.2%}' for name, share in file.shares.items())}" for file in files
    ]
    return {"masks": answers}, lines, skipped


def _lines(metrics: Metrics | MaskMetrics) -> list[str]:
    from dpvision.inference import Metrics

    if isinstance(metrics, Metrics):
        shares = metrics.per_class.items()
        each = [f"{name:24} {'no images' if share is None else f'{share:.2%}'}" for name, share in shares]
        return [f"accuracy {metrics.accuracy:.2%} of {metrics.count} images", *each]
    lines = [f"Dice {metrics.dice:.2%}, IoU {metrics.iou:.2%}, mean over {metrics.count} images"]
    if metrics.dice_per_patient is not None:
        lines.append(f"Dice {metrics.dice_per_patient:.2%}, mean over {len(metrics.per_patient or {})} patients")
    lines.append(f"Dice {metrics.baseline_dice:.2%} is reached by the best single mask for all images")
    return [*lines, *(f"{name:24} {dice:.2%}" for name, dice in (metrics.per_patient or {}).items())]
