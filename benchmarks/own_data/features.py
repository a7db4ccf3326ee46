"""Frozen features of the datasets, computed once and kept on disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.own_data.heads import HeadData
from benchmarks.own_data.sources import BY_NAME, load_source
from dpvision import models
from dpvision.data import cache_folder
from dpvision.data.images import resized
from dpvision.models.scattering import OpponentColours, Scattering, unit_contrast
from dpvision.training.initial_weights import fit, read_weights
from dpvision.training.pretrained import KNOWN_WEIGHTS

CACHE = cache_folder() / "own_data_features"
PRETRAINED = "efficientnet_lite0"
NATIVE_SIDES = {"mnist": 28, "fashionmnist": 28, "cifar10": 32, "cifar100": 32}
"""Many small images: they are read at their own side, and only those that are used are scaled."""
MOST_PRETRAINED, MOST_SCATTERED = 1000, 4000
"""Training rows, and test rows under pretrained weights: their features take long."""


def features(name: str, model: str, options: dict[str, Any], *, side: int, most: int) -> HeadData:
    """Features of a dataset under a model without its last layer: at most ``most`` training rows and test rows.

    Pixels are normalised as in a run on one's own images: -1 to 1, or as the pretrained weights want them.
    """
    key = json.dumps([name, model, sorted(options.items()), side, most, _constants_digest()])
    file = CACHE / f"{name}-{model}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    if not file.exists():
        _write(file, name, model, options, side=side, most=most)
    return _read(file)


def contrast_features(name: str, *, side: int, pool: int, most: int = MOST_SCATTERED) -> HeadData:
    """Scattering features at unit contrast, pooled, before whitening: (N, colours, paths, pool, pool)."""
    file = CACHE / f"{name}-contrast-{side}-{pool}-{most}.npz"
    if not file.exists():
        images = load_source(BY_NAME[name], side=side)
        scattering = Scattering((side, side))
        first_order = scattering.scales * scattering.angles
        orders = (1, first_order, scattering.paths - 1 - first_order)

        def of(x: torch.Tensor) -> np.ndarray:
            colours = x.shape[1]
            opponent = OpponentColours() if colours == 3 else torch.nn.Identity()
            with torch.no_grad():
                parts = [scattering(opponent((some.float() / 255 - 0.5) / 0.5)) for some in x.split(100)]
                done = [unit_contrast(part, colours=colours, orders=orders, pool=pool).half() for part in parts]
            return torch.cat(done).numpy()

        file.parent.mkdir(parents=True, exist_ok=True)
        train, test = of(images.train_x[:most]), of(images.test_x)
        np.savez(file, train=train, test=test, train_y=images.train_y[:most], test_y=images.test_y)
    return _read(file)


def _read(file: Path) -> HeadData:
    with np.load(file) as kept:
        train, test = (torch.from_numpy(kept[part].astype(np.float32)) for part in ("train", "test"))
        train_y, test_y = torch.from_numpy(kept["train_y"]), torch.from_numpy(kept["test_y"])
    return HeadData(train, train_y, test, test_y, int(max(train_y.max(), test_y.max())) + 1)


def _constants_digest() -> str:
    file = Path(models.__file__).parent / "constants" / "dead_leaves.json"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _write(file: Path, name: str, model: str, options: dict[str, Any], *, side: int, most: int) -> None:
    source = BY_NAME[name]
    images = load_source(source, side=NATIVE_SIDES.get(source.place, side))
    train_x, test_x = (resized(x[:most], (side, side), squash=True) for x in (images.train_x, images.test_x))
    if model == PRETRAINED:
        network = _pretrained(options)
        train_x, test_x = (x.expand(-1, 3, -1, -1) for x in (train_x, test_x))
        mean, std = 127 / 255, 128 / 255
    else:
        channels = train_x.shape[1]
        network = models.create(model, num_classes=2, in_channels=channels, seed=0, image_size=side, **options)
        mean, std = 0.5, 0.5
    front = network[:-1].eval().to(memory_format=torch.channels_last)  # pyright: ignore[reportIndexIssue]
    parts = {}
    with torch.no_grad():
        for part, x in (("train", train_x), ("test", test_x)):
            # Small parts stay in the processor's cache.
            pixels = ((some.float() / 255 - mean) / std for some in x.split(16))
            rows = [front(some.contiguous(memory_format=torch.channels_last)).half() for some in pixels]
            parts[part] = torch.cat(rows).numpy()
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **parts, train_y=images.train_y[:most], test_y=images.test_y[:most])


def _pretrained(options: dict[str, Any]) -> torch.nn.Module:
    """EfficientNet-Lite0 with its public weights; the classifier of 1,000 classes is left out."""
    network = models.create(PRETRAINED, num_classes=2, in_channels=3, seed=0, **options)
    known = KNOWN_WEIGHTS["efficientnet-lite0"]
    tensors, _ = read_weights(known.find(None))
    fit(network, tensors, rename=known.rename)
    return network
