"""The README tells the truth: its Python runs, and its make targets exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102 - our own README
    assert capsys.readouterr().out.endswith("% at epsilon 3.00\n")
    assert (tmp_path / "runs" / "digits" / "release" / "certificate.json").is_file()


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
