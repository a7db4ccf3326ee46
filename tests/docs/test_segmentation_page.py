"""docs/segmentation.md tells the truth: its commands parse, its names exist, its Python compiles."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from dpvision.cli import app
from dpvision.inference import MaskMetrics
from dpvision.models.losses import LOSSES
from dpvision.papers import find_recipe

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "segmentation.md").read_text()
COMMANDS = re.findall(r"^dpvision (.*)$", PAGE, re.MULTILINE)


def test_every_command_of_the_page_is_understood() -> None:
    known: Any = typer.main.get_command(app)
    assert len(COMMANDS) >= 5
    for line in COMMANDS:
        name, *arguments = shlex.split(line)
        command = known.commands[name]
        context = command.make_context(name, arguments)  # a wrong flag or value raises
        assert context.params


def test_every_recipe_of_the_page_exists() -> None:
    names = re.findall(r"--recipe (\S+)", PAGE)
    assert names
    for name in names:
        find_recipe(name)


def test_losses_and_figures_have_the_names_that_the_page_gives_them() -> None:
    table = PAGE[PAGE.index("## Figures") : PAGE.index("## Masks")]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == {field.name for field in fields(MaskMetrics)} - {"loss", "count"}
    losses = re.findall(r"^    (\w+) {2,}", PAGE, re.MULTILINE)
    assert sorted(losses) == sorted(LOSSES)


def test_the_python_of_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "segmentation.md", "exec"), {})  # noqa: S102 - our own page
