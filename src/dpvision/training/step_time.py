"""How long a private step takes on this machine: a short measurement on synthetic images, for plans.

The whole step is measured: clipped gradients, the charge on disk, noise, optimizer. No private data is read, and the
ledger that is written is a temporary one. A step's time is close to linear in its number of units, because a batch is
computed in micro-batches; so two batch sizes are measured and a line is drawn through them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision import kernels
from dpvision.config import OptimizerSettings, Performance
from dpvision.errors import ArgumentError, Problems
from dpvision.gradients.clipped_sum import Rows
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.private_step import Privatizer, private_step
from dpvision.privacy.sampling import Sampling
from dpvision.privacy.values import Microbatch

FIRST_BATCH: Final = 8
LARGEST_BATCH: Final = 2048
LONG_ENOUGH: Final = 0.5
"""Batches are doubled until a step takes this many seconds."""
REPEATS: Final = 3
_MOST_BYTES: Final = 2**26
_APART: Final = 4  # the smaller batch of the two is a fourth of the larger one


@final
@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a private step as a line over the batch size.

    Attributes:
        seconds_fixed: seconds of a step that do not depend on its batch: noise, optimizer, charge.
        seconds_per_unit: seconds for one unit more.
        largest_batch: the largest batch that was measured; what lies beyond is extrapolated.
        parameters: parameters that are trained.
        threads: torch's threads.
        native: whether the C++ kernels computed.
    """

    seconds_fixed: float
    seconds_per_unit: float
    largest_batch: int
    parameters: int
    threads: int
    native: bool

    def seconds(self, mechanism: Mechanism) -> float:
        """Estimate the seconds of all steps of a mechanism, without evaluation and loading of data."""
        one = self.seconds_fixed + self.seconds_per_unit * mechanism.expected_batch_size
        return mechanism.steps * one


@final
@dataclass(frozen=True)
class _SyntheticDraw:
    """Synthetic rows as a draw in which every unit joins with certainty, which is a Poisson draw of rate one."""

    rows: Rows

    @property
    def sampling(self) -> Sampling:
        return Sampling("poisson", 1.0)

    @property
    def drawn_batch_size(self) -> int:
        return self.rows.drawn_batch_size

    def microbatches(self, units: int, only: range | None = None) -> Iterator[Microbatch]:
        return self.rows.microbatches(units, only)


def measure_step(
    model: nn.Module,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    views: int = 1,
    performance: Performance | None = None,
    own_code: bool = True,
) -> StepTime:
    """Measure private steps of a classifier on synthetic images, for a few seconds.

    Args:
        model: the model; its weights are changed.
        image_shape: (channels, height, width).
        num_classes: classes of the synthetic targets, at least 2.
        views: augmented views of a unit, at least 1.
        performance: micro-batches and kernels. Default: those of a run.
        own_code: whether the model may be anyone's code, so that a proved graph runs in its place.

    Returns:
        The line through the fastest of three steps at each of two batch sizes.

    Raises:
        ArgumentError: a value is out of range, or the model does not return one score per class.
        PrivacyError: the model can't be trained privately.
    """
    Problems().count("views", views).count("num_classes", num_classes, least=2).raise_if_any()
    _require_scores(model, image_shape, num_classes)
    performance = performance or Performance()
    model.train()
    bytes_per_unit = 4 * views * image_shape[0] * image_shape[1] * image_shape[2]
    times: dict[int, float] = {}
    batch = FIRST_BATCH
    while True:
        draw = _SyntheticDraw(_rows(batch, views, image_shape, num_classes))
        with performance.chosen_kernels():
            times[batch] = _fastest(model, draw, batch, performance, own_code=own_code)
        large = 2 * batch > LARGEST_BATCH or 2 * batch * bytes_per_unit > _MOST_BYTES
        if times[batch] >= LONG_ENOUGH or large:
            break
        batch *= 2
    smaller = max(FIRST_BATCH, batch // _APART)
    slope = times[batch] / batch
    if smaller < batch:
        slope = min(max(times[batch] - times[smaller], 0.0) / (batch - smaller), slope)
    return StepTime(
        seconds_fixed=times[batch] - slope * batch,
        seconds_per_unit=slope,
        largest_batch=batch,
        parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        threads=torch.get_num_threads(),
        native=performance.kernels in ("auto", "native") and kernels.available(),
    )


def _require_scores(model: nn.Module, image_shape: tuple[int, int, int], num_classes: int) -> None:
    from dpvision.models import output_problem

    problem = output_problem(model, torch.zeros(2, *image_shape), num_classes)
    if problem is not None:
        raise ArgumentError(f"the step can't be measured: {problem[0]}. {problem[1]}")


def _rows(units: int, views: int, image_shape: tuple[int, int, int], num_classes: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn((units * views, *image_shape), generator=generator)
    targets = torch.randint(num_classes, (units,), generator=generator).repeat_interleave(views)
    return Rows(inputs, targets, views)


def _fastest(model: nn.Module, draw: _SyntheticDraw, batch: int, performance: Performance, *, own_code: bool) -> float:
    """The seconds of the fastest of some steps, after one that makes the engine's plan."""
    mechanism = Mechanism(
        num_units=batch, expected_batch_size=batch, clip_norm=1.0, noise_multiplier=1.0, steps=REPEATS + 1
    )
    settings = OptimizerSettings(name="sgd", learning_rate=1e-6, momentum=0.9)
    optimizer = Optimizer(model, settings=settings, total_steps=mechanism.steps, private=True)
    header = {"run_id": "measurement", "privacy_unit": "example", "adjacency": "add_remove", "num_units": batch}
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.create(Path(folder) / "ledger.jsonl", {**header, "delta": 0.5, "steps": mechanism.steps})
        privatizer = Privatizer(mechanism, ledger)
        for step in range(mechanism.steps):
            start = time.perf_counter()
            private_step(
                model,
                _cross_entropy,
                draw,
                optimizer=optimizer,
                privatizer=privatizer,
                step=step,
                performance=performance,
                own_code=own_code,
            )
            seconds.append(time.perf_counter() - start)
            if step and seconds[-1] > 4 * LONG_ENOUGH:
                break
    return min(seconds[1:])


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")
