"""The tutorial states what its run prints, and the notebook works cell by cell; test_blocks.py runs the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpvision.cli import app

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
NOTEBOOK: dict[str, Any] = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text())
(MAKE_DIGITS,) = re.findall(r"```python\n(# make_digits\.py\n.*?)```", PAGE, re.DOTALL)
(TRAIN,) = re.findall(r"^dpvision (train \./my-digits --target-epsilon 3 --num-units 1500)$", PAGE, re.MULTILINE)
(SUMMARY,) = re.findall(r"^```text\n(accuracy .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_tutorial_states_the_accuracy_and_the_lines_that_a_run_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(MAKE_DIGITS, "make_digits.py", "exec"), {})  # noqa: S102 - our own page
    assert [len(list(tmp_path.glob(f"my-digits/{part}/*/*.png"))) for part in ("train", "test")] == [1500, 297]
    result = CliRunner().invoke(app, shlex.split(TRAIN))
    assert result.exit_code == 0, result.output
    printed = re.findall(r"^accuracy +([\d.]+) %", result.output, re.MULTILINE)
    stated = re.findall(r"^accuracy +([\d.]+) %", SUMMARY, re.MULTILINE)
    assert float(printed[0]) == pytest.approx(float(stated[0]), abs=8)  # the page states one run; noise differs
    labels = [re.split(r"  |: ", line)[0] for line in SUMMARY.splitlines()]
    assert labels == [re.split(r"  |: ", line)[0] for line in result.stdout.splitlines() if line][-len(labels) :]


def test_every_cell_of_the_notebook_runs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)  # noqa: S102 - our own notebook
    names["plt"].close("all")
    printed = capsys.readouterr().out
    assert "at epsilon 3.00, delta 0.0001\n" in printed
    assert "in order\n40 steps" in printed
    assert (tmp_path / "runs" / "notebook" / "release" / "report.html").is_file()
    assert "<th style" in names["result"]._repr_html_()
    assert len(cells) == 5


def test_the_notebook_is_stored_without_outputs_and_its_links_exist() -> None:
    assert NOTEBOOK["nbformat"] == 4
    for cell in NOTEBOOK["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        for target in re.findall(r"\]\(([^)#]+)\)", "".join(cell["source"])):
            assert (ROOT / "examples" / target).exists(), target
