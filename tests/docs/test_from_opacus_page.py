"""The guide for Opacus users: its blocks run one after the other, and its table names what the code accepts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dpvision.compat.privacy_engine import Options

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guides" / "from-opacus.md").read_text()


def test_the_python_blocks_of_the_page_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(block, "from-opacus.md", "exec"), names)  # noqa: S102 - our own page
    epsilon, released = capsys.readouterr().out.splitlines()
    assert 2.9 < float(epsilon) <= 3
    assert released == "runs/private-1 True"


def test_the_imports_of_the_page_work() -> None:
    imports = re.findall(r"`(from dpvision\.compat[^`]* import \w+)`", PAGE)
    assert len(imports) == 3
    for line in imports:
        exec(line, {})  # noqa: S102 - our own page


def test_options_that_the_page_names_exist() -> None:
    for name in ("num_units", "epochs", "steps", "target_epsilon", "poisson_sampling", "loss_reduction", "clipping"):
        assert name in Options.__annotations__
        assert f"`{name}" in PAGE
