"""What fast layers keep during a step: filters made of weights that stay as they are, and memory to work in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from torch import nn

from dpvision.grads.fast.conv import ConvStandIn, HeldWSConv2d, Winograd
from dpvision.grads.fast.stand_in import StandIn

_ROOM: Final[dict[type[ConvStandIn], int]] = {Winograd: 1 << 27, HeldWSConv2d: 1 << 26}
"""Bytes for filters, transformed or standardised: those of a large model are not all kept."""

_MOST_OF_THE_ROOM: Final = 1 / 4
"""For one layer. Larger filters are better made anew: it takes hardly longer than to read them back from memory."""


@contextmanager
def held_through_step(network: nn.Module) -> Iterator[None]:
    """Let fast layers keep filters and memory inside the block; one micro-batch at a time."""
    layers = [module for module in network.modules() if isinstance(module, StandIn)]
    for layer in layers:
        layer.hold()
    for kind, room in _ROOM.items():
        for layer in _beyond([layer for layer in layers if isinstance(layer, kind)], room):
            layer.make_anew()
    try:
        yield
    finally:
        for layer in layers:
            layer.release()


def _beyond(layers: Sequence[ConvStandIn], room: int) -> list[ConvStandIn]:
    """Those for whose filters there is no room: the smallest are kept, because they are used for the most pixels."""
    ordered = sorted(layers, key=lambda one: one.filter_bytes)
    taken = itertools.accumulate(one.filter_bytes for one in ordered)
    return [
        one
        for one, so_far in zip(ordered, taken, strict=True)
        if so_far > room or one.filter_bytes > _MOST_OF_THE_ROOM * room
    ]
