"""Poisson sampling over privacy units: each unit joins a step independently, at a public rate.

This file knows units by number (or by name, for a hold-out) and nothing of what they contain. ``data.batches`` gathers
the images of the units that were drawn here; ``private_step`` derives the accounting event from ``Sampling``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpvision.errors import Problems
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys

_WORD_RANGE = 2**64
_LARGE_MISMATCH = 0.1  # relative difference between declared and present units that is worth a note


@final
@dataclass(frozen=True)
class Sampling:
    """How a batch was drawn. The accounting event is derived from this, not from what the caller intended.

    Attributes:
        method: "poisson", or another word for draws that no epsilon follows from.
        sample_rate: the probability with which each unit joined.
        expected_batch_size: the mechanism's, public, for the size of micro-batches; None where no mechanism is known.
    """

    method: str
    sample_rate: float
    expected_batch_size: float | None = field(default=None, compare=False, repr=False)


@final
@dataclass(frozen=True, kw_only=True)
class PoissonSampler:
    """The draws of one run over ``num_units`` units.

    Attributes:
        num_units: units that are present. Sensitive; it has no influence on the rate.
        sample_rate: the mechanism's rate, in (0, 1].
        keys: the keys of the run; the stream "sampling" decides.
        expected_batch_size: the mechanism's, if there is one; without influence on the draw.

    Guarantee: in each step each unit joins with probability ``sample_rate`` (rounded down to a multiple of 2⁻⁶⁴),
    independently of all other units and steps, up to the security of the keys. Word u of a step's stream belongs to
    unit u, so that an added unit changes no other unit's draw.

    The caller guarantees that the draw stays secret, that ``sample_rate`` is the mechanism's and does not follow from
    the data, and that a step uses all rows of the drawn units, and no others, or rows chosen within each unit.
    """

    num_units: int
    sample_rate: float
    keys: Keys
    expected_batch_size: float | None = None

    def __post_init__(self) -> None:
        problems = Problems().count("num_units", self.num_units, least=0).positive("sample_rate", self.sample_rate)
        problems.raise_if_any()
        problems.require(not self.sample_rate > 1, f"sample_rate must be <= 1, got {self.sample_rate}.")
        problems.raise_if_any()

    @property
    def sampling(self) -> Sampling:
        """How every batch is drawn."""
        return Sampling("poisson", self.sample_rate, self.expected_batch_size)

    def units(self, step: int) -> NDArray[np.int64]:
        """Return the numbers of the units that join ``step``, ascending; the same for every call. Sensitive."""
        Problems().count("step", step, least=0).raise_if_any()  # True and 1.0 would be other streams than 1
        words = self.keys.bits(self.num_units, "sampling", step)
        return np.flatnonzero(bernoulli(words, self.sample_rate))


def bernoulli(words: NDArray[np.uint64], rate: float) -> NDArray[np.bool_]:
    """Compare uniform 64-bit words with a probability.

    Args:
        words: uniform words, one for each decision.
        rate: the probability, in [0, 1].

    Returns:
        True where the word is below ``rate``: for exactly floor(rate · 2⁶⁴) of all 2⁶⁴ words.
    """
    numerator, denominator = rate.as_integer_ratio()
    threshold = numerator * _WORD_RANGE // denominator
    if threshold >= _WORD_RANGE:
        return np.ones(len(words), dtype=np.bool_)
    return words < np.uint64(threshold)


def choose_without_replacement(words: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Choose a few of each unit's rows, every set of them equally likely (Floyd's method, all units at once).

    Args:
        words: uniform words of shape (units, m).
        counts: the rows of each unit, at least m.

    Returns:
        For each unit m different numbers below its count, of shape (units, m). The bias of a remainder of 64 bits is
        below count · 2⁻⁶⁴ and touches no guarantee, which holds for any choice of rows.
    """
    picks = words.shape[1]
    chosen = np.full(words.shape, -1, dtype=np.int64)
    for pick in range(picks):
        last = counts - picks + pick
        candidate = (words[:, pick] % (last + 1).astype(np.uint64)).astype(np.int64)
        taken = (chosen == candidate[:, None]).any(axis=1)
        chosen[:, pick] = np.where(taken, last, candidate)
    return chosen


def draw_holdout(names: Iterable[str], *, fraction: float, keys: Keys) -> NDArray[np.bool_]:
    """Decide which units are held out for testing.

    Args:
        names: the units' names.
        fraction: probability with which each unit is held out, strictly between 0 and 1.
        keys: the keys of the run; the stream "holdout" decides.

    Returns:
        True for each unit that is held out.

    Guarantee: each unit is decided by its own name alone, so that neighbouring datasets leave neighbouring parts.
    """
    problems = Problems()
    problems.probability("fraction", fraction)
    problems.raise_if_any()
    words = [int.from_bytes(keys.derive("holdout", name)[:8], "little") for name in names]
    return bernoulli(np.array(words, dtype=np.uint64), fraction)


def mismatch_note(num_units_found: int, mechanism: Mechanism, *, counted: bool = False) -> str | None:
    """Describe a declared number of units that is far from the number present.

    A note and never an error: what a run does must not depend on how many units there are.

    Args:
        num_units_found: units that are present. Sensitive.
        mechanism: the mechanism with the number that the run uses.
        counted: whether that number was counted with noise instead of declared.

    Returns:
        One line for the operator of the run, or None if the numbers are within 10 %.
    """
    used = mechanism.num_units
    if abs(num_units_found - used) <= _LARGE_MISMATCH * used:
        return None
    origin = "was counted with noise" if counted else "is declared"
    remedy = (
        "declare a number that may be public, and nothing is counted" if counted else "declare a rounder, nearer number"
    )
    return (
        f"num_units {origin} as {used}, but the data holds {num_units_found} units: each still joins a step with "
        f"probability {mechanism.sample_rate:g}, so about {num_units_found * mechanism.sample_rate:g} units join, "
        f"while the sum is divided by {mechanism.expected_batch_size:g}. The guarantee holds; {remedy}."
    )
