"""Noise, batch and steps at one target epsilon, before anything is spent.

The same training at another price: batch and noise scaled together, as Sander et al. (TAN, 2022) search.

What training feels is the noise on the mean gradient, ``noise_multiplier / expected_batch_size``, and the number of
steps. Both stay as they are here, so that a learning rate found at a small batch fits the large one. What does not stay
is epsilon: below a noise multiplier of about two it explodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, final

from dpvision.accounting.calibrate import calibrate_noise_multiplier
from dpvision.accounting.charges import Charges
from dpvision.accounting.epsilon import guarantee
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.mechanism import Adjacency, Event, Guarantee, Mechanism

DEFAULT_EPOCHS = (10.0, 30.0, 100.0)
ENOUGH = 1.1
"""A batch is large enough when all units together would lower the noise on the mean gradient by less than this."""


@final
@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One way to spend the budget.

    ``full_batch_noise`` is the effective noise if every unit joined each of these steps: what larger batches come near.
    """

    num_units: int
    expected_batch_size: float
    steps: int
    noise_multiplier: float
    guarantee: Guarantee
    full_batch_noise: float

    @property
    def sample_rate(self) -> float:
        """Probability with which each unit joins a step."""
        return self.expected_batch_size / self.num_units

    @property
    def epochs(self) -> float:
        """Expected passes over the data."""
        return self.steps * self.sample_rate

    @property
    def effective_noise(self) -> float:
        """Noise on the mean gradient, in units of the clip norm: ``noise_multiplier / expected_batch_size``."""
        return self.noise_multiplier / self.expected_batch_size

    @property
    def signal(self) -> float:
        """Signal over noise of all steps: √steps · sample_rate / noise_multiplier. TAN keeps it constant."""
        return math.sqrt(self.steps) * self.sample_rate / self.noise_multiplier

    @property
    def excess_noise(self) -> float:
        """How many times the noise is that of a full batch, at equal steps and epsilon."""
        return self.effective_noise / self.full_batch_noise

    @property
    def batch_is_enough(self) -> bool:
        """Whether a still larger batch would gain next to nothing at these steps, and only cost time."""
        return self.excess_noise <= ENOUGH


class _Budget(TypedDict):
    target_epsilon: float
    delta: float
    adjacency: Adjacency
    extra: Charges


def plan(
    *,
    num_units: int,
    target_epsilon: float,
    delta: float,
    expected_batch_sizes: Sequence[float] = (),
    epochs: Sequence[float] = (),
    steps: Sequence[int] = (),
    adjacency: Adjacency = "add_remove",
    extra: Charges = (),
) -> Iterator[PlanRow]:
    """A row for every pair of batch size and length, each calibrated to the target, one by one as they are found.

    Lengths are ``epochs`` or ``steps``, not both; without either, and without batch sizes, usual ones are taken.

    Guarantee: no row exceeds ``target_epsilon``.
    """
    batches = tuple(expected_batch_sizes) or default_batch_sizes(num_units)
    _check_lists(num_units, batches, epochs, steps)
    budget: _Budget = {"target_epsilon": target_epsilon, "delta": delta, "adjacency": adjacency, "extra": extra}
    whole: float | None = None
    for batch in batches:
        for count in steps or _steps_of(epochs or DEFAULT_EPOCHS, num_units, batch):
            noise = calibrate_noise_multiplier(num_units=num_units, expected_batch_size=batch, steps=count, **budget)
            if whole is None:
                # Without sampling, many Gaussian releases are one: noise grows with the root of their number, exactly.
                of_all = calibrate_noise_multiplier(
                    num_units=num_units, expected_batch_size=num_units, steps=count, **budget
                )
                whole = of_all / math.sqrt(count)
            event = Event(sample_rate=batch / num_units, noise_multiplier=noise)
            yield PlanRow(
                num_units=num_units,
                expected_batch_size=batch,
                steps=count,
                noise_multiplier=noise,
                guarantee=guarantee([(event, count), *extra], delta=delta, adjacency=adjacency),
                full_batch_noise=whole * math.sqrt(count) / num_units,
            )


def _steps_of(epochs: Sequence[float], num_units: int, batch: float) -> list[int]:
    return [steps_for_epochs(passes, num_units=num_units, expected_batch_size=batch) for passes in epochs]


def steps_for_epochs(epochs: float, *, num_units: int, expected_batch_size: float) -> int:
    """The first whole number of steps whose draws hold, on average, ``epochs`` times all units."""
    problems = Problems()
    problems.positive("epochs", epochs)
    problems.count("num_units", num_units)
    problems.positive("expected_batch_size", expected_batch_size)
    problems.raise_if_any()
    # The subtracted crumb keeps 0.1 * 3 epochs from becoming one step more than 0.3.
    return max(1, math.ceil(epochs * num_units / expected_batch_size * (1 - 1e-12)))


def default_batch_sizes(num_units: int) -> tuple[float, ...]:
    """Powers of four from about a two-hundredth of the units to all of them: 256, 1024, 4096, 16384 for 50000."""
    problems = Problems()
    problems.count("num_units", num_units)
    problems.raise_if_any()
    sizes = [float(4**power) for power in range(2, 16) if num_units / 256 <= 4**power <= num_units / 2]
    return tuple(sizes) or (float(num_units),)


def _check_lists(num_units: int, batches: Sequence[float], epochs: Sequence[float], steps: Sequence[int]) -> None:
    problems = Problems()
    problems.count("num_units", num_units)
    for batch in batches:
        problems.positive("expected_batch_size", batch)
    for passes in epochs:
        problems.positive("epochs", passes)
    for count in steps:
        problems.count("steps", count)
    problems.raise_if_any()
    if epochs and steps:
        raise ArgumentError("plan takes epochs or steps, got both. Leave one of them out.")


def scaled(mechanism: Mechanism, *, by: float) -> Mechanism:
    """The mechanism with batch and noise multiplier both times ``by``, at equal steps: ``by`` below one is cheaper.

    Guarantee: none carries over from ``mechanism``. The result has an epsilon of its own; a small batch's protects
    nobody.
    """
    problems = Problems()
    problems.positive("by", by)
    problems.raise_if_any()
    return replace(
        mechanism,
        expected_batch_size=mechanism.expected_batch_size * by,
        noise_multiplier=mechanism.noise_multiplier * by,
    )
