"""Membership inference on a finished run: given the model and an image, was the image in the training data?

``loss_attack`` uses the released model alone (Yeom et al. 2018). ``shadow_attack`` also trains shadow models and tests
a likelihood ratio (LiRA, Carlini et al. 2022). All results are functions of private images, computed without noise, and
belong in ``private/``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpvision.audit.audited_runs import require_classes, session_on, whole_model
from dpvision.audit.bounds import Attack, attack_metrics, likelihood_ratio, metrics_by_class
from dpvision.config import parse_config
from dpvision.data import ImageStore, LoadOptions, Normalisation, load_one
from dpvision.data.splits import RunSplits, holdout_keys, load_splits
from dpvision.errors import ArgumentError, DataError
from dpvision.inference.load import ReleasedModel, load_model
from dpvision.models.losses import RowLoss, loss_for
from dpvision.own_code import is_own
from dpvision.privacy.randomness import Keys
from dpvision.storage.run_folder import RunFolder
from dpvision.training.trainer import take_step

FEWEST_SHADOWS: Final = 4
_BATCH: Final = 256


@final
@dataclass(frozen=True)
class Sides:
    """The images of an attack: ``members`` were trained on, ``others`` were not."""

    members: ImageStore
    others: ImageStore


@final
@dataclass(frozen=True, kw_only=True)
class MembershipAudit:
    """An attack on one model: all images together, and each class where images have one."""

    method: str
    shadows: int
    whole: Attack
    by_class: dict[str, Attack | None]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        classes = {name: None if attack is None else asdict(attack) for name, attack in self.by_class.items()}
        return {"method": self.method, "shadows": self.shadows, **asdict(self.whole), "by_class": classes}


def sides_of(run: Path, released: ReleasedModel, *, members: str | None, others: str | None) -> Sides:
    """Load members and non-members: the run's own training and test images, or those that are named instead.

    Args:
        run: Folder of the run.
        released: Its released model.
        members: Source of other members; None takes the run's training images.
        others: Source of other non-members; None takes the run's test images.

    Returns:
        Both sides, with images of the model's shape.

    Raises:
        DataError: The run's training images have changed since it was trained.
        ArgumentError: A source is named for images with masks.
    """
    if members is not None and others is not None:
        return Sides(_named(members, released), _named(others, released))
    require_classes(released.config)
    folder = RunFolder.open(run)
    stored = folder.load_key()
    own = load_splits(parse_config(folder.read_whole_config()), holdout_keys(stored.keys, stored.run_id))
    if members is None and own.train.fingerprint() != stored.bindings[-1].get("data"):
        raise DataError("the run's training images are not what they were. Name some with --members.")
    return Sides(
        own.train if members is None else _named(members, released),
        own.test if others is None else _named(others, released),
    )


def _named(source: str, released: ReleasedModel) -> ImageStore:
    if released.config.task != "classification":
        raise ArgumentError("images with masks can't be named here: leave --members and --non-members out.")
    return load_one(source, LoadOptions().with_shape(released.image_shape), class_names=released.class_names)


def loss_attack(released: ReleasedModel, sides: Sides) -> MembershipAudit:
    """Attack by loss: an image with a small loss is called a member (Yeom et al. 2018).

    Args:
        released: The model under attack.
        sides: Members and non-members.

    Returns:
        The success of the attack. Private: computed from private images without noise.
    """
    loss = _loss(released)
    members, others = (
        -_rows(released.model, store, released.normalisation, loss) for store in (sides.members, sides.others)
    )
    return _audit("loss threshold", 0, sides, members, others)


def shadow_attack(
    run: Path,
    sides: Sides,
    *,
    shadows: int,
    private: bool = True,
    keys: Keys | None = None,
    say: Callable[[str], None] | None = None,
) -> MembershipAudit:
    """Attack by likelihood ratio (LiRA, Carlini et al. 2022): compare with models trained with and without an image.

    Shadow models are trained on random halves of all images, one on each half, so that every image is in half of the
    models. Temporary files are in ``private/`` and are removed.

    Args:
        run: Folder of the run; its settings train the shadow models.
        sides: Members and non-members.
        shadows: Number of shadow models: even, at least 4.
        private: Whether the shadow models train with privacy, as the run did.
        keys: Source of randomness; fresh keys by default.
        say: Receives one line of progress per shadow model.

    Returns:
        The success of the attack. Private: computed from private images without noise.

    Raises:
        ArgumentError: The number of shadows is odd or too small, or the images have masks.
    """
    if shadows < FEWEST_SHADOWS or shadows % 2:
        raise ArgumentError(f"shadows must be an even number >= {FEWEST_SHADOWS}, got {shadows}: halves come in pairs.")
    released, keys = load_model(run), keys or Keys.from_os_entropy()
    pool, count = joined(sides), len(sides.members.images)
    if released.config.task != "classification":
        raise ArgumentError("shadow models are for images with one class each, got masks. Leave --shadows out.")
    confidences = np.empty((shadows, pool.num_rows))
    included = np.zeros((shadows, pool.num_rows), dtype=np.bool_)
    for number in range(shadows):
        order = np.argsort(keys.bits(pool.num_units, "run", "halves", number // 2), kind="stable")
        half = np.sort(np.array_split(order, 2)[number % 2])
        included[number] = np.isin(pool.unit_of_row.numpy(), half)
        model = _shadow(run, pool.select_units(half), released, keys.bind("shadow", str(number)), private=private)
        confidences[number] = _rows(model, pool, released.normalisation, confidence)
        if say is not None:
            say(f"shadow {number + 1} of {shadows}")
    target = _rows(released.model, pool, released.normalisation, confidence)
    scores = likelihood_ratio(target, confidences, included)
    kind = "the run's own recipe" if private else "the run's recipe without privacy"
    return _audit(f"likelihood ratio, shadows by {kind}", shadows, sides, scores[:count], scores[count:])


def joined(sides: Sides) -> ImageStore:
    """Join members and others into one store; units of both sides stay separate."""
    members, others = sides.members, sides.others
    units = torch.cat([members.unit_of_row, others.unit_of_row + members.num_units])
    return replace(
        members,
        images=torch.cat([members.images[:], others.images[:]]),
        labels=torch.cat([members.labels, others.labels]),
        unit_of_row=units,
        row_names=(*members.row_names, *others.row_names),
        owners=None,
        name="members and others",
    )


def confidence(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return log(p / (1 − p)) of the right class, in a form that stays exact where p is close to one."""
    right = outputs.gather(1, targets[:, None])[:, 0]
    others = outputs.scatter(1, targets[:, None], -torch.inf).logsumexp(1)
    return right - others


def _shadow(run: Path, half: ImageStore, released: ReleasedModel, keys: Keys, *, private: bool) -> nn.Module:
    """Train a model on one half, in a folder under ``private/`` that is removed afterwards."""
    config = released.config.model_copy(update={"transfer": None, "cache_features": "off"})
    if not private:
        config = config.model_copy(update={"privacy": config.privacy.model_copy(update={"enabled": False})})
    model = whole_model(config, RunSplits(half, half, None, held_out=False))
    with session_on(
        config, half, keys=keys, model=model, normalisation=released.normalisation, parent=run / "private"
    ) as session:
        while session.step < session.total_steps:
            take_step(session)
        averaged = session.optimizer.averaged_parameters()
    if averaged:
        model.load_state_dict({**model.state_dict(), **averaged})
    return model.eval()


def _rows(model: nn.Module, store: ImageStore, normalisation: Normalisation, score: RowLoss) -> NDArray[np.float64]:
    """Compute one score per row, in float64."""
    found: list[Tensor] = []
    with torch.no_grad():
        for images, labels in zip(store.images.split(_BATCH), store.labels.split(_BATCH), strict=True):
            found.append(score(model(normalisation.apply(images)).double(), labels.long()))
    return torch.cat(found).numpy()


def _loss(released: ReleasedModel) -> RowLoss:
    config = released.config
    # Any loss will do for a threshold; a run's own code is not loaded for it.
    loss = "cross_entropy" if config.loss is None or is_own(config.loss) else config.loss
    return loss_for(config.task, loss, len(released.class_names))


def _audit(
    method: str, shadows: int, sides: Sides, members: NDArray[np.float64], others: NDArray[np.float64]
) -> MembershipAudit:
    by_class: dict[str, Attack | None] = {}
    if sides.members.labels.ndim == 1:
        inside, outside = (
            (scores, side.labels.numpy()) for scores, side in ((members, sides.members), (others, sides.others))
        )
        by_class = metrics_by_class(inside, outside, sides.members.class_names)
    return MembershipAudit(method=method, shadows=shadows, whole=attack_metrics(members, others), by_class=by_class)
