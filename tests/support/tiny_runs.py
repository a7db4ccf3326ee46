"""Small private runs on synthetic images, for tests of the whole path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpvision.config import RunConfig, parse_config
from dpvision.training import RunCallback, train

CLASSES = 3
SIDE = 8


def synthetic_images(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images with a bright stripe whose position is the class."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    images = generator.integers(0, 120, size=(count, 1, SIDE, SIDE), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 2 * label + 1] += 100
    return images, labels


def write_images(path: Path, *, train: int = 60, test: int = 30, extra: np.ndarray | None = None) -> Path:
    """An .npz with both splits; ``extra`` is one more training image at the end."""
    images, labels = synthetic_images(train)
    if extra is not None:
        images, labels = np.concatenate([images, extra[None]]), np.append(labels, 0)
    test_images, test_labels = synthetic_images(test, seed=1)
    np.savez(path, x_train=images, y_train=labels, x_test=test_images, y_test=test_labels)
    return path


def tiny_config(source: Path, **changes: Any) -> RunConfig:
    """A run of a second: a linear model, 12 steps. ``changes`` update sections; None takes a field out."""
    values: dict[str, Any] = {
        "name": "tiny",
        "data": {"source": str(source)},
        "model": {"name": "linear", "options": {"image_size": SIDE}},
        "privacy": {
            "noise_multiplier": 1.3,
            "delta": 1e-3,
            "num_units": 60,
            "expected_batch_size": 20.0,
            "steps": 12,
            "clip_norm": 0.7,
            "anyway": True,
        },
        "optimizer": {"name": "sgd", "learning_rate": 0.5, "momentum": 0.5},
        "averaging": {"kind": "ema", "decay": 0.9},
        "evaluations": 3,
        "checkpoint_every": 4,
    }
    for section, update in changes.items():
        merged = {**values.get(section, {}), **update} if isinstance(update, dict) else update
        values[section] = {k: v for k, v in merged.items() if v is not None} if isinstance(merged, dict) else merged
    return parse_config(values)


class StopAfter(RunCallback):
    """Interrupt a run after this many steps, as a power cut would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def stepped(self, *, done: int, epsilon_bound: float | None) -> None:
        if done == self.steps:
            raise ConnectionAbortedError


def interrupt_run(run: Path, config: RunConfig, *, after: int, seed: int | None = 3) -> None:
    """Train until ``after`` steps are taken, and no further."""
    with pytest.raises(ConnectionAbortedError):
        train(config, run=run, seed=seed, callback=StopAfter(after))
