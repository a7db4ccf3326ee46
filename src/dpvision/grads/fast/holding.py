"""What fast layers keep during a step: filters made of weights that stay as they are, and memory to work in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dpvision.grads.fast.stand_in import StandIn


@contextmanager
def held_through_step(network: nn.Module) -> Iterator[None]:
    """Let fast layers keep filters and memory inside the block; one micro-batch at a time."""
    layers = [module for module in network.modules() if isinstance(module, StandIn)]
    for layer in layers:
        layer.hold()
    try:
        yield
    finally:
        for layer in layers:
            layer.release()
