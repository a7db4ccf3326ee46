"""Tables of noise, batch size and steps at one target epsilon, made before any budget is spent.

``plan`` calibrates the noise for every pair of batch size and length. ``scaled`` changes batch size and noise
multiplier together, as Sander et al. (TAN, 2022) do to search cheaply: what training depends on, the noise on the mean
gradient (``noise_multiplier / expected_batch_size``) and the number of steps, stays the same, so a learning rate found
at a small batch fits the large one. Epsilon does not stay: below a noise multiplier of about two it grows very fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, final

from dpvision.accounting.calibrate import calibrate_noise_multiplier
from dpvision.accounting.charges import Charges
from dpvision.accounting.epsilon import mechanism_guarantee
from dpvision.accounting.tradeoff import AttackRisk
from dpvision.errors import LARGEST_COUNT, ArgumentError, Problems
from dpvision.privacy.mechanism import Adjacency, Guarantee, Mechanism

DEFAULT_EPOCHS = (10.0, 30.0, 100.0)
ENOUGH = 1.1
"""A batch is large enough if the full batch would lower the noise on the mean gradient by less than this factor."""


@final
@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One setting that spends the budget.

    ``full_batch_noise`` is the effective noise if every unit joined each of these steps: the limit of larger batches.
    """

    mechanism: Mechanism
    guarantee: Guarantee
    full_batch_noise: float

    @property
    def signal(self) -> float:
        """Signal over noise of all steps: √steps · sample_rate / noise_multiplier. TAN keeps it constant."""
        return math.sqrt(self.mechanism.steps) * self.mechanism.sample_rate / self.mechanism.noise_multiplier

    @property
    def signal_per_step(self) -> float:
        """Signal over noise of one step at most: expected_batch_size / noise_multiplier.

        The sum of the batch has a length of at most ``expected_batch_size * clip_norm``, reached where all gradients
        agree; the noise along it has the standard deviation ``noise_multiplier * clip_norm``.
        """
        return 1 / effective_noise(self.mechanism)

    @property
    def excess_noise(self) -> float:
        """Effective noise divided by that of a full batch, at equal steps and epsilon."""
        return effective_noise(self.mechanism) / self.full_batch_noise

    @property
    def batch_is_enough(self) -> bool:
        """Whether a larger batch would gain less than 10 % at these steps."""
        return self.excess_noise <= ENOUGH


def effective_noise(mechanism: Mechanism) -> float:
    """Noise on the mean gradient, in units of the clip norm: ``noise_multiplier / expected_batch_size``."""
    return mechanism.noise_multiplier / mechanism.expected_batch_size


class _Budget(TypedDict):
    target_epsilon: float | None
    target_risk: AttackRisk | None
    delta: float
    adjacency: Adjacency
    extra: Charges


def plan(
    *,
    num_units: int,
    delta: float,
    target_epsilon: float | None = None,
    target_risk: AttackRisk | None = None,
    expected_batch_sizes: Sequence[float] = (),
    epochs: Sequence[float] = (),
    steps: Sequence[int] = (),
    adjacency: Adjacency = "add_remove",
    extra: Charges = (),
) -> Iterator[PlanRow]:
    """Calibrate the noise for every pair of batch size and length, and yield the rows as they are found.

    Args:
        num_units: Number of protected units.
        delta: The delta of the guarantee, in (0, 1).
        target_epsilon: The largest allowed epsilon.
        target_risk: The largest allowed success of attacks, instead of ``target_epsilon``.
        expected_batch_sizes: Mean batch sizes. Default: powers of four that suit ``num_units``.
        epochs: Lengths in passes over the data. Default: 10, 30 and 100.
        steps: Lengths in steps, instead of ``epochs``.
        adjacency: Which datasets are neighbours.
        extra: Further releases that the same budget pays for.

    Yields:
        One row per pair.

    Raises:
        ArgumentError: A value is out of range, both lengths are given, or a target cannot be met.

    Guarantee:
        No row exceeds ``target_epsilon``, or the bound on attacks of ``target_risk``.
    """
    if epochs and steps:
        raise ArgumentError("plan takes epochs or steps, got both. Leave one of them out.")
    batches, epochs = tuple(expected_batch_sizes) or default_batch_sizes(num_units), epochs or DEFAULT_EPOCHS
    problems = Problems().count("num_units", num_units)
    for name, values in (("expected_batch_size", batches), ("epochs", epochs)):
        for value in values:
            problems.positive(name, value)
    for count in steps:
        problems.count("steps", count)
    problems.raise_if_any()
    budget: _Budget = {
        "target_epsilon": target_epsilon,
        "target_risk": target_risk,
        "delta": delta,
        "adjacency": adjacency,
        "extra": extra,
    }
    whole: float | None = None
    for batch in batches:
        lengths = steps or [
            steps_for_epochs(passes, num_units=num_units, expected_batch_size=batch) for passes in epochs
        ]
        for count in lengths:
            noise = calibrate_noise_multiplier(num_units=num_units, expected_batch_size=batch, steps=count, **budget)
            if whole is None:
                # Without sampling, many Gaussian releases are one: noise grows with the root of their number, exactly.
                of_all = calibrate_noise_multiplier(
                    num_units=num_units, expected_batch_size=num_units, steps=count, **budget
                )
                whole = of_all / math.sqrt(count)
            mechanism = Mechanism(
                num_units=num_units,
                expected_batch_size=batch,
                clip_norm=1.0,  # it has no part in the accounting
                noise_multiplier=noise,
                steps=count,
                adjacency=adjacency,
            )
            yield PlanRow(
                mechanism=mechanism,
                guarantee=mechanism_guarantee(mechanism, delta=delta, extra=extra),
                full_batch_noise=whole * math.sqrt(count) / num_units,
            )


def steps_for_epochs(epochs: float, *, num_units: int, expected_batch_size: float) -> int:
    """Convert passes over the data to steps.

    Args:
        epochs: Passes over the data, > 0.
        num_units: Number of units.
        expected_batch_size: Mean number of units per step, > 0.

    Returns:
        The smallest whole number of steps whose draws hold at least ``epochs`` times all units on average.

    Raises:
        ArgumentError: A value is out of range.
    """
    problems = Problems()
    problems.positive("epochs", epochs)
    problems.count("num_units", num_units)
    problems.positive("expected_batch_size", expected_batch_size)
    problems.raise_if_any()
    # The factor keeps 0.1 * 3 epochs from becoming one step more than 0.3.
    steps = epochs * (num_units / expected_batch_size) * (1 - 1e-12)
    if not steps <= LARGEST_COUNT:
        raise ArgumentError(f"epochs must make at most {LARGEST_COUNT} steps, got {epochs:g}. Lower epochs.")
    return max(1, math.ceil(steps))


def default_batch_sizes(num_units: int) -> tuple[float, ...]:
    """Return powers of four from about 1/256 of the units to half of them: 256, 1024, 4096, 16384 for 50000."""
    Problems().count("num_units", num_units).raise_if_any()
    sizes = [float(4**power) for power in range(2, 16) if num_units / 256 <= 4**power <= num_units / 2]
    return tuple(sizes) or (float(num_units),)


def scaled(mechanism: Mechanism, *, by: float) -> Mechanism:
    """Multiply batch size and noise multiplier by the same factor, at equal steps.

    Args:
        mechanism: The setting to scale.
        by: The factor, > 0; below 1 the result is cheaper to compute.

    Returns:
        The scaled mechanism.

    Raises:
        ArgumentError: ``by`` is out of range, or the batch would exceed ``num_units``.

    Guarantee:
        None carries over from ``mechanism``. The result has its own epsilon, which is very large for small batches.
    """
    Problems().positive("by", by).raise_if_any()
    return replace(
        mechanism,
        expected_batch_size=mechanism.expected_batch_size * by,
        noise_multiplier=mechanism.noise_multiplier * by,
    )
