"""``dpvision train`` and ``dpvision resume``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpvision.cli.console import known_device, print_json, user_errors

if TYPE_CHECKING:
    from dpvision.training import RunResult


INTERRUPTED = 130
Json = Annotated[bool, typer.Option("--json", help="Print figures as JSON on stdout.")]


def train(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A folder of class folders, an .npz file, or mnist, fashionmnist, cifar10, cifar100, digits."
        ),
    ] = None,
    masks: Annotated[
        str | None,
        typer.Argument(help="With --task segmentation: the masks, a folder or file beside that of the pictures."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="classification, or segmentation: every pixel has a class.")] = None,
    loss: Annotated[str | None, typer.Option(help="cross_entropy; for masks also dice, dice_cross_entropy.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A named setting; `dpvision recipes` lists them.")] = None,
    scale: Annotated[str, typer.Option(help="paper, or cpu: the recipe's reduced version, if it has one.")] = "paper",
    quick: Annotated[bool, typer.Option("--quick", help="Smoke test of a recipe: two steps, made-up data.")] = False,
    config: Annotated[Path | None, typer.Option(help="A TOML file with the fields of a run.")] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="The wall: no step crosses it.")] = None,
    delta: Annotated[float | None, typer.Option(help="Default: a power of ten below 1 / num_units.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Default: calibrated to target_epsilon.")] = None,
    expected_batch_size: Annotated[float | None, typer.Option(help="Mean size of a Poisson draw.")] = None,
    steps: Annotated[int | None, typer.Option(help="Noisy releases.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="L2 bound on one unit's gradient.")] = None,
    clipping: Annotated[str | None, typer.Option(help="flat, automatic or per_layer: how units are clipped.")] = None,
    unit_norm: Annotated[
        bool, typer.Option("--unit-norm", help="Divide by the clip norm too: one rate fits every clip norm.")
    ] = False,
    num_units: Annotated[int | None, typer.Option(help="Declared number of privacy units.")] = None,
    test: Annotated[str | None, typer.Option(help="A public test set; else a part is held out.")] = None,
    test_masks: Annotated[str | None, typer.Option(help="The masks of the public test set.")] = None,
    mask_classes: Annotated[str | None, typer.Option(help="merged (any value is foreground) or classes.")] = None,
    only_foreground: Annotated[
        bool, typer.Option("--only-foreground", help="Leave out pictures whose mask is empty.")
    ] = False,
    volume_axis: Annotated[int | None, typer.Option(help="Axis along which volumes are cut: 0, 1 or 2.")] = None,
    window: Annotated[tuple[float, float] | None, typer.Option(help="Intensities from LOW to HIGH.")] = None,
    model: Annotated[str | None, typer.Option(help="A model's name; `dpvision models` lists them.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="A model's option, as name=value.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam, adamw, nadam or rmsprop.")] = None,
    learning_rate: Annotated[float | None, typer.Option()] = None,
    momentum: Annotated[float | None, typer.Option()] = None,
    image_size: Annotated[int | None, typer.Option(help="Shorter side after resizing, then cropped square.")] = None,
    normalisation: Annotated[str | None, typer.Option(help="auto, published, fixed, none or released.")] = None,
    unit_column: Annotated[str | None, typer.Option(help="Array or CSV column that names the owner of a row.")] = None,
    unit_csv: Annotated[Path | None, typer.Option(help="CSV of file and unit.")] = None,
    unit_folder_level: Annotated[int | None, typer.Option(help="Which folder of a path names the unit.")] = None,
    unit_pattern: Annotated[str | None, typer.Option(help="Regular expression: its group names the unit.")] = None,
    units: Annotated[str | None, typer.Option(help="auto (owners where known), owners or rows.")] = None,
    most_rows_per_owner: Annotated[
        int | None, typer.Option(help="With units=rows: use so many rows of an owner, who then gets a figure too.")
    ] = None,
    rows_per_unit: Annotated[int | None, typer.Option(help="At most so many rows of a unit in a step.")] = None,
    privacy_unit: Annotated[str | None, typer.Option(help="What a unit is, in a word: example, patient …")] = None,
    views: Annotated[int | None, typer.Option(help="Random views of a picture, averaged before the clip.")] = None,
    crop_padding: Annotated[int | None, typer.Option(help="Random crops after so many pixels of padding.")] = None,
    padding: Annotated[str | None, typer.Option(help="reflect, symmetric or zeros.")] = None,
    flip: Annotated[float | None, typer.Option(help="Probability that a view is mirrored.")] = None,
    rotation: Annotated[float | None, typer.Option(help="Largest angle of a view, in degrees.")] = None,
    erasing: Annotated[float | None, typer.Option(help="Probability that a part of a view is erased.")] = None,
    transfer_weights: Annotated[str | None, typer.Option(help="First weights: a file, a run, a known name.")] = None,
    transfer_source: Annotated[str | None, typer.Option(help="What those were trained on: declared public.")] = None,
    licence: Annotated[str | None, typer.Option(help="The licence of those weights.")] = None,
    trained: Annotated[str | None, typer.Option(help="What learns: head, last, all or head_then_all.")] = None,
    stages: Annotated[int | None, typer.Option(help="With trained=last: so many, the head included.")] = None,
    head_steps: Annotated[int | None, typer.Option(help="With head_then_all: steps for the head alone.")] = None,
    initialisation: Annotated[str | None, typer.Option(help="weights or mean_var.")] = None,
    cache_features: Annotated[str | None, typer.Option(help="Of a frozen front: memory, disk or off.")] = None,
    feature_precision: Annotated[str | None, typer.Option(help="Kept features: float32 or bfloat16.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where known datasets lie.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip and count pictures that can't be read.")] = False,
    no_privacy: Annotated[bool, typer.Option("--no-privacy", help="Ordinary training: no guarantee at all.")] = False,
    evaluations: Annotated[int | None, typer.Option(help="Points of the curve on the public test set.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between two checkpoints.")] = None,
    microbatch_size: Annotated[int | None, typer.Option(help="Units at a time: memory and speed only.")] = None,
    unsafe_seed: Annotated[int | None, typer.Option(help="Repeatable noise, for experiments: not for release.")] = None,
    output: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/NAME-1, -2 …")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.", callback=known_device)] = "cpu",
    json: Json = False,
) -> None:
    """Train privately: pictures in; model, certificate and report out.

    Example: dpvision train ./scans --target-epsilon 3
    For masks: dpvision train --task segmentation ./slices ./masks --target-epsilon 3
    """
    given = {
        "task": task,
        "loss": loss,
        "data": {
            "source": source,
            "test": test,
            "image_size": image_size,
            "normalisation": normalisation,
            "unit_column": unit_column,
            "unit_csv": _text(unit_csv),
            "unit_folder_level": unit_folder_level,
            "unit_pattern": unit_pattern,
            "units": units,
            "masks": masks,
            "test_masks": test_masks,
            "mask_classes": mask_classes,
            "only_foreground": only_foreground or None,
            "volume_axis": volume_axis,
            "window": window,
            "rows_per_unit": rows_per_unit,
            "data_dir": _text(data_dir),
            "skip_bad": skip_bad or None,
        },
        "privacy": {
            "enabled": False if no_privacy else None,
            "target_epsilon": target_epsilon,
            "delta": delta,
            "noise_multiplier": noise_multiplier,
            "expected_batch_size": expected_batch_size,
            "steps": steps,
            "clip_norm": clip_norm,
            "clipping": clipping,
            "unit_norm": unit_norm or None,
            "num_units": num_units,
            "most_rows_per_owner": most_rows_per_owner,
            "privacy_unit": privacy_unit,
        },
        "views": {
            "count": views,
            "crop_padding": crop_padding,
            "padding": padding,
            "flip": flip,
            "rotation": rotation,
            "erasing": erasing,
        },
        "transfer": {
            "weights": transfer_weights,
            "source": transfer_source,
            "licence": licence,
            "trained": trained,
            "stages": stages,
            "head_steps": head_steps,
            "initialisation": initialisation,
        },
        "cache_features": cache_features,
        "feature_precision": feature_precision,
        "optimizer": {"name": optimizer, "learning_rate": learning_rate, "momentum": momentum},
        "performance": {"microbatch_size": microbatch_size},
        "evaluations": evaluations,
        "checkpoint_every": checkpoint_every,
    }
    with user_errors():
        from dpvision.cli.run_settings import build_config, parse_options, settle
        from dpvision.training import train as train_run

        options = parse_options(option)
        base = build_config(recipe=recipe, scale=scale, file=config, given=given, model=model, options=options)
        run_config, folder = settle(base, recipe=recipe, output=output, quick=quick)
        # A smoke test must never pass for a release: a seed set by hand stamps it.
        seed = 0 if quick and unsafe_seed is None else unsafe_seed
        result = train_run(run_config, run=folder, seed=seed, device=device, callback=_callback())
        _finish(result, json=json, quick=quick)


def resume(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    fork: Annotated[
        bool, typer.Option("--fork", help="Go on although the data changed: other noise, charged again.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.", callback=known_device)] = "cpu",
    json: Json = False,
) -> None:
    """Go on with a run that was interrupted.

    Example: dpvision resume runs/demo-1
    """
    with user_errors():
        from dpvision.training import resume_training

        _finish(resume_training(run, allow_fork=fork, device=device, callback=_callback()), json=json)


def _callback() -> Any:
    from dpvision.cli.progress import TerminalProgress

    return TerminalProgress()


def _finish(result: RunResult, *, json: bool, quick: bool = False) -> None:
    """Write the report, print the figures, and say how to go on if the run is not done."""
    from dpvision.release.report import summary_lines, write_report

    report = write_report(result.run)
    figures = {**result.figures(), "report": str(report), "run": str(result.run)}
    if quick:
        from dpvision.papers import MEANS_NOTHING

        typer.echo(MEANS_NOTHING, err=True)
        figures["smoke_test"] = MEANS_NOTHING
    if json:
        print_json(figures)
    else:
        for line in summary_lines(result.certificate, result.metrics):
            typer.echo(line)
        typer.echo(f"report: {report}")
    if result.outcome == "stopped":
        typer.echo(f"stopped before the plan was done; go on with: dpvision resume {result.run}", err=True)
        raise typer.Exit(INTERRUPTED)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
