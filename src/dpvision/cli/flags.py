"""Turns functions and settings into commands of the ``dpvision`` program.

A command is a function with plain typed parameters. Two kinds of parameter stand for several flags:

- a dataclass: each of its fields is a flag (a field is ``Annotated`` with ``typer.Option`` and its help);
- ``Given``: every field of ``RunConfig`` is a flag, or those named in ``Annotated[Given, names]``. Name, help text,
  default and panel come from the field, so that a setting is declared once, in ``dpvision.config``. The function
  receives what was given, nested as in a TOML file.

``as_command`` also reports every error that the user can act on in one line, in terms of flags.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from dpvision.cli.console import known_device, user_errors
from dpvision.errors import ArgumentError, brief
from dpvision.ranks import refuse_several_processes

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON on stdout.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.", callback=known_device)]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads of the processor, >= 1. Default: torch's choice.", rich_help_panel="Output and speed"),
]
OwnModel = Annotated[
    str | None, typer.Option("--model", help="The run's own model again, FILE.py:FUNCTION, where it has one.")
]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a command computes, and how it prints: the same flags for every command that uses a model."""

    device: Device = "cpu"
    threads: Threads = None
    json: Json = False


ModelOptions = Annotated[
    list[str] | None, typer.Option(help="Option of the model, as name=value. May be repeated.", metavar="NAME=VALUE")
]
SHARED = ("train", "resume")
"""Commands whose work is shared among the processes of torchrun."""

OTHER_NAMES = {
    "--epsilon": "--target-epsilon",
    "--eps": "--target-epsilon",
    "--lr": "--learning-rate",
    "--batch-size": "--expected-batch-size",
    "--batch": "--expected-batch-size",
    "--clip": "--clip-norm",
    "--max-grad-norm": "--clip-norm",
    "--sigma": "--noise-multiplier",
    "--noise": "--noise-multiplier",
    "--seed": "--unsafe-seed",
    "--out": "--output",
    "--holdout-fraction": "--holdout",
}
"""What other programs call our flags."""
_PANELS = {
    "search": "Search",
    "data": "Data",
    "privacy": "Privacy",
    "model": "Model",
    "optimisation": "Optimisation",
    "augmentation": "Augmentation",
    "transfer": "Transfer learning",
    "output": "Output and speed",
}


class Given(dict[str, Any]):
    """Settings from the command line, nested as in a TOML file; what was left out is not there."""


@dataclass(frozen=True)
class Setting:
    """A field of the configuration as a flag.

    Attributes:
        path: its keys in a TOML file, such as ("privacy", "delta").
        flag: the flag, or the upper-case name of a positional argument.
        field: pydantic's description of it.
        panel: a key of ``_PANELS``, or "first" for the settings that a beginner needs.
    """

    path: tuple[str, ...]
    flag: str
    field: FieldInfo
    panel: str

    @property
    def name(self) -> str:
        """The name of the command's parameter."""
        return self.flag.strip("-").replace("-", "_").lower()

    def parameter(self, *, of_run: bool = True) -> inspect.Parameter:
        """Describe the flag for typer. The default is None, so that a flag left out does not replace a file's value.

        Without ``of_run`` no run fills in what is left out, and the help does not say how it would.
        """
        kind, metavar = _plain_type(self.field.annotation)
        values = _choices(self.field.annotation)
        choices = f" One of {', '.join(map(str, values))}." if values else ""
        panel = _PANELS.get(self.panel)
        description = str(self.field.description)
        text = f"{description if of_run else description.partition(' Default:')[0]}{choices}{self._default_text(kind)}"
        info: Any
        if self.flag.isupper():
            info = typer.Argument(help=text, metavar=self.flag, show_default=False)
        else:
            info = typer.Option(self.flag, help=text, metavar=metavar, rich_help_panel=panel, show_default=False)
        annotation = Annotated[kind if kind is bool else kind | None, info]
        left_out = False if kind is bool else None
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=left_out, annotation=annotation)

    def _default_text(self, kind: Any) -> str:
        default = None if self.field.is_required() else self.field.default
        if kind is bool or default is None or default == {} or "Default:" in str(self.field.description):
            return ""
        return f" Default: {default}."


@cache
def run_settings() -> tuple[Setting, ...]:
    """Every field of ``RunConfig`` that has a flag, those for beginners first, then panel by panel."""
    from dpvision.config import RunConfig

    order = ("first", *_PANELS)
    found = sorted(_settings_of(RunConfig, ()), key=lambda each: each.path[0] != "privacy")
    return tuple(sorted(found, key=lambda each: order.index(each.panel)))


def _settings_of(section: Any, above: tuple[str, ...]) -> Iterator[Setting]:
    from dpvision.config import Flag, Settings

    for name, field in section.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if inspect.isclass(kind)]
        sections = [kind for kind in inner if issubclass(kind, Settings)]
        flag = next((each for each in field.metadata if isinstance(each, Flag)), Flag())
        if flag.name == "":
            continue
        if sections:
            yield from _settings_of(sections[0], (*above, name))
        else:
            shown = flag.name or f"--{name.replace('_', '-')}"
            yield Setting((*above, name), shown, field, flag.panel or section.panel)


def _plain_type(annotation: Any) -> tuple[Any, str | None]:
    """The type that typer parses for a field's annotation, and its name in the help where typer has no good one."""
    values = _choices(annotation)
    if values:
        return type(values[0]), None
    origin, inner = get_origin(annotation), [kind for kind in get_args(annotation) if kind is not NoneType]
    if origin is dict:
        return list[str], "NAME=VALUE"
    if origin is tuple:
        return tuple[float, float], "LOW HIGH"
    return _plain_type(inner[0]) if inner else (annotation, None)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal, also of an optional one; else none."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((get_args(kind) for kind in get_args(annotation) if get_origin(kind) is Literal), ())


def _nested(settings: Sequence[Setting], values: Mapping[str, Any]) -> Given:
    """Sort the values of flags into sections; leave out what was not given."""
    given = Given()
    for setting in settings:
        value = values[setting.name]
        if value is None or value is False or value == []:
            continue
        if isinstance(value, bool):
            value = not setting.field.default  # the flag of a switch turns it the other way
        elif get_origin(setting.field.annotation) is dict:
            value = parse_options(value)
        section = given
        for key in setting.path[:-1]:
            section = section.setdefault(key, {})
        section[setting.path[-1]] = value
    return given


def takes_settings(function: Callable[..., None]) -> bool:
    """Whether flags of the command come from the configuration."""
    hints = get_type_hints(function)
    return Given in hints.values()


def as_command(function: Callable[..., None], *, settings: Sequence[Setting] = ()) -> Callable[..., None]:
    """Make a function that typer can register as a command.

    Args:
        function: the command; its parameters may be dataclasses of flags and one ``Given``.
        settings: the flags from which ``Given`` chooses; without any the command can be listed quickly, but not run.

    Returns:
        A function with one parameter a flag, whose errors are one line on stderr and exit code 2.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind = parameter.annotation
        wanted = get_args(kind)[1] if get_args(kind)[:1] == (Given,) else None
        if kind is Given or wanted:
            groups[name] = Given
            settings = [each for each in settings if wanted is None or each.path[-1] in wanted]
            parameters += [setting.parameter(of_run=wanted is None) for setting in settings]
        elif is_dataclass(kind):
            groups[name] = kind
            parameters += _dataclass_parameters(kind)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    names = {parameter.name: f"--{parameter.name.replace('_', '-')}" for parameter in parameters}
    names |= {".".join(setting.path): setting.flag for setting in settings}

    def run(**values: Any) -> None:
        with user_errors(lambda message: named_by_flags(message, names)):
            if function.__name__ not in SHARED:
                refuse_several_processes(f"dpvision {function.__name__}")
            for name, kind in groups.items():
                if kind is Given:
                    values[name] = _nested(settings, values)
                    for setting in settings:
                        del values[setting.name]
                else:
                    values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            function(**values)

    # In the help the flags for beginners come first, then panel by panel.
    parameters.sort(key=_panel_number)
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {}
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run


def _dataclass_parameters(kind: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for name, parameter in inspect.signature(kind).parameters.items():
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name], name=name)


def _panel_number(parameter: inspect.Parameter) -> int:
    """The place of a flag's panel in the help; the panel without a name is the first."""
    titles = [getattr(info, "rich_help_panel", None) for info in getattr(parameter.annotation, "__metadata__", ())]
    return next((list(_PANELS.values()).index(title) + 1 for title in titles if title is not None), 0)


def named_by_flags(message: str, flags: Mapping[str, str]) -> str:
    """Name flags instead of fields in an error message.

    Args:
        message: the message of an error of the library.
        flags: the flag of each name or dotted key.

    Returns:
        The message with "privacy.delta" as "--delta (privacy.delta)", "clip_norm" as "--clip-norm" and "trained=last"
        as "--trained last". A plain word such as "steps" stays, and so does the name in "--space clip_norm=…".
    """

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if name not in flags or not ("." in name or "_" in name or value):
            return found[0]
        shown = f"{flags[name]} ({name})" if "." in name else flags[name]
        return f"{shown} {value[1:]}" if value else shown

    return re.sub(r"(?<![-\w./])(?<!--space )([a-z_]+(?:\.[a-z_]+)*)(=\w+)?(?![\w/])", flag, message)


def parse_options(texts: Sequence[str] | None) -> dict[str, bool | int | float | str]:
    """Read ``name=value`` pairs; whole numbers, numbers and true/false become values of that type.

    Raises:
        ArgumentError: a text has no name or no equals sign.
    """
    options: dict[str, bool | int | float | str] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ArgumentError(f"--option must look like NAME=VALUE, got {brief(text)!r}.")
        options[name] = _value(value)
    return options


def _value(text: str) -> bool | int | float | str:
    if text in {"true", "false"}:
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


_MOST_THREADS = 4096


def set_threads(threads: int | None) -> None:
    """Set the number of torch's threads; the run records the number that is in use."""
    if threads is None:
        return
    if not 1 <= threads <= _MOST_THREADS:
        raise ArgumentError(f"--threads must be from 1 to {_MOST_THREADS}, got {brief(threads)}.")
    import torch

    torch.set_num_threads(threads)
