"""The score of a trial on private data: one Gaussian release of sensitivity one, and pruning on public scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpvision.config import parse_config
from dpvision.errors import PrivacyError
from dpvision.privacy.mechanism import Event
from dpvision.privacy.noise import noisy_count
from dpvision.privacy.randomness import Keys
from dpvision.training.callbacks import RunCallback
from dpvision.tune.search import load_search_data
from dpvision.tune.search_plan import SearchSettings
from dpvision.tune.trial import Pruning, TrialPruned, TrialRun, correct_units, run_trial, trial_keys
from tiny_runs import synthetic_images


def test_one_unit_moves_the_number_of_correct_units_by_at_most_one() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        rows = int(generator.integers(1, 40))
        units = np.sort(generator.integers(0, 8, rows))
        correct = generator.random(rows) < 0.5
        whole = correct_units(correct, units)
        for unit in range(8):
            kept = units != unit
            assert whole - correct_units(correct[kept], units[kept]) in (0, 1)
    assert correct_units(np.array([], dtype=bool), np.array([], dtype=np.int64)) == 0


def test_the_noise_of_a_score_has_the_charged_standard_deviation() -> None:
    keys = Keys.from_seed(3)
    drawn = [
        noisy_count(10_000, noise_multiplier=40.0, key=keys.derive("search", "score", str(i))) for i in range(4000)
    ]
    # Five standard errors of a standard deviation: 5 / sqrt(2 n), and 1/24 for rounding to whole numbers.
    assert abs(np.std(drawn) / 40.0 - 1) < 5 / np.sqrt(8000) + 1e-3


def test_each_trial_and_each_attempt_has_a_key_of_its_own() -> None:
    keys = Keys.from_seed(0, "search")
    secrets = {trial_keys(keys, number, attempt).secret for number in range(20) for attempt in range(3)}
    assert len(secrets) == 60
    assert trial_keys(keys, 1, 0) == trial_keys(keys, 1, 0)
    assert trial_keys(keys, 1, 0).hand_seeded


def npz(folder: Path) -> Path:
    images, labels = synthetic_images(200)
    tests, test_labels = synthetic_images(30, seed=1)
    np.savez(folder / "x.npz", x_train=images, y_train=labels, x_test=tests, y_test=test_labels)
    return folder / "x.npz"


def test_no_unit_of_the_score_is_trained_on_and_others_do_not_move(tmp_path: Path) -> None:
    config = parse_config({"data": {"source": str(npz(tmp_path))}, "privacy": {"target_epsilon": 1.0}})
    settings = SearchSettings(space={"clip_norm": "log:0.1:1"}, validation_fraction=0.3)
    keys = Keys.from_seed(1, "search")
    data, again = (load_search_data(config, settings, keys) for _ in range(2))
    assert data.validation is not None
    assert again.validation is not None
    trained, scored = set(data.splits.train.names_of_units), set(data.validation.names_of_units)
    assert not trained & scored
    assert len(trained | scored) == 200
    assert set(again.validation.names_of_units) == scored


def test_a_trial_that_would_release_more_than_was_charged_is_refused(tmp_path: Path) -> None:
    values = {
        "data": {"source": str(npz(tmp_path))},
        "model": {"name": "linear", "options": {"image_size": 8}},
        "privacy": {
            "noise_multiplier": 2.0,
            "delta": 1e-3,
            "num_units": 200,
            "expected_batch_size": 40.0,
            "steps": 5,
            "clip_norm": 1.0,
            "anyway": True,
        },
    }
    config = parse_config(values)
    settings = SearchSettings(space={"clip_norm": "log:0.1:1"})
    keys = Keys.from_seed(1, "search")
    splits = load_search_data(config, settings, keys).splits
    for number, planned in enumerate(
        [(Event(sample_rate=0.2, noise_multiplier=2.0), 4), (Event(sample_rate=0.2, noise_multiplier=2.1), 5)]
    ):
        trial = TrialRun(
            path=tmp_path / f"{number}",
            config=config,
            keys=keys,
            search_id="x",
            planned=(planned,),
            device="cpu",
            splits=splits,
            marker=tmp_path / "started",
        )
        with pytest.raises(PrivacyError, match="more than its search was charged"):
            run_trial(trial, RunCallback())
        assert not trial.marker.exists()


def test_a_trial_is_pruned_when_it_diverges_falls_short_or_stands_still() -> None:
    with pytest.raises(TrialPruned):
        Pruning(below=None, patience=False).evaluated({"accuracy": 0.5, "loss": 1000.0})
    with pytest.raises(TrialPruned):
        Pruning(below=0.6, patience=False).evaluated({"accuracy": 0.5, "loss": 1.0})
    waiting = Pruning(below=0.1, patience=True)
    waiting.evaluated({"accuracy": 0.5, "loss": 1.0})
    for _ in range(14):
        waiting.evaluated({"accuracy": 0.5, "loss": 1.0})
    with pytest.raises(TrialPruned):
        waiting.evaluated({"accuracy": 0.5, "loss": 1.0})
