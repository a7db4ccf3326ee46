"""Tests of the step path: sensitivity, noise scale and independence, sampling rate, and charges.

Every check goes through ``take_step``, the function that trains: draw, clipped sum, charge, noise. Only the optimizer
is replaced, by one that records the noisy gradients. The false-alarm rate of each check is at most ``FALSE_ALARM``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from dpvision.audit.audited_runs import Subject, session_on, synthetic_images, synthetic_store
from dpvision.config import RunConfig, ViewsConfig
from dpvision.data import ImageStore
from dpvision.gradients.clipped_sum import clipped_sum_of_batch
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.privacy.mechanism import Clipping
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import PrivateGrad
from dpvision.training.trainer import Session, take_step

FALSE_ALARM: Final = 1e-6
DRAWS_FOR_ONE_PERCENT: Final = 400_000
"""This many normals detect a standard deviation that is 1 % wrong with probability 99.9 %."""

SENSITIVITY_SLACK: Final = 1e-5
PAIRS: Final = 6
Sums = dict[str, NDArray[np.float64]]
"""Numbers by parameter."""

_UNITS: Final = 24
_TRIES: Final = 3
_REACHED: Final[dict[Clipping, float]] = {"flat": 0.999, "automatic": 0.9, "per_layer": 0.5}
"""How far, in clip norms, a unit must move the sum to show that clipping is active."""

_SAMPLING_STEPS: Final = 2000
_COMPARED: Final = 4096
_MOST_STEPS: Final = 800
_MOST_TENSORS: Final = 64


@final
@dataclass(frozen=True)
class Check:
    """One check: what was tested, whether it passed, and the number that decided."""

    name: str
    passed: bool
    finding: str


@final
class Listener:
    """A replacement for the optimizer that records every noisy gradient and leaves the weights unchanged."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.heard: list[Sums] = []
        self.uncharged = 0

    def step(self, grad: PrivateGrad) -> None:
        """Record the gradient, scaled back to the sum, and whether the ledger on disk has a charge for it."""
        divisor = self._session.config.mechanism.divisor
        self.heard.append({name: value.double().numpy() * divisor for name, value in grad.gradients.items()})
        # Read as bytes: to parse the whole ledger at every step would take longer than all the steps.
        charged = self._session.folder.ledger_path.read_bytes().count(b'"kind":"charge"')
        self.uncharged += charged < len(self.heard)


def check_mechanism(
    subject: Subject, *, keys: Keys | None = None, draws: int = DRAWS_FOR_ONE_PERCENT, pairs: int = PAIRS
) -> list[Check]:
    """Run all checks of the step path under the subject's settings, on a few synthetic units.

    Sample rate, divisor and number of units are those of the synthetic data. Model, clipping, clip norm, noise
    multiplier, views and rows per unit are the subject's own; several views and several rows are tested as well.

    Args:
        subject: Settings to test.
        keys: Randomness; fresh keys by default.
        draws: About how many normals the noise checks use.
        pairs: How many pairs of neighbours of each kind the sensitivity checks use.

    Returns:
        One entry per check.
    """
    keys = keys or Keys.from_os_entropy()
    # Neighbours are compared with everybody drawn, so that the one who joins always shows.
    everybody = replace(subject, config=_small(subject.config, rate=1.0))
    half = replace(subject, config=_small(subject.config, rate=0.5))
    return [*_sensitivity_checks(everybody, keys, pairs), *_noise_checks(half, keys, draws)]


def _small(config: RunConfig, *, rate: float) -> RunConfig:
    """Return the settings on a few units, drawn at that rate, with more steps than are taken."""
    plan = {"num_units": _UNITS, "expected_batch_size": _UNITS * rate, "steps": 10**6, "target_epsilon": None}
    return config.model_copy(update={"privacy": config.privacy.model_copy(update=plan)})


@contextmanager
def _listened(config: RunConfig, store: ImageStore, keys: Keys) -> Iterator[tuple[Session, Listener]]:
    with session_on(config, store, keys=keys) as session:
        listener = Listener(session)
        session.optimizer = cast(Optimizer, listener)
        yield session, listener


def _sensitivity_checks(subject: Subject, keys: Keys, pairs: int) -> Iterator[Check]:
    config = subject.config
    several = config.data.model_copy(update={"rows_per_unit": 2})
    variants = {
        "as configured": config,
        "four views of an image": config.model_copy(update={"views": ViewsConfig(count=4, flip=0.5, crop_padding=1)}),
        "two of three rows of a unit": config.model_copy(update={"data": several}),
    }
    for name, variant in variants.items():
        yield _sensitivity(replace(subject, config=variant), keys, name=name, pairs=pairs)


def _sensitivity(subject: Subject, keys: Keys, *, name: str, pairs: int) -> Check:
    """Check how far one more unit moves the sum, in clip norms. The clip norm is lowered until units reach it."""
    privacy = subject.config.privacy
    clip_norm = subject.config.mechanism.clip_norm
    reached = _REACHED[privacy.clipping]
    moved, same_bill = [0.0], True
    for _ in range(_TRIES):
        clipped = privacy.model_copy(update={"clip_norm": clip_norm})
        moved, same_bill = _moves(
            replace(subject, config=subject.config.model_copy(update={"privacy": clipped})), keys, pairs
        )
        if max(moved) >= reached:
            break
        clip_norm *= max(*moved, 1e-3) / 4
    largest = max(moved)
    passed = reached <= largest <= 1 + SENSITIVITY_SLACK and same_bill
    bill = "" if same_bill else "; the ledgers of neighbours differ"
    bill += "" if largest >= reached else "; no unit reached the clip norm, so this shows nothing"
    words = f"one more unit moved the sum by at most {largest:.6f} clip norms in {len(moved)} pairs"
    return Check(f"sensitivity, {name}", passed, f"{words}{bill}")


def _moves(subject: Subject, keys: Keys, pairs: int) -> tuple[list[float], bool]:
    """Return distances between noisy sums of neighbours under equal keys, where the noise is the same and cancels."""
    drawn = subject.config.data.rows_per_unit or 1
    rows = drawn + 1 if drawn > 1 else 1
    shape = subject.image_shape
    others = synthetic_images(_UNITS * rows, shape, seed=3)
    extras = np.stack([np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8), *synthetic_images(2, shape, seed=4)])
    without, bill = _sums(subject, others, keys, rows=rows, pairs=pairs)
    moved: list[float] = []
    same_bill = True
    for extra in extras:
        more = np.concatenate([others, np.repeat(extra[None], rows, 0)])
        with_it, other_bill = _sums(subject, more, keys, rows=rows, pairs=pairs)
        same_bill = same_bill and bill == other_bill and len(without) == len(with_it)
        for one, other in zip(without, with_it, strict=False):
            squares = math.fsum(float(np.square(one[name] - other[name]).sum()) for name in one)
            moved.append(math.sqrt(squares) / subject.config.mechanism.clip_norm)
    return moved, same_bill


def _sums(
    subject: Subject, images: NDArray[np.uint8], keys: Keys, *, rows: int, pairs: int
) -> tuple[list[Sums], bytes]:
    """Return the noisy sums of several steps, each at other weights, and the ledger that was written."""
    config = subject.config
    if config.task == "segmentation":
        labels = (images[:, 0] > np.uint8(127)).astype(np.int64)
    else:  # by place, so that those of the others stay when a unit joins
        labels = np.arange(len(images)) % subject.num_classes
    names = [f"unit {row // rows}" for row in range(len(images))]
    store = synthetic_store(config, images, num_classes=subject.num_classes, labels=labels, unit_names=names)
    with _listened(config, store, keys) as (session, listener):
        for step in range(pairs):
            _move_weights(session, step)
            take_step(session)
        return listener.heard, session.folder.ledger_path.read_bytes()


def _move_weights(session: Session, step: int) -> None:
    """Change the weights before a step, in the same way for both neighbours."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in session.model.parameters():
            scale = parameter.abs().mean() + 1e-2
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * 0.3)


def _noise_checks(subject: Subject, keys: Keys, draws: int) -> Iterator[Check]:
    config = subject.config
    images = synthetic_images(_UNITS, subject.image_shape, seed=5)
    store = synthetic_store(config, images, num_classes=subject.num_classes)
    with _listened(config, store, keys) as (session, listener):
        numbers = sum(value.numel() for value in session.model.parameters() if value.requires_grad)
        clean = [_stepped(session) for _ in range(max(2, min(_MOST_STEPS, -(-draws // numbers))))]
        yield _bill_check(session, listener, len(clean))
        yield from _sampling_checks(session)
        if len(listener.heard) == len(clean):
            residuals = _residuals(listener.heard, clean, config.mechanism.noise_stddev)
            yield from _scale_checks(residuals)
            yield from _independence_checks(residuals)


def _residuals(heard: list[Sums], clean: list[Sums], stddev: float) -> Sums:
    """Return the noise of every step (steps, numbers) by parameter, divided by the promised standard deviation."""
    pairs = list(zip(heard, clean, strict=True))
    return {name: np.stack([(one[name] - known[name]).ravel() / stddev for one, known in pairs]) for name in clean[0]}


def _stepped(session: Session) -> Sums:
    """Take a step, and return the clipped sum to which its noise was added."""
    mechanism, step = session.config.mechanism, session.step
    take_step(session)
    known = clipped_sum_of_batch(
        session.stage.network,
        session.loss,
        session.draws.batch(step),
        clip_norm=mechanism.clip_norm,
        clipping=mechanism.clipping,
        performance=session.config.performance,
        own_code=session.code.is_given,
    )
    return {name: value.double().numpy() for name, value in known.gradients.items()}


def _bill_check(session: Session, listener: Listener, steps: int) -> Check:
    charges = charges_of(read_ledger(session.folder.ledger_path))
    charged = sum(count for _, count in charges)
    right_event = all(event == session.config.mechanism.step_event for event, _ in charges)
    passed = charged == len(listener.heard) == steps and not listener.uncharged and right_event
    return Check("charges", passed, f"{charged} charges for {len(listener.heard)} noisy sums of {steps} steps")


def _scale_checks(residuals: Sums) -> Iterator[Check]:
    """Test the variance of all residuals and of each parameter's own by chi-square, and their mean."""
    together = np.concatenate([z.ravel() for z in residuals.values()])
    tried = {"all parameters": together, **residuals}
    limit = FALSE_ALARM / len(tried)
    chances = {name: _two_sided(float(np.square(z).sum()), z.size) for name, z in tried.items()}
    worst = min(chances, key=lambda name: chances[name])
    where = "" if chances[worst] >= limit else f"; {worst}: {_deviation(tried[worst]):.4f}, p = {chances[worst]:.2g}"
    words = f"{_deviation(together):.4f} of what was promised over {together.size} draws{where}"
    yield Check("noise scale", chances[worst] >= limit, f"the noise's deviation is {words}")
    shift = float(together.sum()) / math.sqrt(together.size)
    p = 2 * float(stats.norm.sf(abs(shift)))
    yield Check("noise mean", p >= FALSE_ALARM, f"the mean is {shift:+.2f} standard errors from the clipped sum")


def _independence_checks(residuals: Sums) -> Iterator[Check]:
    """Test correlations of noise between steps, between parameters and between neighbouring coordinates."""
    joined = np.concatenate([z[:, :_COMPARED] for z in residuals.values()], axis=1)[:, :_COMPARED]
    products = joined @ joined.T / math.sqrt(joined.shape[1])
    over_steps = np.abs(products[np.triu_indices(len(products), 1)])
    yield _correlation("steps", over_steps)
    heads = [z[:, :_COMPARED] for z in list(residuals.values())[:_MOST_TENSORS]]
    pairs = [_product(a, b) for a, b in combinations(heads, 2)]
    if pairs:
        yield _correlation("parameters", np.abs(pairs))
    if joined.shape[1] > 1:
        yield _correlation("coordinates", np.abs([_product(joined[:, 1:], joined[:, :-1])]))


def _product(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    width = min(a.shape[1], b.shape[1])
    return float((a[:, :width] * b[:, :width]).sum()) / math.sqrt(len(a) * width)


def _correlation(what: str, standardised: NDArray[np.float64]) -> Check:
    """Test sums of products of independent normals, in standard errors; the limit allows for their heavier tails."""
    largest = float(standardised.max())
    limit = 1.25 * float(stats.norm.isf(FALSE_ALARM / (2 * standardised.size)))
    finding = f"the largest of {standardised.size} correlations is {largest:.2f} standard errors (limit {limit:.2f})"
    return Check(f"independence of {what}", largest <= limit, finding)


def _sampling_checks(session: Session) -> Iterator[Check]:
    """Test the draws against the charged rate: how often units join, and how much draw sizes vary."""
    charged = [event.sample_rate for event, _ in charges_of(read_ledger(session.folder.ledger_path))]
    rate, units = min(charged, default=0.0), session.splits.train.num_units
    joined = np.zeros((_SAMPLING_STEPS, units), dtype=np.int64)
    for step in range(_SAMPLING_STEPS):
        joined[step, session.image_draws.units(step)] = 1
    total = int(joined.sum())
    p = float(stats.binomtest(total, joined.size, rate).pvalue)
    words = f"units joined in {total / joined.size:.4f} of the draws, charged {rate:.4f}"
    yield Check("sampling rate", p >= FALSE_ALARM, words)
    each = joined.sum(0)
    p = units * min(float(stats.binomtest(int(count), _SAMPLING_STEPS, rate).pvalue) for count in each)
    yield Check(
        "sampling of each unit", p >= FALSE_ALARM, f"the rarest and the most frequent: {each.min()}, {each.max()}"
    )
    spread = float(joined.sum(1).var(ddof=1)) / max(units * rate * (1 - rate), 1e-12)
    # The sum of squares of binomial counts is close to, and lighter in its tails than, a chi-square.
    p = _two_sided(spread * (_SAMPLING_STEPS - 1), _SAMPLING_STEPS - 1)
    yield Check("independence of units", p >= FALSE_ALARM, f"draw sizes vary {spread:.3f} times as much as they should")


def _deviation(z: NDArray[np.float64]) -> float:
    return math.sqrt(float(np.square(z).mean()))


def _two_sided(value: float, freedom: int) -> float:
    return 2 * min(float(stats.chi2.sf(value, freedom)), float(stats.chi2.cdf(value, freedom)))
