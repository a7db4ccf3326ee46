"""The private step with the optimizer's state divided among the processes of a run.

Every parameter has one owner. The owner alone receives the float64 sums of its parameters, draws their noise, has their
optimizer state and moves them; then rank 0 collects the weights. The order is that of ``private_step``: rank 0 charges
the step after all sums are there, and every owner draws its noise after it was told so. Sums, noise and update of a
parameter have the bits that one process would give them: sums are added along the same tree, noise is keyed by step and
by groups of parameters that have one owner, and the rules of ``torch.optim`` move each parameter by itself.

Weights and activations are not divided: every process has the whole model, because it computes whole units, whose norms
are over all parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, final

import torch
from torch import nn

from dpvision.config import Performance
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum_of_batch
from dpvision.gradients.ownership import trainable_parameters
from dpvision.gradients.per_unit import LossFunction
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.noise import noise_groups, noisy_mean
from dpvision.privacy.private_step import Privatizer
from dpvision.privacy.randomness import Keys
from dpvision.privacy.torch_optimizer import TorchOptimizer, packed, unpacked
from dpvision.privacy.values import Batch, ClippedSum, PrivateGrad
from dpvision.ranks import LEADER, Ranks

_RULES: Final = "torch.optim."


@final
class ShardedOptimizer:
    """A torch optimizer whose state is divided among the processes of a run, for ``PrivateRun``.

    Args:
        make: from parameters to one of ``torch.optim``'s optimizers with these in one group, such as
            ``lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)``.
        schedule: from that optimizer to its learning-rate schedule, which follows the number of steps.

    The state of a checkpoint is that of the whole optimizer: a run can be resumed with any number of processes.
    """

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        *,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        self._make, self._schedule = make, schedule

    def of_process(self, model: nn.Module, ranks: Ranks, *, resuming: bool = False) -> TorchOptimizer:
        """Make the optimizer of the parameters that this process owns.

        Raises:
            ArgumentError: it is none of ``torch.optim``, has several groups, or follows a metric.
        """
        parameters, owners = trainable_parameters(model), owners_of(model, ranks.size)
        owned = {name: parameter for name, parameter in parameters.items() if owners[name] == ranks.rank}
        rule = self._make([{"params": list(owned.values())}])
        if not type(rule).__module__.startswith(_RULES) or len(rule.param_groups) != 1:
            raise ArgumentError(
                f"a sharded optimizer must be one of torch.optim with one group of parameters, got "
                f"{type(rule).__qualname__} with {len(rule.param_groups)}: its update of a parameter may not depend on "
                "the others. Use it without ShardedOptimizer."
            )
        schedule = None if self._schedule is None else self._schedule(rule)
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ArgumentError("a sharded optimizer can't follow a metric. Use a schedule of the number of steps.")
        return TorchOptimizer(model, rule, schedule, resuming=resuming, owned=frozenset(owned))


def owners_of(model: nn.Module, ranks: int) -> dict[str, int]:
    """Return the rank that owns each trainable parameter: a function of names, sizes and the number of ranks.

    Parameters that share a draw of noise have one owner. The largest group comes first, to the rank that has least.
    """
    sizes = _sizes(model)
    groups = sorted(noise_groups(sizes), key=lambda names: (-sum(sizes[name] for name in names), names))
    held, owners = [0] * ranks, dict[str, int]()
    for names in groups:
        owner = held.index(min(held))
        held[owner] += sum(sizes[name] for name in names)
        owners |= dict.fromkeys(names, owner)
    return owners


def _sizes(model: nn.Module) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in trainable_parameters(model).items()}


@final
class FollowingPrivatizer:
    """Release this process's part of the steps that rank 0 has charged: each once, in order.

    Args:
        mechanism: of the run.
        keys: of the run.
        first: the first step that may be released.
    """

    def __init__(self, mechanism: Mechanism, keys: Keys, *, first: int) -> None:
        self.mechanism, self._keys, self.next_step = mechanism, keys, first

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("a private run can't be copied or pickled: the copy would draw the same noise again.")

    def release(self, clipped: ClippedSum, *, step: int, sizes: Mapping[str, int]) -> PrivateGrad:
        """Release the noisy mean of some parameters, once; rank 0 has charged the step.

        Raises:
            PrivacyError: the step is not the next one, or the sum is not sound (``noise.noisy_mean``).
        """
        if step != self.next_step:
            raise PrivacyError(f"the next step to release is {self.next_step}, got {step}: each is released once.")
        self.next_step = step + 1  # also if what follows fails
        return noisy_mean(clipped, self.mechanism, self._keys, step=step, sizes=sizes)


def sharded_step(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    optimizer: TorchOptimizer,
    privatizer: Privatizer | FollowingPrivatizer,
    step: int,
    performance: Performance,
    ranks: Ranks,
) -> None:
    """Take one private step in which every process moves the parameters that it owns; all ranks call this.

    Args:
        model: the model; afterwards rank 0 has its new weights, and every other rank has those that it owns.
        loss_fn: one loss per row.
        batch: the Poisson draw of this step, the same on every rank.
        optimizer: of the parameters that this process owns.
        privatizer: that of the run on rank 0, which charges; a ``FollowingPrivatizer`` elsewhere.
        step: the index of the step, from zero.
        performance: speed and memory.
        ranks: the processes.

    Raises:
        BudgetSpent: all planned steps are charged (on rank 0).
        RankError: another process failed or was lost.

    Guarantee: as ``private_step``: all parts together are one Gaussian mechanism of ``mechanism.step_event``, charged
    on disk before any process draws noise. Each number gets noise once, from its owner.
    """
    mechanism, owners = privatizer.mechanism, owners_of(model, ranks.size)
    clipped = clipped_sum_of_batch(
        model,
        loss_fn,
        batch,
        clip_norm=mechanism.clip_norm,
        clipping=mechanism.clipping,
        performance=performance,
        ranks=ranks,
        owners=owners,
    )

    def charged() -> dict[str, int]:
        if isinstance(privatizer, Privatizer):
            privatizer.charge(batch.sampling, step=step)
        return {"charged": step}

    told = ranks.decided(charged)
    with ranks.settling():
        optimizer.step(privatizer.release(clipped, step=told["charged"], sizes=_sizes(model)))
    _collect_weights(model, owners, ranks)
    if ranks.leads:
        optimizer.accept_received()


@torch.no_grad()
def _collect_weights(model: nn.Module, owners: Mapping[str, int], ranks: Ranks) -> None:
    """Bring the weights that other ranks have moved to rank 0."""
    for name, parameter in trainable_parameters(model).items():
        if ranks.leads and owners[name] != LEADER:
            place = torch.empty(parameter.shape, dtype=parameter.dtype)
            parameter.copy_(ranks.receive(place, rank=owners[name]))
        elif not ranks.leads and owners[name] == ranks.rank:
            ranks.send(parameter)


def gather_state(model: nn.Module, optimizer: TorchOptimizer, ranks: Ranks) -> dict[int, Any]:
    """Bring the optimizer states of all ranks to rank 0; all ranks call this.

    Returns:
        On rank 0, the state of each parameter that another rank owns, by its place among the trainable ones.
    """
    found: dict[int, Any] = {}
    for rank in sorted(set(owners_of(model, ranks.size).values()) - {LEADER}):
        if ranks.leads:
            found |= _receive_packed(ranks, rank=rank)
        elif ranks.rank == rank:
            _send_packed(optimizer.state_by_place(), ranks, to=LEADER)
    return found


def scatter_state(model: nn.Module, optimizer: TorchOptimizer, ranks: Ranks, whole: Mapping[str, Any] | None) -> None:
    """Give every rank its part of an optimizer's state that rank 0 has loaded; all ranks call this.

    Args:
        model: the model.
        optimizer: of this process.
        ranks: the processes.
        whole: on rank 0, the state (``TorchOptimizer.load_state``).
    """
    if not ranks.leads:
        optimizer.load_part(_receive_packed(ranks, rank=LEADER))
        return
    owners = list(owners_of(model, ranks.size).items())
    places = {name: place for place, name in enumerate(trainable_parameters(model))}
    for rank in range(1, ranks.size):
        mine = {places[name] for name, owner in owners if owner == rank}
        states = dict(whole or {}).get("state", {})
        part = {**(whole or {}), "state": {place: state for place, state in states.items() if place in mine}}
        _send_packed(part, ranks, to=rank)


def _send_packed(value: object, ranks: Ranks, *, to: int) -> None:
    tensors: dict[str, torch.Tensor] = {}
    text = packed(value, tensors, name="state")
    shapes = {name: [str(each.dtype).removeprefix("torch."), *each.shape] for name, each in tensors.items()}
    ranks.send_text(json.dumps([text, shapes]), to=to)
    for tensor in tensors.values():
        ranks.send(tensor, to=to)


def _receive_packed(ranks: Ranks, *, rank: int) -> Any:
    text, shapes = json.loads(ranks.receive_text(rank=rank))
    places = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, *shape) in shapes.items()}
    return unpacked(text, {name: ranks.receive(place, rank=rank) for name, place in places.items()})
