"""Curves of a plan: epsilon over steps, the noise at a fixed batch, and the epochs over the batch.

De et al. (2022) report that a fixed batch has an optimal noise scale, and so an optimal compute budget, which grows
with the batch beyond a threshold. Their curves are accuracies. What follows from accounting alone is the other side:

- With a noise multiplier, the budget allows a number of steps. The *signal* of all of them together,
  ``sqrt(steps) * sample_rate / noise_multiplier``, rises with the noise towards a limit, that of steps with every unit.
  The noise at which it is within 10 % of the limit is the least that does not waste budget; more noise means more steps
  and hardly more signal.
- A batch therefore needs some number of epochs before the budget is used well. That number falls as the batch grows.
  An optimizer also needs a number of steps, whatever the batch: epochs that grow in proportion to it. The larger of the
  two is the least sensible length, and the batch where they cross is the threshold.

How many steps an optimizer needs does not follow from accounting; it is an argument. De et al. used 875 to 2007 steps
on CIFAR-10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, final

from dpvision.accounting.budget_plan import ENOUGH
from dpvision.accounting.calibrate import calibrate_noise_multiplier, calibrate_steps
from dpvision.accounting.epsilon import mechanism_guarantee
from dpvision.accounting.tradeoff import AttackRisk
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.mechanism import Adjacency, Mechanism

USUAL_STEPS = 1000
"""Steps that an optimizer needs, where none are given: about the least of De et al. on CIFAR-10 (875)."""
DEFAULT_NOISES = tuple(round(0.6 * 2 ** (power / 2), 3) for power in range(12))
"""Noise multipliers of a curve, 0.6 to 27.2, a factor of √2 apart."""
_LEAST_NOISE, _MOST_NOISE = 0.4, 64.0
_HALVINGS = 8


@final
@dataclass(frozen=True, kw_only=True)
class Target:
    """What a curve spends: an epsilon or a limit on attacks, at a delta.

    Raises:
        ArgumentError: Neither or both targets are given.
    """

    delta: float
    epsilon: float | None = None
    risk: AttackRisk | None = None
    adjacency: Adjacency = "add_remove"

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.risk is None):
            raise ArgumentError("give an epsilon or a limit on attacks as the target of a curve, one of them.")

    @property
    def arguments(self) -> _Arguments:
        """The target as arguments of the calibrations."""
        return {
            "target_epsilon": self.epsilon,
            "target_risk": self.risk,
            "delta": self.delta,
            "adjacency": self.adjacency,
        }


class _Arguments(TypedDict):
    target_epsilon: float | None
    target_risk: AttackRisk | None
    delta: float
    adjacency: Adjacency


@final
@dataclass(frozen=True, kw_only=True)
class NoisePoint:
    """A noise multiplier at a fixed batch, the steps that the budget allows with it, and their signal.

    ``share`` is the signal divided by its limit, from 0 to 1.
    """

    noise_multiplier: float
    steps: int
    epochs: float
    signal: float
    share: float


@final
@dataclass(frozen=True, kw_only=True)
class EpochsPoint:
    """The least sensible length at a batch size.

    ``epochs_of_budget`` make the signal reach its limit within 10 %, with ``noise_multiplier``; ``epochs_of_steps`` are
    the steps that the optimizer needs. None where no noise up to 64 is enough.
    """

    expected_batch_size: float
    noise_multiplier: float | None
    epochs_of_budget: float | None
    epochs_of_steps: float

    @property
    def epochs(self) -> float | None:
        """The larger of both."""
        return None if self.epochs_of_budget is None else max(self.epochs_of_budget, self.epochs_of_steps)


def epsilon_over_steps(mechanism: Mechanism, *, delta: float, points: int = 24) -> list[tuple[int, float]]:
    """Compute epsilon after growing numbers of steps, up to all of a mechanism's.

    Args:
        mechanism: The mechanism.
        delta: The delta of the guarantee, in (0, 1).
        points: How many numbers of steps, at least 2; evenly spaced.

    Returns:
        (steps, epsilon) pairs, the first after one step.

    Guarantee:
        Each epsilon is an upper bound by PLD for a run that stops there.
    """
    Problems().count("points", points, least=2).raise_if_any()
    counts = sorted({max(1, round(mechanism.steps * number / (points - 1))) for number in range(points)})
    return [(count, mechanism_guarantee(mechanism, delta=delta, steps=count).epsilon) for count in counts]


def noise_at_batch(
    *, num_units: int, expected_batch_size: float, target: Target, noises: Sequence[float] = DEFAULT_NOISES
) -> list[NoisePoint]:
    """Compute, for each noise multiplier, the steps that the target allows and their signal.

    Args:
        num_units: Number of protected units.
        expected_batch_size: Mean number of units per step.
        target: What is spent.
        noises: Noise multipliers.

    Returns:
        One point for each noise multiplier with which at least one step, and not an unlimited number, is allowed.

    Raises:
        ArgumentError: A value is out of range, or no noise multiplier fits.

    Guarantee:
        No point exceeds the target.
    """
    limit = _signal_limit(num_units, target)
    found = [_noise_point(num_units, expected_batch_size, target, noise, limit) for noise in noises]
    points = [point for point in found if point is not None]
    if not points:
        raise ArgumentError("no noise_multiplier of the curve fits the target: raise the target or lower the batch.")
    return points


def least_epochs(
    *, num_units: int, expected_batch_sizes: Sequence[float], target: Target, steps: int = USUAL_STEPS
) -> list[EpochsPoint]:
    """Compute the least sensible number of epochs for each batch size.

    Args:
        num_units: Number of protected units.
        expected_batch_sizes: Mean batch sizes.
        target: What is spent.
        steps: Steps that the optimizer needs, at least 1.

    Returns:
        One point for each batch size, in the order given.

    Raises:
        ArgumentError: A value is out of range.
    """
    Problems().count("steps", steps).raise_if_any()
    limit = _signal_limit(num_units, target)
    found: list[EpochsPoint] = []
    for batch in expected_batch_sizes:
        best: NoisePoint | None = None
        low, high = math.log(_LEAST_NOISE), math.log(_MOST_NOISE)
        for _ in range(_HALVINGS):
            middle = float(f"{math.exp((low + high) / 2):.3g}")
            point = _noise_point(num_units, batch, target, middle, limit)
            enough = point is not None and point.share * ENOUGH >= 1
            best = point if enough else best
            low, high = (low, math.log(middle)) if enough else (math.log(middle), high)
        found.append(
            EpochsPoint(
                expected_batch_size=batch,
                noise_multiplier=None if best is None else best.noise_multiplier,
                epochs_of_budget=None if best is None else best.epochs,
                epochs_of_steps=steps * batch / num_units,
            )
        )
    return found


def _signal_limit(num_units: int, target: Target) -> float:
    """The signal of one step with every unit; that of more such steps is the same."""
    whole = calibrate_noise_multiplier(
        num_units=num_units, expected_batch_size=num_units, steps=1, refuse_little_noise=False, **target.arguments
    )
    return 1 / whole


def _noise_point(num_units: int, batch: float, target: Target, noise: float, limit: float) -> NoisePoint | None:
    """The point of one noise multiplier; None if it allows no step, or more than can be counted."""
    try:
        steps = calibrate_steps(
            num_units=num_units, expected_batch_size=batch, noise_multiplier=noise, **target.arguments
        )
    except ArgumentError as error:
        if "does not allow a single step" in str(error) or "is never spent" in str(error):
            return None
        raise
    rate = batch / num_units
    signal = math.sqrt(steps) * rate / noise
    return NoisePoint(
        noise_multiplier=noise, steps=steps, epochs=steps * rate, signal=signal, share=min(1.0, signal / limit)
    )
