"""A model cut in two: a front that stays as it is, and the rest, which learns.

What the front makes of a picture never changes, so it need be computed only once.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

_Named = list[tuple[str, nn.Module]]


@final
@dataclass(frozen=True)
class Split:
    """``rest(front(x))`` is the model. Both share its layers and its parameters, under its names."""

    front: nn.Module
    rest: nn.Module


def split(model: nn.Module, example: Tensor) -> Split | None:
    """Cut in front of the first layer with a parameter that requires gradients; None where that gains nothing.

    Only a chain of layers can be cut: a Sequential, or a module that turns out to run its children one after the
    other. The front must hold weights or constants (else it is no work worth saving) and treat ``example``, a few
    made-up rows, in training as in evaluation.

    Guarantee: the front of a split treats the rows of ``example`` each by itself.
    """
    chain = _as_chain(model, example)
    if chain is None:
        return None
    front_parts, rest_parts = _divide(chain)
    front, rest = _sequential(front_parts), _sequential(rest_parts).train(model.training)
    works = any(True for _ in front.parameters()) or any(True for _ in front.buffers())
    if not rest_parts or not works or not _same_in_both_modes(front, example) or not _rows_apart(front, example):
        return None
    return Split(front, rest)


def _as_chain(model: nn.Module, example: Tensor) -> nn.Sequential | None:
    """The model as a Sequential under the same names, if that is what it computes."""
    if type(model) is nn.Sequential:
        return model
    if any(True for _ in model.parameters(recurse=False)) or any(True for _ in model.buffers(recurse=False)):
        return None
    chain = _sequential([(name, child) for name, child in model._modules.items() if child is not None])
    # Copies, because a pass in evaluation mode still may write into a module of somebody's own.
    one, other = copy.deepcopy(model).eval(), copy.deepcopy(chain).eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return chain if torch.equal(one(example), other(example)) else None
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None  # its children don't fit one behind the other: no chain, and no error


def _divide(chain: nn.Sequential) -> tuple[_Named, _Named]:
    """The leading layers that don't learn, and all from the first that does; a Sequential is cut inside."""
    children = [(name, child) for name, child in chain._modules.items() if child is not None]
    for index, (name, child) in enumerate(children):
        if not any(parameter.requires_grad for parameter in child.parameters()):
            continue
        front, rest = children[:index], children[index + 1 :]
        if type(child) is not nn.Sequential:
            return front, [(name, child), *rest]
        inner_front, inner_rest = _divide(child)
        if inner_front:
            front = [*front, (name, _sequential(inner_front))]
        return front, [(name, _sequential(inner_rest).train(child.training)), *rest]
    return children, []


def _sequential(parts: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


def _rows_apart(front: nn.Module, example: Tensor) -> bool:
    """Whether the other rows stay as they are, to the last bit, when the last one changes."""
    twin, changed = copy.deepcopy(front).eval(), example.clone()
    changed[-1] = example[-1].flip(-1) * 2 + 1
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return torch.equal(twin(example)[:-1], twin(changed)[:-1])


def _same_in_both_modes(front: nn.Module, example: Tensor) -> bool:
    """Whether the front draws nothing and keeps no statistics: dropout and BatchNorm in training do."""
    twin = copy.deepcopy(front)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return torch.equal(twin.eval()(example), twin.train()(example))
