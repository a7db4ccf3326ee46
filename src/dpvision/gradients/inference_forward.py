"""A model's outputs alone, by the fast layers of the engine where they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from dpvision import kernels
from dpvision.gradients.fast import fast_twin, held_through_step
from dpvision.kernels.channels_last import laid_out

_TOLERANCE: Final = 1e-3
"""Of the largest output: far above what rounding does, far below what another layer would do."""


@contextmanager
def fused_forward(model: nn.Module, rows: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """What to call inside the block instead of the model, whose weights must stay as they are meanwhile.

    The model is in evaluation mode. ``rows`` are a few of its inputs, on which the fast layers must agree with it.
    """
    twin = _twin(model, rows)
    if twin is None:
        yield model
        return
    with held_through_step(twin):
        yield lambda inputs: twin(_arranged(inputs))


def _twin(model: nn.Module, rows: Tensor) -> nn.Module | None:
    on_cpu = rows.device.type == "cpu" and rows.dtype == torch.float32 and len(rows) > 0
    if not on_cpu or not kernels.available():
        return None
    twin = fast_twin(model)
    if twin is None:
        return None
    with torch.no_grad():
        expected = model(rows)
        try:
            found = twin.forward(_arranged(rows))  # called as a module, a graph prints its errors
        except RuntimeError:  # some models reshape in ways that only the other layout allows
            return None
    largest = float(expected.abs().max())  # NaN compares as false: then the model itself is used
    agrees = expected.shape == found.shape and bool((found - expected).abs().max() <= _TOLERANCE * largest)
    return twin if agrees else None


def _arranged(inputs: Tensor) -> Tensor:
    """Pictures in the layout of the fast layers; anything else as it is."""
    return laid_out(inputs) if inputs.dim() == 4 else inputs
