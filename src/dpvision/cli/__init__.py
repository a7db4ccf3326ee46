"""The ``dpvision`` command: one module for each group of commands.

Commands hold no logic; each imports what it needs when it runs, so that ``dpvision --help`` needs neither torch nor
pydantic. ``flags`` derives flags from the configuration, ``console`` prints results and errors.
"""

from __future__ import annotations

import logging
import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dpvision import __version__
from dpvision.cli.analyze_command import analyze
from dpvision.cli.audit_command import audit
from dpvision.cli.console import INTERRUPTED, say
from dpvision.cli.doctor_command import doctor
from dpvision.cli.epsilon_command import calibrate, epsilon
from dpvision.cli.flags import OTHER_NAMES, as_command, run_settings, takes_settings
from dpvision.cli.model_commands import check, models
from dpvision.cli.pack_command import pack
from dpvision.cli.paper_commands import recipes, reproduce
from dpvision.cli.plan_command import plan
from dpvision.cli.predict_command import evaluate, predict
from dpvision.cli.release_commands import export, keygen, report, sign, verify
from dpvision.cli.run_commands import compare, runs
from dpvision.cli.train_command import resume, train
from dpvision.cli.tune_command import tune


class _Commands(TyperGroup):
    """The commands; flags are derived from the configuration only when one is called, since that needs pydantic."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command to run."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, command_with_flags(str(name)), rest


def command_with_flags(name: str) -> Any:
    """Return a command with all its flags, also those of the configuration."""
    function = _COMMANDS[name]
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(as_command(function, settings=run_settings() if takes_settings(function) else ()))
    return typer.main.get_command(alone)


_FOR_TRAINING = (train, resume, tune, pack, plan, epsilon, calibrate)
_FOR_RELEASES = (evaluate, predict, export, verify, audit, analyze, sign, keygen, report, runs, compare)
_FUNCTIONS = (*_FOR_TRAINING, *_FOR_RELEASES, check, models, recipes, reproduce, doctor)
_COMMANDS: dict[str, Any] = {function.__name__: function for function in _FUNCTIONS}


app = typer.Typer(
    name="dpvision", cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dpvision {__version__}")
        raise typer.Exit


@app.callback()
def _dpvision(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train image models on private images, with a differential-privacy guarantee that anyone can check.

    Example: dpvision train ./scans --target-epsilon 3
    """
    del version


for _name, _command in _COMMANDS.items():
    app.command(_name)(as_command(_command))


def run_program(program: Any, *, name: str) -> None:
    """Run a typer program so that a bad flag is one line and exit code 2, like any other bad input.

    Args:
        program: the typer application.
        name: what the user typed to start it.
    """
    try:
        code = typer.main.get_command(program).main(prog_name=name, standalone_mode=False)
    except typer.TyperException as error:
        message = _usage_message(error)
        if message:  # empty after the help that answers a call without arguments
            say(f"error: {message}{'' if message[-1] in '.?' else '.'} Try --help.")
        raise SystemExit(2) from error
    except (typer.Abort, KeyboardInterrupt) as error:
        raise SystemExit(INTERRUPTED) from error
    raise SystemExit(code or 0)


def _usage_message(error: Any) -> str:
    """The message of a wrong call; an unknown flag comes with the flag that was probably meant."""
    if not hasattr(error, "possibilities"):
        return error.format_message() if isinstance(error, typer.BadParameter) else str(error)
    meant = OTHER_NAMES.get(error.option_name)
    known = {flag for parameter in error.cmd.params for flag in parameter.opts} if error.cmd else set()
    close = [meant] if meant in known else sorted(error.possibilities or ())
    return f"No such option: {error.option_name}{f'. Did you mean {close[0]}?' if close else '.'}"


class _Said(logging.Handler):
    """Prints what the kernels report as one line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print it, once for all processes of torchrun."""
        if os.environ.get("RANK", "0") == "0":
            say(record.getMessage())


def _say_when_kernels_are_compiled() -> None:
    """The first command on a machine may compile them, and would seem to hang."""
    logger = logging.getLogger("dpvision.kernels")
    logger.addHandler(_Said())
    logger.setLevel(logging.INFO)


def main() -> None:
    """Run the ``dpvision`` command with the arguments of this process."""
    from dpvision.ranks import end_process

    _say_when_kernels_are_compiled()
    try:
        run_program(app, name="dpvision")
    except SystemExit as end:
        end_process(end.code if isinstance(end.code, int) else 1)
