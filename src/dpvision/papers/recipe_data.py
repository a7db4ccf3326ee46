"""The datasets of the recipes: public facts, settings that are common to all recipes on them, and derived files.

``Dataset`` describes a dataset as the papers used it and builds configurations on it. Two sources are derived from
other data and written into the cache on first use: random classes of CIFAR-100 (Papernot et al. pre-train on them) and
a split of a small liver CT set by patient. ``place_data`` finds or writes what a recipe names.
"""

from __future__ import annotations

import io
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from dpvision.config import (
    AveragingSettings,
    DataConfig,
    ModelConfig,
    OptimizerSettings,
    Option,
    PrivacyConfig,
    RunConfig,
)
from dpvision.data import LoadOptions, dataset_names, load
from dpvision.data.datasets import cache_folder
from dpvision.data.store import ImageStore
from dpvision.errors import ArgumentError
from dpvision.papers.recipe import changed
from dpvision.storage.files import disk_errors, write_atomically

FOLDER: Final = "Task03_Liver"
NEEDS: Final = (
    "the Medical Segmentation Decathlon's task 3 (liver) as a folder Task03_Liver with imagesTr/ and labelsTr/; at "
    "--scale cpu lits-liver-128/lits_liver_128.npz (images, masks, volume) among the datasets"
)
# 131 volumes with 58,638 slices; a fifth of the patients is held out.
SLICES, PATIENTS = 47_000, 105
SMALL: Final = "lits-liver-split.npz"
SMALL_SLICES, SMALL_PATIENTS = 1_700, 26
_SMALL_FILE: Final = Path("lits-liver-128") / "lits_liver_128.npz"
_EVERY: Final = 5  # every fifth patient tests
WINDOW: Final = (-150.0, 200.0)


def whole_set(**settings: Any) -> DataConfig:
    """Return the data section of the whole liver set: axial slices at 256 pixels; liver and tumour are one class."""
    return DataConfig(
        source=f"{FOLDER}/imagesTr",
        masks=f"{FOLDER}/labelsTr",
        window=WINDOW,
        image_size=256,
        channels=1,
        holdout_fraction=0.2,
        **settings,
    )


def small_set(**settings: Any) -> DataConfig:
    """Return the data section of the small liver set: 33 patients in a fixed split; its test part is public."""
    return DataConfig(source=SMALL, test=SMALL, unit_column="volume", channels=1, **{"image_size": 32, **settings})


def make_split(*, data_dir: Path | None = None) -> Path:
    """Write the small liver set with its two splits into the dataset cache, unless it exists.

    Args:
        data_dir: Where to look for the original file besides the cache.

    Returns:
        Path of the .npz file.

    Raises:
        ArgumentError: The original file is not available.
    """
    path = cache_folder() / "subsets" / SMALL
    if path.exists():
        return path
    folders = [*([] if data_dir is None else [data_dir]), cache_folder()]
    found = [folder / _SMALL_FILE for folder in folders if (folder / _SMALL_FILE).is_file()]
    if not found:
        raise ArgumentError(f"{SMALL} is made of {_SMALL_FILE}, which is not among the datasets in {folders[0]}.")
    options = LoadOptions(segmentation=True, mask_classes="classes", unit_column="volume", units="rows")
    store = load(found[0], options).train
    patients = np.array(store.owners, dtype=str)
    tests = np.isin(patients, sorted(set(patients.tolist()), key=int)[1::_EVERY])
    arrays: dict[str, Any] = {}
    for start, rows in (("", ~tests), ("test_", tests)):
        arrays[f"{start}images"] = store.images[:].numpy()[rows]
        arrays[f"{start}masks"] = store.labels.numpy()[rows]
        arrays[f"{start}volume"] = patients[rows]
    return write_npz(path, arrays, compressed=True)


def write_npz(path: Path, arrays: Mapping[str, Any], *, compressed: bool = False) -> Path:
    """Write arrays to an .npz file in one piece, and return its path."""
    content = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(content, **arrays)
    with disk_errors(f"write {path}"):
        write_atomically(path, content.getvalue())
    return path


_SEED: Final = 2019  # every machine draws the same classes


@final
@dataclass(frozen=True)
class Subset:
    """A number of random classes of CIFAR-100, merged evenly into ``labels`` classes."""

    classes: int
    labels: int

    @property
    def num_rows(self) -> int:
        """Number of training images: 500 per class."""
        return 500 * self.classes

    def chosen(self, draw: int = 1) -> list[int]:
        """Return the classes of a draw, in the order in which they were drawn. The choice is public."""
        return random.Random(_SEED + draw - 1).sample(range(100), self.classes)  # noqa: S311


SUBSETS: Final = {"min10": Subset(10, 10), "half50": Subset(50, 10)}


def subset_source(kind: str, draw: int = 1) -> str:
    """Return the source name of a draw of classes in configurations; ``make_subset`` writes its file."""
    return f"cifar100-{kind}{'' if draw == 1 else f'-draw{draw}'}.npz"


def subset_of(source: str) -> tuple[str, int] | None:
    """Return the kind and the draw of a source name from ``subset_source``; None for other sources."""
    found = re.fullmatch(rf"cifar100-({'|'.join(SUBSETS)})(?:-draw([1-9][0-9]{{0,3}}))?\.npz", source)
    return None if found is None else (found[1], int(found[2] or 1))


def with_draw(config: RunConfig, draw: int) -> RunConfig:
    """Return the configuration on another draw of its classes, if its data is such a draw."""
    found = subset_of(config.data.source)
    return config if found is None else changed(config, data={"source": subset_source(found[0], draw)})


def make_subset(source: str, *, data_dir: Path | None = None) -> Path:
    """Write a subset of CIFAR-100 into the dataset cache, unless it exists.

    Args:
        source: Name from ``subset_source``.
        data_dir: Where to look for CIFAR-100 besides the cache.

    Returns:
        Path of the .npz file.
    """
    found = subset_of(source)
    if found is None:
        raise ArgumentError(f"there is no part of CIFAR-100 that is called {source!r}.")
    classes, labels = SUBSETS[found[0]].chosen(found[1]), SUBSETS[found[0]].labels
    path = cache_folder() / "subsets" / source
    if path.exists():
        return path
    splits = load("cifar100", LoadOptions(data_dir=None if data_dir is None else str(data_dir)))
    arrays = {}
    for name, store in (("train", splits.train), ("test", splits.test)):
        if store is not None:
            arrays[f"x_{name}"], arrays[f"y_{name}"] = _part(store, classes, labels)
    return write_npz(path, arrays)


def _part(store: ImageStore, classes: list[int], labels: int) -> tuple[np.ndarray, np.ndarray]:
    number = np.full(100, -1)
    for place, label in enumerate(classes):
        number[label] = place % labels
    merged = number[store.labels.numpy()]
    kept = merged >= 0
    return store.images[:].numpy()[kept], merged[kept]


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
        """Whether it lies in a folder that the user must provide."""
        return self.needs is not None

    def data(self, **settings: Any) -> DataConfig:
        """Return its data section. Images in a folder are resized to one size; a known dataset has one."""
        if self.in_folder:
            settings = {"image_size": self.image_size, "channels": self.channels, **settings}
        return DataConfig(source=self.source, **settings)

    def steps(self, *, batch: float, epochs: float) -> int:
        """Return the steps of this many passes, counted as a data loader counts them."""
        return round(math.ceil(self.num_units / batch) * epochs)

    def budget(self, epsilon: float | None, *, batch: float, steps: int, **private: Any) -> PrivacyConfig:
        """Return the privacy section.

        Args:
            epsilon: The target to which the noise is calibrated; None trains without privacy.
            batch: Expected batch size.
            steps: Number of steps.
            private: Further fields of a private run, such as ``clip_norm`` (default 1) and ``delta`` (default 1e-5).
        """
        plan: dict[str, Any] = {"num_units": self.num_units, "expected_batch_size": batch, "steps": steps}
        if epsilon is None:
            return PrivacyConfig(enabled=False, **plan)
        return PrivacyConfig(target_epsilon=epsilon, **plan, **{"clip_norm": 1.0, "delta": DELTA, **private})

    def config(self, name: str, model: str, options: Mapping[str, Option] | None = None, **sections: Any) -> RunConfig:
        """Return a configuration on this dataset.

        Args:
            name: Name of the recipe.
            model: Name of the model.
            options: Options of the model.
            sections: Further sections of the configuration; ``data`` defaults to ``self.data()``.
        """
        made = ModelConfig(name=model, options=dict(options or {}))
        return RunConfig(name=name, model=made, **{"data": self.data(), **sections})


def sgd(learning_rate: float, momentum: float = 0.0) -> OptimizerSettings:
    """Return settings of SGD, the optimizer of most recipes."""
    return OptimizerSettings(name="sgd", learning_rate=learning_rate, momentum=momentum)


def ema(decay: float) -> AveragingSettings:
    """Return settings of an exponential moving average of the weights."""
    return AveragingSettings(kind="ema", decay=decay)


def _folder(name: str) -> str:
    return f"a folder {name} with class folders in train/ and val/; else: dpvision train FOLDER --recipe NAME"


def _known(name: str, source: str, num_units: int, image_size: int, channels: int, classes: int = 10) -> Dataset:
    return Dataset(
        name=name, source=source, num_units=num_units, image_size=image_size, channels=channels, classes=classes
    )


def _in_folder(base: Dataset, *, note: str = "", small: str | None = None, small_units: int | None = None) -> Dataset:
    return replace(base, needs=_folder(base.source) + note, small=small, small_units=small_units)


MNIST: Final = _known("mnist", "mnist", 60_000, 28, 1)
FASHION: Final = _known("fashion", "fashionmnist", 60_000, 28, 1)
CIFAR10: Final = _known("cifar10", "cifar10", 50_000, 32, 3)
CIFAR100: Final = _known("cifar100", "cifar100", 50_000, 32, 3, 100)
IMAGENETTE: Final = _in_folder(
    _known("imagenette", "imagenette2-160", 9_469, 160, 3), small="imagenette2-224", small_units=1_500
)
TINY: Final = _in_folder(
    _known("tiny", "tiny-imagenet-200", 100_000, 64, 3, 200), small="tiny-imagenet-20", small_units=10_000
)
IMAGENET: Final = _in_folder(
    _known("imagenet", "imagenet", 1_271_167, 224, 3, 1_000),
    note=" (ILSVRC2012; the source keeps 10,000 training images aside)",
)
PLACES: Final = _in_folder(_known("places365", "places365", 1_803_460, 224, 3, 365))
IMAGENET32: Final = replace(
    _known("imagenet32", "imagenet32", 1_281_167, 32, 3, 1_000), needs="a folder imagenet32 of downsampled ImageNet"
)
ALL: Final = (MNIST, FASHION, CIFAR10, CIFAR100, IMAGENETTE, TINY, IMAGENET, IMAGENET32, PLACES)


def dataset_of(config: RunConfig) -> Dataset | None:
    """Return the dataset that a configuration names, or None."""
    found = (each for each in ALL if config.data.source in (each.source, each.small))
    return next(found, None)


def reduced(
    config: RunConfig, *, batch: float, steps: int, image_size: int | None = None, small: Dataset | None = None
) -> RunConfig:
    """Reduce a configuration for two cores.

    A stepwise schedule keeps its number of drops. The test set is evaluated at most twice, because one evaluation costs
    as much as several steps.

    Args:
        config: The configuration at the paper's scale.
        batch: New expected batch size.
        steps: New number of steps.
        image_size: New side of the images, in pixels.
        small: A dataset whose small public part replaces the data.

    Returns:
        The reduced configuration, named ``…-cpu``.
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
    """Set the new size of the images in the model's options, where the old one is set."""
    if model is None or image_size is None or "image_size" not in model.options:
        return model
    return model.model_copy(update={"options": {**model.options, "image_size": image_size}})


def place_data(config: RunConfig) -> RunConfig:
    """Replace a recipe's data source by its full path, and write derived data first if needed.

    Args:
        config: A recipe's configuration. Its source is looked up in ``data.data_dir`` and in the dataset cache
            (``$DPVISION_DATA``).

    Returns:
        The configuration with the path of its data; unchanged if the source exists or is not found.

    Raises:
        ArgumentError: Derived data cannot be made because what it is made of is missing.
    """
    source, masks = config.data.source, config.data.masks
    if source in dataset_names() or Path(source).exists():
        return config
    data_dir = None if config.data.data_dir is None else Path(config.data.data_dir)
    if subset_of(source) is not None:
        return changed(config, data={"source": str(make_subset(source, data_dir=data_dir))})
    if source == SMALL:
        place = str(make_split(data_dir=data_dir))
        return changed(config, data={"source": place, "test": place})
    if masks is None and Path(source).name != source:
        return config
    names = {"source": source} if masks is None else {"source": source, "masks": masks}
    for folder in (*([] if data_dir is None else [data_dir]), cache_folder()):
        if all((folder / name).is_dir() for name in names.values()):
            return changed(config, data={key: str(folder / name) for key, name in names.items()})
    return config
