"""Row numbers, the number of rows, and memory: what a rule about the dimensions of values does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hostile_table import INPLACE, PLACE, SEQUENCE, WIDTH, Mix, Sandwich, hostile, linear_own, mixes
from model_cases import Own

UNSET = "memory that is not filled may hold rows of an earlier batch"
NOT_NUMBERS = "made from row numbers, and no row numbers any more: every row takes another's entries"

# ---------------------------------------------------------------------------------------- row numbers, changed


def _numbers(change: Callable[[Tensor], Any]) -> Mix:
    def mix(x: Tensor) -> Tensor:
        numbers = torch.arange(x.shape[0])
        changed = change(numbers)
        return x + x[numbers if changed is None else changed]

    return mix


def _overwrite(write: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    def change(numbers: Tensor) -> None:
        write(numbers)

    return change


mixes("row numbers: zeros like them", NOT_NUMBERS, _numbers(torch.zeros_like))
mixes("row numbers: ones like them", NOT_NUMBERS, _numbers(torch.ones_like))
mixes("row numbers: random like them", NOT_NUMBERS, _numbers(lambda r: torch.randint_like(r, 0, 2)), random=True)
mixes("row numbers: set to zero", NOT_NUMBERS, _numbers(_overwrite(lambda r: r.zero_())))
mixes("row numbers: filled", NOT_NUMBERS, _numbers(_overwrite(lambda r: r.fill_(1))))
mixes("row numbers: copied over", NOT_NUMBERS, _numbers(_overwrite(lambda r: r.copy_(torch.zeros(1)))))
mixes("row numbers: drawn again", NOT_NUMBERS, _numbers(_overwrite(lambda r: r.random_(0, 2))), random=True)

# ------------------------------------------------------------------------ the number of rows, as a plain number


def _added(x: Tensor) -> Tensor:
    return torch.addmm(x, x, torch.ones(WIDTH, WIDTH), beta=x.shape[0])


mixes("rolled by the number of rows", PLACE, lambda x: x.roll(x.shape[0], 1))
mixes("added as many times as there are rows", PLACE, _added)
mixes("diagonal at the number of rows", PLACE, lambda x: (x[:, :, None] * torch.eye(WIDTH)).tril(x.shape[0]).sum(2))
mixes("chosen by a comparison of the number of rows", PLACE, lambda x: x * torch.sym_ite(x.shape[0] > 5, 1, 2))

# --------------------------------------------------------------------------------------- arguments of other ranks


def _keys_in_rows(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None, :, None], x[None], x[None])[0, :, 0]


def _shifted_blocks(x: Tensor) -> Tensor:
    behind, beside = torch.stack([x, 2 * x]).reshape(-1, WIDTH), torch.stack([x, 2 * x], 1).reshape(-1, WIDTH)
    return behind.diff(dim=1, prepend=beside[:, :1]).reshape(2, -1, WIDTH)[0]


mixes("attention to keys of another rank", SEQUENCE, _keys_in_rows)
mixes("differences with blocks in another order", "rows and their copies lie in two orders", _shifted_blocks)

# ---------------------------------------------------------------------------------------------- memory not filled


def _grown(x: Tensor) -> Tensor:
    return x + torch.zeros(WIDTH).resize_(4 * WIDTH)[3 * WIDTH :]


mixes("memory that is not filled", UNSET, lambda x: x + 0 * torch.empty(WIDTH))
mixes("memory that is not filled, like a weight", UNSET, lambda x: x + torch.empty_like(torch.zeros(WIDTH)))
mixes("memory that is not filled, new", UNSET, lambda x: x + torch.zeros(2).new_empty(WIDTH))
mixes("memory that is not filled, strided", UNSET, lambda x: x + torch.zeros(2).new_empty_strided((WIDTH,), (1,)))
mixes("memory that has grown", UNSET, _grown)

# ------------------------------------------------------------------------------------ memory that rows share


def _shared(write: Callable[[Tensor, Tensor], Any]) -> Mix:
    def mix(x: Tensor) -> Tensor:
        shared = torch.zeros(1, WIDTH)
        write(shared.expand_as(x), x.detach())
        return x + shared

    return mix


mixes("written through an expanded view by a mask", INPLACE, _shared(lambda v, x: v.masked_fill_(x > 0.5, 1.0)))
mixes("added through an expanded view", INPLACE, _shared(lambda v, x: v.add_(x)))
mixes("scattered through an expanded view", INPLACE, _shared(lambda v, x: v.scatter_(1, (x > 0).long(), x)))
mixes("drawn through an expanded view", INPLACE, _shared(lambda v, x: v.bernoulli_(x.sigmoid())), random=True)

# -------------------------------------------------------------------------------- random numbers, as many as rows like

mixes(
    "random slopes for negative entries",
    "as many draws as a row has negative entries: the rows behind it get others",
    lambda x: F.rrelu(x, 0.1, 0.9, training=True),
    random=True,
)

# ------------------------------------------------------------------ views of memory, by operations that do not say so

HIDDEN = "written through a view whose operation does not say that it is one, into what outlives the call"
_KEPT = torch.zeros(WIDTH)
_LATE = 60
"""Calls after which the counter shows."""


def _counting(view: Callable[[Tensor], Tensor]) -> Mix:
    """Count the calls in a tensor outside of the model: how many there were depends on the number of rows."""

    def mix(x: Tensor) -> Tensor:
        hidden = view(_KEPT)
        read_later = hidden.view(-1)
        hidden.add_(1)
        return x * torch.where(_KEPT[0] > _LATE, 5.0, 1.0) + 0 * read_later[0]

    return mix


_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum": lambda kept: torch.einsum("i->i", kept),
    "type_as": lambda kept: kept.type_as(kept),
    "dropout that is off": lambda kept: F.dropout(kept, 0.5, training=False),
    "broadcast_tensors": lambda kept: torch.broadcast_tensors(torch.zeros(1), kept)[1],
    "unsafe_chunk": lambda kept: torch.unsafe_chunk(kept, 1)[0],
}
for _name, _view in _VIEWS.items():

    @hostile(f"calls counted through a hidden view: {_name}", HIDDEN, refused=True)
    def counted(view: Callable[[Tensor], Tensor] = _view) -> Own:
        _KEPT.zero_()
        return linear_own(Sandwich(_counting(view)))


def _hidden_expansion(x: Tensor) -> Tensor:
    shared = torch.zeros(1, WIDTH)
    spread, _ = torch.broadcast_tensors(shared, x)
    read_later = spread.view_as(spread)
    spread.masked_fill_(x.detach() > 0.5, 1.0)
    return x + shared + 0 * read_later


mixes("written through a hidden expansion", INPLACE, _hidden_expansion)


def _kept_statistics(x: Tensor) -> Tensor:
    batch = torch.arange(2.0 * WIDTH).view(2, WIDTH)
    return x * (F.batch_norm(batch, _KEPT, torch.ones(WIDTH), training=True)[0] + torch.where(_KEPT > 1e6, 5.0, 1.0))


@hostile("running statistics of a constant, kept outside of the model", HIDDEN, refused=True)
def kept_statistics() -> Own:
    _KEPT.zero_()
    return linear_own(Sandwich(_kept_statistics))
