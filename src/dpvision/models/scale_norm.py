"""ScaleNorm for a user's own model: a norm after every residual addition in a module's forward.

Residual additions are not modules, so each forward that adds is traced by ``torch.fx`` and written again with a call of
a GroupNorm after the sum. What a trace cannot show, such as control flow that depends on data, is left alone and named.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from dpvision.errors import ArgumentError

_FUNCTIONS = (operator.add, operator.iadd, torch.add)
_METHODS = ("add", "add_")


@final
@dataclass(frozen=True, kw_only=True)
class Change:
    """One change to a model, or one that could not be made: to which module, what, and why."""

    module: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.what} ({self.why})"


@final
class _OwnForward(fx.Tracer):
    """Traces one module's own forward; every module that it calls stays a call."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        """Nothing is looked into."""
        return True


def add_scale_norms(model: nn.Module, example: Tensor, *, groups: int = 32) -> tuple[nn.Module, list[Change]]:
    """Insert GroupNorm after each addition of two feature maps; returns the model and what was put where.

    Works in place. Only modules whose own forward adds are rewritten, as ``torch.fx.GraphModule``; all names of
    parameters stay. A forward that can't be traced (data-dependent control flow) is left as it is, and listed.
    """
    changes: list[Change] = []
    found = False
    calls = _record_calls(model, example)
    for name, module in list(model.named_modules()):
        if name not in calls or not any(module.children()):
            continue
        graph = _trace(module)
        if isinstance(graph, str):
            changes.append(Change(module=name, what="left as it is, without ScaleNorm", why=graph))
            continue
        traced = _as_graph_module(module, graph)
        added = _insert_norms(traced, calls[name], groups)
        if added:
            found = True
            model = _put(model, module, traced)
            why = "ScaleNorm: activations keep mean 0 and variance 1 after a residual addition"
            changes += [Change(module=f"{name}.{child}".lstrip("."), what=what, why=why) for child, what in added]
    if not found:
        hints = " ".join(f"{change.module or 'The model'}: {change.why}." for change in changes)
        raise ArgumentError(f"scale_norm found no residual addition in any forward. Add the norms by hand. {hints}")
    return model, changes


def _record_calls(model: nn.Module, example: Tensor) -> dict[str, tuple[Any, ...]]:
    """The inputs of each module in one forward pass in evaluation mode; calls with keywords are left out."""
    calls: dict[str, tuple[Any, ...]] = {}

    def recorder(name: str) -> Any:
        def record(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if not keywords:
                calls.setdefault(name, inputs)

        return record

    handles = [m.register_forward_pre_hook(recorder(name), with_kwargs=True) for name, m in model.named_modules()]
    modes = _eval_mode(model)
    try:
        with torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()
        _restore(modes)
    return calls


def _eval_mode(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Evaluation mode, so that trying a model out moves no statistics; returns every module's own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    return modes


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _trace(module: nn.Module) -> fx.Graph | str:
    """The graph of a module's own forward, or why it can't be written as one."""
    try:
        graph = _OwnForward().trace(module)
    except Exception as error:  # noqa: BLE001 - a user's forward may raise anything when it is given symbols.
        return (
            f"its forward can't be traced, {type(error).__name__}: {str(error).splitlines()[0] if str(error) else '-'}"
        )
    if any("training" in node.kwargs for node in graph.nodes):
        return "its forward reads self.training, which tracing would freeze"
    return graph


def _insert_norms(traced: fx.GraphModule, inputs: tuple[Any, ...], groups: int) -> list[tuple[str, str]]:
    """Put a norm after each residual addition; returns (its name, what it is) for each."""
    modes = _eval_mode(traced)
    with torch.no_grad():
        ShapeProp(traced).propagate(*inputs)
    _restore(modes)
    graph, added = traced.graph, []
    for node in [node for node in graph.nodes if _is_residual_addition(node)]:
        meta: TensorMetadata = node.meta["tensor_meta"]
        norm = nn.GroupNorm(math.gcd(groups, meta.shape[1]), meta.shape[1], dtype=meta.dtype)
        child = _free_name(traced)
        traced.add_module(child, norm.to(_device_of(traced)).train(traced.training))
        with graph.inserting_after(node):
            call = graph.call_module(child, (node,))
        node.replace_all_uses_with(call, delete_user_cb=lambda user, call=call: user is not call)
        added.append((child, f"GroupNorm({norm.num_groups} groups, {norm.num_channels} channels) after an addition"))
    traced.recompile()
    return added


def _is_residual_addition(node: fx.Node) -> bool:
    """Is it the sum of two feature maps of the same shape, both of them computed?"""
    adds = (node.op == "call_function" and node.target in _FUNCTIONS) or (
        node.op == "call_method" and node.target in _METHODS
    )
    if not adds or len(node.args) != 2:
        return False
    operands = [arg for arg in node.args if isinstance(arg, fx.Node) and arg.op != "get_attr"]
    shapes = [getattr(arg.meta.get("tensor_meta"), "shape", None) for arg in operands]
    return len(shapes) == 2 and shapes[0] is not None and shapes[0] == shapes[1] and len(shapes[0]) > 2


def _free_name(module: nn.Module) -> str:
    """The first of scale_norm1, scale_norm2 … that the module does not have."""
    taken, index = dict(module.named_children()), 1
    while f"scale_norm{index}" in taken:
        index += 1
    return f"scale_norm{index}"


def _device_of(module: nn.Module) -> torch.device | None:
    return next((parameter.device for parameter in module.parameters()), None)


def _as_graph_module(module: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """The module with the graph as its forward, with all of its children and parameters under their names."""
    new = fx.GraphModule(module, graph, type(module).__name__)
    # GraphModule drops what the forward does not use; names in the state dict should stay.
    for name, child in module.named_children():
        if not hasattr(new, name):
            new.add_module(name, child)
    for name, parameter in module.named_parameters(recurse=False):
        if not hasattr(new, name):
            new.register_parameter(name, parameter)
    new.training = module.training
    return new


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Replace a module at each of its places."""
    if model is old:
        return new
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
    return model
