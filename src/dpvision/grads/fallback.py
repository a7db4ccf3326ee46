"""Per-unit gradients of any module at all, by running that one module again for each unit.

Shapes: U units, N rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpvision.checks import PrivacyError
from dpvision.grads.capture import Call
from dpvision.grads.layout import Layout
from dpvision.grads.probe import same_attributes
from dpvision.grads.shares import Kept, Share


def fallback_shares(call: Call, layout: Layout, units: int) -> dict[nn.Parameter, Share]:
    """Gradients of the parameters that the call's module answers for; all others are constants to it."""
    with warnings.catch_warnings(), _same_randomness(call), same_attributes(call.duty.module):
        # vmap tells about operations that it runs one by one; nobody can act on it.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        per_unit = _by_loop(call, layout, units) if call.duty.looped else _by_vmap_or_loop(call, layout, units)
    return {target.parameter: Kept(gradient) for target, gradient in zip(call.duty.targets, per_unit, strict=True)}


def _by_vmap_or_loop(call: Call, layout: Layout, units: int) -> list[Tensor]:
    state = torch.get_rng_state()
    try:
        return _by_vmap(call, layout, units)
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        # Control flow on values, a missing batching rule and the like: one unit at a time is as exact, only slower.
        torch.set_rng_state(state)
        return _by_loop(call, layout, units)


def _by_vmap(call: Call, layout: Layout, units: int) -> list[Tensor]:
    leaves, structure = _constants(call)
    batched = [index for index, share in enumerate(layout.inputs) if share is not None]
    values = tuple(target.parameter.detach() for target in call.duty.targets)

    def one_unit(inputs: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
        mine = list(leaves)
        for index, value in zip(batched, inputs, strict=True):
            mine[index] = value
        args, kwargs = tree_unflatten(mine, structure)

        def outputs(*parameters: Tensor) -> list[Tensor]:
            named = zip(call.duty.targets, parameters, strict=True)
            replaced = {name: value for target, value in named for name in target.names}
            # Names are given one by one: a parameter tied to a module below is that module's affair.
            return _wanted(call, functional_call(call.duty.module, replaced, args, kwargs, tie_weights=False))

        return vjp(outputs, *values)[1](gradients)

    inputs = [_by_unit(leaves[index], units) for index in batched]
    gradients = [_by_unit(gradient, units) for gradient in _present(call.gradients)]
    return [found.detach() for found in vmap(one_unit, randomness="different")(inputs, gradients)]


def _by_loop(call: Call, layout: Layout, units: int) -> list[Tensor]:
    parameters = [target.parameter for target in call.duty.targets]
    found = [parameter.detach().new_zeros((units, *parameter.shape)) for parameter in parameters]
    leaves, structure = _constants(call)
    for unit in range(units):
        mine = [
            leaf if share is None else _rows_of(leaf, unit, units)
            for leaf, share in zip(leaves, layout.inputs, strict=True)
        ]
        args, kwargs = tree_unflatten(mine, structure)
        with torch.enable_grad():
            outputs = _wanted(call, call.duty.module(*args, **kwargs))
        gradients = [_rows_of(gradient, unit, units) for gradient in _present(call.gradients)]
        gradients = torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)
        for total, gradient in zip(found, gradients, strict=True):
            if gradient is not None:
                total[unit] = gradient
    return found


def _constants(call: Call) -> tuple[list[Any], Any]:
    """The call's inputs, flattened and cut off from the graph, and how to put them together again."""
    leaves, structure = tree_flatten((call.args, call.kwargs))
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure


def _wanted(call: Call, output: Any) -> list[Tensor]:
    """The outputs on which the loss depends."""
    return [leaf for leaf, gradient in zip(tree_leaves(output), call.gradients, strict=True) if gradient is not None]


def _present(gradients: list[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _by_unit(x: Tensor, units: int) -> Tensor:
    return x.unflatten(0, (units, -1))


def _rows_of(x: Tensor, unit: int, units: int) -> Tensor:
    size = x.shape[0] // units
    return x[unit * size : (unit + 1) * size]


@contextmanager
def _same_randomness(call: Call) -> Iterator[None]:
    """Refuse a module that draws: run again, it would draw something else."""
    devices = {leaf.device for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)}
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        before = _generator_states(devices)
        yield
        after = _generator_states(devices)
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise PrivacyError(
            f"{call.duty.label} draws random numbers and owns parameters without a rule: run again for each unit, "
            "it would draw others. Move the dropout into a module outside of it, or set it to zero."
        )


def _generator_states(devices: set[torch.device]) -> list[Tensor]:
    cuda = [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"]
    return [torch.get_rng_state(), *cuda]
