"""Models on fixed scattering features (FACTS §8: Tramèr & Boneh): a linear one and two small CNNs.

Only what follows the features is learned, so that few parameters carry the noise; at small epsilon that beats deep
networks. Shapes: N rows, C channels (81 a colour), H and W a quarter of the picture's height and width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal, final

import torch
from torch import Tensor, nn

from dpvision.checks import ArgumentError, Problems
from dpvision.models.activations import activation as make_activation
from dpvision.models.scattering import Scattering
from dpvision.models.shoefit import ImageSize, height_width

Standardise = Literal["group", "constants", "none"]
STANDARDISE = ("group", "constants", "none")
Constants = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of every channel."""


@final
class ChannelConstants(nn.Module):
    """``(x − mean) / std`` with one fixed number a channel; the numbers are saved with the weights.

    Guarantee: they are not learned. Take them from public pictures, or release them with noise and charge that.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Standardise each channel."""
        return (x_NCHW - self.mean[:, None, None]) / self.std[:, None, None]


@final
class SideBySide(nn.Module):
    """Several views of the same rows, one after the other in each row."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """What the parts make of ``x``, joined."""
        return torch.cat([part(x) for part in self.parts], dim=1)


def channel_constants(scattering: Scattering, public_pictures: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of every scattering channel over pictures that are public.

    Guarantee: none. They are released as they are, so they must not come from the private pictures.
    """
    with torch.no_grad():
        parts = [scattering(part).double() for part in public_pictures.split(64)]
    var_C, mean_C = torch.var_mean(torch.cat(parts), dim=(0, 2, 3), correction=0)
    return mean_C.tolist(), var_C.sqrt().tolist()


def known_constants(name: str) -> Constants:
    """Channel constants that come with the package: ``cifar100``, from its training pictures with pixels in 0..1."""
    file = resources.files("dpvision.models") / "constants" / f"{name}.json"
    if not name.isalnum() or not file.is_file():
        raise ArgumentError(f"constants must be cifar100, or a mean and a std for each channel, got {name!r}.")
    table = json.loads(file.read_text())
    return table["mean"], table["std"]


def _standardiser(channels: int, standardise: Standardise, groups: int, constants: str | Constants | None) -> nn.Module:
    """What brings the features to one scale, without a parameter to learn."""
    problems = Problems()
    known = standardise in STANDARDISE
    problems.require(known, f"standardise must be one of {', '.join(STANDARDISE)}, got {standardise!r}.")
    problems.count("groups", groups)
    problems.raise_if_any()
    if standardise != "constants" and constants is not None:
        raise ArgumentError(f"constants need standardise='constants', got {standardise!r}.")
    if standardise == "none":
        return nn.Identity()
    if standardise == "group":
        if channels % groups:
            raise ArgumentError(f"groups must divide the {channels} scattering channels, got {groups}.")
        return nn.GroupNorm(groups, channels, affine=False)
    mean, std = (
        known_constants(constants) if isinstance(constants, str) else constants or ([0.0] * channels, [1.0] * channels)
    )
    if len(mean) != channels or len(std) != channels or not all(value > 0 for value in std):
        raise ArgumentError(
            f"constants must be {channels} means and as many std > 0, got {len(mean)} and {len(std)} numbers."
        )
    return ChannelConstants(mean, std)


def scatter_linear(
    *,
    num_classes: int,
    in_channels: int,
    image_size: ImageSize = 32,
    standardise: Standardise = "group",
    groups: int = 27,
    constants: str | Constants | None = None,
    fine: bool = False,
) -> nn.Module:
    """Scattering, standardisation, one linear layer: the strongest private features without public data at small ε.

    ``standardise`` "group" is GroupNorm without parameters; "constants" takes ``constants``: the name of a set that
    comes with the package, or numbers (see ``channel_constants``; left out, 0 and 1, to be loaded with the weights).
    ``fine`` adds the features of the smallest scale, at twice the resolution and each channel standardised by itself.
    """
    if fine and standardise != "group":
        raise ArgumentError(f"fine features need standardise='group', got {standardise!r}.")
    size = height_width(image_size)
    coarse = Scattering(size)
    standardiser = _standardiser(in_channels * coarse.paths, standardise, groups, constants)
    features = in_channels * coarse.features
    if not fine:
        return nn.Sequential(coarse, standardiser, nn.Flatten(), nn.Linear(features, num_classes))
    finer = Scattering(size, scales=1)
    channels = in_channels * finer.paths
    front = SideBySide(
        nn.Sequential(coarse, standardiser, nn.Flatten()),
        nn.Sequential(finer, nn.GroupNorm(channels, channels, affine=False), nn.Flatten()),
    )
    return nn.Sequential(front, nn.Linear(features + in_channels * finer.features, num_classes))


@final
@dataclass(frozen=True, kw_only=True)
class ScatterCNN:
    """Scattering and two convolutions: the published head for MNIST on grey pictures, the one for CIFAR on others.

    ``standardise``, ``groups`` and ``constants`` are those of ``scatter_linear``. ``norm_groups`` puts a GroupNorm
    without parameters after each convolution of CIFAR's head, which grey pictures then get too (0: none, as
    published). For that head, ``width`` counts the channels of both convolutions, and ``layer_norm`` brings each
    picture's features, once standardised, to mean 0 and variance 1.
    """

    num_classes: int
    in_channels: int
    image_size: ImageSize = 32
    activation: str = "tanh"
    standardise: Standardise = "group"
    groups: int = 27
    constants: str | Constants | None = None
    width: int = 64
    norm_groups: int = 0
    layer_norm: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        problems.count("width", self.width)
        fits = self.norm_groups == 0 or (self.norm_groups > 0 and self.width % self.norm_groups == 0)
        problems.require(fits, f"norm_groups must be 0 or divide width {self.width}, got {self.norm_groups}.")
        problems.raise_if_any()

    def build(self) -> nn.Module:
        """The model, its weights drawn from the default generator."""
        scattering = Scattering(height_width(self.image_size, least=8))
        channels = self.in_channels * scattering.paths
        standardiser = _standardiser(channels, self.standardise, self.groups, self.constants)
        if self.in_channels == 1 and not self.norm_groups:
            head = _grey_head(channels, scattering.output_size, self.num_classes, self.activation)
        else:
            head = self._colour_head(channels, scattering.output_size)
        return nn.Sequential(scattering, standardiser, *head)

    def _colour_head(self, channels: int, size: tuple[int, int]) -> list[nn.Module]:
        """Two 3×3 convolutions with a pool between them."""
        width = self.width
        return [
            *([nn.GroupNorm(1, channels, affine=False)] if self.layer_norm else []),
            *self._convolution(channels),
            nn.MaxPool2d(2),
            *self._convolution(width),
            nn.Flatten(),
            nn.Linear(width * (size[0] // 2) * (size[1] // 2), self.num_classes),
        ]

    def _convolution(self, channels: int) -> list[nn.Module]:
        norm = [nn.GroupNorm(self.norm_groups, self.width, affine=False)] if self.norm_groups else []
        return [nn.Conv2d(channels, self.width, 3, padding=1), *norm, make_activation(self.activation)]


def _grey_head(channels: int, size: tuple[int, int], num_classes: int, activation: str) -> list[nn.Module]:
    """A convolution that halves the picture, another one, and a hidden layer of 32."""
    return [
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        make_activation(activation),
        nn.Conv2d(16, 32, 3, padding=1),
        make_activation(activation),
        nn.Flatten(),
        nn.Linear(32 * ((size[0] + 1) // 2) * ((size[1] + 1) // 2), 32),
        make_activation(activation),
        nn.Linear(32, num_classes),
    ]
