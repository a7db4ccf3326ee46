"""The ``dpvision`` command. Commands hold no logic; each imports what it needs when it runs."""

from __future__ import annotations

import typer

from dpvision.cli.accounting import calibrate, epsilon, plan
from dpvision.cli.bench import bench
from dpvision.cli.check import check
from dpvision.cli.lists import models, recipes
from dpvision.cli.report import report
from dpvision.cli.train import resume, train
from dpvision.cli.use import evaluate, predict
from dpvision.cli.verify import verify

app = typer.Typer(
    name="dpvision",
    help="Train image models on private pictures, with a differential-privacy guarantee that anyone can check.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for _command in (
    train,
    resume,
    plan,
    epsilon,
    calibrate,
    evaluate,
    predict,
    verify,
    report,
    check,
    models,
    recipes,
    bench,
):
    app.command(_command.__name__)(_command)


def main() -> None:
    """Entry point of the ``dpvision`` script."""
    app()
