"""A ``PrivateRun`` in a process other than rank 0: the user's loop runs there too, and computes for rank 0.

Every process runs the same script. In a step each computes its share of the clipped sum; rank 0 adds them up, charges,
adds the noise and moves the weights, which all processes receive. Here are no ledger, no noise and no files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from dpvision import __version__
from dpvision.accounting import Charges
from dpvision.config import Performance
from dpvision.data.dataset_batches import DatasetBatches
from dpvision.gradients.clipped_sum import assist_clipped_sum
from dpvision.gradients.per_unit import LossFunction
from dpvision.privacy.mechanism import Event, Mechanism
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sharded_step import FollowingPrivatizer, gather_state, sharded_step
from dpvision.privacy.torch_optimizer import TorchOptimizer
from dpvision.privacy.values import Batch
from dpvision.ranks import RankError, Ranks
from dpvision.training.notebook import ShownCertificate
from dpvision.training.run_fingerprint import code_digest
from dpvision.training.write_release import RunResult


@final
@dataclass
class FollowedRun:
    """What a process other than rank 0 knows of a run.

    Attributes:
        ranks: the processes.
        folder: of the run, which rank 0 writes.
        run_id: of the run.
        mechanism: of the run.
        keys: of the draws.
        optimizer: refuses steps outside of the run; rank 0 moves the weights.
        steps_taken: by rank 0.
        steps_left: as rank 0 says.
        charges: everything that rank 0 has charged.
        draws: the draws of the last call of ``batches``.
        released: whether ``release`` was called.
        problem: why the run can't be continued.
        privatizer: releases what this process owns, where the optimizer's state is sharded.
    """

    ranks: Ranks
    folder: Path
    run_id: str
    mechanism: Mechanism
    keys: Keys
    optimizer: TorchOptimizer
    steps_taken: int
    steps_left: int
    charges: Charges
    draws: DatasetBatches | None = None
    released: bool = False
    problem: str | None = None
    privatizer: FollowingPrivatizer | None = None

    @staticmethod
    def told(
        ranks: Ranks, folder: Path, facts: Mapping[str, Any], optimizer: TorchOptimizer, *, sharded: bool = False
    ) -> FollowedRun:
        """Make the run from what rank 0 told about it (``facts_of_run``)."""
        run = FollowedRun(
            ranks=ranks,
            folder=folder,
            run_id=facts["run_id"],
            mechanism=Mechanism(**facts["mechanism"]),
            keys=Keys(bytes.fromhex(facts["secret"]), facts["context"], hand_seeded=facts["hand_seeded"]),
            optimizer=optimizer,
            steps_taken=facts["steps_taken"],
            steps_left=facts["steps_left"],
            charges=_charges(facts["charges"]),
        )
        if sharded:
            run.privatizer = FollowingPrivatizer(run.mechanism, run.keys, first=run.steps_taken)
        return run

    def step(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Batch,
        context: AbstractContextManager[None],
        performance: Performance,
    ) -> None:
        """Compute this process's share of a step, and receive the weights that rank 0 moved.

        Raises:
            Exception: as on rank 0, before the step was charged: the run can be continued.
            RankError: rank 0 failed after that, or a process was lost.
        """
        with context:
            if self.privatizer is None:
                assist_clipped_sum(
                    model,
                    loss_fn,
                    batch,
                    clip_norm=self.mechanism.clip_norm,
                    clipping=self.mechanism.clipping,
                    performance=performance,
                    ranks=self.ranks,
                )
            else:
                self._sharded_step(self.privatizer, model, loss_fn, batch, performance)
        told = self.ranks.tell()
        if "error" in told:
            self.problem = told["error"]
            raise RankError(f"rank 0: {told['error']}", told=True)
        self.steps_taken, self.steps_left = told["steps_taken"], told["steps_left"]
        self.charges = _charges(told["charges"])
        self.ranks.spread(moved_by_steps(model))
        if self.privatizer is not None:
            self.optimizer.accept_received()
        if told["save"]:
            self.save(model)

    def _sharded_step(
        self,
        privatizer: FollowingPrivatizer,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Batch,
        performance: Performance,
    ) -> None:
        step = self.steps_taken
        try:
            sharded_step(
                model,
                loss_fn,
                batch,
                optimizer=self.optimizer,
                privatizer=privatizer,
                step=step,
                performance=performance,
                ranks=self.ranks,
            )
        except BaseException as error:
            if privatizer.next_step > step:
                self.problem = f"step {step} was interrupted after its charge ({type(error).__name__})"
            raise

    def save(self, model: nn.Module) -> None:
        """Send this process's part of the optimizer's state, if there is one, for a checkpoint of rank 0."""
        if self.privatizer is not None:
            gather_state(model, self.optimizer, self.ranks)

    def result(self) -> RunResult:
        """Wait until rank 0 has released the run, and return its result."""
        found = self.ranks.fetch(f"release/{self.run_id}/{self.steps_taken}")
        self.released = True
        self.optimizer.close()
        certificate = ShownCertificate(found["certificate"])
        return RunResult(self.folder, found["outcome"], certificate, found["metrics"], found["seconds"])


def facts_of_run(
    run_id: str, mechanism: Mechanism, keys: Keys, *, steps_taken: int, steps_left: int, charges: Charges
) -> dict[str, Any]:
    """Return what rank 0 tells the others about a started or resumed run."""
    return {
        "run_id": run_id,
        "mechanism": {name: getattr(mechanism, name) for name in mechanism.__dataclass_fields__},
        "secret": keys.secret.hex(),
        "context": keys.context,
        "hand_seeded": keys.hand_seeded,
        **progress_of_run(steps_taken=steps_taken, steps_left=steps_left, charges=charges),
    }


def progress_of_run(*, steps_taken: int, steps_left: int, charges: Charges, save: bool = False) -> dict[str, Any]:
    """Return what rank 0 tells the others after every step, and whether it writes a checkpoint now."""
    spent = [[event.sample_rate, event.noise_multiplier, event.purpose, count] for event, count in charges]
    return {"steps_taken": steps_taken, "steps_left": steps_left, "charges": spent, "save": save}


def share_result(ranks: Ranks, run_id: str, steps: int, result: RunResult) -> RunResult:
    """Leave the result for processes that call ``release`` too; return it."""
    values = {"certificate": dict(result.certificate), "metrics": result.metrics, "outcome": result.outcome}
    ranks.post(f"release/{run_id}/{steps}", {**values, "seconds": result.train_seconds})
    return result


def agree_on_program(ranks: Ranks, model: nn.Module, optimizer: object, facts: Mapping[str, Any]) -> None:
    """Require the same program, model and settings on every rank, before anything is written."""
    shapes = [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    ranks.agree(
        {
            **{name: str(value) for name, value in facts.items()},
            "model": _digest(shapes),
            "optimizer": type(optimizer).__name__,
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
            "dpvision": __version__,
            "code": code_digest(),
        }
    )


def agree_on_data(ranks: Ranks, draws: DatasetBatches) -> None:
    """Require the same rows and units on every rank: a unit that has other rows elsewhere would count twice."""
    if ranks.several:
        found = ""
        with ranks.settling():
            found = draws.fingerprint()
        ranks.agree({"data": found})


def moved_by_steps(model: nn.Module) -> list[Tensor]:
    """Return what rank 0 sends to the others: all weights and saved buffers."""
    return list(model.state_dict(keep_vars=True).values())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _charges(told: Iterable[tuple[float, float, str, int]]) -> Charges:
    return tuple((Event(sample_rate=q, noise_multiplier=z, purpose=what), count) for q, z, what, count in told)
