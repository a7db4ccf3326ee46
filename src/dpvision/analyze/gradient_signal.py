"""Norms of single images' gradients, what clipping does to them, and each layer's signal beside its noise.

The values are functions of the images, without noise. On private images they are ``unsafe_`` and stay in ``private/``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpvision.errors import ArgumentError
from dpvision.models.losses import RowLoss
from dpvision.privacy.mechanism import Mechanism

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_NUMBERS_AT_ONCE = 1 << 26


@final
@dataclass(frozen=True, kw_only=True)
class LayerSignal:
    """The mean clipped gradient of one parameter beside the noise of a step.

    Attributes:
        parameter: its name.
        size: how many numbers it has.
        signal: L2 norm of the expected clipped gradient, estimated without the sample's own variance.
        noise: L2 norm that the noise of one step has on average, on the mean gradient; None without privacy.
        ratio: signal over noise; None without privacy.
    """

    parameter: str
    size: int
    signal: float
    noise: float | None
    ratio: float | None


@final
@dataclass(frozen=True, kw_only=True)
class GradientStatistics:
    """Gradients of single images.

    Attributes:
        images: how many.
        clip_norm: the bound that they were compared with; None without privacy.
        norms: the L2 norm of each image's gradient.
        clipped: share of the gradients that are longer than ``clip_norm``.
        kept: length of the mean clipped gradient over that of the mean gradient.
        cosine: cosine of the angle between the two.
        layers: signal and noise of every parameter.
    """

    images: int
    clip_norm: float | None
    norms: tuple[float, ...]
    clipped: float | None
    kept: float | None
    cosine: float | None
    layers: tuple[LayerSignal, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        quantiles = np.quantile(self.norms, QUANTILES).tolist()
        return {
            "images": self.images,
            "clip_norm": self.clip_norm,
            "mean_norm": float(np.mean(self.norms)),
            "quantiles": {f"{100 * q:g}%": value for q, value in zip(QUANTILES, quantiles, strict=True)},
            "clipped": self.clipped,
            "kept_by_clipping": self.kept,
            "cosine_after_clipping": self.cosine,
            "layers": [asdict(layer) for layer in self.layers],
        }


def gradient_statistics(
    model: nn.Module, loss: RowLoss, inputs: Tensor, targets: Tensor, *, mechanism: Mechanism | None
) -> GradientStatistics:
    """Compute the gradient of every image, one at a time in effect, and summarise.

    One image is one privacy unit here: augmented views and owners of several images are not repeated.

    Args:
        model: the network; it runs in evaluation mode if it is in it.
        loss: one loss per row.
        inputs: normalised images, at least two.
        targets: their targets.
        mechanism: clip norm, noise and divisor to compare with; None without privacy.

    Returns:
        Norms, effects of clipping, and each layer's signal-to-noise ratio in one step.

    Raises:
        ArgumentError: there are fewer than two images, nothing is trainable, or rows can't be separated by
            ``torch.func.vmap``.
    """
    parameters = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    if len(inputs) < 2 or not parameters:
        raise ArgumentError("statistics of gradients need at least two images and one trainable parameter.")

    def row_loss(weights: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
        return loss(functional_call(model, weights, (image[None],)), target[None])[0]

    rows = vmap(grad(row_loss), in_dims=(None, 0, 0))
    count = max(1, min(64, _NUMBERS_AT_ONCE // sum(value.numel() for value in parameters.values())))
    clip = None if mechanism is None else mechanism.clip_norm
    norms: list[Tensor] = []
    sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    raw = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    squares = dict.fromkeys(parameters, 0.0)
    for images, wanted in zip(inputs.split(count), targets.split(count), strict=True):
        try:
            found = rows(parameters, images, wanted)
        except RuntimeError as error:
            raise ArgumentError(f"gradients of single images can't be computed by torch.func: {error}") from error
        norm_N = torch.stack([value.double().flatten(1).square().sum(1) for value in found.values()]).sum(0).sqrt()
        factor_N = torch.ones_like(norm_N) if clip is None else (clip / norm_N.clamp(min=1e-300)).clamp(max=1.0)
        norms.append(norm_N)
        for name, value in found.items():
            exact = value.double()
            sums[name] += torch.tensordot(factor_N, exact, 1)
            raw[name] += exact.sum(0)
            squares[name] += float((exact.flatten(1).square().sum(1) * factor_N.square()).sum())
    norm_N = torch.cat(norms)
    flat, flat_raw = (torch.cat([value.flatten() for value in each.values()]) for each in (sums, raw))
    lengths = float(flat.norm()), float(flat_raw.norm())
    comparable = clip is not None and min(lengths) > 0
    return GradientStatistics(
        images=len(inputs),
        clip_norm=clip,
        norms=tuple(norm_N.tolist()),
        clipped=None if clip is None else float((norm_N > clip).double().mean()),
        kept=lengths[0] / lengths[1] if comparable else None,
        cosine=float(flat @ flat_raw) / (lengths[0] * lengths[1]) if comparable else None,
        layers=tuple(
            _signal(name, value, squares[name], len(inputs), mechanism=mechanism) for name, value in sums.items()
        ),
    )


def _signal(name: str, total: Tensor, squares: float, images: int, *, mechanism: Mechanism | None) -> LayerSignal:
    """Estimate ‖E g‖ without bias in its square: pairs of different images only."""
    squared = (float(total.square().sum()) - squares) / (images * (images - 1))
    signal = max(0.0, squared) ** 0.5
    if mechanism is None:
        return LayerSignal(parameter=name, size=total.numel(), signal=signal, noise=None, ratio=None)
    stddev = mechanism.noise_multiplier * mechanism.clip_norm / mechanism.expected_batch_size
    noise = stddev * total.numel() ** 0.5
    return LayerSignal(
        parameter=name, size=total.numel(), signal=signal, noise=noise, ratio=signal / noise if noise else None
    )
