"""Epsilon of charges or of a mechanism: the entry point of the accountants.

``guarantee`` answers for any charges, ``mechanism_guarantee`` for the steps of one mechanism, and ``EpsilonMeter``
caches the latter for a running training (progress, curves, the hard budget limit).
"""

from __future__ import annotations

from typing import Literal, final

from dpvision.accounting.charges import Charges, check_request
from dpvision.accounting.pld import pld_epsilon
from dpvision.accounting.rdp import rdp_epsilon
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.mechanism import Adjacency, Guarantee, Mechanism

Accountant = Literal["pld", "rdp"]


def guarantee(
    charges: Charges,
    *,
    delta: float,
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    privacy_unit: str = "example",
) -> Guarantee:
    """Compute the guarantee of all charges together.

    Args:
        charges: Noisy releases and how often each was made.
        delta: The delta of the guarantee, in (0, 1).
        adjacency: Which datasets are neighbours.
        accountant: ``pld`` (tight) or ``rdp`` (what most papers report).
        privacy_unit: The word for what is protected.

    Returns:
        Epsilon with its delta, adjacency and accountant.

    Raises:
        ArgumentError: A value is out of range, or the accountant has no proof for the adjacency.

    Guarantee:
        ``epsilon`` is an upper bound, never negative, and 0 exactly when there are no charges or ``delta`` alone covers
        them. It does not depend on the order of the charges.
    """
    check_request(charges, delta=delta, adjacency=adjacency)
    if accountant == "pld":
        epsilon = pld_epsilon(charges, delta=delta, adjacency=adjacency)
    elif accountant == "rdp":
        epsilon = rdp_epsilon(charges, delta=delta, adjacency=adjacency)
    else:
        raise ArgumentError(f"accountant must be pld or rdp, got {accountant!r}.")
    return Guarantee(
        epsilon=epsilon, delta=delta, adjacency=adjacency, accountant=accountant, privacy_unit=privacy_unit
    )


def mechanism_guarantee(
    mechanism: Mechanism,
    *,
    delta: float,
    steps: int | None = None,
    extra: Charges = (),
    accountant: Accountant = "pld",
) -> Guarantee:
    """Compute the guarantee of a mechanism's steps together with extra charges.

    Args:
        mechanism: The mechanism; its adjacency and privacy unit are used.
        delta: The delta of the guarantee, in (0, 1).
        steps: Steps taken so far, at least 0. Default: all steps of the mechanism.
        extra: Further releases from the same data.
        accountant: ``pld`` or ``rdp``.

    Returns:
        The guarantee; see ``guarantee``.

    Raises:
        ArgumentError: A value is out of range.
    """
    taken = mechanism.steps if steps is None else steps
    Problems().count("steps", taken, least=0).raise_if_any()
    return guarantee(
        [(mechanism.step_event, taken), *extra],
        delta=delta,
        adjacency=mechanism.adjacency,
        accountant=accountant,
        privacy_unit=mechanism.privacy_unit,
    )


@final
class EpsilonMeter:
    """Epsilon by PLD after any number of steps, cached.

    Args:
        mechanism: The mechanism whose steps are counted.
        delta: The delta of the guarantee, in (0, 1).
        extra: Releases that were made besides the steps.

    Guarantee:
        ``spent(steps)`` equals ``mechanism_guarantee(mechanism, steps=steps, ...)``.
    """

    def __init__(self, mechanism: Mechanism, *, delta: float, extra: Charges = ()) -> None:
        self._mechanism = mechanism
        self._delta = delta
        self._extra = tuple(extra)
        self._known: dict[int, Guarantee] = {}
        self.spent(0)  # refuses a bad delta or extra charge now rather than in the middle of a run

    def spent(self, steps: int) -> Guarantee:
        """Return the guarantee after ``steps`` steps and the extra charges.

        The first call takes some tenths of a second, another step count some hundredths, a repeated one nothing.
        """
        if steps not in self._known:
            self._known[steps] = mechanism_guarantee(self._mechanism, delta=self._delta, steps=steps, extra=self._extra)
        return self._known[steps]
