"""The tutorial and the notebook work as they are printed, block after block."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpvision.cli import app

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
TIERS = (ROOT / "docs" / "concepts" / "tiers.md").read_text()
NOTEBOOK: dict[str, Any] = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text())
SCRIPTS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for _, block in BLOCKS for line in block.splitlines() if line.startswith("dpvision ")]
# Only the speed of the test: fewer steps and a smaller model than dpvision would choose.
FAST = "--model linear --image-size 8 --delta 1e-4 --steps 8 --expected-batch-size 256 --learning-rate 2 --clip-norm 1"


def run_script(name: str, folder: Path) -> None:
    """Write a script of the page into a folder and run it there."""
    (folder / name).write_text(SCRIPTS[name])
    runpy.run_path(str(folder / name))


def run_commands(*, extra: str) -> dict[str, str]:
    """Run the page's commands in order; return the output of each, by its verb."""
    outputs: dict[str, str] = {}
    for line in COMMANDS:
        _, verb, *arguments = shlex.split(line)
        result = CliRunner().invoke(app, [verb, *arguments, *(shlex.split(extra) if verb == "train" else [])])
        assert result.exit_code == 0, f"{line}: {result.output}"
        outputs[verb] = result.output
    return outputs


def test_every_block_of_the_tutorial_works_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(SCRIPTS) == ["make_digits.py", "use_model.py"]
    assert len(re.findall(r"^```python$", PAGE, re.MULTILINE)) == len(SCRIPTS)
    run_script("make_digits.py", tmp_path)
    assert [len(list(tmp_path.glob(f"my-digits/{part}/*/*.png"))) for part in ("train", "test")] == [1500, 297]
    outputs = run_commands(extra=FAST)
    assert list(outputs) == ["train", "verify", "predict", "evaluate"]
    assert "In order" in outputs["verify"]
    capsys.readouterr()
    run_script("use_model.py", tmp_path)
    assert capsys.readouterr().out.startswith("verified: True, epsilon 3.00 at delta 0.0001\n")


@pytest.mark.slow
def test_the_tutorial_reaches_the_accuracy_that_it_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_script("make_digits.py", tmp_path)
    printed = re.findall(r"^accuracy +([\d.]+) %", run_commands(extra="")["train"], re.MULTILINE)
    stated, spread = map(float, re.findall(r"gave ([\d.]+) ± ([\d.]+) %", PAGE)[0])
    assert float(printed[0]) == pytest.approx(stated, abs=6 * spread)  # six standard deviations


def test_the_mechanism_of_the_page_on_tiers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TIERS, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "tiers.md", "exec"), names)  # noqa: S102 - our own page
    assert capsys.readouterr().out == "epsilon 2 at delta 0.0001 (add_remove of one example, PLD)\n"
    assert names["private"].step == 19


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
