"""What a model makes of pictures, batch by batch, in evaluation mode; the model is left as it was."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from dpvision.checks import ArgumentError, Problems
from dpvision.data.normalisation import Normalisation
from dpvision.grads.forward import quick_forward

_AT_ONCE: Final = 64
"""Rows that go through the model together: few enough for their activations to stay in the cache."""

_COMPARED: Final = 4


def inputs_of(
    images: Tensor, normalisation: Normalisation, *, batch_size: int, device: torch.device | str
) -> Iterator[Tensor]:
    """What a model sees of the pictures, batch by batch."""
    return (normalisation.apply(images_B.to(device)) for images_B in images.split(counted(batch_size)))


def counted(batch_size: int) -> int:
    """The size of a batch, if it is one."""
    problems = Problems()
    problems.count("batch_size", batch_size)
    problems.raise_if_any()
    return batch_size


def outputs_of(
    model: nn.Module,
    batches: Iterator[Tensor],
    *,
    device: torch.device | str,
    parameters: Mapping[str, Tensor] | None,
) -> Iterator[Tensor]:
    """The model's outputs, batch by batch. ``parameters`` replaces the model's own where given."""
    network = copy.deepcopy(model).eval()
    network.load_state_dict(_replacements(model, parameters, device), strict=False)
    first = next(batches, None)
    if first is None:
        return
    with quick_forward(network, first[:_COMPARED]) as forward:
        for inputs in itertools.chain([first], batches):
            with torch.no_grad():
                parts = [forward(part) for part in inputs.split(_AT_ONCE)]
            yield torch.cat(parts)


def _replacements(
    model: nn.Module, parameters: Mapping[str, Tensor] | None, device: torch.device | str
) -> dict[str, Tensor]:
    """``parameters`` on the device. Names that the model doesn't have would be ignored silently, so they're refused."""
    if parameters is None:
        return {}
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)} | dict(model.named_buffers()).keys()
    unknown = sorted(parameters.keys() - known)
    if unknown:
        raise ArgumentError(f"parameters must be the model's own, got unknown names: {', '.join(unknown)}.")
    return {name: value.to(device) for name, value in parameters.items()}
