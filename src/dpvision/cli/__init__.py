"""The ``dpvision`` command. Commands hold no logic; each imports what it needs when it runs."""

from __future__ import annotations

import typer

from dpvision.cli.accounting import calibrate, epsilon, plan
from dpvision.cli.audit import audit
from dpvision.cli.bench import bench
from dpvision.cli.check import check
from dpvision.cli.lists import models, recipes
from dpvision.cli.output import printable
from dpvision.cli.report import report
from dpvision.cli.reproduce import reproduce
from dpvision.cli.sign import keygen, sign
from dpvision.cli.train import INTERRUPTED, resume, train
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
    audit,
    sign,
    keygen,
    report,
    check,
    models,
    recipes,
    reproduce,
    bench,
):
    app.command(_command.__name__)(_command)


def main() -> None:
    """Entry point of the ``dpvision`` script: a bad flag is one line and exit code 2, like any other bad input."""
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="dpvision", standalone_mode=False)
    except typer.exceptions.TyperException as error:
        message = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
        if message:  # empty after the help that answers a call without arguments
            typer.echo(f"error: {printable(message)} Try --help.", err=True)
        raise SystemExit(2) from error
    except (typer.Abort, KeyboardInterrupt) as error:
        raise SystemExit(INTERRUPTED) from error
    raise SystemExit(code or 0)
