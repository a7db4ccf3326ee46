"""A fixed wavelet scattering transform of order 2 on torch.fft (Bruna & Mallat), equal to kymatio's to float rounding.

Shapes: N rows, C colours, L angles, H and W padded height and width, h and w the output's, P = 1 + JL + J(J−1)/2·L²
paths. An image is reflected at its edges, filtered by oriented Morlet wavelets, its modulus is taken, once or twice,
and each result is blurred by a Gaussian and subsampled by 2^J.

Models on fixed scattering features (FACTS §8: Tramèr & Boneh): a linear one and two small CNNs.

Only what follows the features is learned, so that few parameters carry the noise; at small epsilon that beats deep
networks. Shapes: N rows, C channels (81 a colour), H and W a quarter of the image's height and width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpvision.errors import ArgumentError, Problems
from dpvision.models.backbone import zero
from dpvision.models.layers import activation as make_activation
from dpvision.models.layers import offset_head
from dpvision.models.shoefit import ImageSize, height_width

Array = NDArray[np.float64]
SIGMA, FREQUENCY = 0.8, 3 * math.pi / 4
# kymatio's normalising constants use this π; with it, features and published settings carry over.
PI = 3.1415
KEPT_OFFSET = 0.3
"""Share of an offset that predictions keep: without it weak features decide against the frequent class at random."""
_TOGETHER = 16


def padded_size(size: int, *, scales: int) -> int:
    """How long a side is after padding: at least one output pixel of margin on each side."""
    step = 2**scales
    return ((size + step) // step + 1) * step


def _gabor(height: int, width: int, *, sigma: float, angle: float, frequency: float, slant: float) -> NDArray:
    """A Gaussian times a plane wave, wrapped around a torus of ``height`` × ``width``."""
    cos, sin = math.cos(angle), math.sin(angle)
    total = np.zeros((height, width), dtype=np.complex128)
    for wrap_y in range(-2, 3):
        for wrap_x in range(-2, 3):
            y, x = np.mgrid[0:height, 0:width]
            y, x = y + wrap_y * height, x + wrap_x * width
            along, across = y * cos + x * sin, x * cos - y * sin
            envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
            total += envelope * np.exp(1j * frequency * along)
    return total * slant / (2 * PI * sigma**2)


def _morlet_hat(height: int, width: int, *, scale: int, angle: float, slant: float) -> Array:
    """The Fourier transform (real, by symmetry) of a Gabor function made to have zero mean."""
    sigma, frequency = SIGMA * 2**scale, FREQUENCY / 2**scale
    wave = _gabor(height, width, sigma=sigma, angle=angle, frequency=frequency, slant=slant)
    envelope = _gabor(height, width, sigma=sigma, angle=angle, frequency=0.0, slant=slant)
    return np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real


def _keep_low(hat: Array, level: int) -> Array:
    """The part of a filter that a signal already subsampled by 2^level can carry, along the last axis."""
    size = hat.shape[-1]
    start = size >> (level + 1)
    kept = hat.copy()
    kept[..., start : start + size - (size >> level)] = 0
    return kept.reshape(*hat.shape[:-1], 2**level, size >> level).sum(-2)


@lru_cache(maxsize=8)
def _wavelets(height: int, width: int, scales: int, angles: int) -> tuple[Array, ...]:
    """For each scale, its wavelets in the Fourier domain, (L, H, W)."""
    # kymatio's order of angles: it starts below π/2 and turns backwards.
    turns = [(max(angles // 2 - 1, 0) - index) * math.pi / angles for index in range(angles)]
    return tuple(
        np.stack([_morlet_hat(height, width, scale=j, angle=turn, slant=4.0 / angles) for turn in turns])
        for j in range(scales)
    )


def _blur_matrix(size: int, *, level: int, scales: int) -> Array:
    """(outputs, size >> level): blur by the Gaussian, subsample to 2^scales and cut the margin, along one axis.

    The Gaussian is a product of two one-dimensional ones, so that each axis is one small matrix.
    """
    grid = np.arange(size)[None, :] + size * np.arange(-2, 3)[:, None]
    sigma = SIGMA * 2 ** (scales - 1)
    gaussian = np.exp(-(grid**2) / (2 * sigma**2)).sum(0) / math.sqrt(2 * PI * sigma**2)
    kernel = np.fft.ifft(_keep_low(np.fft.fft(gaussian).real, level)).real
    shifts = np.arange(0, size >> level, 2 ** (scales - level))[1:-1]
    return np.stack([np.roll(kernel, shift) for shift in shifts])


def _subsample(hat: Tensor, factor: int) -> Tensor:
    """Subsampling by ``factor`` (a power of two), done on the Fourier transform: the aliases are averaged."""
    if factor == 1:
        return hat
    # Halving by slices is ten times as fast as one mean over reshaped dimensions.
    height, width = hat.shape[-2] // 2, hat.shape[-1] // 2
    rows = hat[..., :height, :] + hat[..., height:, :]
    return _subsample((rows[..., :width] + rows[..., width:]) / 4, factor // 2)


@final
class Scattering(nn.Module):
    """(N, C, height, width) → (N, C·P, height // 2^J, width // 2^J); nothing is learned.

    Paths of one colour are neighbours: the blur, then order 1 by scale and angle, then order 2.
    """

    def __init__(self, image_size: tuple[int, int], *, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        smallest = 2 ** (scales + 1)
        if min(image_size) < smallest:
            raise ArgumentError(f"scattering needs images of at least {smallest} pixels, got {image_size}.")
        self.image_size, self.scales, self.angles = image_size, scales, angles
        height, width = (padded_size(side, scales=scales) for side in image_size)
        self.padding = (
            (width - image_size[1]) // 2,
            (width - image_size[1] + 1) // 2,
            (height - image_size[0]) // 2,
            (height - image_size[0] + 1) // 2,
        )
        for j, bank in enumerate(_wavelets(height, width, scales, angles)):
            for level in range(j + 1):
                low = _keep_low(np.swapaxes(_keep_low(bank, level), -1, -2), level)
                self._keep(f"psi_{j}_{level}", np.swapaxes(low, -1, -2))
        for level in range(scales):
            self._keep(f"blur_y_{level}", _blur_matrix(height, level=level, scales=scales))
            self._keep(f"blur_x_{level}", _blur_matrix(width, level=level, scales=scales))

    @property
    def paths(self) -> int:
        """Output channels per colour: 81 for two scales and eight angles."""
        j, angles = self.scales, self.angles
        return 1 + j * angles + j * (j - 1) // 2 * angles**2

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return self.image_size[0] >> self.scales, self.image_size[1] >> self.scales

    @property
    def features(self) -> int:
        """Numbers that a colour of an image becomes."""
        return self.paths * self.output_size[0] * self.output_size[1]

    def tables(self) -> tuple[list[Tensor], list[Tensor]]:
        """The wavelets of every scale and level up to it, and the blurs of every level, along y and along x."""
        wavelets = [self.get_buffer(f"psi_{j}_{level}") for j in range(self.scales) for level in range(j + 1)]
        blurs = [self.get_buffer(f"blur_{axis}_{level}") for level in range(self.scales) for axis in "yx"]
        return wavelets, blurs

    def _keep(self, name: str, values: Array) -> None:
        # Not in the state dict: they follow from the options.
        self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)), persistent=False)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Scatter each colour on its own."""
        if tuple(x_NCHW.shape[-2:]) != self.image_size:
            raise ArgumentError(f"images must be {self.image_size} pixels, got {tuple(x_NCHW.shape[-2:])}.")
        # On the way, an image takes many times its features' memory: a few at a time.
        return torch.cat([self._scattered(some) for some in x_NCHW.split(_TOGETHER)])

    def _scattered(self, x_NCHW: Tensor) -> Tensor:
        # F.pad's reflect mode wants one leading dimension or two.
        u0_NCHW = functional.pad(x_NCHW, self.padding, mode="reflect")
        first, second = [self._blur(u0_NCHW, 0).unsqueeze(-3)], []
        hat0_NCHW = torch.fft.fft2(u0_NCHW)
        for j1 in range(self.scales):
            u1_NCLHW = self._modulus(hat0_NCHW, j1, level=0)
            first.append(self._blur(u1_NCLHW, j1))
            if j1 + 1 < self.scales:
                second.append(self._second_order(u1_NCLHW, j1))
        return torch.cat((*first, *second), dim=-3).flatten(-4, -3)

    def _second_order(self, u1_NCLHW: Tensor, j1: int) -> Tensor:
        """All paths that start at scale ``j1``, by first angle, then second scale and angle."""
        results = []
        # One angle at a time: all of them at once would hold L² complex images a row.
        for u1_NCHW in u1_NCLHW.unbind(-3):
            hat_NCHW = torch.fft.fft2(u1_NCHW)
            for j2 in range(j1 + 1, self.scales):
                results.append(self._blur(self._modulus(hat_NCHW, j2, level=j1), j2))
        return torch.cat(results, dim=-3)

    def _modulus(self, hat_NCHW: Tensor, j: int, *, level: int) -> Tensor:
        """|x ⋆ ψ| for all angles of scale ``j``; x is at resolution ``level``, the result at ``j``."""
        # Complex times complex is faster than complex times real; complex buffers would not survive Module.to.
        psi_LHW = self.get_buffer(f"psi_{j}_{level}").to(hat_NCHW.dtype)
        return torch.fft.ifft2(_subsample(hat_NCHW.unsqueeze(-3) * psi_LHW, 2 ** (j - level))).abs()

    def _blur(self, x_HW: Tensor, level: int) -> Tensor:
        blur_y, blur_x = self.get_buffer(f"blur_y_{level}"), self.get_buffer(f"blur_x_{level}")
        # The table always on the left: each image is a product of its own. On the right, rows of all images are one
        # product, which rounds an image by how many come with it.
        return (blur_x @ (blur_y @ x_HW).mT).mT


Standardise = Literal["group", "constants", "none", "whitened"]
STANDARDISE = ("group", "constants", "none", "whitened")
Constants = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of every channel."""


@final
class ChannelConstants(nn.Module):
    """``(x − mean) / std`` with one fixed number a channel; the numbers are saved with the weights.

    Guarantee: they are not learned. Take them from public images, or release them with noise and charge that.
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


# Rows: brightness, red against green, yellow against blue. Equal channels have no colour in it.
_OPPONENT = ((1 / 3, 1 / 3, 1 / 3), (1 / 2, -1 / 2, 0.0), (1 / 4, 1 / 4, -1 / 2))
_COLOUR_GAIN = 2.0
"""Weight of the two colour channels against brightness: they vary less in images."""
_FLAT = 1e-4
"""Added to the variance of a block, so that an image without contrast does not become noise."""


@final
class OpponentColours(nn.Module):
    """Red, green and blue → brightness, red against green, yellow against blue, each pixel by itself.

    The three primaries of an image are nearly equal, so a linear layer on them spends most of the budget on one
    direction. Grey images stored in colour have two empty channels afterwards, which cost nothing.
    """

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.tensor(_OPPONENT), persistent=False)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Mix the channels."""
        return torch.einsum("oc,nchw->nohw", self.rows, x_NCHW)


def unit_contrast(x_NCHW: Tensor, *, colours: int, orders: Sequence[int], pool: int) -> Tensor:
    """Divide each order of an image's scattering features by its own contrast in brightness, then pool.

    Args:
        x_NCHW: scattering features of each channel, one after the other.
        colours: channels of the image, brightness first.
        orders: number of paths of orders 0, 1 and 2.
        pool: regions along each side; 0 keeps the resolution.

    Returns:
        (N, colours, paths, height, width).
    """
    x_NCPHW = x_NCHW.unflatten(1, (colours, sum(orders)))
    parts = []
    for order, block in enumerate(x_NCPHW.split(list(orders), dim=2)):
        centred = block - block.mean((2, 3, 4), keepdim=True)
        contrast = (centred[:, :1].square().mean((2, 3, 4), keepdim=True) + _FLAT).sqrt()
        # The mean brightness of an image says little about it, its mean colours much.
        colour = block[:, 1:] if order == 0 else centred[:, 1:]
        parts.append(torch.cat((centred[:, :1], colour * _COLOUR_GAIN), 1) / contrast)
    joined = torch.cat(parts, 2)
    if not pool:
        return joined
    return functional.adaptive_avg_pool2d(joined.flatten(1, 2), pool).unflatten(1, (colours, sum(orders)))


@final
class WhitenedPaths(nn.Module):
    """Scattering features at unit contrast, pooled, with paths decorrelated as in synthetic images.

    Orders 0, 1 and 2 of each image are divided by their own contrast in brightness, averaged over ``pool`` × ``pool``
    regions, and each region's paths are multiplied by (Σ + ridge·tr(Σ)/P)^(-1/2). Σ is the covariance of the paths in
    synthetic "dead leaves" images (``constants/dead_leaves.json``): no image of anyone decides it.

    Args:
        colours: channels of the image: 1, or 3 after ``OpponentColours``.
        scattering: the transform before it.
        pool: regions along each side; 0 keeps the resolution.
        ridge: share of the mean variance that is added: large values change little, small ones amplify rare paths.

    Guarantee: rows don't mix and nothing is learned.
    """

    mean_CP: Tensor
    whitening_CPP: Tensor

    def __init__(self, colours: int, scattering: Scattering, *, pool: int, ridge: float) -> None:
        super().__init__()
        self.colours, self.pool = colours, pool
        mean, whitening = _whitening(colours, ridge)
        if mean.shape[1] != scattering.paths:
            raise ArgumentError(f"whitening needs {mean.shape[1]} scattering paths, got {scattering.paths}.")
        first_order = scattering.scales * scattering.angles
        self.orders = (1, first_order, scattering.paths - 1 - first_order)
        # Not in the state dict: they follow from the options.
        self.register_buffer("mean_CP", mean, persistent=False)
        self.register_buffer("whitening_CPP", whitening, persistent=False)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Standardise, pool, whiten; (N, C·P·H'·W')."""
        contrast = unit_contrast(x_NCHW, colours=self.colours, orders=self.orders, pool=self.pool)
        return whiten(contrast, self.mean_CP, self.whitening_CPP)

    @staticmethod
    def apply_whitening(x_NCPHW: Tensor, *, colours: int, ridge: float) -> Tensor:
        """What ``forward`` does after ``unit_contrast``, for features that were kept."""
        return whiten(x_NCPHW, *_whitening(colours, ridge))


def whiten(x_NCPHW: Tensor, mean_CP: Tensor, whitening_CPP: Tensor) -> Tensor:
    """Centre and decorrelate the paths of each region; (N, C·P·H·W)."""
    centred = x_NCPHW - mean_CP[:, :, None, None]
    return torch.einsum("cpq,ncqhw->ncphw", whitening_CPP, centred).flatten(1)


def _whitening(colours: int, ridge: float) -> tuple[Tensor, Tensor]:
    """Mean and (Σ + ridge·tr(Σ)/P)^(-1/2) of the paths of each channel."""
    mean, covariance = _dead_leaves(colours)
    values, vectors = np.linalg.eigh(covariance)
    scale = 1 / np.sqrt(np.maximum(values, 0) + ridge * values.mean(-1, keepdims=True))
    whitening = (vectors * scale[:, None, :]) @ np.swapaxes(vectors, -1, -2)
    return torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(whitening.astype(np.float32))


@lru_cache(maxsize=1)
def _dead_leaves_table() -> tuple[Array, Array]:
    """Mean (2, P) and covariance (2, P, P) of the paths: of brightness, and of a colour channel."""
    file = resources.files("dpvision.models") / "constants" / "dead_leaves.json"
    table = json.loads(file.read_text())
    mean = np.array(table["mean"], dtype=np.float64)
    upper = np.triu_indices(mean.shape[1])
    covariance = np.zeros((len(mean), mean.shape[1], mean.shape[1]))
    for index, values in enumerate(table["covariance_upper"]):
        covariance[index][upper] = values
        covariance[index].T[upper] = values
    return mean, covariance


def _dead_leaves(colours: int) -> tuple[Array, Array]:
    """The same for each channel."""
    mean, covariance = _dead_leaves_table()
    of = [0, *[1] * (colours - 1)]
    return mean[of], covariance[of]


@final
class SideBySide(nn.Module):
    """Several views of the same rows, one after the other in each row."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """What the parts make of ``x``, joined."""
        return torch.cat([part(x) for part in self.parts], dim=1)


def channel_constants(scattering: Scattering, public_images: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of every scattering channel over images that are public.

    Guarantee: none. They are released as they are, so they must not come from the private images.
    """
    with torch.no_grad():
        parts = [scattering(part).double() for part in public_images.split(64)]
    var_C, mean_C = torch.var_mean(torch.cat(parts), dim=(0, 2, 3), correction=0)
    return mean_C.tolist(), var_C.sqrt().tolist()


def known_constants(name: str) -> Constants:
    """Channel constants that come with the package: ``cifar100``, from its training images with pixels in 0..1."""
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
    pool: int = 0,
    ridge: float = 1.0,
    offset: float = 0.0,
) -> nn.Module:
    """Scattering, standardisation, one linear layer: the strongest private features without public data at small ε.

    ``standardise`` "group" is GroupNorm without parameters; "constants" takes ``constants``: the name of a set that
    comes with the package, or numbers (see ``channel_constants``; left out, 0 and 1, to be loaded with the weights).
    ``fine`` adds the features of the smallest scale, at twice the resolution and each channel standardised by itself.
    "whitened" takes ``pool`` and ``ridge``, see ``WhitenedPaths``: opponent colours, pooled and decorrelated features,
    each row of length √D for D features, and a head that starts at zero. ``offset`` above 0 makes the head an
    ``OffsetLinear`` with a constant of that many times √D, of which predictions keep ``KEPT_OFFSET``. The defaults for
    own images use these.
    """
    if standardise == "whitened":
        size = height_width(image_size)
        return _whitened_linear(num_classes, in_channels, size, fine, constants, pool, ridge, offset)
    if pool or ridge != 1.0 or offset:
        raise ArgumentError(f"pool, ridge and offset need standardise='whitened', got {standardise!r}.")
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


def _whitened_linear(
    num_classes: int,
    in_channels: int,
    size: tuple[int, int],
    fine: bool,
    constants: str | Constants | None,
    pool: int,
    ridge: float,
    offset: float,
) -> nn.Module:
    """A linear layer on whitened features."""
    scattering = Scattering(size)
    problems = Problems()
    problems.require(not fine and constants is None, "standardise='whitened' takes neither fine nor constants.")
    problems.require(in_channels in (1, 3), f"standardise='whitened' needs 1 or 3 channels, got {in_channels}.")
    problems.count("pool", pool, least=0)
    problems.positive("ridge", ridge)
    fits = pool <= min(scattering.output_size)
    problems.require(fits, f"pool must be at most {min(scattering.output_size)} for {size} pixels, got {pool}.")
    problems.raise_if_any()
    regions = pool**2 if pool else scattering.output_size[0] * scattering.output_size[1]
    features = in_channels * scattering.paths * regions
    colours = [OpponentColours()] if in_channels == 3 else []
    head = offset_head(features, num_classes, offset=offset, kept=KEPT_OFFSET)
    if head is None:
        head = nn.Linear(features, num_classes)
        zero(head)
    return nn.Sequential(
        *colours,
        scattering,
        WhitenedPaths(in_channels, scattering, pool=pool, ridge=ridge),
        nn.LayerNorm(features, elementwise_affine=False),
        head,
    )


@final
@dataclass(frozen=True, kw_only=True)
class ScatterCNN:
    """Scattering and two convolutions: the published head for MNIST on grey images, the one for CIFAR on others.

    ``standardise``, ``groups`` and ``constants`` are those of ``scatter_linear``. ``norm_groups`` puts a GroupNorm
    without parameters after each convolution of CIFAR's head, which grey images then get too (0: none, as
    published). For that head, ``width`` counts the channels of both convolutions, and ``layer_norm`` brings each
    image's features, once standardised, to mean 0 and variance 1.
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
    """A convolution that halves the image, another one, and a hidden layer of 32."""
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
