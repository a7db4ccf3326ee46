"""The non-private baseline: settings for training without privacy, and a baseline beside a private run.

``--no-privacy`` and ``--baseline`` use the same settings. They follow from public facts, as those of private runs do,
so that both comparisons are of defaults with defaults.

A linear head on kept features, the usual case, is softmax regression on pixels or on wavelet features
(``choose_features``), whose training time is chosen too (``tune_head``): both on a fifth of the training images, as
anyone would do without privacy. Of choices that are equally good as far as that fifth can tell (within one standard
error; Breiman et al. 1984), the simplest is taken: it has learned the least that holds for the training images alone.

A baseline on private data is as sensitive as the data: its weights and results stay in the run's private/ folder. Its
accuracy enters the release only where the training images are public: a published dataset, or ``--public-data``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpvision.accounting import propose_delta
from dpvision.config import (
    AveragingSettings,
    ModelConfig,
    OptimizerSettings,
    PrivacyConfig,
    RunConfig,
    ScheduleSettings,
)
from dpvision.data import ImageStore, dataset_names
from dpvision.errors import PrivacyError
from dpvision.models import create
from dpvision.storage.files import parse_object, read_file
from dpvision.storage.run_folder import RunFolder
from dpvision.training.defaults import (
    HEAD_POOL,
    LEAST_RIDGE,
    USUAL_EPSILON,
    Choice,
    Facts,
    full_signal,
    propose_mask_model,
    propose_model,
    two_digits,
)

if TYPE_CHECKING:
    from dpvision.training.trainer import Session

BASELINE: Final = "baseline"
NEVER_PUBLISH: Final = "trained without privacy on private images: not for release"
_FEATURE_MODELS: Final = frozenset({"linear", "scatter_linear"})
_BATCH, _MASK_BATCH, _FEATURE_BATCH = 256, 16, 2048
_EPOCHS, _NETWORK_EPOCHS, _MASK_EPOCHS = 40, 20, 30
_FEWEST_STEPS, _MOST_STEPS = 300, 5000
_MOMENTUM, _FASTEST = 0.9, 4.0
"""Of the head's training; the largest rate, over the mean squared length of a row, is half of what would diverge."""
_HELD_OUT, _LOOK_EVERY, _MOST_ROWS, _MOST_CHOOSING = 5, 10, 10_000, 3000
"""A fifth of the rows decides: on the rate of no more than 10,000 rows, on the features of no more than 3,000."""
_LEAST_SIDE, _TOGETHER, _MOST_NUMBERS = 8, 64, 10**8


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
    signal = full_signal(num_units, epsilon=USUAL_EPSILON, delta=propose_delta(num_units))
    model = config.model or (propose_mask_model() if masks else propose_model(facts, signal=signal))
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
            update |= {"schedule": ScheduleSettings(kind="cosine"), "averaging": AveragingSettings(kind="none")}
            chosen.append(Choice("schedule", "cosine", "the rate falls to zero"))
    return config.model_copy(update=update), tuple(chosen)


def choose_features(config: RunConfig, store: ImageStore) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Choose pixels or wavelet features for a linear head that no one has named, on a fifth of the training units.

    Args:
        config: as the user wrote it; a run with privacy, a model or another loss stays as it is.
        store: the training images.

    Returns:
        The configuration and the choice.

    Guarantee: none for a run without privacy. A private run's images are not looked at.
    """
    named = config.model is not None or config.optimizer is not None or config.loss not in (None, "cross_entropy")
    channels, *sides = store.image_shape
    scatters = channels in (1, 3) and min(sides) >= _LEAST_SIDE and not any(side % 4 for side in sides)
    if config.privacy.enabled or named or config.task != "classification":
        return config, ()
    if store.labels.dim() != 1 or not scatters:
        return config, ()
    # Units in an order of their own, held out as a whole.
    order = torch.randperm(store.num_units, generator=torch.Generator().manual_seed(0))[store.unit_of_row]
    rows = order.argsort()[: min(_MOST_CHOOSING, _MOST_NUMBERS // math.prod(store.image_shape))]
    held = int((order[rows] <= order[rows[len(rows) // _HELD_OUT]]).sum())
    if not 1 <= held < len(rows):
        return config, ()
    labels = store.labels[rows]
    pool = min(HEAD_POOL, *(side // 4 for side in sides))
    candidates = (
        ModelConfig(name="linear"),
        ModelConfig(name="scatter_linear", options={"standardise": "whitened", "pool": pool, "ridge": LEAST_RIDGE}),
    )
    errors: list[float] = []
    for model in candidates:
        size = (sides[0], sides[1])
        network = create(model.name, num_classes=2, in_channels=channels, seed=0, image_size=size, **model.options)
        backbone = nn.Sequential(*list(network.children())[:-1])
        with torch.no_grad():
            parts = (torch.as_tensor(store.images[some]).float() / 127.5 - 1 for some in rows.split(_TOGETHER))
            features = torch.cat([backbone(some) for some in parts])
        steps = max(_FEWEST_STEPS, math.ceil(_EPOCHS * len(rows) / _FEATURE_BATCH))
        errors.append(_search_time(features, labels, held=held, batch=_FEATURE_BATCH, steps=steps).error)
    enough = min(errors) + math.sqrt(max(min(errors), 1 / held) * (1 - min(errors)) / held)
    chosen = next(model for model, error in zip(candidates, errors, strict=True) if error <= enough)
    what = "pixels" if chosen.name == "linear" else "wavelet features"
    choice = Choice("model", chosen.name, f"{what}, the simplest within one standard error on a fifth of the images")
    return config.model_copy(update={"model": chosen}), (choice,)


def tune_head(config: RunConfig, head: nn.Module, rows: Tensor, labels: Tensor) -> tuple[RunConfig, Choice] | None:
    """Choose how long a linear head is trained, on a fifth of the training images; None for any other network.

    Gradient descent from zero learns what most images have in common first, so that time is its regularisation. One
    training on four fifths shows the shortest time at which the loss on the rest is within one standard error of the
    least one. The rate follows from it, because the number of steps is part of the plan.

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
    fastest = _FASTEST / (1 + rows.square().sum(1).mean().item())
    batch = round(plan.expected_batch_size)
    found = _search_time(rows, labels, held=len(rows) // _HELD_OUT, batch=batch, steps=plan.steps)
    rate = float(f"{fastest * found.steps / plan.steps:.2g}")
    optimizer = OptimizerSettings(name="sgd", learning_rate=rate, momentum=_MOMENTUM)
    update = {"optimizer": optimizer, "schedule": ScheduleSettings(), "averaging": AveragingSettings()}
    reason = "the least rate whose loss on a fifth of the training images is within one standard error of the best"
    choice = Choice("optimizer", f"sgd, learning rate {rate:g}, momentum {_MOMENTUM:g}", reason)
    return config.model_copy(update=update), choice


@final
@dataclass(frozen=True)
class _Found:
    """The time of a training, and the share of wrong predictions on held-out rows after it."""

    steps: int
    error: float


def _search_time(rows: Tensor, labels: Tensor, *, held: int, batch: int, steps: int) -> _Found:
    """Find how long softmax regression on all but the first ``held`` rows improves the loss on these."""
    generator = torch.Generator().manual_seed(0)
    x, y = functional.pad(rows, (0, 1), value=1.0), labels.long()
    rate = _FASTEST / x.square().sum(1).mean().item()
    kept = torch.arange(held, len(x))
    weights = torch.zeros(x.shape[1], int(y.max()) + 1)
    velocity = torch.zeros_like(weights)
    targets = functional.one_hot(y, weights.shape[1]).float()
    looks: list[tuple[float, float, _Found]] = []
    for step in range(1, steps + 1):
        drawn = kept if len(kept) <= batch else kept[torch.randint(len(kept), (batch,), generator=generator)]
        residual = (x[drawn] @ weights).softmax(1) - targets[drawn]
        velocity = _MOMENTUM * velocity + x[drawn].T @ residual / len(drawn)
        weights = weights - rate * velocity
        if step % _LOOK_EVERY == 0 or step == steps:
            scores = x[:held] @ weights
            losses = functional.cross_entropy(scores, y[:held], reduction="none")
            error = 1 - scores.argmax(1).eq(y[:held]).float().mean().item()
            deviation = losses.std().item() if held > 1 else 0.0
            looks.append((losses.mean().item(), deviation / math.sqrt(held), _Found(step, error)))
    least, deviation, _ = min(looks, key=lambda look: look[0])
    return next(found for loss, _, found in looks if loss <= least + deviation)


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
