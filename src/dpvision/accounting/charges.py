"""Charges: noisy releases and how often each was made, the input of every accountant.

Here they are checked and merged into one canonical form before ``pld`` or ``rdp`` sees them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpvision.errors import Problems
from dpvision.privacy.mechanism import ADJACENCIES, Adjacency, Event

Charges = Sequence[tuple[Event, int]]

# Beyond these limits rounding errors would decide the result; no real mechanism is there.
SMALLEST_RATE = 1e-12
SMALLEST_NOISE = 1e-6
LARGEST_NOISE = 1e9


def check_request(charges: Charges, *, delta: float, adjacency: Adjacency) -> None:
    """Refuse a request that no accountant can answer correctly.

    Args:
        charges: Noisy releases and how often each was made.
        delta: The delta of the guarantee, in (0, 1).
        adjacency: Which datasets are neighbours.

    Raises:
        ArgumentError: Names every value that is out of range.
    """
    problems = Problems()
    check_delta_and_adjacency(problems, delta=delta, adjacency=adjacency)
    for event, count in charges:
        problems.count(f"the count of {event.purpose!r}", count, least=0)
        check_noise(problems, event.noise_multiplier, purpose=event.purpose)
        check_rate(problems, event.sample_rate, purpose=event.purpose)
    problems.raise_if_any()


def check_noise(problems: Problems, noise_multiplier: float, *, purpose: str = "training step") -> None:
    """Add a problem for a noise multiplier with which no accountant is exact."""
    problems.require(
        SMALLEST_NOISE <= noise_multiplier <= LARGEST_NOISE,
        f"noise_multiplier must lie between {SMALLEST_NOISE:g} and {LARGEST_NOISE:g}, "
        f"got {noise_multiplier} ({purpose}): no accountant is exact beyond.",
    )


def check_rate(problems: Problems, sample_rate: float, *, purpose: str = "training step") -> None:
    """Add a problem for a sample rate with which no accountant is exact."""
    problems.require(
        sample_rate >= SMALLEST_RATE,
        f"sample_rate must be >= {SMALLEST_RATE:g}, got {sample_rate} ({purpose}): "
        "no accountant is exact below. Raise expected_batch_size.",
    )


def check_delta_and_adjacency(problems: Problems, *, delta: float, adjacency: Adjacency) -> None:
    """Add a problem for a delta outside (0, 1) and for an unknown adjacency."""
    problems.probability("delta", delta)
    problems.require(adjacency in ADJACENCIES, f"adjacency must be one of {', '.join(ADJACENCIES)}, got {adjacency!r}.")


def merge(charges: Charges) -> tuple[tuple[Event, int], ...]:
    """Return one entry for each distinct pair of rate and noise, in a fixed order, without zero counts.

    All full-batch releases (``sample_rate`` 1) become one: Gaussian releases compose exactly, their 1/σ² add up. Thus
    the order and the purposes of charges do not change an epsilon, not even by a rounding error.
    """
    counts: dict[tuple[float, float], int] = {}
    for event, count in charges:
        if count > 0:
            key = (float(event.sample_rate), float(event.noise_multiplier))
            counts[key] = counts.get(key, 0) + count
    sampled = sorted((key, count) for key, count in counts.items() if key[0] < 1)
    merged = [(Event(sample_rate=rate, noise_multiplier=noise), count) for (rate, noise), count in sampled]
    precisions = [count / noise**2 for (rate, noise), count in counts.items() if rate == 1]
    if precisions:
        noise = 1 / math.sqrt(math.fsum(precisions))
        merged.append((Event(sample_rate=1.0, noise_multiplier=noise), 1))
    return tuple(merged)
