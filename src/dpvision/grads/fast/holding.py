"""What fast layers keep during a step: filters made of weights that stay as they are, and memory to work in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from torch import nn

from dpvision.grads.fast.conv import HeldWSConv2d, Winograd
from dpvision.grads.fast.stand_in import StandIn
from dpvision.native.winograd import SharedMemory

_MOST_FILTER_BYTES: Final = 1 << 28
"""Transformed filters take eight times as much as their weights: a large model's are not all kept."""

_MOST_STANDARDISED_BYTES: Final = 1 << 26
"""Standardised filters take as much as their weights, and are soon made anew."""

_LARGE: Final = 1 << 24
"""Weights from which on sums and gradients take so much that there is half the room for transformed filters."""

L = TypeVar("L", Winograd, HeldWSConv2d)


@contextmanager
def held_through_step(network: nn.Module) -> Iterator[None]:
    """Let fast layers keep filters and memory inside the block; one micro-batch at a time."""
    layers = [module for module in network.modules() if isinstance(module, StandIn)]
    for layer in layers:
        layer.hold()
    is_large = sum(parameter.numel() for parameter in network.parameters()) >= _LARGE
    room = _MOST_FILTER_BYTES // 2 if is_large else _MOST_FILTER_BYTES
    _share_memory([layer for layer in layers if isinstance(layer, Winograd)], room)
    for layer in _beyond([layer for layer in layers if isinstance(layer, HeldWSConv2d)], _MOST_STANDARDISED_BYTES):
        layer.make_anew()
    try:
        yield
    finally:
        for layer in layers:
            layer.release()


def _share_memory(layers: list[Winograd], room: int) -> None:
    memory = SharedMemory()
    for layer in _beyond(layers, room):
        layer.share(memory)


def _beyond(layers: list[L], room: int) -> list[L]:
    """Those for whose filters there is no room: the smallest are kept, because they are used for the most pixels."""
    ordered = sorted(layers, key=lambda one: one.filter_bytes)
    taken = itertools.accumulate(one.filter_bytes for one in ordered)
    return [one for one, so_far in zip(ordered, taken, strict=True) if so_far > room]
