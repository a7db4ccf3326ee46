"""From flags, recipes and files to a configuration."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpvision.config import RunConfig, parse_config
from dpvision.data.safe_read import open_regular
from dpvision.errors import ArgumentError, brief

LARGEST_CONFIG = 2**20
MAX_NAME_BYTES = 100


def build_config(
    *,
    recipe: str | None,
    file: Path | None,
    given: Mapping[str, Any],
    model: str | None,
    options: Mapping[str, Any],
    scale: str = "paper",
) -> RunConfig:
    """A recipe (at that scale) or a file as the base, flags on top."""
    values = _base(recipe, file, scale)
    if given.get("data", {}).get("source") is not None and isinstance(values.get("data"), dict):
        values["data"].pop("masks", None)  # those of the base belong to its own pictures
    for section, entries in given.items():
        if isinstance(entries, Mapping):
            chosen = {name: value for name, value in entries.items() if value is not None}
            if chosen:
                values[section] = {**_section(values, section), **chosen}
        elif entries is not None:
            values[section] = entries
    if model is not None:
        values["model"] = {"name": model, "options": dict(options)}
    elif options:
        values["model"] = _with_options(_section(values, "model"), options)
    data = values["data"] = _section(values, "data")
    if "source" not in data:
        raise ArgumentError("name what to train on: a folder, an .npz file, a known dataset, or --recipe NAME.")
    if isinstance(data["source"], str) and "name" not in values:
        values["name"] = _run_name(data["source"])
    _reopen_noise(values, given)
    values.setdefault("privacy", {})
    return parse_config(values)


def settle(config: RunConfig, *, recipe: str | None, output: Path | None, quick: bool) -> tuple[RunConfig, Path]:
    """The configuration with its data in place (for ``quick``: made up, beside the run), and the run's folder."""
    folder = output or free_folder(Path("runs"), f"{config.name}-quick" if quick else config.name)
    if recipe is None and not quick:
        return config, folder
    if recipe is None:
        raise ArgumentError("--quick needs --recipe: it tries a recipe out on made-up pictures.")
    from dpvision.papers import place_data, quick_config

    return quick_config(config, folder.parent / "made-up") if quick else place_data(config), folder


def _base(recipe: str | None, file: Path | None, scale: str) -> dict[str, Any]:
    if recipe is not None and file is not None:
        raise ArgumentError("give --recipe or --config, not both.")
    if scale != "paper" and recipe is None:
        raise ArgumentError("--scale needs --recipe: it chooses a version of a recipe.")
    if recipe is not None:
        from dpvision.papers import find_recipe

        return find_recipe(recipe).at(scale).model_dump(mode="json")
    if file is None:
        return {}
    try:
        with open_regular(file) as opened:
            content = opened.read(LARGEST_CONFIG + 1)
        if len(content) > LARGEST_CONFIG:
            raise ArgumentError(f"--config {file} must have at most {LARGEST_CONFIG} bytes.")
        return tomllib.loads(content.decode())
    except ArgumentError:
        raise
    except OSError as error:
        raise ArgumentError(f"can't read --config {file}: {error.strerror}.") from error
    # The parser's own errors are of this kind too; a number of too many digits and too many brackets are not its own.
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"--config {file} is not TOML: {brief(error)}.") from error


def _section(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A table of the file; left out, it is empty."""
    found = values.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise ArgumentError(f"{name} must be a table of settings, got {brief(found)}.")
    return dict(found or {})


def _run_name(source: str) -> str:
    """What a run on that source is called where it has no name: the source's own, as far as a folder may have it."""
    stem = Path(source).stem.replace("\\", "_").replace("\0", "_")
    return stem.encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore") or "run"


def _reopen_noise(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """A target on the command line replaces the base's noise, unless the command line gives both."""
    asked = given["privacy"]
    if asked["target_epsilon"] is not None and asked["noise_multiplier"] is None:
        values["privacy"] = {k: v for k, v in _section(values, "privacy").items() if k != "noise_multiplier"}


def _with_options(model: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    if "name" not in model:
        raise ArgumentError("--option needs --model or a recipe that names one.")
    return {"name": model["name"], "options": {**_section(model, "options"), **options}}


def parse_options(texts: list[str] | None) -> dict[str, bool | int | float | str]:
    """``name=value`` pairs; numbers and true/false become what they look like."""
    options: dict[str, bool | int | float | str] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ArgumentError(f"--option must look like name=value, got {brief(text)!r}.")
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


def free_folder(parent: Path, name: str) -> Path:
    """The first of NAME-1, NAME-2 … that does not exist."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"
