"""Which images an analysis may use, where its results go, and what a watched run writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dpvision.analyze import Chart, Watch, analyze_runs, curve_chart, heat_map, open_run, read_watch, write_chart
from dpvision.analyze.figures import Line
from dpvision.cli import app
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.training import RunCallback, train
from dpvision.training.callbacks import Snapshot
from tiny_runs import SIDE, synthetic_images, tiny_config, write_images

ADAM = {"name": "adam", "learning_rate": 0.01, "momentum": None}
CNN = {"name": "shoefit_cnn", "options": {"image_size": SIDE, "filters": 2}}


def dpvision(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose test images came with the private ones, watched."""
    folder = tmp_path_factory.mktemp("analysed")
    config = tiny_config(write_images(folder / "images.npz"), optimizer=ADAM, model=CNN)
    train(config, run=folder / "run", seed=1, callback=Watch(folder / "run" / "logs" / "watch.json"))
    return folder / "run"


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other images of the same kind, which their owner calls public."""
    images, labels = synthetic_images(20, seed=7)
    path = tmp_path_factory.mktemp("public") / "public.npz"
    np.savez(path, images=images, labels=labels)
    return path


def test_test_images_that_came_with_private_ones_are_refused(run: Path) -> None:
    with pytest.raises(PrivacyError, match="public for metrics alone"):
        open_run(run, images=4)
    answer = dpvision("analyze", run)
    assert answer.exit_code == 2
    assert answer.stderr.count("\n") == 1


def test_a_private_folder_named_like_a_published_dataset_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny_config(write_images(tmp_path / "images.npz"))
    train(config, run=run, seed=1)
    released = run / "release" / "config.json"
    values = json.loads(released.read_text())
    values["data"]["source"] = "mnist"  # what config.public() leaves of ./somewhere/mnist
    whole = json.loads((run / "private" / "config.json").read_text())
    assert whole["data"]["source"] != "mnist"
    released.write_text(json.dumps(values))
    with pytest.raises(PrivacyError, match="public for metrics alone"):
        open_run(run, images=4)


def test_named_public_images_are_analysed_and_four_files_written(run: Path, public: Path, tmp_path: Path) -> None:
    answer = dpvision(
        *("analyze", run, "--what", "norms,gradients,hessian,surface,watch", "--test", public),
        *("--images", 12, "--eigenvalues", 1, "--iterations", 3, "--probes", 2, "--lanczos", 3),
        *("--output", tmp_path / "out", "--json"),
    )
    assert answer.exit_code == 0, answer.output
    values = json.loads(answer.stdout)
    assert values["stamps"] == []
    assert values["runs"][0]["images"] == 12
    assert values["hessian"]["run"]["trace"]["probes"] == 2
    names = {path.stem for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("activation-norms", "gradient-norms", "signal-to-noise", "hessian-density", "loss-slice", "loss-plane"),
        *("first-moment-over-training",),
    }
    for name in names:
        assert {path.suffix for path in (tmp_path / "out").glob(f"{name}.*")} == {".png", ".svg", ".csv", ".json"}
    assert not (run / "private" / "unsafe_analysis").exists()


def test_results_on_private_images_are_stamped_and_stay_in_private(run: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (run / "release").rglob("*") if path.is_file()}
    answer = dpvision("analyze", run, "--what", "gradients", "--unsafe-training-data", "--images", 10)
    assert answer.exit_code == 0, answer.output
    assert "UNSAFE" in answer.stdout
    files = list((run / "private" / "unsafe_analysis").iterdir())
    assert len(files) == 8
    assert all(path.name.startswith("unsafe_") and path.stat().st_mode & 0o077 == 0 for path in files)
    for path in files:
        if path.suffix in (".json", ".svg"):
            assert "UNSAFE" in path.read_text()
    assert before == {path: path.read_bytes() for path in (run / "release").rglob("*") if path.is_file()}


def test_results_on_private_images_cannot_be_written_elsewhere(run: Path, tmp_path: Path) -> None:
    unsafe = open_run(run, images=4, unsafe=True)
    with pytest.raises(PrivacyError, match="They belong in"):
        analyze_runs([unsafe], what=("norms",), output=tmp_path / "private" / "unsafe_analysis")
    assert not list(tmp_path.iterdir())
    assert dpvision("analyze", run, "--unsafe-training-data", "--output", tmp_path).exit_code == 2


def test_private_and_public_images_are_not_mixed(run: Path, public: Path) -> None:
    with pytest.raises(ArgumentError, match="not both"):
        open_run(run, images=4, unsafe=True, test=str(public))


def test_a_watched_private_dataset_records_the_first_moment_alone(run: Path) -> None:
    points = read_watch(run / "logs" / "watch.json")["points"]
    assert [point["step"] for point in points] == [0, 4, 8, 12]
    assert all("norms" not in point for point in points)
    assert all(point["mean_absolute_first_moment"] > 0 for point in points[1:])


def test_a_watch_with_public_images_records_norms(tmp_path: Path) -> None:
    images, _ = synthetic_images(10, seed=7)
    config = tiny_config(write_images(tmp_path / "images.npz"), model=CNN)
    watch = Watch(tmp_path / "watch.json", images=torch.from_numpy(images))
    train(config, run=tmp_path / "run", seed=1, callback=watch)
    points = read_watch(tmp_path / "watch.json")["points"]
    assert all(point["norms"][point["first_activation"]] > 0 for point in points)


def test_watching_changes_no_weight(tmp_path: Path) -> None:
    class Spoil(RunCallback):
        @property
        def wants_weights(self) -> bool:
            return True

        def weights(self, snapshot: Snapshot) -> None:
            for value in (*snapshot.model.parameters(), *snapshot.moments.values()):
                value.data.zero_()
            assert snapshot.public_images is None

    config = tiny_config(write_images(tmp_path / "images.npz"), optimizer=ADAM)
    train(config, run=tmp_path / "a", seed=1)
    train(config, run=tmp_path / "b", seed=1, callback=Spoil())
    weights = [(tmp_path / name / "release" / "weights.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]


def test_a_run_without_privacy_is_stamped_in_what_it_writes(tmp_path: Path, public: Path) -> None:
    privacy = {"enabled": False, "noise_multiplier": None, "delta": None, "clip_norm": None, "anyway": None}
    config = tiny_config(write_images(tmp_path / "images.npz"), privacy=privacy)
    train(config, run=tmp_path / "run", seed=1, callback=Watch(tmp_path / "watch.json"))
    assert "without privacy" in read_watch(tmp_path / "watch.json")["stamps"][0]
    results = analyze_runs(
        [open_run(tmp_path / "run", images=4, test=str(public))], what=("norms",), output=tmp_path / "out"
    )
    assert "without privacy" in results["stamps"][0]


def test_equal_figures_are_equal_bytes(tmp_path: Path) -> None:
    chart = curve_chart("a", "A", [Line(label="x", points=((0, 1), (1, 2)))], axes_titles=("x", "y"))
    first = [path.read_bytes() for path in write_chart(tmp_path / "1", chart)]
    assert first == [path.read_bytes() for path in write_chart(tmp_path / "2", chart)]
    grid = heat_map("b", "B", {("1", "2"): 3.0, ("2", "2"): 4.0}, axes_titles=("r", "c", "v"))
    assert len(write_chart(tmp_path, grid)) == 4
    with pytest.raises(ArgumentError, match="nothing to show"):
        write_chart(tmp_path, Chart(name="c", title="C", draw=lambda _: None, rows=[]))


def test_an_unknown_analysis_is_one_line(run: Path) -> None:
    answer = dpvision("analyze", run, "--what", "everything")
    assert answer.exit_code == 2
    assert "--what must name some of activations" in answer.stderr
