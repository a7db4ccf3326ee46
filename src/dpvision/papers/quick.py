"""Any recipe as a smoke test of a few seconds: two steps of four units on small synthetic images.

The test runs the recipe's own model, optimizer, augmentation and clipping. Its results mean nothing, and the run is
stamped not for release.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.torch import save as save_safetensors

from dpvision import models
from dpvision.config import ModelConfig, RunConfig, TransferConfig
from dpvision.papers.recipe import changed
from dpvision.papers.recipe_data import dataset_of, write_npz
from dpvision.storage.files import disk_errors, write_atomically

MEANS_NOTHING: Final = "smoke test on synthetic images: its results mean nothing"
_UNITS, _TEST, _BATCH, _STEPS = 24, 12, 4, 2
_NOISE: Final = 1.0
_CLASSES: Final = 10
_SIDE: Final = 32
# These take more than seconds at 32 pixels, and any size of image.
_HUGE: Final = frozenset(
    {"smoothnet", "wrn28_10", "wrn40_4", "nf_resnet50", "nf_resnet200", "nfnet_f0", "nfnet_f3"}
    | {"unet9", "scaleunet9", "linknet9", "scalelinknet9"}
)
_HUGE_SIDE: Final = 16
# InstanceNorm of a ResNet-50 needs more than the one position that 32 pixels leave in the last stage.
_INSTANCE_SIDE: Final = 64


def quick_config(config: RunConfig, folder: Path) -> RunConfig:
    """Return a smoke test of a recipe's configuration.

    Images have at most 32 pixels (16 for the largest networks, 64 for ResNet-50 with InstanceNorm) and 10 classes;
    there are at most two views. Noise is fixed instead of calibrated. Initial weights, where a recipe takes some, are
    random.

    Args:
        config: The recipe's configuration.
        folder: Where synthetic images and weights are written.

    Returns:
        The configuration of the smoke test.
    """
    channels, side = _shape(config)
    size: dict[str, Any] = {"image_size": None, "channels": None}
    normalisation = config.data.normalisation
    data = {"source": str(_images(folder, channels, side)), "test": None, "data_dir": None, **size}
    if config.task == "segmentation":
        alone = config.data.units == "rows"
        of_masks = {"masks": None, "window": None, "unit_column": "patient", "units": "rows" if alone else "owners"}
        data |= {"source": str(_slices(folder, channels, side)), **of_masks}
    steps = {"every_steps": 1} if config.schedule.kind == "step" else {}
    return changed(
        config,
        name=f"{config.name}-quick",
        data={**data, "normalisation": "auto" if normalisation == "published" else normalisation},
        model=_fitted(config.model, side),
        views={"count": min(2, config.views.count), "crop_padding": min(4, config.views.crop_padding)},
        transfer=_with_made_up_weights(config, folder, channels, side),
        privacy={**_privacy(config), "anyway": True},
        schedule=steps,
        evaluations=1,
    )


def _shape(config: RunConfig) -> tuple[int, int]:
    """Return channels and side of the synthetic images."""
    dataset = dataset_of(config)
    channels = config.data.channels or (1 if dataset is None else dataset.channels)
    usual = config.data.image_size or (_SIDE if dataset is None else dataset.image_size)
    if dataset is None and config.data.source.endswith(".npz") and config.task == "classification":
        channels = 3  # the parts of CIFAR-100
    name = "" if config.model is None else config.model.name
    most = _HUGE_SIDE if name in _HUGE else _SIDE
    if config.model is not None and name.endswith("resnet50") and config.model.options.get("norm") == "instance":
        most = _INSTANCE_SIDE
    return channels, min(usual, most)


def _privacy(config: RunConfig) -> dict[str, Any]:
    private = {"target_epsilon": None, "noise_multiplier": _NOISE, "delta": 1e-3}
    plan = {"num_units": _UNITS, "expected_batch_size": _BATCH, "steps": _STEPS, "epochs": None}
    return {**plan, **(private if config.privacy.enabled else {})}


def _fitted(model: ModelConfig | None, side: int) -> ModelConfig | None:
    """Set the size of the images in the model's options, where it has such options."""
    if model is None:
        return None
    options = dict(model.options)
    if "image_size" in models.entry(model.name).options:
        options["image_size"] = side
    if "resize_to" in options:
        options["resize_to"] = _SIDE
    return model.model_copy(update={"options": options})


def _images(folder: Path, channels: int, side: int) -> Path:
    """Write an .npz file of noise with a stripe whose position is the class; always the same."""
    path = folder / f"made-up-{channels}x{side}x{side}.npz"
    if path.exists():
        return path
    generator = np.random.default_rng(0)
    arrays = {}
    for name, count in (("train", _UNITS), ("test", _TEST)):
        labels = np.arange(count) % _CLASSES
        images = generator.integers(0, 156, size=(count, channels, side, side), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[:, label % side] += 99
        arrays[f"x_{name}"], arrays[f"y_{name}"] = images, labels
    return write_npz(path, arrays)


def _slices(folder: Path, channels: int, side: int) -> Path:
    """Write an .npz file of noise with a bright square as the mask, in two slices of each patient."""
    path = folder / f"made-up-masks-{channels}x{side}x{side}.npz"
    if path.exists():
        return path
    generator = np.random.default_rng(0)
    arrays = {}
    for start, count in (("", 2 * _UNITS), ("test_", _TEST)):
        images = generator.integers(0, 156, size=(count, channels, side, side), dtype=np.uint8)
        masks = np.zeros((count, side, side), dtype=np.uint8)
        for row, corner in enumerate(generator.integers(0, side // 2, size=(count, 2)).tolist()):
            inside = tuple(slice(first, first + side // 2) for first in corner)
            masks[row][inside] = 1
        images += 99 * masks[:, None]
        patients = np.arange(count) // 2 + (_UNITS if start else 0)  # no patient is in both
        arrays |= {f"{start}images": images, f"{start}masks": masks, f"{start}patient": patients}
    return write_npz(path, arrays)


def _with_made_up_weights(config: RunConfig, folder: Path, channels: int, side: int) -> TransferConfig | None:
    """Replace the initial weights by a file of random ones."""
    transfer, model = config.transfer, _fitted(config.model, side)
    if transfer is None or model is None:
        return transfer
    which = hashlib.sha256(repr(sorted(model.options.items())).encode()).hexdigest()[:8]
    path = folder / f"made-up-{model.name}-{channels}x{side}-{which}.safetensors"
    if not path.exists():
        drawn = models.create(model.name, num_classes=_CLASSES, in_channels=channels, seed=1, **model.options)
        content = save_safetensors({name: value.contiguous() for name, value in drawn.state_dict().items()})
        with disk_errors(f"write {path}"):
            write_atomically(path, content)
    described = {"source": transfer.source or "made up", "licence": transfer.licence or "none"}
    head_steps = None if transfer.head_steps is None else 1
    return transfer.model_copy(update={"weights": str(path), "rename": {}, "head_steps": head_steps, **described})
