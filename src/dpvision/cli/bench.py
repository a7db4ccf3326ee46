"""``dpvision bench``: how long a private step takes, beside an ordinary one."""

from __future__ import annotations

from typing import Annotated

import typer

from dpvision.cli.output import print_json, user_errors


def bench(
    model: Annotated[str, typer.Option(help="A model's name; `dpvision models` lists them.")] = "shoefit_cnn",
    batch: Annotated[int, typer.Option(help="Pictures in a step.")] = 256,
    image_size: Annotated[int, typer.Option(help="Side of a picture.")] = 28,
    in_channels: Annotated[int, typer.Option(help="Channels of a picture.")] = 1,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds.")] = 7,
    microbatch_size: Annotated[int | None, typer.Option(help="Units at a time. Default: chosen.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print figures as JSON on stdout.")] = False,
) -> None:
    """Time private, ordinary and Opacus's steps in turn; medians, as ratios to the ordinary step.

    Example: dpvision bench --model resnet9 --batch 128 --image-size 32 --in-channels 3
    """
    with user_errors():
        from dpvision.bench import Workload, run
        from dpvision.checks import ArgumentError

        if repeats < 1:
            raise ArgumentError(f"repeats must be a whole number >= 1, got {repeats}.")
        workload = Workload(
            model=model, batch=batch, image_size=image_size, in_channels=in_channels, microbatch_size=microbatch_size
        )
        figures = run(workload, repeats=repeats)
        if json:
            print_json(figures)
            return
        typer.echo(f"{model}, batch {batch}, {image_size} px, {figures['threads']} threads, median of {repeats}")
        for row in figures["rows"]:
            typer.echo(f"  {row['name']:26} {row['seconds'] * 1000:9.1f} ms   {row['ratio']:5.2f}")
