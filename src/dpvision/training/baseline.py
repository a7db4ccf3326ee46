"""The non-private baseline: settings for training without privacy, and a baseline beside a private run.

``--no-privacy`` and ``--baseline`` use the same settings. They follow from public facts, as those of private runs do,
so that both comparisons are of defaults with defaults.

A baseline on private data is as sensitive as the data: its weights and results stay in the run's private/ folder. Its
accuracy enters the release only where the training images are public: a published dataset, or ``--public-data``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from dpvision.config import (
    AveragingSettings,
    ModelConfig,
    OptimizerSettings,
    PrivacyConfig,
    RunConfig,
    ScheduleSettings,
)
from dpvision.data import dataset_names
from dpvision.errors import PrivacyError
from dpvision.storage.files import parse_object, read_file
from dpvision.storage.run_folder import RunFolder
from dpvision.training.defaults import DEFAULT_IMAGE_SIZE, Choice, Facts, propose_mask_model, two_digits

if TYPE_CHECKING:
    from dpvision.training.trainer import Session

SMALL_DATA: Final = 20_000
BASELINE: Final = "baseline"
NEVER_PUBLISH: Final = "trained without privacy on private images: not for release"
_FEATURE_MODELS: Final = frozenset({"linear", "scatter_linear"})
_BATCH, _MASK_BATCH = 256, 16
_EPOCHS, _NETWORK_EPOCHS, _MASK_EPOCHS = 40, 20, 30
_FEWEST_STEPS, _MOST_STEPS = 300, 5000


def _model(num_units: int, facts: Facts) -> ModelConfig:
    """Few units: a linear layer on fixed wavelet features. Many small grey ones: a tanh CNN. Else a ScaleResNet-9."""
    channels, height, width = facts.image_shape
    few = num_units < SMALL_DATA
    if few and height % 4 == 0 and width % 4 == 0 and min(height, width) >= 8:
        return ModelConfig(name="scatter_linear")
    if few or (channels == 1 and height <= DEFAULT_IMAGE_SIZE):
        return ModelConfig(name="shoefit_cnn", options={"activation": "tanh"})
    return ModelConfig(name="scaleresnet9")


def fill_without_privacy(config: RunConfig, facts: Facts) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Fill in what suits ordinary training: batch, steps, optimizer and schedule. Nothing for a private run.

    A linear layer on frozen features is trained long enough to converge, with weight decay; a whole network in fewer
    epochs. The rate falls to zero along a cosine, so that no average of parameters is needed.

    Args:
        config: the configuration; open fields are None.
        facts: public facts about the data.

    Returns:
        The configuration, and what was chosen.
    """
    if config.privacy.enabled:
        return config, ()
    privacy, masks = config.privacy, config.task == "segmentation"
    num_units = privacy.num_units or two_digits(facts.num_units)
    model = config.model or (propose_mask_model() if masks else _model(num_units, facts))
    on_features = model.name in _FEATURE_MODELS or (config.transfer is not None and config.transfer.trained == "head")
    chosen: list[Choice] = []
    batch = privacy.expected_batch_size
    if batch is None:
        batch = float(min(_MASK_BATCH if masks else _BATCH, num_units))
        chosen.append(Choice("expected_batch_size", f"{batch:g}", "without noise, small batches learn faster"))
    steps = privacy.steps
    if steps is None:
        epochs = _MASK_EPOCHS if masks else _EPOCHS if on_features else _NETWORK_EPOCHS
        steps = min(_MOST_STEPS, max(_FEWEST_STEPS, math.ceil(epochs * num_units / batch)))
        chosen.append(Choice("steps", str(steps), f"{steps * batch / num_units:.0f} epochs, until it has converged"))
    update: dict[str, object] = {"privacy": privacy.model_copy(update={"expected_batch_size": batch, "steps": steps})}
    if config.optimizer is None:
        rate = 2e-3 if masks else 1e-3
        decay = 1e-2 if on_features else 5e-4
        update["optimizer"] = OptimizerSettings(name="nadam", learning_rate=rate, weight_decay=decay)
        reason = "for ordinary training; weight decay against overfitting"
        chosen.append(Choice("optimizer", f"nadam, learning rate {rate:g}, weight decay {decay:g}", reason))
        if config.schedule == ScheduleSettings() and config.averaging == AveragingSettings():
            update["schedule"] = ScheduleSettings(kind="cosine")
            chosen.append(Choice("schedule", "cosine", "the rate falls to zero"))
    return config.model_copy(update=update), tuple(chosen)


def without_privacy(asked: RunConfig) -> RunConfig:
    """Return the configuration of the baseline of a private run: the same data and model, other training.

    Args:
        asked: the private run's configuration, as the user wrote it.
    """
    kept = {"num_units", "most_rows_per_owner", "privacy_unit"}
    data = asked.data
    if data.normalisation == "released":
        data = data.model_copy(update={"normalisation": "auto"})
    return asked.model_copy(
        update={
            "name": f"{asked.name}-{BASELINE}",
            "data": data,
            "privacy": PrivacyConfig(enabled=False, **asked.privacy.model_dump(include=kept)),
            "optimizer": None,
            "schedule": ScheduleSettings(),
            "averaging": AveragingSettings(),
            "baseline": False,
        }
    )


def images_are_declared_public(config: RunConfig) -> bool:
    """Whether the training images are public: a published dataset, or declared so with ``--public-data``."""
    return config.data.public_data or config.data.source in dataset_names()


def record_baseline(private: Session, baseline: Session) -> None:
    """Keep the result of a finished baseline in the private folder of the run that it belongs to.

    Raises:
        PrivacyError: the two were not tested on the same images.
    """
    if private.splits.test.fingerprint() != baseline.splits.test.fingerprint():
        raise PrivacyError("the baseline was not tested on the test images of the private run.")
    headline = {} if baseline.final is None else baseline.final.headline()
    score = {name: headline[name] for name in ("accuracy", "dice", "mean_auc") if headline.get(name) is not None}
    model = "" if baseline.config.model is None else baseline.config.model.name
    what = f"{model}, ordinary training on the same images, {baseline.total_steps:,} steps"
    stamp = "" if images_are_declared_public(private.config) else NEVER_PUBLISH
    private.folder.write_unsafe(BASELINE, {**score, "what": what, "stamp": stamp})


def released_baseline(folder: RunFolder, config: RunConfig) -> dict[str, Any] | None:
    """Return the baseline that may appear in the release; None if there is none or the images are not public.

    Guarantee: without the declaration that the training images are public, the file is not even opened.
    """
    path = folder.private / f"unsafe_{BASELINE}.json"
    if not images_are_declared_public(config) or not path.is_file():
        return None
    found = parse_object(read_file(path), name=str(path))
    return {name: found[name] for name in ("accuracy", "dice", "mean_auc", "what") if name in found}
