"""The forecast: from declared facts only, before anything is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpvision.cli import app
from dpvision.config import parse_config
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.privacy.randomness import Keys
from dpvision.release.statements import COUNTED_UNITS
from dpvision.training.defaults import Facts, fill_open_settings
from dpvision.training.forecast import Forecast, forecast
from dpvision.training.prepare import calibrate, prepare
from tiny_runs import write_images


def of_plan(num_units: int, epsilon: float, *, num_classes: int = 10, task: str = "classification") -> Forecast:
    values: dict[str, Any] = {
        "task": task,
        "data": {"source": "scans"},
        "privacy": {"target_epsilon": epsilon, "num_units": num_units, "privacy_unit": "example"},
    }
    shape = (3, 32, 32) if task == "classification" else (1, 128, 128)
    facts = Facts(num_units=num_units, num_classes=num_classes, image_shape=shape)
    config = calibrate(fill_open_settings(parse_config(values), facts)[0])
    found = forecast(config, num_classes=num_classes, linear_head=task == "classification")
    assert found is not None
    return found


def test_more_units_and_more_epsilon_promise_more() -> None:
    for plans in ([of_plan(n, 3.0) for n in (300, 1000, 3000)], [of_plan(1000, e) for e in (1.0, 3.0, 8.0)]):
        lowest = [plan.lowest for plan in plans]
        highest = [plan.highest for plan in plans]
        assert lowest == sorted(lowest, key=float)
        assert highest == sorted(highest, key=float)
        assert not any(plan.hopeless for plan in plans)


def test_the_range_lies_between_chance_and_all() -> None:
    plan = of_plan(1000, 3.0, num_classes=2)
    assert plan.lowest is not None
    assert plan.highest is not None
    assert 0.5 < plan.lowest < plan.highest < 1
    assert "1000 units at epsilon 3" in plan.text


def test_few_units_of_many_classes_are_hopeless_and_the_remedy_is_named() -> None:
    plan = of_plan(30, 0.5, num_classes=20)
    assert plan.hopeless
    assert "units would" in plan.text


def test_masks_of_95_units_at_epsilon_3_are_hopeless_and_at_epsilon_8_not() -> None:
    plan = of_plan(95, 3.0, num_classes=2, task="segmentation")
    assert plan.hopeless
    assert plan.text.startswith("with 95 units at epsilon 3 a segmentation network will not beat a constant mask")
    assert not of_plan(95, 8.0, num_classes=2, task="segmentation").hopeless
    assert not of_plan(1000, 3.0, num_classes=2, task="segmentation").hopeless


def test_neighbouring_datasets_have_the_same_forecast(tmp_path: Path) -> None:
    found = []
    for rows in (40, 41):
        source = write_images(tmp_path / f"{rows}.npz", train=rows)
        values = {"data": {"source": str(source)}, "privacy": {"target_epsilon": 3.0, "num_units": 40}}
        prepared = prepare(parse_config(values), Keys.from_seed(1))
        found.append(prepared.forecast)
    assert found[0] == found[1]


def run(source: Path, folder: Path, *flags: str) -> Any:
    words = ["--target-epsilon", "0.05", "--delta", "1e-4", "--steps", "2", "--output", str(folder), *flags]
    return CliRunner().invoke(app, ["train", str(source), *words])


def test_a_hopeless_plan_of_declared_units_writes_nothing(tmp_path: Path) -> None:
    source = write_images(tmp_path / "images.npz", train=40)
    result = run(source, tmp_path / "run", "--num-units", "40")
    assert result.exit_code == 2
    assert "--anyway" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()
    assert run(source, tmp_path / "run", "--num-units", "40", "--anyway").exit_code == 0


def test_a_hopeless_plan_of_counted_units_has_its_count_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpvision.training.prepare.noisy_count", lambda *_, **__: 40)
    source = write_images(tmp_path / "images.npz", train=40)
    result = run(source, tmp_path / "run")
    assert result.exit_code == 2
    entries = read_ledger(tmp_path / "run" / "release" / "ledger.jsonl")
    assert [event.purpose for event, _ in charges_of(entries)] == [COUNTED_UNITS]


def test_a_recipe_is_not_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "--recipe", "demo", "--quick", "--output", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
