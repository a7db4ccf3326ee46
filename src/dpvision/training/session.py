"""The state of a run while it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from dpvision import models
from dpvision.accounting import EpsilonMeter
from dpvision.checks import ArgumentError, DPVisionError
from dpvision.config import RunConfig, required
from dpvision.data import FeatureDraws, Normalisation, PoissonDraws, ViewSettings
from dpvision.evaluate import MaskMetrics, Metrics
from dpvision.flow import Microbatch
from dpvision.grads import Finding, fast_plan, plan_for, require_private_ready
from dpvision.grads import preflight as find_problems
from dpvision.keys import Keys
from dpvision.ledger import Ledger
from dpvision.losses import RowLoss, classification_loss, loss_for, outputs_for
from dpvision.optim import Optimizer
from dpvision.runfolder import RunFolder
from dpvision.training.budget import Budget
from dpvision.training.features import RunFeatures
from dpvision.training.origin import put_weights
from dpvision.training.phases import Phase, features_of, phase_at, phases_of, set_trained
from dpvision.training.prepare import Pictures, extra_charges

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
    pictures: Pictures
    normalisation: Normalisation
    folder: RunFolder
    ledger: Ledger
    keys: Keys
    fork: int
    model: nn.Module
    phases: tuple[Phase, ...]
    phase: Phase
    features: RunFeatures | None
    optimizer: Optimizer
    picture_draws: PoissonDraws
    budget: Budget | None
    meter: EpsilonMeter | None
    device: str
    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    final: Metrics | MaskMetrics | None = None
    draws: PoissonDraws | FeatureDraws = field(init=False)

    def __post_init__(self) -> None:
        self.draws = self._draws()

    def _draws(self) -> PoissonDraws | FeatureDraws:
        """The draws of the phase: of features, if it trains on them."""
        if self.phase.front is None or self.features is None:
            return self.picture_draws
        return FeatureDraws(self.picture_draws, self.features.train, self.pictures.train.labels, self.device)

    def enter_phase(self) -> None:
        """Begin the phase that the next step belongs to, with an optimizer of its own."""
        phase = phase_at(self.phases, self.step)
        if phase is self.phase:
            return
        self.optimizer.check_untouched()  # the next one takes what it finds for granted
        set_trained(self.model, phase)
        self.phase, self.features = phase, None
        self.draws = self._draws()
        self.optimizer = make_optimizer(self.model, self.config, first_step=phase.first_step)

    @property
    def loss(self) -> RowLoss:
        """What is minimised: one value a row."""
        return loss_of(self.config, self.pictures)

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
    phases: tuple[Phase, ...]
    features: RunFeatures | None = None


def assemble(
    config: RunConfig,
    pictures: Pictures,
    *,
    place: Place,
    learner: Learner,
    normalisation: Normalisation,
    taken: int = 0,
) -> Session:
    """Join the parts of a run of which ``taken`` steps are taken; the optimizer is that of the last of them."""
    private = config.privacy.enabled
    phase = phase_at(learner.phases, max(0, taken - 1))
    set_trained(learner.model, phase)
    return Session(
        config=config,
        pictures=pictures,
        normalisation=normalisation,
        folder=place.folder,
        ledger=place.ledger,
        keys=place.keys,
        fork=place.fork,
        device=place.device,
        model=learner.model,
        phases=learner.phases,
        phase=phase,
        features=learner.features,
        optimizer=make_optimizer(learner.model, config, first_step=phase.first_step),
        picture_draws=PoissonDraws(
            mechanism=config.plan,
            store=pictures.train,
            normalisation=normalisation,
            keys=place.keys,
            rows_per_unit=required(config.data.rows_per_unit, "rows_per_unit"),
            device=place.device,
            views=view_settings(config),
        ),
        budget=Budget(config.mechanism, place.ledger) if private else None,
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


def make_learner(config: RunConfig, pictures: Pictures, device: str) -> Learner:
    """The configured model in training mode, with weights that are the same for everybody, and its phases."""
    model = _created(config, pictures, seed=0).to(device).train()
    with fitting_shape(pictures.train.image_shape):
        example, _ = made_up_like(pictures, device)
        if config.task == "segmentation":
            with torch.no_grad():
                model(example[:1])  # says early what sizes it can't take
        return Learner(model, phases_of(model, config, example))


def _created(config: RunConfig, pictures: Pictures, *, seed: int) -> nn.Module:
    chosen = required(config.model, "model")
    return models.create(
        chosen.name,
        num_classes=outputs_for(config.task, pictures.train.num_classes),
        in_channels=pictures.train.image_shape[0],
        seed=seed,
        **chosen.options,
    )


def settle_plans(learner: Learner, config: RunConfig, pictures: Pictures, device: str) -> None:
    """Let the engine decide how it computes the model's gradients, phase by phase, while its weights are everybody's.

    What it decides changes the last bits of a sum. Decided anew at a checkpoint's weights, it could differ, and a
    repeated step would give another sum under the same noise.
    """
    inputs, targets = made_up_like(pictures, device)
    rows = required(config.data.rows_per_unit, "rows_per_unit") * view_settings(config).count
    unit = torch.full((1, rows), 1 / rows, dtype=torch.float64, device=device)
    decide = plan_for if config.privacy.enabled else fast_plan
    for phase in learner.phases:
        set_trained(learner.model, phase)
        seen = inputs if phase.front is None else features_of(phase.front, inputs)
        like = Microbatch(seen[:1].repeat_interleave(rows, 0), targets[:1].repeat_interleave(rows, 0), unit)
        with fitting_shape(pictures.train.image_shape):
            decide(phase.network, loss_of(config, pictures), like, config.performance)
    set_trained(learner.model, learner.phases[0])


def view_settings(config: RunConfig) -> ViewSettings:
    """How the views of a run are made."""
    return ViewSettings(**config.views.model_dump())


def draw_weights(model: nn.Module, config: RunConfig, pictures: Pictures, keys: Keys) -> None:
    """Put the run's own first weights into the model: drawn, and taken from elsewhere if configured so."""
    drawn = _created(config, pictures, seed=keys.seed("init"))
    put_weights(drawn, config, build=lambda: _created(config, pictures, seed=0), seed=keys.seed("init", "mean_var"))
    model.load_state_dict(drawn.state_dict())


def loss_of(config: RunConfig, pictures: Pictures) -> RowLoss:
    """The loss of a run; the same value whenever it is asked for."""
    return loss_for(config.task, required(config.loss, "loss"), pictures.train.num_classes)


def made_up_rows(
    image_shape: tuple[int, int, int], num_classes: int, device: str, *, per_pixel: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows for trying a model out: always the same, and nobody's pictures. Targets are classes, or masks of them."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn((PREFLIGHT_ROWS, *image_shape), generator=generator).to(device)
    shape = (PREFLIGHT_ROWS, *(image_shape[1:] if per_pixel else ()))
    return inputs, torch.randint(num_classes, shape, generator=generator).to(device)


def made_up_like(pictures: Pictures, device: str) -> tuple[Tensor, Tensor]:
    """Made-up rows of the kind that a run trains on."""
    store = pictures.train
    return made_up_rows(store.image_shape, store.num_classes, device, per_pixel=store.per_pixel)


def preflight(model: nn.Module, config: RunConfig, pictures: Pictures, device: str) -> list[Finding]:
    """Try the model on made-up pictures: units must not mix, and every gradient must be right. Returns notes."""
    inputs, targets = made_up_like(pictures, device)
    with fitting_shape(pictures.train.image_shape):
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
    inputs, targets = made_up_rows(image_shape, num_classes, "cpu")
    with fitting_shape(image_shape):
        return find_problems(model, classification_loss, inputs, targets)


@contextmanager
def fitting_shape(image_shape: tuple[int, int, int]) -> Iterator[None]:
    """Word torch's complaint about shapes as ours: the model was tried on pictures that it can't take."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, DPVisionError):
            raise
        shape = "×".join(map(str, image_shape))
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"the model can't be trained on pictures of shape {shape}: {reason}.") from error
