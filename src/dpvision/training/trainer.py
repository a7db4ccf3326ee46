"""The training loop: one ``private_step`` after another, and metrics on the public test split.

``Session`` is the state of a run. ``start_run`` and ``resume_run`` make one, ``run_steps`` trains it, ``write_release``
writes what came out.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import nn

from dpvision.accounting import EpsilonMeter
from dpvision.config import RunConfig, required
from dpvision.data import FeatureDraws, ImageBatches, Normalisation
from dpvision.data.splits import RunSplits, may_show_images, public_test_images
from dpvision.errors import DPVisionError
from dpvision.gradients.devices import forked_generators
from dpvision.gradients.ordinary import ordinary_gradient
from dpvision.inference import FindingMetrics, MaskMetrics, Metrics, evaluate, evaluate_features, evaluate_masks
from dpvision.models.losses import RowLoss
from dpvision.own_code import NO_CODE, RunCode
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.private_step import BudgetSpent, Privatizer, private_step
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import OrdinaryGrad
from dpvision.ranks import ALONE, Ranks
from dpvision.storage.run_folder import RunFolder
from dpvision.training.callbacks import RunCallback, Snapshot, StopRequest
from dpvision.training.prepare import extra_charges
from dpvision.training.stages import SplitFeatures, Stage, loss_of, set_trained, stage_at

Outcome = Literal["finished", "budget_spent", "stopped"]


class Diverged(DPVisionError):
    """The weights are no longer finite."""


@final
@dataclass(kw_only=True)
class Session:
    """The state of a run between two steps; what is not given follows from the rest.

    Attributes:
        config: the resolved configuration.
        splits: the data.
        normalisation: the pixel constants.
        folder: the run folder, locked.
        ledger: where every charge goes before it is spent.
        keys: bound to the run's fingerprint and fork.
        fork: number of forks so far.
        device: torch's name of the device.
        model: the whole model; the stages share its parameters.
        stages: which parameters are trained when.
        features: kept features of ``stage``, if it trains on any.
        code: the user's own model and loss, if there are any.
        step: finished steps.
        seconds: time spent in steps.
        curve: points measured on the public test split.
        final: metrics of the present weights, if they were measured.
        stage: the stage of the last finished step.
        optimizer: the optimizer of ``stage``.
        image_draws: the sampler of images.
        privatizer: charges and releases, and is the hard limit; None without privacy.
        meter: epsilon by number of steps; None without privacy.
        ranks: the processes of the run; this is rank 0.
    """

    config: RunConfig
    splits: RunSplits
    normalisation: Normalisation
    folder: RunFolder
    ledger: Ledger
    keys: Keys
    device: str
    model: nn.Module
    stages: tuple[Stage, ...]
    features: SplitFeatures | None = None
    code: RunCode = NO_CODE
    ranks: Ranks = ALONE
    fork: int = 0
    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    final: Metrics | FindingMetrics | MaskMetrics | None = None
    stage: Stage = field(init=False)
    optimizer: Optimizer = field(init=False)
    image_draws: ImageBatches = field(init=False)
    draws: ImageBatches | FeatureDraws = field(init=False)
    privatizer: Privatizer | None = field(init=False, default=None)
    meter: EpsilonMeter | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        config = self.config
        self.image_draws = image_draws(config, self.splits, self.normalisation, self.keys, self.device)
        self._set_stage(stage_at(self.stages, max(0, self.step - 1)))
        if config.privacy.enabled:
            delta = required(config.privacy.delta, "delta")
            # Replays are safe: the keys are bound to everything that a sum depends on (run_fingerprint).
            self.privatizer = Privatizer(config.mechanism, self.ledger, keys=self.keys, fork=self.fork, replays=True)
            self.meter = EpsilonMeter(config.mechanism, delta=delta, extra=extra_charges(config))

    def _set_stage(self, stage: Stage) -> None:
        """Train this stage's parameters from now on, with an optimizer of its own."""
        self.stage = stage
        set_trained(self.model, stage)
        self.optimizer = Optimizer(
            self.model,
            settings=required(self.config.optimizer, "optimizer"),
            schedule=self.config.schedule,
            averaging=self.config.averaging,
            total_steps=self.total_steps,
            private=self.config.privacy.enabled,
            first_step=stage.first_step,
        )
        self.draws = stage_draws(stage, self.image_draws, self.features, self.splits, self.device)

    def enter_stage(self) -> None:
        """Change to the stage of the next step, if it is another one."""
        stage = stage_at(self.stages, self.step)
        if stage is not self.stage:
            self.optimizer.check_untouched()  # the next optimizer takes the weights as it finds them
            self.features = None
            self._set_stage(stage)

    @property
    def loss(self) -> RowLoss:
        """The loss that is minimised, one value per row."""
        return loss_of(self.config, self.splits, self.code)

    @property
    def total_steps(self) -> int:
        """Steps of the whole plan."""
        return self.config.plan.steps

    @property
    def recharged_steps(self) -> int:
        """Charged steps beyond those that led to the present weights: the cost of forks."""
        return 0 if self.privatizer is None else max(0, self.privatizer.spent - self.step)

    def epsilon(self, steps: int) -> float | None:
        """Epsilon once ``steps`` steps are taken, the cost of forks included; None without privacy."""
        return None if self.meter is None else self.meter.spent(steps + self.recharged_steps).epsilon

    def save_checkpoint(self) -> None:
        """Save everything that an exact resume needs."""
        tensors, values = self.optimizer.state()
        stored = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        stored |= {f"optimizer/{name}": value for name, value in tensors.items()}
        progress = {"fork": self.fork, "seconds": self.seconds, "curve": self.curve, "optimizer": values}
        self.folder.save_checkpoint(self.step, stored, {**progress, "ledger": self.ledger.mark})


def image_draws(
    config: RunConfig, splits: RunSplits, normalisation: Normalisation, keys: Keys, device: str
) -> ImageBatches:
    """Return the sampler of a run's images."""
    return ImageBatches(
        mechanism=config.plan,
        store=splits.train,
        normalisation=normalisation,
        keys=keys,
        rows_per_unit=required(config.data.rows_per_unit, "rows_per_unit"),
        device=device,
        views=config.views,
    )


def stage_draws(
    stage: Stage, draws: ImageBatches, features: SplitFeatures | None, splits: RunSplits, device: str
) -> ImageBatches | FeatureDraws:
    """Return the sampler of a stage: over kept features, where it trains on them."""
    if stage.backbone is None or features is None:
        return draws
    return FeatureDraws(draws, features.train, splits.train.labels, device)


def run_steps(session: Session, callback: RunCallback, stop: StopRequest) -> Outcome:
    """Take steps until the plan is done, the budget is spent or a stop is requested.

    Args:
        session: the run; it is changed in place.
        callback: told after every step and every evaluation.
        stop: checked between two steps.

    Raises:
        Diverged: the weights are not finite when they are evaluated.
    """
    due = evaluation_points(session)
    bound = epsilon_at_next(session, due)
    if session.step == 0:
        show_weights(session, callback)
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
            bound = epsilon_at_next(session, due)
        if session.step % session.config.checkpoint_every == 0 or session.step == session.total_steps:
            session.save_checkpoint()
    return "finished" if session.step == session.total_steps else "stopped"


def take_step(session: Session) -> None:
    """Take one step: private, or ordinary where the run has no privacy.

    Guarantee: see ``private_step``: the charge is on disk before the noisy gradient exists.
    """
    session.enter_stage()
    step, network, performance = session.step, session.stage.network, session.config.performance
    if session.ranks.several:
        session.ranks.tell({"do": "step", "step": step, "stage": session.stages.index(session.stage)})
        session.ranks.spread(list(trained_parameters(session.model, session.stage).values()))
    with keyed_randomness(session.keys, step, session.device):
        batch = session.draws.batch(step)
        if session.privatizer is None:
            divisor = session.config.plan.expected_batch_size
            mean = ordinary_gradient(network, session.loss, batch, divisor=divisor, performance=performance)
            session.optimizer.step(OrdinaryGrad(mean, step))
        else:
            private_step(
                network,
                session.loss,
                batch,
                optimizer=session.optimizer,
                privatizer=session.privatizer,
                step=step,
                performance=performance,
                own_code=session.code.is_given,
                ranks=session.ranks,
            )
    session.step += 1
    session.final = None


@contextmanager
def keyed_randomness(keys: Keys, step: int, device: str) -> Iterator[None]:
    """Seed torch's generators from the key and the step, so that a replayed step draws the same in random layers."""
    with forked_generators(device, seed=keys.seed("views", step)):
        yield


def trained_parameters(model: nn.Module, stage: Stage) -> dict[str, nn.Parameter]:
    """Return what a stage trains, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if name in stage.trained}


def evaluation_points(session: Session) -> list[int]:
    """Step counts after which the public test split is evaluated: evenly spaced, the last step always."""
    count = min(session.config.evaluations, session.total_steps)
    return [round(session.total_steps * (i + 1) / count) for i in range(count)]


def epsilon_at_next(session: Session, due: list[int]) -> float | None:
    """Epsilon at the next evaluation: an upper bound on what is spent until then."""
    return session.epsilon(next((point for point in due if point > session.step), session.total_steps))


def measure(session: Session, *, averaged: bool = True) -> Metrics | FindingMetrics | MaskMetrics:
    """Evaluate the present weights on the public test split; averaged ones, if there are any and ``averaged``."""
    require_finite(session)
    test = session.splits.test
    parameters = session.optimizer.averaged_parameters() if averaged else None
    if session.config.task == "segmentation":
        return evaluate_masks(
            session.model,
            test,
            session.normalisation,
            loss=session.loss,
            parameters=parameters,
            name_patients=may_show_images(session.config) and not session.splits.held_out,
        )
    if session.stage.backbone is not None and session.features is not None:
        features = session.features.test.values_NWF[:, 0]
        return evaluate_features(session.stage.network, features, test, parameters=parameters)
    if session.ranks.several:
        own = trained_parameters(session.model, session.stage)
        used = {name: value.to(own[name].dtype) for name, value in (parameters or own).items() if name in own}
        session.ranks.tell({"do": "evaluate", "names": list(used)})
        session.ranks.spread(list(used.values()))
    return evaluate(session.model, test, session.normalisation, parameters=parameters, ranks=session.ranks)


def evaluate_now(session: Session, callback: RunCallback) -> None:
    """Add a point to the curve on the public test split."""
    metrics = measure(session)
    point = {"step": session.step, "epsilon": session.epsilon(session.step), **metrics.headline(), "loss": metrics.loss}
    if session.step == session.total_steps and session.optimizer.averaged_parameters() is not None:
        point["raw"] = measure(session, averaged=False).headline()  # shows what averaging was worth
    session.curve.append(point)
    session.final = metrics
    session.optimizer.report_public_metric(metrics.loss)
    callback.evaluated(point)
    show_weights(session, callback)


def show_weights(session: Session, callback: RunCallback) -> None:
    """Show a copy of the present weights to a callback that wants it."""
    if not callback.wants_weights:
        return
    tensors, _ = session.optimizer.state()
    callback.weights(
        Snapshot(
            step=session.step,
            epsilon=session.epsilon(session.step),
            private=session.config.privacy.enabled,
            model=copy.deepcopy(session.model).eval(),
            moments={
                key.removeprefix("optimizer/"): value for key, value in tensors.items() if key.startswith("optimizer/")
            },
            normalisation=session.normalisation,
            public_images=public_test_images(session.config, session.splits),
        )
    )


def require_finite(session: Session) -> None:
    """Stop a run whose weights have overflowed."""
    for name, parameter in session.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise Diverged(f"{name} is not finite after step {session.step}: lower the learning rate and start again.")
