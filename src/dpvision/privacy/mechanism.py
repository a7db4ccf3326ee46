"""Bounds in few digits. A rounded bound is still a bound: it is rounded up, never to the nearest.

The frozen public facts of a private run. No torch, no data: an accountant needs nothing else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from typing import Any, Literal, final

from dpvision.errors import ArgumentError, Problems


def rounded_up(value: float, *, digits: int = 4) -> str:
    """``value`` with at most so many digits, never below what it was."""
    ceiling = Context(prec=digits, rounding=ROUND_CEILING)
    return f"{float(ceiling.create_decimal(repr(value))):.{digits}g}"


Adjacency = Literal["add_remove", "replace_one", "zero_out"]
ADJACENCIES: tuple[Adjacency, ...] = ("add_remove", "replace_one", "zero_out")
Clipping = Literal["flat", "automatic", "per_layer"]
CLIPPINGS: tuple[Clipping, ...] = ("flat", "automatic", "per_layer")


@final
@dataclass(frozen=True, kw_only=True)
class Event:
    """One kind of noisy release: each unit joins with ``sample_rate``, then Gaussian noise is added.

    ``noise_multiplier`` is the noise's standard deviation divided by the most that one unit can move the release.
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
class Mechanism:
    """What is sampled, clipped, noised and divided, as public constants.

    ``clipping`` is how a unit is brought to at most ``clip_norm``; ``unit_norm`` divides by ``clip_norm`` too, after
    the noise, so that one learning rate fits every clip norm. Neither has a part in epsilon.

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

    def __post_init__(self) -> None:
        problems = Problems()
        problems.count("num_units", self.num_units)
        problems.positive("expected_batch_size", self.expected_batch_size)
        problems.require(
            not self.expected_batch_size > self.num_units,
            f"sample_rate must be <= 1, got {self.expected_batch_size} / {self.num_units} "
            f"(expected_batch_size={self.expected_batch_size}, num_units={self.num_units}). Lower expected_batch_size.",
        )
        problems.positive("clip_norm", self.clip_norm)
        problems.positive("noise_multiplier", self.noise_multiplier)
        problems.count("steps", self.steps)
        problems.require(bool(self.privacy_unit), "privacy_unit must name what is protected, got an empty text.")
        problems.require(
            self.adjacency in ADJACENCIES, f"adjacency must be one of {', '.join(ADJACENCIES)}, got {self.adjacency!r}."
        )
        problems.require(
            self.clipping in CLIPPINGS, f"clipping must be one of {', '.join(CLIPPINGS)}, got {self.clipping!r}."
        )
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
        """What the noisy sum is divided by: public, the same for every draw."""
        return self.expected_batch_size * (self.clip_norm if self.unit_norm else 1.0)

    @property
    def epochs(self) -> float:
        """Expected passes over the data, for display."""
        return self.steps * self.sample_rate

    @property
    def step_event(self) -> Event:
        """What one step costs."""
        return Event(sample_rate=self.sample_rate, noise_multiplier=self.noise_multiplier)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Mechanism:
        """The inverse of ``to_dict``; refuses unknown and missing fields."""
        try:
            return Mechanism(**values)
        except TypeError as error:
            raise ArgumentError(f"not a mechanism: {error}") from error


@final
@dataclass(frozen=True, kw_only=True)
class OrdinarySampling:
    """What a run without privacy draws. It has no clip, no noise and no guarantee, so nothing can account for it."""

    num_units: int
    expected_batch_size: float
    steps: int

    def __post_init__(self) -> None:
        problems = Problems()
        problems.count("num_units", self.num_units)
        problems.positive("expected_batch_size", self.expected_batch_size)
        problems.require(
            not self.expected_batch_size > self.num_units,
            f"expected_batch_size must be <= num_units, got {self.expected_batch_size} > {self.num_units}.",
        )
        problems.count("steps", self.steps)
        problems.raise_if_any()

    @property
    def sample_rate(self) -> float:
        """Probability with which each unit joins a step."""
        return self.expected_batch_size / self.num_units


@final
@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """A proved upper bound: never an epsilon without its delta, adjacency, unit and accountant."""

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
