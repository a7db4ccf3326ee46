"""``PrivacyEngine`` with Opacus's names, on top of ``PrivateRun``: sampling, clipping, charge and noise are dpvision's.

The script keeps its loop. The loader yields recorded tensors (``recorded_step``), ``loss.backward()`` ends the
recording, and ``optimizer.step()`` is ``PrivateRun.step``. The model stays the same object, with the same keys in its
``state_dict``: only its class changes, to one that notices recorded inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from dpvision.accounting import calibrate_steps, propose_delta
from dpvision.compat.recorded_step import BatchShape, Draw, RecordedStep, RecordedTensor, Reduction
from dpvision.compat.validators import ModuleValidator
from dpvision.errors import ArgumentError, PrivacyError, Problems
from dpvision.gradients.plan import model_key
from dpvision.gradients.proved_graph import losses_noted
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.private_step import BudgetSpent
from dpvision.ranks import job_size
from dpvision.training.private_run import PrivateBatch, PrivateRun
from dpvision.training.write_release import RunResult

_STATE: Final = "privacy_accountant_state_dict"
_CHANGE: Final = (
    "Keep both the same in every step; or call declare_change of the engine if the change follows from public facts, "
    "such as the epoch."
)


_OF_OPACUS: Final = frozenset(
    {"accumulated_iterations", "add_noise", "attach_step_hook", "clip_and_accumulate", "grad_samples", "pre_step"}
    | {"scale_grad", "signal_skip_step", "summed_grad"}
)
"""What Opacus's optimizer has, and a step that is one whole can't have."""


class Options(TypedDict, total=False):
    """Options of ``make_private``: Opacus's own, and dpvision's.

    Attributes:
        criterion: returned unchanged as third of four results with ``grad_sample_mode="ghost"``, as in Opacus.
        batch_first: must be True: rows are in the first dimension.
        loss_reduction: "mean" or "sum": how the script's loss joins rows.
        poisson_sampling: must be True: no other sampling has such an epsilon.
        clipping: "flat", "automatic" or "per_layer".
        noise_generator: must be None: noise has a key of its own, from the operating system.
        grad_sample_mode: accepted and not needed: gradients are exact in one pass.
        wrap_model: accepted and not needed.
        rand_on_empty: accepted and not needed: an empty draw is a step of noise alone.
        num_units: examples in the data, declared public. Default: the length of the dataset.
        epochs: epochs of the plan, each of ``len(data_loader)`` steps.
        steps: steps of the plan, in the place of ``epochs``.
        target_epsilon: with ``make_private``: plan as many steps as this epsilon allows.
        target_delta: delta of the certificate. Default: proposed from ``num_units``.
    """

    criterion: Any
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: Any
    grad_sample_mode: str
    wrap_model: bool
    rand_on_empty: bool
    num_units: int | None
    epochs: int | None
    steps: int | None
    target_epsilon: float | None
    target_delta: float | None


class _RecordsCalls(nn.Module):
    """Mixed into the class of a private model: a call with recorded tensors is recorded, any other is ordinary."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, or run the model."""
        draws = [leaf.draw for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RecordedTensor)]
        if not draws:
            return super().__call__(*args, **kwargs)
        return draws[-1].call_model(self, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the class that it was made of."""
        del protocol
        return _blank, (type(self).__mro__[2],), self.__dict__


def _blank(kind: type[nn.Module]) -> nn.Module:
    """Return a module before its state is filled in."""
    return kind.__new__(kind)


def _recording(model: nn.Module) -> None:
    """Let the model notice recorded inputs."""
    kind = type(model)
    if not issubclass(kind, _RecordsCalls):
        # Named like the model's own class: certificates name and hash that one's source.
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        model.__class__ = type(kind.__name__, (_RecordsCalls, kind), names)


class _NotCopied:
    """Mixed into what a run consists of: a copy would take steps of the same run, with the same noise."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled."""
        del protocol
        raise PrivacyError(
            f"{type(self).__name__} can't be copied or pickled: the copy would take steps of the same run. Use "
            "state_dict(), or save_checkpoint of the engine."
        )


def require_one_process() -> None:
    """Refuse several processes: an Opacus loop reads outputs and losses, of which each process has its own.

    Raises:
        ArgumentError: torchrun started more than one.
    """
    if job_size() > 1:
        raise ArgumentError(
            f"dpvision.compat trains in one process, and torchrun started {job_size()}. Use dpvision.PrivateRun, whose "
            "steps share the work."
        )


@final
class DPOptimizer(_NotCopied, torch.optim.Optimizer):
    """The script's optimizer, whose ``step`` is a private step. Made by ``PrivacyEngine``."""

    def __init__(self, optimizer: torch.optim.Optimizer, training: _Training) -> None:
        self.original_optimizer, self._training = optimizer, training
        self._step_counter_patched = True

    def __getattr__(self, name: str) -> Any:
        """Return what the script's optimizer has."""
        if name in _OF_OPACUS:
            raise AttributeError(
                f"the optimizer of dpvision.compat has no {name}: step clips, adds the noise and updates at once, one "
                "step for each batch. BatchMemoryManager divides a batch into parts."
            )
        return getattr(self.__dict__["original_optimizer"], name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of the script's optimizer."""
        return self.original_optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The state of the script's optimizer."""
        return self.original_optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The defaults of the script's optimizer."""
        return self.original_optimizer.defaults

    @property
    def noise_multiplier(self) -> float:
        """Noise stddev on the sum divided by the clip norm."""
        return self._training.mechanism.noise_multiplier

    @property
    def max_grad_norm(self) -> float:
        """The clip norm."""
        return self._training.mechanism.clip_norm

    @property
    def expected_batch_size(self) -> float:
        """The public divisor."""
        return self._training.mechanism.expected_batch_size

    def __repr__(self) -> str:
        return f"DPOptimizer({self.original_optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad``, and forget a loss whose step was not taken."""
        self.original_optimizer.zero_grad(set_to_none)
        self._training.forget_loss()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the private step of the last batch: clip, charge, add noise, update.

        Raises:
            PrivacyError: there was no ``loss.backward()``, or it can't be proved that rows do not influence each other.
            BudgetSpent: all planned steps are charged.
        """
        if closure is not None:
            raise ArgumentError("optimizer.step takes no closure here: it would read the batch again.")
        self._training.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the script's optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the script's optimizer."""
        self.original_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the script's optimizer."""
        self.original_optimizer.add_param_group(param_group)


@final
class PrivateDataLoader(_NotCopied):
    """Poisson draws in the place of a ``DataLoader``: as many per epoch as that had batches.

    Attributes:
        dataset: the private dataset.
        batch_size: the expected, public batch size; every batch seems to have it.
    """

    def __init__(self, dataset: Any, training: _Training, *, length: int) -> None:
        self.dataset, self.batch_size, self._length = dataset, training.shape.size, length
        self._training = training

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"PrivateDataLoader(batch_size={self.batch_size}, {self._length} steps per epoch)"

    def limit_rows(self, rows: int | None) -> int | None:
        """Set how many rows are computed at once, None for as many as fit; return what it was."""
        before, self._training.microbatch_size = self._training.microbatch_size, rows
        return before

    def __iter__(self) -> Iterator[Any]:
        """Yield one draw for each step of an epoch; fewer where the plan ends.

        Raises:
            BudgetSpent: the plan has no step left.
        """
        for number in range(self._length):
            draw = self._training.next_draw()
            if draw is None and number:
                return
            if draw is None and self._training.started().steps_left:
                raise PrivacyError("the run was released. Make a new PrivacyEngine to train on.")
            if draw is None:
                raise BudgetSpent(
                    f"the budget is spent: all {self._training.mechanism.steps} planned steps are charged. End the "
                    "loop here, or plan more epochs from the beginning."
                )
            yield draw.batch()


@final
class _Collate:
    """Makes pairs of inputs and targets of whatever a loader's own function makes."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> Any:
        leaves = tree_leaves(self._collate(items))
        return (leaves[0] if len(leaves) < 3 else tuple(leaves[:-1])), leaves[-1]


@final
class _Items(Dataset[Any]):
    """A list of items as a dataset."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


@final
class _Kept:
    """How a model was at some time: modules, modes and settings, without the values of its weights."""

    def __init__(self, model: nn.Module) -> None:
        self._key = model_key(model)
        self._held = [dict(vars(module)) for module in model.modules()]  # nothing else may get their identities

    def is_still(self, model: nn.Module) -> bool:
        """Return whether the model is as it was."""
        return model_key(model) == self._key


@final
class _Training:
    """What the objects of ``make_private`` share: the run, and the recording of the current batch."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], mechanism: Mechanism
    ) -> None:
        self.model, self.optimizer, self.mechanism = model, optimizer, mechanism
        self.reduction: Reduction = "mean"
        self.microbatch_size: int | None = None
        self.folder: Path | None = None
        self.declared: dict[str, str] = {}
        self.seed: int | None = None
        self._dataset: Any = _Items(loader.dataset) if isinstance(loader.dataset, (list, tuple)) else loader.dataset
        item = self._dataset[0]
        pair = isinstance(item, (tuple, list)) and len(item) == 2
        simple = loader.collate_fn is default_collate and pair and all(isinstance(x, (Tensor, int)) for x in item)
        self._collate = None if simple else _Collate(loader.collate_fn)
        example = loader.collate_fn([item])
        others = [leaf for leaf in tree_leaves(example) if not isinstance(leaf, Tensor)]
        if others or not tree_leaves(example):
            kind = type(others[0]).__name__ if others else "nothing"
            raise ArgumentError(f"each batch must consist of tensors, got {kind}. Change collate_fn or the dataset.")
        self.shape = BatchShape(example, size=int(mechanism.expected_batch_size))
        self._workers = loader.num_workers
        self.run: PrivateRun | None = None
        self._batches: Iterator[PrivateBatch] | None = None
        self._batch: PrivateBatch | None = None
        self._draw: Draw | None = None
        self._function: RecordedStep | None = None
        self._expected: str | None = None
        self._kept: _Kept | None = None
        self._was_read = self._may_change = False

    def started(self) -> PrivateRun:
        """Return the run; make it, its folder and its ledger on the first call."""
        if self.run is None:
            folder = self.folder or _free_folder()
            require_one_process()
            self.run = PrivateRun(self.model, self.optimizer, self.mechanism, folder, seed=self.seed)
            for what, how in self.declared.items():
                self.run.declare(what, how)
        return self.run

    def next_draw(self) -> Draw | None:
        """Draw the next batch; None if the plan has no step left."""
        run = self.started()
        if self._batches is None:
            self._batches = run.batches(self._dataset, collate=self._collate, workers=self._workers)
        try:
            batch = next(self._batches, None)
        except BaseException as error:
            self._batches = None  # the current batch can still be given to step
            if isinstance(error, PrivacyError) and self._batch is not None and self._batch.step == run.steps_taken:
                raise PrivacyError(
                    f"the loop took the next batch without optimizer.step() for batch {run.steps_taken}: which steps "
                    "are taken must not depend on what was drawn. Call step for every batch. To accumulate gradients, "
                    "give the DataLoader the larger batch_size, and BatchMemoryManager the part that fits in memory."
                ) from error
            raise
        if self._draw is not None:
            self._was_read |= self._draw.was_read
            self._draw.end()
        self._batch, self._draw = batch, None
        if batch is None:
            return None
        draw = self._draw = Draw(
            self.model,
            self.shape,
            lambda: self._read(batch),
            rows_at_once=self.microbatch_size,
            before_read=lambda: self._before_read(draw),
        )
        return draw

    @property
    def values_were_read(self) -> bool:
        """Whether the loop has read any value of a private batch, in an earlier process too."""
        return self._was_read or (self._draw is not None and self._draw.was_read)

    @property
    def loss_sha256(self) -> str | None:
        """The hash of the loss so far."""
        return self._expected if self._function is None else self._function.sha256

    def _before_read(self, draw: Draw) -> None:
        """Note how the model is before the first value is read: from then on it must stay so."""
        if not self.values_were_read:
            self._kept = _Kept(self.model)
        self._was_read |= draw is not self._draw

    def allow_change(self) -> None:
        """Let loss and model of the next step differ from those so far."""
        self._may_change = True

    def _checked(self, function: RecordedStep) -> RecordedStep:
        """Return the function of a step: the one of the steps so far, or a new one that can hold nothing private.

        Raises:
            PrivacyError: values were read, and then the loss or the model became another.
        """
        difference = None if self._function is None else self._function.difference(function)
        if self._was_read and not self._may_change:
            if self._function is None and self._expected != function.sha256:
                raise PrivacyError(
                    "values of private batches were read before this loss was used for the first time, or it is not "
                    f"the loss of the checkpoint: a private number could be a part of it. {_CHANGE}"
                )
            if difference is not None:
                raise PrivacyError(
                    f"this step's loss differs from the earlier ones' in {difference}: a number, a tensor or an "
                    "operation of it changed, which could have been computed from private values that were read. "
                    f"{_CHANGE}"
                )
        if self._kept is None or self._may_change:
            self._kept = _Kept(self.model)
        elif self.values_were_read and not self._kept.is_still(self.model):
            raise PrivacyError(
                "the model was changed after private values were read (train or eval mode, requires_grad, a hook, or "
                f"an attribute that its code may use), and the change could have been computed from them. {_CHANGE}"
            )
        return function if self._function is None or difference is not None else self._function

    def _read(self, batch: PrivateBatch) -> list[Tensor]:
        """Return the values of a draw's rows. Private."""
        parts = [self.shape.empty]
        for microbatch in batch.microbatches(self.microbatch_size or self.shape.size):
            real = microbatch.row_weights_UR.ne(0).any(1)
            leaves = tree_leaves((microbatch.inputs, microbatch.targets))[: len(self.shape.empty)]
            parts.append([x[real].to(like.device) for x, like in zip(leaves, self.shape.empty, strict=True)])
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    def forget_loss(self) -> None:
        """Forget the loss of the current batch."""
        if self._draw is not None and not self._draw.is_taken:
            self._draw.loss = None

    def step(self) -> None:
        """Take the private step of the current batch."""
        draw, batch = self._draw, self._batch
        if draw is None or batch is None or draw.is_taken:
            raise PrivacyError(
                "optimizer.step() needs a batch of the private loader that has had no step yet. Call it once for each "
                "batch, after loss.backward()."
            )
        function, run = self._checked(draw.step_function(self.reduction)), self.started()
        self.declare_reading()
        with losses_noted() as noted:
            run.step(batch, function, microbatch_size=self.microbatch_size)
        if function is not self._function:
            run.declare("loss of the loop", f"recorded from the user's loop and proved: {function}")
        self._function, self._may_change = function, False
        drawn = batch.drawn_batch_size
        if drawn == len(noted):  # one row at once, each with a second one that has no weight
            noted = [losses[:1] for losses in noted]
        draw.taken(torch.cat(noted)[:drawn] if noted else torch.zeros(0), function)

    def declare_reading(self) -> None:
        """Say in the certificate that values were read, if they were."""
        if self.values_were_read:
            self.started().declare(
                "values read from private batches",
                "the loop reads losses or outputs without noise; what it prints, logs or decides with them, such as a "
                "learning rate or when to stop, has no epsilon",
            )

    def resume(self, folder: Path, *, loss_sha256: str | None, values_were_read: bool) -> None:
        """Continue an earlier run in the place of this one.

        Args:
            folder: of the run.
            loss_sha256: hash of its loss.
            values_were_read: whether its loop had read values of private batches.

        Raises:
            ArgumentError: the run was planned for another number of units or another batch size.
        """
        if self.run is not None:
            self.run.close()
        require_one_process()
        run = PrivateRun.resume(folder, self.model, self.optimizer)
        planned = run.mechanism
        if (planned.num_units, planned.expected_batch_size) != (
            self.mechanism.num_units,
            self.mechanism.expected_batch_size,
        ):
            run.close()
            raise ArgumentError(
                f"the checkpoint is of {planned.num_units} examples in batches of {planned.expected_batch_size:g}, and "
                f"make_private was given {self.mechanism.num_units} in batches of "
                f"{self.mechanism.expected_batch_size:g}. Give it the same data and batch size; training on other data "
                "is a new run."
            )
        self.run, self.mechanism, self._expected = run, planned, loss_sha256
        self._was_read = self.values_were_read or values_were_read
        self._batches, self._batch, self._draw = None, None, None


def _free_folder() -> Path:
    """Return runs/private-1, -2 and so on: the first that does not exist."""
    number = 1
    while (folder := Path("runs") / f"private-{number}").exists():
        number += 1
    return folder


@final
class PrivacyEngine(_NotCopied):
    """Make the objects of a training script private, with Opacus's names.

    Args:
        accountant: accepted for Opacus's sake: epsilon is always the PLD's upper bound.
        secure_mode: accepted for Opacus's sake: the noise is always cryptographically strong.
        folder: the folder of the run: ledger, checkpoints, release. Default: runs/private-1, -2 and so on.
        seed: replaces the operating system's entropy: reproducible, and stamped as not for release.

    Guarantee: as ``PrivateRun``. The loss of the loop is followed from ``loss.backward()`` to the model's inputs and
    proved separable, or the step is refused. What the script prints, logs or decides with values that it reads from
    private batches is not covered, as in Opacus.
    """

    def __init__(
        self,
        *,
        accountant: str = "prv",
        secure_mode: bool = False,
        folder: Path | str | None = None,
        seed: int | None = None,
    ) -> None:
        del secure_mode
        if accountant not in ("prv", "rdp", "gdp", "pld"):
            raise ArgumentError(
                f"accountant must be prv, rdp, gdp or pld, got {accountant!r}; epsilon is PLD's always."
            )
        self._folder = None if folder is None else Path(folder)
        self._seed = seed
        self._made: _Training | None = None

    @property
    def accountant(self) -> PrivacyEngine:
        """The object with ``get_epsilon``: this one."""
        return self

    @property
    def run(self) -> PrivateRun:
        """The run behind the loop; its folder and ledger are made with the first batch.

        Raises:
            ArgumentError: ``make_private`` was not called.
        """
        return self._training.started()

    @property
    def _training(self) -> _Training:
        if self._made is None:
            raise ArgumentError("call make_private or make_private_with_epsilon first.")
        return self._made

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        **options: Unpack[Options],
    ) -> tuple[Any, ...]:
        """Return model, optimizer and loader for private training at a given noise.

        Args:
            module: the model; it is returned as the same object, with clean ``state_dict`` keys.
            optimizer: any torch optimizer of its parameters.
            data_loader: its dataset, batch size, collate function and workers are used.
            noise_multiplier: noise stddev on the sum divided by ``max_grad_norm``.
            max_grad_norm: L2 bound on one example's gradient.
            options: see ``Options``. One of ``epochs``, ``steps`` and ``target_epsilon`` is needed, which Opacus does
                not ask for: each step is charged against a plan, whose end is a hard limit.

        Returns:
            (module, optimizer, data_loader); with ``grad_sample_mode="ghost"`` the criterion too, before the loader.

        Raises:
            ArgumentError: an option is out of range, or there is no plan.
            PrivacyError: the model, the sampler or the sampling can't be private.
        """
        size, num_units, length = _declared(data_loader, options)
        steps = options.get("steps")
        epochs = options.get("epochs")
        if steps is None and epochs is not None:
            steps = epochs * length
        delta = options.get("target_delta") or propose_delta(num_units)
        target = options.get("target_epsilon")
        if steps is None and target is not None:
            steps = calibrate_steps(
                num_units=num_units,
                expected_batch_size=size,
                noise_multiplier=noise_multiplier,
                target_epsilon=target,
                delta=delta,
            )
        if steps is None:
            raise ArgumentError(
                "make_private needs a plan: give epochs=, steps= or target_epsilon= (with target_delta=). Each step is "
                "charged against it, and its end is a hard limit."
            )
        mechanism = Mechanism(
            num_units=num_units,
            expected_batch_size=size,
            clip_norm=_norm(max_grad_norm),
            noise_multiplier=noise_multiplier,
            steps=steps,
            delta=delta,
            target_epsilon=target,
        )
        return self._make(module, optimizer, data_loader, mechanism, options)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        **options: Unpack[Options],  # pyright: ignore[reportGeneralTypeIssues]
    ) -> tuple[Any, ...]:
        """Return model, optimizer and loader, with the least noise that keeps all epochs within a target.

        Args:
            module: as for ``make_private``.
            optimizer: as for ``make_private``.
            data_loader: as for ``make_private``.
            target_epsilon: hard limit, above zero.
            target_delta: its delta.
            epochs: epochs of the plan, each of ``len(data_loader)`` steps.
            max_grad_norm: L2 bound on one example's gradient.
            options: see ``Options``.

        Returns:
            As ``make_private``.

        Raises:
            ArgumentError: a value is out of range, or no noise reaches the target.
            PrivacyError: as ``make_private``.
        """
        size, num_units, length = _declared(data_loader, options)
        Problems().count("epochs", epochs).raise_if_any()
        mechanism = Mechanism.calibrated(
            target_epsilon=target_epsilon,
            delta=target_delta,
            num_units=num_units,
            expected_batch_size=size,
            steps=options.get("steps") or epochs * length,
            clip_norm=_norm(max_grad_norm),
        )
        return self._make(module, optimizer, data_loader, mechanism, options)

    def _make(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        mechanism: Mechanism,
        options: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        if self._made is not None:
            raise PrivacyError(
                "make_private was called before on this engine, and its get_epsilon would leave those steps out. Make "
                "a new PrivacyEngine for each run; the epsilons of runs on the same data add up."
            )
        ModuleValidator.validate(module, strict=True)
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        mechanism = replace(mechanism, clipping=_clipping(options.get("clipping", "flat")))
        training = _Training(module, optimizer, loader, mechanism)
        training.reduction, training.folder, training.seed = _reduction(options), self._folder, self._seed
        if options.get("num_units") is None:
            training.declared["number of units"] = "the length of the dataset, declared public by the user"
        if training.reduction == "sum":
            optimizer.register_step_pre_hook(_undivided(mechanism.expected_batch_size))
        _recording(module)
        self._made = training
        length = _declared(loader, options, quiet=True)[2]
        private = DPOptimizer(optimizer, training), PrivateDataLoader(loader.dataset, training, length=length)
        if str(options.get("grad_sample_mode", "hooks")).startswith("ghost"):
            return module, private[0], options.get("criterion", nn.CrossEntropyLoss()), private[1]
        return module, *private

    def get_epsilon(self, delta: float) -> float:
        """Return the epsilon of everything charged so far, at a delta: a proved upper bound.

        Args:
            delta: of the guarantee, in (0, 1).
        """
        if self._training.run is None:
            return 0.0
        return self._training.run.guarantee(delta=delta).epsilon

    def declare_change(self, reason: str) -> None:
        """Let loss, modes and settings of the model change with the next step, although private values were read.

        Args:
            reason: why, for the certificate, such as "the weight of the penalty follows the epoch".

        Raises:
            ArgumentError: there is no reason.

        Guarantee: none for the change itself: that it follows from public facts is declared by the caller. The new loss
        is proved as the first one was.
        """
        if not reason.strip():
            raise ArgumentError("declare_change needs the reason of the change, for the certificate.")
        self.run.declare("change of loss or model", f"{reason}; from public facts, as the user declares")
        self._training.allow_change()

    def release(
        self,
        metrics: Mapping[str, float] | None = None,
        *,
        evaluated_on: str | None = None,
        data_name: str = "own data",
    ) -> RunResult:
        """Write weights, certificate and ledger, and close the run: ``PrivateRun.release``.

        Args:
            metrics: values measured on public data, such as accuracy.
            evaluated_on: the name of that data.
            data_name: what the certificate calls the training data.
        """
        self._training.declare_reading()
        return self.run.release(metrics, evaluated_on=evaluated_on, data_name=data_name)

    def save_checkpoint(
        self,
        *,
        path: PathLike[str] | str,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
    ) -> None:
        """Save the run in its folder, and weights, optimizer and the name of the folder in a file.

        Args:
            path: the file, in torch's format.
            module: the private model.
            optimizer: its optimizer.
            checkpoint_dict: more entries for the file.

        The charges stay in the run's folder: a checkpoint without it can be used as a model, and not be continued.
        """
        run = self.run
        run.save()
        stored = {**(checkpoint_dict or {}), "module_state_dict": module.state_dict()}
        stored[_STATE] = {
            "folder": str(run.folder.resolve()),
            "steps": run.steps_taken,
            "loss_sha256": self._training.loss_sha256,
            "values_were_read": self._training.values_were_read,
        }
        if optimizer is not None:
            stored["optimizer_state_dict"] = optimizer.state_dict()
        torch.save(stored, path)

    def load_checkpoint(
        self,
        *,
        path: PathLike[str] | str,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Continue the run of a checkpoint from the newest state in its folder.

        Args:
            path: what ``save_checkpoint`` wrote.
            module: the model that was given to ``make_private``; its weights are replaced.
            optimizer: its optimizer; its state is replaced.

        Returns:
            The content of the file.

        Raises:
            ArgumentError: another model than that of ``make_private``, or a file that is no such checkpoint.
            TamperError: a file of the run is damaged, or the ledger was rolled back.

        Guarantee: as ``PrivateRun.resume``: the run becomes a fork, and all charges count, those of steps after the
        checkpoint too.
        """
        training = self._training
        if module is not training.model or (optimizer is not None and not self._is_own(optimizer)):
            raise ArgumentError("load_checkpoint takes the model and the optimizer that make_private returned.")
        stored = torch.load(path, weights_only=True)
        if not isinstance(stored, dict) or "folder" not in stored.get(_STATE, {}):
            raise ArgumentError(
                f"{path} is no checkpoint of dpvision.compat: it does not name the run with its charges."
            )
        training.resume(
            Path(stored[_STATE]["folder"]),
            loss_sha256=stored[_STATE].get("loss_sha256"),
            values_were_read=bool(stored[_STATE].get("values_were_read")),
        )
        taken, saved = self.run.steps_taken, stored[_STATE]["steps"]
        if taken != saved:
            warnings.warn(
                f"the checkpoint is of step {saved}; the run continues from step {taken}, the newest in its folder: "
                "the steps in between are charged.",
                stacklevel=2,
            )
        return stored

    def _is_own(self, optimizer: torch.optim.Optimizer) -> bool:
        mine = self._training.optimizer
        return optimizer is mine or (isinstance(optimizer, DPOptimizer) and optimizer.original_optimizer is mine)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a copy of a model that can be trained privately: ``ModuleValidator.fix``."""
        return ModuleValidator.fix(module)


def _declared(loader: DataLoader[Any], options: Mapping[str, Any], *, quiet: bool = False) -> tuple[int, int, int]:
    """Return the public facts: batch size, number of units, steps of an epoch. Refuse what can't be private.

    Prints where Opacus takes another sample rate, unless ``quiet``.
    """
    unknown = [name for name in options if name not in Options.__annotations__]
    if unknown:
        raise TypeError(f"make_private() got an unexpected keyword argument {unknown[0]!r}")
    if not options.get("poisson_sampling", True):
        raise PrivacyError(
            "poisson_sampling=False: shuffled batches have no such epsilon (Opacus would print one all the same). "
            "Leave it out: batches are drawn by Poisson sampling."
        )
    for name, needed in (("batch_first", True), ("noise_generator", None)):
        if options.get(name, needed) is not needed:
            raise ArgumentError(f"{name} must be {needed}, got {options[name]!r}.")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ArgumentError("data_loader must be a DataLoader of a map-style dataset, which is read at random.")
    if loader.batch_size is None:
        raise ArgumentError("data_loader needs a batch_size: batches of another batch_sampler have no such epsilon.")
    if type(loader.sampler) not in (RandomSampler, SequentialSampler) or getattr(loader.sampler, "replacement", False):
        raise PrivacyError(
            f"the loader's sampler is {type(loader.sampler).__name__}, and only Poisson sampling has such an epsilon. "
            "Leave the sampler out; balance classes by weights in the loss."
        )
    dataset: Any = loader.dataset
    sampler: Any = loader.sampler
    if len(sampler) != len(dataset):
        raise ArgumentError(
            f"the loader's sampler takes {len(sampler)} of {len(dataset)} examples per epoch, and Poisson "
            "sampling draws from all. Leave num_samples out, and give make_private steps=."
        )
    num_units = options.get("num_units") or len(dataset)
    size = min(loader.batch_size, num_units)
    length = num_units // loader.batch_size if loader.drop_last else -(-num_units // loader.batch_size)
    if not length:
        raise ArgumentError("the loader has no batches: drop_last with fewer examples than batch_size. Lower it.")
    if size * length != num_units and not quiet:
        print(  # the difference matters to those who compare
            f"dpvision: sample rate {size}/{num_units} = {size / num_units:.6g}, expected batch {size}; Opacus rounds "
            f"it to 1/len(loader) = 1/{length} = {1 / length:.6g}, expected batch {num_units / length:.1f}."
        )
    return size, num_units, length


def _undivided(divisor: float) -> Callable[..., None]:
    """Return a hook that multiplies private gradients by their public divisor: for losses that are sums."""

    def multiply(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad.mul_(divisor)

    return multiply


def _norm(given: Any) -> float:
    if isinstance(given, (list, tuple)):
        raise ArgumentError("max_grad_norm must be one number; clipping='per_layer' divides it evenly over the layers.")
    return float(given)


def _clipping(given: str) -> Literal["flat", "automatic", "per_layer"]:
    if given not in ("flat", "automatic", "per_layer"):
        raise ArgumentError(f"clipping must be flat, automatic or per_layer, got {given!r}.")
    return given


def _reduction(options: Mapping[str, Any]) -> Reduction:
    given = options.get("loss_reduction", "mean")
    if given not in ("mean", "sum"):
        raise ArgumentError(f"loss_reduction must be mean or sum, got {given!r}.")
    return given
