"""``dpvision plan``: limits on attacks, measured times and curves, as a user types them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpvision.cli import app

SMALL = "plan --num-units 2000 --delta 1e-4 --expected-batch-size 200 --expected-batch-size 1000 --epochs 5"


def run(line: str) -> Any:
    return CliRunner().invoke(app, line.split(), catch_exceptions=False)


def test_a_limit_on_attacks_takes_the_place_of_epsilon() -> None:
    result = run(f"{SMALL} --target-risk advantage:0.2 --json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["target_risk"] == "advantage:0.2"
    assert "target_epsilon" not in found
    assert len(found["rows"]) == 2
    assert all(row["signal_per_step"] == pytest.approx(1 / row["effective_noise"]) for row in found["rows"])


@pytest.mark.parametrize("units", [1_500, 50_000])
def test_the_table_cuts_no_number_off_in_a_terminal_of_80_columns(units: int) -> None:
    line = f"plan --num-units {units} --target-epsilon 3 --delta 1e-5"
    result = CliRunner().invoke(app, line.split(), env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "per step" in result.stdout
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_time_of_every_row_is_estimated_from_measured_steps() -> None:
    result = run(f"{SMALL} --target-epsilon 3 --model linear --image-size 8 --in-channels 1 --json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    pace = found["measured_step"]
    assert pace["synthetic_images"] is True
    assert pace["parameters"] == 650
    for row in found["rows"]:
        one = pace["seconds_fixed"] + pace["seconds_per_unit"] * row["expected_batch_size"]
        assert row["seconds"] == pytest.approx(one * row["steps"])
        assert row["seconds"] > 0
        assert row["signal_over_norm"] == pytest.approx(row["signal_per_step"] / 650**0.5)
    shown = run(f"{SMALL} --target-epsilon 3 --model linear --image-size 8 --in-channels 1").stdout
    assert "synthetic" in shown


def test_curves_are_drawn_and_written_as_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "curves"
    result = run(f"{SMALL} --target-epsilon 3 --curves {folder} --needed-steps 100 --json")
    assert result.exit_code == 0, result.stderr
    names = ("epsilon-over-steps", "noise-at-a-fixed-batch", "epochs-over-batch")
    values = json.loads((folder / "curves.json").read_text())
    assert values["needed_steps"] == 100
    for name in names:
        with (folder / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [list(row) for row in values["curves"][name]] == [list(row) for row in rows]
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (folder / f"{name}.svg").read_bytes()


def test_a_path_that_can_not_be_printed_is_escaped(tmp_path: Path) -> None:
    place = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b")
    result = run(f"{SMALL} --target-epsilon 3 --curves {place}")
    assert result.exit_code == 0, result.stderr
    assert "curves: " in result.stdout
    assert "\x1b" not in result.stdout
    result.stdout.encode()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--target-epsilon 3 --target-risk advantage:0.1", "got both"),
        ("--target-risk tpr:0.5", "tpr:LIMIT@FPR"),
        ("--target-epsilon 3 --image-size 8", "--image-size needs --model"),
        ("--target-epsilon 3 --needed-steps 8", "--needed-steps needs --curves"),
        ("--target-epsilon 3 --curves nowhere/to/be/found", "in a folder that exists"),
        ("--target-epsilon 3 --model resnet99", "resnet99"),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_code_two(more: str, message: str) -> None:
    result = run(f"{SMALL} {more}")
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
