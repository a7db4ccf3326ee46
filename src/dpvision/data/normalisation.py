"""From bytes to the inputs of a model: one mean and standard deviation per channel.

The constants are public: from the literature, fixed, or released from the private images with noise at a charge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpvision.data.store import ImageStore
from dpvision.errors import ArgumentError, Problems
from dpvision.privacy.mechanism import Event
from dpvision.privacy.randomness import Keys

Source = Literal["published", "fixed", "released"]
SOURCES: tuple[Source, ...] = ("published", "fixed", "released")
LUMA = (0.299, 0.587, 0.114)
Normals = Callable[[bytes, int], NDArray[np.float64]]
"""Standard normals of a 256-bit key: (key, how many)."""

PURPOSE = "normalisation statistics"
# Values of 0..1 have no larger std; a smaller one is noise, and dividing by it would blow it up.
LEAST_STD, MOST_STD = 0.05, 0.5
DECIMALS = 4
CHUNK_ROWS = 1024


@final
@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """``(x / 255 - mean) / std`` per channel.

    Attributes:
        mean: of each channel, in units of the full range.
        std: of each channel, > 0.
        source: where the constants come from.

    Guarantee: ``published`` constants come from the literature, ``fixed`` ones from no data, and ``released`` ones from
    the
    private data through a noisy, charged release. There is no other source.
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

    def apply(self, images: Tensor) -> Tensor:
        """Normalise uint8 images (N, C, H, W): contiguous float32 of the same shape, on the same device."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (len(self.mean), 3, 1):
            raise ArgumentError(f"images must be uint8 (N, C, H, W), got {images.dtype} {tuple(images.shape)}.")
        own = self.for_channels(images.shape[1])
        shape = (1, -1, 1, 1)
        scale = torch.tensor([1 / (255 * std) for std in own.std], device=images.device).view(shape)
        shift = torch.tensor([-m / s for m, s in zip(own.mean, own.std, strict=True)], device=images.device).view(shape)
        return images.to(torch.float32, memory_format=torch.contiguous_format, copy=True).mul_(scale).add_(shift)

    def for_channels(self, channels: int) -> Normalisation:
        """Return the same constants for grey images shown in colour, or colour images shown in grey.

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
        """Return plain values, for JSON."""
        return {"mean": list(self.mean), "std": list(self.std), "source": self.source}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Normalisation:
        """Read what ``to_dict`` wrote; unknown and missing fields raise ``ArgumentError``."""
        try:
            mean, std = (tuple(float(x) for x in values[key]) for key in ("mean", "std"))
            if set(values) != {"mean", "std", "source"}:
                raise KeyError(f"unknown fields {sorted(set(values) - {'mean', 'std', 'source'})}")
            return Normalisation(mean=mean, std=std, source=values["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"not a normalisation: {error}") from error


def fixed_normalisation(channels: int, *, mean: float = 0.5, std: float = 0.5) -> Normalisation:
    """Return constants that depend on no data: by default bytes become -1 … 1; ``mean=0, std=1`` gives 0 … 1."""
    return Normalisation(mean=(mean,) * channels, std=(std,) * channels, source="fixed")


def unit_bound(channels: int) -> float:
    """The L2 sensitivity of the sum of ``unit_statistics``: the most that one unit can change it."""
    return math.sqrt(channels * (1 / 4 + 1 / 64))


def released_normalisation(
    store: ImageStore, *, num_units: int, noise_multiplier: float, keys: Keys, normals: Normals
) -> tuple[Normalisation, Event]:
    """Noisy mean and standard deviation per channel, and the event that they cost.

    Guarantee: one Gaussian release over all units (sample rate 1) of S = Σ_u v_u, where v_u holds, for each channel,
    a_u = mean of y and b_u = (mean of y²) - 1/8 over all pixels of all rows of unit u, with y = x / 255 - 1/2.
    Sensitivity: y lies in [-1/2, 1/2], so |a_u| ≤ 1/2; y² lies in [0, 1/4], so |b_u| ≤ 1/8; with C channels
    ‖v_u‖² ≤ C (1/4 + 1/64), and adding, removing or zeroing a unit changes S by one v_u. Rounding can't break this:
    v_u is scaled back onto the bound before it is added. The noise on S has ``noise_multiplier`` times the bound as
    its standard deviation, and the divisor is the public ``num_units``. All that follows is post-processing.
    """
    Problems().count("num_units", num_units).positive("noise_multiplier", noise_multiplier).raise_if_any()
    channels = store.image_shape[0]
    draws = np.asarray(normals(keys.derive("statistics", "normalisation"), 2 * channels), dtype=np.float64)
    if draws.shape != (2 * channels,):
        raise ArgumentError(f"normals must give {2 * channels} numbers, got shape {draws.shape}.")
    noisy = unit_statistics(store).sum(axis=0) + noise_multiplier * unit_bound(channels) * draws
    first, second = np.split(noisy / num_units, 2)
    return _constants(first, second), Event(sample_rate=1.0, noise_multiplier=noise_multiplier, purpose=PURPOSE)


def unit_statistics(store: ImageStore) -> NDArray[np.float64]:
    """Compute v_u of each unit, (units, 2 · channels). Sensitive. No row is longer than ``unit_bound``."""
    channels, height, width = store.image_shape
    sums = _unit_sums(store)
    pixels = store.rows_of_units.counts[:, None] * float(height * width)
    there = pixels > 0
    mean, square = (
        np.divide(part, pixels * scale, out=np.zeros_like(part), where=there)
        for part, scale in ((sums[:, :channels], 255.0), (sums[:, channels:], 255.0**2))
    )
    vectors = np.concatenate([mean - 1 / 2, square - mean + 1 / 4 - 1 / 8], axis=1) * there
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors * np.minimum(1.0, unit_bound(channels) / np.maximum(norms, np.finfo(np.float64).tiny))


def _unit_sums(store: ImageStore) -> NDArray[np.float64]:
    """Sum the bytes and their squares per unit and channel; the sums are whole numbers below 2⁵³, so they are exact."""
    channels = store.image_shape[0]
    sums = np.zeros((store.num_units, 2 * channels))
    units = store.unit_of_row.numpy()
    for start in range(0, store.num_rows, CHUNK_ROWS):
        part = store.images[start : start + CHUNK_ROWS].numpy().astype(np.int64)
        rows = np.concatenate([part.sum(axis=(2, 3)), np.square(part).sum(axis=(2, 3))], axis=1)
        np.add.at(sums, units[start : start + CHUNK_ROWS], rows.astype(np.float64))
    return sums


def _constants(first: NDArray[np.float64], second: NDArray[np.float64]) -> Normalisation:
    """Turn noisy means of y and y² - 1/8 into constants that are usable whatever the noise is."""
    centre = np.clip(first, -0.5, 0.5)
    variance = second + 1 / 8 - centre**2
    std = np.sqrt(np.clip(variance, LEAST_STD**2, MOST_STD**2))
    return Normalisation(
        mean=tuple(round(float(value), DECIMALS) for value in centre + 0.5),
        std=tuple(round(float(value), DECIMALS) for value in std),
        source="released",
    )
