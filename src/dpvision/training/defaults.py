"""Defaults for settings that the user left open.

They are decided from public facts only: declared sizes, never pixels or labels. The number of units is declared,
published, or counted with noise before these rules see it.

docs/evidence/rules-of-thumb.md gives the reason for each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from dpvision.accounting import propose_delta
from dpvision.config import AveragingSettings, ModelConfig, OptimizerSettings, RunConfig
from dpvision.errors import ArgumentError
from dpvision.models import catalogue, entry
from dpvision.own_code import is_own

SMALL_DATA = 20_000
SMALL_MODELS = frozenset({"shoefit_cnn", "linear", "scatter_linear"})
DEFAULT_IMAGE_SIZE = 32
DEFAULT_MASK_SIZE = 128
MASK_WIDTH, MASK_PASSES = 8, 10


@final
@dataclass(frozen=True, kw_only=True)
class Facts:
    """Public facts about the training data.

    Attributes:
        num_units: size of a published dataset; used only where no number is declared or counted.
        num_classes: declared public.
        image_shape: (channels, height, width), declared public.
        pretrained: whether a head is trained on the features of installed pretrained weights (1280 of them).
    """

    num_units: int
    num_classes: int
    image_shape: tuple[int, int, int]
    pretrained: bool = False


@final
@dataclass(frozen=True)
class Choice:
    """One open setting, the value chosen for it, and the reason."""

    setting: str
    value: str
    reason: str


def fill_open_settings(config: RunConfig, facts: Facts) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Fill in every open setting but the noise multiplier.

    Args:
        config: the configuration, with units named and counted.
        facts: public facts about the data.

    Returns:
        The filled configuration, and what was chosen.

    Raises:
        ArgumentError: the model does not suit the task.
    """
    choices: list[Choice] = []
    privacy = config.privacy
    updates: dict[str, object] = {}

    def choose(setting: str, value: object, reason: str) -> None:
        updates[setting] = value
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        choices.append(Choice(setting, shown, reason))

    num_units = privacy.num_units or two_digits(facts.num_units)
    if privacy.num_units is None:
        choose("num_units", num_units, "the size of a published dataset, or of one without privacy, to two digits")
    if privacy.delta is None and privacy.enabled:
        # A number that was counted with noise may be far too small: delta goes by how many there could be.
        most = num_units + math.ceil(3 * (privacy.count_noise_multiplier or 0.0))
        choose("delta", propose_delta(most), "a power of ten clearly below 1 / num_units")
    masks = config.task == "segmentation"
    model = config.model or (propose_mask_model() if masks else propose_model(num_units, facts))
    require_fitting_model(model, masks=masks)
    small = model.name in SMALL_MODELS
    batch = privacy.expected_batch_size
    if batch is None:
        batch = float(propose_mask_batch(num_units) if masks else propose_batch(num_units, small=small))
        choose("expected_batch_size", batch, "large batches win at a fixed epsilon")
    if privacy.steps is None:
        passes = MASK_PASSES if masks else 20 if model.name.startswith("scatter") else 40
        steps = propose_steps(num_units, batch, privacy.target_epsilon or 8.0, passes=passes)
        choose("steps", steps, f"{steps * batch / num_units:.0f} passes; fewer when epsilon is small")
    if privacy.clip_norm is None and privacy.enabled:
        choose("clip_norm", 1.0 if masks else 0.5 if small else 1.5, "the value that works for this family of models")
    optimizer = config.optimizer or propose_optimizer(model.name)
    if config.optimizer is None:
        text = f"{optimizer.name}, learning rate {optimizer.learning_rate:g}"
        reason = "usual; not tuned for your model" if is_own(model.name) else "tuned for this family on public data"
        choices.append(Choice("optimizer", text, reason))
    if config.model is None:
        few = small or masks
        choices.insert(0, Choice("model", model.name, "few parameters suit few units" if few else "enough units"))
    loss = config.loss or ("dice_cross_entropy" if masks else "cross_entropy")
    if config.loss is None and masks:
        choices.append(Choice("loss", loss, "Dice sees small organs, cross-entropy has a gradient everywhere"))
    averaging = config.averaging
    if config.optimizer is None and averaging.kind == "none":
        averaging = AveragingSettings(kind="ema", decay=0.95)
        choices.append(Choice("averaging", "ema, decay 0.95", "averages noise away and costs no epsilon"))
    filled = config.model_copy(
        update={
            "privacy": privacy.model_copy(update=updates),
            "model": fit_model(model, facts),
            "optimizer": optimizer,
            "averaging": averaging,
            "loss": loss,
        }
    )
    return filled, tuple(choices)


def two_digits(count: int) -> int:
    """Round to two significant digits."""
    power = 10 ** max(0, len(str(count)) - 2)
    return max(1, round(count / power) * power)


def propose_model(num_units: int, facts: Facts) -> ModelConfig:
    """Few units: a linear layer on fixed wavelet features. Many small grey ones: a tanh CNN. Else a ScaleResNet-9."""
    channels, height, width = facts.image_shape
    few = num_units < SMALL_DATA
    if few and height % 4 == 0 and width % 4 == 0 and min(height, width) >= 8:
        return ModelConfig(name="scatter_linear")
    if few or (channels == 1 and height <= DEFAULT_IMAGE_SIZE):
        return ModelConfig(name="shoefit_cnn", options={"activation": "tanh"})
    return ModelConfig(name="scaleresnet9")


def propose_mask_model() -> ModelConfig:
    """A narrow ScaleLinkNet-9 with a convolutional head: the cheapest of the family, and no worse."""
    return ModelConfig(name="scalelinknet9", options={"width": MASK_WIDTH, "head": "conv"})


def require_fitting_model(model: ModelConfig, *, masks: bool) -> None:
    """Refuse a model that does not suit the task: segmentation needs one map per class, classification one score.

    The outputs of an own model show it, once they are computed.
    """
    if not is_own(model.name) and (entry(model.name).family == "segmentation") != masks:
        fitting = [found.name for found in catalogue() if (found.family == "segmentation") == masks]
        task = "segmentation" if masks else "classification"
        raise ArgumentError(f"model must be one for {task}, got {model.name}. There are: {', '.join(fitting)}.")


def fit_model(model: ModelConfig, facts: Facts) -> ModelConfig:
    """Set the input size of models that need one."""
    if not is_own(model.name) and "image_size" in entry(model.name).options and "image_size" not in model.options:
        return model.model_copy(update={"options": {**model.options, "image_size": facts.image_shape[1]}})
    return model


def propose_batch(num_units: int, *, small: bool) -> int:
    """A tenth of the data and at least 512 for small models; 1024 to 4096 for large ones. Never above half."""
    wanted = max(512, num_units // 10) if small else min(4096, max(1024, num_units // 24))
    return max(1, min(wanted, num_units // 2))


def propose_mask_batch(num_units: int) -> int:
    """A quarter of the units, at most 512: images with masks are few and large."""
    return max(1, min(512, num_units // 4))


def propose_steps(num_units: int, batch: float, target_epsilon: float, *, passes: int = 40) -> int:
    """``passes`` passes at epsilon 3, fewer below, more above; 50 to 2000 steps."""
    scaled = passes * min(2.0, max(0.25, (target_epsilon / 3) ** 0.5))
    return max(50, min(2000, round(scaled * num_units / batch)))


def propose_optimizer(model: str) -> OptimizerSettings:
    """Momentum SGD for small models, NAdam for residual ones, a little faster where they are narrow."""
    if not is_own(model) and entry(model).family == "segmentation":
        return OptimizerSettings(name="nadam", learning_rate=2e-3)
    if model.startswith("scatter"):
        return OptimizerSettings(name="sgd", learning_rate=2.0, momentum=0.7)
    if model in SMALL_MODELS:
        return OptimizerSettings(name="sgd", learning_rate=4.0, momentum=0.7)
    return OptimizerSettings(name="nadam", learning_rate=1e-3)
