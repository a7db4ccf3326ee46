"""Slices through the loss surface around a network's weights (Li et al. 2018), on given images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpvision.errors import ArgumentError
from dpvision.models.losses import RowLoss

BATCH = 256
Direction = Mapping[str, Tensor]


@final
@dataclass(frozen=True, kw_only=True)
class LossSlice:
    """Mean losses along one direction, or over a plane of two.

    Attributes:
        name: what the direction is.
        offsets: multiples of the direction that were added to the weights.
        losses: the mean loss at each offset; for a plane, row by row of the first direction.
        directions: one or two.
    """

    name: str
    offsets: tuple[float, ...]
    losses: tuple[float, ...]
    directions: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "direction": self.name,
            "directions": self.directions,
            "offsets": list(self.offsets),
            "losses": list(self.losses),
        }


def random_direction(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a random direction in which every filter has the norm of the model's own filter.

    Parameters of one dimension (biases, norms) stay as they are. Scaling by filters makes slices of networks with
    different weights comparable.

    Args:
        model: the network.
        generator: draws the direction.

    Returns:
        The direction, by name of the trainable parameter.
    """
    found: dict[str, Tensor] = {}
    for name, value in model.named_parameters():
        if not value.requires_grad:
            continue
        if value.ndim < 2:
            found[name] = torch.zeros_like(value)
            continue
        drawn = torch.randn(value.shape, generator=generator).to(value)
        own, norms = value.detach().flatten(1).norm(dim=1), drawn.flatten(1).norm(dim=1)
        scale = own / norms.clamp(min=torch.finfo(value.dtype).tiny)
        found[name] = drawn * scale.view(-1, *[1] * (value.ndim - 1))
    return found


def loss_slice(
    model: nn.Module,
    loss: RowLoss,
    data: tuple[Tensor, Tensor],
    directions: Sequence[Direction],
    *,
    name: str,
    offsets: Sequence[float],
) -> LossSlice:
    """Measure the mean loss along one direction, or over the plane of two.

    Args:
        model: the network, in the mode that it is in; it is not changed.
        loss: one loss per row.
        data: normalised images and their targets.
        directions: one or two directions, by name of the parameter.
        name: what the direction is called in the results.
        offsets: multiples of each direction.

    Returns:
        The losses: functions of the images, without noise.

    Raises:
        ArgumentError: there are no images, or not one or two directions.
    """
    inputs, targets = data
    if not len(inputs) or len(directions) not in (1, 2):
        raise ArgumentError("a slice needs at least one image, and one or two directions.")
    own = {key: value.detach() for key, value in model.named_parameters()}
    first, second = directions[0], directions[1] if len(directions) == 2 else {}
    losses: list[float] = []
    with torch.no_grad():
        for a in offsets:
            for b in offsets if len(directions) == 2 else (0.0,):
                moved = {
                    key: value + a * first.get(key, torch.zeros(())) + b * second.get(key, torch.zeros(()))
                    for key, value in own.items()
                }
                losses.append(_mean_loss(model, moved, loss, inputs, targets))
    return LossSlice(name=name, offsets=tuple(offsets), losses=tuple(losses), directions=len(directions))


def _mean_loss(
    model: nn.Module, weights: Mapping[str, Tensor], loss: RowLoss, inputs: Tensor, targets: Tensor
) -> float:
    total = 0.0
    for images, wanted in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
        total += float(loss(functional_call(model, dict(weights), (images,)), wanted).double().sum())
    return total / len(inputs)
