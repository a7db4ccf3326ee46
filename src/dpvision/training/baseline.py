"""The non-private baseline: settings for training without privacy, and a baseline beside a private run.

``--no-privacy`` and ``--baseline`` use the same settings. They follow from public facts, as those of private runs do,
so that both comparisons are of defaults with defaults.

A linear head on kept features, the usual case, is softmax regression whose training time is chosen on a fifth of the
training images (``tune_head``), as anyone would do without privacy.

A baseline on private data is as sensitive as the data: its weights and results stay in the run's private/ folder. Its
accuracy enters the release only where the training images are public: a published dataset, or ``--public-data``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

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
_BATCH, _MASK_BATCH, _FEATURE_BATCH = 256, 16, 2048
_EPOCHS, _NETWORK_EPOCHS, _MASK_EPOCHS = 40, 20, 30
_FEWEST_STEPS, _MOST_STEPS = 300, 5000
_MOMENTUM, _FASTEST = 0.9, 4.0
"""Of the head's training; the largest rate, over the mean squared length of a row, is half of what would diverge."""
_HELD_OUT, _LOOK_EVERY, _MOST_ROWS = 5, 10, 10_000
"""A fifth of the rows, and of no more than this many, decides on the rate."""


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
        batch = float(min(_MASK_BATCH if masks else _FEATURE_BATCH if on_features else _BATCH, num_units))
        reason = "a linear head is cheap" if on_features else "without noise, small batches learn faster"
        chosen.append(Choice("expected_batch_size", f"{batch:g}", reason))
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


def tune_head(config: RunConfig, head: nn.Module, rows: Tensor, labels: Tensor) -> tuple[RunConfig, Choice] | None:
    """Choose how long a linear head is trained, on a fifth of the training images; None for any other network.

    Gradient descent from zero learns what most images have in common first, so that time is its regularisation. One
    training on four fifths shows the time at which the loss on the rest is least. The rate follows from it, because the
    number of steps is part of the plan.

    Args:
        config: the resolved configuration of a run without privacy that left the optimizer open.
        head: what is trained.
        rows: the features of the training images, (N, F).
        labels: their classes, (N,).

    Returns:
        The configuration and the choice.

    Guarantee: none. The rate depends on the images and their labels.

    Raises:
        PrivacyError: the run claims privacy.
    """
    if config.privacy.enabled:
        raise PrivacyError("a rate chosen on the training images is for runs without privacy.")
    linear = [layer for layer in head.modules() if any(True for _ in layer.parameters(recurse=False))]
    enough = rows.dim() == 2 and labels.dim() == 1 and len(rows) >= 2 * _HELD_OUT
    if len(linear) != 1 or not isinstance(linear[0], nn.Linear) or config.loss != "cross_entropy" or not enough:
        return None
    plan = config.plan
    some = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:_MOST_ROWS]
    rows, labels = rows[some].float(), labels[some]
    square = 1 + rows.square().sum(1).mean().item()
    fastest = _FASTEST / square
    time = _best_time(rows, labels, rate=fastest, batch=round(plan.expected_batch_size), steps=plan.steps)
    rate = float(f"{fastest * time / plan.steps:.2g}")
    optimizer = OptimizerSettings(name="sgd", learning_rate=rate, momentum=_MOMENTUM)
    update = {"optimizer": optimizer, "schedule": ScheduleSettings(), "averaging": AveragingSettings()}
    reason = "the rate with the least loss on a fifth of the training images"
    choice = Choice("optimizer", f"sgd, learning rate {rate:g}, momentum {_MOMENTUM:g}", reason)
    return config.model_copy(update=update), choice


def _best_time(rows: Tensor, labels: Tensor, *, rate: float, batch: int, steps: int) -> int:
    """Steps after which softmax regression on the last four fifths of the rows has the least loss on the first one."""
    generator = torch.Generator().manual_seed(0)
    held, kept = torch.arange(len(rows)).split([len(rows) // _HELD_OUT, len(rows) - len(rows) // _HELD_OUT])
    x, y = functional.pad(rows, (0, 1), value=1.0), labels.long()
    weights = torch.zeros(x.shape[1], int(y.max()) + 1)
    velocity = torch.zeros_like(weights)
    targets = functional.one_hot(y, weights.shape[1]).float()
    best = (math.inf, _LOOK_EVERY)
    for step in range(1, steps + 1):
        drawn = kept if len(kept) <= batch else kept[torch.randint(len(kept), (batch,), generator=generator)]
        residual = (x[drawn] @ weights).softmax(1) - targets[drawn]
        velocity = _MOMENTUM * velocity + x[drawn].T @ residual / len(drawn)
        weights = weights - rate * velocity
        if step % _LOOK_EVERY == 0:
            best = min(best, (functional.cross_entropy(x[held] @ weights, y[held]).item(), step))
    return best[1]


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
