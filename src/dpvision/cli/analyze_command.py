"""``dpvision analyze``: figures about the networks of finished runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dpvision.cli.console import print_results, say
from dpvision.cli.flags import Machine, OwnModel, set_threads
from dpvision.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class AnalyzeFlags:
    """What ``dpvision analyze`` is told besides the runs."""

    what: Annotated[
        str,
        typer.Option(help="Some of activations, norms, gradients, hessian, surface, watch; separated by commas."),
    ] = "norms,gradients"
    images: Annotated[int, typer.Option(help="Most images to use, >= 2.")] = 256
    test: Annotated[
        str | None, typer.Option(help="Public images. Default: the test part of the run's published dataset.")
    ] = None
    test_masks: Annotated[str | None, typer.Option(help="Their masks, for a segmentation model.")] = None
    data_dir: Annotated[Path | None, typer.Option(help="Folder that holds the known datasets.")] = None
    unsafe_training_data: Annotated[
        bool,
        typer.Option(
            "--unsafe-training-data",
            help="Use the run's private training images. Results are stamped and stay in its private/.",
        ),
    ] = False
    eigenvalues: Annotated[int, typer.Option(help="Eigenvalues by power iteration, >= 1.")] = 3
    iterations: Annotated[int, typer.Option(help="Most iterations for each, >= 1.")] = 30
    probes: Annotated[int, typer.Option(help="Most probes of the Hessian's trace, >= 1.")] = 30
    lanczos: Annotated[int, typer.Option(help="Lanczos steps of the spectral density, >= 1.")] = 30
    output: Annotated[Path | None, typer.Option(help="Folder for the files. Default: analysis.")] = None


def analyze(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    flags: AnalyzeFlags,
    on: Machine,
    model: OwnModel = None,
) -> None:
    """Analyse networks on public images: activations, gradients, Hessian, loss surface. Several runs are overlaid.

    Each figure is written as PNG, SVG, CSV and JSON. Images that were held out of private ones are not used: name
    public ones with --test.

    Example: dpvision analyze runs/resnet9-1 runs/scaleresnet9-1 --what activations,hessian --images 128
    """
    from dpvision.analyze import Effort, analyze_runs, open_run, parse_analyses, unsafe_folder
    from dpvision.analyze.watch import WATCH_FILE
    from dpvision.training.run_logs import LOGS

    what = parse_analyses(flags.what)
    if flags.unsafe_training_data and (len(run) > 1 or flags.output is not None):
        raise ArgumentError("--unsafe-training-data takes one run and no --output: results stay in its private/.")
    names = [each.resolve().name for each in run]
    if len(set(names)) < len(names):
        raise ArgumentError(f"the folders of runs must have different names, got {', '.join(names)}.")
    set_threads(on.threads)
    opened = [
        open_run(
            each,
            images=flags.images,
            test=flags.test,
            test_masks=flags.test_masks,
            data_dir=flags.data_dir,
            unsafe=flags.unsafe_training_data,
            model=model,
        )
        for each in (run if set(what) - {"watch"} else ())
    ]
    output = unsafe_folder(run[0]) if flags.unsafe_training_data else flags.output or Path("analysis")
    effort = Effort(
        eigenvalues=flags.eigenvalues, iterations=flags.iterations, probes=flags.probes, lanczos=flags.lanczos
    )
    watched = [(name, each / LOGS / WATCH_FILE) for name, each in zip(names, run, strict=True)]
    results = analyze_runs(opened, what=what, output=output, effort=effort, watched=watched, say=say)
    print_results(results, _lines(results), json=on.json)


def _lines(results: dict[str, Any]) -> Iterator[str]:
    """The results for people."""
    for facts in results["runs"]:
        yield f"{facts['run']}: {facts['model']}, {facts['images']} {facts['images_from']}"
    yield from results["stamps"]
    for name, blocks in results.get("activations", {}).items():
        for each in blocks:
            where = f"{name}, {each['block']} ({each['kind']}), {each['path']}"
            yield f"  {where}: mean {each['mean']:.3f}, std {each['std']:.3f}, skew {each['skew']:.3f}"
    for name, found in results.get("gradients", {}).items():
        clipped = "" if found["clipped"] is None else f", {found['clipped']:.1%} longer than the clip norm"
        yield f"  {name}: gradient norm of an image {found['mean_norm']:.3g} on average{clipped}"
    for name, found in results.get("hessian", {}).items():
        eigen, trace, spectrum = found["eigenvalues"], found["trace"], found["spectrum"]
        yield f"  {name}: {found['loss']}, {found['parameters']:,} parameters, {found['products']} products"
        yield f"    eigenvalues of largest magnitude: {', '.join(f'{value:.4g}' for value in eigen['values'])}"
        error = "" if trace["standard_error"] is None else f" ± {trace['standard_error']:.3g}"
        yield f"    trace {trace['trace']:.5g}{error} ({trace['probes']} probes)"
        yield (
            f"    spectrum from {spectrum['smallest']:.4g} to {spectrum['largest']:.4g}; "
            f"{spectrum['negative_ritz_values']} of {len(spectrum['ritz_values'])} Ritz values are negative"
        )
    yield f"written: {', '.join(results['files'])}"
