"""From bytes to the numbers that a model sees: public constants per channel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from dpvision.errors import ArgumentError, Problems

Source = Literal["published", "fixed", "released"]
SOURCES: tuple[Source, ...] = ("published", "fixed", "released")
LUMA = (0.299, 0.587, 0.114)


@final
@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """``(x / 255 - mean) / std`` per channel.

    Guarantee: ``published`` constants come from the literature, ``fixed`` ones from no data at all, and ``released``
    ones from the private data through a noisy, charged release. There is no fourth way.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: Source

    def __post_init__(self) -> None:
        problems = Problems()
        same = len(self.mean) == len(self.std) >= 1
        problems.require(same, f"mean and std must have one value per channel, got {self.mean} and {self.std}.")
        problems.require(all(map(math.isfinite, self.mean)), f"mean must be finite, got {self.mean}.")
        for value in self.std:
            problems.positive("std", value)
        problems.require(
            self.source in SOURCES, f"source of a normalisation must be one of {SOURCES}, got {self.source!r}."
        )
        problems.raise_if_any()

    def apply(self, images: Tensor, *, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        """Float32 inputs for a uint8 (N, C, H, W) tensor, on its device."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (len(self.mean), 3, 1):
            raise ArgumentError(f"images must be uint8 (N, C, H, W), got {images.dtype} {tuple(images.shape)}.")
        own = self.for_channels(images.shape[1])
        shape = (1, -1, 1, 1)
        scale = torch.tensor([1 / (255 * std) for std in own.std], device=images.device).view(shape)
        shift = torch.tensor([-m / s for m, s in zip(own.mean, own.std, strict=True)], device=images.device).view(shape)
        return images.to(torch.float32, memory_format=memory_format, copy=True).mul_(scale).add_(shift)

    def for_channels(self, channels: int) -> Normalisation:
        """The same constants for grey images shown as colour, or colour shown as grey.

        The grey mean is the luma-weighted mean; the grey std is the weighted sum of the stds, which bounds it.
        """
        if channels == len(self.mean):
            return self
        if len(self.mean) == 1:
            return Normalisation(mean=self.mean * channels, std=self.std * channels, source=self.source)
        if channels == 1 and len(self.mean) == len(LUMA):
            mean = sum(w * m for w, m in zip(LUMA, self.mean, strict=True))
            std = sum(w * s for w, s in zip(LUMA, self.std, strict=True))
            return Normalisation(mean=(mean,), std=(std,), source=self.source)
        raise ArgumentError(f"a normalisation for {len(self.mean)} channels can't serve {channels} channels.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"mean": list(self.mean), "std": list(self.std), "source": self.source}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Normalisation:
        """The inverse of ``to_dict``; refuses unknown and missing fields."""
        try:
            mean, std = (tuple(float(x) for x in values[key]) for key in ("mean", "std"))
            if set(values) != {"mean", "std", "source"}:
                raise KeyError(f"unknown fields {sorted(set(values) - {'mean', 'std', 'source'})}")
            return Normalisation(mean=mean, std=std, source=values["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"not a normalisation: {error}") from error


def fixed_normalisation(channels: int, *, mean: float = 0.5, std: float = 0.5) -> Normalisation:
    """Constants that no data chose: by default bytes become -1 … 1. ``mean=0, std=1`` gives the raw 0 … 1 range."""
    return Normalisation(mean=(mean,) * channels, std=(std,) * channels, source="fixed")
