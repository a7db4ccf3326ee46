"""The README tells the truth: its Python runs, and its make targets exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_expression_for_a_configuration_from_a_paper_works() -> None:
    (code,) = re.findall(r"`(dpvision\.papers\.[^`]+)`", README)
    import dpvision

    assert isinstance(eval(code, {"dpvision": dpvision}), dpvision.RunConfig)  # noqa: S307 - our own README


def test_every_make_target_that_the_readme_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)`", README))
    assert {"demo", "test", "lint"} <= targets
    for target in targets:
        assert f"\n{target}:" in makefile, target


def test_what_ci_runs_is_named_in_the_readme() -> None:
    for command in re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE):
        assert command in README, command
