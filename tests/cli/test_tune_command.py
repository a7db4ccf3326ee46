"""``dpvision tune`` as a user types it: refusals in one line, resume, figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpvision.cli import app
from dpvision.cli.tune_command import TuneFlags, wanted_search
from dpvision.release.verify import verify
from dpvision.tune.ready_made import READY_MADE, ready_made
from dpvision.tune.search_plan import parse_settings
from fixed_keys import numbered_secrets
from tiny_searches import run_search, search_images

SPACE = "--space learning_rate=log:0.1:4"


@pytest.fixture(autouse=True)
def _same_secrets() -> Iterator[None]:
    """Of 120 images none might be held out for the scores."""
    with numbered_secrets("commands that search"):
        yield


def run(line: str) -> Any:
    return CliRunner().invoke(app, ["tune", *line.split()], catch_exceptions=False)


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    source = search_images(tmp_path)
    file = tmp_path / "trial.toml"
    file.write_text(
        f'evaluations = 1\n[data]\nsource = "{source}"\n[model]\nname = "linear"\n'
        "[privacy]\ntarget_epsilon = 3.0\ndelta = 1e-3\nnum_units = 120\nexpected_batch_size = 30\nsteps = 6\n"
    )
    return file


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"digits {SPACE}", "needs a budget"),
        ("digits --budget 3", "name at least one setting"),
        ("digits --budget 3 --space learning_rat=log:0.1:4", "learning_rat is not a setting"),
        ("digits --budget 3 --space learning_rate=log:4:4", "the range of --space learning_rate is empty"),
        ("digits --budget 3 --space learning_rate", "--space must look like"),
        ("digits --budget 3 --space momentum=float:0:2", "--momentum"),
        (f"digits --budget 0.0001 {SPACE}", "Nothing was spent"),
        ("digits --budget 3 --space expected_batch_size=choice:100,100000", "at most --num-units"),
        (f"digits --budget 3 {SPACE} --sampler tpe --price best_of", "independent random draws"),
        (f"digits --budget 3 {SPACE} --sampler grid --trials 3", "all of its 5 points"),
        (f"digits --budget 3 {SPACE} --search-data nothing.npz", "nothing.npz"),
        (f"digits --budget 3 {SPACE} --score private --pruner patience", "public scores only"),
        (f"digits --budget 3 {SPACE} --target-epsilon 3", "not both"),
        (f"digits --budget 3 {SPACE} --price best_of --figures x", "leave --figures out"),
        ("digits --budget 3 --search nothing", "There are: rate_and_batch"),
        ("digits --budget 3 --search group_sizes_by_stage --model resnet9 --option norm=layer --resume x", "leave"),
        ("digits --budget 3 --space modell=choice:a,b", "Did you mean --model (model.name)?"),
        ("digits --budget 3 --space option.pool=choice:1,2", "name the model with --model"),
        ("digits --budget 3 --space momentum=times:0.1:10", "no default above 0"),
        ("digits --budget 3 --space lr=times:0:10", "must begin above 0 with times"),
        (f"digits --budget 3 {SPACE} --pruner patience --evaluations 15", "waits for 15 evaluations"),
        (f"digits --budget 3 {SPACE} --storage postgresql://me:geheim@127.0.0.1:1/x", "storage of the trials"),
    ],
)
def test_a_bad_search_ends_with_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(f"{line} --output {tmp_path / 'search'}")
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert "geheim" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_search_is_run_resumed_and_drawn_from_the_command_line(tmp_path: Path, settings: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text('[space]\nlearning_rate = "log:0.1:4"\nclip_norm = [0.5, 1.0]\n')
    folder, figures = tmp_path / "search", tmp_path / "figures"
    result = run(
        f"--config {settings} --space-file {space} --trials 3 --score-noise 30 --output {folder} --json "
        f"--figures {figures}"
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found["trials"]) == 3
    assert found["epsilon"] <= 3.0
    assert verify(folder).problems == ()
    drawn = sorted(path.name for path in figures.glob("*.png"))
    assert {"accuracy-over-epsilon.png", "parallel-coordinates.png"} <= set(drawn)
    ledger = (folder / "release" / "search.jsonl").read_bytes()
    again = run(f"--resume {folder} --figures {tmp_path / 'again'} --json")
    assert again.exit_code == 0, again.stderr
    assert sorted(path.name for path in (tmp_path / "again").glob("*.png")) == drawn
    assert json.loads(again.stdout)["epsilon"] == found["epsilon"]
    assert (folder / "release" / "search.jsonl").read_bytes() == ledger
    refused = run(f"--resume {folder} --trials 5")
    assert refused.exit_code == 2
    assert "leave --trials out" in refused.stderr


def test_trials_of_the_best_of_price_are_not_drawn_afterwards_either(tmp_path: Path) -> None:
    result = run_search(tmp_path, price="best_of")
    refused = run(f"--resume {result.folder} --figures {tmp_path / 'figures'}")
    assert refused.exit_code == 2
    assert "leave --figures out" in refused.stderr
    assert not (tmp_path / "figures").exists()
    shown = run(f"--resume {result.folder}")
    assert "own images without an epsilon" in shown.stdout  # the test images came with the private ones


@pytest.mark.parametrize("name", READY_MADE)
def test_every_ready_made_search_has_settings_that_are_valid(name: str) -> None:
    found = parse_settings(ready_made(name))
    assert found.trials >= 5
    assert found.parsed_space().points >= found.trials or found.sampler != "grid" or found.rule != "none"


def test_a_search_that_is_continued_keeps_its_threads() -> None:
    result = run("--resume x --threads 2")
    assert (result.exit_code, "leave --threads out" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model", "model.name"),
        ("lr", "optimizer.learning_rate"),
        ("learning-rate", "optimizer.learning_rate"),
        ("batch_size", "privacy.expected_batch_size"),
        ("views", "views.count"),
    ],
)
def test_a_searched_setting_may_be_named_like_its_flag(name: str, key: str) -> None:
    wanted = wanted_search(TuneFlags(space=[f"{name}=choice:1,2"]))
    assert [each.name for each in wanted.parsed_space().dimensions] == [key]
