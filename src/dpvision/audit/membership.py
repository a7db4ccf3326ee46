"""How well scores tell members from others: ROC, area, true positives at few false ones, each with its error. No torch.

A score is any number that tends to be larger for members.

Membership inference on a finished run: who has the model and a picture guesses whether it was trained on.

Every figure here is a function of private pictures, computed without noise: it belongs into ``private/``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from dpvision.audit.audited_runs import session_on, whole_learner
from dpvision.config import parse_config
from dpvision.data import ImageStore, LoadOptions, Normalisation, load_one
from dpvision.errors import ArgumentError, DataError
from dpvision.inference.load import ReleasedModel, load_model
from dpvision.models.losses import RowLoss, loss_for
from dpvision.privacy.randomness import Keys
from dpvision.storage.run_folder import RunFolder
from dpvision.training.prepare import RunSplits, load_splits
from dpvision.training.start import holdout_keys
from dpvision.training.trainer import take_step

FALSE_POSITIVE_RATES: Final = (0.001, 0.01, 0.1)
ROC_POINTS: Final = 200
CONFIDENCE: Final = 0.95
_FEWEST: Final = 2


@final
@dataclass(frozen=True, kw_only=True)
class AtRate:
    """True positives where at most a share of the others is accused, with the 95 % interval of their share."""

    false_positive_rate: float
    true_positive_rate: float
    low: float
    high: float


@final
@dataclass(frozen=True, kw_only=True)
class Attack:
    """The figures of one attack. ``area`` is 0.5 for guessing; ``roc`` are (false, true) positive rates."""

    members: int
    others: int
    area: float
    area_low: float
    area_high: float
    at_rates: tuple[AtRate, ...]
    roc: tuple[tuple[float, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def attack_figures(members: NDArray[np.float64], others: NDArray[np.float64]) -> Attack:
    """What a threshold on the scores achieves.

    A threshold for a rate of false positives is read off the others' own scores; ties with it are not accused. A rate
    below one in so many others can't be told from zero: then nobody above the highest of them may be called wrong.
    """
    if min(len(members), len(others)) < _FEWEST:
        raise DataError(
            f"an attack needs at least {_FEWEST} members and as many others, got {len(members)} and {len(others)}."
        )
    area = _area(members, others)
    error = _area_error(members, others)
    reach = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * error
    return Attack(
        members=len(members),
        others=len(others),
        area=area,
        area_low=max(0.0, area - reach),
        area_high=min(1.0, area + reach),
        at_rates=tuple(_at_rate(members, others, rate) for rate in FALSE_POSITIVE_RATES),
        roc=_roc(members, others),
    )


def figures_by_class(
    members: tuple[NDArray[np.float64], NDArray[np.int64]],
    others: tuple[NDArray[np.float64], NDArray[np.int64]],
    class_names: Sequence[str],
) -> dict[str, Attack | None]:
    """The attack on each class by itself, given (scores, labels); None where there are too few pictures."""
    found: dict[str, Attack | None] = {}
    for number, name in enumerate(class_names):
        inside, outside = members[0][members[1] == number], others[0][others[1] == number]
        enough = min(len(inside), len(outside)) >= _FEWEST
        found[name] = attack_figures(inside, outside) if enough else None
    return found


def _area(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """The chance that a member scores higher than another, ties counted half."""
    ranks = stats.rankdata(np.concatenate([members, others]))[: len(members)]
    return float((ranks.sum() - len(members) * (len(members) + 1) / 2) / (len(members) * len(others)))


def _area_error(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Its standard error (DeLong): from how often each member beats others, and each of the others loses."""
    beaten = _shares_below(members, others)
    losing = 1 - _shares_below(others, members)
    return math.sqrt(float(beaten.var(ddof=1)) / len(members) + float(losing.var(ddof=1)) / len(others))


def _shares_below(values: NDArray[np.float64], of: NDArray[np.float64]) -> NDArray[np.float64]:
    ordered = np.sort(of)
    below, not_above = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (below + not_above) / (2 * len(of))


def _at_rate(members: NDArray[np.float64], others: NDArray[np.float64], rate: float) -> AtRate:
    allowed = math.floor(rate * len(others))
    threshold = np.sort(others)[::-1][allowed] if allowed < len(others) else -math.inf
    caught = int((members > threshold).sum())
    interval = stats.binomtest(caught, len(members)).proportion_ci(CONFIDENCE)
    return AtRate(
        false_positive_rate=rate,
        true_positive_rate=caught / len(members),
        low=float(interval.low),
        high=float(interval.high),
    )


def _roc(members: NDArray[np.float64], others: NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    """Points of the curve at evenly spaced ranks of all scores."""
    scores = np.unique(np.concatenate([members, others]))[::-1]
    chosen = scores[np.unique(np.linspace(0, len(scores) - 1, min(ROC_POINTS, len(scores))).astype(int))]
    points = ((float((others >= t).mean()), float((members >= t).mean())) for t in chosen)
    return ((0.0, 0.0), *points)


FEWEST_SHADOWS: Final = 4
_BATCH: Final = 256
_LEAST_DEVIATION: Final = 1e-6


@final
@dataclass(frozen=True)
class Sides:
    """The pictures of an attack: ``members`` were trained on, ``others`` were not."""

    members: ImageStore
    others: ImageStore


@final
@dataclass(frozen=True, kw_only=True)
class MembershipAudit:
    """An attack on one model: all pictures together, and each class where pictures have one."""

    method: str
    shadows: int
    whole: Attack
    by_class: dict[str, Attack | None]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        classes = {name: None if attack is None else attack.to_dict() for name, attack in self.by_class.items()}
        return {"method": self.method, "shadows": self.shadows, **self.whole.to_dict(), "by_class": classes}


def sides_of(run: Path, released: ReleasedModel, *, members: str | None, others: str | None) -> Sides:
    """The run's own training and test pictures, or those that are named instead."""
    if members is not None and others is not None:
        return Sides(_named(members, released), _named(others, released))
    folder = RunFolder.open(run)
    stored = folder.load_key()
    own = load_splits(parse_config(folder.read_whole_config()), holdout_keys(stored.keys, stored.run_id))
    if members is None and own.train.fingerprint() != stored.bindings[-1].get("data"):
        raise DataError("the run's training pictures are not what they were. Name some with --members.")
    return Sides(
        own.train if members is None else _named(members, released),
        own.test if others is None else _named(others, released),
    )


def _named(source: str, released: ReleasedModel) -> ImageStore:
    if released.config.task != "classification":
        raise ArgumentError("pictures with masks can't be named here: leave --members and --non-members out.")
    return load_one(source, LoadOptions().with_shape(released.image_shape), class_names=released.class_names)


def loss_attack(released: ReleasedModel, sides: Sides) -> MembershipAudit:
    """A picture with a small loss is called a member (Yeom et al. 2018)."""
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
    """LiRA (Carlini et al. 2022): is the model's confidence in a picture that of models with it, or without it?

    ``shadows`` models are trained with the run's own recipe (without privacy if ``private`` is off) on halves of all
    pictures: one on each half, so that every picture is in half of the models. Temporary files lie in ``private/``.
    """
    if shadows < FEWEST_SHADOWS or shadows % 2:
        raise ArgumentError(f"shadows must be an even number >= {FEWEST_SHADOWS}, got {shadows}: halves come in pairs.")
    released, keys = load_model(run), keys or Keys.from_os_entropy()
    pool, count = joined(sides), len(sides.members.images)
    if released.config.task != "classification":
        raise ArgumentError("shadow models are for pictures with one class each, got masks. Leave --shadows out.")
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
    """Members and others in one store; units of both sides stay apart."""
    members, others = sides.members, sides.others
    units = torch.cat([members.unit_of_row, others.unit_of_row + members.num_units])
    return replace(
        members,
        images=torch.cat([members.images, others.images]),
        labels=torch.cat([members.labels, others.labels]),
        unit_of_row=units,
        row_names=(*members.row_names, *others.row_names),
        owners=None,
        name="members and others",
    )


def likelihood_ratio(
    target: NDArray[np.float64], confidences: NDArray[np.float64], included: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """For each picture: log of how much likelier the target's confidence is under models with it than without it.

    Means are the picture's own; with few shadows a deviation for each picture is mostly error, so one is shared.
    """
    inside, outside = (np.where(which, confidences, np.nan) for which in (included, ~included))
    means = np.nanmean(inside, axis=0), np.nanmean(outside, axis=0)
    spreads = [
        max(_LEAST_DEVIATION, float(np.sqrt(np.nanmean(np.square(values - mean)))))
        for values, mean in zip((inside, outside), means, strict=True)
    ]
    logs = [
        -0.5 * np.square((target - mean) / spread) - np.log(spread) for mean, spread in zip(means, spreads, strict=True)
    ]
    return logs[0] - logs[1]


def confidence(outputs: Tensor, targets: Tensor) -> Tensor:
    """log(p / (1 − p)) of the right class, computed so that it stays exact where p is close to one."""
    right = outputs.gather(1, targets[:, None])[:, 0]
    others = outputs.scatter(1, targets[:, None], -torch.inf).logsumexp(1)
    return right - others


def _shadow(run: Path, half: ImageStore, released: ReleasedModel, keys: Keys, *, private: bool) -> nn.Module:
    """A model trained on a half, in a folder under ``private/`` that is removed afterwards."""
    config = released.config.model_copy(update={"transfer": None, "cache_features": "off"})
    if not private:
        config = config.model_copy(update={"privacy": config.privacy.model_copy(update={"enabled": False})})
    learner = whole_learner(config, RunSplits(half, half, None, held_out=False))
    with session_on(
        config, half, keys=keys, learner=learner, normalisation=released.normalisation, parent=run / "private"
    ) as session:
        while session.step < session.total_steps:
            take_step(session)
        averaged = session.optimizer.averaged_parameters()
    if averaged:
        learner.model.load_state_dict({**learner.model.state_dict(), **averaged})
    return learner.model.eval()


def _rows(model: nn.Module, store: ImageStore, normalisation: Normalisation, score: RowLoss) -> NDArray[np.float64]:
    """One number for each row, in float64."""
    found: list[Tensor] = []
    with torch.no_grad():
        for images, labels in zip(store.images.split(_BATCH), store.labels.split(_BATCH), strict=True):
            found.append(score(model(normalisation.apply(images)).double(), labels.long()))
    return torch.cat(found).numpy()


def _loss(released: ReleasedModel) -> RowLoss:
    config = released.config
    return loss_for(config.task, config.loss or "cross_entropy", len(released.class_names))


def _audit(
    method: str, shadows: int, sides: Sides, members: NDArray[np.float64], others: NDArray[np.float64]
) -> MembershipAudit:
    labelled = sides.members.labels.ndim == 1
    by_class = (
        figures_by_class(
            (members, sides.members.labels.numpy()), (others, sides.others.labels.numpy()), sides.members.class_names
        )
        if labelled
        else {}
    )
    return MembershipAudit(method=method, shadows=shadows, whole=attack_figures(members, others), by_class=by_class)
