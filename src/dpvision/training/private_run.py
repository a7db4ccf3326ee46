"""``PrivateRun``: the private step for a user's own training loop, from the first draw to the certificate.

The loop calls ``step`` for every batch that ``batches`` yields; sampling, clipping, charge, noise and the optimizer's
step happen inside, by the same ``private_step`` as in ``dpvision train``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpvision.accounting import guarantee
from dpvision.config import Performance
from dpvision.data.dataset_batches import DatasetBatch, DatasetBatches
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients.per_unit import LossFunction
from dpvision.own_code import GIVEN_IN_PYTHON, code_of
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import Guarantee, Mechanism
from dpvision.privacy.private_step import Privatizer, private_step
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import Sampling
from dpvision.privacy.torch_optimizer import TorchOptimizer
from dpvision.privacy.values import Microbatch
from dpvision.release.statements import ROW_UNITS, TEST_SPLIT, TRAINING_DATA, own_code_declarations
from dpvision.storage.run_folder import RunFolder
from dpvision.training.run_fingerprint import bound_keys, current_binding
from dpvision.training.write_release import publish

OWN_LOOP = "training loop"


@final
class PrivateBatch:
    """The draw of one step. Sensitive: hand it to ``PrivateRun.step``, and look at nothing in it."""

    __slots__ = ("_drawn", "_run", "step")

    def __init__(self, run: PrivateRun, drawn: DatasetBatch, step: int) -> None:
        self._run, self._drawn, self.step = run, drawn, step

    def __repr__(self) -> str:
        return f"PrivateBatch(step={self.step}, sensitive)"

    @property
    def sampling(self) -> Sampling:
        """How the units were chosen."""
        return self._drawn.sampling

    def belongs_to(self, run: PrivateRun) -> bool:
        """Whether ``run`` drew it."""
        return self._run is run

    def microbatches(self, units: int) -> Iterator[Microbatch]:
        """Yield the draw in pieces, for the engine. Sensitive."""
        return self._drawn.microbatches(units)


@final
class PrivateRun:
    """A private training run whose loop is the user's own.

    Args:
        model: any module whose rows do not influence each other; its initial weights are declared public.
        optimizer: any torch optimizer for its parameters that needs no closure.
        mechanism: from ``Mechanism.calibrated``, which holds delta and the target epsilon too.
        folder: the folder of the run; it must not exist or be empty.
        scheduler: a learning-rate schedule of ``optimizer``; ``step`` steps it. ReduceLROnPlateau needs
            ``public_metric``.
        public_metric: what ``report_public_metric`` reports, declared public.
        data_name: what the certificate calls the data.
        seed: replaces the operating system's entropy: reproducible, and stamped as not for release.

    Raises:
        ArgumentError: the mechanism has no delta, the optimizer can't be used, or the folder is not empty.

    Guarantee: the model's weights are private as ``guarantee()`` states, for the units of the datasets given to
    ``batches``, if the loop uses the private data for nothing else. A step is charged on disk before its noise exists;
    no more steps than planned are taken.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mechanism: Mechanism,
        folder: Path | str,
        *,
        scheduler: Any = None,
        public_metric: str | None = None,
        data_name: str = "own data",
        seed: int | None = None,
    ) -> None:
        if mechanism.delta is None:
            raise ArgumentError("the mechanism has no delta: make it with Mechanism.calibrated.")
        if isinstance(scheduler, ReduceLROnPlateau) and public_metric is None:
            raise ArgumentError(
                "ReduceLROnPlateau looks at a metric, which would leak if it came from private data: name it with "
                "public_metric to declare that it is computed on public data."
            )
        self._optimizer = TorchOptimizer(model, optimizer, scheduler)
        self._optimizer.trainable()
        self.model, self.mechanism = model, mechanism
        self._device = str(next(iter(model.parameters())).device)
        self._data_name, self._delta, self._losses = data_name, mechanism.delta, dict[str, str | None]()
        keys = Keys.from_os_entropy() if seed is None else Keys.from_seed(seed)
        run_id = keys.derive("run")[:8].hex()
        binding = current_binding(
            run_id=run_id,
            config_digest=json.dumps(mechanism.to_dict(), sort_keys=True),
            data_fingerprint="own loop",
            device=self._device,
        )
        self._folder = RunFolder.create(Path(folder))
        self._folder.save_key(keys, run_id=run_id, bindings=[binding])
        self._keys = bound_keys(keys, binding, fork=0)
        header = {
            **mechanism.to_dict(),
            "run_id": run_id,
            "delta": mechanism.delta,
            "target_epsilon": mechanism.target_epsilon,
            "hand_seeded": keys.hand_seeded,
        }
        self._ledger = Ledger.create(self._folder.ledger_path, header)
        self._privatizer = Privatizer(mechanism, self._ledger, keys=self._keys)
        self._model_code = _named(model, "model")
        self._declare(
            OWN_LOOP,
            "the user's own: dpvision draws, clips, charges and adds the noise; that the loop uses the private data "
            "for nothing else, and its transforms and settings, are declared by the user",
        )
        self._declare(TRAINING_DATA, data_name)
        if isinstance(scheduler, ReduceLROnPlateau):
            self._declare("learning-rate schedule", f"follows {public_metric}, which is declared public")
        self._plateau = isinstance(scheduler, ReduceLROnPlateau)
        self._optimizer_name, self._released = type(optimizer).__name__, False

    def __repr__(self) -> str:
        return f"PrivateRun({self._folder.root}, step {self.steps_taken} of {self.mechanism.steps})"

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self._folder.root

    @property
    def steps_taken(self) -> int:
        """Steps taken so far; also the index of the next one."""
        return self._optimizer.steps_taken

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of everything charged so far."""
        return self.guarantee().epsilon

    def guarantee(self) -> Guarantee:
        """Return the guarantee of everything charged so far, from the ledger."""
        return guarantee(
            self._ledger.charges(),
            delta=self._delta,
            adjacency=self.mechanism.adjacency,
            privacy_unit=self.mechanism.privacy_unit,
        )

    def batches(
        self, dataset: Any, *, units: Sequence[object] | None = None, rows_per_unit: int = 1
    ) -> Iterator[PrivateBatch]:
        """Yield one Poisson draw for each step that is left; leave the loop whenever you like.

        Args:
            dataset: (inputs, targets) as tensors, arrays, or dicts or tuples of them; or a map-style Dataset whose
                items are such pairs. A dict is given to the model by keyword, a tuple by position.
            units: the owner of each row; default: each row is a unit of its own.
            rows_per_unit: rows that a unit gives at most to a step, averaged and clipped together.

        Yields:
            The draw of the next step, for ``step``. Only drawn rows are read, and only inside ``step``.

        Raises:
            ArgumentError: rows that can't be read at random, or a privacy unit that does not fit ``units``.
            PrivacyError: a batch was not handed to ``step``: choosing batches has no such epsilon.
        """
        if (units is None) != (self.mechanism.privacy_unit in ROW_UNITS):
            raise ArgumentError(
                f"privacy_unit is {self.mechanism.privacy_unit!r}: give units= for what owns several rows, and only "
                f"there; a single row is called {' or '.join(ROW_UNITS)}."
            )
        draws = DatasetBatches(
            dataset,
            units=units,
            rows_per_unit=rows_per_unit,
            sample_rate=self.mechanism.sample_rate,
            keys=self._keys,
            device=self._device,
        )
        owners = f"ids given by the user, at most {rows_per_unit} rows of each in a step"
        self._declare("privacy units", "each row is a unit of its own" if units is None else owners)
        return self._drawn(draws)

    def _drawn(self, draws: DatasetBatches) -> Iterator[PrivateBatch]:
        while self.steps_taken < self.mechanism.steps and not self._released:
            step = self.steps_taken
            yield PrivateBatch(self, draws.batch(step), step)
            if self.steps_taken == step:
                raise PrivacyError(
                    f"the batch of step {step} was not handed to step: which steps are taken must not depend on what "
                    "was drawn. Call step for every batch."
                )

    def step(self, batch: PrivateBatch, loss_fn: LossFunction) -> None:
        """Take one private step: clip, charge, add noise, optimizer step.

        Args:
            batch: what ``batches`` yielded last.
            loss_fn: from the model's outputs and the targets to one loss per row.

        Raises:
            BudgetSpent: all planned steps are charged.
            PrivacyError: a batch of another run or step, weights or ``.grad`` changed outside, a model that mixes
                units. Nothing was released.
        """
        if self._released:
            raise PrivacyError("this run has been released. A new run composes with it.")
        if not isinstance(batch, PrivateBatch) or not batch.belongs_to(self):
            raise PrivacyError("the batch was not drawn by this run: only what run.batches yields has its epsilon.")
        if batch.step != self.steps_taken:
            raise PrivacyError(
                f"the batch is of step {batch.step}, the next step is {self.steps_taken}: each is taken once, in order."
            )
        self._optimizer.require_ready()
        self._declare_code(loss_fn)
        devices = [] if self._device == "cpu" else [self._device]
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._keys.seed("views", batch.step))
            private_step(
                self.model,
                loss_fn,
                batch,
                optimizer=self._optimizer,
                privatizer=self._privatizer,
                step=batch.step,
                performance=Performance(),
            )

    def report_public_metric(self, value: float) -> None:
        """Step a ReduceLROnPlateau schedule by the metric that was declared public."""
        if not self._plateau:
            raise ArgumentError("only a ReduceLROnPlateau schedule takes a metric.")
        self._optimizer.report_public_metric(value)

    def release(self, metrics: Mapping[str, float] | None = None, *, evaluated_on: str | None = None) -> dict[str, Any]:
        """Write weights, certificate and ledger into the folder's ``release/``; no step can follow.

        Args:
            metrics: values measured on public data, such as accuracy, for the model card.
            evaluated_on: the name of that data, declared public; needed with ``metrics``.

        Returns:
            The content of certificate.json.

        Raises:
            PrivacyError: a parameter was changed by anything but ``step``.
            ArgumentError: metrics without ``evaluated_on``, or weights that are not finite.
        """
        if metrics and evaluated_on is None:
            raise ArgumentError("metrics need evaluated_on: the name of the public data that they were measured on.")
        self._optimizer.check_untouched()
        if not all(torch.isfinite(p).all() for p in self.model.parameters()):
            raise ArgumentError("the weights are not finite: lower the learning rate and start again.")
        if evaluated_on is not None:
            self._declare(TEST_SPLIT, f"{evaluated_on}, declared public")
        measured = {name: float(value) for name, value in (metrics or {}).items()}
        on = {} if evaluated_on is None else {"evaluated_on": f"{evaluated_on}, declared public"}
        certificate = publish(
            self._folder,
            self._ledger,
            mechanism=self.mechanism,
            hand_seeded=self._keys.hand_seeded,
            weights=dict(self.model.state_dict()),
            config=json.dumps(self._config(), indent=2, sort_keys=True) + "\n",
            data={
                "source": self._data_name,
                "class_names": [],
                "image_shape": [],
                "num_units": self.mechanism.num_units,
            },
            metrics={
                "task": OWN_LOOP,
                "curve": [],
                "final": {**measured, **on},
            },
        )
        self._released = True
        self._optimizer.close()
        self._folder.close()
        return certificate

    def _config(self) -> dict[str, Any]:
        mechanism = self.mechanism
        privacy = {"enabled": True, "delta": self._delta, "target_epsilon": mechanism.target_epsilon}
        name, sha256 = self._model_code
        loss = list(self._losses.items())[-1] if self._losses else (None, None)
        return {
            "name": self._folder.root.name,
            "task": OWN_LOOP,
            "data": {"source": self._data_name},
            "privacy": {**mechanism.to_dict(), **privacy},
            "model": {"name": name, "sha256": sha256},
            "loss": loss[0],
            "loss_sha256": loss[1],
            "optimizer": {"name": self._optimizer_name},
        }

    def _declare_code(self, loss_fn: LossFunction) -> None:
        """Declare the model and the loss, each source once."""
        name, sha256 = _named(loss_fn, "loss")
        if name in self._losses:
            return
        self._losses[name] = sha256
        for what, how in own_code_declarations(self._config()):
            self._declare(what, how)

    def _declare(self, what: str, how: str) -> None:
        self._ledger.note("declare", {"what": what, "how": how})


def _named(given: Any, kind: Any) -> tuple[str, str | None]:
    """Name and hash own code; torch's own classes have torch's version in the certificate instead of a hash."""
    described = given if hasattr(given, "__qualname__") else type(given)
    if str(getattr(described, "__module__", "")).split(".")[0] == "torch":
        return f"{GIVEN_IN_PYTHON}:{described.__qualname__}", None
    code = code_of(given, kind=kind)
    return code.name, code.sha256
