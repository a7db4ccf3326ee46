"""Where paths of a network meet: residual additions, long skips and dense connections, found in its traced graph.

ScaleNorm's papers (Klause et al. 2022) name three activations of a residual block: ``V_F`` leaves the convolutional
path, ``V_R`` the residual path, and ``V_A`` is their sum. With ScaleNorm the block passes on the normalised sum, which
is ``V_AS`` here. The same names serve for a long skip of a segmentation network, where ``V_R`` is the skip.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, fx, nn

from dpvision.errors import ArgumentError
from dpvision.gradients.fast.rewrite import traced

Kind = Literal["residual block", "long skip", "dense connection"]
PATHS = ("V_F", "V_R", "V_A", "V_AS")
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_CONCATENATIONS = (torch.cat, torch.concat)
_NORMS = (nn.GroupNorm, nn.BatchNorm2d, nn.InstanceNorm2d, nn.LayerNorm)


@final
@dataclass(frozen=True, kw_only=True)
class Join:
    """One place where two paths meet.

    Attributes:
        name: the module whose forward joins them, or "long skip 1" and so on at the top of the model.
        kind: a long skip spans other joins; a dense connection concatenates, a residual block adds.
        nodes: the node of the graph for each of ``PATHS`` that exists: "V_AS" only with ScaleNorm.
    """

    name: str
    kind: Kind
    nodes: Mapping[str, str]


@final
class Joins:
    """The joins of one model, and a way to observe what flows along them.

    Args:
        model: a model whose graph can be traced: no control flow that depends on values.
        example: one batch of inputs, to learn shapes; its values do not matter.

    Raises:
        ArgumentError: the model can't be traced, or no two paths meet in it.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        graph = traced(model)
        if graph is None:
            raise ArgumentError(
                f"{type(model).__name__} can't be traced, so its residual paths are unknown: its forward depends on "
                "values, has hooks or owns parameters. Analyse norms of its layers instead (--what norms)."
            )
        self._graph = graph
        shapes = _shapes(graph, example)
        self.found: tuple[Join, ...] = tuple(_find(graph.graph, shapes, dict(graph.named_modules())))
        if not self.found:
            raise ArgumentError(f"{type(model).__name__} has no residual addition and no skip connection.")

    def observe(self, inputs: Tensor, seen: Callable[[Join, str, Tensor], None]) -> None:
        """Run the model once in evaluation mode and pass on every activation of every join.

        Args:
            inputs: one batch of inputs.
            seen: receives the join, the path and the activation of all rows.
        """
        wanted: dict[str, list[tuple[Join, str]]] = {}
        for join in self.found:
            for path, node in join.nodes.items():
                wanted.setdefault(node, []).append((join, path))

        def look(name: str, value: Any) -> None:
            for join, path in wanted.get(name, ()):
                seen(join, path, value)

        _run(self._graph, inputs, look)


def _run(graph: fx.GraphModule, inputs: Tensor, look: Callable[[str, Any], None]) -> None:
    """Interpret a graph in evaluation mode without gradients; every module's mode is restored."""
    modes = [(module, module.training) for module in graph.modules()]
    graph.eval()
    try:
        with torch.no_grad():
            _Looking(graph, look).run(inputs)
    finally:
        for module, training in modes:
            module.training = training


@final
class _Looking(fx.Interpreter):
    """Runs a graph and shows the value of each node."""

    def __init__(self, module: fx.GraphModule, look: Callable[[str, Any], None]) -> None:
        super().__init__(module)
        self._look = look

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        value = super().run_node(n)
        self._look(n.name, value)
        return value


def _shapes(graph: fx.GraphModule, example: Tensor) -> dict[str, torch.Size]:
    shapes: dict[str, torch.Size] = {}

    def look(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            shapes[name] = value.shape

    _run(graph, example, look)
    return shapes


def _find(graph: fx.Graph, shapes: Mapping[str, torch.Size], modules: Mapping[str, nn.Module]) -> Iterable[Join]:
    """Yield the joins in the order of the graph."""
    before: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        before[node] = frozenset(inputs).union(*(before[each] for each in inputs))
    joins: list[fx.Node] = []
    skips = 0
    for node in graph.nodes:
        operands = _operands(node, shapes)
        if operands is None:
            continue
        branch, residual = _ordered(operands, before, modules)
        inside = before[branch] - before[residual] - {residual}
        scope = _scope(node)
        if any(other in inside for other in joins):
            kind: Kind = "long skip"
        else:
            kind = "residual block" if _is_addition(node) else "dense connection"
        if not scope:
            skips += 1
        name = scope or f"{kind} {skips}"
        nodes = {"V_F": branch.name, "V_R": residual.name, "V_A": node.name}
        norm = _scale_norm(node, scope, modules)
        yield Join(name=name, kind=kind, nodes=nodes if norm is None else {**nodes, "V_AS": norm.name})
        joins.append(node)


def _operands(node: fx.Node, shapes: Mapping[str, torch.Size]) -> tuple[fx.Node, fx.Node] | None:
    """The two computed feature maps that a node joins; None if it joins nothing."""
    if _is_addition(node):
        given = node.args
    elif node.op == "call_function" and node.target in _CONCATENATIONS and isinstance(node.args[0], (list, tuple)):
        given = tuple(node.args[0])
    else:
        return None
    operands = [each for each in given if isinstance(each, fx.Node) and each.op not in ("get_attr", "placeholder")]
    sizes = [shapes.get(each.name) for each in operands]
    if len(operands) != 2 or len(given) != 2 or any(size is None or len(size) < 3 for size in sizes):
        return None
    return operands[0], operands[1]


def _is_addition(node: fx.Node) -> bool:
    function = node.op == "call_function" and node.target in _ADDITIONS
    return function or (node.op == "call_method" and node.target in ("add", "add_"))


def _ordered(
    operands: tuple[fx.Node, fx.Node], before: Mapping[fx.Node, frozenset[fx.Node]], modules: Mapping[str, nn.Module]
) -> tuple[fx.Node, fx.Node]:
    """(convolutional path, residual path): the first has more weighted layers after the paths part."""

    def layers(of: fx.Node, other: fx.Node) -> int:
        own = (before[of] | {of}) - (before[other] | {other})
        return sum(
            node.op == "call_module" and any(True for _ in modules[str(node.target)].parameters()) for node in own
        )

    first, second = operands
    return (first, second) if layers(first, second) >= layers(second, first) else (second, first)


def _scope(node: fx.Node) -> str:
    """The module whose own forward has this node; "" for the model itself."""
    stack = [name for name in node.meta.get("nn_module_stack", {}) if name]
    return stack[-1] if stack else ""


def _scale_norm(node: fx.Node, scope: str, modules: Mapping[str, nn.Module]) -> fx.Node | None:
    """The norm that the same forward applies to the sum, if there is one."""
    for user in node.users:
        if user.op == "call_module" and isinstance(modules.get(str(user.target)), _NORMS):
            parent = str(user.target).rpartition(".")[0]
            if parent == scope:
                return user
    return None
