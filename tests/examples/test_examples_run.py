"""Each example runs as it is, and its certificate verifies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dpvision.release.verify import verify

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["own_loop.py"])
def test_an_example_runs_and_its_certificate_verifies(tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "verified: True" in done.stdout
    assert verify(tmp_path / "run").for_release


def test_the_example_of_an_own_loop_has_at_most_forty_lines_and_one_import_of_ours() -> None:
    lines = (EXAMPLES / "own_loop.py").read_text().splitlines()
    assert len(lines) <= 40
    assert sum("dpvision" in line and "import" in line for line in lines) == 1
