"""Ordinary PyTorch without privacy: forward, backward, SGD with momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from benchmarks.contender import LEARNING_RATE, MOMENTUM, Contender, Step
from benchmarks.workload import Workload


def _eager(workload: Workload) -> Step:
    return _step(workload, workload.make_model(), *workload.make_rows())


def _channels_last(workload: Workload) -> Step:
    # The types of ``to`` do not know that a memory format may be given without a dtype.
    model: nn.Module = workload.make_model().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    inputs, targets = workload.make_rows()
    return _step(workload, model, *(_laid_out(tensor) for tensor in (inputs, targets)))


def _laid_out(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _compiled(workload: Workload) -> Step:
    model = workload.make_model()
    return _step(workload, model, *workload.make_rows(), forward=torch.compile(model))


def _step(
    workload: Workload,
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> Step:
    run = model if forward is None else forward
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def step() -> None:
        workload.row_losses(run(inputs), targets).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


ORDINARY: Final = (
    Contender(name="eager", label="ordinary PyTorch, eager", kind="ordinary", make=_eager),
    Contender(name="channels-last", label="ordinary PyTorch, channels-last", kind="ordinary", make=_channels_last),
    Contender(name="compiled", label="ordinary PyTorch, compiled", kind="ordinary", make=_compiled, compiles=True),
)
