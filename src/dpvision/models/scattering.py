"""A fixed wavelet scattering transform of order 2 on torch.fft (Bruna & Mallat), equal to kymatio's to float rounding.

Shapes: N rows, C colours, L angles, H and W padded height and width, h and w the output's, P = 1 + JL + J(J−1)/2·L²
paths. A picture is reflected at its edges, filtered by oriented Morlet wavelets, its modulus is taken, once or twice,
and each result is blurred by a Gaussian and subsampled by 2^J.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpvision.checks import ArgumentError

Array = NDArray[np.float64]
SIGMA, FREQUENCY = 0.8, 3 * math.pi / 4
# kymatio's normalising constants use this π; with it, features and published settings carry over.
PI = 3.1415
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
            raise ArgumentError(f"scattering needs pictures of at least {smallest} pixels, got {image_size}.")
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
        """Numbers that a colour of a picture becomes."""
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
            raise ArgumentError(f"pictures must be {self.image_size} pixels, got {tuple(x_NCHW.shape[-2:])}.")
        # On the way, a picture takes many times its features' memory: a few at a time.
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
        # One angle at a time: all of them at once would hold L² complex pictures a row.
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
        return blur_y @ x_HW @ blur_x.mT
