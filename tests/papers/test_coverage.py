"""Coverage of the papers: every row has a command or an explanation, and every command exists."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from tools import coverage as tool
from tools.coverage import CoverageError

FOUND = tool.load()
ROWS = [row for rows in FOUND.papers.values() for row in rows]


def test_every_row_works_or_says_what_is_missing() -> None:
    assert len(ROWS) == 174
    assert [title.split(" (")[0] for title in FOUND.papers] == [
        "ScaleNorm, the thesis",
        "SmoothNets",
        "ScaleNorm, the paper",
        "Making the shoe fit",
        "Unlocking accuracy through scale",
    ]
    for row in ROWS:
        assert row.status in tool.STATES
        assert row.commands or row.page or row.status == "OUT OF SCOPE", row.item
        assert row.status == "WORKS" or len(row.note) > 20, row.item


@pytest.mark.parametrize("command", FOUND.commands)
def test_every_command_resolves(command: str) -> None:
    tool.resolve(command, FOUND.runs)
    tool.resolve(tool.quick_command(command, FOUND), FOUND.runs)


@pytest.mark.parametrize("command", FOUND.runs.values(), ids=FOUND.runs)
def test_every_run_that_commands_need_resolves(command: str) -> None:
    tool.resolve(command, FOUND.runs)


def test_pages_exist_and_exceptions_belong_to_commands() -> None:
    assert all((tool.ROOT / row.page).is_file() for row in ROWS if row.page)
    assert {*FOUND.quick, *FOUND.exits} <= set(FOUND.commands)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("dpvision reproduce table9", "TABLE must be one"),
        ("dpvision reproduce meanvar --rows nothing-*", "--rows must name rows"),
        ("dpvision reproduce meanvar --colour red", "No such option"),
        ("dpvision train --recipe nothing", "recipe must be the name of a recipe"),
        ("dpvision train --recipe mnist-shoefit-tanh --colour red", "No such option"),
        ("dpvision check resnet9 --option colour=red", "has no option colour"),
        ("dpvision check resnet99", "model must be a name"),
        ("dpvision tune digits --budget 3 --search nothing", "no ready-made search"),
        ("dpvision analyze runs/nothing --what hessian", "does not say how runs/nothing is made"),
        ("dpvision dance", "there is no command dance"),
        ("python -m pytest tests/nothing.py", "there is no tests/nothing.py"),
        ("python -m benchmarks --colour red", "No such option"),
        ("make coffee", "a command starts with"),
    ],
)
def test_a_command_that_names_what_does_not_exist_is_found(command: str, message: str) -> None:
    with pytest.raises(CoverageError, match=message):
        tool.resolve(command, FOUND.runs)


def test_the_page_is_generated_from_the_rows_and_the_results() -> None:
    assert tool.PAGE.read_text() == tool.page(FOUND, tool.read_results())
    results = tool.read_results()
    assert set(results) <= set(FOUND.commands), "results of commands that are gone"
    row = dataclasses.replace(ROWS[0], commands=("dpvision models",), note="", page="")
    shown = tool.page(
        dataclasses.replace(FOUND, papers={"A paper": (row,)}),
        {"dpvision models": {"date": "2026-01-02", "result": "ok"}},
    )
    assert f"| {row.where} | {row.item} | WORKS | `dpvision models` | 2026-01-02: ok |" in shown
    assert "1 rows: 1 WORKS, 0 PARTIAL, 0 OUT OF SCOPE." in shown


def rows_of(command: str, folder: Path | None = None) -> list[str]:
    words = shlex.split(tool.quick_command(command, FOUND, folder=folder))
    return words[words.index("--rows") + 1].split(",")


def test_rows_with_equal_smoke_tests_are_run_once() -> None:
    assert rows_of("dpvision reproduce de-noise") == ["cifar10-wrn16_4-eps8-batch1024-epochs25"]
    assert len(rows_of("dpvision reproduce groups-tableA.1")) == 12, "six norms, with and without ScaleNorm"
    assert len(rows_of("dpvision reproduce smoothnet-components")) == 14, "every network is another"
    pairs = rows_of("dpvision reproduce de-finetuning")
    assert pairs == ["cifar10-wrn28_10-head-eps1", "cifar10-wrn28_10-all-eps1"], "what is trained counts"


def test_a_smoke_test_of_another_table_is_not_repeated_but_every_table_runs_a_row(tmp_path: Path) -> None:
    finished = "cifar10-wrn16_4-eps8-batch4096-epochs100"
    release = tmp_path / "tables" / "de-noise" / "runs" / finished / "1" / "release"
    release.mkdir(parents=True)
    (release / "certificate.json").touch()
    assert rows_of("dpvision reproduce de-noise", tmp_path) == [finished], "read, not run"
    assert rows_of("dpvision reproduce de-compute", tmp_path) == ["cifar10-wrn16_4-eps8-batch1024-epochs25"]
    assert rows_of("dpvision reproduce de-cifar10", tmp_path) == ["cifar10-wrn40_4-eps1"]


def test_what_is_run_is_small() -> None:
    for command in FOUND.commands:
        quick = tool.quick_command(command, FOUND)
        large = ("cifar10", "fashionmnist") if quick.split()[:2] == ["dpvision", "tune"] else ()
        assert not any(f" {name} " in quick for name in large), quick
        if quick.startswith("dpvision reproduce"):
            assert "--scale quick" in quick
        if quick.startswith("dpvision train --recipe"):
            assert "--quick" in quick
