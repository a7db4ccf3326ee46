"""What is audited: the settings of a run, of a recipe or of a model, moved onto made-up pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from dpvision.accounting import guarantee
from dpvision.checks import ArgumentError, TamperError
from dpvision.config import DataConfig, ModelConfig, PrivacyConfig, RunConfig, parse_config, required
from dpvision.models import entry
from dpvision.optim import AveragingSettings, OptimizerSettings, ScheduleSettings
from dpvision.runfolder import CERTIFICATE, RunFolder, parse_object, read_file
from dpvision.training.prepare import calibrate
from dpvision.training.proposals import Facts, fill_open_settings

MADE_UP = "made-up pictures"
LARGEST_SIDE = 32
PLAIN_SGD = OptimizerSettings(name="sgd", learning_rate=0.1)


@final
@dataclass(frozen=True, kw_only=True)
class Subject:
    """A private, resolved configuration whose data are made up, and the shape of its pictures."""

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
        """What the whole plan spends for adding or removing one unit."""
        mechanism = self.config.mechanism
        return guarantee([(mechanism.step_event, mechanism.steps)], delta=self.delta).epsilon


def subject_of_run(path: Path) -> Subject:
    """The settings of a finished run. Nothing of its data is read but its public shape."""
    folder = RunFolder.open(path)
    file = folder.release / CERTIFICATE
    data = parse_object(read_file(file), name=str(file)).get("data", {})
    try:
        channels, height, width = data["image_shape"]
        shape, classes = (int(channels), int(height), int(width)), len(data["class_names"])
    except (KeyError, TypeError, ValueError) as error:
        raise TamperError(f"{file} does not say what the model was trained on.") from error
    return _subject(parse_config(folder.read_config()), shape, classes)


def subject_of_config(config: RunConfig) -> Subject:
    """The settings of a configuration, with pictures of the shape that its model is made for."""
    if config.model is None:
        raise ArgumentError("name a model: there are no pictures from which one could be proposed.")
    found = entry(config.model.name)
    side = config.model.options.get("image_size") or config.data.image_size or min(found.image_size, LARGEST_SIDE)
    channels = config.data.channels or found.in_channels
    classes = found.num_classes if config.task == "classification" else 2
    return _subject(config, (channels, int(side), int(side)), classes)


def config_of_model(name: str, options: dict[str, Any]) -> RunConfig:
    """A small private plan for a model: epsilon 4.3 at delta 1e-5 over 50 steps."""
    sized = {"image_size": 8} if name == "linear" and "image_size" not in options else {}
    return RunConfig(
        name=name,
        task="segmentation" if entry(name).family == "segmentation" else "classification",
        data=DataConfig(source=MADE_UP),
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
    data = DataConfig(source=MADE_UP, normalisation="fixed", rows_per_unit=config.data.rows_per_unit or 1)
    loss = config.loss or ("cross_entropy" if config.task == "classification" else "dice_cross_entropy")
    made_up = {"data": data, "loss": loss, "privacy": privacy, "transfer": None, "cache_features": "off"}
    config = config.model_copy(update=made_up)
    facts = Facts(num_units=1000, num_classes=num_classes, image_shape=image_shape)
    config, _ = fill_open_settings(config, facts)
    config = parse_config(calibrate(config).model_dump())
    return Subject(name=config.name, config=config, image_shape=image_shape, num_classes=num_classes)


def with_plain_sgd(config: RunConfig) -> RunConfig:
    """The same mechanism, with steps whose weights add up every noisy gradient.

    What comes after the noise can't change the guarantee, so nothing is lost by choosing what is easiest to read.
    """
    plain = {"optimizer": PLAIN_SGD, "schedule": ScheduleSettings(), "averaging": AveragingSettings()}
    return config.model_copy(update=plain)
