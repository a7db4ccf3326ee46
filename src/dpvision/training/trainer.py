"""The state of a run while it goes.

Pictures that go into the release, with their masks and what the model made of them: public ones only.

The heart: draw, clip, charge, add noise, step. One direction, no way back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from dpvision import models
from dpvision.accounting import EpsilonMeter
from dpvision.config import RunConfig, required
from dpvision.data import FeatureDraws, ImageBatches, ImageStore, Normalisation
from dpvision.errors import ArgumentError, DPVisionError
from dpvision.gradients.ordinary import fast_plan, ordinary_gradient
from dpvision.gradients.plan import check_model, plan_for, require_private_ready
from dpvision.gradients.separability import Finding
from dpvision.inference import (
    MaskMetrics,
    Metrics,
    dice_of_images,
    evaluate,
    evaluate_features,
    evaluate_masks,
    predict_masks,
)
from dpvision.models.losses import RowLoss, classification_loss, loss_for, outputs_for
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.private_step import Budget, BudgetSpent, private_step
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import Microbatch, OrdinaryGrad
from dpvision.storage.run_folder import Example, Rank, RunFolder, examples_bytes
from dpvision.training.callbacks import RunCallback, StopRequest
from dpvision.training.lineage import put_weights
from dpvision.training.prepare import RunSplits, extra_charges
from dpvision.training.stages import RunFeatures, Stage, features_of, set_trained, stage_at, training_stages

PREFLIGHT_ROWS = 4
FROZEN, MOST_FROZEN = "frozen", 3


@final
@dataclass(frozen=True)
class Place:
    """Where a run lives: its folder, its bill, its keys."""

    folder: RunFolder
    ledger: Ledger
    keys: Keys
    fork: int
    device: str


@final
@dataclass
class Session:
    """Everything the loop works on. ``step`` counts finished steps."""

    config: RunConfig
    splits: RunSplits
    normalisation: Normalisation
    folder: RunFolder
    ledger: Ledger
    keys: Keys
    fork: int
    model: nn.Module
    stages: tuple[Stage, ...]
    stage: Stage
    features: RunFeatures | None
    optimizer: Optimizer
    image_draws: ImageBatches
    budget: Budget | None
    meter: EpsilonMeter | None
    device: str
    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    final: Metrics | MaskMetrics | None = None
    draws: ImageBatches | FeatureDraws = field(init=False)

    def __post_init__(self) -> None:
        self.draws = self._draws()

    def _draws(self) -> ImageBatches | FeatureDraws:
        """The draws of the phase: of features, if it trains on them."""
        if self.stage.backbone is None or self.features is None:
            return self.image_draws
        return FeatureDraws(self.image_draws, self.features.train, self.splits.train.labels, self.device)

    def enter_stage(self) -> None:
        """Begin the phase that the next step belongs to, with an optimizer of its own."""
        phase = stage_at(self.stages, self.step)
        if phase is self.stage:
            return
        self.optimizer.check_untouched()  # the next one takes what it finds for granted
        set_trained(self.model, phase)
        self.stage, self.features = phase, None
        self.draws = self._draws()
        self.optimizer = make_optimizer(self.model, self.config, first_step=phase.first_step)

    @property
    def loss(self) -> RowLoss:
        """What is minimised: one value a row."""
        return loss_of(self.config, self.splits)

    @property
    def total_steps(self) -> int:
        """Steps of the whole plan."""
        return self.config.plan.steps

    @property
    def recharged_steps(self) -> int:
        """Charged steps beyond those that led to the present weights: what forks have cost."""
        return 0 if self.budget is None else max(0, self.budget.spent - self.step)

    def save_checkpoint(self) -> None:
        """Keep all that an exact resume needs."""
        tensors, values = self.optimizer.state()
        stored = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        stored |= {f"optimizer/{name}": value for name, value in tensors.items()}
        progress = {"fork": self.fork, "seconds": self.seconds, "curve": self.curve, "optimizer": values}
        self.folder.save_checkpoint(self.step, stored, {**progress, "ledger": self.ledger.mark})


@final
@dataclass(frozen=True)
class Learner:
    """A model, what of it learns when, and what its frozen part has made of the pictures."""

    model: nn.Module
    stages: tuple[Stage, ...]
    features: RunFeatures | None = None


def assemble(
    config: RunConfig,
    pictures: RunSplits,
    *,
    place: Place,
    learner: Learner,
    normalisation: Normalisation,
    taken: int = 0,
) -> Session:
    """Join the parts of a run of which ``taken`` steps are taken; the optimizer is that of the last of them."""
    private = config.privacy.enabled
    phase = stage_at(learner.stages, max(0, taken - 1))
    set_trained(learner.model, phase)
    return Session(
        config=config,
        splits=pictures,
        normalisation=normalisation,
        folder=place.folder,
        ledger=place.ledger,
        keys=place.keys,
        fork=place.fork,
        device=place.device,
        model=learner.model,
        stages=learner.stages,
        stage=phase,
        features=learner.features,
        optimizer=make_optimizer(learner.model, config, first_step=phase.first_step),
        image_draws=ImageBatches(
            mechanism=config.plan,
            store=pictures.train,
            normalisation=normalisation,
            keys=place.keys,
            rows_per_unit=required(config.data.rows_per_unit, "rows_per_unit"),
            device=place.device,
            views=config.views,
        ),
        budget=Budget(config.mechanism, place.ledger, fork=place.fork) if private else None,
        meter=EpsilonMeter(config.mechanism, delta=required(config.privacy.delta, "delta"), extra=extra_charges(config))
        if private
        else None,
    )


def make_optimizer(model: nn.Module, config: RunConfig, *, first_step: int) -> Optimizer:
    """The configured optimizer for what requires gradients now."""
    return Optimizer(
        model,
        settings=required(config.optimizer, "optimizer"),
        schedule=config.schedule,
        averaging=config.averaging,
        total_steps=config.plan.steps,
        private=config.privacy.enabled,
        first_step=first_step,
    )


def make_learner(config: RunConfig, pictures: RunSplits, device: str) -> Learner:
    """The configured model in training mode, with weights that are the same for everybody, and its phases."""
    model = _created(config, pictures, seed=0).to(device).train()
    with shape_errors(pictures.train.image_shape):
        example, _ = synthetic_like(pictures, device)
        if config.task == "segmentation":
            with torch.no_grad():
                model(example[:1])  # says early what sizes it can't take
        return Learner(model, training_stages(model, config, example))


def _created(config: RunConfig, pictures: RunSplits, *, seed: int) -> nn.Module:
    chosen = required(config.model, "model")
    return models.create(
        chosen.name,
        num_classes=outputs_for(config.task, pictures.train.num_classes),
        in_channels=pictures.train.image_shape[0],
        seed=seed,
        **chosen.options,
    )


def choose_gradient_plans(learner: Learner, config: RunConfig, pictures: RunSplits, device: str) -> None:
    """Let the engine decide how it computes the model's gradients, phase by phase, while its weights are everybody's.

    What it decides changes the last bits of a sum. Decided anew at a checkpoint's weights, it could differ, and a
    repeated step would give another sum under the same noise.
    """
    inputs, targets = synthetic_like(pictures, device)
    rows = required(config.data.rows_per_unit, "rows_per_unit") * config.views.count
    unit = torch.full((1, rows), 1 / rows, dtype=torch.float64, device=device)
    decide = plan_for if config.privacy.enabled else fast_plan
    for phase in learner.stages:
        set_trained(learner.model, phase)
        seen = inputs if phase.backbone is None else features_of(phase.backbone, inputs)
        like = Microbatch(seen[:1].repeat_interleave(rows, 0), targets[:1].repeat_interleave(rows, 0), unit)
        with shape_errors(pictures.train.image_shape):
            decide(phase.network, loss_of(config, pictures), like, config.performance)
    set_trained(learner.model, learner.stages[0])


def draw_weights(model: nn.Module, config: RunConfig, pictures: RunSplits, keys: Keys) -> None:
    """Put the run's own first weights into the model: drawn, and taken from elsewhere if configured so."""
    drawn = _created(config, pictures, seed=keys.seed("init"))
    put_weights(drawn, config, build=lambda: _created(config, pictures, seed=0), seed=keys.seed("init", "mean_var"))
    model.load_state_dict(drawn.state_dict())


def loss_of(config: RunConfig, pictures: RunSplits) -> RowLoss:
    """The loss of a run; the same value whenever it is asked for."""
    return loss_for(config.task, required(config.loss, "loss"), pictures.train.num_classes)


def synthetic_rows(
    image_shape: tuple[int, int, int], num_classes: int, device: str, *, per_pixel: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows for trying a model out: always the same, and nobody's pictures. Targets are classes, or masks of them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn((PREFLIGHT_ROWS, *image_shape), generator=generator).to(device)
    shape = (PREFLIGHT_ROWS, *(image_shape[1:] if per_pixel else ()))
    return inputs, torch.randint(num_classes, shape, generator=generator).to(device)


def synthetic_like(pictures: RunSplits, device: str) -> tuple[Tensor, Tensor]:
    """Made-up rows of the kind that a run trains on."""
    store = pictures.train
    return synthetic_rows(store.image_shape, store.num_classes, device, per_pixel=store.per_pixel)


def preflight(model: nn.Module, config: RunConfig, pictures: RunSplits, device: str) -> list[Finding]:
    """Try the model on made-up pictures: units must not mix, and every gradient must be right. Returns notes."""
    inputs, targets = synthetic_like(pictures, device)
    with shape_errors(pictures.train.image_shape):
        findings = require_private_ready(model, loss_of(config, pictures), inputs, targets)
    frozen = [finding for finding in findings if finding.problem.startswith(FROZEN)]
    if len(frozen) <= MOST_FROZEN:
        return findings
    # A frozen backbone would be a hundred lines.
    problem = f"{len(frozen)} layers are {FROZEN}, stay as they are"
    whole = Finding(module="the model", problem=problem, remedy=frozen[0].remedy, fatal=False)
    return [whole, *(finding for finding in findings if finding not in frozen)]


def inspect_model(model: nn.Module, *, image_shape: tuple[int, int, int], num_classes: int) -> list[Finding]:
    """What stands in the way of training ``model`` privately, and what is worth knowing."""
    inputs, targets = synthetic_rows(image_shape, num_classes, "cpu")
    with shape_errors(image_shape):
        return check_model(model, classification_loss, inputs, targets)


@contextmanager
def shape_errors(image_shape: tuple[int, int, int]) -> Iterator[None]:
    """Word torch's complaint about shapes as ours: the model was tried on pictures that it can't take."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, DPVisionError):
            raise
        shape = "×".join(map(str, image_shape))
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"the model can't be trained on pictures of shape {shape}: {reason}.") from error


MOST_OF_A_RANK = 3
_AT_A_TIME = 32


def may_show_pictures(config: RunConfig) -> bool:
    """Whether test pictures themselves may leave the house: only those that the user named as public.

    Units held out of the private data are declared for figures that are measured on them, and for nothing else; so is
    a test part that came with the data, unless it was named too.
    """
    return config.task == "segmentation" and config.data.test is not None


def example_file(session: Session) -> bytes | None:
    """The file of examples of a run that may show any.

    Guarantee: every pixel of it comes from the test set that the user named; of training there is only what the
    released weights say.
    """
    test = session.splits.test
    if not may_show_pictures(session.config) or session.splits.held_out or not test.per_pixel:
        return None
    dice = torch.cat(
        [
            dice_of_images(_predicted(session, test.images[start : start + _AT_A_TIME]), truth, test.num_classes)
            for start, truth in zip(range(0, test.num_rows, _AT_A_TIME), test.labels.split(_AT_A_TIME), strict=True)
        ]
    )
    chosen = choose_rows(dice, test)
    rows = [row for _, row in chosen]
    predicted = _predicted(session, test.images[rows])
    return examples_bytes(
        [
            Example(
                rank=rank,
                dice=float(dice[row]),
                owner=None if test.owners is None else str(test.owners[row]),
                image_CHW=test.images[row].numpy(),
                truth_HW=test.labels[row].numpy(),
                predicted_HW=mask.numpy(),
            )
            for (rank, row), mask in zip(chosen, predicted, strict=True)
        ]
    )


def choose_rows(dice: Tensor, test: ImageStore) -> list[tuple[Rank, int]]:
    """The best, the middle and the worst rows, up to three of each and none twice, of as many owners as there are.

    An empty mask is found perfectly by finding nothing: rows with something to find go first.
    """
    full: list[int] = test.labels.flatten(1).any(1).nonzero()[:, 0].tolist() or list(range(test.num_rows))
    order = sorted(full, key=lambda row: (-float(dice[row]), row))
    place = {row: number for number, row in enumerate(order)}
    count = max(1, min(MOST_OF_A_RANK, len(order) // 3))
    owners = test.owners
    best = _of_different_owners(order, owners, count)
    left = [row for row in order if row not in best]
    worst = _of_different_owners(left[::-1], owners, count)
    left = [row for row in left if row not in worst]
    nearest = sorted(left, key=lambda row: (abs(place[row] - len(order) // 2), row))
    median = sorted(_of_different_owners(nearest, owners, count), key=place.__getitem__)
    ranks: list[tuple[Rank, list[int]]] = [("best", best), ("median", median), ("worst", worst)]
    return [(rank, row) for rank, rows in ranks for row in rows]


def _of_different_owners(rows: Sequence[int], owners: Sequence[str] | None, count: int) -> list[int]:
    """The first rows, but a second one of somebody only when nobody else is near the front."""
    if owners is None:
        return list(rows[:count])
    near = rows[: max(count, len(rows) // 4)]
    seen: set[str] = set()
    first, again = [], []
    for row in near:
        (again if owners[row] in seen else first).append(row)
        seen.add(owners[row])
    return [*first, *again][:count]


def _predicted(session: Session, images: Tensor) -> Tensor:
    masks = predict_masks(
        session.model,
        images,
        session.normalisation,
        parameters=session.optimizer.averaged_parameters(),
        device=session.device,
    )
    return torch.cat(list(masks))


class Diverged(DPVisionError):
    """The weights are no longer finite."""


Outcome = Literal["finished", "budget_spent", "stopped"]


def run_steps(session: Session, callback: RunCallback, stop: StopRequest) -> Outcome:
    """Take steps until the plan is done, the budget is spent or somebody asks to stop."""
    due = evaluation_points(session)
    bound = spent_at_most(session, due)
    while session.step < session.total_steps and not stop.requested:
        started = time.perf_counter()
        try:
            take_step(session)
        except BudgetSpent as spent:
            callback.message(str(spent))
            return "budget_spent"
        session.seconds += time.perf_counter() - started
        callback.stepped(done=session.step, epsilon_bound=bound)
        if session.step in due:
            evaluate_now(session, callback)
            bound = spent_at_most(session, due)
        if session.step % session.config.checkpoint_every == 0 or session.step == session.total_steps:
            session.save_checkpoint()
    return "finished" if session.step == session.total_steps else "stopped"


@contextmanager
def keyed_randomness(session: Session) -> Iterator[None]:
    """Random layers draw from a stream of their own step, so that a replayed step draws the same."""
    devices = [] if session.device == "cpu" else [session.device]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(session.keys.seed("views", session.step))
        yield


def take_step(session: Session) -> None:
    """One step. The ledger is on disk before the noisy gradient exists."""
    session.enter_stage()
    with keyed_randomness(session):
        _take_step(session)
    session.step += 1
    session.final = None


def _take_step(session: Session) -> None:
    batch = session.draws.batch(session.step)
    performance = session.config.performance
    if session.budget is None:
        mean = ordinary_gradient(
            session.stage.network,
            session.loss,
            batch,
            divisor=session.config.plan.expected_batch_size,
            performance=performance,
        )
        session.optimizer.step(OrdinaryGrad(mean, session.step))
    else:
        private_step(
            session.stage.network,
            session.loss,
            batch,
            optimizer=session.optimizer,
            budget=session.budget,
            keys=session.keys,
            step=session.step,
            performance=performance,
        )


def evaluation_points(session: Session) -> list[int]:
    """Step counts after which the public test split is looked at: evenly spread, the last step always."""
    count = min(session.config.evaluations, session.total_steps)
    return [round(session.total_steps * (i + 1) / count) for i in range(count)]


def spent_at_most(session: Session, due: list[int]) -> float | None:
    """Epsilon at the next point of evaluation: a bound on what is spent until then."""
    if session.meter is None:
        return None
    coming = next((point for point in due if point > session.step), session.total_steps)
    return session.meter.spent(coming + session.recharged_steps).epsilon


def measure(session: Session, *, averaged: bool = True) -> Metrics | MaskMetrics:
    """The figures of the present weights on the public test split: of averaged ones, if there are any and asked for."""
    require_finite(session)
    parameters = session.optimizer.averaged_parameters() if averaged else None
    if session.config.task == "segmentation":
        return evaluate_masks(
            session.model,
            session.splits.test,
            session.normalisation,
            loss=session.loss,
            parameters=parameters,
            device=session.device,
            name_patients=may_show_pictures(session.config) and not session.splits.held_out,
        )
    if session.stage.backbone is not None and session.features is not None:
        return evaluate_features(
            session.stage.network,
            session.features.test.values_NWF[:, 0],
            session.splits.test,
            parameters=parameters,
            device=session.device,
        )
    return evaluate(
        session.model,
        session.splits.test,
        session.normalisation,
        parameters=parameters,
        device=session.device,
    )


def evaluate_now(session: Session, callback: RunCallback) -> None:
    """Add a point to the curve, on the public test split."""
    metrics = measure(session)
    spent = None if session.meter is None else session.meter.spent(session.step + session.recharged_steps).epsilon
    point = {"step": session.step, "epsilon": spent, **metrics.headline(), "loss": metrics.loss}
    if session.step == session.total_steps and session.optimizer.averaged_parameters() is not None:
        point["raw"] = measure(session, averaged=False).headline()  # what averaging was worth
    session.curve.append(point)
    session.final = metrics
    session.optimizer.report_public_metric(metrics.loss)
    callback.evaluated(point)


def require_finite(session: Session) -> None:
    """Stop a run whose weights have overflowed."""
    for name, parameter in session.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise Diverged(f"{name} is not finite after step {session.step}: lower the learning rate and start anew.")
