"""The private step: clip, charge, add noise, update. The whole algorithm is ``private_step``.

The order of its three statements is the guarantee. The clipped sum is computed first and stays sensitive; the charge is
on disk before noise is drawn; only the noisy gradient reaches the optimizer. A crash may over-count, never
under-count. ``Privatizer`` is the only caller of the noise: it releases a charged step once, and it is the hard budget
limit, because it refuses the step that would exceed the planned number of releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, final

from torch import nn

from dpvision.config import Performance
from dpvision.errors import PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum_of_batch
from dpvision.gradients.per_unit import LossFunction
from dpvision.privacy.ledger import TRAINING, Ledger
from dpvision.privacy.mechanism import Event, Mechanism
from dpvision.privacy.noise import noisy_mean
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import Sampling
from dpvision.privacy.torch_optimizer import TorchOptimizer
from dpvision.privacy.values import Batch, ClippedSum, PrivateGrad
from dpvision.ranks import ALONE, Ranks


class BudgetSpent(PrivacyError):
    """The planned number of noisy releases has been made."""


@final
class Privatizer:
    """Charge and release the steps of one run: each once, in order, and no more than were planned.

    Args:
        mechanism: the mechanism whose steps are charged: noise, divisor, clip norm.
        ledger: the run's ledger, open for writing.
        keys: the keys of the run; the stream "noise" is used. Default: a fresh secret of the operating system.
        fork: the fork of the run that charges now.
        replays: whether a step that the ledger holds already may be released again. Only for a resumed run whose
            ``keys`` are bound to everything that the sum depends on, so that the repeated release has the same bits.

    Guarantee: the ledger never holds more training charges than ``mechanism.steps``, so that its epsilon never exceeds
    the planned one. A step is released once by this object, after its charge is on disk; without ``replays`` it is
    released once over all objects and processes, because the ledger holds its charge.

    The caller guarantees that each sum is that of the draw that was charged: a ``ClippedSum`` over units that joined
    independently with ``mechanism.sample_rate``; and that no other object has the same keys.
    """

    def __init__(
        self, mechanism: Mechanism, ledger: Ledger, *, keys: Keys | None = None, fork: int = 0, replays: bool = False
    ) -> None:
        self.mechanism = mechanism
        self._ledger = ledger
        self._keys = Keys.from_os_entropy() if keys is None else keys
        self._fork = fork
        self._replays = replays and keys is not None
        self._last_charged = -1
        self._charged: int | None = None  # charged and not released yet

    def __repr__(self) -> str:
        return f"Privatizer({self.spent} of {self.planned} steps charged)"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError(
            "a private run can't be copied or pickled: the copy would draw the same noise again, and the difference of "
            "the two shows a gradient. Use state_dict() for the weights, and PrivateRun.resume to continue."
        )

    @property
    def planned(self) -> int:
        """Steps planned when the ledger was created; later settings cannot raise them."""
        return min(self.mechanism.steps, self._ledger.header.get("steps", self.mechanism.steps))

    @property
    def spent(self) -> int:
        """Training steps charged so far, over all forks."""
        return sum(count for event, count in self._ledger.charges() if event.purpose == TRAINING)

    def charge(self, sampling: Sampling, *, step: int) -> None:
        """Write the cost of a step to disk, or refuse the step. ``release`` needs it.

        Args:
            sampling: how the step's batch was drawn.
            step: the index of the step, from zero.

        Raises:
            BudgetSpent: all planned steps are charged.
            PrivacyError: the draw is not the mechanism's (see ``step_event``), or the step was charged before.
        """
        event = step_event(sampling, self.mechanism)
        known = self._ledger.has_charge(step=step, fork=self._fork)
        if step <= self._last_charged or (known and not self._replays):
            raise PrivacyError(
                f"step {step} was charged before and is released once: a second sum under its noise would show the "
                "difference of the two without noise. Take the next step, or note a fork, with other keys."
            )
        if not known and self.spent >= self.planned:
            raise BudgetSpent(
                f"the budget is spent: {self.spent} of {self.planned} planned steps are charged. "
                "A new run with a larger target epsilon composes with this one."
            )
        self._ledger.charge(event, step=step, fork=self._fork)
        self._last_charged = self._charged = step

    def release(self, clipped: ClippedSum, *, step: int, sizes: Mapping[str, int] | None = None) -> PrivateGrad:
        """Release the noisy mean of a clipped sum, once: ``(sum + noise) / divisor``.

        Args:
            clipped: the clipped sum of the step; it is used up, also when it is refused because it is not finite.
            step: the step that was charged last.
            sizes: of all parameters, where other processes release some of them (``sharded_step``).

        Returns:
            The noisy mean, safe to use and to keep.

        Raises:
            PrivacyError: the step is not charged or was released, or the sum was clipped to another norm, was taken
                before, or is not finite.

        Guarantee: one Gaussian mechanism of ``mechanism.step_event``; see ``noise.noisy_mean`` for its numerics.
        """
        if self._charged is None or step != self._charged:
            raise PrivacyError(
                f"step {step} is not charged, or was released: each step is charged first and released once. "
                "Call Privatizer.charge for the next step."
            )
        self._charged = None  # also if what follows fails: nothing is released twice
        return noisy_mean(clipped, self.mechanism, self._keys, step=step, sizes=sizes)


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
    optimizer: Optimizer | TorchOptimizer,
    privatizer: Privatizer,
    step: int,
    performance: Performance,
    own_code: bool = True,
    ranks: Ranks = ALONE,
) -> None:
    """Take one private step.

    Args:
        model: the part of the model that trains; ``optimizer`` was made for its parameters.
        loss_fn: one loss per row, from outputs and targets.
        batch: the Poisson draw of this step. An empty draw is a step of noise alone, and is charged.
        optimizer: a private ``Optimizer`` whose next step is ``step``.
        privatizer: charges and releases, with the mechanism, the ledger and the keys of the run.
        step: the index of the step, from zero.
        performance: speed and memory; without influence on the guarantee.
        own_code: whether model and loss may be anyone's code, so that a proved graph must take their place.
        ranks: the processes that compute the sum; this one is rank 0, and the others call ``assist_clipped_sum``.

    Raises:
        BudgetSpent: all planned steps are charged; nothing was released.
        PrivacyError: a model that mixes units, a draw of another sampler, or a gradient out of order.
        RankError: another process failed or was lost; nothing was charged.

    Guarantee: releases one Gaussian mechanism of ``mechanism.step_event``, after its charge is on disk. With several
    processes the noise is added once, by rank 0, to the sum of all; no other process has the ledger or draws noise.
    """
    mechanism = privatizer.mechanism
    clipped = clipped_sum_of_batch(
        model,
        loss_fn,
        batch,
        clip_norm=mechanism.clip_norm,
        clipping=mechanism.clipping,
        performance=performance,
        own_code=own_code,
        ranks=ranks,
    )
    privatizer.charge(batch.sampling, step=step)
    optimizer.step(privatizer.release(clipped, step=step))
