"""Public facts of the datasets that recipes name, and what is common to all settings on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from dpvision.config import DataConfig, ModelConfig, PrivacyConfig, RunConfig
from dpvision.data import known_sources
from dpvision.data.known import cache_folder
from dpvision.recipes import liver
from dpvision.recipes.recipe import changed
from dpvision.recipes.subsets import make_subset, subset_sources

DELTA: Final = 1e-5


@final
@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset as the papers used it. ``small`` is the folder of a public part of it that fits a CPU."""

    name: str
    source: str
    num_units: int
    image_size: int
    channels: int
    classes: int
    needs: str | None = None
    small: str | None = None
    small_units: int | None = None

    @property
    def in_folder(self) -> bool:
        """Whether it lies in a folder that the user must have."""
        return self.needs is not None

    def data(self, **settings: Any) -> DataConfig:
        """Its pictures. A folder's pictures are brought to one size; a known set has one."""
        if self.in_folder:
            settings = {"image_size": self.image_size, "channels": self.channels, **settings}
        return DataConfig(source=self.source, **settings)

    def steps(self, *, batch: float, epochs: float) -> int:
        """So many whole passes in steps of that size, as a loader counts them."""
        return round(math.ceil(self.num_units / batch) * epochs)

    def private(self, *, epsilon: float, batch: float, steps: int, clip_norm: float, **more: Any) -> PrivacyConfig:
        """A budget, with noise that is calibrated to it."""
        return PrivacyConfig(
            target_epsilon=epsilon,
            num_units=self.num_units,
            expected_batch_size=batch,
            steps=steps,
            clip_norm=clip_norm,
            **{"delta": DELTA, **more},
        )

    def ordinary(self, *, batch: float, steps: int) -> PrivacyConfig:
        """Training without privacy, for public pictures and for comparison."""
        return PrivacyConfig(enabled=False, num_units=self.num_units, expected_batch_size=batch, steps=steps)


def _folder(name: str, split: str) -> str:
    return f"a folder {name} with class folders in train/ and {split}/; else: dpvision train FOLDER --recipe NAME"


MNIST: Final = Dataset(name="mnist", source="mnist", num_units=60_000, image_size=28, channels=1, classes=10)
FASHION: Final = Dataset(name="fashion", source="fashionmnist", num_units=60_000, image_size=28, channels=1, classes=10)
CIFAR10: Final = Dataset(name="cifar10", source="cifar10", num_units=50_000, image_size=32, channels=3, classes=10)
CIFAR100: Final = Dataset(name="cifar100", source="cifar100", num_units=50_000, image_size=32, channels=3, classes=100)
IMAGENETTE: Final = Dataset(
    name="imagenette",
    source="imagenette2-160",
    num_units=9_469,
    image_size=160,
    channels=3,
    classes=10,
    needs=_folder("imagenette2-160", "val"),
    small="imagenette2-224",
    small_units=1_500,
)
TINY: Final = Dataset(
    name="tiny",
    source="tiny-imagenet-200",
    num_units=100_000,
    image_size=64,
    channels=3,
    classes=200,
    needs=_folder("tiny-imagenet-200", "val"),
    small="tiny-imagenet-20",
    small_units=10_000,
)
IMAGENET: Final = Dataset(
    name="imagenet",
    source="imagenet",
    num_units=1_271_167,
    image_size=224,
    channels=3,
    classes=1_000,
    needs=_folder("imagenet", "val") + " (ILSVRC2012; the source keeps 10,000 training pictures aside)",
)
PLACES: Final = Dataset(
    name="places365",
    source="places365",
    num_units=1_803_460,
    image_size=224,
    channels=3,
    classes=365,
    needs=_folder("places365", "val"),
)
ALL: Final = (MNIST, FASHION, CIFAR10, CIFAR100, IMAGENETTE, TINY, IMAGENET, PLACES)


def dataset_of(config: RunConfig) -> Dataset | None:
    """The dataset that a recipe's configuration names."""
    found = (each for each in ALL if config.data.source in (each.source, each.small))
    return next(found, None)


def reduced(
    config: RunConfig, *, batch: float, steps: int, image_size: int | None = None, small: Dataset | None = None
) -> RunConfig:
    """A configuration for two cores: smaller pictures, fewer steps of another size, and ``small``'s part of the data.

    A stepwise schedule keeps its number of drops; the curve gets at most two points,
    for a look at all test pictures costs as much as several steps.
    """
    data: dict[str, Any] = {} if image_size is None else {"image_size": image_size}
    privacy: dict[str, Any] = {"expected_batch_size": batch, "steps": steps}
    if small is not None and small.small is not None:
        data["source"] = small.small
        privacy["num_units"] = small.small_units
    schedule: dict[str, Any] = {}
    if config.schedule.every_steps is not None and config.privacy.steps is not None:
        schedule["every_steps"] = max(1, round(config.schedule.every_steps * steps / config.privacy.steps))
    transfer: Any = config.transfer
    if transfer is not None and transfer.weights.startswith("runs/"):  # an earlier recipe's run: of its reduced version
        transfer = {"weights": f"{transfer.weights.removesuffix('-1')}-cpu-1"}
    return changed(
        config,
        name=f"{config.name}-cpu",
        transfer=transfer,
        data=data,
        privacy=privacy,
        schedule=schedule,
        evaluations=min(2, config.evaluations),
        model=_fitted(config.model, image_size),
    )


def _fitted(model: ModelConfig | None, image_size: int | None) -> ModelConfig | None:
    """The model told of the pictures' new size, where it was told the old one."""
    if model is None or image_size is None or "image_size" not in model.options:
        return model
    return model.model_copy(update={"options": {**model.options, "image_size": image_size}})


def place_data(config: RunConfig) -> RunConfig:
    """The configuration with data that lies among the datasets (``$DPVISION_DATA``) named by its whole path.

    A part of CIFAR-100 is written there first if need be.
    """
    source = config.data.source
    if source in subset_sources() and not Path(source).exists():
        place = make_subset(source, data_dir=None if config.data.data_dir is None else Path(config.data.data_dir))
        return changed(config, data={"source": str(place)})
    if source == liver.SMALL and not Path(source).exists():
        place = liver.make_split(data_dir=None if config.data.data_dir is None else Path(config.data.data_dir))
        return changed(config, data={"source": str(place), "test": str(place)})
    if config.data.masks is not None:
        return _placed_pairs(config, config.data.masks)
    if source in known_sources() or Path(source).exists() or Path(source).name != source:
        return config
    folders = [Path(config.data.data_dir)] if config.data.data_dir else []
    found = (folder / source for folder in (*folders, cache_folder()) if (folder / source).is_dir())
    place = next(found, None)
    return config if place is None else changed(config, data={"source": str(place)})


def _placed_pairs(config: RunConfig, masks: str) -> RunConfig:
    """Pictures and masks below the datasets, where they are not where the configuration says."""
    source = config.data.source
    if Path(source).exists():
        return config
    folders = [*([Path(config.data.data_dir)] if config.data.data_dir else []), cache_folder()]
    found = (folder for folder in folders if (folder / source).is_dir() and (folder / masks).is_dir())
    place = next(found, None)
    if place is None:
        return config
    return changed(config, data={"source": str(place / source), "masks": str(place / masks)})
