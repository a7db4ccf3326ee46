"""What is audited: the settings of a run, a recipe or a model, moved onto synthetic images.

``session_on`` opens a training session on such images. It uses the step path of training itself, in a temporary run
folder that is stamped not for release.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from dpvision.accounting import guarantee
from dpvision.config import (
    AveragingSettings,
    DataConfig,
    ModelConfig,
    OptimizerSettings,
    PrivacyConfig,
    RunConfig,
    ScheduleSettings,
    parse_config,
    required,
)
from dpvision.data import ImageStore, Normalisation, store_of_arrays
from dpvision.data.splits import RunSplits, constant_normalisation
from dpvision.errors import ArgumentError, TamperError
from dpvision.models import entry
from dpvision.models.shoefit import height_width
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.randomness import Keys
from dpvision.release.statements import NOT_FOR_RELEASE
from dpvision.storage.files import parse_object, read_file
from dpvision.storage.run_folder import CERTIFICATE, RunFolder
from dpvision.training.defaults import Facts, fill_open_settings
from dpvision.training.prepare import calibrate
from dpvision.training.stages import model_and_stages, single_stage
from dpvision.training.start import ledger_header
from dpvision.training.trainer import Session

SYNTHETIC = "synthetic images"
LARGEST_SIDE = 32
PLAIN_RATE = 0.1
PLAIN_SGD = OptimizerSettings(name="sgd", learning_rate=PLAIN_RATE)


@final
@dataclass(frozen=True, kw_only=True)
class Subject:
    """A private, complete configuration on synthetic data, and the shape of its images (channels, height, width)."""

    name: str
    config: RunConfig
    image_shape: tuple[int, int, int]
    num_classes: int

    @property
    def delta(self) -> float:
        """The delta of its guarantee."""
        return required(self.config.privacy.delta, "delta")

    @property
    def epsilon(self) -> float:
        """Epsilon of all planned steps for adding or removing one unit."""
        mechanism = self.config.mechanism
        return guarantee([(mechanism.step_event, mechanism.steps)], delta=self.delta).epsilon


def subject_of_run(path: Path) -> Subject:
    """Take the settings of a finished run.

    Args:
        path: The run's folder. Of its data only the public shape in the certificate is read.

    Returns:
        The settings on synthetic images of the same shape.

    Raises:
        TamperError: The certificate does not state the shape.
        ArgumentError: The run has no privacy.
    """
    folder = RunFolder.open(path)
    file = folder.release / CERTIFICATE
    data = parse_object(read_file(file), name=str(file)).get("data", {})
    try:
        channels, height, width = data["image_shape"]
        shape, classes = (int(channels), int(height), int(width)), len(data["class_names"])
    except (KeyError, TypeError, ValueError) as error:
        raise TamperError(f"{file} does not say what the model was trained on.") from error
    config = parse_config(folder.read_config())
    require_classes(config)
    return _subject(config, shape, classes)


def require_classes(config: RunConfig) -> None:
    """Refuse a run with findings: the synthetic images of an audit have one class each."""
    if config.data.findings is not None:
        raise ArgumentError("audits of runs with findings are not built: audit the same settings with class folders.")


def subject_of_config(config: RunConfig) -> Subject:
    """Take the settings of a configuration, with synthetic images of the shape that its model is made for.

    Args:
        config: A private configuration that names a model.

    Returns:
        The settings on synthetic images.

    Raises:
        ArgumentError: No model is named, or the configuration has no privacy.
    """
    if config.model is None:
        raise ArgumentError("name a model: there are no images from which one could be proposed.")
    found = entry(config.model.name)
    side = config.model.options.get("image_size") or config.data.image_size or min(found.image_size, LARGEST_SIDE)
    channels = config.data.channels or found.in_channels
    classes = found.num_classes if config.task == "classification" else 2
    height, width = height_width(side if isinstance(side, str) else int(side))
    return _subject(config, (channels, height, width), classes)


def config_of_model(name: str, options: dict[str, Any]) -> RunConfig:
    """Return a small private configuration for a model: epsilon 4.3 at delta 1e-5 over 50 steps.

    Args:
        name: Name of the model.
        options: Options of the model.
    """
    sized = {"image_size": 8} if name == "linear" and "image_size" not in options else {}
    return RunConfig(
        name=name,
        task="segmentation" if entry(name).family == "segmentation" else "classification",
        data=DataConfig(source=SYNTHETIC),
        model=ModelConfig(name=name, options={**sized, **options}),
        privacy=PrivacyConfig(
            noise_multiplier=1.4, delta=1e-5, num_units=1000, expected_batch_size=150, steps=50, clip_norm=1.0
        ),
        optimizer=PLAIN_SGD,
    )


def _subject(config: RunConfig, image_shape: tuple[int, int, int], num_classes: int) -> Subject:
    if not config.privacy.enabled:
        raise ArgumentError("the settings have no privacy: there is no mechanism to test, and no epsilon to refute.")
    not_here = {"most_rows_per_owner": None, "count_noise_multiplier": None}  # facts of other data
    privacy = config.privacy.model_copy(update={"privacy_unit": "example", "adjacency": "add_remove", **not_here})
    data = DataConfig(source=SYNTHETIC, normalisation="fixed", rows_per_unit=config.data.rows_per_unit or 1)
    loss = config.loss or ("cross_entropy" if config.task == "classification" else "dice_cross_entropy")
    made_up = {"data": data, "loss": loss, "privacy": privacy, "transfer": None, "cache_features": "off"}
    config = config.model_copy(update=made_up)
    facts = Facts(num_units=1000, num_classes=num_classes, image_shape=image_shape)
    config, _ = fill_open_settings(config, facts)
    config = parse_config(calibrate(config).model_dump())
    return Subject(name=config.name, config=config, image_shape=image_shape, num_classes=num_classes)


def with_plain_sgd(config: RunConfig) -> RunConfig:
    """Replace optimizer, schedule and averaging by plain SGD, whose weights are sums of the noisy gradients.

    Post-processing does not change the guarantee, so the easiest optimizer to read is as good as any.
    """
    plain = {"optimizer": PLAIN_SGD, "schedule": ScheduleSettings(), "averaging": AveragingSettings()}
    return config.model_copy(update=plain)


AUDIT_STAMP = "an audit run: canaries or synthetic images are part of its data"


@contextmanager
def session_on(
    config: RunConfig,
    train: ImageStore,
    *,
    keys: Keys,
    model: nn.Module | None = None,
    normalisation: Normalisation | None = None,
    parent: Path | None = None,
) -> Iterator[Session]:
    """Open a training session over ``train`` in a temporary run folder.

    Args:
        config: The settings.
        train: Training images.
        keys: Randomness, not bound to the data: neighbouring stores under equal keys share draws and noise.
        model: The model, all of it trained; by default the configured one.
        normalisation: Pixel normalisation; by default the configuration's constants.
        parent: Where the temporary folder is made.

    Yields:
        The session, stamped not for release.
    """
    splits = RunSplits(train, train, None, held_out=False)
    model = model or whole_model(config, splits)
    with tempfile.TemporaryDirectory(prefix="dpvision-audit-", dir=parent) as place:
        folder = RunFolder.create(Path(place) / "run")
        with folder:
            ledger = Ledger.create(
                folder.ledger_path, ledger_header(config, keys.derive("run")[:8].hex(), hand_seeded=keys.hand_seeded)
            )
            ledger.note("declare", {"what": NOT_FOR_RELEASE, "how": AUDIT_STAMP})
            yield Session(
                config=config,
                splits=splits,
                normalisation=normalisation or constant_normalisation(config, splits),
                folder=folder,
                ledger=ledger,
                keys=keys,
                device="cpu",
                model=model,
                stages=(single_stage(model),),
            )


def whole_model(config: RunConfig, splits: RunSplits) -> nn.Module:
    """The configured model, all of it trained in one stage, on images."""
    whole = config.model_copy(update={"transfer": None, "cache_features": "off"})
    return model_and_stages(whole, splits, "cpu")[0]


def synthetic_images(count: int, image_shape: tuple[int, int, int], *, seed: int) -> NDArray[np.uint8]:
    """Return (count, channels, height, width) uniform noise, the same for equal seeds."""
    return np.random.default_rng(seed).integers(0, 256, size=(count, *image_shape), dtype=np.uint8)


def synthetic_store(
    config: RunConfig,
    images: NDArray[np.uint8],
    *,
    num_classes: int,
    labels: NDArray[np.int64] | None = None,
    unit_names: list[str] | None = None,
) -> ImageStore:
    """Return a store of synthetic images; labels (or masks, for segmentation) are random unless given."""
    shape = (len(images), *images.shape[2:]) if config.task == "segmentation" else (len(images),)
    drawn = np.random.default_rng(len(images)).integers(0, num_classes, size=shape)
    return store_of_arrays(
        images=images,
        labels=drawn if labels is None else labels,
        class_names=[f"class {number}" for number in range(num_classes)],
        name=SYNTHETIC,
        unit_names=unit_names,
    )
