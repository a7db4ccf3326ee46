"""The ``dpvision`` command. Commands hold no logic; each imports what it needs when it runs."""

from __future__ import annotations

import typer

from dpvision.cli.audit_command import audit
from dpvision.cli.check_command import check
from dpvision.cli.console import printable
from dpvision.cli.epsilon_command import calibrate, epsilon, plan
from dpvision.cli.list_commands import models, recipes
from dpvision.cli.predict_command import evaluate, predict
from dpvision.cli.report_command import report
from dpvision.cli.reproduce_command import reproduce
from dpvision.cli.sign_command import keygen, sign
from dpvision.cli.train_command import INTERRUPTED, resume, train
from dpvision.cli.verify_command import verify

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
