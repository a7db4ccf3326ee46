"""Does one unit notice another? Change one unit's input and look at all others, module by module.

Shapes: U units, N rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from dpvision.gradients.ownership import module_label, parameter_places
from dpvision.gradients.per_unit import LossFunction, row_losses
from dpvision.gradients.refusals import LOSS
from dpvision.gradients.synthetic_batch import model_restored, repeatable_randomness, with_changed_unit
from dpvision.privacy.values import Microbatch


def find_mixing(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> str | None:
    """The innermost module, or the loss, through which one unit's input reaches another unit's loss; else ``None``.

    Looked for twice: with the model's weights, and with others near them, because a gain that is still zero hides
    what will mix after the first step.
    """
    units = microbatch.row_weights_UR.shape[0]
    for weights in ({}, _weights_nearby(model)):
        before = _losses(model, loss_fn, microbatch, weights)
        for unit in (0, units - 1):
            changed = with_changed_unit(microbatch, unit)
            if not _others_equal(before, _losses(model, loss_fn, changed, weights), unit, units):
                seen, seen_after = (_trace(model, loss_fn, rows, weights) for rows in (microbatch, changed))
                return _first_difference(seen, seen_after, unit, units) or LOSS
    return None


def suspect_mixing(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> str | None:
    """The innermost module whose output mixes units, whether or not the loss shows it."""
    before = _trace(model, loss_fn, microbatch, {})
    after = _trace(model, loss_fn, with_changed_unit(microbatch, 0), {})
    return _first_difference(before, after, 0, microbatch.row_weights_UR.shape[0])


def _weights_nearby(model: nn.Module) -> dict[str, Tensor]:
    """Parameters moved a little at random, none of them zero, for every place that holds one."""
    generator = torch.Generator().manual_seed(0)
    moved = {parameter: _nearby(parameter.detach(), generator) for parameter in model.parameters()}
    return {name: moved[parameter] for name, parameter in parameter_places(model)}


def _nearby(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.is_floating_point() or not x.numel():
        return x
    size = max(0.1, float(x.double().square().mean().sqrt().nan_to_num()))
    return x + (0.1 * size * torch.randn(x.shape, generator=generator, dtype=torch.float64)).to(x)


Seen = tuple[str, list[Any], list[Any]]
"""A module's label, and copies of what it was given and what it returned."""


def _losses(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, weights: dict[str, Tensor]) -> Tensor:
    def run(inputs: Tensor) -> Any:
        return functional_call(model, weights, (inputs,), tie_weights=False) if weights else model(inputs)

    with torch.no_grad(), model_restored(model), repeatable_randomness(microbatch.inputs.device):
        return row_losses(run, loss_fn, microbatch)


def _trace(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch, weights: dict[str, Tensor]) -> list[Seen]:
    """All modules' inputs and outputs of one forward pass, in order of completion.

    That is many times what a pass itself holds, so it is made only to name a module, never to look whether any mixes.
    """
    with _traced(model) as calls:
        _losses(model, loss_fn, microbatch, weights)
    return calls


@contextmanager
def _traced(model: nn.Module) -> Iterator[list[Seen]]:
    calls: list[Seen] = []
    handles: list[Any] = []
    try:
        for name, module in model.named_modules():
            handles += _watch(module_label(name, module), module, calls)
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _watch(label: str, module: nn.Module, calls: list[Seen]) -> list[Any]:
    entries: list[list[Any]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        entries.append(_copies((args, kwargs)))

    def after(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        calls.append((label, entries.pop(), _copies(output)))

    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _copies(values: Any) -> list[Any]:
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(values)]


def _first_difference(before: list[Seen], after: list[Seen], unit: int, units: int) -> str | None:
    for (label, inputs, outputs), (_, inputs_after, outputs_after) in zip(before, after, strict=False):
        same_in = all(_others_equal(a, b, unit, units) for a, b in zip(inputs, inputs_after, strict=False))
        same_out = all(_others_equal(a, b, unit, units) for a, b in zip(outputs, outputs_after, strict=False))
        if same_in and not same_out:
            return label
    return None


def _others_equal(a: Any, b: Any, unit: int, units: int) -> bool:
    """Whether the rows of all other units agree, but for rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    if a.shape != b.shape:
        return False
    if a.dim() and a.shape[0] % units == 0:
        keep = [index for index in range(units) if index != unit]
        a, b = (x.unflatten(0, (units, -1))[keep] for x in (a, b))
    if not a.is_floating_point():
        return torch.equal(a, b)
    rounding = 16 * torch.finfo(a.dtype).eps * float(a.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=rounding, equal_nan=True)
