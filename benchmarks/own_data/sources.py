"""The public datasets of decision 0011: those of the fit, and those that were kept out of it.

Every set is a pair of uint8 image stores at a given side, with at most ``MOST_TEST`` public test images. The order of
the training images is drawn once from a fixed seed, so that the first 300 are a part of the first 1,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray

from dpvision.data import LoadOptions, cache_folder, load

Part = Literal["fit", "kept_out"]
MOST_TEST = 2000
SIZES = (300, 1000, 3000, 10_000, 50_000)


@final
@dataclass(frozen=True)
class Source:
    """A dataset of the study.

    Attributes:
        name: its name in the tables.
        part: whether the rules were fitted on it.
        place: a known dataset or a path below the folder of datasets.
        classes: the classes to keep, as numbers; None keeps all.
        coarse: join the 100 classes of CIFAR-100 to its 20 coarse ones.
        channels: grey or colour, as a user would declare it.
    """

    name: str
    part: Part
    place: str
    classes: tuple[int, ...] | None = None
    coarse: bool = False
    channels: Literal[1, 3] = 3


SOURCES = (
    Source("mnist", "fit", "mnist", channels=1),
    Source("mnist_4_9", "fit", "mnist", classes=(4, 9), channels=1),
    Source("cifar10", "fit", "cifar10"),
    Source("cats_dogs", "fit", "cifar10", classes=(3, 5)),
    Source("imagenette", "fit", "imagenette2-224"),
    Source("digits", "fit", "digits", channels=1),
    Source("tiny_imagenet", "fit", "tiny-imagenet-20"),
    Source("chest_xray", "fit", "own-images/chest_xray", channels=1),
    Source("fashionmnist", "kept_out", "fashionmnist", channels=1),
    Source("cifar100_coarse", "kept_out", "cifar100", coarse=True),
    Source("people_vehicles", "kept_out", "cifar100", classes=(14, 18), coarse=True),
    Source("sign_digits", "kept_out", "own-images/sign_digits"),
    Source("trashnet", "kept_out", "own-images/trashnet"),
    Source("liver_tumour", "kept_out", "lits-liver-128/lits_liver_128.npz", channels=1),
)
BY_NAME = {each.name: each for each in SOURCES}


@final
@dataclass(frozen=True)
class Images:
    """Images (N, C, side, side) and class numbers of both splits."""

    train_x: torch.Tensor
    train_y: NDArray[np.int64]
    test_x: torch.Tensor
    test_y: NDArray[np.int64]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return int(max(self.train_y.max(), self.test_y.max())) + 1


def load_source(source: Source, *, side: int) -> Images:
    """Read both splits at ``side`` pixels, shuffle them by a fixed seed, and keep the chosen classes."""
    if source.place.endswith(".npz"):
        return _liver(cache_folder() / source.place, side=side)
    options = LoadOptions(image_size=side, channels=source.channels)
    known = source.place in ("mnist", "cifar10", "cifar100", "fashionmnist", "digits")
    splits = load(source.place if known else str(cache_folder() / source.place), options)
    train, test = splits.train, splits.test
    coarse = _coarse_of_fine() if source.coarse else None
    parts = []
    if test is None:  # scikit-learn's digits: the split of the demonstration is drawn by the run
        order = np.random.default_rng(0).permutation(train.num_units)
        cut = order[:360], order[360:]
        images, labels = train.images, train.labels.numpy()
        pairs = [(images[cut[1]], labels[cut[1]]), (images[cut[0]], labels[cut[0]])]
    else:
        pairs = [(train.images, train.labels.numpy()), (test.images, test.labels.numpy())]
    for images, labels in pairs:
        labels = labels if coarse is None else coarse[labels]
        kept = np.arange(len(labels)) if source.classes is None else np.flatnonzero(np.isin(labels, source.classes))
        order = np.random.default_rng(7).permutation(kept)
        new = labels[order] if source.classes is None else np.searchsorted(np.array(source.classes), labels[order])
        parts.append((images[order], new.astype(np.int64)))
    (train_x, train_y), (test_x, test_y) = parts
    return Images(train_x, train_y, test_x[:MOST_TEST], test_y[:MOST_TEST])


def _coarse_of_fine() -> NDArray[np.int64]:
    """The coarse class of each fine class of CIFAR-100, read from its binary file: (coarse, fine, 3,072 bytes)."""
    rows = np.fromfile(cache_folder() / "cifar-100-binary" / "test.bin", dtype=np.uint8).reshape(-1, 3074)
    table = np.zeros(100, dtype=np.int64)
    table[rows[:, 1]] = rows[:, 0]
    return table


def _liver(file: Path, *, side: int) -> Images:
    """Slices of liver CT with and without tumour; every fourth volume is the test split."""
    from dpvision.data.images import resized

    with np.load(file) as arrays:
        images, masks, volume = arrays["images"], arrays["masks"], arrays["volume"]
    labels = (masks == 2).any(axis=(1, 2)).astype(np.int64)
    volumes = np.unique(volume)
    test = np.isin(volume, volumes[::4])
    scaled = resized(torch.from_numpy(images)[:, None], (side, side), squash=True)
    rng = np.random.default_rng(7)
    train_rows, test_rows = rng.permutation(np.flatnonzero(~test)), rng.permutation(np.flatnonzero(test))
    return Images(scaled[train_rows], labels[train_rows], scaled[test_rows][:MOST_TEST], labels[test_rows][:MOST_TEST])
