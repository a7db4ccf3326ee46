"""The guide to own models: its files, commands and Python lines work as they are printed."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from dpvision.cli import app
from dpvision.own_code import read_source
from tiny_runs import synthetic_images

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "own-model.md").read_text()
FAST = "--num-units 100 --delta 1e-3 --steps 4 --expected-batch-size 20 --learning-rate 0.1 --image-size 8 --output RUN"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files and some scans, which is the current one."""
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(text)
    images, labels = synthetic_images(120)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = tmp_path / "scans" / f"class {label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(image[0])).save(place / f"{number}.png")
    Image.fromarray(np.asarray(images[0, 0])).save(tmp_path / "scan1.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_page_works_in_its_order(folder: Path) -> None:
    commands = re.findall(r"^dpvision .*$", PAGE, re.MULTILINE)
    assert [line.split()[1] for line in commands] == ["check", "train", "evaluate", "predict", "resume"]
    for line in commands:
        text = f"{line} {FAST}" if line.startswith("dpvision train") else line
        result = CliRunner().invoke(app, shlex.split(text)[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"
    sha256 = read_source(folder / "my_model.py").sha256
    assert sha256 in (folder / "RUN" / "release" / "certificate.md").read_text()


def test_the_python_lines_of_the_page_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "dpvision.train" in b)
    privacy = '{"target_epsilon": 3.0, "steps": 4, "num_units": 100, "expected_batch_size": 20}'
    code = block.replace('{"target_epsilon": 3.0}', privacy).replace('"./scans"}', '"./scans", "image_size": 8}')
    monkeypatch.syspath_prepend(folder)
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102 - our own page
    assert {"my_model", "my_loss"} <= sys.modules.keys()
    for name in ("my_model", "my_loss"):
        monkeypatch.delitem(sys.modules, name)
    assert "released" in names
