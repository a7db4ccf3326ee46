"""The README tells the truth: its Python runs, its commands and files exist."""

from __future__ import annotations

import re
from pathlib import Path

from dpvision.cli import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs(capsys: object) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - our own README


def test_every_command_that_the_readme_names_exists() -> None:
    known = {command.name for command in app.registered_commands}
    named = set(re.findall(r"^dpvision (\w+)", README, re.MULTILINE)) | {
        "resume",
        "evaluate",
        "predict",
        "report",
    }
    assert named <= known
    assert known == {name for name in known if name in README}


def test_every_file_that_the_readme_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", README)) - {"their", "s"}:
        assert f"\n{target}:" in makefile, target


def test_what_ci_runs_is_named_in_the_readme() -> None:
    for command in re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE):
        assert command in README, command
