"""A released model whose masks are known beforehand, for tests of what is done with masks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpvision.config import parse_config
from dpvision.data import fixed_normalisation
from dpvision.inference.load import ReleasedModel
from tiny_masks import SIDE


class Bright(nn.Module):
    """Calls foreground what is brighter than the middle; with more maps, one class for each step of brightness."""

    def __init__(self, maps: int = 1) -> None:
        super().__init__()
        self.maps = maps

    def forward(self, x_NCHW: Tensor) -> Tensor:
        grey = x_NCHW.mean(1, keepdim=True)
        if self.maps == 1:
            return grey - 0.5
        levels = (torch.arange(self.maps) + 0.5) / self.maps
        return -(grey - levels.view(1, -1, 1, 1)).abs()


def bright_model(source: str = "scans", *, classes: int = 2, size: tuple[int, int] = (SIDE, SIDE)) -> ReleasedModel:
    """A released model that was never trained, and whose masks are known beforehand."""
    config = {"task": "segmentation", "data": {"source": source, "volume_axis": 1, "window": (0.0, 100.0)}}
    return ReleasedModel(
        model=Bright(1 if classes == 2 else classes),
        config=parse_config({**config, "privacy": {"noise_multiplier": 1.0}}),
        normalisation=fixed_normalisation(1, mean=0.0, std=1.0),
        class_names=("background", *(f"class {number}" for number in range(1, classes))),
        image_shape=(1, *size),
        certificate={},
    )
