"""The parts of CIFAR-100 on which Papernot et al. pre-train: random classes, all public, as .npz files."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np

from dpvision.data import LoadOptions, load
from dpvision.data.known import cache_folder
from dpvision.data.store import ImageStore
from dpvision.files import disk_errors, write_atomically

_SEED: Final = 2019  # whoever draws again gets the same classes


@final
@dataclass(frozen=True)
class Subset:
    """So many random classes of CIFAR-100, merged evenly into ``labels`` ones."""

    classes: int
    labels: int

    @property
    def num_rows(self) -> int:
        """Training pictures: 500 a class."""
        return 500 * self.classes

    def chosen(self) -> list[int]:
        """The classes, in the order in which they were drawn. The choice is public."""
        return random.Random(_SEED).sample(range(100), self.classes)  # noqa: S311


SUBSETS: Final = {"min10": Subset(10, 10), "half50": Subset(50, 10)}


def subset_source(kind: str) -> str:
    """The name under which recipes refer to it; ``make_subset`` gives it a place."""
    return f"cifar100-{kind}.npz"


def subset_sources() -> dict[str, Subset]:
    """Every such name."""
    return {subset_source(kind): subset for kind, subset in SUBSETS.items()}


def make_subset(source: str, *, data_dir: Path | None = None) -> Path:
    """Write that part of CIFAR-100 below the datasets, unless it is there, and return its place."""
    subset = subset_sources()[source]
    path = cache_folder() / "subsets" / source
    if path.exists():
        return path
    splits = load("cifar100", LoadOptions(data_dir=data_dir))
    arrays = {}
    for name, store in (("train", splits.train), ("test", splits.test)):
        if store is not None:
            arrays[f"x_{name}"], arrays[f"y_{name}"] = _part(store, subset)
    content = io.BytesIO()
    np.savez(content, **arrays)
    with disk_errors(f"write {path}"):
        write_atomically(path, content.getvalue())
    return path


def _part(store: ImageStore, subset: Subset) -> tuple[np.ndarray, np.ndarray]:
    number = np.full(100, -1)
    for place, label in enumerate(subset.chosen()):
        number[label] = place % subset.labels
    labels = number[store.labels.numpy()]
    kept = labels >= 0
    return store.images.numpy()[kept], labels[kept]
