"""Follow the rows of a batch through a traced graph: the proof that no row influences another.

A graph of ATen operations, traced with a symbolic number of rows, is read from its inputs to its losses. Every value is
either ``FREE`` (it does not depend on the rows, not even on how many there are) or has a known place for them
(``Rows``). Each operation has an explicit rule, which says where the rows of its result are if its arguments have
theirs, and refuses what lets rows meet: a reduction, a sort, a product or an index over the axis that holds them. An
operation without a rule is refused. A view that merges the rows with other dimensions is followed exactly.

The rules are about the axis only. They are conservative: a refusal may be wrong, an acceptance must not be. Tests run
every rule beside the operation itself, row by row.

Words: N is the number of rows. In a dimension of size ``outer * N * inner``, index ``(o * N + n) * inner + i`` belongs
to row n.
"""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import fx

Size = Any
"""An int, or a symbolic multiple of the number of rows."""


@final
@dataclass(frozen=True)
class Rows:
    """The value has rows, in dimension ``dim``, each influenced by nothing but its own row of the inputs."""

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def entries(self) -> int:
        """Entries of the dimension that belong to one row."""
        return self.outer * self.inner


@final
@dataclass(frozen=True)
class Free:
    """The value does not depend on the rows, and its shape not on their number."""


@final
@dataclass(frozen=True)
class RowNumbers:
    """The numbers 0 to N - 1: only an index that takes from each row what is its own may use them."""


@final
@dataclass(frozen=True)
class Unset:
    """Memory that is not initialised: it may hold anything until it is filled."""

    filled: State


State = Rows | Free | RowNumbers | Unset | tuple[Any, ...]
"""Where the rows of a value are; a tuple for several values."""

FREE: Final = Free()


class MixesRows(Exception):
    """An operation lets rows meet, or can't be followed; the message says how, as a clause about the operation."""


@final
class Axis:
    """Reads sizes: whether they depend on the number of rows, and how."""

    def __init__(self, rows: torch.SymInt) -> None:
        self._symbol = rows.node.expr

    def multiple(self, size: Size) -> int:
        """Return k for a size of k·N, 0 for a size without N.

        Raises:
            MixesRows: the size depends on N in another way.
        """
        if isinstance(size, int):
            return 0
        expression = size.node.expr
        if not expression.free_symbols:
            return 0
        factor = expression / self._symbol
        if not factor.is_Integer or factor <= 0:
            raise MixesRows(f"has a size that depends on the number of rows in an unusual way ({expression})")
        return int(factor)

    def place(self, shape: tuple[Size, ...]) -> tuple[int, int] | None:
        """Return the only dimension that depends on N and its multiple, or None if there is none.

        Raises:
            MixesRows: several dimensions depend on N, as in a product of all rows with all rows.
        """
        found = [(dim, k) for dim, k in enumerate(map(self.multiple, shape)) if k]
        if len(found) > 1:
            raise MixesRows("brings every row together with every other")
        return found[0] if found else None

    def check(self, state: State, value: Any) -> None:
        """Compare what a rule says with the shape that was traced; a second look at every rule."""
        if isinstance(state, tuple):
            for part, each in zip(state, value, strict=True):
                self.check(part, each)
            return
        if not isinstance(value, torch.Tensor):
            return
        place = self.place(tuple(value.shape))
        if isinstance(state, Unset):
            state = state.filled
        if isinstance(state, RowNumbers):
            state = Rows(0)
        expected = (state.dim, state.entries) if isinstance(state, Rows) else None
        if place != expected:
            raise MixesRows("puts the rows where they can't be followed")


@final
@dataclass(frozen=True)
class Call:
    """One operation of the graph, with what is known about its arguments.

    Attributes:
        node: the node.
        arguments: all arguments by their names in the operation's schema, defaults included.
        states: what is known about earlier nodes.
        axis: reads sizes.
    """

    node: fx.Node
    arguments: Mapping[str, Any]
    states: Mapping[fx.Node, State]
    axis: Axis

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    @property
    def value(self) -> Any:
        """The traced result: a tensor without data, or several."""
        return self.node.meta.get("val")

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape of the result."""
        return tuple(self.value.shape)

    def state(self, name: str) -> State:
        """Return where the rows of a tensor argument are; FREE for None and numbers.

        Raises:
            MixesRows: the argument holds values that no rule may use: row numbers, or memory that is not filled.
        """
        return self.state_of(self[name])

    def state_of(self, argument: Any) -> State:
        """Return where the rows of one argument are, as ``state`` does."""
        if not isinstance(argument, fx.Node):
            return FREE
        if not isinstance(argument.meta.get("val"), torch.Tensor):
            if is_symbolic(argument):
                raise MixesRows("computes with the number of rows")
            return FREE
        state = self.states[argument]
        if isinstance(state, RowNumbers):
            raise MixesRows("computes with the numbers of the rows")
        if isinstance(state, Unset):
            raise MixesRows("reads memory that is not initialised")
        return state

    def rank(self, name: str) -> int:
        """Return the number of dimensions of a tensor argument."""
        return self[name].meta["val"].dim()

    def shape_of(self, argument: fx.Node) -> tuple[Size, ...]:
        """Return the traced shape of an argument."""
        return tuple(argument.meta["val"].shape)

    def tensors(self) -> Iterator[fx.Node]:
        """Yield all tensor arguments, those in lists included."""
        for argument in self.arguments.values():
            for each in argument if isinstance(argument, (list, tuple)) else (argument,):
                if isinstance(each, fx.Node) and isinstance(each.meta.get("val"), torch.Tensor):
                    yield each

    def numbers_only(self, *names: str) -> None:
        """Refuse an argument that was computed from the number of rows."""
        for name in names:
            given = self[name]
            for each in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(each, fx.Node):
                    self.state_of(each)

    def only_rows(self, *free: str) -> Rows | None:
        """Return the common place of all arguments' rows; None if no argument has rows.

        Args:
            free: arguments that must have no rows.
        """
        for name in free:
            if isinstance(self.state(name), Rows):
                raise MixesRows(f"takes its {name} from the rows")
        found = {self.state_of(argument) for argument in self.tensors()} - {FREE}
        if len(found) > 1:
            raise MixesRows("combines rows of one argument with other rows of another")
        return next(iter(found), None)  # pyright: ignore[reportReturnType] - only Rows are left


Rule = Callable[[Call], State]
RULES: Final[dict[str, Rule]] = {}
"""By the name of an operation without overload and without the underscore of its in-place form."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of these operations; each text may name several, separated by blanks."""

    def enter(function: Rule) -> Rule:
        for name in " ".join(names).split():
            RULES[name] = function
        return function

    return enter


def is_symbolic(node: Any) -> bool:
    """Return whether a node's value is a number computed from the number of rows."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def rule_of(target: Any) -> Rule | None:
    """Return the rule of an operation, or None: for everything that is not an ATen operation we have read."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = operation_name(target)
    if name in RULES:
        return RULES[name]
    return elementwise if torch.Tag.pointwise in target.tags else None


def operation_name(target: Any) -> str:
    """Return the name of an operation without its overload; that of an in-place form without its underscore."""
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", str(target))
    name = target._schema.name.partition("::")[2]
    return name[:-1] if name.endswith("_") and not name.startswith("__") and target._schema.is_mutable else name


def written(target: Any) -> list[str]:
    """Return the names of the arguments that an operation writes into."""
    if not isinstance(target, torch._ops.OpOverload):
        return []
    return [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def draws_random(node: fx.Node) -> bool:
    """Return whether an operation draws random numbers: not a dropout that is switched off."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    named = arguments_of(node)
    off = any(named.get(name) is False for name in ("train", "training"))
    return not off and all(named.get(name) != 0 for name in ("p", "dropout", "dropout_p"))


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a node by their names in the schema, defaults included."""
    target: Any = node.target
    schema = target._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update(zip((a.name for a in schema), node.args, strict=False))
    named.update(node.kwargs)
    return named


def follow(call: Call) -> State:
    """Return where the rows of one operation's result are.

    Raises:
        MixesRows: the operation lets rows meet, or has no rule.
    """
    target: Any = call.node.target
    found = _without_rows if _has_no_rows(call) and _is_computed(target) else rule_of(target)
    if found is None:
        raise MixesRows("is not an operation that can be followed")
    if operation_name(target) not in _SIZED and any(map(is_symbolic, call.node.all_input_nodes)):
        raise MixesRows("computes with the number of rows")
    state = found(call)
    call.axis.check(state, call.value)
    if draws_random(call.node) and FREE in (state if isinstance(state, tuple) else (state,)):
        # Removing a unit moves others to another micro-batch, and so to other numbers: the sum would move by more than
        # one clip norm. Numbers of single rows have no such partner.
        raise MixesRows(
            "draws random numbers that rows share; draw them for each row, as torch.rand(x.shape[0], 1) does"
        )
    for name in written(target):
        if name != "self" or not isinstance(call[name], fx.Node):
            raise MixesRows(f"writes into its argument {name}")
        before = call.states[call[name]]
        if isinstance(before, Unset):
            continue  # the caller notes that it is filled now
        if before != state:
            raise MixesRows("writes rows into a tensor that has none, or has them elsewhere")
    return state


def _has_no_rows(call: Call) -> bool:
    """Return whether neither an argument nor a size in the result depends on the rows or on their number."""
    nodes = call.node.all_input_nodes
    return all(not is_symbolic(node) and call.states.get(node, FREE) == FREE for node in nodes) and bool(nodes)


_SIZED: Final = frozenset(
    {
        "view",
        "reshape",
        "_unsafe_view",
        "unflatten",
        "expand",
        "broadcast_to",
        "repeat",
        "tile",
        "zeros",
        "ones",
        "full",
        "rand",
        "randn",
        "randint",
        "new_zeros",
        "new_ones",
        "new_full",
        "empty",
        "new_empty",
        "arange",
        "slice",
        "narrow",
        "affine_grid_generator",
    }
)
"""Operations that may take the number of rows, as a size: the shape of the result shows what they did with it."""


def _is_computed(target: Any) -> bool:
    """Return whether an operation is ATen's, has no state, and its result holds nothing that was there before.

    Norms over a batch write running statistics that their schema does not mention.
    """
    name = operation_name(target)
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    stateful = any(part in name for part in ("empty", "resize", "batch_norm", "instance_norm"))
    return is_aten and not stateful and name not in ("set", "as_strided")


def _without_rows(call: Call) -> State:
    """Follow any operation on values without rows, such as a computation of weights from weights."""
    return _for_each_result(call, FREE)


def _dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _dims(given: Any, rank: int) -> set[int]:
    """Return the dimensions that an argument names; None and an empty list name all."""
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return set(range(rank))
    return {_dim(dim, rank) for dim in (given if isinstance(given, (list, tuple)) else [given])}


def _kept(call: Call, dims: set[int], name: str = "self") -> State:
    """Return the state of an argument whose rows are not in any of ``dims``, across which the operation works."""
    state = call.state(name)
    if isinstance(state, Rows) and state.dim in dims:
        raise MixesRows("works across the rows")
    return state


# Element by element


@rule(
    "contiguous detach alias clone lift_fresh_copy lift dropout alpha_dropout bernoulli hardswish "
    "hardtanh hardsigmoid hardshrink softshrink mish gelu silu log_sigmoid softplus square absolute "
    "negative subtract multiply divide floor_divide float_power true_divide isclose where masked_fill "
    "logical_not logical_and logical_or logical_xor clamp clamp_min clamp_max clip greater less "
    "greater_equal less_equal not_equal sigmoid special_expit special_xlogy xlogy threshold leaky_relu "
    "complex polar relu relu6 elu selu celu addcmul addcdiv lerp __and__ __or__ __xor__ rsub pow",
)
def elementwise(call: Call) -> State:
    """Follow an operation on single entries: all arguments with rows must have them in the same entries."""
    found = set[State]()
    rank = call.value[0].dim() if isinstance(call.value, (tuple, list)) else len(call.shape)
    for argument in call.tensors():
        state = call.state_of(argument)
        if isinstance(state, Rows):
            shift = rank - len(call.shape_of(argument))
            found.add(Rows(state.dim + shift, state.outer, state.inner))
    for argument in call.arguments.values():
        if is_symbolic(argument):
            raise MixesRows("computes with the number of rows")
    if len(found) > 1:
        raise MixesRows("combines rows of one argument with other rows of another")
    return _for_each_result(call, next(iter(found), FREE))


@rule("rrelu")
def random_slope(call: Call) -> State:
    """Follow a leaky activation whose slope is not random: where it is, each row decides how many numbers it draws."""
    if call["training"]:
        raise MixesRows("draws more random numbers for some rows than for others")
    return elementwise(call)


@rule("uniform normal random exponential log_normal geometric cauchy fill zero copy bernoulli")
def overwrite(call: Call) -> State:
    """Follow an operation that overwrites a tensor, with random numbers or with another tensor's entries."""
    if not written(call.node.target):
        return elementwise(call)
    before = call.states[call["self"]]
    if isinstance(before, RowNumbers):
        raise MixesRows("overwrites the numbers of the rows")
    state = before.filled if isinstance(before, Unset) else before
    for name in call.arguments:
        if name != "self":
            given = call.state(name)
            shift = len(call.shape) - call.rank(name) if isinstance(given, Rows) else 0
            if isinstance(given, Rows) and Rows(given.dim + shift, given.outer, given.inner) != state:
                raise MixesRows("writes rows into a tensor that has none, or has them elsewhere")
    return state


@rule("zeros_like ones_like full_like rand_like randn_like randint_like")
def filled_like(call: Call) -> State:
    """Follow a new tensor of an argument's shape, whose entries depend on nothing."""
    call.numbers_only("fill_value", "high", "low")
    state = call.states[call["self"]]
    if isinstance(state, RowNumbers):
        return Rows(0)
    return state.filled if isinstance(state, Unset) else state


@rule("broadcast_tensors")
def broadcast_tensors(call: Call) -> State:
    """Follow several tensors that are repeated to one shape."""
    found = set[State]()
    rank = call.value[0].dim()
    for argument in call.tensors():
        state = call.state_of(argument)
        if isinstance(state, Rows):
            found.add(Rows(state.dim + rank - len(call.shape_of(argument)), state.outer, state.inner))
    if len(found) > 1:
        raise MixesRows("combines rows of one argument with other rows of another")
    return tuple(next(iter(found), FREE) for _ in call.value)


@rule("type_as to _to_copy")
def as_another(call: Call) -> State:
    """Follow a change of type; another tensor gives its type only."""
    return call.state("self")


@rule(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "soft_margin_loss poisson_nll_loss hinge_embedding_loss",
)
def elementwise_loss(call: Call) -> State:
    """Follow a loss of single entries."""
    _unreduced(call)
    return elementwise(call)


def _unreduced(call: Call) -> None:
    if call["reduction"] != 0:
        raise MixesRows("averages or adds up over the rows; with reduction='none' there is one loss per row")


# New tensors


@rule("zeros ones full rand randn randint new_zeros new_ones new_full scalar_tensor")
def filled(call: Call) -> State:
    """Follow a new tensor whose entries depend on nothing."""
    call.numbers_only("fill_value", "high", "low", "s")
    place = call.axis.place(call.shape)
    return FREE if place is None else Rows(place[0], 1, place[1])


@rule("empty new_empty empty_like")
def not_filled(call: Call) -> State:
    """Follow memory that is not initialised."""
    place = call.axis.place(call.shape)
    return Unset(FREE if place is None else Rows(place[0], 1, place[1]))


@rule("arange")
def row_numbers(call: Call) -> State:
    """Follow a range: that of the row numbers has its own state."""
    place = call.axis.place(call.shape)
    if place is None:
        call.numbers_only("start", "end", "step")
        return FREE
    if place != (0, 1) or call["start"] not in (None, 0) or call["step"] not in (None, 1):
        raise MixesRows("computes with the number of rows")
    return RowNumbers()


@rule("linspace logspace eye tril_indices triu_indices hann_window")
def not_by_rows(call: Call) -> State:
    """Follow a new tensor whose entries depend on its size."""
    if call.axis.place(call.shape) is not None:
        raise MixesRows("numbers the rows")
    call.numbers_only(*call.arguments)
    return FREE


# Views and moves


@rule("view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as ravel")
def reshape(call: Call) -> State:
    """Follow a view in the order of memory: the rows must come out as whole blocks."""
    state = call.state("self")
    if not isinstance(state, Rows):
        return state
    return reshaped(state, call.shape_of(call["self"]), call.shape, call.axis)


def reshaped(state: Rows, old: tuple[Size, ...], new: tuple[Size, ...], axis: Axis) -> Rows:
    """Return where rows are after a reshape: what comes before and after them in memory must stay outside of them.

    Args:
        state: where they were.
        old: the old shape.
        new: the new shape.
        axis: reads sizes.

    Raises:
        MixesRows: a new dimension would hold parts of several rows.
    """
    place = axis.place(new)
    if place is None or any(size == 0 for dim, size in enumerate(old) if dim != state.dim):
        raise MixesRows("folds the rows into other dimensions")
    dim, entries = place
    before = math.prod(old[: state.dim]) * state.outer
    after = math.prod(old[state.dim + 1 :]) * state.inner
    outer, rest = divmod(before, math.prod(new[:dim]))
    inner, parts = divmod(entries, outer) if outer else (0, 1)
    if rest or parts or inner * math.prod(new[dim + 1 :]) != after:
        raise MixesRows("folds the rows into other dimensions")
    return Rows(dim, outer, inner)


@rule("permute transpose swapaxes swapdims t movedim moveaxis numpy_T mT")
def permute(call: Call) -> State:
    """Follow a new order of dimensions."""
    state, rank = call.state("self"), call.rank("self")
    if not isinstance(state, Rows):
        return state
    order = list(range(rank))
    name = operation_name(call.node.target)
    if name == "permute":
        order = [_dim(dim, rank) for dim in call["dims"]]
    elif name in ("movedim", "moveaxis"):
        source, to = call["source"], call["destination"]
        pairs = [(source, to)] if isinstance(source, int) else list(zip(source, to, strict=True))
        moved = {_dim(b, rank): _dim(a, rank) for a, b in pairs}
        rest = iter([dim for dim in order if dim not in moved.values()])
        order = [moved[dim] if dim in moved else next(rest) for dim in range(rank)]
    elif name == "numpy_T":
        order.reverse()
    else:
        first = next((call[n] for n in ("dim0", "axis0") if call[n] is not None), -2)
        second = next((call[n] for n in ("dim1", "axis1") if call[n] is not None), -1)
        if rank >= 2:
            a, b = _dim(first, rank), _dim(second, rank)
            order[a], order[b] = order[b], order[a]
    return Rows(order.index(state.dim), state.outer, state.inner)


@rule("expand expand_as broadcast_to")
def expand(call: Call) -> State:
    """Follow a repetition without copies: along new dimensions, also once for each row."""
    state, shift = call.state("self"), len(call.shape) - call.rank("self")
    place = call.axis.place(call.shape)
    if isinstance(state, Rows):
        return Rows(state.dim + shift, state.outer, state.inner)
    return FREE if place is None else Rows(place[0], 1, place[1])


@rule("repeat tile")
def repeat(call: Call) -> State:
    """Follow a repetition with copies."""
    state, shift = call.state("self"), len(call.shape) - call.rank("self")
    if not isinstance(state, Rows):
        place = call.axis.place(call.shape)
        return FREE if place is None else Rows(place[0], 1, place[1])
    times = list(call["repeats"] if call["repeats"] is not None else call["dims"])
    times = [1] * (len(call.shape) - len(times)) + times
    if any(isinstance(each, fx.Node) for each in times):
        raise MixesRows("repeats every row as many times as there are rows")
    return Rows(state.dim + shift, state.outer * times[state.dim + shift], state.inner)


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> State:
    """Follow a repetition of single entries."""
    if not isinstance(call["repeats"], int) or call["dim"] is None:
        raise MixesRows("repeats rows by numbers that can't be followed")
    state = call.state("self")
    dim = _dim(call["dim"], call.rank("self"))
    if isinstance(state, Rows) and state.dim == dim:
        return Rows(dim, state.outer, state.inner * call["repeats"])
    return state


@rule("select")
def select(call: Call) -> State:
    """Follow one entry of a dimension."""
    call.numbers_only("index")
    dim = _dim(call["dim"], call.rank("self"))
    return _without(_kept(call, {dim}), {dim}, keepdim=False)


def _without(state: State, dims: set[int], *, keepdim: bool) -> State:
    if not isinstance(state, Rows) or keepdim:
        return state
    return Rows(state.dim - sum(dim < state.dim for dim in dims), state.outer, state.inner)


@rule("slice narrow")
def take_slice(call: Call) -> State:
    """Follow a part of a dimension; all of it in the dimension of the rows."""
    state, dim = call.state("self"), _dim(call["dim"] or 0, call.rank("self"))
    if isinstance(state, Rows) and state.dim == dim:
        whole = call["start"] in (None, 0) and call["step"] in (None, 1)
        if not whole or call.axis.multiple(call.shape[dim]) != state.entries:
            raise MixesRows("takes some of the rows by their position")
        return state
    call.numbers_only("start", "end", "length", "step")
    return state


@rule("split split_with_sizes chunk unsafe_chunk unsafe_split tensor_split unbind")
def split(call: Call) -> State:
    """Follow the parts of a dimension."""
    dim = _dim(call["dim"] or 0, call.rank("self"))
    state = _kept(call, {dim})
    unbound = operation_name(call.node.target) == "unbind"
    return tuple(_without(state, {dim}, keepdim=not unbound) for _ in call.value)


@rule("cat concat concatenate")
def concatenate(call: Call) -> State:
    """Follow several tensors put behind each other, in another dimension than that of the rows."""
    state = call.only_rows()
    if state is not None and _dim(call["dim"] or 0, len(call.shape)) == state.dim:
        raise MixesRows("puts rows behind rows")
    return FREE if state is None else state


@rule("stack")
def stack(call: Call) -> State:
    """Follow several tensors in a new dimension."""
    state, dim = call.only_rows(), _dim(call["dim"] or 0, len(call.shape))
    return FREE if state is None else Rows(state.dim + (dim <= state.dim), state.outer, state.inner)


@rule("flip roll rot90 cumsum cumprod logcumsumexp cummax cummin diff")
def along(call: Call) -> State:
    """Follow an operation along some dimensions, which keeps the shape."""
    given = call["dims"] if call["dims"] is not None else call["dim"]
    call.only_rows()  # what diff puts before or behind must have its rows in the same place
    return _for_each_result(call, _kept(call, _dims(given, call.rank("self"))))


def _for_each_result(call: Call, state: State) -> State:
    return tuple(state for _ in call.value) if isinstance(call.value, (tuple, list)) else state


@rule("softmax log_softmax _softmax _log_softmax sort argsort topk glu unfold")
def along_one(call: Call) -> State:
    """Follow an operation along one dimension, which stays."""
    dim = call["dim"] if call["dim"] is not None else call["dimension"] if call["dimension"] is not None else -1
    return _for_each_result(call, _kept(call, {_dim(dim, call.rank("self"))}))


@rule("fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2")
def fourier(call: Call) -> State:
    """Follow a Fourier transform along the last dimension or two, or along those that are named."""
    return _kept(call, _dims(call["dim"], call.rank("self")))


@rule("real imag view_as_real")
def part_of_complex(call: Call) -> State:
    """Follow one of the two numbers of each entry, or both in a new last dimension."""
    return call.state("self")


@rule("view_as_complex")
def as_complex(call: Call) -> State:
    """Follow two numbers of the last dimension that become one."""
    return _kept(call, {call.rank("self") - 1})


@rule("tril triu")
def triangle(call: Call) -> State:
    """Follow the part of each matrix on one side of a diagonal."""
    rank = call.rank("self")
    return _kept(call, {rank - 2, rank - 1})


@rule("constant_pad_nd pad")
def pad(call: Call) -> State:
    """Follow a padding of the last dimensions."""
    widths, rank = list(call["pad"]), call.rank("self")
    call.numbers_only("pad", "value")
    return _kept(call, {rank - 1 - side // 2 for side, width in enumerate(widths) if width != 0})


# Reductions


@rule(
    "sum mean nansum nanmean amax amin var std var_mean std_mean logsumexp argmax argmin prod any all max min "
    "median nanmedian mode kthvalue norm linalg_vector_norm count_nonzero aminmax",
)
def reduce(call: Call) -> State:
    """Follow a reduction over some dimensions."""
    if call["other"] is not None:
        return elementwise(call)
    dims = _dims(call["dim"], call.rank("self"))
    return _for_each_result(call, _without(_kept(call, dims), dims, keepdim=bool(call["keepdim"])))


@rule("bucketize")
def bucketize(call: Call) -> State:
    """Follow the place of each entry among boundaries, the same for all rows."""
    if isinstance(call.state("boundaries"), Rows):
        raise MixesRows("takes its boundaries from the rows")
    return call.state("self")


@rule("cosine_similarity")
def cosine_similarity(call: Call) -> State:
    """Follow the cosine of two tensors along one dimension."""
    rank = max(call.rank("x1"), call.rank("x2"))
    state = call.only_rows()
    if state is None:
        return FREE
    if call.rank("x1") != call.rank("x2") or state.dim == _dim(call["dim"], rank):
        raise MixesRows("works across the rows")
    return _without(state, {_dim(call["dim"], rank)}, keepdim=False)


@rule("pairwise_distance")
def pairwise_distance(call: Call) -> State:
    """Follow the distances of two tensors along the last dimension."""
    rank, state = call.rank("x1"), call.only_rows()
    if state is None:
        return FREE
    if rank != call.rank("x2") or state.dim == rank - 1:
        raise MixesRows("works across the rows")
    return state


# Layers


def _first_axis(call: Call, name: str, rank: int | None, *free: str) -> State:
    """Return the state of an operation that treats each entry of dimension 0 by itself."""
    state = call.only_rows(*free)
    if state is None:
        return FREE
    if state.dim != 0 or (rank is not None and call.rank(name) != rank):
        raise MixesRows("has the rows in another dimension than the first")
    return state


@rule("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
def convolution(call: Call) -> State:
    """Follow a convolution."""
    return _first_axis(call, "input", call.rank("weight"), "weight", "bias")


@rule("linear")
def linear(call: Call) -> State:
    """Follow a linear layer: it works along the last dimension."""
    state = call.only_rows("weight", "bias")
    if isinstance(state, Rows) and state.dim == call.rank("input") - 1:
        raise MixesRows("works across the rows")
    if isinstance(state, Rows) and call.rank("weight") != 2:
        raise MixesRows("has a weight that is not a matrix")
    return FREE if state is None else state


@rule("bilinear")
def bilinear(call: Call) -> State:
    """Follow a bilinear layer."""
    state = call.only_rows("weight", "bias")
    if state is not None and state.dim == call.rank("input1") - 1:
        raise MixesRows("works across the rows")
    return FREE if state is None else state


@rule("group_norm")
def group_norm(call: Call) -> State:
    """Follow a group norm: each entry of dimension 0 has its own statistics."""
    return _first_axis(call, "input", None, "weight", "bias")


@rule("layer_norm rms_norm")
def layer_norm(call: Call) -> State:
    """Follow a layer norm: it works across the last dimensions."""
    rank = call.rank("input")
    first = rank - len(call["normalized_shape"])
    for name in ("weight", "bias"):
        if isinstance(call.state(name), Rows):
            raise MixesRows(f"takes its {name} from the rows")
    return _kept(call, set(range(first, rank)), "input")


@rule("instance_norm")
def instance_norm(call: Call) -> State:
    """Follow an instance norm without running statistics, or with fixed ones."""
    if call["use_input_stats"] and (call["running_mean"] is not None or call["running_var"] is not None):
        raise MixesRows("keeps running statistics of the rows")
    return _first_axis(call, "input", None, "weight", "bias", "running_mean", "running_var")


@rule("batch_norm")
def batch_norm(call: Call) -> State:
    """Follow a batch norm with fixed statistics."""
    if call["training"] or call["running_mean"] is None or call["running_var"] is None:
        raise MixesRows("normalises each row by the statistics of all rows")
    return _first_axis(call, "input", None, "weight", "bias", "running_mean", "running_var")


@rule("prelu")
def prelu(call: Call) -> State:
    """Follow a learned slope for each entry of dimension 1."""
    state = call.only_rows("weight")
    if state is not None and state.dim == 1:
        raise MixesRows("has a slope for each row")
    return FREE if state is None else state


@rule("embedding")
def embedding(call: Call) -> State:
    """Follow a table: each index takes one of its rows."""
    if isinstance(call.state("weight"), Rows):
        raise MixesRows("takes its table from the rows")
    if call["scale_grad_by_freq"]:
        raise MixesRows("scales gradients by how often an index occurs in all rows")
    return call.state("indices")


_SPATIAL: Final = {
    1: "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d upsample_linear1d "
    "reflection_pad1d replication_pad1d max_pool1d_with_indices _upsample_nearest_exact1d",
    2: "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d "
    "upsample_bicubic2d reflection_pad2d replication_pad2d max_pool2d_with_indices pixel_shuffle pixel_unshuffle "
    "channel_shuffle im2col _upsample_nearest_exact2d _upsample_bilinear2d_aa grid_sampler "
    "grid_sampler_2d _adaptive_avg_pool2d",
    3: "max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d upsample_nearest3d upsample_trilinear3d "
    "reflection_pad3d replication_pad3d max_pool3d_with_indices",
}


def _spatial(dims: int) -> Rule:
    def follow_spatial(call: Call) -> State:
        """Follow an operation on images: each image and channel by itself, or each image."""
        name = "input" if call["input"] is not None else "self"
        return _for_each_result(call, _first_axis(call, name, dims + 2))

    return follow_spatial


for _number, _names in _SPATIAL.items():
    rule(_names)(_spatial(_number))


@rule("col2im")
def fold(call: Call) -> State:
    """Follow windows that are added up to images."""
    return _first_axis(call, "self", 3)


@rule("affine_grid_generator")
def affine_grid(call: Call) -> State:
    """Follow a grid of places for each matrix."""
    return _first_axis(call, "theta", 3)


@rule("feature_dropout feature_alpha_dropout")
def feature_dropout(call: Call) -> State:
    """Follow a dropout of whole channels: one draw for each entry of the first two dimensions."""
    return _first_axis(call, "input", None)


@rule("lstm gru rnn_tanh rnn_relu")
def recurrent(call: Call) -> State:
    """Follow a recurrent network: rows in the first or second dimension of the inputs, always second in the states."""
    given = call.state("input")
    hidden = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    if call.rank("input") != 3 or "batch_sizes" in call.arguments:
        raise MixesRows("takes packed or single sequences")
    if any(isinstance(call.state_of(p), Rows) for p in call["params"]):
        raise MixesRows("takes its weights from the rows")
    dim, states = (0 if call["batch_first"] else 1), [call.state_of(each) for each in hidden]
    if given != Rows(dim) or any(each not in (FREE, Rows(1)) for each in states):
        raise MixesRows("has the rows where it expects the steps of a sequence")
    return (given, *(Rows(1) for _ in call.value[1:]))


@rule("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def recurrent_cell(call: Call) -> State:
    """Follow one step of a recurrent network: rows in the first dimension of inputs and states."""
    hidden = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    states = [call.state("input"), *map(call.state_of, hidden)]
    weights = [name for name in call.arguments if name[:2] in ("w_", "b_")]
    if any(isinstance(call.state(name), Rows) for name in weights) or any(
        each not in (FREE, Rows(0)) for each in states
    ):
        raise MixesRows("has the rows in another dimension than the first")
    return _for_each_result(call, Rows(0))


@rule("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d multi_margin_loss multilabel_margin_loss")
def class_loss(call: Call) -> State:
    """Follow a loss of class scores, in dimension 1, for each entry of dimension 0."""
    _unreduced(call)
    if call["self"].meta["val"].dim() < 2:
        raise MixesRows("takes the rows for classes")
    return _first_axis(call, "self", None, "weight")


# Products


@rule("mm bmm matmul addmm baddbmm mv addmv")
def product(call: Call) -> State:
    """Follow a product of matrices: rows may be in dimensions that are not summed over."""
    names = ("mat1", "mat2") if call["mat1"] is not None else ("batch1", "batch2")
    if operation_name(call.node.target) in ("mm", "bmm", "matmul", "mv"):
        names = ("self", next(name for name in ("mat2", "other", "vec") if call[name] is not None))
    elif operation_name(call.node.target) == "addmv":
        names = ("mat", "vec")
    left, right = (call.state(name) for name in names)
    a, b = (call.rank(name) for name in names)
    rank = len(call.shape)
    places: set[State] = set()
    # Where one side has its rows in the summed dimension, the other has as many entries there, and so has rows too.
    summed = (isinstance(left, Rows) and left.dim == a - 1, isinstance(right, Rows) and right.dim == max(b - 2, 0))
    if any(summed):
        raise MixesRows("sums over the rows")
    if isinstance(left, Rows):
        # Of the left matrix, all dimensions but the last are those of the result.
        offset = left.dim - (a - 1)  # negative, counted from the summed dimension
        places.add(Rows(rank + offset if b == 1 else rank - 1 + offset, left.outer, left.inner))
    if isinstance(right, Rows):
        if right.dim == b - 1:
            places.add(Rows(rank - 1, right.outer, right.inner))
        else:
            places.add(Rows(right.dim - b + rank + (1 if a == 1 else 0), right.outer, right.inner))
    if call["mat1"] is not None or call["batch1"] is not None or operation_name(call.node.target) == "addmv":
        added = call.state("self")
        if isinstance(added, Rows):
            places.add(Rows(added.dim + rank - call.rank("self"), added.outer, added.inner))
    if len(places) > 1:
        raise MixesRows("brings rows together with other rows")
    return next(iter(places), FREE)


@rule("einsum")
def einsum(call: Call) -> State:
    """Follow a sum of products by its equation: the letter of the rows must be in all that have rows, and stay."""
    tensors = call["tensors"]
    equation = _without_dots(call["equation"].replace(" ", ""), [len(call.shape_of(each)) for each in tensors])
    if "->" not in equation or call["path"] is not None:
        raise MixesRows("has an equation without a result or with a path")
    given, _, result = equation.partition("->")
    found: set[tuple[str, int, int]] = set()
    for letters, tensor in zip(given.split(","), tensors, strict=True):
        state = call.state_of(tensor)
        if isinstance(state, Rows):
            found.add((letters[state.dim], state.outer, state.inner))
    if not found:
        return FREE
    letter, outer, inner = next(iter(found))
    for letters, tensor in zip(given.split(","), tensors, strict=True):
        wanted = 1 if isinstance(call.state_of(tensor), Rows) else 0
        if letters.count(letter) != wanted:
            raise MixesRows("brings rows together with other rows")
    if len(found) > 1 or result.count(letter) != 1:
        raise MixesRows("sums over the rows")
    return Rows(result.index(letter), outer, inner)


def _without_dots(equation: str, ranks: list[int]) -> str:
    """Write the dots of an equation out, as letters that it does not use; the last dimensions are those in common."""
    given, arrow, result = equation.partition("->")
    dotted = [rank - len(part.replace("...", "")) for part, rank in zip(given.split(","), ranks, strict=True)]
    most = max((count for count, part in zip(dotted, given.split(","), strict=True) if "..." in part), default=0)
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    if most > len(spare):
        raise MixesRows("has an equation with too many dimensions")
    letters = "".join(spare[:most])
    parts = [part.replace("...", letters[most - n :]) for part, n in zip(given.split(","), dotted, strict=True)]
    return ",".join(parts) + arrow + result.replace("...", letters)


@rule("tensordot")
def tensordot(call: Call) -> State:
    """Follow a product that sums over dimensions of both tensors; those that are left stay in their order."""
    rank, places = call.rank("self"), list[State]()
    for name, dims, before in (("self", "dims_self", 0), ("other", "dims_other", rank - len(call["dims_self"]))):
        state = call.state(name)
        if isinstance(state, Rows):
            summed = {_dim(dim, call.rank(name)) for dim in call[dims]}
            if state.dim in summed:
                raise MixesRows("sums over the rows")
            kept = before + state.dim - sum(dim < state.dim for dim in summed)
            places.append(Rows(kept, state.outer, state.inner))
    if len(places) == 2:
        raise MixesRows("brings rows together with other rows")
    return places[0] if places else FREE


@rule("scaled_dot_product_attention")
def attention(call: Call) -> State:
    """Follow attention: it works across the last two dimensions."""
    rank = call.rank("query")
    states = {call.state(name) for name in ("query", "key", "value")}
    state = next(iter(states))
    ranks = {call.rank(name) for name in ("query", "key", "value")}
    if len(states) != 1 or len(ranks) != 1 or (isinstance(state, Rows) and state.dim >= rank - 2):
        raise MixesRows("lets rows attend to each other")
    mask = call.state("attn_mask")
    if isinstance(mask, Rows):
        shifted = Rows(mask.dim + rank - call.rank("attn_mask"), mask.outer, mask.inner)
        if shifted != state:
            raise MixesRows("lets rows attend to each other")
    return state


# Indices


@rule("gather scatter scatter_add scatter_reduce")
def gather(call: Call) -> State:
    """Follow an index along one dimension, which each row has for itself."""
    state, dim = call.only_rows(), _dim(call["dim"], call.rank("self"))
    call.numbers_only("value")
    if state is None:
        return FREE
    if state.dim == dim:
        raise MixesRows("works across the rows")
    if call.state("self") != state or call.state("index") != state:
        raise MixesRows("treats rows by their position")
    return state


@rule("index_select")
def index_select(call: Call) -> State:
    """Follow a choice of entries of one dimension, the same for all rows."""
    if isinstance(call.state("index"), Rows):
        raise MixesRows("is indexed by the rows")
    return _kept(call, {_dim(call["dim"], call.rank("self"))})


@rule("one_hot")
def one_hot(call: Call) -> State:
    """Follow indicators of classes, in a new last dimension."""
    if not isinstance(call["num_classes"], int) or call["num_classes"] < 1:
        raise MixesRows("has as many classes as the largest label; give num_classes")
    return call.state("self")


@rule("index")
def index(call: Call) -> State:
    """Follow an index by tensors: the same entries of each row, or one entry for each row's own number."""
    state, indices = call.state("self"), list(call["indices"])
    tensors = [each for each in indices if each is not None]
    numbers = [dim for dim, each in enumerate(indices) if each is not None and _is_row_numbers(call, each)]
    if numbers:
        return _own_entries(call, state, indices)
    if any(isinstance(call.state_of(each), Rows) for each in tensors):
        return _table(call, state, indices)
    if not isinstance(state, Rows):
        return FREE
    dims = [dim for dim, each in enumerate(indices) if each is not None]
    if state.dim in dims or any(each.meta["val"].dtype in _MASKS for each in tensors):
        raise MixesRows("takes rows by an index")
    if dims != list(range(dims[0], dims[0] + len(dims))):
        raise MixesRows("is indexed in dimensions that are not neighbours")
    added = max(each.meta["val"].dim() for each in tensors)
    return Rows(state.dim if state.dim < dims[0] else state.dim - len(dims) + added, state.outer, state.inner)


_MASKS: Final = (torch.bool, torch.uint8)


@rule("index_put")
def index_put(call: Call) -> State:
    """Follow one number that is written where each row's own mask says: ``x[x < 0] = 0``."""
    state, indices, values = call.state("self"), list(call["indices"]), call["values"]
    mask = indices[0] if len(indices) == 1 else None
    constant = call.state("values") == FREE and all(size == 1 for size in call.shape_of(values))
    if mask is None or mask.meta["val"].dtype is not torch.bool or not constant:
        raise MixesRows("writes by an index; use torch.where, masked_fill or scatter")
    if call.state_of(mask) != state:
        raise MixesRows("writes rows by their position")
    return state


def _is_row_numbers(call: Call, node: fx.Node) -> bool:
    return isinstance(call.states[node], RowNumbers)


def _own_entries(call: Call, state: State, indices: list[Any]) -> State:
    """``x[arange(N), labels]``: from each row what its own label names."""
    others = [call.state_of(each) for each in indices[1:]]
    fits = (
        state == Rows(0)
        and _is_row_numbers(call, indices[0])
        and None not in indices
        and all(each in (Rows(0), FREE) for each in others)
        and all(len(call.shape_of(each)) <= 1 for each in indices)
        and all(each.meta["val"].dtype not in _MASKS for each in indices)
    )
    if not fits:
        raise MixesRows("takes rows by an index")
    return Rows(0)


def _table(call: Call, state: State, indices: list[Any]) -> State:
    """``table[labels]``: for each row an entry of a table that does not depend on the rows."""
    if state != FREE or len(indices) != 1 or indices[0].meta["val"].dtype in _MASKS:
        raise MixesRows("is indexed by the rows")
    return call.state_of(indices[0])


def follow_getitem(node: fx.Node, states: Mapping[fx.Node, State]) -> State | None:
    """Return the state of one of several results; None if the node is something else."""
    if node.target is not operator.getitem:
        return None
    source: Any = node.args[0]
    state = states[source]
    if not isinstance(state, tuple):
        raise MixesRows("takes a part of something that can't be followed")
    which: Any = node.args[1]
    return state[which]
