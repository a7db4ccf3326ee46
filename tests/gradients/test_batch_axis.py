"""Every rule of ``batch_axis`` beside the operation itself: a row that is accepted depends on no other row.

Several functions are traced in one graph with a symbolic number of rows. What the rules say about each node is then
compared with what the node computes: with other rows beside a row, its own part of the value must stay as it is, bit
for bit or up to rounding, and it must move with the row to another place. Functions that work across the rows must be
refused, by the operation that does it.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.nn import functional as F

from dpvision.gradients import batch_axis
from dpvision.gradients.batch_axis import (
    FREE,
    RULES,
    Axis,
    Call,
    MixesRows,
    RowNumbers,
    Rows,
    Unset,
    arguments_of,
    follow,
    follow_getitem,
    is_symbolic,
    operation_name,
    reshaped,
    written,
)
from dpvision.gradients.proved_graph import rows_first

pytestmark = pytest.mark.filterwarnings("ignore")

aten = torch.ops.aten
WIDTH, CLASSES, ROWS = 48, 4, 5


@dataclass(frozen=True)
class Given:
    """The rows: x of shape (N, 48), y of classes, and x with its rows in other places, three dimensions each."""

    x: Tensor
    y: Tensor

    @functools.cached_property
    def n(self) -> Any:
        return self.x.shape[0]

    @functools.cached_property
    def first(self) -> Tensor:
        return self.x.view(-1, 3, 16)

    @functools.cached_property
    def second(self) -> Tensor:
        return self.first.transpose(0, 1)

    @functools.cached_property
    def last(self) -> Tensor:
        return self.first.permute(1, 2, 0)

    @functools.cached_property
    def outer(self) -> Tensor:
        return torch.stack([self.x, self.x.cos()]).reshape(-1, 3, 16)

    @functools.cached_property
    def inner(self) -> Tensor:
        return torch.stack([self.x, self.x.cos()], 1).reshape(-1, 3, 16)

    @functools.cached_property
    def image(self) -> Tensor:
        return self.x.view(-1, 3, 4, 4)

    @functools.cached_property
    def volume(self) -> Tensor:
        return self.x.view(-1, 3, 4, 2, 2)

    @functools.cached_property
    def positive(self) -> Tensor:
        return self.first.sigmoid()

    @functools.cached_property
    def whole(self) -> Tensor:
        return (self.first > 0).long()


Function = Callable[[Given], Any]
PLACES = ("first", "second", "last", "outer", "inner")
FEW = ("last", "outer", "inner")


@dataclass(frozen=True)
class Case:
    """A function of the rows, and the operation that must refuse it; None if all must be accepted."""

    name: str
    function: Function
    refused_by: str | None = None
    random: bool = False


CASES: list[Case] = []


def accept(**functions: Function) -> None:
    """Enter functions that must be accepted, by the name of their operation; a number may follow."""
    CASES.extend(Case(name, function) for name, function in functions.items())


def draw(**functions: Function) -> None:
    """Enter functions that draw random numbers and must be accepted."""
    CASES.extend(Case(name, function, random=True) for name, function in functions.items())


def refuse(**functions: Function) -> None:
    """Enter functions that the operation of their name must refuse; ``__2`` and so on may follow."""
    CASES.extend(Case(f"{name} refused", f, refused_by=name.partition("__n")[0]) for name, f in functions.items())


def everywhere(function: Callable[[Tensor], Any], places: Sequence[str] = PLACES) -> Function:
    """Apply a function to the rows in every place."""
    return lambda g: [function(getattr(g, place)) for place in places]


def along(*, name: str, function: Callable[[Tensor, int], Any]) -> None:
    """Enter a function along one dimension: accepted along all but that of the rows, from the front and the back."""
    at = {"first": 0, "second": 1, "last": 2, "outer": 0, "inner": 0}
    fits, mixes = (
        [(p, d) for p in ("second", "last", "inner") for d in range(-3, 3) if (d % 3 == at[p]) is m]
        for m in (False, True)
    )
    for which, refused in ((fits, None), (mixes, name)):
        CASES.append(
            Case(
                f"{name} along {'the rows' if refused else 'others'}",
                lambda g, which=which: [function(getattr(g, place), dim) for place, dim in which],
                refused,
            )
        )


# Element by element

UNARY = {
    name: getattr(torch, name)
    for name in [
        "clone",
        "square",
        "absolute",
        "negative",
        "sigmoid",
        "relu",
        "celu",
        "selu",
        "logical_not",
        "isfinite",
        "tanh",
        "exp",
        "sign",
        "nan_to_num",
    ]
} | {
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "alias": aten.alias.default,
    "lift_fresh_copy": aten.lift_fresh_copy.default,
    "lift": aten.lift.default,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "mish": F.mish,
    "gelu": F.gelu,
    "silu": F.silu,
    "log_sigmoid": F.logsigmoid,
    "softplus": F.softplus,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp_max(0.1),
    "clip": lambda x: x.clip(-0.5, 0.5),
    "special_expit": torch.special.expit,
    "threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "elu": F.elu,
    "pow": lambda x: x**2,
    "rrelu": lambda x: F.rrelu(x, training=False),
    "rsub": lambda x: torch.rsub(x, 1),
    "to": lambda x: x.to(torch.float64),
    "_to_copy": lambda x: aten._to_copy.default(x, dtype=torch.float64),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 3.0),
    "frexp": torch.frexp,
}
for _name, _function in UNARY.items():
    accept(**{_name: everywhere(_function, FEW)})

BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    name: getattr(torch, name)
    for name in [
        "subtract",
        "multiply",
        "divide",
        "floor_divide",
        "true_divide",
        "isclose",
        "logical_and",
        "logical_or",
        "logical_xor",
        "greater",
        "less",
        "greater_equal",
        "less_equal",
        "not_equal",
        "add",
        "mul",
        "maximum",
        "atan2",
    ]
} | {
    "float_power": lambda a, b: torch.float_power(a.abs() + 1, b),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 1.0),
    "clamp": lambda a, b: torch.clamp(a, min=b),
    "special_xlogy": lambda a, b: torch.special.xlogy(a, b.abs() + 1),
    "xlogy": lambda a, b: torch.xlogy(a, b.abs() + 1),
    "addcmul": lambda a, b: torch.addcmul(a, b, b, value=0.5),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b.abs() + 1),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "__and__": lambda a, b: aten.__and__.Tensor(a > 0, b > 0),
    "__or__": lambda a, b: aten.__or__.Tensor(a > 0, b > 0),
    "__xor__": lambda a, b: aten.__xor__.Tensor(a > 0, b > 0),
    "max": torch.max,
    "min": torch.min,
    "copy": aten.copy.default,
    "type_as": lambda a, b: a.type_as(b.double()),
    "mse_loss": lambda a, b: aten.mse_loss.default(a, b, 0),
    "l1_loss": lambda a, b: aten.l1_loss.default(a, b, 0),
    "smooth_l1_loss": lambda a, b: aten.smooth_l1_loss.default(a, b, 0),
    "huber_loss": lambda a, b: aten.huber_loss.default(a, b, 0),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), reduction="none"),
    "binary_cross_entropy_with_logits": lambda a, b: F.binary_cross_entropy_with_logits(
        a, b.sigmoid(), reduction="none"
    ),
    "kl_div": lambda a, b: F.kl_div(a, b.sigmoid(), reduction="none"),
    "soft_margin_loss": lambda a, b: F.soft_margin_loss(a, b.sign(), reduction="none"),
    "poisson_nll_loss": lambda a, b: F.poisson_nll_loss(a, b.sigmoid(), reduction="none"),
    "hinge_embedding_loss": lambda a, b: F.hinge_embedding_loss(a, b.sign(), reduction="none"),
    "broadcast_tensors": lambda a, b: torch.broadcast_tensors(a.clone(), b.clone()),  # it returns what it is given
}
CROSSED = ("type_as", "broadcast_tensors")
for _name, _function in BINARY.items():
    accept(**{_name: everywhere(lambda x, f=_function: f(x, x.cos()), FEW)})
    if "entropy" not in _name and not _name.endswith("1_loss") and _name not in ("mse_loss", "huber_loss"):
        accept(**{f"{_name} with a value": lambda g, f=_function: f(g.first, torch.ones(3, 16))})
    if _name not in CROSSED:
        refuse(**{_name: lambda g, f=_function: f(g.outer, g.inner)})
for _name in [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
    "poisson_nll_loss",
    "hinge_embedding_loss",
]:
    for _reduction in ("mean", "sum"):
        _how = functools.partial(getattr(F, _name), reduction=_reduction)
        refuse(**{f"{_name}__n{_reduction}": lambda g, f=_how: f(g.first, g.first.sigmoid())})
refuse(
    binary_cross_entropy__n2=lambda g: F.binary_cross_entropy(g.positive, g.positive),
    mul=lambda g: g.first * g.n,
    add=lambda g: torch.add(g.first, g.first, alpha=g.n),
    mul__n2=lambda g: torch.arange(g.n) * 2,
    add__n3=lambda g: g.first + torch.empty(3, 16),
)
draw(
    dropout=everywhere(lambda x: F.dropout(x, 0.5)),
    alpha_dropout=everywhere(lambda x: F.alpha_dropout(x, 0.5, training=True)),
    rand_like=everywhere(torch.rand_like),
    randn_like=everywhere(torch.randn_like),
    randint_like=everywhere(lambda x: torch.randint_like(x, 0, 5)),
    bernoulli=everywhere(lambda x: torch.bernoulli(x.sigmoid())),
    normal_1=everywhere(lambda x: torch.normal(x, 1.0)),
    uniform=everywhere(lambda x: x.clone().uniform_()),
    normal=everywhere(lambda x: x.clone().normal_()),
    random=everywhere(lambda x: x.clone().random_()),
    exponential=everywhere(lambda x: x.clone().exponential_()),
    log_normal=everywhere(lambda x: x.clone().log_normal_()),
    geometric=everywhere(lambda x: x.clone().geometric_(0.5)),
    cauchy=everywhere(lambda x: x.clone().cauchy_()),
    bernoulli_2=everywhere(lambda x: x.clone().bernoulli_(x.sigmoid())),
    feature_dropout=lambda g: [F.dropout2d(g.image), F.dropout1d(g.outer), F.dropout1d(g.inner)],
    feature_alpha_dropout=lambda g: F.feature_alpha_dropout(g.image, training=True),
    rand=lambda g: g.x * torch.rand(g.n, 1),
    randn=lambda g: g.x * torch.randn(g.n, 1),
    randint=lambda g: g.x * torch.randint(0, 9, (g.n, 1)),
)
accept(
    fill=everywhere(lambda x: x.clone().fill_(2.0)),
    zero=everywhere(lambda x: x.clone().zero_()),
    copy_=everywhere(lambda x: torch.zeros_like(x).copy_(x)),
    copy_into_unset=lambda g: torch.empty(g.n, 3, 16).copy_(g.first),
    empty_like=lambda g: torch.empty_like(g.first).copy_(g.first),
    new_empty=lambda g: g.x.new_empty(g.n, 3, 16).zero_(),
    add_=everywhere(lambda x: x.clone().add_(x)),
)
refuse(
    feature_dropout=lambda g: F.dropout1d(g.second),
    feature_alpha_dropout=lambda g: F.feature_alpha_dropout(g.last, training=True),
    copy=lambda g: torch.zeros_like(g.outer).copy_(g.inner),
    add__n2=lambda g: torch.zeros_like(g.outer).add_(g.inner),
    zero=lambda g: torch.arange(g.n).zero_(),
    fill=lambda g: torch.arange(g.n).fill_(2),
    index=lambda g: g.x[torch.zeros_like(torch.arange(g.n))],
    index__n2=lambda g: g.x[torch.randint_like(torch.arange(g.n), 0, 2)],
    clone=lambda g: torch.empty(g.n, 3).clone(),
    clone__n2=lambda g: torch.arange(g.n).clone(),
    slice=lambda g: torch.empty(g.n, 3)[:, 1:],
    broadcast_tensors=lambda g: torch.broadcast_tensors(g.outer.clone(), g.inner.clone()),
    rrelu=lambda g: F.rrelu(g.first, training=True),
    t=lambda g: g.x.clone().t_(),
    unsqueeze=lambda g: g.x.clone().unsqueeze_(0),
)
# One draw for all rows: a unit's numbers would depend on which others are in its micro-batch.
refuse(
    rand=lambda g: g.x * torch.rand(48),
    randn=lambda g: g.x * torch.randn(1, 48),
    randint__n2=lambda g: g.x * torch.randint(0, 9, (48,)),
    randperm__n2=lambda g: g.x[:, torch.randperm(48)],
    rand_like=lambda g: g.x * torch.rand_like(torch.ones(48)),
    dropout=lambda g: g.x * F.dropout(torch.ones(48), 0.5),
    bernoulli=lambda g: g.x * torch.empty(1, 1).bernoulli_(0.5),
    uniform=lambda g: g.x * torch.zeros(48).uniform_(),
    scaled_dot_product_attention__n2=lambda g: (
        g.x * F.scaled_dot_product_attention(*[torch.ones(1, 1, 48)] * 3, dropout_p=0.5)[0]
    ),
)
accept(
    dropout_off=lambda g: g.x * F.dropout(torch.ones(48), 0.5, training=False),
    dropout_of_nothing=lambda g: g.x * F.dropout(torch.ones(48), 0.0),
)
# Statistics over a batch are kept by operations whose schema does not say that they write.
refuse(
    batch_norm__n9=lambda g: g.x * F.batch_norm(torch.ones(2, 48), torch.zeros(48), torch.ones(48), training=True)[0],
    instance_norm__n9=lambda g: (
        g.x * F.instance_norm(torch.ones(1, 3, 48), torch.zeros(3), torch.ones(3), use_input_stats=True)[0, 0]
    ),
)

# New tensors

accept(
    zeros=lambda g: g.x + torch.zeros(g.n, 1),
    ones=lambda g: g.last + torch.ones(16, g.n),
    full=lambda g: g.x + torch.full((g.n, 1), 2.0),
    new_zeros=lambda g: g.x + g.x.new_zeros(g.n, 1),
    new_ones=lambda g: g.x + g.x.new_ones(g.n, 1),
    new_full=lambda g: g.inner + g.x.new_full((2 * g.n, 1, 1), 3.0),
    scalar_tensor=lambda g: g.x + torch.scalar_tensor(2.0),
    empty=lambda g: torch.empty(g.n).fill_(1.0),
    arange=lambda g: g.x + torch.arange(48),
    linspace=lambda g: g.x + torch.linspace(0, 1, 48),
    logspace=lambda g: g.x + torch.logspace(0, 1, 48),
    eye=lambda g: g.x @ torch.eye(48),
    tril_indices=lambda g: g.x + torch.tril_indices(3, 3).sum(),
    triu_indices=lambda g: g.x + torch.triu_indices(3, 3).sum(),
    hann_window=lambda g: g.x * torch.hann_window(48),
)
refuse(
    full=lambda g: torch.full((3,), g.n),
    full__n2=lambda g: torch.full((g.n,), g.n),
    new_full=lambda g: g.x.new_full((3,), g.n),
    scalar_tensor=lambda g: torch.scalar_tensor(g.n),
    arange=lambda g: torch.arange(1, g.n + 1),
    arange__n2=lambda g: torch.arange(2 * g.n),
    arange__n3=lambda g: torch.arange(g.n - 1, -1, -1),
    randperm=lambda g: torch.randperm(g.n),
    eye=lambda g: torch.eye(g.n),
    randint=lambda g: torch.randint(0, g.n, (3,)),
    full_like=lambda g: torch.full_like(g.x, g.n),
)

# Views and moves

accept(
    view=lambda g: [g.x.view(-1, 6, 8), g.x.view(-1), g.first.view(g.n * 3, 16)],
    reshape=lambda g: [g.first.reshape(3 * g.n, 16), g.outer.reshape(2 * g.n, 6, 8), g.x.reshape(2 * g.n, 24)],
    _unsafe_view=lambda g: aten._unsafe_view.default(g.x, [g.n, 6, 8]),
    flatten=everywhere(lambda x: [x.flatten(), x.flatten(1), x.flatten(0, 1)]),
    unflatten=lambda g: [g.x.unflatten(1, (6, 8)), g.inner.unflatten(0, (g.n, 2)), g.last.unflatten(1, (4, 4))],
    squeeze=lambda g: [g.x[:, None].squeeze(), g.x[:, None].squeeze(1), g.x[:, None, :, None].squeeze((1, 3))],
    unsqueeze=everywhere(lambda x: [x.unsqueeze(dim) for dim in range(-4, 4)]),
    view_as=lambda g: g.x.view_as(g.first),
    reshape_as=lambda g: g.x.reshape_as(g.first),
    ravel=everywhere(torch.ravel),
    permute=everywhere(lambda x: [x.permute(2, 0, 1), x.permute(-1, 1, 0)]),
    transpose=everywhere(lambda x: [x.transpose(0, 1), x.transpose(-1, 0), x.transpose(2, 1)]),
    swapaxes=everywhere(lambda x: x.swapaxes(0, 2)),
    swapdims=everywhere(lambda x: x.swapdims(1, -1)),
    t=lambda g: g.x.t(),
    movedim=everywhere(lambda x: [x.movedim(0, 2), x.movedim((0, 1), (2, 0)), x.movedim(-1, 0)]),
    moveaxis=everywhere(lambda x: x.moveaxis((2, 0), (0, 1))),
    numpy_T=lambda g: g.x.T,
    mT=everywhere(lambda x: x.mT),
    expand=lambda g: [g.x[None].expand(3, -1, -1), torch.ones(48).expand(g.n, 48), g.x[:, None].expand(-1, 4, -1)],
    expand_as=lambda g: torch.ones(3, 16).expand_as(g.inner),
    broadcast_to=lambda g: torch.broadcast_to(torch.ones(16), (3, g.n, 16)),
    repeat=everywhere(lambda x: [x.repeat(2, 1, 3), x.repeat(2, 3, 1, 2), x.repeat(1, 2, 2)]),
    repeat_free=lambda g: [torch.arange(3.0).repeat(g.n), torch.arange(3.0).repeat(2 * g.n, 2)],
    tile=everywhere(lambda x: [x.tile(2), x.tile(3, 1, 2), x.tile(2, 1, 1, 1)]),
    repeat_interleave=everywhere(lambda x: [x.repeat_interleave(3, dim) for dim in range(3)]),
    slice_all=lambda g: [g.x[:], g.x[0:], g.x[: g.n], g.last[..., : g.n]],
    narrow_all=lambda g: g.x.narrow(0, 0, g.n),
    cat=lambda g: [torch.cat([g.first, g.first.cos()], 1), torch.cat([g.outer, g.outer], -1)],
    concat=lambda g: torch.concat([g.last, g.last.cos()], 1),
    concatenate=lambda g: torch.concatenate([g.second, g.second.cos()], 0),
    stack=everywhere(lambda x: [torch.stack([x, x.cos()], dim) for dim in range(-4, 4)]),
)
refuse(
    view=lambda g: g.x.repeat(2, 1).view(-1, 2, 48),
    view__n2=lambda g: g.x.repeat_interleave(2, 0).view(2, -1, 48),
    reshape=lambda g: g.outer.reshape(g.n, 2, 3, 16),
    reshape__n2=lambda g: g.inner.reshape(2, g.n, 3, 16),
    _unsafe_view=lambda g: aten._unsafe_view.default(g.outer, [g.n, 2, 3, 16]),
    unflatten=lambda g: g.outer.unflatten(0, (g.n, 2)),
    unflatten__n2=lambda g: g.inner.unflatten(0, (2, g.n)),
    view_as=lambda g: g.outer.view_as(g.first[:, None].expand(-1, 2, -1, -1)),
    reshape_as=lambda g: g.outer.reshape_as(g.first[:, None].expand(-1, 2, -1, -1)),
    repeat=lambda g: g.x.repeat(1, g.n),
    tile=lambda g: g.x.tile(1, g.n),
    select=lambda g: g.x[0],
    slice__n2=lambda g: g.x[1:],
    cat=lambda g: torch.cat([g.x, g.x.cos()]),
    concat=lambda g: torch.concat([g.last, g.last], 2),
    concatenate=lambda g: torch.concatenate([g.second, g.second], -2),
    cat__n2=lambda g: torch.cat([g.outer, g.inner], 1),
    stack=lambda g: torch.stack([g.outer, g.inner], 1),
    expand=lambda g: g.x[:, None].expand(-1, g.n, -1),
    broadcast_to=lambda g: torch.broadcast_to(g.x[:, None], (g.n, g.n, 48)),
)
along(name="select", function=lambda x, dim: x.select(dim, 1))
along(name="slice", function=lambda x, dim: aten.slice.Tensor(x, dim, 0, -1))
for _name, _call in {
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(1, dim),
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
    "cummax": torch.cummax,
    "cummin": torch.cummin,
    "diff": lambda x, dim: x.diff(dim=dim),
}.items():
    along(name=_name, function=_call)
accept(
    split=lambda g: [g.first.split(2, 1), g.second.split((4, 12), -1)],
    unsafe_split=lambda g: torch.unsafe_split(g.inner, 2, 1),
    split_with_sizes=lambda g: torch.split_with_sizes(g.last, (1, 2), 0),
    chunk=lambda g: g.outer.chunk(2, 2),
    unsafe_chunk=lambda g: torch.unsafe_chunk(g.second, 2, 2),
    tensor_split=lambda g: [g.first.tensor_split(2, 2), g.last.tensor_split((3, 5), 1)],
    unbind=lambda g: [g.first.unbind(1), g.second.unbind(0), g.last.unbind(-2)],
    narrow=lambda g: [g.first.narrow(1, 1, 2), g.last.narrow(1, 2, 3)],
    rot90=lambda g: [g.first.rot90(1, (1, 2)), g.second.rot90(2, (0, 2)), g.last.rot90(3, (-3, -2))],
    diff=lambda g: g.outer.diff(dim=1, prepend=g.outer[:, :1], append=g.outer[:, 1:]),
    roll=lambda g: g.first.roll((1, 2), (1, 2)),
)
refuse(
    narrow=lambda g: g.second.narrow(1, 0, 2),
    split_with_sizes=lambda g: torch.split_with_sizes(g.x, (g.n, 0), 0),
    rot90=lambda g: g.x.rot90(2),
    rot90__n2=lambda g: g.second.rot90(2, (1, 2)),
    diff=lambda g: g.outer.diff(dim=1, prepend=g.inner[:, :1]),
    roll=lambda g: g.x.roll(1),
    roll__n2=lambda g: g.first.roll((1, 1), (1, 0)),
    roll__n3=lambda g: g.x.roll(g.n, 1),
    flip=lambda g: g.first.flip((1, -3)),
)
for _name, _along in {
    "softmax": lambda x, dim: x.softmax(dim),
    "log_softmax": lambda x, dim: x.log_softmax(dim),
    "_softmax": lambda x, dim: aten._softmax.default(x, dim, False),
    "_log_softmax": lambda x, dim: aten._log_softmax.default(x, dim, False),
    "sort": lambda x, dim: [*x.sort(dim), *x.sort(dim=dim, stable=True)],
    "argsort": lambda x, dim: x.argsort(dim),
    "topk": lambda x, dim: x.topk(2, dim),
    "unfold": lambda x, dim: x.unfold(dim, 2, 1),
}.items():
    along(name=_name, function=_along)
for _name, _call in {
    "fft_fft": lambda x, dim: torch.fft.fft(x, dim=dim),
    "fft_ifft": lambda x, dim: torch.fft.ifft(x, dim=dim),
    "fft_rfft": lambda x, dim: torch.fft.rfft(x, dim=dim),
    "fft_irfft": lambda x, dim: torch.fft.irfft(x, dim=dim),
}.items():
    along(name=_name, function=_call)
accept(
    fft_fft2=lambda g: [torch.fft.fft2(g.first), torch.fft.fft2(g.second, dim=(0, 2))],
    fft_ifft2=lambda g: [torch.fft.ifft2(g.outer), torch.fft.ifft2(g.last, dim=(0, 1))],
    fft_rfft2=lambda g: torch.fft.rfft2(g.inner),
    fft_irfft2=lambda g: torch.fft.irfft2(g.inner),
    real=everywhere(lambda x: torch.fft.fft(x[..., None]).real),
    imag=everywhere(lambda x: torch.fft.fft(x[..., None]).imag),
)
refuse(
    fft_fft2=lambda g: torch.fft.fft2(g.x),
    fft_ifft2=lambda g: torch.fft.ifft2(g.second),
    fft_rfft2=lambda g: torch.fft.rfft2(g.last),
    fft_irfft2=lambda g: torch.fft.irfft2(g.second),
)
accept(
    glu=lambda g: [F.glu(g.first, 2), F.glu(g.second), F.glu(g.outer)],
    tril=lambda g: [g.first.tril(1), torch.triu(g.inner)],
    triu=lambda g: [g.first.triu(-1), g.outer.triu()],
    constant_pad_nd=lambda g: [aten.constant_pad_nd.default(g.second, [1, 2, 0, 0, 1, 0], 2.0), F.pad(g.first, (1, 1))],
    pad=lambda g: [
        F.pad(g.first, (1, 2, 0, 1)),
        F.pad(g.second, (1, 1, 0, 0, 2, 0)),
        F.pad(g.image, (1, 1, 0, 0), mode="circular"),
        F.pad(g.outer, (2, 1), mode="reflect"),
    ],
)
refuse(
    tril=lambda g: g.second.tril(),
    triu=lambda g: g.last.triu(),
    constant_pad_nd=lambda g: aten.constant_pad_nd.default(g.second, [0, 0, 1, 0], 2.0),
    pad=lambda g: F.pad(g.x, (0, 0, 1, -1)),
    pad__n2=lambda g: F.pad(g.last, (1, 1), mode="circular"),
    tril__n2=lambda g: g.first.tril(g.n),
)

# Reductions

REDUCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in [
        "sum",
        "mean",
        "nansum",
        "nanmean",
        "amax",
        "amin",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "logsumexp",
        "argmax",
        "argmin",
        "prod",
        "any",
        "all",
        "max",
        "min",
        "median",
        "nanmedian",
        "mode",
        "kthvalue",
        "norm",
        "count_nonzero",
        "aminmax",
    ]
} | {
    "linalg_vector_norm": torch.linalg.vector_norm,
}


def _norm(x: Tensor, p: float = 2.0, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return aten.norm.Scalar(x, p) if dim is None else aten.norm.ScalarOpt_dim(x, p, [dim], keepdim)


REDUCTIONS["norm"] = _norm


NO_KEEPDIM, ALL = (
    ("count_nonzero",),
    [
        "sum",
        "mean",
        "amax",
        "var",
        "std",
        "argmax",
        "prod",
        "any",
        "max",
        "min",
        "median",
        "norm",
        "linalg_vector_norm",
    ],
)
for _name, _reduce in REDUCTIONS.items():

    def _one(x: Tensor, dim: int, f: Any = _reduce, name: str = _name) -> Any:
        x = x > 0 if name in ("any", "all") else x
        first = (1,) if name == "kthvalue" else (2,) if name in ("norm",) else ()
        found = [f(x, *first, dim=dim)]
        if name not in NO_KEEPDIM:
            found.append(f(x, *first, dim=dim, keepdim=True))
        return found

    along(name=_name, function=_one)
for _name in ALL:
    refuse(**{f"{_name}__n all": lambda g, f=REDUCTIONS[_name]: f(g.first)})
accept(
    bucketize=everywhere(lambda x: torch.bucketize(x, torch.tensor([-0.5, 0.5]))),
    view_as_complex=everywhere(lambda x: torch.view_as_real(torch.view_as_complex(torch.stack([x, x.cos()], -1)))),
    complex=everywhere(lambda x: torch.complex(x, x.cos()).real),
    polar=everywhere(lambda x: torch.polar(x.abs(), x).imag),
)
refuse(
    bucketize=lambda g: torch.bucketize(torch.ones(2), g.x[:, 0]),
    complex=lambda g: torch.complex(g.outer, g.inner).real,
)
accept(
    sum_of_two=lambda g: [g.first.sum((1, 2)), g.second.sum((0, -1), keepdim=True), g.last.var((0, 1), correction=2)],
    cosine_similarity=lambda g: [F.cosine_similarity(g.first, g.first.cos(), dim) for dim in (1, 2, -1)],
    pairwise_distance=lambda g: [F.pairwise_distance(x, x.cos()) for x in (g.first, g.second, g.outer)],
)
refuse(
    sum__n2=lambda g: g.first.sum((1, 0)),
    sum__n3=lambda g: g.first.sum(()),
    cosine_similarity=lambda g: F.cosine_similarity(g.first, g.first, 0),
    cosine_similarity__n2=lambda g: F.cosine_similarity(g.outer, g.inner),
    pairwise_distance=lambda g: F.pairwise_distance(g.last, g.last),
    pairwise_distance__n2=lambda g: F.pairwise_distance(g.outer, g.inner),
)

# Layers

W = torch.linspace(-1, 1, 3 * 3 * 3 * 3 * 3)
W2, W1, W3 = W[:81].view(3, 3, 3, 3), W[:27].view(3, 3, 3), W[:72].view(3, 3, 2, 2, 2)
accept(
    conv1d=lambda g: [F.conv1d(x, W1, padding=1) for x in (g.first, g.outer, g.inner)],
    conv2d=lambda g: [F.conv2d(g.image, W2, stride=2, padding=1), F.conv2d(g.image, W2, padding="same")],
    conv3d=lambda g: F.conv3d(g.volume, W3),
    convolution=lambda g: aten.convolution.default(g.image, W2, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    conv_transpose1d=lambda g: F.conv_transpose1d(g.first, W1),
    conv_transpose2d=lambda g: F.conv_transpose2d(g.image, W2),
    conv_transpose3d=lambda g: F.conv_transpose3d(g.volume, W3),
    linear=lambda g: [F.linear(x, W[:64].view(4, 16), W[:4]) for x in (g.first, g.second, g.outer, g.inner)],
    bilinear=lambda g: [F.bilinear(x, x.cos(), W[:16].view(1, 4, 4)) for x in (g.first[..., :4], g.second[..., :4])],
    group_norm=lambda g: [F.group_norm(x, 3, W[:3], W[:3]) for x in (g.first, g.outer, g.inner)],
    layer_norm=lambda g: [F.layer_norm(x, (16,), W[:16]) for x in (g.first, g.second, g.outer, g.inner)],
    layer_norm_2=lambda g: F.layer_norm(g.first, (3, 16)),
    rms_norm=lambda g: [F.rms_norm(x, (16,)) for x in (g.first, g.second, g.outer, g.inner)],
    instance_norm=lambda g: [F.instance_norm(x) for x in (g.first, g.outer, g.inner)],
    instance_norm_2=lambda g: F.instance_norm(g.first, W[:3], W[:3].abs() + 1, use_input_stats=False),
    batch_norm=lambda g: [F.batch_norm(x, W[:3], W[:3].abs() + 1) for x in (g.first, g.outer, g.inner)],
    prelu=lambda g: [F.prelu(g.first, W[:3]), F.prelu(g.last, W[:16]), F.prelu(g.outer, W[:1])],
    embedding=lambda g: [F.embedding(g.whole, W[:10].view(2, 5)), F.embedding(g.whole.mT, W[:10].view(2, 5))],
    one_hot=lambda g: [F.one_hot(g.y, CLASSES), F.one_hot(g.whole.transpose(0, 1), 2)],
)
refuse(
    conv1d=lambda g: F.conv1d(g.last[:, :3].transpose(0, 1)[:3], W1, padding=1),
    conv1d__n2=lambda g: F.conv1d(g.last, W[:48].view(1, 16, 3)),
    conv2d=lambda g: F.conv2d(torch.ones(1, 3, 9, 9), g.image),
    conv2d__n2=lambda g: F.conv2d(g.image.permute(1, 2, 3, 0), W[:16].view(1, 4, 2, 2)),
    conv3d=lambda g: F.conv3d(g.image.transpose(0, 1)[None], W3[:, :, :2]),
    conv_transpose1d=lambda g: F.conv_transpose1d(g.last, W[:48].view(16, 3, 1)),
    linear=lambda g: F.linear(torch.ones(16), g.x[:, :16]),
    bilinear=lambda g: F.bilinear(g.outer, g.inner, torch.ones(1, 16, 16)),
    group_norm=lambda g: F.group_norm(g.second.repeat(1, 1, 1), 1),
    group_norm__n2=lambda g: F.group_norm(g.last, 16),
    layer_norm=lambda g: F.layer_norm(g.last, (g.n,)),
    layer_norm__n2=lambda g: F.layer_norm(g.second, (g.n, 16)),
    rms_norm=lambda g: F.rms_norm(g.last, (g.n,)),
    instance_norm=lambda g: F.instance_norm(g.second),
    instance_norm__n2=lambda g: F.instance_norm(g.first, torch.zeros(3), torch.ones(3), use_input_stats=True),
    batch_norm=lambda g: F.batch_norm(g.first, None, None, training=True),
    batch_norm__n2=lambda g: F.batch_norm(g.last, W[:16], W[:16].abs() + 1),
    prelu=lambda g: F.prelu(g.second, W[:1]),
    embedding=lambda g: F.embedding(torch.tensor([0, 1]), g.x),
    embedding__n2=lambda g: F.embedding(g.whole, W[:10].view(2, 5), scale_grad_by_freq=True),
)


SPATIAL: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "max_pool1d": lambda a, b, c: F.max_pool1d(a, 2),
    "avg_pool1d": lambda a, b, c: F.avg_pool1d(a, 2),
    "adaptive_avg_pool1d": lambda a, b, c: F.adaptive_avg_pool1d(a, 3),
    "adaptive_max_pool1d": lambda a, b, c: F.adaptive_max_pool1d(a, 3),
    "upsample_nearest1d": lambda a, b, c: F.interpolate(a, 20),
    "upsample_linear1d": lambda a, b, c: F.interpolate(a, 20, mode="linear"),
    "reflection_pad1d": lambda a, b, c: aten.reflection_pad1d.default(a, [1, 2]),
    "replication_pad1d": lambda a, b, c: aten.replication_pad1d.default(a, [1, 2]),
    "max_pool1d_with_indices": lambda a, b, c: F.max_pool1d(a, 2, return_indices=True),
    "_upsample_nearest_exact1d": lambda a, b, c: F.interpolate(a, 20, mode="nearest-exact"),
    "max_pool2d": lambda a, b, c: F.max_pool2d(b, 2),
    "avg_pool2d": lambda a, b, c: F.avg_pool2d(b, 2),
    "adaptive_avg_pool2d": lambda a, b, c: F.adaptive_avg_pool2d(b, 3),
    "_adaptive_avg_pool2d": lambda a, b, c: aten._adaptive_avg_pool2d.default(b, [3, 3]),
    "adaptive_max_pool2d": lambda a, b, c: F.adaptive_max_pool2d(b, 3),
    "upsample_nearest2d": lambda a, b, c: F.interpolate(b, 5),
    "upsample_bilinear2d": lambda a, b, c: F.interpolate(b, 5, mode="bilinear"),
    "upsample_bicubic2d": lambda a, b, c: F.interpolate(b, 5, mode="bicubic"),
    "_upsample_bilinear2d_aa": lambda a, b, c: F.interpolate(b, 3, mode="bilinear", antialias=True),
    "_upsample_nearest_exact2d": lambda a, b, c: F.interpolate(b, 5, mode="nearest-exact"),
    "reflection_pad2d": lambda a, b, c: aten.reflection_pad2d.default(b, [1, 2, 1, 0]),
    "replication_pad2d": lambda a, b, c: aten.replication_pad2d.default(b, [1, 2, 1, 0]),
    "max_pool2d_with_indices": lambda a, b, c: F.max_pool2d(b, 2, return_indices=True),
    "pixel_shuffle": lambda a, b, c: F.pixel_shuffle(torch.cat([b, b.cos()], 1)[:, :4], 2),
    "pixel_unshuffle": lambda a, b, c: F.pixel_unshuffle(b, 2),
    "channel_shuffle": lambda a, b, c: F.channel_shuffle(b, 3),
    "im2col": lambda a, b, c: F.unfold(b, 2),
    "grid_sampler": lambda a, b, c: F.grid_sample(b, b.permute(0, 2, 3, 1)[..., :2].tanh(), align_corners=False),
    "grid_sampler_2d": lambda a, b, c: aten.grid_sampler_2d.default(
        b, b.permute(0, 2, 3, 1)[..., :2].tanh(), 0, 0, False
    ),
    "max_pool3d": lambda a, b, c: F.max_pool3d(c, 2),
    "avg_pool3d": lambda a, b, c: F.avg_pool3d(c, 2),
    "adaptive_avg_pool3d": lambda a, b, c: F.adaptive_avg_pool3d(c, 3),
    "adaptive_max_pool3d": lambda a, b, c: F.adaptive_max_pool3d(c, 3),
    "upsample_nearest3d": lambda a, b, c: F.interpolate(c, 5),
    "upsample_trilinear3d": lambda a, b, c: F.interpolate(c, 5, mode="trilinear"),
    "reflection_pad3d": lambda a, b, c: aten.reflection_pad3d.default(c, [1, 0, 1, 0, 1, 0]),
    "replication_pad3d": lambda a, b, c: aten.replication_pad3d.default(c, [1, 2, 1, 0, 1, 1]),
    "max_pool3d_with_indices": lambda a, b, c: F.max_pool3d(c, 2, return_indices=True),
}
for _name, _spatial in SPATIAL.items():
    accept(**{_name: lambda g, f=_spatial: f(g.first, g.image, g.volume)})
    accept(
        **{
            f"{_name} of blocks": lambda g, f=_spatial: f(
                g.outer, g.inner.reshape(-1, 3, 4, 4), g.inner.reshape(-1, 3, 4, 2, 2)
            )
        }
    )
    if "shuffle" not in _name and not _name.startswith("grid"):
        # The rows in the place of channels
        refuse(**{_name: lambda g, f=_spatial: f(*(x.transpose(0, 1) for x in (g.first, g.image, g.volume)))})
accept(
    col2im=lambda g: [F.fold(x.reshape(-1, 12, 4), (4, 4), 2, stride=2) for x in (g.x, g.outer, g.inner)],
    affine_grid_generator=lambda g: [
        F.affine_grid(g.x[:, :6].view(-1, 2, 3), [g.n, 3, 4, 4], align_corners=False),
        F.affine_grid(W[:6].view(1, 2, 3).expand(g.n, 2, 3), [g.n, 1, 2, 2], align_corners=True),
    ],
)
refuse(
    col2im=lambda g: F.fold(g.x.view(-1, 12, 4).transpose(0, 1), (2, 2), 1),
    pixel_unshuffle=lambda g: F.pixel_unshuffle(g.image.transpose(0, 1), 2),
    grid_sampler=lambda g: F.grid_sample(g.image.transpose(0, 1), torch.zeros(3, 2, 2, 2), align_corners=False),
    max_pool2d__n2=lambda g: F.max_pool2d(g.second, 2),  # an image without a batch, whose height are the rows
    avg_pool1d__n2=lambda g: F.avg_pool1d(g.x, 2),
)

# Recurrent networks, losses of classes, products

RECURRENT = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": functools.partial(nn.RNN, nonlinearity="relu"),
}
CELLS = {"lstm_cell": nn.LSTMCell, "gru_cell": nn.GRUCell, "rnn_tanh_cell": nn.RNNCell}


def _free_weights(module: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(p.shape, generator=generator) for name, p in module.named_parameters()}


def _recurrent(name: str, kind: Any) -> None:
    for batch_first in (True, False):
        module = kind(16, 5, batch_first=batch_first)
        weights = [_free_weights(module)[n] for group in module._all_weights for n in group]
        call = getattr(torch.ops.aten, name).input

        def run(x: Tensor, n: Any, call: Any = call, weights: Any = weights, batch_first: bool = batch_first) -> Any:
            state = torch.zeros(1, n, 5)
            hidden = [state, state] if name == "lstm" else state
            return call(x, hidden, weights, True, 1, 0.0, False, False, batch_first)

        accept(**{f"{name} {batch_first}": lambda g, f=run, b=batch_first: f(g.first if b else g.second, g.n)})
        if batch_first:
            refuse(**{name: lambda g, f=run: f(g.inner, 2 * g.n)})


for _name, _kind in RECURRENT.items():
    _recurrent(_name, _kind)
for _name, _kind in {**CELLS, "rnn_relu_cell": functools.partial(nn.RNNCell, nonlinearity="relu")}.items():
    _weights = list(_free_weights(_kind(48, 5)).values())

    def _step(x: Tensor, n: Any, name: str = _name, weights: Any = _weights) -> Any:
        state = torch.zeros(n, 5)
        return getattr(torch.ops.aten, name)(x, [state, state] if name == "lstm_cell" else state, *weights)

    accept(**{_name: lambda g, f=_step: f(g.x, g.n)})
    refuse(**{_name: lambda g, f=_step: f(g.outer.flatten(1), 2 * g.n)})
accept(
    cross_entropy_loss=lambda g: [
        F.cross_entropy(g.x[:, :CLASSES], g.y, W[:CLASSES].abs(), reduction="none", label_smoothing=0.1),
        F.cross_entropy(g.first, g.first.softmax(1), reduction="none"),
    ],
    nll_loss_nd=lambda g: F.nll_loss(g.x[:, :CLASSES], g.y, reduction="none"),
    nll_loss=lambda g: aten.nll_loss.default(g.x[:, :CLASSES], g.y, None, 0),
    nll_loss2d=lambda g: aten.nll_loss2d.default(g.image, (g.image[:, 0] > 0).long(), None, 0),
    multi_margin_loss=lambda g: F.multi_margin_loss(g.x[:, :CLASSES], g.y, reduction="none"),
    multilabel_margin_loss=lambda g: F.multilabel_margin_loss(g.x, (g.x > 0).long() - 1, reduction="none"),
    mm=lambda g: [torch.mm(g.x, W[:144].view(48, 3)), torch.mm(W[:144].view(3, 48), g.x.t())],
    bmm=lambda g: [torch.bmm(g.first, g.first.mT), torch.bmm(g.second, W[:96].view(3, 16, 2)), g.outer.bmm(g.outer.mT)],
    matmul=lambda g: [
        g.first @ g.first.mT,
        g.second @ W[:16],
        W[:9].view(3, 3) @ g.first,
        W[:3] @ g.first,
        W[:9].view(3, 3) @ g.last.flatten(1),
        g.inner[:, None] @ g.inner[:, None].mT,
        g.first @ W[:16],
        g.x[:, None] @ g.x[:, :, None],
    ],
    addmm=lambda g: [torch.addmm(g.x, g.x, torch.eye(48)), torch.addmm(W[:48], g.x, torch.eye(48), beta=2)],
    baddbmm=lambda g: torch.baddbmm(g.first, g.first, torch.eye(16).expand(g.n, 16, 16)),
    mv=lambda g: torch.mv(g.x, W[:48]),
    addmv=lambda g: [torch.addmv(g.x[:, 0], g.x, W[:48]), torch.addmv(W[:1], g.x, W[:48])],
    einsum=lambda g: [
        torch.einsum("nij,nkj->nik", g.first, g.first),
        torch.einsum("inj,nij->jn", g.second, g.first),
        torch.einsum("nij,jk->kin", g.outer, W[:32].view(16, 2)),
        torch.einsum("...j,jk->...k", g.outer, W[:32].view(16, 2)),
        torch.einsum("...ij,...j->i...", g.image, g.first[..., :4]),
        torch.einsum("i...,ki->k...", g.second, W[:6].view(2, 3)),
        torch.einsum("...i,...i->...", W[:48].view(3, 16), g.first),
    ],
    tensordot=lambda g: [
        torch.tensordot(g.first, W[:48].view(3, 16), dims=2),
        torch.tensordot(g.last, W[:48].view(3, 16), dims=([1, 0], [1, 0])),
        torch.tensordot(W[:32].view(2, 16), g.inner, dims=([1], [2])),
        torch.tensordot(g.second, W[:3], dims=([0], [0])),
    ],
    scaled_dot_product_attention=lambda g: [
        F.scaled_dot_product_attention(g.first, g.first.cos(), g.first),
        F.scaled_dot_product_attention(g.image.transpose(0, 1), g.image.transpose(0, 1), g.image.transpose(0, 1)),
        F.scaled_dot_product_attention(g.image, g.image, g.image, attn_mask=g.image),
    ],
)
refuse(
    cross_entropy_loss=lambda g: F.cross_entropy(g.x[:, :CLASSES], g.y),
    cross_entropy_loss__n2=lambda g: F.cross_entropy(g.outer[:, 0], g.inner[:, 0].argmax(1), reduction="none"),
    cross_entropy_loss__n3=lambda g: F.cross_entropy(g.last, (g.last[:, 0] > 0).long(), reduction="none"),
    nll_loss_nd=lambda g: F.nll_loss(g.x[:, :CLASSES], g.y, reduction="sum"),
    nll_loss=lambda g: aten.nll_loss.default(g.x[:, :CLASSES], g.y),
    multi_margin_loss=lambda g: F.multi_margin_loss(g.x[:, :CLASSES], g.y),
    multilabel_margin_loss=lambda g: F.multilabel_margin_loss(g.x, (g.x > 0).long() - 1),
    mm=lambda g: g.x.t().mm(g.x),
    mm__n2=lambda g: g.x.mm(g.x.t()),
    bmm=lambda g: g.second.bmm(g.second.mT),
    bmm__n2=lambda g: g.outer.bmm(g.inner.mT),
    bmm__n3=lambda g: g.last.bmm(g.last.mT),
    matmul=lambda g: g.x.t() @ g.x,
    matmul__n2=lambda g: g.x @ g.x.t(),
    matmul__n3=lambda g: g.last @ g.x[:, 0],
    matmul__n4=lambda g: g.x[:, 0] @ g.first.transpose(0, 1),
    matmul__n5=lambda g: g.x[:, 0] @ g.x[:, 1],
    addmm=lambda g: torch.addmm(W[:48], g.x.t(), g.x),
    addmm__n2=lambda g: torch.addmm(g.x, g.x, torch.eye(48), beta=g.n),
    baddbmm=lambda g: torch.baddbmm(torch.zeros(3, 16, 16), g.second.mT, g.second),
    mv=lambda g: g.x.t().mv(g.x[:, 0]),
    addmv=lambda g: torch.addmv(W[:48], g.x.t(), g.x[:, 0]),
    einsum=lambda g: torch.einsum("nij->ij", g.first),
    einsum__n2=lambda g: torch.einsum("ij,kj->ik", g.x, g.x),
    einsum__n4=lambda g: torch.einsum("...j->j", g.x),
    einsum__n5=lambda g: torch.einsum("...ij,...kj->...ik", g.second, g.second),
    tensordot=lambda g: torch.tensordot(g.x, g.x, dims=([0], [0])),
    tensordot__n2=lambda g: torch.tensordot(g.x, g.x, dims=([1], [1])),
    einsum__n3=lambda g: torch.einsum("nij,nij->nij", g.outer, g.inner),
    scaled_dot_product_attention=lambda g: F.scaled_dot_product_attention(g.second, g.second, g.second),
    scaled_dot_product_attention__n2=lambda g: F.scaled_dot_product_attention(g.x[None, :, None], g.x[None], g.x[None]),
    scaled_dot_product_attention__n3=lambda g: F.scaled_dot_product_attention(g.outer, g.inner, g.inner),
    scaled_dot_product_attention__n4=lambda g: F.scaled_dot_product_attention(
        g.inner, g.inner, g.inner, attn_mask=(g.outer > 0)[:, :, :3]
    ),
)

# Indices

for _name, _index in {
    "gather": lambda x, dim: x.gather(dim, (x > 0).long()),
    "scatter": lambda x, dim: x.scatter(dim, (x > 0).long(), 2.0),
    "scatter_add": lambda x, dim: x.scatter_add(dim, (x > 0).long(), x.cos()),
    "scatter_reduce": lambda x, dim: x.scatter_reduce(dim, (x > 0).long(), x.cos(), "amax"),
    "index_select": lambda x, dim: x.index_select(dim, torch.tensor([1, 0, 1])),
}.items():
    along(name=_name, function=_index)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = 0.5
    return x


accept(
    index_put=lambda g: [
        *(_masked(getattr(g, place), getattr(g, place) > 0) for place in PLACES),
        _masked(g.first, g.x[:, 0] > 0),
        _masked(g.second, g.second[:, :, 0] > 0),
        g.inner.index_put((g.inner[..., 0] > 0,), torch.ones(1, 1), accumulate=True),
    ],
)
refuse(
    index_put=lambda g: _masked(g.outer, g.inner > 0),
    index_put__n2=lambda g: _masked(g.x, torch.tensor([1, 0])),
    index_put__n3=lambda g: _masked(g.x, g.y),
    index_put__n4=lambda g: g.x.index_put((g.x[:, 0] > 0,), W[:48]),
    index_put__n5=lambda g: W[:4].index_put((g.y,), torch.ones(())),
)
accept(
    index=lambda g: [
        g.first[:, torch.tensor([1, 0])],
        g.first[:, torch.tensor([1, 0]), torch.tensor([3, 4])],
        g.second[torch.tensor([[1], [0]])],
        g.last[torch.tensor([0, 1])],
        g.first[torch.arange(g.n), g.y % 3],
        g.first[torch.arange(g.n), g.y % 3, torch.tensor([1])],
        W[:12].view(4, 3)[g.y],
        W[:12].view(2, 6)[g.whole],
    ],
)
refuse(
    gather=lambda g: g.outer.gather(1, (g.inner > 0).long()),
    scatter=lambda g: g.outer.scatter(1, (g.outer > 0).long(), g.inner),
    scatter_add=lambda g: g.outer.scatter_add(1, (g.inner > 0).long(), g.outer),
    index_select=lambda g: torch.ones(4, 4).index_select(0, g.y),
    index__n3=lambda g: g.x[torch.tensor([1, 0])],
    index__n4=lambda g: g.second[:, torch.tensor([1, 0])],
    index__n5=lambda g: g.x[g.y],
    index__n6=lambda g: g.x[torch.arange(g.n), torch.arange(g.n)],
    index__n7=lambda g: g.x.t()[g.y, torch.arange(g.n)],
    index__n8=lambda g: g.inner[torch.arange(g.n)],
    index__n9=lambda g: W[:16].view(4, 4)[g.y, g.y],
    index__n10=lambda g: g.image[:, torch.tensor([1, 0]), :, torch.tensor([1, 0])],
)

# Follow and compare


class Functions(nn.Module):
    """Several functions of the same rows."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.cases = cases

    def forward(self, x: Tensor, y: Tensor) -> list[list[Tensor]]:
        given = Given(x, y)
        return [_leaves(case.function(given)) for case in self.cases]


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for each in value for leaf in _leaves(each)]


@dataclass
class Followed:
    """A traced graph: what the rules say about its nodes, and what the nodes compute."""

    graph_module: fx.GraphModule
    constants: list[Any]
    outputs: list[list[fx.Node]]
    axis: Axis
    states: dict[fx.Node, Any] = field(default_factory=dict)
    refusals: dict[fx.Node, tuple[str, str]] = field(default_factory=dict)

    def values(self, x: Tensor, y: Tensor) -> dict[fx.Node, Any]:
        """Run the graph and return copies of all values, as they are when they are made."""
        found: dict[fx.Node, Any] = {}

        class Recorder(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                found[n] = value = super().run_node(n)
                if isinstance(value, Tensor):
                    found[n] = value.detach().clone()
                return value

        torch.manual_seed(0)
        Recorder(self.graph_module, garbage_collect_values=False).run(*self.constants, x, y)
        return found


def wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def rows_of(number: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, WIDTH, generator=generator), torch.randint(CLASSES, (number,), generator=generator)


def followed(cases: Sequence[Case]) -> Followed:
    """Trace functions in one graph, and follow the rows through it, past what is refused."""
    rows = Dim("rows", min=ROWS)  # so many that no size of a refused function is special
    program = export(Functions(cases), rows_of(7, 0), dynamic_shapes=({0: rows}, {0: rows}), strict=False)
    nodes = list(program.graph_module.graph.nodes)
    specs = [spec for spec in program.graph_signature.input_specs if spec.target is not None]
    constants = [program.constants[str(spec.target)] for spec in specs]
    flat = iter(nodes[-1].args[0])
    shaped = Functions(cases)(*rows_of(ROWS, 0))
    inputs = [node for node in nodes if node.op == "placeholder"]
    axis = Axis(inputs[-1].meta["val"].shape[0])
    result = Followed(program.graph_module, constants, [[next(flat) for _ in case] for case in shaped], axis)
    for node in nodes[:-1]:
        _follow_one(result, node, is_row=node in inputs[-2:])
    return result


def _follow_one(result: Followed, node: fx.Node, *, is_row: bool) -> None:
    if node.op == "placeholder":
        result.states[node] = Rows(0) if is_row else FREE
        return
    if is_symbolic(node):
        result.states[node] = FREE
        return
    refused = [result.refusals[each] for each in node.all_input_nodes if each in result.refusals]
    if refused:
        result.refusals[node] = refused[0]
        return
    try:
        state = follow_getitem(node, result.states)
        state = state or follow(Call(node, arguments_of(node), result.states, result.axis))
    except MixesRows as error:
        result.refusals[node] = (operation_name(node.target), str(error))
        return
    result.states[node] = state
    for name in written(node.target):
        result.states[arguments_of(node)[name]] = state


def part_of_rows(value: Tensor, state: Rows) -> Tensor:
    """Return a value with its rows in front."""
    return rows_first(value, state.dim, state.outer, state.inner)


CHUNK = 60
GROUPS = [CASES[start : start + CHUNK] for start in range(0, len(CASES), CHUNK)]


@functools.cache
def group(number: int) -> Followed:
    return followed(GROUPS[number])


def row_states(followed_graph: Followed) -> dict[fx.Node, Rows]:
    """Return the nodes with rows; not memory that is filled later."""
    states = followed_graph.states.items()
    return {n: state for n, state in states if isinstance(state, Rows) and "empty" not in operation_name(n.target)}


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_each_function_is_accepted_or_refused_by_the_operation_that_mixes(number: int) -> None:
    found, wrong = group(number), []
    for case, outputs in zip(GROUPS[number], found.outputs, strict=True):
        refusals = {found.refusals.get(node, (None, ""))[0] for node in outputs}
        if refusals != {case.refused_by}:
            wrong.append((case.name, refusals, [found.refusals.get(node) for node in outputs]))
    assert not wrong
    # Each by its own rule: the comparison with the traced shape is the line behind it.
    assert not [(node, why) for node, why in found.refusals.items() if "puts the rows where" in why[1]]


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_a_row_of_any_value_depends_on_its_own_row_alone(number: int) -> None:
    found = group(number)
    before, wrong = found.values(*rows_of(ROWS, 1)), set[str]()
    other = rows_of(ROWS, 2)
    for kept in (0, 2, ROWS - 1):
        mixed = tuple(
            b.index_copy(0, torch.tensor([kept]), a[[kept]]) for a, b in zip(rows_of(ROWS, 1), other, strict=True)
        )
        after = found.values(*mixed)
        for node, state in row_states(found).items():
            one, two = (part_of_rows(values[node], state)[kept] for values in (before, after))
            if not torch.allclose(wide(one), wide(two), rtol=1e-5, atol=1e-5, equal_nan=True):
                wrong.add(f"{node.name}: {operation_name(node.target)}")
    assert not wrong


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_a_row_gives_the_same_at_another_place_among_more_rows(number: int) -> None:
    found, wrong = group(number), set[str]()
    drawn = _drawn(found)
    x, y = rows_of(ROWS, 1)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    more = tuple(torch.cat([each[order], other]) for each, other in zip((x, y), rows_of(4, 5), strict=True))
    before, after = found.values(x, y), found.values(*more)
    for node, state in row_states(found).items():
        if node not in drawn:
            one, two = part_of_rows(before[node], state)[order], part_of_rows(after[node], state)[:ROWS]
            if not torch.allclose(wide(one), wide(two), rtol=1e-5, atol=1e-5, equal_nan=True):
                wrong.add(f"{node.name}: {operation_name(node.target)}")
    free = [
        node for node, state in found.states.items() if state == FREE and node not in drawn and not is_symbolic(node)
    ]
    wrong |= {node.name for node in free if not _equal(before[node], after[node])}
    assert not wrong


def _equal(a: Any, b: Any) -> bool:
    return not isinstance(a, Tensor) or (a.shape == b.shape and torch.allclose(a, b, equal_nan=True))


def _drawn(found: Followed) -> set[fx.Node]:
    """Return the nodes whose value depends on random numbers, or on memory that is not filled."""
    drawn: set[fx.Node] = set()
    for node in found.graph_module.graph.nodes:
        tags = getattr(node.target, "tags", ())
        unset = isinstance(found.states.get(node), (Unset, RowNumbers)) or "empty" in operation_name(node.target)
        if torch.Tag.nondeterministic_seeded in tags or unset or any(each in drawn for each in node.all_input_nodes):
            drawn.add(node)
    return drawn


NEVER_ON_ROWS = {
    "linspace", "logspace", "eye", "tril_indices", "triu_indices", "hann_window", "scalar_tensor",
    "arange", "empty", "new_empty", "empty_like",
}  # fmt: skip
MOVES = {
    "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze", "flatten",
    "repeat_interleave", "glu",
}  # fmt: skip
PARTS = {"split", "chunk", "unsafe_chunk", "unsafe_split", "tensor_split", "unbind"}
"""Along the rows there would be as many parts as rows: the tracer itself refuses that."""
_DIMENSION = ("dim", "dims", "dimension", "dim0", "axis0")


def test_every_rule_is_tried_as_accepted_and_where_it_has_a_dimension_as_refused() -> None:
    accepted, refused, dimensional = set[str](), set[str](), set[str]()
    for number in range(len(GROUPS)):
        found = group(number)
        for node in found.graph_module.graph.nodes:
            if node.op != "call_function" or is_symbolic(node):
                continue
            name = operation_name(node.target)
            schema = getattr(node.target, "_schema", None)
            if schema is not None and any(argument.name in _DIMENSION for argument in schema.arguments):
                dimensional.add(name)
            if node in found.refusals:
                refused.add(found.refusals[node][0])
            elif name in NEVER_ON_ROWS or any(isinstance(each, Rows) for each in _states_of(found.states[node])):
                accepted.add(name)
    assert set(RULES) - accepted == set()
    assert (dimensional & set(RULES)) - refused - MOVES - PARTS == set()


def _states_of(state: Any) -> tuple[Any, ...]:
    return state if isinstance(state, tuple) else (state,)


@pytest.mark.parametrize(
    ("state", "fits"),
    [
        (Rows(1), True),
        (Unset(Rows(1)), True),
        (Rows(0), False),
        (Rows(2), False),
        (Rows(1, 2), False),
        (Rows(1, 1, 2), False),
        (FREE, False),
        (Unset(FREE), False),
        (RowNumbers(), False),
    ],
)
def test_what_a_rule_says_is_compared_with_the_traced_shape(state: Any, fits: bool) -> None:
    found = group(0)
    axis, value = found.axis, next(n.meta["val"] for n, s in found.states.items() if s == Rows(1) and n.op != "output")
    if fits:
        axis.check((state, FREE), (value, torch.ones(3)))
        return
    with pytest.raises(MixesRows, match="puts the rows where they can't be followed"):
        axis.check((state, FREE), (value, torch.ones(3)))


def row_numbers(shape: Sequence[int], state: Rows) -> Tensor:
    """Return for each entry of a value the number of the row that it belongs to, by what a state says."""
    size = shape[state.dim]
    rows = size // state.entries
    numbers = torch.arange(rows).repeat_interleave(state.inner).repeat(state.outer)
    return numbers.view(size, *(1,) * (len(shape) - state.dim - 1)).expand(*shape)


def test_a_reshape_is_followed_exactly_where_rows_stay_whole() -> None:
    n = next(node for node in group(0).graph_module.graph.nodes if node.op == "placeholder").meta["val"].shape[0]
    axis, chance, accepted, refused = Axis(n), random.Random(0), 0, 0
    for _ in range(3000):
        before, after = (chance.choice((1, 2, 3, 4, 6)) for _ in range(2))
        outer, inner = (chance.choice((1, 2, 3)) for _ in range(2))
        state = Rows(1, outer, inner)
        total = before * outer * inner * after
        first = chance.choice([k for k in range(1, total + 1) if total % k == 0])
        factor = chance.choice([k for k in range(1, total // first + 1) if total // first % k == 0])
        shape, new = (before, outer * inner, after), (first, factor, total // first // factor)
        try:
            found = reshaped(state, (shape[0], shape[1] * n, shape[2]), (new[0], new[1] * n, new[2]), axis)
        except MixesRows:
            refused += 1
            continue
        accepted += 1
        given, wanted = ((a, b * ROWS, c) for a, b, c in (shape, new))
        assert torch.equal(row_numbers(given, state).reshape(wanted), row_numbers(wanted, found)), (state, shape, new)
    assert accepted > 300
    assert refused > 300


def test_an_operation_without_a_rule_is_refused() -> None:
    cases = [
        Case("cdist", lambda g: torch.cdist(g.first, g.first), "cdist"),
        Case("fft", lambda g: torch.fft.fftn(g.image, dim=(1, 2)).real, "fft_fftn"),
        Case("masked_scatter", lambda g: g.x.masked_scatter(g.x > 0, g.x), "masked_scatter"),
        Case("index_put", lambda g: g.x.index_put((torch.arange(g.n),), g.x), "index_put"),
        Case("as_strided", lambda g: g.x.as_strided((3, 4), (1, 1)), "as_strided"),
        Case("resize", lambda g: g.x + torch.zeros(2).resize_(48), "resize"),
        Case("strided", lambda g: g.x + torch.zeros(2).new_empty_strided((48,), (1,)), "new_empty_strided"),
    ]
    found = followed(cases)
    for case, outputs in zip(cases, found.outputs, strict=True):
        assert {found.refusals.get(node, (None,))[0] for node in outputs} == {case.refused_by}, case.name


def test_a_pointwise_operation_needs_no_rule_of_its_own() -> None:
    assert "atan2" not in RULES
    assert batch_axis.rule_of(aten.atan2.default) is batch_axis.elementwise
    assert batch_axis.rule_of(aten.cdist.default) is None
    assert batch_axis.rule_of(operator.add) is None


def test_the_name_of_an_operation_is_that_of_its_ordinary_form() -> None:
    assert operation_name(aten.add_.Tensor) == operation_name(aten.add.Tensor) == "add"
    assert operation_name(aten.__and__.Tensor) == "__and__"
    assert written(aten.add_.Tensor) == ["self"]
    assert written(aten.add.out) == ["out"]
    assert written(aten.add.Tensor) == []
