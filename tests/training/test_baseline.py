"""The non-private baseline: its own settings, and no trace of it in a release of private data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dpvision.config import RunConfig, parse_config
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.privacy.randomness import Keys
from dpvision.release.report import render, summary_lines
from dpvision.release.run_facts import read_run
from dpvision.release.verify import verify
from dpvision.training import resume_training, train
from dpvision.training.baseline import (
    NEVER_PUBLISH,
    choose_features,
    released_baseline,
    tune_head,
    without_privacy,
)
from dpvision.training.prepare import prepare
from frozen_runs import released_files
from tiny_runs import StopAfter, synthetic_images, tiny_config, write_images


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pictures.npz")


def left_open(source: Path, **data: Any) -> RunConfig:
    values = tiny_config(source).model_dump()
    privacy = {"enabled": False}
    return parse_config({"data": {**values["data"], **data}, "privacy": privacy, "evaluations": 2})


def of_private_data(source: Path, **data: Any) -> RunConfig:
    return tiny_config(source, data={"source": str(source), **data})


def with_baseline(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"baseline": True})


def stored(run: Path) -> dict[str, Any]:
    return json.loads((run / "private" / "unsafe_baseline.json").read_text())


# ---- settings


def test_a_run_without_privacy_has_settings_of_its_own(pictures: Path) -> None:
    config = prepare(left_open(pictures), Keys.from_seed(0)).config
    assert config.optimizer is not None
    assert (config.optimizer.name, config.schedule.kind, config.averaging.kind) == ("nadam", "cosine", "none")
    assert config.optimizer.effective_weight_decay > 0
    assert config.privacy.steps is not None
    assert config.privacy.steps >= 300


def noisy_rows(share_of_wrong_labels: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 2
    rows = torch.randn(200, 100, generator=generator)
    rows[:, 0] += 3.0 * (2 * labels - 1)
    wrong = torch.rand(200, generator=generator) < share_of_wrong_labels
    return rows, torch.where(wrong, 1 - labels, labels)


def without_noise(**changes: Any) -> RunConfig:
    privacy = {"enabled": False, "steps": 300, "expected_batch_size": 200.0, "num_units": 200}
    return parse_config({"data": {"source": "a"}, "loss": "cross_entropy", "privacy": privacy} | changes)


def test_a_head_without_privacy_is_trained_for_less_where_labels_are_noisy() -> None:
    rates = []
    for share in (0.0, 0.3):
        tuned = tune_head(without_noise(), nn.Linear(100, 2), *noisy_rows(share))
        assert tuned is not None
        assert tuned[1].setting == "optimizer"
        assert tuned[0].optimizer is not None
        rates.append(tuned[0].optimizer.learning_rate)
    assert rates[0] > 2 * rates[1]


def test_a_training_of_a_few_steps_without_privacy_has_a_rate_too() -> None:
    short = {"enabled": False, "steps": 3, "expected_batch_size": 200.0, "num_units": 200}
    tuned = tune_head(without_noise(privacy=short), nn.Linear(100, 2), *noisy_rows(0.0))
    assert tuned is not None
    assert tuned[0].optimizer is not None
    assert tuned[0].optimizer.learning_rate > 0


def test_only_a_linear_head_of_a_run_without_privacy_is_tuned_on_its_images() -> None:
    rows, labels = noisy_rows(0.0)
    network = nn.Sequential(nn.Linear(100, 5), nn.Linear(5, 2))
    assert tune_head(without_noise(), network, rows, labels) is None
    assert tune_head(without_noise(), nn.Linear(100, 2), rows[:5], labels[:5]) is None
    private = without_noise(privacy={"target_epsilon": 3.0})
    with pytest.raises(PrivacyError, match="without privacy"):
        tune_head(private, nn.Linear(100, 2), rows, labels)


def test_a_run_without_privacy_on_features_records_the_rate_that_it_chose(pictures: Path, tmp_path: Path) -> None:
    result = train(left_open(pictures), run=tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "release" / "config.json").read_text())
    assert (kept["optimizer"]["name"], kept["schedule"]["kind"]) == ("sgd", "constant")
    assert result.outcome == "finished"
    assert verify(tmp_path / "run").ok


def bright_halves() -> np.ndarray:
    """Two classes whose brighter half, seen pixel by pixel, says which is which."""
    images = np.random.default_rng(0).integers(0, 200, size=(200, 1, 16, 16))
    images[::2, :, :, :8] += 55
    images[1::2, :, :, 8:] += 55
    return images.astype(np.uint8)


def stripes() -> np.ndarray:
    """Two classes of stripes with random phases: pixel by pixel their means are equal."""
    across = 127 + 100 * np.sin(np.random.default_rng(0).uniform(0, 7, (200, 1, 1)) + 2.0 * np.arange(16))
    images = np.broadcast_to(across, (200, 16, 16)).copy()
    images[1::2] = images[1::2].swapaxes(1, 2)
    return images[:, None].astype(np.uint8)


@pytest.mark.parametrize(("images", "chosen"), [(bright_halves(), "linear"), (stripes(), "scatter_linear")])
def test_the_baseline_has_the_simplest_features_that_do(images: np.ndarray, chosen: str, tmp_path: Path) -> None:
    labels = np.arange(200) % 2
    np.savez(tmp_path / "a.npz", x_train=images, y_train=labels, x_test=images[:20], y_test=labels[:20])
    result = train(left_open(tmp_path / "a.npz"), run=tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "release" / "config.json").read_text())
    assert (kept["model"]["name"], kept["optimizer"]["name"]) == (chosen, "sgd")
    assert result.metrics["final"]["accuracy"] > 0.9


def test_features_of_a_private_run_are_not_chosen_on_its_images(pictures: Path) -> None:
    class Untouchable:
        image_shape = (1, 16, 16)

        @property
        def images(self) -> Any:
            raise AssertionError("the images were read")

        labels = unit_of_row = images

    private = parse_config({"data": {"source": str(pictures)}, "privacy": {"target_epsilon": 3.0}})
    store: Any = Untouchable()
    assert choose_features(private, store) == (private, ())
    with pytest.raises(AssertionError, match="read"):
        choose_features(without_noise(), store)


def test_settings_that_were_given_stay_without_privacy(pictures: Path) -> None:
    config = parse_config(
        {
            **left_open(pictures).model_dump(),
            "privacy": {"enabled": False, "steps": 7, "expected_batch_size": 5.0},
            "optimizer": {"name": "sgd", "learning_rate": 0.25},
        }
    )
    filled = prepare(config, Keys.from_seed(0)).config
    assert (filled.privacy.steps, filled.privacy.expected_batch_size) == (7, 5.0)
    assert filled.optimizer == config.optimizer
    assert filled.schedule.kind == "constant"


def test_private_runs_do_not_get_the_settings_of_the_baseline(pictures: Path) -> None:
    open_private = {**left_open(pictures).model_dump(), "privacy": {"target_epsilon": 3.0, "num_units": 60}}
    config = prepare(parse_config(open_private), Keys.from_seed(0)).config
    assert config.schedule.kind == "constant"


def test_the_baseline_has_no_noise_no_clipping_and_the_same_data_and_model(pictures: Path) -> None:
    asked = of_private_data(pictures, normalisation="released")
    config = without_privacy(asked)
    assert not config.privacy.enabled
    assert (config.privacy.noise_multiplier, config.privacy.clip_norm, config.privacy.steps) == (None, None, None)
    assert config.model == asked.model
    assert config.data.source == asked.data.source
    assert config.data.normalisation == "auto"


# ---- beside a private run


def test_nothing_of_a_baseline_on_private_data_reaches_the_release(pictures: Path, tmp_path: Path) -> None:
    """Byte by byte: with the same seed, the release is what it would be without the baseline."""
    train(of_private_data(pictures), run=tmp_path / "alone", seed=7)
    result = train(with_baseline(of_private_data(pictures)), run=tmp_path / "both", seed=7)
    assert released_files(tmp_path / "alone") == released_files(tmp_path / "both")
    assert stored(tmp_path / "both")["stamp"] == NEVER_PUBLISH
    assert "baseline" not in result.metrics
    for name, content in released_files(tmp_path / "both").items():
        assert b"ordinary training" not in content, name


def test_the_baseline_run_itself_is_private_and_stamped(pictures: Path, tmp_path: Path) -> None:
    train(with_baseline(of_private_data(pictures)), run=tmp_path / "run")
    inside = tmp_path / "run" / "private" / "baseline"
    certificate = json.loads((inside / "release" / "certificate.json").read_text())
    assert not certificate["for_release"]
    assert certificate["epsilon"] is None
    assert (tmp_path / "run" / "private").stat().st_mode & 0o077 == 0
    assert verify(tmp_path / "run").ok


def test_on_images_declared_public_the_baseline_is_in_summary_and_report(pictures: Path, tmp_path: Path) -> None:
    result = train(with_baseline(of_private_data(pictures, public_data=True)), run=tmp_path / "run")
    found = result.metrics["baseline"]
    assert found["accuracy"] == stored(tmp_path / "run")["accuracy"] > 0.9
    assert "stamp" not in found
    assert any(line.startswith("baseline") for line in summary_lines(result.certificate, result.metrics))
    assert "without privacy" in render(read_run(tmp_path / "run"))
    declared = {item["what"]: item["how"] for item in result.certificate["declared"]}
    assert "no epsilon covers" in declared["training images"]
    assert verify(tmp_path / "run").ok


def test_the_baseline_is_tested_on_the_units_that_the_private_run_holds_out(tmp_path: Path) -> None:
    images, labels = synthetic_images(90)
    names = [str(label) for label in sorted(set(labels.tolist()))]
    np.savez(tmp_path / "pictures.npz", images=images, labels=labels, class_names=names)
    config = of_private_data(tmp_path / "pictures.npz", public_data=True, holdout_fraction=0.3)
    assert "baseline" in train(with_baseline(config), run=tmp_path / "run").metrics


def test_a_resumed_run_keeps_its_baseline(pictures: Path, tmp_path: Path) -> None:
    config = of_private_data(pictures, public_data=True)
    with pytest.raises(ConnectionAbortedError):
        train(with_baseline(config), run=tmp_path / "run", callback=AfterBaseline(5))
    assert "baseline" in resume_training(tmp_path / "run").metrics


class AfterBaseline(StopAfter):
    """Interrupt the private run, which comes after the baseline's 300 steps or more."""

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        if epsilon_bound is not None:
            super().stepped(done=done, epsilon_bound=epsilon_bound)


def test_without_the_declaration_the_result_is_not_even_opened(pictures: Path, tmp_path: Path) -> None:
    class Folder:
        @property
        def private(self) -> Path:
            return tmp_path / "private"

    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "unsafe_baseline.json").write_text("not JSON, so that opening it fails")
    assert released_baseline(Folder(), of_private_data(pictures)) is None  # pyright: ignore[reportArgumentType]


def test_a_baseline_of_a_run_without_privacy_is_refused(pictures: Path) -> None:
    values = left_open(pictures).model_dump()
    with pytest.raises(ArgumentError, match="itself without privacy"):
        parse_config({**values, "baseline": True})
