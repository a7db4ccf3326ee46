"""Private training of a linear head on frozen features, simulated.

Exact DP-SGD for this model, in a few matrix products: the gradient of a linear softmax layer for one unit is the outer
product of its residual and its features [x, 1], so its norm is ‖[x, 1]‖·‖softmax − onehot‖ and clipping is a factor per
unit. Many runs (settings and seeds) share the products. Sampling is Poisson at the given rate, noise is calibrated by
``dpvision.accounting``, the divisor is public: what the run of ``dpvision train`` computes, without its ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from dpvision.accounting import calibrate_noise_multiplier, propose_delta

Array = NDArray[np.float32]
Labels = NDArray[np.int64]


@final
@dataclass(frozen=True)
class HeadData:
    """Features and class numbers of both splits; ``num_units`` of the training rows are used."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    num_classes: int

    def first(self, num_units: int, *, seed: int | None = None) -> HeadData:
        """A training part of this many units: the first ones, or drawn by ``seed``."""
        rows = torch.arange(num_units)
        if seed is not None:
            rows = torch.from_numpy(np.random.default_rng(seed).permutation(len(self.train_y))[:num_units])
        return HeadData(self.train_x[rows], self.train_y[rows], self.test_x, self.test_y, self.num_classes)


@final
@dataclass(frozen=True)
class Head:
    """Settings of a head's training, by the names of the configuration."""

    learning_rate: float
    clip_norm: float
    steps: int
    sample_rate: float = 1.0
    momentum: float = 0.0
    decay: float = 0.0
    """Of the average of the weights (ema); 0 means none."""
    noise_multiplier: float = 0.0
    offset: float = 0.0
    """A constant feature in training, over √D; with 0, a bias counts once, in predictions too."""
    kept: float = 0.0
    """Share of the constant feature that predictions keep."""


@cache
def noise_for(num_units: int, batch: float, steps: int, epsilon: float, delta: float) -> float:
    """The noise multiplier of a plan."""
    return calibrate_noise_multiplier(
        num_units=num_units, expected_batch_size=batch, steps=steps, target_epsilon=epsilon, delta=delta
    )


def delta_for(num_units: int) -> float:
    """The default delta."""
    return propose_delta(num_units)


def simulate(data: HeadData, heads: Sequence[Head], *, seeds: Sequence[int], points: int = 1) -> NDArray[np.float64]:
    """Train every head with every seed; heads must have the same steps, sample rate, offset and share of it kept.

    Returns:
        Test accuracy in percent, (points, seeds, heads): at ``points`` equally spaced steps, the last one included.
    """
    steps, rate, offset, kept = heads[0].steps, heads[0].sample_rate, heads[0].offset, heads[0].kept
    if any((each.steps, each.sample_rate, each.offset, each.kept) != (steps, rate, offset, kept) for each in heads):
        raise ValueError("heads of one call must have the same steps, sample rate, offset and share of it kept")
    x, y = data.train_x, functional.one_hot(data.train_y, data.num_classes).float()
    runs, classes, width = len(seeds) * len(heads), data.num_classes, x.shape[1] + 1
    learned = offset * x.shape[1] ** 0.5 if offset else 1.0
    predicted = kept * learned if offset else 1.0
    x = torch.cat((x, torch.full((len(x), 1), learned)), 1)
    test = torch.cat((data.test_x, torch.full((len(data.test_x), 1), predicted)), 1)

    def of(name: str) -> torch.Tensor:
        return torch.tensor([float(getattr(each, name)) for each in heads]).repeat(len(seeds))

    clip, lr, momentum, decay, noise = map(of, ("clip_norm", "learning_rate", "momentum", "decay", "noise_multiplier"))
    norms = x.norm(dim=1)
    outside = None
    if 2 * len(x) < width and rate >= 1 and not bool(momentum.any() or decay.any()):
        # Gradients lie in the span of the rows, so that weights outside of it are the sum of the noise alone.
        basis = torch.linalg.qr(x.T).Q
        outside, x, test = test - (test @ basis) @ basis.T, x @ basis, test @ basis
    generators = [torch.Generator().manual_seed(1000 * seed + 1) for seed in seeds]
    weights = torch.zeros(x.shape[1], runs, classes)
    other = [torch.zeros(width, classes) for _ in generators]
    velocity, average = torch.zeros_like(weights), torch.zeros_like(weights)
    divisor = rate * len(x)
    reports = {round(steps * (index + 1) / points) for index in range(points)}
    found, shown_at = [], 0
    for step in range(steps):
        rows = (
            torch.arange(len(x)) if rate >= 1 else torch.rand(len(x), generator=generators[0]).lt(rate).nonzero()[:, 0]
        )
        inputs, targets = x[rows], y[rows]
        residual = (inputs @ weights.flatten(1)).view(-1, runs, classes).softmax(-1) - targets[:, None]
        length = residual.norm(dim=-1) * norms[rows, None]
        residual *= (clip / torch.maximum(length, clip))[..., None]
        gradient = (inputs.T @ residual.flatten(1)).view_as(weights)
        for index, generator in enumerate(generators):
            # One draw for all heads of a seed: they are compared under the same noise.
            normal = torch.randn(len(weights), 1, classes, generator=generator)
            part = slice(index * len(heads), (index + 1) * len(heads))
            gradient[:, part] += normal * (noise * clip)[None, part, None]
        velocity.mul_(momentum[:, None]).add_(gradient / divisor)
        weights -= lr[:, None] * velocity
        share = torch.minimum(decay, torch.tensor((1 + step) / (10 + step)))[:, None]
        average = average * share + weights * (1 - share)
        if step + 1 in reports:
            scores = (test @ torch.where(decay[:, None] > 0, average, weights).flatten(1)).view(-1, runs, classes)
            if outside is not None:
                for index, generator in enumerate(generators):
                    drawn = torch.randn(width, classes, generator=generator)
                    other[index] += drawn * (step + 1 - shown_at) ** 0.5
                    part = slice(index * len(heads), (index + 1) * len(heads))
                    scores[:, part] -= (outside @ other[index])[:, None] * (lr * noise * clip / divisor)[part, None]
            shown_at = step + 1
            found.append(_accuracy(scores, data.test_y, len(seeds)))
    return np.stack(found)


def _accuracy(scores: torch.Tensor, labels: torch.Tensor, seeds: int) -> NDArray[np.float64]:
    hits = scores.argmax(-1).eq(labels[:, None]).double().mean(0)
    return 100 * hits.view(seeds, -1).numpy()
