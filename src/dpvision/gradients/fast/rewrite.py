"""Trace a model into a graph, and put fast layers into it: the fused copy.

Chains around a GroupNorm become one pass, 3×3 convolutions Winograd's, and some small layers call kernels. The model
itself stays as it is; the layers of the copy hold the same parameters. A model whose graph could mean something else
than its code has no fused copy, and neither has one with nothing to gain.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules import module as torch_modules

from dpvision.gradients.fast.fused_conv import CachedWSConv2d, WinogradConv2d, WinogradWSConv2d
from dpvision.gradients.fast.fused_norm import FusedNorm
from dpvision.gradients.fast.small_layers import FastMaxPool, FastScattering, FastTanh, NarrowLinear, is_max_pool
from dpvision.gradients.per_unit import attributes_restored
from dpvision.gradients.rules import rule_for
from dpvision.kernels.norm_act import Chain
from dpvision.models.layers import WSConv2d
from dpvision.models.scattering import Scattering

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def traced(model: nn.Module) -> fx.GraphModule | None:
    """Return the model as a graph of its own leaf modules, or None where the graph could mean something else.

    A graph freezes what Python decided while it was traced. So there is none for a model that branches on values, draws
    random numbers in Python, writes into itself, has hooks, or owns parameters at its root.
    """
    if _has_hooks(model) or [*model.parameters(recurse=False)] or not any(model.children()):
        return None
    before = _outside_state()
    try:
        with attributes_restored(model):
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
    """Traces containers only: modules that own parameters, have no children or belong to PyTorch stay whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002 (fx names them)
        containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        container = type(m) in containers or not type(m).__module__.startswith("torch.")
        owned = (*m.parameters(recurse=False), *m.buffers(recurse=False))
        return not container or bool(owned) or not any(True for _ in m.children())


_OWN: Final = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def frozen_values(model: nn.Module) -> tuple[Any, ...]:
    """Return everything that a graph of the model freezes: when any of it changes, the graph must be traced again.

    Plain values, containers of them and objects of the user's own are compared by value, all else (buffers, functions)
    by identity.
    """
    return tuple((name, *_code_of(type(module)), *_own_values(module)) for name, module in model.named_modules())


def _code_of(kind: type[nn.Module]) -> tuple[Any, Any]:
    """Return a class and what its methods depend on, which a user may replace too."""
    if _is_ours(kind):
        return kind, inspect.getattr_static(kind, "forward", None)  # that of compiled modules can't be asked for
    members = (member for part in kind.__mro__ if not _is_ours(part) for member in vars(part).items())
    return kind, tuple((name, _member(value)) for name, value in members if name not in _NOT_IN_A_CALL)


def _is_ours(kind: type) -> bool:
    return kind.__module__ == "builtins" or kind.__module__.startswith(("torch.", "dpvision."))


_NOT_IN_A_CALL: Final = frozenset({"__init__", "__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"})
_METHOD_DEPTH: Final = 3  # of what classes and globals hold: they are looked at in every step


def _member(value: Any) -> Any:
    """Return what a method, property or value of a class depends on."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    return frozen_callable(value, _METHOD_DEPTH)


def frozen_callable(function: Any, depth: int = 0) -> Any:
    """Return everything that a call of a function depends on: code, defaults, closure, bound object, globals.

    Globals are those that the code names: plain values, and containers, functions and objects of the user's own code.

    Args:
        function: a function, method, partial, module or other callable object.
        depth: how many functions and objects it is inside of; beyond a few, only its identity counts.
    """
    if depth >= _DEEPEST:
        return id(function)
    if isinstance(function, functools.partial):
        parts = (function.args, function.keywords)
        return frozen_callable(function.func, depth + 1), *(_frozen(part, depth + 1) for part in parts)
    if isinstance(function, nn.Module):
        return id(function), frozen_values(function)
    if isinstance(function, types.MethodType):
        return frozen_callable(function.__func__, depth + 1), _frozen(function.__self__, depth + 1)
    if isinstance(function, types.FunctionType):
        outside = _globals_of(function, max(depth + 1, _METHOD_DEPTH))
        settings = (_frozen(part, depth + 1) for part in (function.__defaults__, function.__kwdefaults__))
        cells = (_cell(cell, depth + 1) for cell in function.__closure__ or ())
        return function.__code__, *settings, *cells, outside
    return _frozen(function, depth)


def _globals_of(function: types.FunctionType, depth: int) -> tuple[Any, ...]:
    """Return the globals and the environment variables that a function may read."""
    names, held = function.__code__.co_names, function.__globals__
    if "site-packages" in function.__code__.co_filename:  # of libraries, which keep caches of their own
        return tuple((name, held[name]) for name in names if name in held and isinstance(held[name], _PLAIN))
    variables = tuple(os.environ.items()) if "environ" in names or "getenv" in names else ()
    return *((name, _frozen(held[name], depth)) for name in names if name in held), variables


def _cell(cell: Any, depth: int) -> Any:
    try:
        content = cell.cell_contents
    except ValueError:
        return None  # empty
    return _frozen(content, depth)


def _own_values(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    yield from ((name, tuple(map(id, vars(module).get(name, {}).values()))) for name in _HOOKS)
    yield from ((name, _frozen(value)) for name, value in vars(module).items() if name not in _OWN)
    yield from ((name, id(buffer)) for name, buffer in module._buffers.items())


_PLAIN: Final = (bool, int, float, str, bytes, complex, type(None))
_DEEPEST: Final = 6  # objects inside of objects
_LARGEST: Final = 4096  # items of a container that are looked at in every step: more are data, not settings


def _frozen(value: Any, depth: int = 0) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > _LARGEST:
        return id(value), len(value)
    if depth < _DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return type(value), tuple(_frozen(item, depth + 1) for item in value)
    if depth < _DEEPEST and isinstance(value, dict):
        return tuple((_frozen(key, depth + 1), _frozen(item, depth + 1)) for key, item in value.items())
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if depth < _DEEPEST and isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return id(value) if isinstance(value, types.FunctionType) else None, frozen_callable(value, depth + 1)
    if depth < _DEEPEST and _is_own_object(value):
        return id(value), tuple((name, _frozen(item, depth + 1)) for name, item in _attributes_of(value))
    return id(value)


def _is_own_object(value: Any) -> bool:
    """Return whether a value is an object with settings of its own: no module, function or class, nothing of torch."""
    kind = type(value)
    opaque = isinstance(value, (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType))
    return not opaque and not kind.__module__.startswith(("torch", "numpy", "builtins", "logging", "threading"))


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held = [(name, getattr(value, name)) for name in slots if isinstance(name, str) and hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).items(), *held]


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for module in model.modules():
        for table in (vars(module), module._buffers, module._parameters, module._modules):
            yield from ((name, _frozen(value)) for name, value in table.items())


def _has_hooks(model: nn.Module) -> bool:
    return any(getattr(torch_modules, f"_global{name}", None) for name in _HOOKS) or any(
        _has_hooks_itself(module) for module in model.modules()
    )


def _has_hooks_itself(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in _HOOKS)


def _outside_state() -> tuple[Any, ...]:
    """The state of the generators that a forward pass might have drawn from while it was traced."""
    numbers: Any = np.random.get_state()
    return random.getstate(), numbers[1].tobytes(), numbers[2], torch.get_rng_state().numpy().tobytes()


_LAYERS: Final[dict[type[nn.Module], str]] = {
    nn.ReLU: "relu",
    nn.Mish: "mish",
    nn.Tanh: "tanh",
    nn.SiLU: "silu",
    nn.SELU: "selu",
    nn.ELU: "elu",
}
_FUNCTIONS: Final[dict[Callable[..., Any], str]] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.mish: "mish",
    F.silu: "silu",
    F.selu: "selu",
    torch.tanh: "tanh",
}
_IN_PLACE: Final = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem)
_SUMS: Final = (operator.add, operator.iadd, torch.add)


def fused_copy(model: nn.Module, *, compiled: bool = False) -> fx.GraphModule | None:
    """Return the model's graph with fast layers in it, or None where there is no graph or nothing to gain.

    Args:
        model: Any module; it is not changed, and shares its parameters with the copy.
        compiled: Fuse norms by ``torch.compile``, instead of all layers by kernels.
    """
    graph_module = traced(model)
    if graph_module is None or any(_writes_for_others(graph_module, node) for node in graph_module.graph.nodes):
        return None
    return _fused(graph_module, compiled=compiled)


def fused_graph(network: fx.GraphModule, *, compiled: bool = False) -> fx.GraphModule | None:
    """Return a copy of a proved graph with fast layers in it, or None where nothing is to gain.

    Args:
        network: the network of a ``ProvedGraph``; it is not changed, and shares its parameters with the copy.
        compiled: as for ``fused_copy``.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(network.graph, {}))
    if any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in graph.nodes):
        return None
    return _fused(fx.GraphModule(network, graph), compiled=compiled)


def _fused(graph_module: fx.GraphModule, *, compiled: bool) -> fx.GraphModule | None:
    made = _fuse_norms(graph_module, compiled=compiled)
    if not compiled:
        made += _replace_layers(graph_module)
    if not made:
        return None
    graph_module.graph.lint()
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module


def _replace_layers(graph_module: fx.GraphModule) -> int:
    made = 0
    for node in list(graph_module.graph.nodes):
        module = _module_of(graph_module, node)
        if module is None or len(node.args) != 1 or node.kwargs:
            continue
        layer = _fused_layer_for(module)
        if layer is not None:
            node.target = f"dpvision_layer_{made}"
            graph_module.add_submodule(node.target, layer)
            made += 1
    return made


def _fused_layer_for(module: nn.Module) -> nn.Module | None:
    """A faster layer that computes the same, if there is one."""
    if (window := FastMaxPool.window_of(module)) is not None:
        return FastMaxPool(window)
    if type(module) is nn.Tanh:
        return FastTanh()
    if type(module) is Scattering:
        return FastScattering(module)
    if not _has_rule(module):
        return None
    if isinstance(module, nn.Conv2d) and WinogradConv2d.fits(module):
        return WinogradConv2d(module)
    if isinstance(module, WSConv2d) and WinogradWSConv2d.fits(module):
        return WinogradWSConv2d(module)
    if type(module) is WSConv2d:
        return CachedWSConv2d(module)
    if type(module) is nn.Linear and NarrowLinear.fits(module):
        return NarrowLinear(module)
    return None


def _fuse_norms(graph_module: fx.GraphModule, *, compiled: bool) -> int:
    made = 0
    for node in list(graph_module.graph.nodes):
        norm = _module_of(graph_module, node)
        if type(norm) is nn.GroupNorm and len(node.args) == 1 and not node.kwargs and _has_rule(norm):
            chain, inputs, last = _chain_around(graph_module, node, norm)
            target = f"dpvision_norm_{made}"
            graph_module.add_submodule(target, FusedNorm(norm, chain, compiled=compiled))
            _replace(graph_module.graph, inputs, last, target)
            made += 1
    return made


def _chain_around(
    graph_module: fx.GraphModule, node: fx.Node, norm: nn.GroupNorm
) -> tuple[Chain, tuple[Any, ...], fx.Node]:
    """The chain around a GroupNorm, its inputs, and the node whose value it gives."""
    first, last = node, node
    activation, norm_first, pool = "none", True, False
    after, before = _only_user(node), node.args[0]
    if after is not None and (found := _activation(graph_module, after)):
        activation, last = found, after
    elif isinstance(before, fx.Node) and _only_user(before) is node and (found := _activation(graph_module, before)):
        activation, norm_first, first = found, False, before
    after = _only_user(last)
    if after is not None and is_max_pool(_module_of(graph_module, after), kernel=2, stride=2, padding=0):
        pool, last = True, after
    inputs = [first.args[0]]
    after = _only_user(last)
    if after is not None and (other := _other_summand(after, last)) is not None:
        inputs.append(other)
        last = after
    return Chain(norm.num_groups, norm.eps, activation, norm_first, pool), tuple(inputs), last


def _replace(graph: fx.Graph, inputs: tuple[Any, ...], last: fx.Node, target: str) -> None:
    """Let one layer give the value of ``last``, and remove the nodes that are not needed any more."""
    with graph.inserting_before(last):
        fused = graph.call_module(target, inputs)
    last.replace_all_uses_with(fused)
    _erase_back(graph, last, {*inputs})


def _erase_back(graph: fx.Graph, node: fx.Node, keep: set[Any]) -> None:
    """Remove a node without users, and the nodes that only it used."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for before in inputs:
        if before not in keep and not before.users:
            _erase_back(graph, before, keep)


def _writes_for_others(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node writes in place into a value that another node reads too: then their order would matter."""
    module = _module_of(graph_module, node)
    name = str(node.target)
    in_place = bool(getattr(module, "inplace", False)) or bool(node.kwargs.get("inplace", False))
    if node.op == "call_method":
        in_place |= name.endswith("_") and not name.endswith("__")
    if node.op == "call_function":
        called = getattr(node.target, "__name__", "")
        in_place |= node.target in _IN_PLACE or "out" in node.kwargs
        in_place |= called.endswith("_") and not called.endswith("__")
    written = node.args[0] if node.args else None
    return in_place and (not isinstance(written, fx.Node) or len(written.users) != 1 or written.op == "placeholder")


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation(graph_module: fx.GraphModule, node: fx.Node) -> str | None:
    module = _module_of(graph_module, node)
    if module is not None:
        name = _LAYERS.get(type(module))
        return None if isinstance(module, nn.ELU) and module.alpha != 1 else name
    if node.op == "call_function" and len(node.args) == 1 and set(node.kwargs) <= {"inplace"}:
        return _FUNCTIONS.get(node.target) if callable(node.target) else None
    return "relu" if node.op == "call_method" and node.target in ("relu", "relu_") and len(node.args) == 1 else None


def _other_summand(node: fx.Node, one: fx.Node) -> fx.Node | None:
    """The other summand, if the node is a sum of ``one`` and another node."""
    if node.op != "call_function" or node.target not in _SUMS or len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    other = right if left is one else left
    if not isinstance(other, fx.Node) or other is one:
        return None
    # An in-place sum into something else's memory must stay what it is.
    return None if node.target is operator.iadd and left is not one else other


def _module_of(graph_module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _has_rule(module: nn.Module) -> bool:
    """Whether the layer's gradient has a rule: a type that has none does not say what it computes."""
    return rule_for(module) is not None
