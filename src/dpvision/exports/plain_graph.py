"""A released model as one graph of plain operations: from bytes to probabilities, without kernels or complex numbers.

Layers that exporters or other runtimes can't express are replaced by equal ones: the discrete Fourier transforms of
wavelet scattering and the antialiased resize before a backbone become products with constant matrices.

Shapes: N images, C channels, H × W pixels, K classes, L angles.
"""

from __future__ import annotations

import copy
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpvision.config import RunConfig
from dpvision.inference.load import ReleasedModel
from dpvision.models.backbone import Resize
from dpvision.models.scattering import Scattering

_SMALL = 64 * 64
Outputs = Literal["softmax", "sigmoid", "one map"]
"""How outputs become probabilities: of one class among several, of several at once, or of foreground by one map."""


@final
class PlainGraph(nn.Module):
    """uint8 images (N, C, H, W) → probabilities and logits, (N, K) or for masks (N, K, H, W).

    The numbers are those of ``dpvision predict``. Logits are the model's own outputs; with two classes of pixels there
    is one map of them.

    Guarantee: it holds the released weights, the released pixel constants, and nothing else of the run.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, released: ReleasedModel) -> None:
        super().__init__()
        channels = released.image_shape[0]
        own = released.normalisation.for_channels(channels)
        shape = (1, channels, 1, 1)
        self.register_buffer("scale", torch.tensor([1 / (255 * std) for std in own.std]).view(shape))
        shift = [-mean / std for mean, std in zip(own.mean, own.std, strict=True)]
        self.register_buffer("shift", torch.tensor(shift).view(shape))
        self.outputs = outputs_of_run(released.config, len(released.class_names))
        self.model = plain_copy(released.model, released.image_shape)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise, apply the model, compute probabilities."""
        logits = self.model(images.to(torch.float32) * self.scale + self.shift)
        if self.outputs == "softmax":
            return logits.softmax(1), logits
        positive = logits.sigmoid()
        return (positive if self.outputs == "sigmoid" else torch.cat([1 - positive, positive], 1)), logits


def outputs_of_run(config: RunConfig, num_classes: int) -> Outputs:
    """Say how the outputs of a run's model become probabilities."""
    if config.data.findings is not None:
        return "sigmoid"
    return "one map" if config.task == "segmentation" and num_classes == 2 else "softmax"


def plain_copy(model: nn.Module, image_shape: tuple[int, int, int]) -> nn.Module:
    """Return a copy of a model in which every layer can be exported; its outputs are equal to float rounding."""
    duplicate = copy.deepcopy(model).cpu().eval()
    seen: dict[nn.Module, tuple[int, int]] = {}

    def remember(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[module] = (inputs[0].shape[-2], inputs[0].shape[-1])

    hooks = [m.register_forward_pre_hook(remember) for m in duplicate.modules() if isinstance(m, Resize)]
    try:
        with torch.no_grad():
            duplicate(torch.zeros(1, *image_shape))
    finally:
        for hook in hooks:
            hook.remove()
    return _replaced(duplicate, seen).requires_grad_(False)


def _replaced(module: nn.Module, sizes: dict[nn.Module, tuple[int, int]]) -> nn.Module:
    if isinstance(module, Scattering):
        return PlainScattering(module)
    if module in sizes and isinstance(module, Resize):
        return PlainResize(sizes[module], module)
    for name, child in module.named_children():
        setattr(module, name, _replaced(child, sizes))
    return module


@final
class PlainResize(nn.Module):
    """What ``Resize`` computes for images of one size, as a matrix along each axis."""

    rows: Tensor
    columns: Tensor

    def __init__(self, size: tuple[int, int], layer: Resize) -> None:
        super().__init__()
        for name, old in zip(("rows", "columns"), size, strict=True):
            self.register_buffer(name, _resize_matrix(old, layer.size))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Resize each image."""
        return self.rows @ x_NCHW @ self.columns.mT


def _resize_matrix(old: int, new: int) -> Tensor:
    """(new, old): bicubic with antialiasing along one axis, as ``Resize`` does it."""
    if old == new:
        return torch.eye(old)
    units = torch.eye(old)[None, None]  # float32, so that the weights are rounded as those of the layer are
    matrix = functional.interpolate(units, size=(new, old), mode="bicubic", align_corners=False, antialias=True)
    return matrix[0, 0]


@final
class PlainScattering(nn.Module):
    """What ``Scattering`` computes, on pairs of real and imaginary parts; Fourier transforms are matrix products."""

    def __init__(self, scattering: Scattering) -> None:
        super().__init__()
        self.scales, self.padding = scattering.scales, scattering.padding
        for name, table in scattering.named_buffers():
            self.register_buffer(name, table.clone())
        pixels = 1
        for level in range(self.scales):
            for axis in "yx":
                size = scattering.get_buffer(f"blur_{axis}_{level}").shape[1]
                pixels *= size if level == 0 else 1
                angle = 2 * np.pi * (np.outer(np.arange(size), np.arange(size)) % size) / size
                for kind, values in (("cos", np.cos(angle)), ("sin", np.sin(angle))):
                    self.register_buffer(f"{kind}_{axis}_{level}", torch.from_numpy(values.astype(np.float32)))
        # All pairs of angles at once make a small graph; of large images they would take too much memory.
        self.together = scattering.angles if pixels <= _SMALL else 1

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Scatter each colour on its own."""
        u0_NCHW = functional.pad(x_NCHW, self.padding, mode="reflect")
        first, second = [self._blur(u0_NCHW, 0).unsqueeze(-3)], []
        hat0 = self._transform(u0_NCHW, 0)
        for j1 in range(self.scales):
            u1_NCLHW = self._modulus(hat0, j1, level=0)
            first.append(self._blur(u1_NCLHW, j1))
            later = range(j1 + 1, self.scales)
            for some_NCLHW in u1_NCLHW.split(self.together, dim=-3) if later else ():
                hat1 = self._transform(some_NCLHW, j1)
                paths = [self._blur(self._modulus(hat1, j2, level=j1), j2) for j2 in later]
                second.append(torch.cat(paths, dim=-3).flatten(-4, -3))
        return torch.cat((*first, *second), dim=-3).flatten(-4, -3)

    def _blur(self, x_HW: Tensor, level: int) -> Tensor:
        return self.get_buffer(f"blur_y_{level}") @ x_HW @ self.get_buffer(f"blur_x_{level}").mT

    def _waves(self, level: int) -> list[Tensor]:
        return [self.get_buffer(f"{kind}_{axis}_{level}") for axis in "yx" for kind in ("cos", "sin")]

    def _transform(self, x_HW: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """The Fourier transform of a real image: cos − i·sin along both axes."""
        cos_y, sin_y, cos_x, sin_x = self._waves(level)
        even, odd = x_HW @ cos_x, x_HW @ sin_x
        return cos_y @ even - sin_y @ odd, -(cos_y @ odd + sin_y @ even)

    def _modulus(self, hat: tuple[Tensor, Tensor], j: int, *, level: int) -> Tensor:
        """|x ⋆ ψ| for all angles of scale ``j``; x is at resolution ``level``, the result at ``j``."""
        psi_LHW = self.get_buffer(f"psi_{j}_{level}")
        real, imaginary = (part.unsqueeze(-3) * psi_LHW for part in hat)
        pixels = psi_LHW.shape[-2] * psi_LHW.shape[-1]
        # The inverse transform, only at the pixels that stay after subsampling.
        cos_y, sin_y, cos_x, sin_x = (table[:: 2 ** (j - level)] for table in self._waves(level))
        a, b = real @ cos_x.mT - imaginary @ sin_x.mT, real @ sin_x.mT + imaginary @ cos_x.mT
        real, imaginary = cos_y @ a - sin_y @ b, sin_y @ a + cos_y @ b
        return (real.square() + imaginary.square()).sqrt() / pixels
