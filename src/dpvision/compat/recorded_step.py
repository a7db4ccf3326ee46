"""The loss of a loop that calls ``loss.backward()`` itself: recorded, turned into one loss per row, and proved.

A script in Opacus's style computes ``loss = criterion(model(images), targets)`` in its own code. The tensors that its
loader yields here are ``RecordedTensor``\\ s. They have a shape and a type, and write down every torch function that is
called with them; values are computed only where the script reads them. ``loss.backward()`` turns what was written down
into a ``RecordedStep``: a function from the rows and the model to one loss per row, which ``gradients.proved_graph``
traces and proves like any own loss. The step runs the proved graph; the script's Python code never computes a gradient.

Two channels remain by which private values could get into the function itself, and both are closed. A value that was
read (``.item()``, ``.numpy()``, a branch) may become a number in the code or a setting of the model: so nothing may be
read before the loss is complete, and once anything was read, loss and model must stay the same in every later step
(``privacy_engine``). The number of drawn rows may become one: so the script never sees it. Its tensors seem to have as
many rows as the loader's ``batch_size``, which is public.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from dpvision.errors import PrivacyError, brief
from dpvision.gradients.per_unit import StepFunction, attributes_restored
from dpvision.privacy.values import RowTree

Reduction = Literal["mean", "sum"]
_REMEDY: Final = (
    "Use a criterion of torch.nn with reduction mean or sum, or one loss per row with .mean() at its end; "
    "or take PrivateRun.step with a loss function."
)
_MODEL: Final = "the model"


class RowCount(int):
    """The public number of rows that a recorded tensor seems to have; as a size it stands for the number drawn."""


@final
@dataclass(frozen=True)
class _Ref:
    """A result of an earlier operation: its number in the recording, and the place among its results."""

    node: int
    place: int


@final
@dataclass(frozen=True, eq=False)
class _Operation:
    """One recorded call.

    Attributes:
        function: a torch function, or ``_MODEL``.
        leaves: the arguments, flattened; tensors of the recording are ``_Ref``\\ s.
        structure: of args and kwargs.
        has_gradient: whether it was called with gradients enabled; otherwise its results are constants.
    """

    function: Any
    leaves: tuple[Any, ...]
    structure: TreeSpec
    has_gradient: bool

    @property
    def name(self) -> str:
        """The name of the function; that of a property for its getter."""
        return _name(self.function)

    @property
    def refs(self) -> list[_Ref]:
        """The recorded tensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _Ref)]

    def arguments(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs with every leaf changed."""
        return tree_unflatten([change(leaf) for leaf in self.leaves], self.structure)

    def results(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Run it, or the model in its place, and return the flattened results."""
        found = tree_leaves(run(*args, **kwargs))
        return found if self.has_gradient else [x.detach() if isinstance(x, Tensor) else x for x in found]


def _name(function: Any) -> str:
    if isinstance(function, str):
        return function
    name = str(getattr(function, "__name__", function))
    return getattr(getattr(function, "__self__", None), "__name__", name) if name == "__get__" else name


@final
class BatchShape:
    """How the batches of a loader look: public facts.

    Args:
        example: a batch with a single row; shapes and types are taken.
        size: rows that a batch seems to have.
    """

    def __init__(self, example: Any, *, size: int) -> None:
        leaves, self.structure = tree_flatten(example)
        self.size = size
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self.fakes = [torch.empty((size, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in leaves]
        self.empty = [x[:0].clone() for x in leaves]
        self.outputs: dict[Any, Any] = {}

    def outputs_of(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return tensors without data in the place of the model's outputs; its code runs once for each shape."""
        leaves, structure = tree_flatten((args, kwargs))
        shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        key = (structure, tuple(shapes), model.training)
        if key not in self.outputs:
            with attributes_restored(model):
                self.outputs[key] = model(*args, **kwargs)
        return self.outputs[key]


@final
class Draw:
    """The recording of one batch, from the loader to ``optimizer.step()``. Sensitive.

    Args:
        model: the private model; only it may be called with trainable parameters.
        shape: how the batch looks.
        read: returns the values of the drawn rows, one tensor for each in a batch.
        rows_at_once: rows that the model is run on at once where a value is read; None for all.
        before_read: called before the first value is read.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: BatchShape,
        read: Callable[[], list[Tensor]],
        *,
        rows_at_once: int | None,
        before_read: Callable[[], None],
    ) -> None:
        self._model, self.shape, self._read = model, shape, read
        self._rows_at_once, self._before_read = rows_at_once, before_read
        self._parameters = [id(parameter) for parameter in model.parameters()]
        self._operations: list[_Operation | None] = [None]  # the first stands for the rows themselves
        self._values: dict[int, list[Any]] = {}
        self._views: dict[int, Tensor] = {}  # by storage, kept so that no other storage gets the same address
        self._read_at: int | None = None
        self.loss: RecordedTensor | None = None
        self.is_over = self.is_taken = False

    def batch(self) -> Any:
        """Return what the loader yields: the structure of its batches, with recorded tensors in it."""
        tensors = [RecordedTensor(self, _Ref(0, place), fake) for place, fake in enumerate(self.shape.fakes)]
        return tree_unflatten(tensors, self.shape.structure)

    # Recording

    def call_model(self, model: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Write a call of the model down."""
        if model is not self._model:
            raise PrivacyError(
                "the batch was drawn for another model. Call the model that make_private returned, with batches of the "
                "loader that it returned."
            )
        if [id(parameter) for parameter in self._model.parameters()] != self._parameters:
            raise PrivacyError(
                "the model was called with other parameters than its own (functional_call), which a recording does not "
                "hold. Call the model as it is; other weights need a frozen copy of it."
            )
        return self.call(_MODEL, args, kwargs)

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Write a call down and return its result as recorded tensors, or read values where it needs them."""
        leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
        self._require_own(leaves, function)
        try:
            with self.shape.mode, torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                fake_args, fake_kwargs = tree_unflatten([_fake(leaf) for leaf in leaves], structure)
                if function is _MODEL:
                    result = self.shape.outputs_of(self._model, fake_args, fake_kwargs)
                else:
                    result = function(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
            return self.read(function, args, kwargs)
        # A custom autograd.Function runs with gradients off too: its own backward pass can't be recorded.
        enabled = torch.is_grad_enabled()
        self._operations.append(_Operation(function, tuple(map(_stored, leaves)), structure, enabled))
        node = len(self._operations) - 1
        found, shape = tree_flatten(result)
        for each in found:
            if isinstance(each, Tensor) and each._is_view():
                self._views[_storage(each)] = each
        made = [
            RecordedTensor(self, _Ref(node, place), each) if isinstance(each, Tensor) else each
            for place, each in enumerate(found)
        ]
        return tree_unflatten(made, shape)

    def shares_memory(self, tensor: RecordedTensor) -> bool:
        """Return whether a tensor is a view of another, or another one is a view of it."""
        return _storage(tensor.fake) in self._views

    def _require_own(self, leaves: Sequence[Any], function: Any) -> None:
        """Refuse tensors of another batch, and trainable tensors outside of the model."""
        for leaf in leaves:
            if isinstance(leaf, RecordedTensor):
                if leaf.draw is not self or self.is_over:
                    raise PrivacyError(
                        "a tensor of an earlier batch is used with this one: a step's gradient may depend on its own "
                        "batch only. Keep numbers (.item()), not tensors."
                    )
            elif isinstance(leaf, ReadTensor):
                raise PrivacyError(_WAS_READ)
            elif isinstance(leaf, FakeTensor):
                raise PrivacyError(
                    f"{_name(function)} is given a tensor that the model's own code kept (by a hook or an attribute), "
                    "which a recording does not follow. Return it from the model's forward."
                )
            elif not isinstance(leaf, _CONSTANTS):
                raise PrivacyError(
                    f"{_name(function)} is given a {type(leaf).__name__}, an object that can change from step to step "
                    "without notice. Give tensors and plain values; write functions out with torch operations."
                )
            elif isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled() and function is not _MODEL:
                raise PrivacyError(
                    f"{_name(function)} joins rows with a trainable tensor outside of the model, so its gradient is "
                    "not that of single rows. Call the whole model that make_private returned; for a penalty on "
                    "weights use the optimizer's weight_decay."
                )

    # Values

    def read(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function with values: private, and noted."""
        if self._read_at is None:
            self._before_read()
            self._read_at = len(self._operations)

        def value(leaf: Any) -> Any:
            return leaf.draw.value(leaf.ref) if isinstance(leaf, RecordedTensor) else leaf

        with torch.no_grad():
            plain_args, plain_kwargs = tree_map(value, (tuple(args), dict(kwargs)))
            if function is _MODEL:  # a model that branches on values
                with attributes_restored(self._model):
                    result = self._model(*plain_args, **plain_kwargs)
            else:
                result = function(*plain_args, **plain_kwargs)
        return tree_map(lambda x: x.as_subclass(ReadTensor) if isinstance(x, Tensor) else x, result)

    @property
    def was_read(self) -> bool:
        """Whether the script has read any value of this batch."""
        return self._read_at is not None

    def value(self, ref: _Ref) -> Any:
        """Compute a value. Private: what the script does with it is not covered by any epsilon."""
        if ref.node not in self._values:
            if self.is_over:
                raise PrivacyError(
                    "this value belongs to an earlier batch and was not computed. Read it before the next batch."
                )
            self._values[ref.node] = self._evaluated(ref.node)
        return self._values[ref.node][ref.place]

    def _evaluated(self, node: int) -> list[Any]:
        operation = self._operations[node]
        if operation is None:
            return list(self._read())
        rows = self.value(_Ref(0, 0)).shape[0]

        def value(leaf: Any) -> Any:
            if isinstance(leaf, _Ref):
                return self.value(leaf)
            return _plain(leaf, operation, rows, self.shape.size)

        args, kwargs = operation.arguments(value)
        with torch.no_grad():
            if operation.function is _MODEL:
                with attributes_restored(self._model):
                    return tree_leaves(_in_parts(self._model, args, kwargs, rows, self._rows_at_once))
            return tree_leaves(operation.function(*args, **kwargs))

    def taken(self, losses_N: Tensor, function: RecordedStep) -> None:
        """Note that the step was taken, and keep the loss that it has computed: reading it costs nothing."""
        self.is_taken = True
        divisor = function.divisor_of_value(len(losses_N))
        if self.loss is not None and divisor:
            self._values[self.loss.ref.node] = [losses_N.sum() / divisor]

    def end(self) -> None:
        """Let the rows go; values that were computed stay."""
        self.is_over, self.loss = True, None
        self._read = list

    # The loss

    def backward(self, loss: RecordedTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the loss of this batch for the next ``optimizer.step()``."""
        self._require_own([loss], "backward")
        if any(given not in (None, False) for given in (*args, *kwargs.values())):
            raise PrivacyError(
                "loss.backward() takes no gradient, retain_graph, create_graph or inputs here: one loss is taken once "
                "for each step. Call loss.backward() alone."
            )
        if self.loss is not None:
            raise PrivacyError(
                "loss.backward() was called twice for one batch: a step has one loss. Add the losses, then call "
                "backward() once."
            )
        if loss.dim() and loss.numel() != 1:
            raise PrivacyError(f"the loss has the shape {tuple(loss.shape)}. Reduce it with .mean() first.")
        self.loss = loss

    def step_function(self, reduction: Reduction) -> RecordedStep:
        """Return the recorded loss as a function of rows and model.

        Raises:
            PrivacyError: there is no loss, values were read before it was complete, or it does not use the model.
        """
        if self.loss is None:
            raise PrivacyError("optimizer.step() needs loss.backward() first, in every batch. Call it before step.")
        needed = sorted(self._needed(self.loss.ref.node))
        if self._read_at is not None and needed[-1] >= self._read_at:
            last = self._operations[needed[-1]]
            raise PrivacyError(
                f"a value was read (.item(), .numpy(), print or a branch) before {last.name if last else 'the loss'} "
                "was called, so a private number could be a part of the loss. Read values after loss.backward()."
            )
        numbers = {node: number for number, node in enumerate(needed)}

        def renumbered(leaf: Any) -> Any:
            return _Ref(numbers[leaf.node], leaf.place) if isinstance(leaf, _Ref) else leaf

        operations = [self._operations[node] for node in needed]
        kept = [o and replace(o, leaves=tuple(map(renumbered, o.leaves))) for o in operations]
        through = [self._operations[node] for node in self._needed(self.loss.ref.node, gradient=True)]
        if not any(o is not None and o.function is _MODEL for o in through):
            raise PrivacyError(
                "no gradient of the loss reaches the model: it does not use model(...), or uses it under no_grad, "
                "detached, or in an autograd.Function. Compute the loss from model(...) with torch operations."
            )
        return RecordedStep(tuple(kept), renumbered(self.loss.ref), size=self.shape.size, reduction=reduction)

    def _needed(self, node: int, *, gradient: bool = False) -> set[int]:
        """Return the numbers of the operations that one needs, itself and the rows included.

        Args:
            node: the number of the operation.
            gradient: leave out what no gradient passes.
        """
        found, waiting = {0}, [node]
        while waiting:
            number = waiting.pop()
            operation = self._operations[number]
            if number in found or operation is None:
                continue
            if gradient and not (operation.has_gradient and operation.name != "detach"):
                continue
            found.add(number)
            waiting += [ref.node for ref in operation.refs]
        return found


def _storage(tensor: Tensor) -> int:
    """Identify the memory of a tensor without data."""
    return tensor.untyped_storage()._cdata


def _fake(leaf: Any) -> Any:
    if isinstance(leaf, RecordedTensor):
        return leaf.fake
    return int(leaf) if isinstance(leaf, RowCount) else leaf


def _stored(leaf: Any) -> Any:
    """Return an argument as it is kept; a constant tensor as a copy, so that later changes are noticed."""
    if isinstance(leaf, RecordedTensor):
        return leaf.ref
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _plain(leaf: Any, operation: _Operation, rows: Any, size: int) -> Any:
    """Return an argument that is no tensor of the recording; a number of rows as a size is that of this batch."""
    if isinstance(leaf, RowCount):
        return rows if operation.name in _SHAPES else size
    return leaf


def _in_parts(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, at_once: int | None
) -> RowTree:
    """Run the model on a few rows at once, to save memory where a value is read."""
    if at_once is None or rows <= at_once:
        return model(*args, **kwargs)

    def part(start: int) -> RowTree:
        def cut(x: Any) -> Any:
            return x[start : start + at_once] if isinstance(x, Tensor) and x.dim() and x.shape[0] == rows else x

        own_args, own_kwargs = tree_map(cut, (args, kwargs))
        return model(*own_args, **own_kwargs)

    return tree_map(lambda *each: torch.cat(each), *[part(start) for start in range(0, rows, at_once)])


_WAS_READ: Final = (
    "a value was read from a private batch (by a branch, an index, a loop over rows or a copy), and the loss is "
    f"computed from it, which can't be followed. {_REMEDY}"
)


@final
class ReadTensor(Tensor):
    """Private values that were read: good for metrics, and for no loss."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Refuse."""
        del args, kwargs
        raise PrivacyError(_WAS_READ)


@final
class RecordedTensor(Tensor):
    """A tensor of a private batch: shape, type and history; its values are computed where they are read.

    Everything that torch computes with it is recorded. Reading a value is allowed, as in Opacus: no epsilon covers what
    is printed, logged or decided with it.
    """

    draw: Draw
    ref: _Ref
    fake: Tensor

    @staticmethod
    def __new__(cls, draw: Draw, ref: _Ref, fake: Tensor) -> RecordedTensor:
        """Make a tensor without storage."""
        made = Tensor._make_wrapper_subclass(cls, fake.shape, dtype=fake.dtype, device=fake.device)  # pyright: ignore
        made.draw, made.ref, made.fake = draw, ref, fake
        return made

    def __init__(self, draw: Draw, ref: _Ref, fake: Tensor) -> None:
        del draw, ref, fake

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        return f"RecordedTensor(shape={tuple(self.fake.shape)}, {self.fake.dtype}, private)"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.draw.read(torch.unbind, (self,), {}))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record, read or refuse a call."""
        del types
        kwargs, name = kwargs or {}, _name(func)
        first = args[0] if args else None
        draw = _draw_of(args, kwargs)
        if name in _FACTS and not (name == "grad" and func is torch.autograd.grad):
            with torch._C.DisableTorchFunctionSubclass():
                return _marked(func(*args, **kwargs), draw)
        if name == "backward" and isinstance(first, RecordedTensor):
            return first.draw.backward(first, args[1:], kwargs)
        if name in ("__repr__", "__str__"):
            return repr(first)
        if name in _READS:
            return draw.read(func, args, kwargs)
        if name in _REFUSED or func is torch.autograd.grad:
            raise PrivacyError(f"{name} can't be used on a private batch, whose gradients are clipped first. {_REMEDY}")
        if name == "data":
            return draw.call(Tensor.detach, args, {})
        if name == "__setitem__" or kwargs.get("out") is not None or (name.endswith("_") and not name.endswith("__")):
            return _in_place(draw, func, args, kwargs)
        return draw.call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what did not come by ``__torch_function__``."""
        del types, args, kwargs
        raise PrivacyError(f"{brief(str(func))} can't be recorded on a private batch. {_REMEDY}")


def _draw_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draw:
    """Return the draw that a call belongs to: the one that is not over, if there are several."""
    draws = [leaf.draw for leaf in tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, RecordedTensor)]
    return next((draw for draw in draws if not draw.is_over), draws[0])


def _in_place(draw: Draw, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Write private values into an ordinary tensor, or add to a loss; refuse to write into recorded tensors."""
    written = kwargs.get("out") if kwargs.get("out") is not None else args[0]
    if not isinstance(written, RecordedTensor):
        return draw.read(func, args, kwargs)
    name = _name(func)
    if name in _ADDING and not written.dim() and "out" not in kwargs and not draw.shares_memory(written):
        made = draw.call(getattr(Tensor, name[:-1]), args, kwargs)  # loss += penalty
        if isinstance(made, RecordedTensor) and made.dtype == written.dtype and not made.dim():
            written.ref, written.fake = made.ref, made.fake
            return written
    raise PrivacyError(f"{name} writes into a tensor of a private batch. Use the form that makes a new tensor.")


def _marked(result: Any, draw: Draw) -> Any:
    """Mark the public number of rows in sizes."""
    size = draw.shape.size
    if isinstance(result, torch.Size):
        return torch.Size([RowCount(n) if place == 0 and n == size else n for place, n in enumerate(result)])
    return RowCount(result) if type(result) is int and result == size else result


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FACTS: Final = _names(
    "shape size dim ndim ndimension numel nelement dtype device layout names is_cuda is_cpu is_meta is_mps "
    "is_sparse is_quantized is_floating_point is_complex is_signed element_size itemsize nbytes stride "
    "is_contiguous requires_grad is_leaf __len__ get_device is_tensor is_nested is_inference is_xla is_xpu "
    "is_mkldnn is_neg is_conj grad grad_fn retains_grad _backward_hooks __hash__"
)
"""What says nothing about values: answered from shape and type."""
_READS: Final = _names(
    "item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __format__ __contains__ equal "
    "allclose is_nonzero"
)
_REFUSED: Final = _names(
    "__set__ register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ set_ data_ptr storage "
    "untyped_storage _typed_storage __deepcopy__ __reduce_ex__ share_memory_ apply_ map_ _make_subclass "
    "as_subclass __dlpack__ __cuda_array_interface__ backward"
)
_ADDING: Final = frozenset({"add_", "sub_", "mul_", "div_"})
_CONSTANTS: Final = (
    *(Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, slice, range, type, type(None)),
    *(type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""What a recorded call may be given beside recorded tensors: values that are copied, or can't change."""
_SHAPES: Final = _names("view reshape expand repeat unflatten new_zeros new_ones new_full tile broadcast_to")
"""Functions in which the number of rows is a size, and not a number to compute with."""


@final
class RecordedStep(StepFunction):
    """The loss of a loop, as a function of its rows and the model; the same for every step.

    Args:
        operations: what the loss needs, in order; the first, None, stands for the rows.
        loss: the loss among their results.
        size: the public number of rows over which the loop's mean seems to be taken.
        reduction: "mean" if the loop's loss is a mean over rows, as ``make_private`` was told; otherwise "sum".

    Guarantee: none by itself. ``gradients.proved_graph.prove`` proves the rows of ``losses`` separate, or refuses.
    """

    def __init__(self, operations: tuple[_Operation | None, ...], loss: _Ref, *, size: int, reduction: str) -> None:
        self._operations, self._loss = operations, loss
        self._size, self._reduction = size, reduction

    def losses(self, model: Callable[..., Any], inputs: RowTree, targets: RowTree) -> Tensor:
        """Return one loss per row, whose sum over rows, divided by the public size, is the loop's loss.

        Raises:
            PrivacyError: the loss is no sum or mean of such values.
        """
        scale = 1.0 if self._reduction == "mean" else 1.0 / self._size
        return _Replay(self._operations, model, tree_leaves((inputs, targets)), self._size).total(self._loss, scale)

    def divisor_of_value(self, rows: int) -> float | None:
        """Return what the sum of all losses is divided by to get the loop's own value; None if that is not enough."""
        last = self._operations[self._loss.node]
        if last is None or self._reduction != "mean" or not rows:
            return None
        how = last.name if last.name in ("mean", "sum") else last.arguments(lambda leaf: leaf)[1].get("reduction")
        return {"mean": rows, "batchmean": rows, "sum": self._size}.get(str(how))

    def difference(self, other: RecordedStep) -> str | None:
        """Return the name of the first operation in which another loss differs, or None."""
        mine, theirs = self._operations, other._operations
        for one, two in zip(mine, theirs, strict=False):
            if (one is None) != (two is None) or (one is not None and two is not None and not _same(one, two)):
                return two.name if two is not None else "the batch"
        if len(mine) != len(theirs) or self._loss != other._loss:
            return "the number of operations"
        return None

    @property
    def sha256(self) -> str:
        """Hash of operations and constants: equal for the same loss in another process."""
        parts = [
            (o.name, o.has_gradient, str(o.structure), [_described(leaf) for leaf in o.leaves])
            for o in self._operations
            if o is not None
        ]
        settings = (self._loss, self._size, self._reduction)
        return hashlib.sha256(repr((parts, settings)).encode()).hexdigest()

    def __str__(self) -> str:
        names = [operation.name for operation in self._operations if operation is not None]
        return " → ".join(name for name in names if name not in ("to", "detach", "cpu", "cuda"))


def _described(leaf: Any) -> str:
    """Describe a constant by its value."""
    if isinstance(leaf, (Tensor, np.ndarray)):
        values = leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy() if isinstance(leaf, Tensor) else leaf
        return f"{leaf.dtype} {tuple(leaf.shape)} {hashlib.sha256(values.tobytes()).hexdigest()}"
    return f"{type(leaf).__name__} {leaf!r}"


def _same(one: _Operation, two: _Operation) -> bool:
    """Return whether two operations are the same, their constants included."""
    if one.function != two.function or one.has_gradient != two.has_gradient:
        return False
    if one.structure != two.structure or len(one.leaves) != len(two.leaves):
        return False
    return all(map(_equal, one.leaves, two.leaves))


def _equal(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        same_kind = one.dtype == two.dtype and one.shape == two.shape and one.device == two.device
        return same_kind and bool(torch.equal(one, two))
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, float) and one != one:
        return two != two
    return one is two or bool(one == two)


@final
class _Replay:
    """One evaluation of a recorded loss, on rows of any number."""

    def __init__(
        self, operations: tuple[_Operation | None, ...], model: Callable[..., Any], rows: list[Tensor], size: int
    ) -> None:
        self._operations, self._model, self._size = operations, model, size
        self._rows, self._count = rows, rows[0].shape[0]
        self._values: dict[int, list[Any]] = {0: rows}

    def value(self, ref: _Ref) -> Any:
        """Return a result, for all rows."""
        if ref.node not in self._values:
            operation = self._operation(ref)
            args, kwargs = self._arguments(operation)
            if operation.function is _MODEL:
                self._values[ref.node] = operation.results(self._model, args, kwargs)
            else:
                with self._in_our_words(operation):
                    self._values[ref.node] = operation.results(operation.function, args, kwargs)
        return self._values[ref.node][ref.place]

    @contextmanager
    def _in_our_words(self, operation: _Operation) -> Iterator[None]:
        """Say why an operation fails for a few rows; what fails in a trace is told by the tracer."""
        try:
            yield
        except (RuntimeError, IndexError, ValueError) as error:
            if type(self._rows[0]) is not Tensor:
                raise
            raise PrivacyError(
                f"{operation.name} in the loss fails for another number of rows than the batch has: rows do not stay "
                f"apart, or a constant has one entry for each row. {_REMEDY}"
            ) from error

    def _operation(self, ref: _Ref) -> _Operation:
        operation = self._operations[ref.node]
        if operation is None:
            raise PrivacyError(f"the loss is a tensor of the batch. {_REMEDY}")
        return operation

    def _arguments(self, operation: _Operation) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, _Ref):
                return self.value(leaf)
            return _plain(leaf, operation, self._count, self._size)

        return operation.arguments(value)

    def total(self, ref: _Ref, scale: float) -> Tensor:
        """Return one value per row, such that a scalar result is their sum over rows, times ``scale / size``.

        The scalar must be a mean or a sum over everything that it is made of, or such scalars added up and multiplied
        by constants. All else is refused: a product of two means, for one, has no part of a single row.
        """
        operation = self._operation(ref)
        name = operation.name
        if operation.function is not _MODEL and not ref.place and operation.has_gradient:
            if name in _LINEAR or (name in ("mean", "sum") and not self.value(operation.refs[0]).dim()):
                return self._linear(operation, name, scale)
            reduced = self._reduced(operation, name)
            if reduced is not None:
                values, how = reduced
                with self._in_our_words(operation):
                    per_row = values.reshape(self._count, -1)
                return (per_row.mean(1) if how == "mean" else per_row.sum(1) * self._size) * scale
        raise PrivacyError(
            f"the loss ends in {name}, which is neither a mean or sum over rows nor a sum of such values times "
            f"constants, so no row has a loss of its own. {_REMEDY}"
        )

    def _reduced(self, operation: _Operation, name: str) -> tuple[Tensor, str] | None:
        """Return what a reduction is taken of, before it, and which it is; None if it is no reduction."""
        args, kwargs = operation.arguments(lambda leaf: leaf)
        if name in ("mean", "sum") and not _Axes.of(args[1:], kwargs).over_rows_only(self.value(args[0])):
            return None
        if name in ("mean", "sum"):
            return self.value(args[0]), name
        how = kwargs.get("reduction")
        if how not in ("mean", "sum", "batchmean"):
            return None
        if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
            return None
        if how == "mean" and name in _OWN_DIVISOR and kwargs.get(_OWN_DIVISOR[name]) is not None:
            raise PrivacyError(
                f"{name} with {_OWN_DIVISOR[name]} divides by a sum over all rows of a batch, so rows influence each "
                "other. Use reduction='none', and take .mean() of it."
            )
        plain_args, plain_kwargs = self._arguments(operation)
        with self._in_our_words(operation):
            values = operation.function(*plain_args, **{**plain_kwargs, "reduction": "none"})
        if how == "batchmean":
            return values.reshape(self._count, -1).sum(1), "mean"
        return values, how

    def _linear(self, operation: _Operation, name: str, scale: float) -> Tensor:
        """Return the rows of a sum of scalars, or of a scalar times a constant."""
        args, kwargs = operation.arguments(lambda leaf: leaf)
        first: Any = next(iter(args), None)
        totals = [arg for arg in args if isinstance(arg, _Ref)]
        constants = [_number(arg, self._size) for arg in args if not isinstance(arg, _Ref)]
        if name in _MOVES or name in ("mean", "sum"):  # of a scalar
            return self.total(totals[0], scale)
        if not kwargs and None not in constants and len(args) <= 2:
            if name == "neg":
                return self.total(totals[0], -scale)
            if name in ("add", "sub", "__radd__", "__rsub__"):
                signs = [1.0, -1.0 if "sub" in name else 1.0]
                if name == "__rsub__":
                    signs.reverse()
                each = zip(args, signs, strict=False)
                parts = [self.total(arg, sign * scale) for arg, sign in each if isinstance(arg, _Ref)]
                return parts[0] if len(parts) == 1 else parts[0] + parts[1]
            if len(totals) == 1 and constants and constants[0] is not None:
                if name == "mul":
                    return self.total(totals[0], scale * constants[0])
                if name in ("div", "true_divide") and isinstance(first, _Ref):
                    return self.total(first, scale / constants[0])
        raise PrivacyError(
            f"the loss ends in {name} of values that are sums over rows, so no row has a loss of its own. {_REMEDY}"
        )


_OWN_DIVISOR: Final = {
    **dict.fromkeys(("cross_entropy", "nll_loss", "mse_loss", "l1_loss"), "weight"),
    "ctc_loss": "target_lengths",
}
"""Criteria whose mean is no mean over rows where they are given this argument."""
_MOVES: Final = frozenset({"to", "float", "double", "cpu", "cuda", "clone", "contiguous", "squeeze", "type"})
_LINEAR: Final = _MOVES | {"neg", "add", "sub", "__radd__", "__rsub__", "mul", "div", "true_divide"}


def _number(argument: Any, size: int) -> float | None:
    """Return a constant as a number; None for what is none."""
    if isinstance(argument, RowCount):
        return float(size)
    if isinstance(argument, Tensor) and argument.numel() == 1 and not argument.requires_grad:
        return float(argument)
    plain = isinstance(argument, (int, float)) and not isinstance(argument, bool)
    return float(argument) if plain else None


class _Axes(NamedTuple):
    """The dimensions of a mean or a sum; None for all."""

    dims: tuple[int, ...] | None
    is_plain: bool

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Axes:
        given: Any = next(iter(args), kwargs.get("dim", kwargs.get("axis")))
        others = {name: value for name, value in kwargs.items() if name not in ("dim", "axis") and value is not None}
        plain = len(args) <= 1 and not any(value for name, value in others.items() if name != "dtype")
        dims = (given,) if isinstance(given, int) else None if given is None else tuple(given)
        return _Axes(dims, plain)

    def over_rows_only(self, x: Tensor) -> bool:
        """Whether the result is a scalar: the reduction is over all dimensions."""
        return self.is_plain and (self.dims is None or len({operator.index(d) % x.dim() for d in self.dims}) == x.dim())
