"""How much epsilon a run has spent so far, for progress bars, curves and the budget's wall."""

from __future__ import annotations

from typing import final

from dpvision.accounting.charges import Charges
from dpvision.accounting.guarantees import mechanism_guarantee
from dpvision.mechanism import Guarantee, Mechanism


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
