"""The budget is a wall: checked before the step that would cross it, charged before anything is released."""

from __future__ import annotations

from typing import final

from dpvision.errors import PrivacyError
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import Event, Mechanism


class BudgetSpent(PrivacyError):
    """The planned number of noisy releases has been made."""


@final
class Budget:
    """Lets through exactly the releases that the mechanism planned, forks of the run included.

    Guarantee: the ledger never holds more training charges than ``mechanism.steps``, so the epsilon of the ledger
    never exceeds the epsilon that was planned.
    """

    def __init__(self, mechanism: Mechanism, ledger: Ledger) -> None:
        self._mechanism = mechanism
        self._ledger = ledger

    @property
    def planned(self) -> int:
        """Steps that were planned when the ledger was opened; no later wish raises them."""
        return min(self._mechanism.steps, self._ledger.header["steps"])

    @property
    def spent(self) -> int:
        """Training steps charged so far, over all forks."""
        return sum(count for event, count in self._ledger.charges() if event.purpose == "training step")

    def charge(self, event: Event, *, step: int, fork: int) -> None:
        """Write the step's cost to disk, or refuse the step."""
        if event != self._mechanism.step_event:
            raise PrivacyError(f"a step of this run costs {self._mechanism.step_event}, not {event}.")
        if not self._ledger.has_charge(step=step, fork=fork) and self.spent >= self.planned:
            raise BudgetSpent(
                f"the budget is spent: {self.spent} of {self.planned} planned steps are charged. "
                "A new run with a larger target epsilon composes with this one."
            )
        self._ledger.charge(event, step=step, fork=fork)
