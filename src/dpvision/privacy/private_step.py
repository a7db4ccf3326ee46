"""The private step: clip, charge, add noise, update. The whole algorithm is ``private_step``.

The order of its three statements is the guarantee. The clipped sum is computed first and stays sensitive; the charge is
on disk before noise is drawn; only the noisy gradient reaches the optimizer. A crash may over-count, never
under-count. ``Budget`` is the hard limit: it refuses the step that would exceed the planned number of releases.
"""

from __future__ import annotations

from typing import final

from torch import nn

from dpvision.config import Performance
from dpvision.errors import PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum_of_batch
from dpvision.gradients.per_unit import LossFunction
from dpvision.privacy.ledger import TRAINING, Ledger
from dpvision.privacy.mechanism import Event, Mechanism
from dpvision.privacy.noise import privatize
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import Sampling
from dpvision.privacy.values import Batch


class BudgetSpent(PrivacyError):
    """The planned number of noisy releases has been made."""


@final
class Budget:
    """Allow exactly the releases that the mechanism planned, over all forks of the run.

    Args:
        mechanism: the mechanism whose steps are charged.
        ledger: the run's ledger, open for writing.
        fork: the fork of the run that charges now.

    Guarantee: the ledger never holds more training charges than ``mechanism.steps``, so the epsilon of the ledger
    never exceeds the planned epsilon.
    """

    def __init__(self, mechanism: Mechanism, ledger: Ledger, *, fork: int = 0) -> None:
        self.mechanism = mechanism
        self._ledger = ledger
        self._fork = fork

    @property
    def planned(self) -> int:
        """Steps planned when the ledger was created; later settings cannot raise them."""
        return min(self.mechanism.steps, self._ledger.header["steps"])

    @property
    def spent(self) -> int:
        """Training steps charged so far, over all forks."""
        return sum(count for event, count in self._ledger.charges() if event.purpose == TRAINING)

    def charge(self, sampling: Sampling, *, step: int) -> None:
        """Write the cost of a step to disk, or refuse the step.

        Args:
            sampling: how the step's batch was drawn.
            step: the index of the step, from zero.

        Raises:
            BudgetSpent: all planned steps are charged.
            PrivacyError: the draw is not the mechanism's (see ``step_event``).
        """
        event = step_event(sampling, self.mechanism)
        if not self._ledger.has_charge(step=step, fork=self._fork) and self.spent >= self.planned:
            raise BudgetSpent(
                f"the budget is spent: {self.spent} of {self.planned} planned steps are charged. "
                "A new run with a larger target epsilon composes with this one."
            )
        self._ledger.charge(event, step=step, fork=self._fork)


def step_event(sampling: Sampling, mechanism: Mechanism) -> Event:
    """Derive the event that a step over this draw must charge.

    Args:
        sampling: how the batch was drawn.
        mechanism: the mechanism of the run.

    Returns:
        The mechanism's step event.

    Raises:
        PrivacyError: the draw is not a Poisson draw at the mechanism's own rate, so no such epsilon follows from it.
    """
    if sampling.method != "poisson":
        raise PrivacyError(
            f"sampling must be poisson, got {sampling.method}: shuffled or fixed-size batches have no such epsilon. "
            "Draw with dpvision.privacy.sampling."
        )
    if sampling.sample_rate != mechanism.sample_rate:
        raise PrivacyError(
            f"the draw's sample_rate is {sampling.sample_rate}, but the mechanism says {mechanism.sample_rate}."
        )
    return mechanism.step_event


def private_step(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    optimizer: Optimizer,
    budget: Budget,
    keys: Keys,
    step: int,
    performance: Performance,
) -> None:
    """Take one private step.

    Args:
        model: the part of the model that trains; ``optimizer`` was made for its parameters.
        loss_fn: one loss per row, from outputs and targets.
        batch: the Poisson draw of this step. An empty draw is a step of noise alone, and is charged.
        optimizer: a private ``Optimizer`` whose next step is ``step``.
        budget: the hard limit, with the mechanism and the ledger.
        keys: the keys of the run; the stream "noise" is used.
        step: the index of the step, from zero.
        performance: speed and memory; without influence on the guarantee.

    Raises:
        BudgetSpent: all planned steps are charged; nothing was released.
        PrivacyError: a model that mixes units, a draw of another sampler, or a gradient out of order.

    Guarantee: releases one Gaussian mechanism of ``mechanism.step_event``, after its charge is on disk. The same
    arguments give the same bits, so that the replay of a charged step releases nothing new.
    """
    mechanism = budget.mechanism
    clipped = clipped_sum_of_batch(
        model,
        loss_fn,
        batch,
        clip_norm=mechanism.clip_norm,
        clipping=mechanism.clipping,
        performance=performance,
    )
    budget.charge(batch.sampling, step=step)
    optimizer.step(privatize(clipped, mechanism, keys, step=step))
