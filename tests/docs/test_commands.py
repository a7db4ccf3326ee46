"""Every command that a page shows is understood, and every command that exists is on its page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from dpvision.cli import app, command_with_flags
from dpvision.papers import all_recipes

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
COMMANDS = [
    (page.relative_to(ROOT), line)
    for page in PAGES
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    if not language
    for line in re.findall(r"^dpvision (.*)$", block.replace("\\\n", " "), re.MULTILINE)
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page.name}-{line[:40]}" for page, line in COMMANDS])
def test_a_command_that_a_page_shows_is_understood(page: Path, line: str) -> None:
    known: Any = typer.main.get_command(app)
    name, *arguments = shlex.split(line, comments=True)
    assert name in known.commands, f"{page}: there is no command {name}"
    command = command_with_flags(name)
    assert command.make_context(name, arguments).params is not None  # a wrong flag or value raises


def test_every_command_is_on_the_page_of_commands_and_in_the_readme() -> None:
    names = {command.name for command in app.registered_commands}
    for page in (ROOT / "docs" / "reference" / "commands.md", ROOT / "README.md"):
        text = page.read_text()
        assert not {name for name in names if name is None or not re.search(rf"\b{name}\b", text)}


def test_every_recipe_that_a_page_runs_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"--recipe ([a-z0-9._-]+)", page.read_text())}
    assert named <= {recipe.name for recipe in all_recipes()}
