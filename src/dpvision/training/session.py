"""The state of a run while it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision import models
from dpvision.accounting import EpsilonMeter
from dpvision.checks import ArgumentError, DPVisionError
from dpvision.config import RunConfig, required
from dpvision.data import Normalisation, PoissonDraws
from dpvision.evaluate import Metrics
from dpvision.flow import Microbatch
from dpvision.grads import Finding, plan_for, require_private_ready
from dpvision.grads import preflight as find_problems
from dpvision.keys import Keys
from dpvision.ledger import Ledger
from dpvision.optim import Optimizer
from dpvision.runfolder import RunFolder
from dpvision.training.budget import Budget
from dpvision.training.prepare import Pictures, extra_charges

PREFLIGHT_ROWS = 4


def classification_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, one value per row."""
    return F.cross_entropy(outputs, targets, reduction="none")


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
    optimizer: Optimizer
    draws: PoissonDraws
    budget: Budget | None
    meter: EpsilonMeter | None
    device: str
    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    final: Metrics | None = None

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


def assemble(
    config: RunConfig, pictures: Pictures, *, place: Place, model: nn.Module, normalisation: Normalisation
) -> Session:
    """Join the parts of a run."""
    private = config.privacy.enabled
    return Session(
        config=config,
        pictures=pictures,
        normalisation=normalisation,
        folder=place.folder,
        ledger=place.ledger,
        keys=place.keys,
        fork=place.fork,
        device=place.device,
        model=model,
        optimizer=Optimizer(
            model,
            settings=required(config.optimizer, "optimizer"),
            schedule=config.schedule,
            averaging=config.averaging,
            total_steps=config.plan.steps,
            private=private,
        ),
        draws=PoissonDraws(
            mechanism=config.plan,
            store=pictures.train,
            normalisation=normalisation,
            keys=place.keys,
            rows_per_unit=config.data.rows_per_unit,
            device=place.device,
        ),
        budget=Budget(config.mechanism, place.ledger) if private else None,
        meter=EpsilonMeter(config.mechanism, delta=required(config.privacy.delta, "delta"), extra=extra_charges(config))
        if private
        else None,
    )


def make_model(config: RunConfig, pictures: Pictures, device: str) -> nn.Module:
    """The configured model in training mode, with weights that are the same for everybody."""
    return _created(config, pictures, seed=0).to(device).train()


def _created(config: RunConfig, pictures: Pictures, *, seed: int) -> nn.Module:
    chosen = required(config.model, "model")
    return models.create(
        chosen.name,
        num_classes=pictures.train.num_classes,
        in_channels=pictures.train.image_shape[0],
        seed=seed,
        **chosen.options,
    )


def settle_plan(model: nn.Module, config: RunConfig, pictures: Pictures, device: str) -> None:
    """Let the engine decide how it computes this model's gradients while its weights are everybody's.

    What it decides changes the last bits of a sum. Decided anew at a checkpoint's weights, it could differ, and a
    repeated step would give another sum under the same noise.
    """
    inputs, targets = made_up_rows(pictures.train.image_shape, pictures.train.num_classes, device)
    rows = config.data.rows_per_unit
    unit = torch.full((1, rows), 1 / rows, dtype=torch.float64, device=device)
    like = Microbatch(inputs[:1].repeat(rows, 1, 1, 1), targets[:1].repeat(rows), unit)
    plan_for(model, classification_loss, like, config.performance)


def draw_weights(model: nn.Module, config: RunConfig, pictures: Pictures, keys: Keys) -> None:
    """Put the run's own first weights into the model."""
    model.load_state_dict(_created(config, pictures, seed=keys.seed("init")).state_dict())


def made_up_rows(image_shape: tuple[int, int, int], num_classes: int, device: str) -> tuple[Tensor, Tensor]:
    """Rows for trying a model out: always the same, and nobody's pictures."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn((PREFLIGHT_ROWS, *image_shape), generator=generator).to(device)
    return inputs, torch.randint(num_classes, (PREFLIGHT_ROWS,), generator=generator).to(device)


def preflight(model: nn.Module, pictures: Pictures, device: str) -> list[Finding]:
    """Try the model on made-up pictures: units must not mix, and every gradient must be right. Returns notes."""
    inputs, targets = made_up_rows(pictures.train.image_shape, pictures.train.num_classes, device)
    with fitting_shape(pictures.train.image_shape):
        return require_private_ready(model, classification_loss, inputs, targets)


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
