"""What fast layers keep during a step: filters made of weights that stay as they are, and memory to work in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import nn

from dpvision.grads.fast.conv import Winograd
from dpvision.grads.fast.stand_in import StandIn
from dpvision.native.winograd import SharedMemory

_MOST_FILTER_BYTES: Final = 1 << 28
"""Transformed filters take eight times as much as their weights: a large model's are not all kept."""


@contextmanager
def held_through_step(network: nn.Module) -> Iterator[None]:
    """Let fast layers keep filters and memory inside the block; one micro-batch at a time."""
    layers = [module for module in network.modules() if isinstance(module, StandIn)]
    for layer in layers:
        layer.hold()
    _share_memory([layer for layer in layers if isinstance(layer, Winograd)])
    try:
        yield
    finally:
        for layer in layers:
            layer.release()


def _share_memory(layers: list[Winograd]) -> None:
    """The smallest filters are kept, because they are used for the most pixels; the others share one place."""
    memory, room = SharedMemory(), _MOST_FILTER_BYTES
    for layer in sorted(layers, key=lambda one: one.filter_bytes):
        room -= layer.filter_bytes
        if room < 0:
            layer.share(memory)
