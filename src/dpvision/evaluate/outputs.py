"""What a model makes of pictures, batch by batch, in evaluation mode; the model is left as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpvision.checks import ArgumentError, Problems
from dpvision.data.normalisation import Normalisation


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
    replaced = _replacements(model, parameters, device)
    for inputs in batches:
        with _evaluation_mode(model), torch.no_grad():
            outputs = torch.func.functional_call(model, replaced, (inputs,))
        yield outputs


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


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is back in the mode that it had, not in its parent's."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
