"""Canaries: units that are easy to detect. Training with a random half of them bounds epsilon from below.

In a white-box audit the canaries are planted gradients, each along its own weight; in a black-box audit they are
synthetic images with random labels, and only the loss of the final model is seen. ``bounds`` turns scores into epsilon.

Shapes: N rows, K classes, M canaries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpvision.accounting import Charges, guarantee
from dpvision.audit.audited_runs import (
    PLAIN_RATE,
    Subject,
    session_on,
    synthetic_images,
    synthetic_store,
    whole_model,
    with_plain_sgd,
)
from dpvision.audit.bounds import GaussianEstimate, OneRunBound, gaussian_estimate, one_run_bound
from dpvision.config import ModelConfig, RunConfig
from dpvision.data import ImageStore
from dpvision.data.splits import RunSplits
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.ledger import charges_of, read_ledger
from dpvision.privacy.mechanism import Event
from dpvision.privacy.randomness import Keys
from dpvision.training.trainer import Session, take_step

Sight = Literal["white", "black"]
OTHERS: Final = 32
"""Number of units that are not canaries. It does not affect the guarantee, so it is small."""

_MICROBATCH: Final = 128
_STEEP: Final = 1e6
_NEVER: Final = -1e4
_IMAGES_SEED, _CANARIES_SEED = 1, 2


@final
@dataclass(frozen=True, kw_only=True)
class CanaryAudit:
    """The result of one training run with canaries. ``epsilon_claimed`` is computed from the run's own ledger.

    ``mu_claimed`` is the expected distance of the scores of planted gradients if the ledger is right; None in a
    black-box audit.
    """

    sight: Sight
    included: int
    epsilon_claimed: float
    mu_claimed: float | None
    bound: OneRunBound
    estimate: GaussianEstimate

    @property
    def refuted(self) -> bool:
        """Whether the claim is proved false, at the bound's confidence."""
        return self.bound.epsilon_lower > self.epsilon_claimed

    @property
    def suspicious(self) -> bool:
        """Whether the scores lie farther apart than the claim explains, even at the estimate's lower limit."""
        too_far = self.mu_claimed is not None and self.estimate.mu_lower > self.mu_claimed
        return too_far or self.estimate.epsilon_lower > self.epsilon_claimed


@final
class WithCanaries(nn.Module):
    """A classifier with one extra weight per canary: the gradient of canary i points along weight i only.

    It adds a class for each canary; a row with that label is the canary. The score of such a class is a constant so low
    that its probability is exactly zero, and other rows do not see it. Its gradient is much larger than that of the
    network's own weights, so a clipped canary has norm clip_norm along its own weight.
    """

    def __init__(self, network: nn.Module, canaries: int) -> None:
        super().__init__()
        self.network = network
        self.canaries = nn.Linear(1, canaries, bias=False)
        nn.init.zeros_(self.canaries.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(N, K + M) scores."""
        scores_NK = self.network(x)
        steep_NM = self.canaries(torch.full_like(scores_NK[:, :1], _STEEP))
        return torch.cat([scores_NK, steep_NM - steep_NM.detach() + _NEVER], dim=1)


def audit_with_canaries(
    subject: Subject,
    *,
    canaries: int,
    sight: Sight = "white",
    keys: Keys | None = None,
    confidence: float = 0.95,
    on_step: Callable[[int, int], None] | None = None,
) -> CanaryAudit:
    """Train once with about half of the canaries, and try to tell which half.

    Args:
        subject: Settings to audit. Steps and ledger are those of ordinary training.
        canaries: Number of canaries, at least 40.
        sight: ``white``: plant gradients and read the weights; ``black``: plant images with random labels and read
            their loss under the final model.
        keys: Randomness of coins and training; fresh keys by default.
        confidence: Confidence of the lower bound, in (0, 1).
        on_step: Called after each step with the steps done and planned.

    Returns:
        The lower bound and the Gaussian estimate, beside what the ledger claims.

    Raises:
        ArgumentError: A value is out of range, or black-box canaries are asked for with masks.
    """
    problems = Problems()
    problems.count("canaries", canaries, least=40)
    problems.probability("confidence", confidence)
    problems.require(sight in ("white", "black"), f"sight must be white or black, got {sight!r}.")
    problems.raise_if_any()
    keys = keys or Keys.from_os_entropy()
    included = keys.bits(canaries, "run", "canaries") % np.uint64(2) == 1
    run = _white if sight == "white" else _black
    scores, charges = run(subject, included, keys, on_step)
    return CanaryAudit(
        sight=sight,
        included=int(included.sum()),
        epsilon_claimed=guarantee(charges, delta=subject.delta).epsilon,
        mu_claimed=expected_mu(charges) if sight == "white" else None,
        bound=one_run_bound(scores, included, delta=subject.delta, confidence=confidence),
        estimate=gaussian_estimate(scores, included, delta=subject.delta),
    )


Scores = tuple[NDArray[np.float64], Charges]
OnStep = Callable[[int, int], None] | None


def _white(subject: Subject, included: NDArray[np.bool_], keys: Keys, on_step: OnStep) -> Scores:
    """Score each canary by what every step did to its own weight, under the claimed mechanism."""
    config, classes, count = _readable(subject), subject.num_classes, len(included)
    others = synthetic_images(OTHERS, subject.image_shape, seed=_IMAGES_SEED)
    base = synthetic_store(config, others, num_classes=classes)
    black = np.zeros((int(included.sum()), *subject.image_shape), dtype=np.uint8)
    labels = np.concatenate([base.labels.numpy(), classes + np.flatnonzero(included)])
    store = synthetic_store(config, np.concatenate([others, black]), num_classes=classes + count, labels=labels)
    network = WithCanaries(whole_model(config, RunSplits(base, base, None, held_out=False)), count)
    weights = [np.zeros(count)]

    def read(done: int, steps: int) -> None:
        weights.append(network.canaries.weight.detach()[:, 0].double().numpy().copy())
        if on_step is not None:
            on_step(done, steps)

    with session_on(config, store, keys=keys, model=network.train()) as session:
        _train(session, read)
        sums = np.diff(weights, axis=0) / (PLAIN_RATE / config.mechanism.divisor)
        return likelihood_scores(sums / config.mechanism.clip_norm, config.mechanism.step_event), _charges(session)


def _black(subject: Subject, included: NDArray[np.bool_], keys: Keys, on_step: OnStep) -> Scores:
    """Score each canary by minus its loss under the final model."""
    config, classes = subject.config, subject.num_classes
    if config.task != "classification":
        raise ArgumentError("black-box canaries are mislabelled images, so the task must be classification.")
    others = synthetic_store(
        config, synthetic_images(OTHERS, subject.image_shape, seed=_IMAGES_SEED), num_classes=classes
    )
    planted = synthetic_store(
        config, synthetic_images(len(included), subject.image_shape, seed=_CANARIES_SEED), num_classes=classes
    )
    store = synthetic_store(
        config,
        np.concatenate([others.images[:].numpy(), planted.images[:].numpy()[included]]),
        num_classes=classes,
        labels=np.concatenate([others.labels.numpy(), planted.labels.numpy()[included]]),
    )
    with session_on(config, store, keys=keys) as session:
        _train(session, on_step)
        return -final_losses(session, planted), _charges(session)


def likelihood_scores(sums: NDArray[np.float64], event: Event) -> NDArray[np.float64]:
    """Return the log likelihood ratio, with against without each canary, of noisy sums (steps, canaries) in clip norms.

    No test of the claimed mechanism is more powerful (Neyman and Pearson).
    """
    return log_ratio(sums, event).sum(0)


def log_ratio(sums: NDArray[np.float64], event: Event) -> NDArray[np.float64]:
    """Return the log likelihood ratio of each noisy sum by itself."""
    exponent = (sums - 0.5) / event.noise_multiplier**2
    if event.sample_rate == 1:
        return exponent
    return np.logaddexp(math.log1p(-event.sample_rate), math.log(event.sample_rate) + exponent)


def expected_mu(charges: Charges) -> float:
    """Return the distance of scores with and without a canary, in standard deviations, if the charges are right.

    By quadrature over one step's noise; means and variances of independent steps add up.
    """
    z = np.linspace(-12.0, 12.0, 4001)
    weights = np.exp(-z * z / 2)
    weights /= weights.sum()
    gap = variance = 0.0
    for event, count in charges:
        absent, present = (log_ratio(event.noise_multiplier * z + shift, event) for shift in (0.0, 1.0))
        moments = [(float(weights @ score), float(weights @ score**2)) for score in (absent, present)]
        mixed = [(1 - event.sample_rate) * a + event.sample_rate * p for a, p in zip(*moments, strict=True)]
        gap += count * (mixed[0] - moments[0][0])
        variance += count * (mixed[1] - mixed[0] ** 2 + moments[0][1] - moments[0][0] ** 2) / 2
    return gap / math.sqrt(variance) if variance > 0 else 0.0


def final_losses(session: Session, store: ImageStore) -> NDArray[np.float64]:
    """Return the loss of each row under the weights that would be released (averaged ones, if there are any)."""
    replaced = session.optimizer.averaged_parameters() or {}
    network = session.model.eval()
    found: list[Tensor] = []
    with torch.no_grad():
        for images, labels in zip(store.images.split(256), store.labels.split(256), strict=True):
            outputs = torch.func.functional_call(network, replaced, (session.normalisation.apply(images),))
            found.append(session.loss(outputs.double(), labels.long()))
    return torch.cat(found).numpy()


def _readable(subject: Subject) -> RunConfig:
    """Return the settings with plain SGD in small micro-batches, because a row has one score per canary.

    Segmentation models are replaced by a linear classifier; the mechanism is the same.
    """
    performance = subject.config.performance.model_copy(update={"microbatch_size": _MICROBATCH})
    config = with_plain_sgd(subject.config).model_copy(update={"performance": performance})
    if config.task == "classification":
        return config
    linear = ModelConfig(name="linear", options={"image_size": subject.image_shape[1]})
    return config.model_copy(update={"task": "classification", "loss": "cross_entropy", "model": linear})


def _train(session: Session, on_step: OnStep) -> None:
    while session.step < session.total_steps:
        take_step(session)
        if on_step is not None:
            on_step(session.step, session.total_steps)
    session.optimizer.check_untouched()


def _charges(session: Session) -> Charges:
    """Read the charges of the run from its ledger on disk."""
    return charges_of(read_ledger(session.folder.ledger_path))
