"""``dpvision evaluate`` and ``dpvision predict``: use a released model."""

from __future__ import annotations

import csv as csv_format
import io
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpvision.cli.console import print_results, say
from dpvision.cli.flags import Machine, OwnModel, set_threads
from dpvision.errors import ArgumentError
from dpvision.storage.files import disk_errors, write_atomically

if TYPE_CHECKING:
    from dpvision.inference import FindingMetrics, MaskMetrics, Metrics
    from dpvision.inference.load import ReleasedModel


Run = Annotated[Path, typer.Argument(help="A run's folder, or its release folder.")]


@dataclass(frozen=True, kw_only=True)
class TestImages:
    """Images to measure a model on."""

    test: Annotated[str | None, typer.Option(help="Public images. Default: the run's own test split.")] = None
    test_masks: Annotated[str | None, typer.Option(help="Their masks, for a segmentation model.")] = None
    test_findings: Annotated[str | None, typer.Option(help="CSV of their findings, for a model of findings.")] = None
    data_dir: Annotated[Path | None, typer.Option(help="Folder that holds the known datasets.")] = None


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files that predictions are written to."""

    output: Annotated[Path | None, typer.Option(help="Folder for masks: NAME_mask.png or NAME_mask.nii.gz.")] = None
    force: Annotated[bool, typer.Option("--force", help="Replace existing masks.")] = False
    csv: Annotated[
        Path | None, typer.Option(help="File for a table: every image with the probability of each class.")
    ] = None


def evaluate(
    run: Run,
    of: TestImages,
    on: Machine,
    groups: Annotated[
        Path | None,
        typer.Option(help="CSV of image (file, row number or owner) and group: metrics of each group, too."),
    ] = None,
    operating_point: Annotated[
        str, typer.Option(help="Threshold: youden, sensitivity=S, specificity=S or threshold=P.")
    ] = "youden",
    positive: Annotated[
        str | None, typer.Option(help="Positive class of the threshold. Default: of two, the second.")
    ] = None,
    model: OwnModel = None,
) -> None:
    """Measure a released model on public images: accuracy and AUC with 95 % intervals, or Dice for masks.

    Example: dpvision evaluate runs/demo-1 --json

    Example: dpvision evaluate runs/chest --operating-point sensitivity=0.95 --groups scanners.csv

    Example: dpvision evaluate runs/liver --test scans --test-masks masks
    """
    set_threads(on.threads)
    from dpvision.inference import FindingMetrics, Metrics, evaluate_masks
    from dpvision.inference import evaluate as measure
    from dpvision.inference.load import load_model, load_test_images
    from dpvision.inference.metrics import details_of, groups_of_rows, read_groups
    from dpvision.release.report import comparison_text
    from dpvision.scoring import parse_operating_point

    point = parse_operating_point(operating_point)
    names = None if groups is None else read_groups(groups)

    # What a user's own code prints must not mix with the results.
    with redirect_stdout(sys.stderr):
        released = load_model(run, model=model)
        store = load_test_images(
            run,
            released,
            test=of.test,
            test_masks=of.test_masks,
            data_dir=of.data_dir,
            test_findings=of.test_findings,
        )
        judge = evaluate_masks if store.per_pixel else measure
        metrics = judge(released.model.to(on.device), store, released.normalisation)
    values = {"evaluated_on": store.name, **metrics.to_dict()}
    comparison = metrics.comparison()
    if comparison is not None:
        values |= {
            key: value for key, value in comparison.to_dict().items() if key not in ("score", "interval", "chance")
        }
    if isinstance(metrics, Metrics) and metrics.scored is not None:
        values |= details_of(metrics.scored, point=point, positive=positive)
        if names is not None:
            values["groups"] = metrics.scored.by_group(groups_of_rows(names, store))
    if isinstance(metrics, FindingMetrics) and names is not None:
        values["groups"] = metrics.by_group(groups_of_rows(names, store))
    first, *others = [*_lines(metrics), *_detail_lines(values)]
    if comparison is not None:
        others.append(f"better than chance: {comparison_text(comparison)}".replace("\u00a0", " "))
    lines = [f"{store.name}: {first}", *(f"  {line}" for line in others)]
    print_results(values, lines, json=on.json)


def predict(
    run: Run,
    images: Annotated[
        list[Path], typer.Argument(help="Image or DICOM files, folders of them, or NIfTI volumes for masks.")
    ],
    files: Files,
    on: Machine,
    window: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Volumes, DICOM: intensities from LOW to HIGH. Default: the run's own."),
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip images that can't be read.")] = False,
    model: OwnModel = None,
) -> None:
    """Predict with a released model: a class for each image, or a mask.

    Example: dpvision predict runs/demo-1 scan1.png scan2.png

    Example: dpvision predict runs/demo-1 ./scans --csv probabilities.csv

    Example: dpvision predict runs/liver scan.nii.gz --output masks
    """
    set_threads(on.threads)
    from dpvision.inference.load import load_model

    with redirect_stdout(sys.stderr):
        released = load_model(run, model=model)
    draws = released.config.task == "segmentation"
    if draws and files.output is None:
        raise ArgumentError("this model predicts masks: name a folder for them with --output.")
    if not draws and (files.output is not None or files.force):
        raise ArgumentError("this model predicts a class for each image, no masks: leave out --output and --force.")
    if draws and files.csv is not None:
        raise ArgumentError("this model predicts masks, no class for each image: leave out --csv.")
    if window is not None:
        released = released.with_window(window)
    for flag, path in (("--output", files.output), ("--csv", files.csv)):
        if path is not None and path.resolve().is_relative_to(run.resolve()):
            raise ArgumentError(f"{flag} must lie outside the run's own folder, got {path}.")
    with redirect_stdout(sys.stderr):
        if files.output is None:
            values, lines, skipped = _classes(released, images, skip_bad=skip_bad, device=on.device)
        else:
            values, lines, skipped = _masks(
                released, images, files.output, force=files.force, skip_bad=skip_bad, device=on.device
            )
    if files.csv is not None:
        with disk_errors(f"write {files.csv}"):
            write_atomically(files.csv, _table(values["predictions"], released.class_names))
    print_results({**values, "skipped": [list(pair) for pair in skipped]}, lines, json=on.json)
    for name, reason in () if on.json else skipped:
        say(f"skipped {name}: {reason}")


_Answer = tuple[dict[str, Any], list[str], list[tuple[str, str]]]


def _classes(released: ReleasedModel, images: list[Path], *, skip_bad: bool, device: str) -> _Answer:
    found = released.predict(images, skip_bad=skip_bad, device=device)
    rows = [row.tolist() for row in found.probabilities]
    answers: list[dict[str, Any]] = [
        {
            "image": name,
            "class": chosen,
            **({"findings": list(present)} if found.findings else {"probability": max(row)}),
            "probabilities": row,
        }
        for name, chosen, present, row in zip(found.names, found.classes, found.found, rows, strict=True)
    ]
    if found.findings:
        texts = [", ".join(f"{n} {p:.1%}" for n, p in zip(found.class_names, row, strict=True)) for row in rows]
        lines = [f"{name}: {text}" for name, text in zip(found.names, texts, strict=True)]
    else:
        lines = [f"{each['image']}: {each['class']} ({each['probability']:.1%})" for each in answers]
    return {"class_names": list(found.class_names), "predictions": answers}, lines, list(found.skipped)


def _table(answers: list[dict[str, Any]], class_names: tuple[str, ...]) -> bytes:
    """A CSV table: image, predicted class, and the probability of each class in the order of the classes."""
    content = io.StringIO()
    writer = csv_format.writer(content)
    writer.writerow(["image", "class", *class_names])
    writer.writerows([each["image"], each["class"], *each["probabilities"]] for each in answers)
    return content.getvalue().encode()


def _masks(
    released: ReleasedModel, images: list[Path], output: Path, *, force: bool, skip_bad: bool, device: str
) -> _Answer:
    from dpvision.inference.predict import write_masks

    files, skipped = write_masks(released, images, output, force=force, skip_bad=skip_bad, device=device)
    answers = [{"image": str(file.source), "mask": str(file.path), "shares": file.shares} for file in files]
    lines = [
        f"{file.path}: {', '.join(f'{name} {share:.2%}' for name, share in file.shares.items())}" for file in files
    ]
    return {"masks": answers}, lines, skipped


def _detail_lines(values: dict[str, Any]) -> list[str]:
    """AUC and its relatives, the operating point and the groups, each with its 95 % interval."""

    def line(title: str, value: float, interval: list[float] | None) -> str:
        ends = "" if interval is None else f"  (95 % interval {interval[0]:.3f} to {interval[1]:.3f})"
        return f"{title:24} {value:.3f}{ends}"

    found: list[str] = []
    for name in ("balanced_accuracy", "auc", "average_precision"):
        if values.get(name) is not None:
            found.append(line(name.replace("_", " "), values[name], values["intervals"][name]))
    point = values.get("operating_point")
    if point:
        found.append(f"{point['positive']} from probability {point['threshold']:.3f} on ({point['rule']}):")
        for name in ("sensitivity", "specificity"):
            if point[name] is not None:
                found.append(line(f"  {name}", point[name], point[f"{name}_interval"]))
    for name, group in values.get("groups", {}).items():
        if group is None:
            found.append(f"group {name}: fewer than 10 units, not shown")
        elif "accuracy" in group:
            found.append(line(f"group {name}", group["accuracy"], group["intervals"]["accuracy"]))
        elif group["auc"] is not None:
            found.append(line(f"group {name}, mean AUC", group["auc"], group["intervals"]["auc"]))
    return found


def _lines(metrics: Metrics | FindingMetrics | MaskMetrics) -> list[str]:
    from dpvision.inference import FindingMetrics, Metrics

    if isinstance(metrics, FindingMetrics):
        mean = "not known: too few test images" if metrics.mean_auc is None else f"{metrics.mean_auc:.3f}"
        shown = {
            name: "fewer than 10 units with or without it" if each is None else f"AUC {each['auc']:.3f}"
            for name, each in metrics.findings.items()
        }
        return [
            f"mean AUC {mean}, {metrics.count} images",
            *(f"{name:24} {text}" for name, text in shown.items()),
        ]
    if isinstance(metrics, Metrics):
        shares = metrics.per_class.items()
        each = [f"{name:24} {'no images' if share is None else f'{share:.2%}'}" for name, share in shares]
        return [f"accuracy {metrics.accuracy:.2%} of {metrics.count} images", *each]
    lines = [f"Dice {metrics.dice:.2%}, IoU {metrics.iou:.2%}, mean over {metrics.count} images"]
    if metrics.dice_per_patient is not None:
        lines.append(f"Dice {metrics.dice_per_patient:.2%}, mean over {len(metrics.per_patient or {})} patients")
    lines.append(f"Dice {metrics.baseline_dice:.2%} is reached by the best single mask for all images")
    return [*lines, *(f"{name:24} {dice:.2%}" for name, dice in (metrics.per_patient or {}).items())]
