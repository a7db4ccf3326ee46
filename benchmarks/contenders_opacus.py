"""Opacus's four ways to a private step, as its own examples put them together; imported only when they run.

Opacus knows one row per unit. Several views are averaged here from its per-row gradients, as its users do by hand;
ghost clipping never has such gradients, so it can't.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import nn

from benchmarks.contender import CLIP_NORM, LEARNING_RATE, MOMENTUM, NOISE_MULTIPLIER, Contender, Step
from benchmarks.workload import Workload
from dpvision.errors import ArgumentError

# pyright: reportMissingImports=false


Mode = Literal["hooks", "functorch", "ew"]


def _settings(workload: Workload) -> dict[str, Any]:
    return {
        "noise_multiplier": NOISE_MULTIPLIER,
        "max_grad_norm": CLIP_NORM,
        "expected_batch_size": workload.batch,
    }


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def _per_row(mode: Mode) -> Callable[[Workload], Step]:
    def make(workload: Workload) -> Step:
        from opacus.grad_sample import prepare_module
        from opacus.optimizers import DPOptimizer

        inputs, targets = workload.make_rows()
        model: Any = prepare_module(workload.make_model(), grad_sample_mode=mode)
        optimizer = DPOptimizer(_sgd(model), **_settings(workload))

        def step() -> None:
            workload.row_losses(model(inputs), targets).mean().backward()
            if workload.views > 1:
                _average_views(model, workload.views)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def _average_views(model: nn.Module, views: int) -> None:
    parameters: Any = model.parameters()
    for parameter in parameters:
        if parameter.grad_sample is not None:
            parameter.grad_sample = parameter.grad_sample.unflatten(0, (-1, views)).mean(1)


def _ghost(workload: Workload) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    if workload.views > 1:
        raise ArgumentError("ghost clipping takes one row per unit.")
    inputs, targets = workload.make_rows()
    settings: dict[str, Any] = {"max_grad_norm": CLIP_NORM, "use_ghost_clipping": True}
    model: Any = GradSampleModuleFastGradientClipping(workload.make_model(), **settings)
    optimizer = DPOptimizerFastGradientClipping(_sgd(model), **_settings(workload))
    loss_fn = DPLossFastGradientClipping(model, optimizer, _Criterion(workload))

    def step() -> None:
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Criterion:
    """Losses per row with the attribute that Opacus sets to "none" while it asks for them."""

    def __init__(self, workload: Workload) -> None:
        self.reduction = "mean"
        self._row_losses = workload.row_losses

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._row_losses(outputs, targets)


OPACUS: Final = (
    Contender(name="opacus-hooks", label="Opacus, hooks", kind="peer", make=_per_row("hooks")),
    Contender(name="opacus-functorch", label="Opacus, functorch", kind="peer", make=_per_row("functorch")),
    Contender(name="opacus-ghost", label="Opacus, ghost clipping", kind="peer", make=_ghost),
    Contender(name="opacus-ew", label="Opacus, expanded weights", kind="peer", make=_per_row("ew")),
)
