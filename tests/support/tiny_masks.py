"""Small slices with discs, patient by patient, for tests of segmentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpvision.config import RunConfig
from tiny_runs import tiny_config

SIDE = 16
TINY_UNET = {"name": "unet9", "options": {"width": 2, "head": "conv"}}


def discs(count: int, *, seed: int = 0, classes: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright disc, and where it is. With more classes a disc's class is how bright it is."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 90, size=(count, SIDE, SIDE), dtype=np.uint8)
    y, x = np.mgrid[:SIDE, :SIDE]
    masks = np.zeros_like(images)
    for row in range(count):
        centre, radius, kind = generator.uniform(5, 11, 2), generator.uniform(3, 5), 1 + row % classes
        inside = (y - centre[0]) ** 2 + (x - centre[1]) ** 2 < radius**2
        masks[row][inside] = kind
        images[row][inside] += np.uint8(80 * kind)
    return images, masks


def write_discs(path: Path, *, patients: int = 10, test_patients: int = 4, classes: int = 1) -> Path:
    """An .npz with both splits; patient p has 1 + p % 5 slices, and one slice of the test has nothing on it."""
    arrays: dict[str, Any] = {}
    for start, first, number, seed in (("", 0, patients, 0), ("test_", patients, test_patients, 1)):
        owners = np.repeat(first + np.arange(number), [1 + patient % 5 for patient in range(number)])
        images, masks = discs(len(owners), seed=seed, classes=classes)
        arrays |= {f"{start}images": images, f"{start}masks": masks, f"{start}patient": owners + 100 * seed}
    arrays["test_masks"][0] = 0
    np.savez(path, **arrays)
    return path


def tiny_mask_config(source: Path, **changes: Any) -> RunConfig:
    """A run of seconds: UNet-9 of width 2, patients as units, six steps."""
    base: dict[str, Any] = {
        "task": "segmentation",
        "data": {"unit_column": "patient"},
        "model": TINY_UNET,
        "privacy": {"num_units": 10, "expected_batch_size": 5.0, "steps": 6, "clip_norm": 0.7, "delta": 1e-2},
        "optimizer": {"name": "nadam", "learning_rate": 0.01, "momentum": None},
        "evaluations": 2,
        "checkpoint_every": 2,
    }
    for section, update in changes.items():
        both = isinstance(update, dict) and isinstance(base.get(section), dict) and section != "model"
        base[section] = {**base[section], **update} if both else update
    return tiny_config(source, **base)
