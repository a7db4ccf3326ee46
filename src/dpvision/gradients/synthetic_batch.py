"""Trying a model out on a few made-up units without leaving a trace in it.

Shapes: U units, R rows per unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpvision.privacy.values import Microbatch


def synthetic_batch(microbatch: Microbatch, *, units: int) -> Microbatch:
    """``units`` units of the same shape: noise where inputs are numbers, shuffled entries where they are indices.

    Inputs are made up, so that what a check finds does not depend on anybody's picture.
    """
    rows = repeat_units(microbatch, units=units)
    generator = torch.Generator().manual_seed(0)
    return Microbatch(_noise_like(rows.inputs, generator), rows.targets, rows.row_weights_UR)


def repeat_units(microbatch: Microbatch, *, units: int) -> Microbatch:
    """The first ``units`` units, from the beginning again where there are fewer; every row counts."""
    rows_per_unit = microbatch.row_weights_UR.shape[1]
    order = torch.arange(units * rows_per_unit, device=microbatch.inputs.device) % microbatch.inputs.shape[0]
    weights = torch.full(
        (units, rows_per_unit), 1 / rows_per_unit, dtype=torch.float64, device=microbatch.row_weights_UR.device
    )
    return Microbatch(microbatch.inputs[order], microbatch.targets[order], weights)


def with_changed_unit(microbatch: Microbatch, unit: int) -> Microbatch:
    """The same micro-batch with other inputs and other targets in one unit."""
    units, rows = microbatch.row_weights_UR.shape
    inputs = microbatch.inputs.clone()
    mine = inputs[unit * rows : (unit + 1) * rows]
    if mine.is_floating_point():
        mine.copy_(_noise_like(mine, torch.Generator().manual_seed(units + unit)) * 2 - 1)
    else:
        mine.copy_(mine.flip(-1) if mine.dim() > 1 else inputs.flip(0)[unit * rows : (unit + 1) * rows])
    targets = microbatch.targets.clone()
    theirs = targets[unit * rows : (unit + 1) * rows]
    # Classes 0 and 1 exist wherever there is anything to tell apart.
    theirs.copy_(1 - theirs if theirs.is_floating_point() else (theirs == 0).to(theirs.dtype))
    return Microbatch(inputs, targets, microbatch.row_weights_UR)


def single_unit(microbatch: Microbatch, unit: int) -> Microbatch:
    """One unit by itself."""
    rows = microbatch.row_weights_UR.shape[1]
    mine = slice(unit * rows, (unit + 1) * rows)
    weights = microbatch.row_weights_UR[unit : unit + 1]
    return Microbatch(microbatch.inputs[mine], microbatch.targets[mine], weights)


def _noise_like(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.is_floating_point():
        return torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x)
    if x.dim() == 1:
        return x
    order = torch.randperm(x.shape[-1], generator=generator)
    return x[..., order.to(x.device)]


@contextmanager
def repeatable_randomness(device: torch.device) -> Iterator[None]:
    """Random numbers that repeat from block to block; outside, the generators are where they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(0)
        if devices:
            torch.cuda.manual_seed(0)
        yield


@contextmanager
def evaluation_mode(model: nn.Module, *, when: bool = True) -> Iterator[None]:
    """Evaluation mode inside, if ``when``; each module's own mode outside."""
    before = [(module, module.training) for module in model.modules()]
    try:
        if when:
            model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Undo what a forward pass writes into its modules, such as a kept activation or a replaced buffer."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (vars(module), module._buffers, module._parameters)
        before += [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, then in before:
            for name in table.keys() - then.keys():
                del table[name]
            table.update(then)


@contextmanager
def model_restored(model: nn.Module) -> Iterator[list[str]]:
    """Put everything back as it was; afterwards the list names the buffers and parameters that had moved."""
    moved: list[str] = []
    saved = [(name, tensor, tensor.detach().clone()) for name, tensor in model_state(model)]
    with attributes_restored(model):
        try:
            yield moved
        finally:
            now = dict(model_state(model))
            with torch.no_grad():
                for name, tensor, value in saved:
                    if now.get(name) is not tensor or not torch.equal(_bits(tensor), _bits(value)):
                        moved.append(name)
                        tensor.copy_(value)


def model_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything that a model keeps from step to step, by name."""
    yield from model.named_buffers()
    yield from model.named_parameters()


def _bits(x: Tensor) -> Tensor:
    """A view under which NaN equals NaN."""
    # In one row: where a size is 1, a contiguous tensor's strides may be any.
    return x.detach().contiguous().view(-1).view(torch.uint8)
