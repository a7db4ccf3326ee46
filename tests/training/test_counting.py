"""A count that nobody paid for is not shown: whatever is refused is refused before the units are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from dpvision.cli import app
from dpvision.config import RunConfig, parse_config
from dpvision.errors import ArgumentError, DataError, DPVisionError
from dpvision.privacy import noise
from dpvision.privacy.randomness import Keys
from dpvision.release.verify import verify
from dpvision.training import prepare as counting
from dpvision.training import train
from dpvision.training.prepare import prepare
from tiny_runs import SIDE, tiny_config, write_images

COUNTED: dict[str, Any] = {"num_units": None, "noise_multiplier": None, "target_epsilon": 8.0}
HEAD_FIRST = {"weights": "w.safetensors", "source": "x", "trained": "head_then_all", "head_steps": 5}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures.npz")


@pytest.fixture
def nobody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("the units were counted")

    monkeypatch.setattr(counting, "noisy_count", counted)


def config_of(source: Path, **sections: Any) -> RunConfig:
    return tiny_config(source, **{**sections, "privacy": {**COUNTED, **sections.get("privacy", {})}})


def trained_by_command(pictures: Path, run: Path) -> Result:
    words = f"--target-epsilon 8 --steps 3 --model linear --option image_size={SIDE} --output".split()
    return CliRunner().invoke(app, ["train", str(pictures), *words, str(run)])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a wall that the count decides on": ({"privacy": {"noise_multiplier": 1.0}}, "together need num_units"),
    "no constants": ({"data": {"normalisation": "published"}}, "no constants are published"),
    "a model for masks": ({"model": {"name": "unet9", "options": {}}}, "model must be one for classification"),
    "no model of the catalogue": ({"model": {"name": "resnet99", "options": {}}}, "resnet99"),
    "constants of the pictures": (
        {"model": {"name": "scatter_linear", "options": {"constants": "pictures"}}},
        "constants must come from other images",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_before_the_units_are_counted(
    pictures: Path, nobody_counts: None, name: str
) -> None:
    sections, words = REFUSED[name]
    with pytest.raises(DPVisionError, match=words):
        prepare(config_of(pictures, **sections), Keys.from_seed(1))


def test_steps_for_the_head_need_steps_that_no_count_proposes(pictures: Path) -> None:
    config = config_of(pictures, privacy={"steps": None})
    values = {**config.model_dump(), "transfer": HEAD_FIRST}
    with pytest.raises(ArgumentError, match="head_steps needs steps"):
        counting.require_plan_for_any_count(parse_config(values))
    values["privacy"]["steps"] = 12
    counting.require_plan_for_any_count(parse_config(values))


def test_a_declared_number_may_have_noise_and_a_target(pictures: Path, nobody_counts: None) -> None:
    config = config_of(pictures, privacy={"num_units": 60, "noise_multiplier": 3.0})
    assert prepare(config, Keys.from_seed(1)).config.privacy.num_units == 60


def test_a_count_far_from_the_truth_is_not_called_declared(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "standard_normals", lambda key, count: [20.0])
    for privacy, words in (({}, "was counted with noise as"), ({"num_units": 500}, "is declared as 500")):
        notes = prepare(config_of(pictures, privacy=privacy), Keys.from_seed(1)).notes
        assert sum(words in note for note in notes) == 1, notes


def test_an_occupied_folder_is_refused_before_the_units_are_counted(
    pictures: Path, tmp_path: Path, nobody_counts: None
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letters.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="must be a new or an empty folder"):
        train(config_of(pictures), run=tmp_path / "run")
    done = trained_by_command(pictures, tmp_path / "run")
    assert done.exit_code == 2
    assert "num_units" not in done.output
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["letters.txt"]


def test_the_count_is_told_only_once_it_is_charged(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks on hears nothing of a run whose ledger could not be made."""

    def disk_full(*arguments: Any, **options: Any) -> Any:
        raise DPVisionError("no space is left")

    monkeypatch.setattr("dpvision.training.start.Ledger.create", disk_full)
    done = trained_by_command(pictures, tmp_path / "run")
    assert done.exit_code != 0
    assert "no space is left" in done.output
    assert "num_units" not in done.output
    assert not (tmp_path / "run" / "release" / "config.json").exists()


def test_a_private_run_takes_no_classes_from_private_labels(pictures: Path, tmp_path: Path) -> None:
    with np.load(pictures) as arrays:
        np.savez(tmp_path / "alone.npz", x_train=arrays["x_train"], y_train=arrays["y_train"])
    with pytest.raises(DataError, match="array of texts named class_names"):
        train(config_of(tmp_path / "alone.npz"), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(config_of(tmp_path / "alone.npz", privacy={"enabled": False}), run=tmp_path / "ordinary")


@pytest.mark.parametrize("units", [60, 6_000])
def test_a_plan_that_needs_little_noise_is_not_refused_by_its_count(units: int, tmp_path: Path) -> None:
    pictures = write_images(tmp_path / "many.npz", train=units)
    privacy = {"delta": 0.01, "expected_batch_size": 1.0, "steps": 1, "target_epsilon": 3.0}
    result = train(config_of(pictures, privacy=privacy), run=tmp_path / "run", seed=0)
    noise_multiplier = result.certificate["mechanism"]["noise_multiplier"]
    assert noise_multiplier >= 0.01
    assert (noise_multiplier == 0.01) == (units == 6_000)  # hardly any noise is needed there, and none is refused
    assert verify(tmp_path / "run").problems == ()


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"expected_batch_size": 1e-9}, "expected_batch_size must lie between"),
        ({"delta": 1e-300}, "delta must be >"),
        ({"count_noise_multiplier": 0.1}, "extra charges"),
    ],
)
def test_impossible_plans_are_refused_before_the_count(
    privacy: dict[str, Any], message: str, pictures: Path, nobody_counts: None
) -> None:
    with pytest.raises(ArgumentError, match=message):
        prepare(config_of(pictures, privacy=privacy), Keys.from_seed(0))
