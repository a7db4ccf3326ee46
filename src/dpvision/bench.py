"""Time of a private step beside an ordinary PyTorch step, interleaved in one run, as a ratio of medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision import models
from dpvision.checks import Problems
from dpvision.grads import clipped_sum
from dpvision.keys import Keys
from dpvision.mechanism import Mechanism
from dpvision.noise import privatize
from dpvision.optim import Optimizer, OptimizerSettings

ORDINARY = "ordinary PyTorch, eager"
Step = Callable[[], None]


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model and one batch of made-up pictures."""

    model: str
    batch: int
    image_size: int
    in_channels: int
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        for name in ("batch", "image_size", "in_channels"):
            problems.count(name, getattr(self, name))
        problems.raise_if_any()

    def make_model(self) -> nn.Module:
        """The model with fixed weights."""
        sized = {"image_size": self.image_size} if "image_size" in models.entry(self.model).options else {}
        return models.create(self.model, in_channels=self.in_channels, seed=0, **sized)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Made-up pictures and labels."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.in_channels, self.image_size, self.image_size)
        return torch.randn(shape, generator=generator), torch.randint(10, (self.batch,), generator=generator)


def run(workload: Workload, *, repeats: int = 7) -> dict[str, Any]:
    """Median seconds of each contender's step and its ratio to an ordinary one."""
    contenders = {ORDINARY: _ordinary(workload), "dpvision, private": _private(workload)}
    if find_spec("opacus") is not None:
        contenders["Opacus, hooks"] = _opacus(workload)
    times = interleaved(contenders, repeats=repeats)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        {"name": name, "seconds": median, "ratio": median / medians[ORDINARY], "all_seconds": times[name]}
        for name, median in medians.items()
    ]
    return {"workload": vars(workload), "threads": torch.get_num_threads(), "repeats": repeats, "rows": rows}


def interleaved(contenders: dict[str, Step], *, repeats: int) -> dict[str, list[float]]:
    """Every contender once per round, so that a noisy machine is noisy for all of them."""
    for step in contenders.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, step in contenders.items():
            started = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - started)
    return times


def _row_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _ordinary(workload: Workload) -> Step:
    model, (inputs, targets) = workload.make_model().train(), workload.rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def _private(workload: Workload) -> Step:
    model, (inputs, targets) = workload.make_model().train(), workload.rows()
    mechanism = Mechanism(
        num_units=workload.batch * 100,
        expected_batch_size=workload.batch,
        clip_norm=1.0,
        noise_multiplier=1.0,
        steps=10**6,
    )
    settings = OptimizerSettings(name="sgd", learning_rate=0.01, momentum=0.9)
    optimizer = Optimizer(model, settings=settings, total_steps=mechanism.steps, private=True)
    keys = Keys.from_os_entropy()

    def step() -> None:
        clipped = clipped_sum(
            model, _row_losses, inputs, targets, clip_norm=1.0, microbatch_size=workload.microbatch_size
        )
        optimizer.step(privatize(clipped, mechanism, keys, step=optimizer.steps_taken))

    return step


def _opacus(workload: Workload) -> Step:
    import warnings

    from opacus.grad_sample import GradSampleModule  # pyright: ignore[reportMissingImports]
    from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]

    inputs, targets = workload.rows()
    model = GradSampleModule(workload.make_model().train())
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=workload.batch,
    )

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    return step
