"""``PrivateRun``: the private step for a user's own training loop, from the first draw to the certificate.

The loop calls ``step`` for every batch that ``batches`` yields; sampling, clipping, charge, noise and the optimizer's
step happen inside, by the same ``private_step`` as in ``dpvision train``.

What an own loop computes can't be bound to its key: data and code are the user's. So no step is ever replayed. The
secret of the noise stays in memory, and a run that is resumed from its folder draws a new one: it is a fork, whose
repeated steps are charged again. A crash can over-count, and the planned steps remain the hard limit.

In a script that torchrun starts, every process makes the run and runs the loop. Rank 0 is the run; the others compute
shares of its sums (``followed_run``) and receive the weights.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, final, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dpvision.accounting import guarantee
from dpvision.config import Performance, Precision, required
from dpvision.data.dataset_batches import DatasetBatch, DatasetBatches, Reading, count_of_units
from dpvision.errors import ArgumentError, DPVisionError, PrivacyError, Problems
from dpvision.gradients.devices import forked_generators
from dpvision.gradients.per_unit import LossFunction
from dpvision.kernels.memory import keep_freed_memory
from dpvision.own_code import GIVEN_IN_PYTHON, code_of
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import COUNTED_UNITS, CountedUnits, Guarantee, Mechanism
from dpvision.privacy.noise import noisy_count
from dpvision.privacy.private_step import BudgetSpent, Privatizer, private_step
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import Sampling
from dpvision.privacy.sharded_step import ShardedOptimizer, gather_state, scatter_state, sharded_step
from dpvision.privacy.torch_optimizer import TorchOptimizer
from dpvision.privacy.values import Microbatch
from dpvision.ranks import RankError, Ranks, in_a_job, usual_partial_sums
from dpvision.release.statements import (
    PRECISION,
    PROCESSES,
    ROW_UNITS,
    SEVERAL_PROCESSES,
    TEST_SPLIT,
    TRAINING_DATA,
    own_code_declarations,
)
from dpvision.storage.checkpoint import Checkpoint
from dpvision.storage.files import parse_object
from dpvision.storage.run_folder import OWN_LOOP, RunFolder
from dpvision.training.callbacks import RunCallback
from dpvision.training.declarations import precision_text
from dpvision.training.defaults import two_digits
from dpvision.training.followed_run import (
    FollowedRun,
    agree_on_data,
    agree_on_program,
    facts_of_run,
    moved_by_steps,
    progress_of_run,
    share_result,
)
from dpvision.training.notebook import ShownCertificate
from dpvision.training.resume import checkpoint_errors, spent_so_far
from dpvision.training.write_release import RunResult, publish

CHECKPOINTS_OF_A_RUN = 50
COUNT_NOISE = 15.0
"""Noise of a count by default: at a target epsilon of 3 it raises the noise of the steps by about 0.3 %."""
_MOST_UNITS_AT_ONCE = 2**20


_MOVED: WeakSet[nn.Module] = WeakSet()
"""Modules whose parameters a private run of this process has moved."""
_ONE_STEP = threading.RLock()
_stepping: list[int] = []


@contextmanager
def _alone() -> Iterator[None]:
    """Take one step of this process at a time: while code is traced, functions of the whole process are replaced."""
    if threading.get_ident() in _stepping:
        raise PrivacyError(
            "a step was called inside of another one. Call it from the loop, not from a model or a loss."
        )
    with _ONE_STEP:
        _stepping.append(threading.get_ident())
        try:
            yield
        finally:
            _stepping.clear()


@final
class PrivateBatch:
    """The draw of one step. Sensitive: hand it to ``PrivateRun.step``, and look at nothing in it."""

    __slots__ = ("_drawn", "_draws", "step")

    def __init__(self, draws: DatasetBatches, drawn: DatasetBatch, step: int) -> None:
        self._draws, self._drawn, self.step = draws, drawn, step

    def __repr__(self) -> str:
        return f"PrivateBatch(step={self.step}, sensitive)"

    @property
    def sampling(self) -> Sampling:
        """How the units were chosen."""
        return self._drawn.sampling

    @property
    def drawn_batch_size(self) -> int:
        """The number of drawn units. Sensitive."""
        return self._drawn.drawn_batch_size

    def comes_from(self, draws: DatasetBatches | None) -> bool:
        """Whether ``draws`` drew it."""
        return self._draws is draws

    def microbatches(self, units: int, only: range | None = None) -> Iterator[Microbatch]:
        """Yield the draw in pieces, for the engine. Sensitive."""
        return self._drawn.microbatches(units, only)


@final
@dataclass(kw_only=True)
class _State:
    """What a started or resumed run consists of."""

    folder: RunFolder
    ledger: Ledger
    mechanism: Mechanism
    optimizer: TorchOptimizer
    keys: Keys
    fork: int = 0
    config: dict[str, Any]
    saved_at: int = -1
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    callback: RunCallback = field(default_factory=RunCallback)
    released: bool = False
    problem: str | None = None
    draws: DatasetBatches | None = None
    declared_loss: object = None
    loaded: dict[str, Any] | None = None
    privatizer: Privatizer = field(init=False)

    def __post_init__(self) -> None:
        self.privatizer = Privatizer(self.mechanism, self.ledger, keys=self.keys, fork=self.fork)


@final
class PrivateRun:
    """A private training run whose loop is the user's own.

    Args:
        model: any module whose rows do not influence each other; its initial weights are declared public.
        optimizer: any torch optimizer for its parameters that needs no closure; or a ``ShardedOptimizer``, whose state
            is divided among the processes of torchrun.
        mechanism: from ``Mechanism.calibrated``, which holds delta and the target epsilon too.
        folder: the folder of the run; it must not exist or be empty, or hold a count of ``count_units`` alone.
        scheduler: a learning-rate schedule of ``optimizer``; ``step`` steps it, or ``report_public_metric`` where it
            is a ReduceLROnPlateau.
        checkpoint_every: steps between two checkpoints. What a crash costs is at most this many steps of the budget.
            Default: a fiftieth of the steps.
        seed: replaces the operating system's entropy: reproducible, and stamped as not for release.
        callback: told about steps and about what ``record`` is given, such as ``dpvision.training.CsvLog``.

    Raises:
        ArgumentError: the mechanism has no delta, the optimizer can't be used, or the folder is not empty.

    Guarantee: the model's weights are private as ``guarantee()`` states, for the units of the datasets given to
    ``batches``, if the loop uses the private data for nothing else. A step is charged on disk before its noise exists;
    no more steps than planned are charged, over all resumes. Noise is never repeated: its secret is not stored.

    With torchrun every process makes the run with the same arguments, and calls ``batches`` and ``step`` alike. Initial
    weights are those of rank 0, which alone charges, adds noise, moves the weights and writes. Elsewhere ``save``,
    ``record``, ``declare`` and ``report_public_metric`` do nothing, optimizer and schedule stay as they are, and
    ``release`` waits for that of rank 0.
    """

    mechanism: Mechanism
    _state: _State
    _followed: FollowedRun | None

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | ShardedOptimizer,
        mechanism: Mechanism,
        folder: Path | str,
        *,
        scheduler: Any = None,
        checkpoint_every: int | None = None,
        seed: int | None = None,
        callback: RunCallback | None = None,
    ) -> None:
        if mechanism.delta is None:
            raise ArgumentError("the mechanism has no delta: make it with Mechanism.calibrated.")
        if seed is not None:
            Problems().count("seed", seed, least=0).raise_if_any()
        self._set_model(model, mechanism, checkpoint_every)
        self._sharded = isinstance(optimizer, ShardedOptimizer) and self._ranks.several
        agree_on_program(self._ranks, model, optimizer, {"mechanism": mechanism, "seed": seed})

        def start() -> None:
            moved = _moved_by(model, optimizer, scheduler, self._ranks)
            try:
                self._state = _started(Path(folder), mechanism, moved, seed=seed)
                self._declare(
                    OWN_LOOP,
                    "the user's own: dpvision draws, clips, charges and adds the noise; that the loop uses the private "
                    "data for nothing else, and its transforms and settings, are declared by the user",
                )
                if any(module in _MOVED for module in model.modules()):
                    self._declare(
                        "initial weights",
                        "moved by an earlier private run of the same process: its epsilon adds to this one's for data "
                        "that both have seen",
                    )
                self._save({})
                self._tell(callback)
            except BaseException:
                moved.close()
                raise

        self._begin(start, Path(folder), lambda: _moved_by(model, optimizer, scheduler, self._ranks))

    def _begin(self, start: Callable[[], None], folder: Path, follow: Callable[[], TorchOptimizer]) -> None:
        """Let rank 0 start or resume the run, and give its facts and weights to the others."""

        def started() -> dict[str, Any]:
            start()
            state = self._state
            return facts_of_run(
                state.ledger.header["run_id"],
                state.mechanism,
                state.keys,
                steps_taken=self.steps_taken,
                steps_left=self.steps_left,
                charges=state.ledger.charges(),
            )

        if not self._ranks.several:
            start()
            return
        facts = self._ranks.decided(started)
        self._ranks.spread(moved_by_steps(self.model))
        if not self._ranks.leads:
            self._followed = FollowedRun.told(self._ranks, folder, facts, follow(), sharded=self._sharded)
            self.mechanism = self._followed.mechanism
        if self._sharded and facts["steps_taken"]:
            whole = self._state.loaded if self._followed is None else None
            moved = self._state.optimizer if self._followed is None else self._followed.optimizer
            scatter_state(self.model, moved, self._ranks, whole)
            if self._followed is None:
                self._state.loaded = None

    def _set_model(self, model: nn.Module, mechanism: Mechanism | None, checkpoint_every: int | None) -> None:
        """Set what does not follow from the state; rank 0 tells the others the mechanism of a resumed run."""
        steps = 1 if mechanism is None else mechanism.steps
        every = max(1, steps // CHECKPOINTS_OF_A_RUN) if checkpoint_every is None else checkpoint_every
        Problems().count("checkpoint_every", every).raise_if_any()
        self._ranks, self._followed = Ranks.of_this_job(), None
        keep_freed_memory()
        self.model, self._every = model, every
        if mechanism is not None:
            self.mechanism = mechanism
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"the model must be a torch.nn.Module, got {type(model).__name__}.")
        first = next(iter(model.parameters()), None)
        if first is None:
            raise ArgumentError("the model has no parameters.")
        self._device = first.device
        self._model_code = _named(model, "model")

    @classmethod
    def resume(
        cls,
        folder: Path | str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | ShardedOptimizer,
        *,
        or_start: Mechanism | None = None,
        scheduler: Any = None,
        checkpoint_every: int | None = None,
        callback: RunCallback | None = None,
    ) -> PrivateRun:
        """Continue a run from the newest checkpoint in its folder, also after a crash or an earlier release.

        Args:
            folder: the folder of the run.
            model: made as before; its weights are replaced by those of the checkpoint.
            optimizer: made as before, for ``model``; its state is replaced.
            or_start: starts a new run with this mechanism where there is no checkpoint: for a script that may be
                started again, such as by torchrun. What a lost start left is removed if it charged nothing. A run that
                is there must have this mechanism.
            scheduler: made as before, for ``optimizer``; its state is replaced.
            checkpoint_every: as for a new run.
            callback: as for a new run; a log continues that of the first part.

        Returns:
            The run, at the step of the checkpoint. Its mechanism is the one that the ledger was opened with.

        Raises:
            ArgumentError: the model, the optimizer or the scheduler do not fit the checkpoint, or
                ``or_start`` is another mechanism than the run's.
            TamperError: a file of the run is damaged, or the ledger was rolled back.
            DPVisionError: the run stopped before its first checkpoint, or another process has it open.

        Guarantee: with the first step the run becomes a fork: other keys, noted in the ledger, and steps that were
        charged after the checkpoint are charged again. No noise is repeated. All charges, those of lost steps too,
        count against the planned number of steps. A certificate in ``release/`` is withdrawn before the ledger grows.
        """
        ranks, run = Ranks.of_this_job(), cls.__new__(cls)
        if or_start is not None and ranks.decided(lambda: {"new": _is_new(RunFolder(Path(folder)))})["new"]:
            return cls(
                model,
                optimizer,
                or_start,
                folder,
                scheduler=scheduler,
                checkpoint_every=checkpoint_every,
                callback=callback,
            )
        agree_on_program(ranks, model, optimizer, {} if or_start is None else {"mechanism": or_start})

        def resumed_optimizer() -> TorchOptimizer:
            return _moved_by(model, optimizer, scheduler, ranks, resuming=True)

        def start() -> None:
            place = RunFolder.open(Path(folder))
            place.require_loop(own=True)
            place.lock()
            try:
                checkpoint = place.latest_checkpoint()
                if checkpoint is None:
                    raise DPVisionError(
                        f"{folder} stopped before its first checkpoint: start again elsewhere. {spent_so_far(place)}"
                    )
                ledger = place.open_ledger()
                if or_start is not None:
                    _require_same_plan(or_start, _planned(ledger), place.root)
                run._set_model(model, _planned(ledger), checkpoint_every)
                run._state = _resumed(place, ledger, checkpoint, model, resumed_optimizer)
                if not run._sharded:
                    run._state.loaded = None
                run._tell(callback)
            except BaseException:
                place.close()
                raise

        if not ranks.leads:
            run._set_model(model, None, checkpoint_every)
        run._ranks, run._followed = ranks, None
        run._sharded = isinstance(optimizer, ShardedOptimizer) and ranks.several
        run._begin(start, Path(folder), resumed_optimizer)
        return run

    def _tell(self, callback: RunCallback | None) -> None:
        """Tell a callback, from now on, about this run."""
        if callback is not None:
            if not isinstance(callback, RunCallback):
                raise ArgumentError(
                    f"callback must be a dpvision.training.RunCallback, got {type(callback).__name__}. Derive it from "
                    "that class."
                )
            self._state.callback = callback
            callback.started(name=OWN_LOOP, steps=self.mechanism.steps, done=self.steps_taken, choices=())

    def __repr__(self) -> str:
        if self._followed is not None:
            return f"PrivateRun({self.folder}, step {self.steps_taken} of {self.mechanism.steps}, {self._ranks})"
        state = self._state
        ended = ", released" if state.released else ", interrupted" if state.problem else ""
        lost = state.privatizer.spent - self.steps_taken
        charged = f", {lost} more charged" if lost > 0 else ""
        return f"PrivateRun({self.folder}, step {self.steps_taken} of {self.mechanism.steps}{charged}{ended})"

    def __enter__(self) -> PrivateRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._sharded:  # others may not be there to send their state, or to ask for it
            if self._followed is not None:
                self._followed.problem = self._followed.problem or "the run was closed after an error"
            elif self._state.problem is None and not self._state.released:
                self._give_up("the run was closed after an error")
        self.close()

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self._state.folder.root if self._followed is None else self._followed.folder

    @property
    def steps_taken(self) -> int:
        """Steps taken so far; also the index of the next one."""
        return self._state.optimizer.steps_taken if self._followed is None else self._followed.steps_taken

    @property
    def steps_left(self) -> int:
        """Steps that can still be taken: fewer than the plan has left, if steps were lost in a crash."""
        if self._followed is not None:
            return self._followed.steps_left
        privatizer = self._state.privatizer
        return max(0, min(self.mechanism.steps - self.steps_taken, privatizer.planned - privatizer.spent))

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of everything charged so far."""
        return self.guarantee().epsilon

    def guarantee(self, *, delta: float | None = None) -> Guarantee:
        """Return the guarantee of everything charged so far, from the ledger; lost steps and a count included.

        Args:
            delta: of the guarantee, in (0, 1). Default: that of the mechanism.
        """
        followed = self._followed
        return guarantee(
            self._state.ledger.charges() if followed is None else followed.charges,
            delta=required(self.mechanism.delta, "delta") if delta is None else delta,
            adjacency=self.mechanism.adjacency,
            privacy_unit=self.mechanism.privacy_unit,
        )

    def batches(
        self,
        dataset: Any,
        *,
        units: Sequence[object] | None = None,
        rows_per_unit: int = 1,
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        views_per_unit: int = 1,
        workers: int = 0,
    ) -> Iterator[PrivateBatch]:
        """Yield one Poisson draw for each step that is left; leave the loop whenever you like.

        Args:
            dataset: (inputs, targets) as tensors, arrays, or dicts or tuples of them; or a map-style Dataset whose
                items are such pairs, at least after ``transform`` and ``collate``. A dict is given to the model by
                keyword, a tuple by position.
            units: the owner of each row; default: each row is a unit of its own.
            rows_per_unit: rows that a unit gives at most to a step, averaged and clipped together.
            transform: from one item of the dataset to another, such as a random crop.
            collate: from a list of one item to its inputs and targets with one row each.
            views_per_unit: augmented views of each row, averaged before clipping: ``transform`` is called this often
                for a row, or the dataset is read this often where there is none.
            workers: processes that read rows ahead of the step; 0 reads them in this process.

        Yields:
            The draw of the next step, for ``step``. Only drawn rows are read, and only inside ``step``. With torchrun
            some rows of a Dataset are read before, to see that every process has the same.

        Raises:
            ArgumentError: rows that can't be read at random, or a privacy unit that does not fit ``units``.
            PrivacyError: a batch was not handed to ``step``: choosing batches has no such epsilon.

        Each row is read by itself, and torch's, numpy's and Python's global generators are seeded for each view. The
        dataset and the two functions must not keep anything of one row for another (mixup, a running mean). With
        torchrun the dataset must give the same row for a number in every process: sort what it lists.
        """
        self._require_open()
        if (units is None) != (self.mechanism.privacy_unit in ROW_UNITS):
            raise ArgumentError(
                f"privacy_unit is {self.mechanism.privacy_unit!r}: give units= for what owns several rows, and only "
                f"there; a single row is called {' or '.join(ROW_UNITS)}."
            )
        state = self._state if self._followed is None else self._followed
        with self._ranks.settling():
            draws = DatasetBatches(
                dataset,
                units=units,
                rows_per_unit=rows_per_unit,
                reading=Reading(transform=transform, collate=collate, views_per_unit=views_per_unit, workers=workers),
                mechanism=self.mechanism,
                keys=state.keys,
                device=self._device,
            )
        agree_on_data(self._ranks, draws)
        if self.steps_left:
            owners = f"ids given by the user, at most {rows_per_unit} rows of each in a step"
            self._declare("privacy units", "each row is a unit of its own" if units is None else owners)
            if views_per_unit > 1:
                self._declare(
                    "augmented views", f"{views_per_unit} per row, by the user's own code, averaged before clipping"
                )
        state.draws = draws
        return self._drawn(draws)

    def _drawn(self, draws: DatasetBatches) -> Iterator[PrivateBatch]:
        while self.steps_left and not (self._state if self._followed is None else self._followed).released:
            step = self.steps_taken
            yield PrivateBatch(draws, draws.batch(step), step)
            if self.steps_taken == step:
                raise PrivacyError(
                    f"the batch of step {step} was not handed to step: which steps are taken must not depend on what "
                    "was drawn. Call step for every batch."
                )

    @_alone()
    def step(
        self,
        batch: PrivateBatch,
        loss_fn: LossFunction,
        *,
        microbatch_size: int | None = None,
        precision: Precision = "float32",
    ) -> None:
        """Take one private step: clip, charge, add noise, optimizer step.

        Args:
            batch: what ``batches`` yielded last.
            loss_fn: from the model's outputs and the targets to one loss per row.
            microbatch_size: units computed at once; chosen by memory if None. No influence on the result beyond
                rounding.
            precision: of the layers. "bfloat16" is autocast, for devices that multiply 16 bits faster; norms stay in
                float32 and sums in float64. Declared in the certificate.

        Raises:
            BudgetSpent: all planned steps are charged.
            PrivacyError: a batch of another run or step, weights, modules or ``.grad`` changed outside, a model that
                mixes units. Nothing was charged or released, and the run can be continued.

        The step computes with gradients, in the parameters' own precision, whatever surrounds it: ``torch.no_grad``,
        ``torch.inference_mode``, ``torch.autocast`` and faster float32 products (TF32) are switched off inside, because
        the norms must be those of what is summed; ``precision`` is the way to ask for autocast. An exception of the
        model or the loss leaves the run as it was, with nothing charged. Once a step is charged it can't be repeated:
        if it is interrupted after that, the run must be resumed from its folder. Steps of several threads wait for each
        other.
        """
        started = time.perf_counter()
        with self._ranks.settling():
            self._require_ready(batch, microbatch_size, precision)
        performance = Performance(
            microbatch_size=microbatch_size,
            precision=precision,
            partial_sums=usual_partial_sums() if in_a_job() else None,
        )
        if self._followed is not None:
            context = _step_context(self._device, self._followed.keys.seed("views", batch.step))
            self._followed.step(self.model, loss_fn, batch, context, performance)
            return
        state = self._state
        try:
            self._declare_code(loss_fn)
            if precision != "float32":
                self._declare(PRECISION, precision_text(precision))
            self._note_fork()
            with _step_context(self._device, state.keys.seed("views", batch.step)):
                given: dict[str, Any] = {
                    "optimizer": state.optimizer,
                    "privatizer": state.privatizer,
                    "step": batch.step,
                    "performance": performance,
                    "ranks": self._ranks,
                }
                if self._sharded:
                    sharded_step(self.model, loss_fn, batch, **given)
                else:
                    private_step(self.model, loss_fn, batch, **given)
        except BaseException as error:
            if state.ledger.has_charge(step=batch.step, fork=state.fork):
                self._give_up(f"step {batch.step} was interrupted after its charge ({type(error).__name__})")
            if self._ranks.several and not isinstance(error, RankError) and not self._ranks.all_know(error):
                with suppress(RankError):
                    self._ranks.tell({"error": str(error) or type(error).__name__})
            raise
        _MOVED.update(self.model.modules())
        due = self.steps_taken % self._every == 0 or not self.steps_left
        if self._ranks.several:
            told = {"steps_taken": self.steps_taken, "steps_left": self.steps_left, "save": due and self._sharded}
            self._ranks.tell(progress_of_run(**told, charges=state.ledger.charges()))
            self._ranks.spread(moved_by_steps(self.model))
        state.seconds += time.perf_counter() - started
        state.callback.stepped(done=self.steps_taken, epsilon_bound=self.mechanism.target_epsilon)
        if due:
            self._save(gather_state(self.model, state.optimizer, self._ranks) if self._sharded else {})

    def _require_ready(self, batch: object, microbatch_size: int | None, precision: str) -> None:
        """Refuse a step that can't be taken, before anything is computed."""
        self._require_open()
        self._require_next(batch)
        if precision not in get_args(Precision):
            raise ArgumentError(f"precision must be {' or '.join(get_args(Precision))}, got {precision!r}.")
        if microbatch_size is not None:
            problems = Problems().count("microbatch_size", microbatch_size)
            problems.raise_if_any()
            problems.require(
                not microbatch_size > _MOST_UNITS_AT_ONCE, f"microbatch_size is above {_MOST_UNITS_AT_ONCE}."
            )
            problems.raise_if_any()
        if self._followed is not None:
            return
        privatizer = self._state.privatizer
        self._state.optimizer.require_ready()
        if not self.steps_left:
            raise BudgetSpent(
                f"the budget is spent: {privatizer.spent} of {privatizer.planned} planned steps are "
                "charged. A new run with a larger target epsilon composes with this one."
            )

    def _require_open(self) -> None:
        state = self._state if self._followed is None else self._followed
        if state.released:
            raise PrivacyError(
                "this run has been released. PrivateRun.resume continues it with the steps that are left, and "
                "withdraws the certificate; a new run composes with it."
            )
        if state.problem is not None:
            raise PrivacyError(
                f"{state.problem}. Continue with PrivateRun.resume from the last checkpoint of {self.folder}."
            )

    def _require_next(self, batch: object) -> None:
        draws = self._state.draws if self._followed is None else self._followed.draws
        if not isinstance(batch, PrivateBatch) or not batch.comes_from(draws):
            raise PrivacyError(
                "the batch was not drawn by the last call of run.batches: only what that yields has its epsilon."
            )
        if batch.step != self.steps_taken:
            raise PrivacyError(
                f"the batch is of step {batch.step}, the next step is {self.steps_taken}: each is taken once, in order."
            )

    def _note_fork(self) -> None:
        """Note the fork of a resumed run, before its first charge, and that torchrun started it."""
        if in_a_job():
            self._declare(PROCESSES, SEVERAL_PROCESSES)
        ledger, fork = self._state.ledger, self._state.fork
        if ledger.forks < fork:
            reason = "continued from a checkpoint with other keys"
            ledger.note("fork", {"fork": fork, "step": self.steps_taken, "reason": reason})

    def _give_up(self, problem: str) -> None:
        """Close a run whose step was charged and not finished: its weights may be half moved."""
        self._state.problem = problem
        self._state.optimizer.close()
        self._state.folder.close()

    def report_public_metric(self, value: float, *, measured_on: str) -> None:
        """Step a ReduceLROnPlateau schedule by a metric.

        Args:
            value: the metric.
            measured_on: the name of the public data that it was measured on; declared in the certificate.

        Raises:
            ArgumentError: the run has no such schedule, or ``measured_on`` is empty.
        """
        self._require_open()
        if not measured_on:
            raise ArgumentError("measured_on must name the public data that the metric was measured on.")
        if self._followed is not None:
            return
        self._state.optimizer.report_public_metric(value)
        self._declare("learning-rate schedule", f"follows a metric on {measured_on}, which is declared public")

    def record(self, metrics: Mapping[str, float], *, measured_on: str) -> None:
        """Add metrics of the present weights to the run's curve, beside step and epsilon, and tell the callback.

        Args:
            metrics: values measured on public data, such as accuracy (0 to 1), by name.
            measured_on: the name of that data; declared in the certificate.

        Raises:
            ArgumentError: no metrics, a value that is not finite, a name that is reserved (step, epsilon, unsafe_…),
                or ``measured_on`` is empty.

        Guarantee: the values are published, in metrics.json and in logs, as they are: measure nothing on private data.
        """
        self._require_open()
        reserved = [name for name in metrics if name in ("step", "epsilon") or name.startswith("unsafe_")]
        if reserved or not metrics:
            raise ArgumentError(f"metrics must have names other than step, epsilon and unsafe_…, got {list(metrics)}.")
        values = _measured(metrics, measured_on)
        del values["evaluated_on"]
        if self._followed is not None:
            return
        self._declare(TEST_SPLIT, f"{measured_on}, declared public")
        point = {"step": self.steps_taken, "epsilon": self.epsilon_spent, **values}
        self._state.curve.append(point)
        self._state.saved_at = -1  # the last checkpoint does not have it
        self._state.callback.evaluated(point)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, the state of optimizer and schedule, and the number of steps: all of it is private output.

        There is no way to load it into a run: a run continues from its folder, where its charges are (``resume``).

        Raises:
            PrivacyError: a parameter was changed by anything but ``step``.
            ArgumentError: this is not rank 0, which alone has the state of the optimizer.
        """
        if self._followed is not None or self._sharded:
            raise ArgumentError(
                "only rank 0 has the state of the optimizer, if it is not sharded. Call state_dict there."
            )
        tensors, values = self._state.optimizer.state()
        return {"model": dict(self.model.state_dict()), "optimizer": {**values, "tensors": tensors}}

    def save(self) -> None:
        """Write a checkpoint that ``resume`` continues from; also done every ``checkpoint_every`` steps.

        With a ``ShardedOptimizer`` every process must call it, as well as ``close`` and ``release``.

        Raises:
            PrivacyError: a parameter was changed by anything but ``step``.
        """
        self._require_open()
        if self._followed is not None:
            if self._sharded and self._ranks.tell()["save"]:
                self._followed.save(self.model)
            return
        due = self._state.saved_at != self.steps_taken
        if self._sharded:
            self._ranks.tell({"save": due})
        if due:
            self._save(gather_state(self.model, self._state.optimizer, self._ranks) if self._sharded else {})

    def _save(self, others: Mapping[int, Any]) -> None:
        """Write a checkpoint; ``others`` are the states of parameters that other processes own."""
        state = self._state
        tensors, values = state.optimizer.state(others)
        stored: dict[str, Tensor] = {f"optimizer/{name}": value for name, value in tensors.items()}
        for name, value in self.model.state_dict().items():
            if not isinstance(value, Tensor):
                raise ArgumentError(f"the model's state holds {name}, which is no tensor and can't be saved.")
            stored[f"model/{name}"] = value
        progress = {
            "optimizer": values,
            "seconds": state.seconds,
            "curve": state.curve,
            "ledger": state.ledger.mark,
        }
        state.folder.save_checkpoint(self.steps_taken, stored, progress)
        state.saved_at = self.steps_taken

    def close(self) -> None:
        """Save a checkpoint and let optimizer and folder go, as the end of a ``with`` block; ``resume`` continues."""
        if self._followed is not None:
            if self._sharded and not self._followed.released and self._followed.problem is None:
                self.save()
            self._followed.optimizer.close()
            self._followed.problem = self._followed.problem or "the run was closed"
            return
        state = self._state
        if state.released or state.problem is not None:
            return
        try:
            self.save()
        finally:
            self._give_up("the run was closed")
            state.callback.finished()

    def release(
        self,
        metrics: Mapping[str, float] | None = None,
        *,
        evaluated_on: str | None = None,
        data_name: str = "own data",
    ) -> RunResult:
        """Write weights, certificate and ledger into the folder's ``release/``, and close the run.

        Args:
            metrics: values measured on public data, such as accuracy (0 to 1), for the report and the model card.
            evaluated_on: the name of that data, declared public; needed with ``metrics``.
            data_name: what the certificate calls the training data.

        Returns:
            The run folder, the content of certificate.json and of metrics.json, and whether the plan was finished.

        Raises:
            PrivacyError: a parameter was changed by anything but ``step``, or the run was released before.
            ArgumentError: no step was taken, metrics without ``evaluated_on``, or weights that are not finite.
        """
        self._require_open()
        measured = _measured(metrics or {}, evaluated_on)
        if not self.steps_taken:
            raise ArgumentError("no step was taken: there is nothing to release but the initial weights.")
        if not data_name:
            raise ArgumentError("data_name must name the training data.")
        if self._followed is not None:
            if self._sharded:
                self.save()
            return self._followed.result()
        state = self._state
        state.optimizer.check_untouched()
        if not all(torch.isfinite(p).all() for p in self.model.parameters()):
            raise ArgumentError("the weights are not finite: lower the learning rate and start again.")
        self.save()
        for what, how in own_code_declarations(state.config):
            self._declare(what, how)
        self._declare(TRAINING_DATA, data_name)
        if evaluated_on is not None:
            self._declare(TEST_SPLIT, f"{evaluated_on}, declared public")
        outcome = (
            "finished" if self.steps_taken == self.mechanism.steps else "stopped" if self.steps_left else "budget_spent"
        )
        described = {"source": data_name, "class_names": [], "image_shape": [], "num_units": self.mechanism.num_units}
        curve = [point for point in state.curve if point.keys() & {"accuracy", "dice", "mean_auc"}]
        contents = {"task": OWN_LOOP, "curve": curve, "final": measured}
        certificate = publish(
            state.folder,
            state.ledger,
            mechanism=self.mechanism,
            hand_seeded=state.keys.hand_seeded,
            weights=dict(self.model.state_dict()),
            config=_text(_released(state.config, data={"source": data_name})),
            data=described,
            metrics=contents,
        )
        state.released = True
        state.optimizer.close()
        state.folder.close()
        state.callback.finished()
        result = RunResult(self.folder, outcome, ShownCertificate(certificate), contents, state.seconds)
        return share_result(self._ranks, state.ledger.header["run_id"], self.steps_taken, result)

    def _declare_code(self, loss_fn: LossFunction) -> None:
        """Declare the model and the loss, each source once; the configuration names the last one of each."""
        state, code = self._state, getattr(loss_fn, "__code__", loss_fn)
        if code is state.declared_loss:
            return
        loss = _named(loss_fn, "loss")
        named = {
            "model": {"name": self._model_code[0], "sha256": self._model_code[1]},
            "loss": loss[0],
            "loss_sha256": loss[1],
        }
        if not named.items() <= state.config.items():
            state.config = {**state.config, **named}
            state.folder.write_whole_config(_text(state.config))  # before the ledger: a resumed run must know it too
            for what, how in own_code_declarations(state.config):
                self._declare(what, how)
        state.declared_loss = code  # held, so that nothing else gets its place in memory

    def declare(self, what: str, how: str) -> None:
        """Add a line to the certificate's list of what the user declares, such as how the loop was written."""
        self._require_open()
        self._declare(what, how)

    def _declare(self, what: str, how: str) -> None:
        if self._followed is not None:
            return
        self._state.ledger.note("declare", {"what": what, "how": how})


def count_units(
    dataset: Any,
    folder: Path | str,
    *,
    units: Sequence[object] | None = None,
    noise_multiplier: float = COUNT_NOISE,
) -> CountedUnits:
    """Count the privacy units with noise, once for a run: for ``Mechanism.calibrated(num_units=…)``.

    Args:
        dataset: as for ``PrivateRun.batches``.
        folder: the folder of the run that pays for the count; it must not exist or be empty, or hold a count.
        units: the owner of each row; default: each row is a unit of its own.
        noise_multiplier: standard deviation of the noise; one unit moves the count by one.

    Returns:
        The noisy number, rounded to two digits. The same again for a folder that holds a count already.

    Raises:
        ArgumentError: the folder holds something else, or the noise is not above zero.

    Guarantee: one Gaussian release of sensitivity one, drawn with a fresh secret of the operating system and recorded
    in ``folder`` before it is returned. ``PrivateRun`` charges it with the first line of its ledger. A folder whose run
    never starts has spent its count all the same.
    """
    Problems().positive("noise_multiplier", noise_multiplier).raise_if_any()
    ranks = Ranks.of_this_job()
    if ranks.several:  # rank 0 counts
        counted = ranks.decided(lambda: asdict(_counted(dataset, folder, units, noise_multiplier)))
        return CountedUnits(**counted)
    return _counted(dataset, folder, units, noise_multiplier)


def _counted(dataset: Any, folder: Path | str, units: Sequence[object] | None, noise_multiplier: float) -> CountedUnits:
    """Count in this process."""
    place = RunFolder(Path(folder))
    known = place.load_count()
    if known is not None:
        return known
    found = count_of_units(dataset, units)
    with RunFolder.create(Path(folder)) as place:
        key = Keys.from_os_entropy().derive("statistics", COUNTED_UNITS)
        noisy = two_digits(noisy_count(found, noise_multiplier=noise_multiplier, key=key))
        counted = CountedUnits(num_units=noisy, noise_multiplier=float(noise_multiplier))
        place.save_count(counted)
    return counted


def _is_new(folder: RunFolder) -> bool:
    """Whether a run can start in a folder; what a start that charged nothing left there is removed first."""
    if any(folder.checkpoints.glob("*.safetensors")):
        return False
    if folder.private.is_dir():
        folder.remove_unspent()
    return True


def _started(path: Path, mechanism: Mechanism, optimizer: TorchOptimizer, *, seed: int | None) -> _State:
    """Make the folder and the ledger of a new run."""
    keys = Keys.from_os_entropy() if seed is None else Keys.from_seed(seed)
    run_id = keys.derive("run")[:8].hex()
    counted = RunFolder(path).load_count()
    _require_count(mechanism, counted, path)
    folder = RunFolder.create(path) if counted is None else RunFolder.open(path)
    try:
        folder.lock()
        if folder.ledger_path.exists():
            raise ArgumentError(f"{path} holds a run. Continue it with PrivateRun.resume, or choose another folder.")
        config = _config(path.resolve().name, mechanism, optimizer, seed=seed)
        folder.write_whole_config(_text(config))
        folder.write_config(_text(_released(config)))
        header = {
            **mechanism.to_dict(),
            "run_id": run_id,
            "delta": mechanism.delta,
            "target_epsilon": mechanism.target_epsilon,
            "hand_seeded": keys.hand_seeded,
        }
        # The header shows the number of units: a count is charged with it.
        charges = [] if counted is None else [counted.event]
        ledger = Ledger.create(folder.ledger_path, header, charges=charges)
    except BaseException:
        folder.close()
        raise
    return _State(
        folder=folder,
        ledger=ledger,
        mechanism=mechanism,
        optimizer=optimizer,
        keys=keys.bind(OWN_LOOP, run_id, "fork=0"),
        config=config,
    )


def _resumed(
    folder: RunFolder,
    ledger: Ledger,
    checkpoint: Checkpoint,
    model: nn.Module,
    make_optimizer: Callable[[], TorchOptimizer],
) -> _State:
    """Load a checkpoint into model and optimizer. The ledger grows only with the first step."""

    def of(prefix: str) -> dict[str, Tensor]:
        return {n.removeprefix(prefix): value for n, value in checkpoint.tensors.items() if n.startswith(prefix)}

    config = parse_object(folder.read_whole_config(), name="the configuration of the run")
    try:
        model.load_state_dict(of("model/"))
    except RuntimeError as error:
        raise ArgumentError(f"the model is not the one of the run: {error}") from error
    optimizer = make_optimizer()
    try:
        with checkpoint_errors(checkpoint):
            loaded = optimizer.load_state(of("optimizer/"), checkpoint.values["optimizer"])
            seconds = float(checkpoint.values["seconds"])
            curve = [dict(point) for point in checkpoint.values.get("curve", [])]
    except BaseException:
        optimizer.close()
        raise
    fork, seed = ledger.forks + 1, config.get("seed")
    # A new secret: whatever happened to the ledger, no noise of it was drawn before.
    keys = Keys.from_os_entropy() if seed is None else Keys.from_seed(seed)
    return _State(
        folder=folder,
        ledger=ledger,
        mechanism=_planned(ledger),
        optimizer=optimizer,
        keys=keys.bind(OWN_LOOP, ledger.header["run_id"], f"fork={fork}"),
        fork=fork,
        config=config,
        saved_at=checkpoint.step,
        seconds=seconds,
        curve=curve,
        loaded=loaded,
    )


def _moved_by(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | ShardedOptimizer,
    scheduler: Any,
    ranks: Ranks,
    *,
    resuming: bool = False,
) -> TorchOptimizer:
    """Return the optimizer of the parameters that this process moves."""
    if not isinstance(optimizer, ShardedOptimizer):
        return TorchOptimizer(model, optimizer, scheduler, resuming=resuming)
    if scheduler is not None:
        raise ArgumentError("the schedule of a ShardedOptimizer is made by its own argument schedule.")
    return optimizer.of_process(model, ranks, resuming=resuming)


def _planned(ledger: Ledger) -> Mechanism:
    """Return the mechanism that the ledger was opened with."""
    header = ledger.header
    names = {*Mechanism.__dataclass_fields__} - {"count_noise_multiplier"}
    counts = [event.noise_multiplier for event, _ in ledger.charges() if event.purpose == COUNTED_UNITS]
    return Mechanism(**{name: header[name] for name in names}, count_noise_multiplier=counts[0] if counts else None)


def _require_same_plan(asked: Mechanism, planned: Mechanism, path: Path) -> None:
    """Refuse to continue under another plan than the script states: its epsilon would not be the one asked for."""
    changed = [name for name in Mechanism.__dataclass_fields__ if getattr(asked, name) != getattr(planned, name)]
    if changed:
        raise ArgumentError(
            f"{path} holds a run with another mechanism ({', '.join(changed)}). Choose another folder, or continue "
            "that run as it was planned, without or_start."
        )


def _require_count(mechanism: Mechanism, counted: CountedUnits | None, path: Path) -> None:
    """Require that the mechanism's number of units is the one that was counted in this folder, or none was."""
    claimed = mechanism.count_noise_multiplier
    if counted is None and claimed is not None:
        raise ArgumentError(
            f"the units of this mechanism were counted for another folder than {path}, whose run pays for the count. "
            "Use that folder."
        )
    if counted is not None and (claimed, mechanism.num_units) != (counted.noise_multiplier, counted.num_units):
        raise ArgumentError(
            f"{path} holds a count of the units: make the mechanism with num_units=count_units(…), so that its epsilon "
            "covers the count. Or choose another folder."
        )


def _config(name: str, mechanism: Mechanism, optimizer: TorchOptimizer, *, seed: int | None) -> dict[str, Any]:
    """The configuration of a run before its first step; ``seed`` is for resuming and never released."""
    privacy = {
        **mechanism.to_dict(),
        "enabled": True,
        "delta": mechanism.delta,
        "target_epsilon": mechanism.target_epsilon,
        "count_noise_multiplier": mechanism.count_noise_multiplier,
    }
    return {
        "name": name,
        "task": OWN_LOOP,
        "privacy": privacy,
        "optimizer": {"name": optimizer.name},
        **({} if seed is None else {"seed": seed}),
    }


def _released(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the public part of a configuration: without the seed."""
    return {name: value for name, value in {**config, **more}.items() if name != "seed"}


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(dict(config), indent=2, sort_keys=True) + "\n"


def _measured(metrics: Mapping[str, float], evaluated_on: str | None) -> dict[str, Any]:
    """Check metrics before anything is written."""
    if metrics and not evaluated_on:
        raise ArgumentError("metrics need evaluated_on: the name of the public data that they were measured on.")
    values = {name: float(value) for name, value in metrics.items()}
    problems = Problems()
    for name, value in values.items():
        problems.require(math.isfinite(value), f"{name} must be finite, got {value}.")
        share = name not in ("accuracy", "dice", "mean_auc") or 0 <= value <= 1
        problems.require(share, f"{name} must lie between 0 and 1, got {value}.")
    problems.raise_if_any()
    return {**values, **({} if evaluated_on is None else {"evaluated_on": f"{evaluated_on}, declared public"})}


@contextmanager
def _step_context(device: torch.device, seed: int) -> Iterator[None]:
    """Compute with gradients; random layers draw from the step's own seed. ``clipped_sum`` switches autocast off."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(forked_generators(device, seed=seed))
        yield


def _named(given: Any, kind: Any) -> tuple[str, str | None]:
    """Name and hash own code; torch's own classes have torch's version in the certificate instead of a hash."""
    described = given if hasattr(given, "__qualname__") else type(given)
    if str(getattr(described, "__module__", "")).split(".")[0] == "torch":
        return f"{GIVEN_IN_PYTHON}:{described.__qualname__}", None
    code = code_of(given, kind=kind)
    return code.name, code.sha256
