"""Transformed filters, made once a step: between the first and the last micro-batch no weight moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dpvision.grads.fast.conv import Winograd


@contextmanager
def filters_held(network: nn.Module) -> Iterator[None]:
    """Keep what fast layers derive from their weights, inside the block only."""
    layers = [module for module in network.modules() if isinstance(module, Winograd)]
    for layer in layers:
        layer.hold()
    try:
        yield
    finally:
        for layer in layers:
            layer.release()
