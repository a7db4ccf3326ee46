"""Liver CT for recipes: the public facts of the set, and a fixed split of its small version by patient.

The parts of CIFAR-100 on which Papernot et al. pre-train: random classes, all public, as .npz files.

Public facts of the datasets that recipes name, and what is common to all settings on them.
"""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from dpvision.config import DataConfig, ModelConfig, PrivacyConfig, RunConfig
from dpvision.data import LoadOptions, known_sources, load
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
    """Axial slices of the volumes at 256 pixels; liver and tumour are one class."""
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
    """Slices that show liver, of 33 patients, split once and for all. Its test part is public, pictures and all."""
    return DataConfig(source=SMALL, test=SMALL, unit_column="volume", channels=1, **{"image_size": 32, **settings})


def make_split(*, data_dir: Path | None = None) -> Path:
    """Write the small set with its two splits below the datasets, unless it is there, and return its place."""
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
        arrays[f"{start}images"] = store.images.numpy()[rows]
        arrays[f"{start}masks"] = store.labels.numpy()[rows]
        arrays[f"{start}volume"] = patients[rows]
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    with disk_errors(f"write {path}"):
        write_atomically(path, content.getvalue())
    return path


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
    if source == SMALL and not Path(source).exists():
        place = make_split(data_dir=None if config.data.data_dir is None else Path(config.data.data_dir))
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
