"""The graph of a user's own model and loss, with the proof that no row influences another; the graph is what runs.

``prove`` traces forward and loss with ``torch.export``, once, on tensors without data and with a symbolic number of
rows. It then follows the rows through every operation (``batch_axis``), and writes the graph down again as a network
of layers whose per-unit gradients have rules. A step executes this network, and never the Python code again: what the
code would do in another call (another branch, a random choice, a stored value) cannot reach the private rows.

The network shares the model's parameters. An operation that joins parameters and rows and is not a layer with a rule
becomes a small module of its own (a segment), which the engine recomputes for each unit. A computation of weights from
weights, such as weight norm, belongs to the segment that uses it.
"""

from __future__ import annotations

import builtins
import logging
import operator
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpvision.errors import ArgumentError, DPVisionError, PrivacyError, brief
from dpvision.gradients.batch_axis import (
    FREE,
    Axis,
    Call,
    MixesRows,
    Rows,
    State,
    Unset,
    arguments_of,
    draws_random,
    follow,
    follow_getitem,
    is_symbolic,
    operation_name,
    written,
)
from dpvision.gradients.per_unit import LossFunction, losses_of
from dpvision.privacy.values import Microbatch

_ROWS_TRACED: Final = 7  # of the example; the graph holds for every number from 2 on
LEAST_ROWS: Final = 2
_NOT_USERS: Final = tuple(
    str(folder)
    for file, levels in ((Path(torch.__file__), 0), (Path(__file__), 1))
    for folder in (file.parents[levels], file.resolve().parents[levels])  # a folder may be reached by a link
)
"""Where the code is that is not the user's: torch, and this package."""
_REMEDY: Final = "Treat each row by itself."


@final
@dataclass(frozen=True, eq=False)
class ProvedGraph:
    """A model and its loss as a network in which no row influences another.

    Attributes:
        network: from the tensors of inputs and targets, in their order, to one loss per row; it holds the parameters of
            the model.
        operations: number of operations that were followed.
        checked: numbers of units for which the code was compared with the network.
    """

    network: fx.GraphModule
    operations: int
    checked: set[int] = field(default_factory=set)

    def microbatch(self, microbatch: Microbatch) -> Microbatch:
        """Return a micro-batch as the network takes it: all tensors of inputs and targets by position.

        A single row gets a second one without weight: the graph holds for two rows and more.
        """
        tensors, weights_UR = tuple(_tensors(microbatch)), microbatch.row_weights_UR
        if microbatch.rows < LEAST_ROWS:
            tensors = tuple(torch.cat([x, x]) for x in tensors)
            weights_UR = torch.cat([weights_UR, torch.zeros_like(weights_UR)])
        return Microbatch(tensors, tensors[0], weights_UR)


@contextmanager
def clear_refusals() -> Iterator[None]:
    """Turn what a user's code raises into one line in our words."""
    try:
        yield
    except DPVisionError:
        raise
    except Exception as error:
        place, remedy = _place_in_user_code(error), "Use it on such rows outside of dpvision first."
        if "reentrant" in str(error):
            remedy = "Use checkpoint(..., use_reentrant=False)."
        frames = traceback.extract_tb(error.__traceback__)
        theirs = frames[-1].filename.startswith(_NOT_USERS) or not str(error)
        said = "" if theirs else f": {brief(str(error).rstrip('.'))}"
        raise ArgumentError(
            f"the model or the loss{place} can't be run on rows of this shape and type ({type(error).__name__}{said}). "
            f"{remedy}"
        ) from error


def losses_as_they_are(outputs: Any, targets: Any) -> Any:
    """Return the outputs of a proved network, which are the losses."""
    del targets
    return outputs


_NOTED: ContextVar[list[Tensor] | None] = ContextVar("noted losses", default=None)


@contextmanager
def losses_noted() -> Iterator[list[Tensor]]:
    """Collect the losses of each micro-batch that a step computes in the block, padding at the end. Private."""
    noted: list[Tensor] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def noted_losses(outputs: Any, targets: Any) -> Any:
    """Return the outputs of a proved network as ``losses_as_they_are`` does, in a step."""
    noted = _NOTED.get()
    if noted is not None:
        noted.append(outputs.detach())
    return losses_as_they_are(outputs, targets)


def _tensors(microbatch: Microbatch) -> list[Tensor]:
    return [leaf for leaf in tree_flatten((microbatch.inputs, microbatch.targets))[0] if isinstance(leaf, Tensor)]


@final
class _Step(nn.Module):
    """Forward and loss as one module of the tensors of inputs and targets."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = [loss_fn]  # in a list: a loss that is a module must not become a part of this one
        self._leaves, self._structure = tree_flatten((microbatch.inputs, microbatch.targets))
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self._places = [
            place
            for place, leaf in enumerate(tree_flatten((microbatch.inputs, microbatch.targets))[0])
            if isinstance(leaf, Tensor)
        ]

    def forward(self, *tensors: Tensor) -> Any:
        """Return the losses."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        inputs, targets = tree_unflatten(leaves, self._structure)
        return losses_of(self.model, self._loss_fn[0], inputs, targets)


def prove(model: nn.Module, loss_fn: LossFunction, microbatch: Microbatch) -> ProvedGraph:
    """Trace a model with its loss and prove that no row influences another.

    Args:
        model: the model, in the mode in which it trains.
        loss_fn: from outputs and targets to one loss per row.
        microbatch: rows whose shapes and types are taken; their values are not read.

    Returns:
        The network to run in the place of model and loss.

    Raises:
        PrivacyError: the code can't be traced, writes into its state, or has an operation that lets rows meet or can't
            be followed; the message names module, operation and remedy.

    Guarantee: each loss of the network depends on its own row, on the weights and on random numbers that are drawn for
    it, and on nothing else, for every number of rows from 2 on.
    """
    step = _Step(model, loss_fn, microbatch)
    program = _exported(step, _tensors(microbatch))
    graph = _inlined(program)
    return _Builder(step, program, graph).build()


def _exported(step: _Step, tensors: Sequence[Tensor]) -> ExportedProgram:
    """Trace the step for any number of rows, or refuse it in our own words."""
    rows = Dim("rows", min=LEAST_ROWS)
    examples = tuple(x.new_zeros((_ROWS_TRACED, *x.shape[1:])) for x in tensors)
    modes = {id(module): module.training for module in step.model.modules()}
    step.train(step.model.training)
    for module in step.model.modules():
        module.training = modes[id(module)]
    with _silenced(), _symbolic_len(), _no_outside_state(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        try:
            with _reads_of_values() as read:
                program = export(step, examples, dynamic_shapes=(tuple({0: rows} for _ in examples),), strict=False)
        except PrivacyError:
            raise
        except Exception as error:
            raise PrivacyError(_why_not_traced(error)) from error
    if read:  # and the code went on, in an except block
        raise PrivacyError(_why_not_traced(read[0]))
    return program


@contextmanager
def _reads_of_values() -> Iterator[list[Exception]]:
    """Collect the errors that the tracer raises where code reads a value, also those that the code catches itself.

    The graph would freeze what the code does in its except block. As with clocks, that is about honesty.
    """
    found: list[Exception] = []
    kinds: tuple[Any, ...] = (
        GuardOnDataDependentSymNode,
        DataDependentOutputException,
        DynamicOutputShapeException,
    )
    usual = [kind.__init__ for kind in kinds]

    def noted(init: Callable[..., None]) -> Callable[..., None]:
        def create(error: Exception, *args: Any, **settings: Any) -> None:
            init(error, *args, **settings)
            found.append(error)

        return create

    for kind, init in zip(kinds, usual, strict=True):
        kind.__init__ = noted(init)
    try:
        yield found
    finally:
        for kind, init in zip(kinds, usual, strict=True):
            kind.__init__ = init


def _why_not_traced(error: Exception) -> str:
    """Say in our words why code can't be traced, and where."""
    text = f"{type(error).__name__} {error}"
    place = _place_in_user_code(error)
    if "onstraints violated" in text or "specialized" in text or "onstraintViolation" in text:
        return (
            f"the model or the loss{place} treats batches of different sizes differently, so a row could depend on how "
            "many others there are. Use x.shape[0] for sizes only, not in conditions."
        )
    if "data-dependent" in text or "DataDependent" in text or "_local_scalar" in text:
        return (
            f"the model or the loss{place} branches on values or turns them into Python numbers, so a row could decide "
            "for others. Use torch.where and tensor operations."
        )
    return (
        f"the model or the loss{place} can't be traced ({type(error).__name__}), so it can't be proved that rows do "
        "not influence each other. Use torch operations on tensors only."
    )


def _place_in_user_code(error: BaseException) -> str:
    """Return the last line of the traceback that is neither torch's nor ours, as ' in FILE, line N'."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_NOT_USERS, "<")):
            return f" in {Path(frame.filename).name}, line {frame.lineno},"
    return ""


@contextmanager
def _silenced() -> Iterator[None]:
    """Keep what the tracer logs and warns about away from users: a refusal is one line."""
    logger = logging.getLogger("torch")
    children = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch")]
    levels = [(each, each.level, each.disabled) for each in (logger, *children)]
    try:
        for each, _, _ in levels:
            each.disabled = True
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level, disabled in levels:
            each.level, each.disabled = level, disabled


@contextmanager
def _symbolic_len() -> Iterator[None]:
    """Let ``len(x)`` of a tensor be ``x.shape[0]``: a symbolic size, where Python's own len demands a plain number."""
    plain = builtins.len

    def rows_or_items(value: Any) -> Any:
        return value.shape[0] if isinstance(value, Tensor) and value.dim() else plain(value)

    builtins.len = rows_or_items  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        builtins.len = plain


_CLOCKS: Final = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")


@contextmanager
def _no_outside_state() -> Iterator[None]:
    """Refuse code that draws random numbers outside of torch, or reads a clock, while it is traced.

    The graph would freeze what it drew. This is about honesty, not about privacy: the graph is private in any case.
    """
    import sys

    clocks = {name: getattr(time, name) for name in _CLOCKS}
    read: list[str] = []

    def watched(name: str) -> Callable[[], Any]:
        def clock() -> Any:
            if not sys._getframe(1).f_code.co_filename.startswith((*_NOT_USERS, "<")) and _is_own_frame():
                read.append(name)
            return clocks[name]()

        return clock

    def _is_own_frame() -> bool:
        return "site-packages" not in (name := sys._getframe(2).f_code.co_filename) and "/lib/python" not in name

    python, numpy = random.getstate(), np.random.get_state()
    for name in _CLOCKS:
        setattr(time, name, watched(name))
    try:
        yield
    finally:
        for name, clock in clocks.items():
            setattr(time, name, clock)
    after: Any = np.random.get_state()
    before: Any = numpy
    if read or random.getstate() != python or before[2] != after[2] or not np.array_equal(before[1], after[1]):
        random.setstate(python)
        np.random.set_state(numpy)
        source = "a clock" if read else "random numbers of Python or NumPy"
        raise PrivacyError(
            f"the model or the loss reads {source}, which a traced graph would freeze. Draw random numbers with torch, "
            "one for each row."
        )


def _inlined(program: ExportedProgram) -> fx.Graph:
    """Return the graph with its no_grad blocks written out: what they return is detached."""
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    _inline_into(graph, program.graph_module, values, [])
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _has_effect(node.target):
            graph.erase_node(node)  # not used by anything: libraries prepare masks that they do not need
    graph.lint()
    return graph


def _has_effect(target: Any) -> bool:
    """Return whether an operation does more than return a value: writes, or draws random numbers."""
    tags = getattr(target, "tags", ())
    return bool(written(target)) or torch.Tag.nondeterministic_seeded in tags


def _inline_into(graph: fx.Graph, source: fx.GraphModule, values: dict[fx.Node, Any], given: list[Any]) -> Any:
    arguments = iter(given)
    for node in source.graph.nodes:
        if node.op == "placeholder" and given:
            values[node] = next(arguments)
        elif node.op == "output":
            results = fx.map_arg(node.args[0], lambda n: values[n])
            if not given:
                graph.output(results)
            return results
        elif node.op == "get_attr" and isinstance(_attribute(source, node.target), fx.GraphModule):
            values[node] = _attribute(source, node.target)
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled":
            enabled, block, *rest = node.args
            inside = [values[each] if isinstance(each, fx.Node) else each for each in rest]
            body = values[block]
            results = _inline_into(graph, body, values, inside) if inside else None
            if results is None:
                raise PrivacyError("a block without gradients takes nothing, so it can't be followed. Remove it.")
            values[node] = results if enabled else tuple(_detached(graph, each) for each in results)
        elif node.op == "call_function" and node.target is operator.getitem and isinstance(values[node.args[0]], tuple):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            values[node] = graph.node_copy(node, lambda n: values[n])
    return None


def _detached(graph: fx.Graph, node: Any) -> Any:
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
        return node
    made = graph.call_function(torch.ops.aten.detach.default, (node,))
    made.meta = dict(node.meta)
    return made


def _attribute(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root


def rows_first(x: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """Move the rows of a dimension of ``outer * N * inner`` entries to the front."""
    return x.unflatten(dim, (outer, x.shape[dim] // (outer * inner), inner)).movedim(dim + 1, 0)


def rows_back(x: Tensor, dim: int) -> Tensor:
    """Undo ``rows_first``: put the rows back between the outer and the inner entries of dimension ``dim``."""
    return x.movedim(0, dim + 1).flatten(dim, dim + 2)


_PLAIN: Final = re.compile(r"\W+")
_MAY_RETURN_ITS_ARGUMENT: Final = frozenset(
    {"type_as", "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
)
"""Operations that return what they were given where there is nothing to do, which neither schema nor trace shows."""


@final
class _Builder:
    """Follows the rows through the graph and writes it down as a network, node by node.

    A value is *deferred* if it is computed from trainable parameters and from no row: it has no node in the network,
    and is computed inside of the segments that use it.
    """

    def __init__(self, step: _Step, program: ExportedProgram, graph: fx.Graph) -> None:
        self._step, self._source = step, graph
        self._constants = program.constants
        self._specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self._states: dict[fx.Node, State] = {}
        self._roots: dict[fx.Node, fx.Node] = {}
        self._memory: dict[int, fx.Node] = {}
        self._parameters: dict[fx.Node, nn.Parameter] = {}
        self._deferred: set[fx.Node] = set()
        self._made: dict[fx.Node, Any] = {}
        self._layers: dict[Any, str] = {}
        self._root, self._graph = nn.Module(), fx.Graph()
        self._inputs: list[fx.Node] = []
        self._axis: Axis | None = None
        self._rows: fx.Node | None = None
        self._last_use: dict[fx.Node, int] = {}
        self._order = {node: number for number, node in enumerate(graph.nodes)}

    def build(self) -> ProvedGraph:
        """Follow and write down every node."""
        followed = 0
        for node in self._source.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                raise self._refusal(node, "uses a function inside of the graph", "Use plain tensor operations")
            elif node.op == "output":
                self._output(node)
            else:
                followed += 1
                try:
                    self._operation(node)
                except MixesRows as error:
                    raise self._refusal(node, str(error)) from None
        self._graph.lint()
        network = fx.GraphModule(self._root, self._graph, class_name="ProvedNetwork")
        return ProvedGraph(network, followed)

    @property
    def _rows_axis(self) -> Axis:
        if self._axis is None:
            raise PrivacyError("the model takes no tensors, so there are no rows to follow. Give it inputs.")
        return self._axis

    # Inputs

    def _placeholder(self, node: fx.Node) -> None:
        spec, target = self._spec(node)
        self._states[node] = FREE
        self._roots[node] = self._by_memory(node)
        if spec.kind == InputKind.USER_INPUT:
            self._states[node] = Rows(0)
            self._axis = self._axis or Axis(node.meta["val"].shape[0])
            self._made[node] = self._graph.placeholder(node.name)
            self._inputs.append(node)
            if self._rows is None:
                self._rows = self._graph.call_function(_size, (self._made[node],))
            return
        value = self._constants[target] if target in self._constants else _attribute(self._step, target)
        if isinstance(value, torch.Generator):
            raise PrivacyError(
                "the model or the loss draws from a generator of its own, which keeps its state from one call to the "
                "next. Draw from torch's own: leave generator= out."
            )
        if isinstance(value, nn.Parameter) and value.requires_grad:
            if not value.is_floating_point():
                raise PrivacyError(f"{target.removeprefix('model.')} is complex, which has no rule. Use real numbers.")
            self._parameters[node] = value
            self._deferred.add(node)
            return
        self._made[node] = self._fixed(target, value)

    def _spec(self, node: fx.Node) -> tuple[Any, str]:
        """Return what an input of the graph is, and the path of the tensor that it stands for."""
        spec = self._specs.get(node.name) or self._specs[str(node.target)]
        return spec, str(spec.target)

    def _fixed(self, target: str, value: Any) -> fx.Node:
        """Return a node for a tensor that does not train: a buffer, a frozen parameter or a constant of the code."""
        name = self._name(target)
        if isinstance(value, nn.Parameter):
            self._root.register_parameter(name, value)
        else:
            self._root.register_buffer(name, value, persistent=False)
        return self._graph.get_attr(name)

    def _name(self, wanted: str) -> str:
        base = _PLAIN.sub("_", wanted).strip("_") or "model"
        base = base.removeprefix("model_") or "model"
        name, number = base, 1
        while hasattr(self._root, name) or not name.isidentifier():
            number += 1
            name = f"{base}_{number}" if base.isidentifier() else f"layer_{base}_{number}"
        return name

    # Operations

    def _operation(self, node: fx.Node) -> None:
        target: Any = node.target
        if is_symbolic(node):
            self._made[node] = self._count(node)
            self._states[node], self._roots[node] = FREE, node
            return
        if operation_name(target).startswith("_assert_tensor_metadata"):
            return
        if operation_name(target) == "wrap_with_autocast":
            raise self._refusal(node, "computes in another precision, in which norms are not exact", "Remove autocast.")
        state = follow_getitem(node, self._states)
        if state is None:
            named = arguments_of(node) if isinstance(target, torch._ops.OpOverload) else {}
            state = follow(Call(node, named, self._states, self._rows_axis))
        self._states[node] = state
        self._roots[node] = self._alias_of(node)
        self._refuse_writes(node)
        used = [each for each in node.all_input_nodes if not is_symbolic(each)]
        if self._is_deferred(used):
            self._deferred.add(node)
        elif any(each in self._deferred for each in used):
            self._join(node)
        elif node.target is operator.getitem and isinstance(self._made[used[0]], tuple):
            self._made[node] = self._made[used[0]][node.args[1]]
        else:
            self._made[node] = self._plain(node)

    def _is_deferred(self, used: list[fx.Node]) -> bool:
        """Return whether a value is made of parameters, without rows or with the same for every row."""
        if not any(each in self._deferred for each in used):
            return False
        return all(each in self._deferred or self._states[each] == FREE for each in used)

    def _alias_of(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory this one may share."""
        schema = getattr(node.target, "_schema", None)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            if operation_name(source.target) == "broadcast_tensors":
                return self._roots[source.args[0][node.args[1]]]
            return self._by_memory(node) if self._roots[source] is source else self._roots[source]
        if schema is not None and any(r.alias_info is not None for r in schema.returns):
            for argument in schema.arguments:
                given = arguments_of(node).get(argument.name)
                if argument.alias_info is not None and isinstance(given, fx.Node):
                    return self._roots[given]
        first: Any = node.args[0] if node.args else None
        if operation_name(node.target) in _MAY_RETURN_ITS_ARGUMENT and not draws_random(node):
            return self._roots[first]
        return self._by_memory(node)

    def _by_memory(self, node: fx.Node) -> fx.Node:
        """Return the first node whose memory the traced value has: some operations return views and do not say so."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or operation_name(node.target) == "lift_fresh_copy":
            return node
        return self._memory.setdefault(value.untyped_storage()._cdata, node)

    def _refuse_writes(self, node: fx.Node) -> None:
        """Refuse to write into inputs, parameters, buffers and constants."""
        if operation_name(node.target) == "detach":
            return
        for name in written(node.target):
            root = self._roots[arguments_of(node)[name]]
            if isinstance(self._states[root], Unset):
                self._states[root] = self._states[node]
                self._states[arguments_of(node)[name]] = self._states[node]
            if isinstance(self._states[node], Rows) and self._states[root] == FREE:
                raise MixesRows("writes rows into memory that they share")
            if root.op == "placeholder":
                spec, path = self._spec(root)
                what = "its inputs" if spec.kind == InputKind.USER_INPUT else path.removeprefix("model.")
                raise MixesRows(f"writes into {what}, which the next rows would see")

    def _count(self, node: fx.Node) -> Any:
        """Return a node that computes a multiple of the number of rows."""
        try:
            factor = self._rows_axis.multiple(node.meta["val"])
        except (MixesRows, AttributeError, TypeError):
            raise self._refusal(node, "computes with the number of rows") from None
        return self._rows if factor == 1 else self._graph.call_function(operator.mul, (self._rows, factor))

    def _plain(self, node: fx.Node) -> fx.Node:
        """Write an operation without parameters down as it is; an in-place one as its ordinary form where it may be."""
        target: Any = node.target
        arguments: Any = fx.map_arg((node.args, node.kwargs), lambda n: self._made[n])
        first: Any = node.args[0] if node.args else None
        layer = _module_for(node)
        if layer is not None:
            made = self._graph.call_module(self._add(node, layer), (self._made[first],))
        elif target is torch.ops.aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
            made = self._graph.call_function(operator.add, arguments[0])
        else:
            ordinary = _ordinary_form(target)
            free = self._free_to_replace(node)
            made = self._graph.call_function(ordinary if ordinary and free else target, *arguments)
            if ordinary and free:
                self._made[first] = made
        return made

    def _free_to_replace(self, node: fx.Node) -> bool:
        """Return whether nothing but the written tensor itself is read after an in-place operation."""
        if not written(node.target):
            return True
        target: Any = node.args[0]
        root, now = self._roots[target], self._order[node]
        others = [n for n, r in self._roots.items() if r is root and n not in (target, node)]
        return not any(self._order[user] > now for other in others for user in other.users)

    # Layers and segments

    def _join(self, node: fx.Node) -> None:
        """Write an operation on rows and parameters down: as a layer with a rule, or as a segment."""
        if written(node.target):
            raise MixesRows("writes parameters into rows in place")
        layer = self._layer(node)
        if layer is None:
            self._made[node] = self._segment(node)
            return
        name, x = layer
        state, given = self._states[x], self._made[x]
        if not isinstance(state, Rows) or (state.dim == 0 and state.outer == 1):
            self._made[node] = self._graph.call_module(name, (given,))
            return
        front = self._graph.call_function(rows_first, (given, state.dim, state.outer, state.inner))
        made = self._graph.call_module(name, (front,))
        self._made[node] = self._graph.call_function(rows_back, (made, state.dim))

    def _layer(self, node: fx.Node) -> tuple[str, fx.Node] | None:
        """Return the name of a layer module for the node and its input; None if no layer with a rule fits."""
        make = _LAYERS.get(operation_name(node.target))
        if make is None:
            return None
        named = arguments_of(node)
        x: Any = named.get("input", named.get("indices", named.get("self")))
        own = [each for each in node.all_input_nodes if each is not x]
        if any(each not in self._parameters and not self._is_frozen(each) for each in own):
            return None
        state = self._states[x]
        if not isinstance(state, Rows) or (state.outer != 1 and operation_name(node.target) not in _LAST_DIMENSION):
            return None
        weights = {n: self._tensor(v) for n, v in named.items() if isinstance(v, fx.Node) and v is not x}
        key = (
            node.target,
            x.meta["val"].dim(),
            tuple((n, id(v)) for n, v in weights.items()),
            repr({n: v for n, v in named.items() if not isinstance(v, fx.Node)}),
        )
        if key not in self._layers:
            module = make(named, weights, x.meta["val"].dim())
            if module is None:
                return None
            module.train()
            self._layers[key] = self._add(node, module)
        return self._layers[key], x

    def _is_frozen(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and isinstance(self._tensor(node), nn.Parameter)

    def _tensor(self, node: fx.Node) -> Any:
        if node in self._parameters:
            return self._parameters[node]
        made = self._made.get(node)
        return getattr(self._root, str(made.target)) if isinstance(made, fx.Node) and made.op == "get_attr" else None

    def _add(self, node: fx.Node, module: nn.Module) -> str:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = stack[-1][0] if stack else ""
        name = self._name(path if next(module.parameters(), None) is not None and path else f"{path}.{node.name}")
        self._root.add_module(name, module)
        return name

    def _segment(self, node: fx.Node) -> fx.Node:
        """Make a module of an operation and of the deferred values that it uses."""
        graph, module = fx.Graph(), nn.Module()
        given = [each for each in node.all_input_nodes if each not in self._deferred and not is_symbolic(each)]
        made: dict[fx.Node, Any] = {}
        arguments: list[fx.Node] = []
        rows: fx.Node | None = None
        holders = {each: graph.placeholder(each.name) for each in given}
        for each, holder in holders.items():
            state, value = self._states[each], self._made[each]
            made[each] = holder
            if isinstance(state, tuple):
                raise MixesRows("joins parameters with several results at once")
            if isinstance(state, Rows):
                plain = state.dim == 0 and state.outer == 1
                if rows is None:
                    size = graph.call_function(_size, (holder,))
                    rows = (
                        graph.call_function(operator.floordiv, (size, state.inner))
                        if plain and state.inner > 1
                        else size
                    )
                if not plain:
                    value = self._graph.call_function(rows_first, (value, state.dim, state.outer, state.inner))
                    made[each] = graph.call_function(rows_back, (holder, state.dim))
            arguments.append(value)
        for each in self._closure(node):
            self._copy_into(graph, module, made, each, rows)
        result: Any = graph.node_copy(node, lambda n: self._inside(graph, made, n, rows))
        state = self._states[node]
        graph.output(self._fronted(graph, result, state))
        graph.lint()
        call = self._graph.call_module(
            self._add(node, fx.GraphModule(module, graph, class_name="Segment")), tuple(arguments)
        )
        return self._unfronted(call, state)

    def _fronted(self, graph: fx.Graph, result: Any, state: State) -> Any:
        if isinstance(state, tuple):
            parts = [graph.call_function(operator.getitem, (result, number)) for number in range(len(state))]
            return tuple(self._fronted(graph, part, each) for part, each in zip(parts, state, strict=True))
        if isinstance(state, Rows) and (state.dim or state.outer > 1):
            return graph.call_function(rows_first, (result, state.dim, state.outer, state.inner))
        return result

    def _unfronted(self, call: fx.Node, state: State) -> Any:
        """Return the segment's result with its rows where they were; a tuple becomes a tuple of nodes."""
        if isinstance(state, tuple):
            parts = [self._graph.call_function(operator.getitem, (call, number)) for number in range(len(state))]
            return tuple(self._unfronted(part, each) for part, each in zip(parts, state, strict=True))
        if isinstance(state, Rows) and (state.dim or state.outer > 1):
            return self._graph.call_function(rows_back, (call, state.dim))
        return call

    def _closure(self, node: fx.Node) -> list[fx.Node]:
        """Return the deferred nodes that a node uses, in the order of the graph."""
        found: set[fx.Node] = set()
        waiting = [each for each in node.all_input_nodes if each in self._deferred]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                waiting += [n for n in each.all_input_nodes if not is_symbolic(n)]
        return sorted(found, key=self._order.__getitem__)

    def _copy_into(
        self, graph: fx.Graph, module: nn.Module, made: dict[fx.Node, Any], node: fx.Node, rows: fx.Node | None
    ) -> None:
        if node in made:
            return
        if node.op != "placeholder" and node in self._deferred:
            made[node] = graph.node_copy(node, lambda n: self._inside(graph, made, n, rows))
            return
        value = self._tensor(node)
        if value is None:  # a value without rows that is computed outside: computed here again
            for each in node.all_input_nodes:
                if not is_symbolic(each):
                    self._copy_into(graph, module, made, each, rows)
            made[node] = graph.node_copy(node, lambda n: self._inside(graph, made, n, rows))
            return
        name = f"weight_{len(made)}"
        if isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            module.register_buffer(name, value, persistent=False)
        made[node] = graph.get_attr(name)

    def _inside(self, graph: fx.Graph, made: dict[fx.Node, Any], node: fx.Node, rows: fx.Node | None) -> Any:
        """Return a node's value inside a segment; numbers of rows are those of the segment's own input."""
        if node in made:
            return made[node]
        if rows is None:
            raise MixesRows("needs the number of rows where there are none")
        factor = self._rows_axis.multiple(node.meta["val"])
        return rows if factor == 1 else graph.call_function(operator.mul, (rows, factor))

    # The end

    def _output(self, node: fx.Node) -> None:
        results: Any = node.args[0]
        losses = results[0] if isinstance(results, (tuple, list)) and len(results) == 1 else None
        if not isinstance(losses, fx.Node) or losses not in self._states:
            raise PrivacyError("loss_fn must return one loss per row: a tensor. Use reduction='none'.")
        if self._states[losses] != Rows(0) or losses.meta["val"].dim() != 1:
            raise PrivacyError(
                "loss_fn must return one loss per row, each from its own row. Use reduction='none' and average within "
                "each row."
            )
        if losses in self._deferred:
            raise PrivacyError("the losses do not depend on the inputs. Check the model and the loss.")
        self._graph.output(self._made[losses])

    def _refusal(self, node: fx.Node, how: str, remedy: str = "") -> PrivacyError:
        """Return the refusal of a node: module, operation, reason, remedy."""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        where = "the model"
        if len(stack) > 1:
            path, kind = stack[-1]
            name = str(path).removeprefix("model.")
            where = f"{name} ({getattr(kind, '__name__', str(kind).rpartition('.')[2])})"
        elif stack or "nn_module_stack" in node.meta:
            where = "loss_fn or the model itself"
        line = _user_line(node)
        text = f"{where}: {operation_name(node.target)}{line} {how}"
        return PrivacyError(f"{text}, so it is not proved that units do not mix. {remedy or _REMEDY}")


def _user_line(node: fx.Node) -> str:
    """Return where the user's code called an operation, as ' (FILE, line N)'."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', str(node.meta.get("stack_trace", "")))
    own = [(file, number) for file, number in lines if not file.startswith(_NOT_USERS)]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def _size(x: Tensor) -> int:
    """Return the number of entries of the first dimension."""
    return x.shape[0]


def _ordinary_form(target: Any) -> Any:
    """Return the form of an in-place operation that makes a new tensor, or None."""
    if written(target) != ["self"]:
        return None
    packet = getattr(torch.ops.aten, operation_name(target), None)
    overload = target._schema.overload_name or "default"
    return getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None


def _module_for(node: fx.Node) -> nn.Module | None:
    """Return a layer without parameters that computes a node and that the fused copy knows; None for all others."""
    name, only = operation_name(node.target), len(node.args) == 1 and not node.kwargs
    if written(node.target):
        return None
    if name in _ACTIVATIONS and only:
        return _ACTIVATIONS[name]()
    if name == "max_pool2d":
        named = arguments_of(node)
        stride = list(named["stride"]) or list(named["kernel_size"])
        sizes = [_pair(v) for v in (named["kernel_size"], stride, named["padding"], named["dilation"])]
        return nn.MaxPool2d(*sizes, ceil_mode=bool(named["ceil_mode"]))
    return None


def _pair(given: Any) -> Any:
    values = list(given) if isinstance(given, (list, tuple)) else [given]
    return values[0] if len(set(values)) == 1 else tuple(values)


_ACTIVATIONS: Final[Mapping[str, Callable[[], nn.Module]]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "selu": nn.SELU,
    "elu": nn.ELU,
}
_LAST_DIMENSION: Final = frozenset({"linear", "layer_norm", "rms_norm", "embedding"})
"""Layers that work along the last dimensions and leave all others alone, wherever the rows are."""


def _with(module: nn.Module, **weights: Any) -> nn.Module:
    """Give a layer the parameters of the model."""
    for name, value in weights.items():
        module.register_parameter(name, value)
    return module


def _convolution(kind: Any) -> Callable[[Mapping[str, Any], Mapping[str, Any], int], nn.Module | None]:
    transposed = "Transpose" in kind.__name__

    def make(named: Mapping[str, Any], weights: Mapping[str, Any], rank: int) -> nn.Module | None:
        weight, bias = weights["weight"], weights.get("bias")
        dims, groups = weight.dim() - 2, named["groups"]
        if rank != weight.dim():
            return None
        first, second = weight.shape[0], weight.shape[1] * groups
        ins, outs = (first, second) if transposed else (second, first)

        def sizes(name: str) -> Any:
            given = named[name]
            if isinstance(given, str):
                return given
            return tuple(given) * dims if len(given) == 1 else tuple(given)

        more = {"output_padding": sizes("output_padding")} if transposed else {}
        module = kind(
            ins, outs, tuple(weight.shape[2:]), stride=sizes("stride"), padding=sizes("padding"),
            dilation=sizes("dilation"), groups=groups, bias=False, device="meta", **more,
        )  # fmt: skip
        return _with(module, weight=weight, bias=bias)

    return make


def _linear(named: Mapping[str, Any], weights: Mapping[str, Any], rank: int) -> nn.Module | None:
    del named
    weight = weights["weight"]
    if rank < 2:
        return None
    return _with(
        nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"), weight=weight, bias=weights.get("bias")
    )


def _group_norm(named: Mapping[str, Any], weights: Mapping[str, Any], rank: int) -> nn.Module | None:
    del rank
    weight = weights.get("weight")
    if weight is None:
        return None
    module = nn.GroupNorm(named["num_groups"], weight.shape[0], eps=named["eps"], affine=False)
    module.affine = True
    return _with(module, weight=weight, bias=weights.get("bias"))


def _layer_norm(named: Mapping[str, Any], weights: Mapping[str, Any], rank: int) -> nn.Module | None:
    del rank
    module = nn.LayerNorm(list(named["normalized_shape"]), eps=named["eps"], elementwise_affine=False)
    module.elementwise_affine = True
    return _with(module, weight=weights.get("weight"), bias=weights.get("bias"))


def _rms_norm(named: Mapping[str, Any], weights: Mapping[str, Any], rank: int) -> nn.Module | None:
    del rank
    module = nn.RMSNorm(list(named["normalized_shape"]), eps=named["eps"], elementwise_affine=False)
    module.elementwise_affine = True
    return _with(module, weight=weights.get("weight"))


def _embedding(named: Mapping[str, Any], weights: Mapping[str, Any], rank: int) -> nn.Module | None:
    del rank
    weight, padding = weights["weight"], named["padding_idx"]
    if named["scale_grad_by_freq"]:
        return None
    module = nn.Embedding(*weight.shape, padding_idx=None if padding is None or padding < 0 else padding, device="meta")
    return _with(module, weight=weight)


def _prelu(named: Mapping[str, Any], weights: Mapping[str, Any], rank: int) -> nn.Module | None:
    del named, rank
    return _with(nn.PReLU(weights["weight"].numel(), device="meta"), weight=weights["weight"])


def _instance_norm(named: Mapping[str, Any], weights: Mapping[str, Any], rank: int) -> nn.Module | None:
    kind = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}.get(rank)
    if kind is None or not named["use_input_stats"] or set(weights) != {"weight", "bias"}:
        return None
    module = kind(weights["weight"].shape[0], eps=named["eps"], affine=False)
    module.affine = True
    return _with(module, **weights)


_LAYERS: Final[Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], int], nn.Module | None]]] = {
    "conv1d": _convolution(nn.Conv1d),
    "conv2d": _convolution(nn.Conv2d),
    "conv3d": _convolution(nn.Conv3d),
    "conv_transpose2d": _convolution(nn.ConvTranspose2d),
    "linear": _linear,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "embedding": _embedding,
    "prelu": _prelu,
    "instance_norm": _instance_norm,
}
