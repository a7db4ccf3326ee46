"""The mechanism: the frozen public facts of a private run, from which the accountant computes epsilon.

No torch, no data. ``Mechanism`` says what is sampled, clipped, noised and divided; ``Event`` what one release costs;
``Guarantee`` is the bound that follows. Derived numbers are properties, never stored.
"""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from typing import Any, Literal, final

from dpvision.errors import ArgumentError, Problems, brief


def rounded_up(value: float, *, digits: int = 4) -> str:
    """Write a bound with at most ``digits`` significant digits, rounded up, so that it is still a bound."""
    ceiling = Context(prec=digits, rounding=ROUND_CEILING)
    return f"{float(ceiling.create_decimal(repr(value))):.{digits}g}"


Adjacency = Literal["add_remove", "replace_one", "zero_out"]
ADJACENCIES: tuple[Adjacency, ...] = ("add_remove", "replace_one", "zero_out")
Clipping = Literal["flat", "automatic", "per_layer"]
CLIPPINGS: tuple[Clipping, ...] = ("flat", "automatic", "per_layer")
COUNTED_UNITS = "number of units"
"""The purpose of the charge for a noisy count of the units."""
_NOT_OF_A_STEP = frozenset({"delta", "target_epsilon", "count_noise_multiplier"})


@final
@dataclass(frozen=True, kw_only=True)
class Event:
    """One kind of noisy release: each unit joins with ``sample_rate``, then Gaussian noise is added.

    Attributes:
        sample_rate: probability with which each unit joins, in (0, 1].
        noise_multiplier: the noise's standard deviation divided by the most that one unit can move the release.
        purpose: what is released.
    """

    sample_rate: float
    noise_multiplier: float
    purpose: str = "training step"

    def __post_init__(self) -> None:
        problems = Problems()
        problems.positive("sample_rate", self.sample_rate)
        problems.require(not self.sample_rate > 1, f"sample_rate must be <= 1, got {self.sample_rate}.")
        problems.positive("noise_multiplier", self.noise_multiplier)
        problems.raise_if_any()


@final
@dataclass(frozen=True, kw_only=True)
class CountedUnits:
    """A number of units that was counted with noise: safe to use and to show, once it is charged.

    Attributes:
        num_units: the noisy number, at least one.
        noise_multiplier: noise stddev of the count, which one unit moves by one.
    """

    num_units: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        problems = Problems().count("num_units", self.num_units)
        problems.positive("noise_multiplier", self.noise_multiplier)
        problems.raise_if_any()

    @property
    def event(self) -> Event:
        """The cost of the count."""
        return Event(sample_rate=1.0, noise_multiplier=self.noise_multiplier, purpose=COUNTED_UNITS)


@final
@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What is sampled, clipped, noised and divided, as public constants.

    Attributes:
        num_units: units in the data, declared public or counted with noise.
        expected_batch_size: expected units per step, at most ``num_units``; never rounded.
        clip_norm: L2 bound on one unit's contribution to the sum.
        noise_multiplier: noise stddev on the sum divided by ``clip_norm``.
        steps: noisy releases, empty draws included.
        privacy_unit: what is protected, such as "example" or "patient".
        adjacency: which datasets are neighbours.
        clipping: how a unit is brought to at most ``clip_norm``; without influence on epsilon.
        unit_norm: whether to divide by ``clip_norm`` too, after the noise, so that one learning rate fits every clip
            norm; without influence on epsilon.
        delta: of the guarantee that it was calibrated for, if it was; not part of what the mechanism does.
        target_epsilon: likewise.
        count_noise_multiplier: of the count that ``num_units`` comes from, which is charged too; None if declared.

    Guarantee: ``steps`` releases of ``(sum of clipped unit gradients + N(0, noise_stddev²)) / divisor``, each over
    a Poisson draw of units with ``sample_rate``. Nothing here is read off the private data at run time.
    """

    num_units: int
    expected_batch_size: float
    clip_norm: float
    noise_multiplier: float
    steps: int
    privacy_unit: str = "example"
    adjacency: Adjacency = "add_remove"
    clipping: Clipping = "flat"
    unit_norm: bool = False
    delta: float | None = None
    target_epsilon: float | None = None
    count_noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        _check_sampling(problems, self)
        problems.positive("clip_norm", self.clip_norm)
        problems.positive("noise_multiplier", self.noise_multiplier)
        problems.count("steps", self.steps)
        named = type(self.privacy_unit) is str and bool(self.privacy_unit)
        problems.require(named, f"privacy_unit must name what is protected, got {brief(self.privacy_unit)!r}.")
        if self.delta is not None:
            problems.probability("delta", self.delta)
        if self.target_epsilon is not None:
            problems.positive("target_epsilon", self.target_epsilon)
        problems.require(
            self.adjacency in ADJACENCIES, f"adjacency must be one of {', '.join(ADJACENCIES)}, got {self.adjacency!r}."
        )
        problems.require(
            self.clipping in CLIPPINGS, f"clipping must be one of {', '.join(CLIPPINGS)}, got {self.clipping!r}."
        )
        if self.count_noise_multiplier is not None:
            problems.positive("count_noise_multiplier", self.count_noise_multiplier)
        problems.require(type(self.unit_norm) is bool, f"unit_norm must be true or false, got {self.unit_norm!r}.")
        problems.raise_if_any()

    @property
    def sample_rate(self) -> float:
        """Probability with which each unit joins a step, independently of all others."""
        return self.expected_batch_size / self.num_units

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on the sum."""
        return self.noise_multiplier * self.clip_norm

    @property
    def divisor(self) -> float:
        """The public number that the noisy sum is divided by, the same for every draw."""
        return self.expected_batch_size * (self.clip_norm if self.unit_norm else 1.0)

    @property
    def epochs(self) -> float:
        """Expected passes over the data, for display."""
        return self.steps * self.sample_rate

    @property
    def step_event(self) -> Event:
        """The cost of one step."""
        return Event(sample_rate=self.sample_rate, noise_multiplier=self.noise_multiplier)

    def to_dict(self) -> dict[str, Any]:
        """Return what a step does as plain values, for JSON; without delta, target and count."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_OF_A_STEP}

    @staticmethod
    def calibrated(
        *,
        target_epsilon: float,
        delta: float,
        num_units: int | CountedUnits,
        expected_batch_size: float,
        steps: int,
        clip_norm: float,
        privacy_unit: str = "example",
        adjacency: Adjacency = "add_remove",
    ) -> Mechanism:
        """Choose the least noise for which all steps together stay within a target.

        Args:
            target_epsilon: hard limit, above zero.
            delta: of the guarantee, in (0, 1); choose one below 1 / num_units.
            num_units: units in the data: declared public, or from ``count_units``, whose cost the target covers.
            expected_batch_size: expected units per step, at most ``num_units``.
            steps: noisy releases, empty draws included.
            clip_norm: L2 bound on one unit's contribution to the sum.
            privacy_unit: what is protected, such as "example" or "patient".
            adjacency: which datasets are neighbours.

        Returns:
            The mechanism, with its delta and target.

        Raises:
            ArgumentError: a value is out of range, or no noise reaches the target.
        """
        # The accountants are a layer above and import this file: they are imported when they are asked.
        accounting = importlib.import_module("dpvision.accounting")
        counted = num_units if isinstance(num_units, CountedUnits) else None
        number = num_units.num_units if isinstance(num_units, CountedUnits) else num_units
        noise = accounting.calibrate_noise_multiplier(
            num_units=number,
            expected_batch_size=expected_batch_size,
            steps=steps,
            target_epsilon=target_epsilon,
            delta=delta,
            adjacency=adjacency,
            extra=() if counted is None else ((counted.event, 1),),
        )
        return Mechanism(
            num_units=number,
            expected_batch_size=expected_batch_size,
            clip_norm=clip_norm,
            noise_multiplier=noise,
            steps=steps,
            privacy_unit=privacy_unit,
            adjacency=adjacency,
            delta=delta,
            target_epsilon=target_epsilon,
            count_noise_multiplier=None if counted is None else counted.noise_multiplier,
        )

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Mechanism:
        """Invert ``to_dict``; raises ``ArgumentError`` for unknown and missing fields."""
        try:
            return Mechanism(**values)
        except TypeError as error:
            raise ArgumentError(f"not a mechanism: {error}") from error


@final
@dataclass(frozen=True, kw_only=True)
class OrdinarySampling:
    """The sampling of a run without privacy. It has no clipping, no noise and no guarantee, so no epsilon follows.

    Attributes:
        num_units: units in the data.
        expected_batch_size: expected units per step, at most ``num_units``.
        steps: steps of the run.
    """

    num_units: int
    expected_batch_size: float
    steps: int

    def __post_init__(self) -> None:
        problems = Problems()
        _check_sampling(problems, self)
        problems.count("steps", self.steps)
        problems.raise_if_any()

    @property
    def sample_rate(self) -> float:
        """Probability with which each unit joins a step."""
        return self.expected_batch_size / self.num_units


def _check_sampling(problems: Problems, plan: Mechanism | OrdinarySampling) -> None:
    """Note what is wrong with the number of units and the expected batch."""
    problems.count("num_units", plan.num_units)
    problems.positive("expected_batch_size", plan.expected_batch_size)
    batch, units = plan.expected_batch_size, plan.num_units
    numbers = type(batch) in (int, float) and type(units) in (int, float)
    problems.require(
        not (numbers and batch > units),
        f"sample_rate must be <= 1, got {brief(batch)} / {brief(units)} "
        f"(expected_batch_size={brief(batch)}, num_units={brief(units)}). Lower expected_batch_size.",
    )


@final
@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """A proved upper bound: never an epsilon without its delta, adjacency, unit and accountant.

    Attributes:
        epsilon: the bound.
        delta: the probability that it does not cover.
        adjacency: which datasets are neighbours.
        accountant: the method that proved it.
        privacy_unit: what is protected.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    accountant: Literal["pld", "rdp"]
    privacy_unit: str = "example"

    def __str__(self) -> str:
        return (
            f"epsilon {rounded_up(self.epsilon)} at delta {rounded_up(self.delta)} "
            f"({self.adjacency} of one {self.privacy_unit}, {self.accountant.upper()})"
        )
