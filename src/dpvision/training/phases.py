"""What learns in which steps, and what the engine runs to train it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from dpvision.config import RunConfig, ViewsConfig, required
from dpvision.models import split
from dpvision.transfer import trained_names

FEATURE_BYTES = 4 * 2**30
"""More than this is not kept in memory as features: a public limit, so that no row count decides how it is computed."""


@final
@dataclass(frozen=True, eq=False)
class Phase:
    """Steps that train the same parameters. ``network`` is what is trained: on pictures, or on what ``front`` makes
    of them, in numbers of ``dtype``. Its parameters are the model's own, under the model's names.
    """

    first_step: int
    trained: frozenset[str]
    network: nn.Module
    front: nn.Module | None = None
    dtype: torch.dtype = torch.float32
    mirrored: bool = False


def phases_of(model: nn.Module, config: RunConfig, example: Tensor) -> tuple[Phase, ...]:
    """The phases of a run, whose model is left with the first one's parameters to train.

    ``example`` is a few made-up rows. What a front makes of pictures is kept only where pictures are shown as they
    are, or each with its mirror image; a random view is another picture every time. Only the first phase uses it.
    """
    (first_step, trained), *later = _stretches(model, config)
    first = _phase(model, config, example, first_step, trained)
    set_trained(model, first)
    # The engine keeps one plan per module: a further phase, which runs the whole model again, needs one of its own.
    return (first, *(Phase(step, names, copy.copy(model)) for step, names in later))


def set_trained(model: nn.Module, phase: Phase) -> None:
    """Let exactly the phase's parameters require gradients."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in phase.trained)


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The phase that takes ``step``, counted from zero."""
    return [phase for phase in phases if phase.first_step <= step][-1]


def mirrored(views: ViewsConfig) -> bool:
    """Whether a picture is shown with its mirror image, both in every step: two views that differ by a flip alone."""
    return views.count == 2 and views.flip > 0 and views == ViewsConfig(count=2, flip=views.flip, padding=views.padding)


def _stretches(model: nn.Module, config: RunConfig) -> list[tuple[int, frozenset[str]]]:
    """First step and trained parameters of each phase."""
    transfer = config.transfer
    if transfer is None:
        return [(0, frozenset(name for name, value in model.named_parameters() if value.requires_grad))]
    if transfer.trained == "head_then_all":
        return [(0, trained_names(model, "head")), (transfer.head_steps or 0, trained_names(model, "all"))]
    return [(0, trained_names(model, transfer.trained, stages=transfer.stages))]


def _phase(model: nn.Module, config: RunConfig, example: Tensor, first: int, trained: frozenset[str]) -> Phase:
    whole = Phase(first, trained, model)
    as_it_is = config.views == ViewsConfig(padding=config.views.padding)
    # Maps are as large as pictures: there is nothing to gain from keeping them.
    if config.task == "segmentation" or config.cache_features == "off" or not (as_it_is or mirrored(config.views)):
        return whole
    set_trained(model, whole)
    cut = split(model, example)
    if cut is None:
        return whole
    dtype = _dtype(features_of(cut.front, example)[0].numel() * config.views.count, config)
    if dtype is None:
        return whole
    return Phase(first, trained, cut.rest, cut.front, dtype, mirrored(config.views))


def features_of(front: nn.Module, inputs: Tensor) -> Tensor:
    """What the front makes of inputs, in evaluation mode; the front is left as it was."""
    with torch.no_grad():
        return copy.deepcopy(front).eval()(inputs)


def _dtype(numbers_per_row: int, config: RunConfig) -> torch.dtype | None:
    """How precisely features are kept: in full, in half, or not at all. Decided by declared numbers only."""
    numbers = numbers_per_row * required(config.privacy.num_units, "num_units")
    numbers *= required(config.data.rows_per_unit, "rows_per_unit")
    if 4 * numbers <= FEATURE_BYTES:
        return torch.float32
    return torch.float16 if 2 * numbers <= FEATURE_BYTES else None
