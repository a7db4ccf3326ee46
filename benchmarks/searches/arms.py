"""What is compared: tasks, and ways to choose the settings of the run that is released."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from benchmarks.own_data.sources import BY_NAME, load_source
from dpvision.accounting import all_trials, best_of_random_many
from dpvision.config import RunConfig, parse_config
from dpvision.privacy.mechanism import Event
from dpvision.privacy.randomness import Keys
from dpvision.training import train
from dpvision.tune import SearchSettings, tune
from dpvision.tune.space import parse_space, with_settings

SMALL_SIDE, SMALL_UNITS, SMALL_TRIALS = 32, 1000, 5


@final
@dataclass(frozen=True)
class Task:
    """A dataset with the settings that every way shares.

    Attributes:
        config: what is given; its target epsilon is the total of every way.
        space: what is searched.
        trials: trials of a search, or their mean.
    """

    config: RunConfig
    space: dict[str, Any]
    trials: int


def fashionmnist(folder: Path) -> Task:
    """FashionMNIST, the CNN of Making the shoe fit, epsilon 2.7, two epochs."""
    del folder
    values: dict[str, Any] = {
        "data": {"source": "fashionmnist"},
        "model": {"name": "shoefit_cnn"},
        "privacy": {"target_epsilon": 2.7, "delta": 1e-5, "expected_batch_size": 1024.0, "epochs": 2},
        "evaluations": 1,
    }
    return Task(parse_config(values), {"learning_rate": "log:0.5:16", "clip_norm": "log:0.1:2"}, 3)


def small(name: str) -> Callable[[Path], Task]:
    """At most 1,000 images of a dataset that the defaults were not fitted on, epsilon 3, everything by default."""

    def task(folder: Path) -> Task:
        file = folder / f"{name}.npz"
        if not file.exists():
            images = load_source(BY_NAME[name], side=SMALL_SIDE)
            np.savez(
                file,
                x_train=images.train_x[:SMALL_UNITS].numpy(),
                y_train=images.train_y[:SMALL_UNITS],
                x_test=images.test_x.numpy(),
                y_test=images.test_y,
            )
        values: dict[str, Any] = {
            "data": {"source": str(file), "test": str(file)},
            "privacy": {"target_epsilon": 3.0, "delta": 1e-4, "num_units": SMALL_UNITS},
            "evaluations": 1,
        }
        return Task(parse_config(values), {"learning_rate": "log:0.0005:0.02"}, SMALL_TRIALS)

    return task


TASKS: dict[str, Callable[[Path], Task]] = {
    "fashionmnist": fashionmnist,
    "sign_digits": small("sign_digits"),
    "trashnet": small("trashnet"),
}


def run_once(task: Task, way: str) -> dict[str, Any]:
    """Choose settings in one way, and return the accuracy of what is released and what it costs."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if way == "default":
            found = train(task.config, run=folder / "run")
            return _row(found.metrics, found.certificate["epsilon"], {})
        if way == "uncharged":
            return _uncharged(task, folder)
        settings = {
            "composition": {"space": task.space, "trials": task.trials},
            "best_of": {"space": task.space, "trials": task.trials, "price": "best_of"},
            "share": {"space": task.space, "trials": task.trials, "budget_share": 0.2},
            "linear_scaling": {
                "space": {"learning_rate": task.space["learning_rate"]},
                "sampler": "grid",
                "rule": "linear_scaling",
                "trials": 2 * task.trials - 2,
                "budget_share": 0.2,
            },
        }[way]
        result = tune(task.config, SearchSettings.model_validate(settings), folder=folder / "search")
        return _row(result.metrics, result.certificate["epsilon"], result.settings)


WAYS = ("default", "uncharged", "best_of", "linear_scaling", "composition", "share")


def _row(metrics: dict[str, Any], epsilon: float, settings: dict[str, Any]) -> dict[str, Any]:
    return {"accuracy": metrics["final"]["accuracy"], "epsilon": epsilon, "settings": settings}


def _uncharged(task: Task, folder: Path) -> dict[str, Any]:
    """The papers' way: every trial gets the whole epsilon, the best is reported with it. Its true price is added."""
    space, keys = parse_space(task.space), Keys.from_os_entropy("uncharged")
    rows = []
    for number in range(task.trials):
        shares = [int(word) / 2**64 for word in keys.bits(len(space.dimensions), "search", "settings", number)]
        settings = space.drawn(shares)
        found = train(with_settings(task.config, settings), run=folder / str(number))
        rows.append((_row(found.metrics, found.certificate["epsilon"], settings), found.certificate["mechanism"]))
    best, mechanism = max(rows, key=lambda row: row[0]["accuracy"])
    rate = mechanism["expected_batch_size"] / mechanism["num_units"]
    event = Event(sample_rate=rate, noise_multiplier=mechanism["noise_multiplier"])
    charges = [(event, mechanism["steps"])]
    delta = task.config.privacy.delta or 1e-5
    return {
        **best,
        "composed": all_trials(charges, trials=task.trials, delta=delta).epsilon,
        "best_of": best_of_random_many(charges, mean_trials=float(task.trials), delta=delta).epsilon,
    }
