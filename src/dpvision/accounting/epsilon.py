"""From charges, or from a mechanism, to a guarantee.

How much epsilon a run has spent so far, for progress bars, curves and the budget's wall.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """What the charges together guarantee at ``delta``.

    Guarantee: ``epsilon`` is an upper bound, never negative, and 0 exactly when there are no charges or when
    ``delta`` alone covers them. It does not depend on the order in which the charges were made.
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
    """What ``steps`` steps of the mechanism (all of them, unless told) and the ``extra`` charges guarantee."""
    taken = mechanism.steps if steps is None else steps
    problems = Problems()
    problems.count("steps", taken, least=0)
    problems.raise_if_any()
    return guarantee(
        [(mechanism.step_event, taken), *extra],
        delta=delta,
        adjacency=mechanism.adjacency,
        accountant=accountant,
        privacy_unit=mechanism.privacy_unit,
    )


def privacy_curve(
    charges: Charges,
    *,
    deltas: Sequence[float],
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    privacy_unit: str = "example",
) -> tuple[Guarantee, ...]:
    """The same charges at several deltas: all of these hold at once."""
    return tuple(
        guarantee(charges, delta=delta, adjacency=adjacency, accountant=accountant, privacy_unit=privacy_unit)
        for delta in deltas
    )


@final
class EpsilonMeter:
    """Epsilon at any number of steps, by PLD, remembered.

    Guarantee: ``spent(steps)`` is exactly ``mechanism_guarantee(mechanism, steps=steps, ...)``.
    """

    def __init__(self, mechanism: Mechanism, *, delta: float, extra: Charges = ()) -> None:
        self._mechanism = mechanism
        self._delta = delta
        self._extra = tuple(extra)
        self._known: dict[int, Guarantee] = {}
        self.spent(0)  # refuses a bad delta or extra charge now rather than in the middle of a run

    def spent(self, steps: int) -> Guarantee:
        """What ``steps`` steps and the extra charges have spent.

        The first question costs some tenths of a second, another step count some hundredths, a repeated one nothing.
        """
        if steps not in self._known:
            self._known[steps] = mechanism_guarantee(self._mechanism, delta=self._delta, steps=steps, extra=self._extra)
        return self._known[steps]
