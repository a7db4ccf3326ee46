"""Small searches on synthetic images, for tests of the whole path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpvision.config import RunConfig, parse_config
from dpvision.tune import SearchResult, SearchSettings, tune
from tiny_runs import SIDE, write_images

RATES = {"learning_rate": "log:0.1:4"}


def search_config(source: Path, **privacy: Any) -> RunConfig:
    """A trial of a second: a linear model, 6 steps; budget 3 for the whole search."""
    values: dict[str, Any] = {
        "name": "tiny",
        "data": {"source": str(source)},
        "model": {"name": "linear", "options": {"image_size": SIDE}},
        "privacy": {
            "target_epsilon": 3.0,
            "delta": 1e-3,
            "num_units": 120,
            "expected_batch_size": 30.0,
            "steps": 6,
            "clip_norm": 0.7,
            "anyway": True,
            **privacy,
        },
        "evaluations": 1,
        "checkpoint_every": 2,
    }
    values["privacy"] = {name: value for name, value in values["privacy"].items() if value is not None}
    return parse_config(values)


def search_images(folder: Path) -> Path:
    """120 training and 30 test images, which came with the data and are private, too."""
    return write_images(folder / "images.npz", train=120, test=30)


def run_search(folder: Path, *, seed: int | None = None, **settings: Any) -> SearchResult:
    """Search the learning rate of ``search_config`` in ``folder``/search."""
    source = search_images(folder)
    wanted = SearchSettings(**{"space": RATES, "trials": 2, **settings})
    return tune(search_config(source), wanted, folder=folder / "search", seed=seed)
