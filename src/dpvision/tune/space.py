"""The search space: which settings of a run are varied, and over which values.

A dimension is written as text: ``log:0.01:4``, ``float:0:0.9``, ``int:2:8``, ``choice:sgd,adam``, or ``times:0.1:10``,
a tenth to ten times what a run takes by default. A fourth part is the number of values on a grid (``log:0.1:4:5``).
Names are those of the configuration, ``optimizer.learning_rate`` or
just ``learning_rate`` where only one section has such a field; ``option.groups`` is an option of the model, and
``option.groups.1``, ``option.groups.2`` … its value in each stage, for options that take one number a stage.

Nothing here reads data: a wrong space is refused before anything is spent.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, final, get_args

from pydantic import BaseModel

from dpvision.config import RunConfig, parse_config
from dpvision.errors import ArgumentError, brief, did_you_mean

Value = bool | int | float | str
Kind = Literal["log", "times", "float", "int", "choice"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_DIMENSIONS = 16
MOST_CHOICES = 64
USUAL_GRID = 5
_OPTION = ("model", "options")
_SECTIONS = ("model", "views", "optimizer", "schedule", "averaging", "transfer", "loss")
_OF_PRIVACY = ("expected_batch_size", "steps", "epochs", "clip_norm", "clipping", "unit_norm")
CHARGING = frozenset({"privacy.expected_batch_size", "privacy.steps", "privacy.epochs"})
"""Settings that change what a trial costs; all others only change what is done with the same noise."""
_LARGEST_FILE = 2**20


@final
@dataclass(frozen=True)
class Dimension:
    """One setting and its values.

    Attributes:
        path: the keys of the setting in a configuration.
        kind: ``log`` and ``float`` are ranges of numbers, ``int`` of whole numbers, ``choice`` a list; ``times`` is a
            ``log`` range in units of the value that a run takes by default, until ``absolute_space`` replaces it.
        low: the smallest value of a range.
        high: the largest value of a range.
        choices: the values of a choice.
        points: values of a range on a grid.
        text: as it was written.
    """

    path: tuple[str, ...]
    kind: Kind
    low: float
    high: float
    choices: tuple[Value, ...]
    points: int
    text: str

    @property
    def name(self) -> str:
        """The dotted name of the setting."""
        return f"option.{'.'.join(self.path[2:])}" if self.path[:2] == _OPTION else ".".join(self.path)

    def at(self, share: float) -> Value:
        """Return the value below which a ``share`` in [0, 1) of the distribution lies: uniform, or uniform in log."""
        if self.kind == "choice":
            return self.choices[min(len(self.choices) - 1, int(share * len(self.choices)))]
        if self.kind == "int":
            return int(self.low) + min(int(self.high - self.low), int(share * (self.high - self.low + 1)))
        if self.kind in ("log", "times"):
            return math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return self.low + share * (self.high - self.low)

    def grid(self) -> list[Value]:
        """Return the values of this dimension on a grid, ends included, each once."""
        if self.kind == "choice":
            return list(self.choices)
        shares = [index / (self.points - 1) for index in range(self.points)]
        if self.kind == "int":
            values = [round(self.low + share * (self.high - self.low)) for share in shares]
            return list(dict.fromkeys(values))
        return [self._inside(share) for share in shares]

    def _inside(self, share: float) -> float:
        return min(self.high, max(self.low, float(self.at(share))))


@final
@dataclass(frozen=True)
class SearchSpace:
    """All dimensions of a search."""

    dimensions: tuple[Dimension, ...]

    @property
    def texts(self) -> dict[str, str]:
        """Each dimension as it was written, by name."""
        return {dimension.name: dimension.text for dimension in self.dimensions}

    @property
    def changes_cost(self) -> bool:
        """Whether trials may differ in what they cost."""
        return any(".".join(dimension.path) in CHARGING for dimension in self.dimensions)

    def drawn(self, shares: Sequence[float]) -> dict[str, Value]:
        """Return the settings at one independent uniform number per dimension."""
        return {each.name: each.at(share) for each, share in zip(self.dimensions, shares, strict=True)}

    @property
    def points(self) -> int:
        """Number of combinations on the grid."""
        return math.prod(len(dimension.grid()) for dimension in self.dimensions)

    def grid(self) -> list[dict[str, Value]]:
        """Return every combination of the grids of all dimensions."""
        names = [dimension.name for dimension in self.dimensions]
        return [
            dict(zip(names, values, strict=True)) for values in itertools.product(*map(Dimension.grid, self.dimensions))
        ]


def parse_space(texts: Mapping[str, Any]) -> SearchSpace:
    """Read a search space.

    Args:
        texts: the values of each setting by its name, as text; a list is a choice.

    Returns:
        The space.

    Raises:
        ArgumentError: a name is unknown or may not be searched, a range is empty, or a text has no meaning.
    """
    if not texts:
        raise ArgumentError("name at least one setting to search, such as --space learning_rate=log:0.01:4.")
    if len(texts) > MOST_DIMENSIONS:
        raise ArgumentError(f"a search space has at most {MOST_DIMENSIONS} settings, got {len(texts)}.")
    found = tuple(_dimension(name, text) for name, text in texts.items())
    names = [dimension.name for dimension in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentError(f"{twice} is in the search space twice.")
    if {"privacy.steps", "privacy.epochs"} <= set(names):
        raise ArgumentError("steps and epochs exclude each other: search one of them.")
    _require_stages(found)
    return SearchSpace(found)


def _require_stages(dimensions: Sequence[Dimension]) -> None:
    """Refuse an option by stage with a gap, or beside the option as a whole."""
    paths = [dimension.path for dimension in dimensions if dimension.path[:2] == _OPTION]
    for option in {path[2] for path in paths}:
        stages = sorted(int(path[3]) for path in paths if path[2] == option and len(path) > len(_OPTION) + 1)
        if stages and (stages != list(range(1, len(stages) + 1)) or (*_OPTION, option) in paths):
            raise ArgumentError(f"option.{option} needs every stage from 1 on, each once, and no value for all.")


def read_space(file: Path) -> dict[str, Any]:
    """Read the table ``[space]`` of a TOML file.

    Args:
        file: the file, of at most 1 MiB.

    Returns:
        The values of each setting, for ``parse_space``.

    Raises:
        ArgumentError: the file can't be read, or has no such table.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise ArgumentError(f"{file} must have at most {_LARGEST_FILE} bytes.")
        values = tomllib.loads(content.decode())
    except OSError as error:
        raise ArgumentError(f"can't read the search space {file}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"the search space {file} is not TOML: {brief(error)}.") from error
    space = values.get("space")
    if not isinstance(space, dict):
        raise ArgumentError(f"{file} must have a table [space] with one line per setting.")
    return _flat(space)


def _flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Join nested tables to dotted names."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return found


def _dimension(name: str, text: Any) -> Dimension:
    path = _path_of(name)
    if isinstance(text, list):
        return _choice(path, tuple(text), f"choice:{','.join(map(str, text))}")
    if not isinstance(text, str):
        raise ArgumentError(f"--space {name} must be a text such as log:0.01:4 or a list of values, got {brief(text)}.")
    kind, _, rest = text.partition(":")
    if kind == "choice":
        return _choice(path, tuple(_value(part) for part in rest.split(",") if part), text)
    if kind not in KINDS:
        raise ArgumentError(f"--space {name} must begin with one of {', '.join(KINDS)}, got {brief(text)}.")
    parts = rest.split(":")
    numbers = [_number(part) for part in parts]
    if len(parts) not in (2, 3) or any(number is None for number in numbers):
        raise ArgumentError(f"--space {name} must look like {kind}:LOW:HIGH, got {brief(text)}.")
    low, high = (float(number) for number in numbers[:2] if number is not None)
    points = int(numbers[2] or 0) if len(parts) == 3 else USUAL_GRID
    if not low < high:
        raise ArgumentError(f"the range of --space {name} is empty: {low:g} is not below {high:g}.")
    if kind in ("log", "times") and not low > 0:
        raise ArgumentError(f"the range of --space {name} must begin above 0 with {kind}, got {low:g}.")
    if kind == "int" and (low != int(low) or high != int(high)):
        raise ArgumentError(f"the range of --space {name} must be whole numbers, got {brief(text)}.")
    if not 2 <= points <= MOST_CHOICES:
        raise ArgumentError(f"the grid of --space {name} must have 2 to {MOST_CHOICES} values, got {points}.")
    return Dimension(path, kind, low, high, (), points, text)  # pyright: ignore[reportArgumentType]


def _choice(path: tuple[str, ...], values: tuple[Any, ...], text: str) -> Dimension:
    plain = all(isinstance(value, (bool, int, float, str)) for value in values)
    if not plain or not 1 <= len(values) <= MOST_CHOICES or len(set(map(repr, values))) < len(values):
        raise ArgumentError(
            f"--space {'.'.join(path)} must have 1 to {MOST_CHOICES} different values to choose from, got "
            f"{brief(text)}."
        )
    return Dimension(path, "choice", 0.0, 0.0, values, len(values), text)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _path_of(name: str) -> tuple[str, ...]:
    """Find the setting that a name means."""
    if name.startswith(("option.", "model.options.")):
        option, _, stage = name.removeprefix("model.").partition(".")[2].partition(".")
        if not option or (stage and not (stage.isdecimal() and 1 <= int(stage) <= MOST_DIMENSIONS)):
            raise ArgumentError(f"an option is option.NAME, or option.NAME.STAGE from 1 on, got {brief(name)}.")
        return (*_OPTION, option, str(int(stage))) if stage else (*_OPTION, option)
    known = {".".join(path): path for path in _searchable(RunConfig, ())}
    if name in known:
        return known[name]
    ending = [path for dotted, path in known.items() if dotted.rpartition(".")[2] == name]
    if len(ending) == 1:
        return ending[0]
    if ending:
        names = ", ".join(".".join(path) for path in ending)
        raise ArgumentError(f"{name} is a setting of several sections: write one of {names}.")
    leaves = [dotted.rpartition(".")[2] for dotted in known]
    choices = leaves if get_close_matches(name, leaves) else list(known)
    raise ArgumentError(f"--space {brief(name)} is not a setting that can be searched. {did_you_mean(name, choices)}")


def _searchable(section: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The settings that change the model or how it is trained; none that changes the data, the unit or the promise."""
    for name, field in section.model_fields.items():
        path = (*above, name)
        inner = [
            kind
            for kind in (field.annotation, *get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if path[0] == "privacy":
            if inner:
                yield from _searchable(inner[0], path)
            elif path[-1] in _OF_PRIVACY:
                yield path
        elif path[0] in _SECTIONS:
            if inner:
                yield from (() if name == "prior" else _searchable(inner[0], path))
            elif name not in ("options", "sha256", "rename", "public_metric", "source", "licence"):
                yield path


def with_settings(base: RunConfig, settings: Mapping[str, Value]) -> RunConfig:
    """Return the configuration with these settings.

    Args:
        base: the configuration that the search starts from; what it left open stays open.
        settings: values by the names of dimensions.

    Raises:
        ArgumentError: the configuration refuses a value or a combination.
    """
    values = base.model_dump(mode="python", exclude_unset=True)
    of_stages: dict[str, dict[int, Value]] = {}
    for name, value in settings.items():
        path = _path_of(name)
        if path[:2] == _OPTION and len(path) > len(_OPTION) + 1:
            of_stages.setdefault(path[2], {})[int(path[3])] = value
            continue
        section = values
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
        if path == ("privacy", "epochs"):
            section.pop("steps", None)
        if path == ("privacy", "steps"):
            section.pop("epochs", None)
    for option, stages in of_stages.items():
        text = ",".join(str(stages[stage]) for stage in sorted(stages))
        values.setdefault("model", {}).setdefault("options", {})[option] = text
    return parse_config(values)


def absolute_space(space: SearchSpace, defaults: RunConfig) -> dict[str, str]:
    """Replace every range in units of a default by the range itself.

    Args:
        space: the space as it was asked for.
        defaults: the configuration of a run in which nothing is left open. It follows from public facts only.

    Returns:
        The texts of all dimensions, by name.

    Raises:
        ArgumentError: a run has no default above 0 for a setting.
    """
    texts = space.texts
    for dimension in space.dimensions:
        if dimension.kind == "times":
            value: Any = defaults
            for key in dimension.path:
                value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
            if not isinstance(value, (int, float)) or not value > 0:
                raise ArgumentError(
                    f"--space {dimension.name} has no default above 0 that {dimension.text} could multiply: give a "
                    "range such as log:0.1:4."
                )
            low, high = value * dimension.low, value * dimension.high
            texts[dimension.name] = f"log:{low:.6g}:{high:.6g}:{dimension.points}"
    return texts


def require_option_owner(config: RunConfig, space: SearchSpace) -> None:
    """Refuse to search options of a model that is not named.

    Raises:
        ArgumentError: names the first option.
    """
    option = next((each for each in space.dimensions if each.path[:2] == _OPTION), None)
    searched = any(each.path == ("model", "name") for each in space.dimensions)
    if option is not None and config.model is None and not searched:
        raise ArgumentError(f"--space {option.name} is an option of a model: name the model with --model.")


def check_space(base: RunConfig, space: SearchSpace) -> None:
    """Refuse a space some of whose values the configuration refuses: every end of a range, every choice.

    Raises:
        ArgumentError: names the first refused value.
    """
    first = {each.name: each.grid()[0] for each in space.dimensions}
    for dimension in space.dimensions:
        for value in dimension.grid():
            with_settings(base, {**first, dimension.name: value})
