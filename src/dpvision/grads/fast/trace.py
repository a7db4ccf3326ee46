"""A model's forward pass written down as a graph, where that is certain to mean the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import torch
from torch import fx, nn
from torch.nn.modules import module as torch_modules

from dpvision.grads.probe import same_attributes

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def traced(model: nn.Module) -> fx.GraphModule | None:
    """The model as a graph of its own leaf modules, or ``None`` where the graph could be something else.

    A graph freezes what Python decided on the way. So there is none for a model that branches on values, draws random
    numbers in Python, writes into itself, has hooks, or owns parameters at its root.
    """
    if _has_hooks(model) or any(True for _ in model.parameters(recurse=False)) or not any(model.children()):
        return None
    before = _outside_state()
    try:
        with same_attributes(model):
            kept = list(_attributes(model))
            graphs = [_Tracer().trace(model) for _ in range(2)]
            after = list(_attributes(model))
            untouched = len(kept) == len(after) and all(a == b for a, b in zip(kept, after, strict=True))
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, IndexError, KeyError):
        return None  # not an error: such a model has no graph, and runs as its author wrote it
    if before != _outside_state() or not untouched or str(graphs[0]) != str(graphs[1]):
        return None
    return fx.GraphModule(model, graphs[0])


@final
class _Tracer(fx.Tracer):
    """Goes into containers only: whatever owns parameters, has no children or comes with PyTorch stays whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002 (fx names them)
        container = type(m) in (nn.Sequential, nn.ModuleList, nn.ModuleDict) or not type(m).__module__.startswith(
            "torch."
        )
        owns = any(True for _ in m.parameters(recurse=False)) or any(True for _ in m.buffers(recurse=False))
        return not container or owns or not any(True for _ in m.children())


_OWN: Final = frozenset(vars(nn.Module()))
"""What every module has, whoever wrote it."""


def frozen_values(model: nn.Module) -> tuple[Any, ...]:
    """What a graph would freeze: when any of it changes, it must be made again.

    Plain values and containers of them by value, all else (buffers, tensors, objects, hooks) by identity. What changes
    inside an object of the user's own is not seen.
    """
    return tuple(
        (name, type(module), _has_hooks_itself(module), *_own_values(module)) for name, module in model.named_modules()
    )


def _own_values(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    yield from ((name, _frozen(value)) for name, value in vars(module).items() if name not in _OWN)
    yield from ((name, id(buffer)) for name, buffer in module._buffers.items())


def _frozen(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((_frozen(key), _frozen(item)) for key, item in value.items())
    return id(value)


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for module in model.modules():
        for table in (vars(module), module._buffers, module._parameters, module._modules):
            yield from ((name, _frozen(value)) for name, value in table.items())


def _has_hooks(model: nn.Module) -> bool:
    return any(getattr(torch_modules, name, None) for name in _GLOBAL_HOOKS) or any(
        _has_hooks_itself(module) for module in model.modules()
    )


def _has_hooks_itself(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in _HOOKS)


def _outside_state() -> tuple[Any, ...]:
    """The generators that a forward pass might have drawn from while it was written down."""
    numbers: Any = np.random.get_state()
    return random.getstate(), numbers[1].tobytes(), numbers[2], torch.get_rng_state().numpy().tobytes()
