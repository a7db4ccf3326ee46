"""The guide to own training loops: its blocks run one after the other, as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "own-loop.md").read_text()


def test_the_python_blocks_of_the_page_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for block in blocks[:-1]:
        exec(compile(block, "own-loop.md", "exec"), names)  # noqa: S102 - our own page
    assert "True" in capsys.readouterr().out
    names["run"].close()  # type: ignore[attr-defined] - as the end of the first process
    exec(compile(blocks[-1], "own-loop.md", "exec"), names)  # noqa: S102 - our own page
    assert capsys.readouterr().out == "3 0\n"
