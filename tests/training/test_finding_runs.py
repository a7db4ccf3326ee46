"""Multi-label targets from the command line to the report: unknown labels are masked and change no divisor."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from dpvision.cli import app
from dpvision.config import RunConfig, parse_config
from dpvision.data import LoadOptions, load
from dpvision.errors import ArgumentError, DataError
from dpvision.models.losses import finding_loss
from dpvision.release.report import summary_lines
from dpvision.release.verify import verify
from dpvision.training import train

NAMES = ("Edema", "Fracture", "Rare")


def write_findings(root: Path, *, train: int = 60, test: int = 60) -> Path:
    """Images whose upper and lower halves are bright where a finding holds; some labels are uncertain or missing."""
    generator = np.random.default_rng(0)
    rows = []
    for split, count in (("train", train), ("test", test)):
        (root / split).mkdir(parents=True)
        for number in range(count):
            present = generator.integers(0, 2, size=2)
            image = generator.integers(0, 60, size=(8, 8), dtype=np.uint8)
            image[:4] += np.uint8(150 * present[0])
            image[4:] += np.uint8(150 * present[1])
            Image.fromarray(image).save(root / split / f"{number}.png")
            cells = [str(present[0]), str(float(present[1])), "1" if number < 3 else "0"]
            if number % 7 == 0:
                cells[0] = "-1.0"
            if number % 5 == 0:
                cells[1] = ""
            rows.append([f"{split}/{number}.png", f"{split} p{number // 2}", *cells])
    with (root.parent / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["Path", "patient", *NAMES], *rows])
    return root.parent / "labels.csv"


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    return write_findings(tmp_path / "scans")


def config_of(labels: Path, **data: Any) -> RunConfig:
    found = {"source": str(labels.parent / "scans"), "findings": str(labels), "findings_columns": ",".join(NAMES)}
    privacy = {"noise_multiplier": 0.5, "delta": 1e-3, "num_units": 60, "expected_batch_size": 30.0, "steps": 40}
    return parse_config(
        {
            "name": "findings",
            "data": {**found, "image_size": 8, **data},
            "model": {"name": "linear", "options": {"image_size": 8}},
            "privacy": {**privacy, "clip_norm": 1.0},
            "optimizer": {"name": "sgd", "learning_rate": 0.5, "momentum": 0.5},
            "evaluations": 2,
        }
    )


def options_of(labels: Path, **changes: Any) -> LoadOptions:
    return LoadOptions(findings=str(labels), findings_columns=",".join(NAMES), image_size=8, **changes)


# ---- reading


def test_uncertain_and_missing_labels_are_not_known(labels: Path) -> None:
    loaded = load(labels.parent / "scans", options_of(labels))
    assert loaded.train.class_names == NAMES
    assert loaded.train.multi_label
    by_name = dict(zip(loaded.train.row_names, loaded.train.labels, strict=True))
    assert torch.isnan(by_name["7.png"][0])
    assert torch.isnan(by_name["5.png"][1])
    assert by_name["0.png"][2] == 1
    assert loaded.test is not None
    assert loaded.test.labels.shape == (60, 3)


def test_one_table_serves_findings_and_patients(labels: Path) -> None:
    options = LoadOptions(findings=str(labels), unit_csv=str(labels), unit_column="patient", image_size=8)
    loaded = load(labels.parent / "scans", options)
    assert loaded.train.class_names == NAMES
    assert loaded.train.num_units == 30


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace("train/3.png,train p1,", "train/3.png,train p1,maybe"), "must be 1, 0, -1"),
        (lambda text: text.replace("train/3.png", "train/300.png"), "not in the folder"),
        (lambda text: "\n".join(line for line in text.splitlines() if "train/3.png" not in line), "no row for 1"),
        (lambda text: text + "train/3.png,train p1,0,0,0\n", "names train/3.png again in line 122"),
        (lambda text: text.replace("Path,", "what,"), "heading"),
        (lambda text: text.replace("Edema", "Oedema"), "no column for Edema"),
    ],
    ids=["value", "unknown file", "missing file", "twice", "heading", "column"],
)
def test_a_wrong_table_is_one_clear_error(labels: Path, change: Any, problem: str) -> None:
    labels.write_text(change(labels.read_text().replace("\r", "")))
    with pytest.raises(DataError, match=problem) as caught:
        load(labels.parent / "scans", options_of(labels))
    assert "\n" not in str(caught.value)


def test_findings_go_with_their_own_loss_and_with_nothing_else(labels: Path) -> None:
    values = config_of(labels).model_dump()
    with pytest.raises(ArgumentError, match="binary_cross_entropy where images have findings"):
        parse_config({**values, "loss": "cross_entropy"})
    with pytest.raises(ArgumentError, match="only there"):
        parse_config({**values, "data": {"source": "mnist"}, "loss": "binary_cross_entropy"})
    with pytest.raises(ArgumentError, match="task=classification"):
        parse_config({**values, "task": "segmentation"})


# ---- training


def test_the_divisor_does_not_depend_on_how_many_labels_are_known() -> None:
    outputs = torch.zeros(1, 4, requires_grad=True)
    known = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    finding_loss(outputs, known).sum().backward()
    whole = outputs.grad
    assert whole is not None
    for missing in range(4):
        again = torch.zeros(1, 4, requires_grad=True)
        masked = known.clone()
        masked[0, missing] = float("nan")
        finding_loss(again, masked).sum().backward()
        assert again.grad is not None
        assert again.grad[0, missing] == 0
        others = [column for column in range(4) if column != missing]
        assert torch.equal(again.grad[0, others], whole[0, others])


def test_an_unknown_label_moves_no_other_finding_of_a_whole_run(labels: Path, tmp_path: Path) -> None:
    """With every label of one finding unknown, its outputs get noise alone, and the run is still charged in full."""
    result = train(config_of(labels), run=tmp_path / "run", seed=1)
    text = labels.read_text().splitlines()
    labels.write_text("\n".join([text[0], *(line.rpartition(",")[0] + "," for line in text[1:])]))
    other = train(config_of(labels), run=tmp_path / "other", seed=1)
    assert other.certificate["epsilon"] == result.certificate["epsilon"]
    assert other.certificate["mechanism"] == result.certificate["mechanism"]
    assert other.metrics["final"]["findings"]["Rare"] is None


def test_a_run_learns_findings_and_its_release_verifies(labels: Path, tmp_path: Path) -> None:
    result = train(config_of(labels), run=tmp_path / "run")
    final = result.metrics["final"]
    assert final["mean_auc"] > 0.9
    assert final["findings"]["Rare"] is None  # fewer than 10 positives
    low, high = final["intervals"]["mean_auc"]
    assert low <= final["mean_auc"] <= high
    assert final["findings"]["Edema"]["count"] == 60 - 9
    assert verify(tmp_path / "run").ok
    lines = summary_lines(result.certificate, result.metrics)
    assert lines[0].startswith("mean AUC")
    assert any("better than chance:  yes" in line for line in lines)
    declared = {item["what"]: item["how"] for item in result.certificate["declared"]}
    assert "not of known labels" in declared["findings"]


def test_baselines_work_for_findings_too(labels: Path, tmp_path: Path) -> None:
    result = train(config_of(labels, public_data=True).model_copy(update={"baseline": True}), run=tmp_path / "run")
    assert result.metrics["baseline"]["mean_auc"] > 0.9


# ---- from the command line


def command(*words: object) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_findings_from_the_command_line_to_the_report(labels: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    where = ["--findings", labels, "--findings-columns", ",".join(NAMES), "--unit-csv", labels]
    settings = ["--image-size", 8, "--model", "linear", "--option", "image_size=8", "--num-units", 30]
    plan = ["--unit-column", "patient", "--noise-multiplier", 0.5, "--delta", 1e-3, "--steps", 40]
    rest = ["--expected-batch-size", 15, "--clip-norm", 1, "--learning-rate", 0.5, "--output", run, "--json"]
    trained = command("train", tmp_path / "scans", *where, *settings, *plan, *rest)
    assert trained["mean_auc"] > 0.85
    assert trained["better_than_chance"] == "yes"
    assert trained["privacy_unit"] == "owner"
    page = (run / "release" / "report.html").read_text()
    assert "Each finding" in page
    assert "Edema" in page
    assert str(tmp_path) not in page
    groups = tmp_path / "groups.csv"
    groups.write_text("image,group\n" + "\n".join(f"{n}.png,{'odd' if n % 2 else 'even'}" for n in range(60)))
    measured = command("evaluate", run, "--groups", groups, "--json")
    assert measured["findings"]["Edema"]["auc"] > 0.8
    assert measured["groups"]["odd"]["auc"] > 0.7
    test = ["--test", tmp_path / "scans" / "test", "--test-findings", labels]
    assert command("evaluate", run, *test, "--json")["mean_auc"] == pytest.approx(measured["mean_auc"])
    (answer,) = command("predict", run, tmp_path / "scans" / "test" / "1.png", "--json")["predictions"]
    assert len(answer["probabilities"]) == 3
    assert set(answer["findings"]) <= set(NAMES)
    refused = CliRunner().invoke(app, ["audit", str(run)])
    assert refused.exit_code == 2
