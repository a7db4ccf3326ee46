"""What fast layers keep during a step: filters made of weights that stay as they are, and memory to work in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, final

from torch import nn

from dpvision.gradients.fast.fused_conv import ConvStandIn, HeldWSConv2d, Winograd
from dpvision.gradients.fast.fused_layer import StandIn


@final
class Room(NamedTuple):
    """Bytes for the filters of all layers of a kind, and for those of a single one."""

    all_layers: int
    one_layer: int


_ROOM: Final[dict[type[ConvStandIn], Room]] = {
    # Larger filters are not worth keeping: transforming them takes hardly longer than reading them back.
    Winograd: Room(1 << 27, 1 << 25),
    HeldWSConv2d: Room(1 << 26, 1 << 26),
}


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


def _beyond(layers: Sequence[ConvStandIn], room: Room) -> list[ConvStandIn]:
    """Those for whose filters there is no room: the smallest are kept, because they are used for the most pixels."""
    ordered = sorted(layers, key=lambda one: one.filter_bytes)
    taken = itertools.accumulate(one.filter_bytes for one in ordered)
    return [
        one
        for one, so_far in zip(ordered, taken, strict=True)
        if so_far > room.all_layers or one.filter_bytes > room.one_layer
    ]
