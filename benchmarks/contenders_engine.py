"""This library's own step: clipped sum, noise, optimizer; and the same engine without clipping and noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Final, Literal

from torch import nn

from benchmarks.contender import CLIP_NORM, LEARNING_RATE, MOMENTUM, NOISE_MULTIPLIER, Contender, Step
from benchmarks.workload import Workload
from dpvision import kernels as native
from dpvision.config import OptimizerSettings, Performance
from dpvision.gradients.clipped_sum import Rows, clipped_sum_of_batch, unclipped_sum_of_batch
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.noise import noisy_mean
from dpvision.privacy.optimizer import Optimizer
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import OrdinaryGrad

Kernels = Literal["plain", "native", "compiled"]
_STEPS: Final = 10**6


def mechanism_of(workload: Workload) -> Mechanism:
    """Public facts that fit a batch of exactly this size."""
    return Mechanism(
        num_units=workload.batch * 100,
        expected_batch_size=workload.batch,
        clip_norm=CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        steps=_STEPS,
    )


def optimizer_of(model: nn.Module, *, private: bool) -> Optimizer:
    """SGD with momentum, as the ordinary contenders use."""
    settings = OptimizerSettings(name="sgd", learning_rate=LEARNING_RATE, momentum=MOMENTUM)
    return Optimizer(model, settings=settings, total_steps=_STEPS, private=private)


def _made_in_the_first_step(model: nn.Module, *, private: bool) -> Callable[[], Optimizer]:
    """What the optimizer keeps of the weights counts as a step's memory; what it imports does not."""
    optimizer_of(nn.Linear(1, 1), private=private)
    return cache(partial(optimizer_of, model, private=private))


def performance_of(workload: Workload, kernels: Kernels) -> Performance:
    """The engine's settings for one contender."""
    return Performance(microbatch_size=workload.microbatch_size, kernels=kernels)


def _private(kernels: Kernels) -> Callable[[Workload], Step]:
    def make(workload: Workload) -> Step:
        model, batch = workload.make_model(), Rows(*workload.make_rows(), workload.views)
        mechanism, keys = mechanism_of(workload), Keys.from_os_entropy()
        performance, made = performance_of(workload, kernels), _made_in_the_first_step(model, private=True)

        def step() -> None:
            optimizer = made()
            with native.switched_off(when=kernels == "plain"):  # the noise has kernels of its own
                clipped = clipped_sum_of_batch(
                    model, workload.row_losses, batch, clip_norm=CLIP_NORM, performance=performance
                )
                optimizer.step(noisy_mean(clipped, mechanism, keys, step=optimizer.steps_taken))

        return step

    return make


def _unclipped(workload: Workload) -> Step:
    model, batch = workload.make_model(), Rows(*workload.make_rows(), workload.views)
    performance, made = performance_of(workload, "native"), _made_in_the_first_step(model, private=False)

    def step() -> None:
        optimizer = made()
        sums = unclipped_sum_of_batch(model, workload.row_losses, batch, performance=performance)
        means = {name: value / workload.batch for name, value in sums.items()}
        optimizer.step(OrdinaryGrad(means, optimizer.steps_taken))

    return step


ENGINE: Final = (
    Contender(name="dpvision-plain", label="dpvision, plain", kind="private", make=_private("plain")),
    Contender(name="dpvision-native", label="dpvision, native", kind="private", make=_private("native")),
    Contender(
        name="dpvision-compiled",
        label="dpvision, compiled",
        kind="private",
        make=_private("compiled"),
        compiles=True,
    ),
    Contender(
        name="dpvision-unclipped",
        label="dpvision, native, without clipping and noise",
        kind="unclipped",
        make=_unclipped,
    ),
)
