"""One-shot private heads on frozen features, simulated: what a single noisy release of sums can do.

Two variants, both of rows of length one with a constant appended, and of one Gaussian release in which a unit moves all
sums together by at most a known length (joint sensitivity):

- ``class_means``: the sum of the rows of each class and, by the constant, the number of its units. The head is linear
  discriminant analysis with the covariance of the features, which is public (they are whitened).
- ``least_squares``: XᵀX and XᵀY (as in AdaSSP, Wang 2018) of a random projection of the features, and a ridge from the
  spectral norm of the noise on XᵀX.

They were compared with the default head and lost (decision 0011), so that neither is in the package.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from benchmarks.own_data.heads import HeadData

CONSTANT = 0.3
"""Appended to each row: large enough to count the classes, small enough to cost little."""
GRAM_WEIGHT, RIDGE, DIMENSION = 0.3, 0.3, 512
"""Weight of XᵀX in the release, ridge over the spectral norm of its noise, and dimension of the projection."""


def class_means(data: HeadData, *, noise: float, seed: int) -> float:
    """Test accuracy in percent of discriminant analysis on noisy sums of each class.

    Args:
        data: features and classes.
        noise: standard deviation of the noise over the sensitivity of the whole release.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(777 + seed)
    rows, test = _rows(data.train_x), _rows(data.test_x)
    sums = rows.T @ functional.one_hot(data.train_y, data.num_classes).float()
    deviation = noise * math.sqrt(1 + CONSTANT**2)
    sums += deviation * torch.randn(sums.shape, generator=generator)
    # At least a tenth of an equal share: a noisy count may be zero or below.
    counts = (sums[-1] / CONSTANT).clamp_min(0.1 * len(rows) / data.num_classes)
    centre = sums[:-1].sum(1) / (sums[-1].sum() / CONSTANT).clamp_min(1)
    means = sums[:-1] / counts - centre[:, None]
    # The squared length of a mean without what the noise adds to it.
    lengths = means.square().sum(0) - len(means) * (deviation / counts) ** 2
    return _accuracy((test[:, :-1] - centre) @ means - lengths / 2, data)


def least_squares(data: HeadData, *, noise: float, seed: int) -> float:
    """Test accuracy in percent of ridge regression on noisy XᵀX and XᵀY.

    Args:
        data: features and classes.
        noise: standard deviation of the noise over the sensitivity of the whole release.
        seed: of the noise and of the projection.
    """
    generator = torch.Generator().manual_seed(777 + seed)
    width = data.train_x.shape[1]
    basis = torch.eye(width)
    if width > DIMENSION:
        basis = torch.randn(width, DIMENSION, generator=generator)  # almost orthogonal; rows get length one after it
    rows, test = _rows(data.train_x @ basis), _rows(data.test_x @ basis)
    size, square = rows.shape[1], 1 + CONSTANT**2
    # A unit moves XᵀY by its length and the weighted XᵀX by the weighted square of it, both at once.
    deviation = noise * math.sqrt((GRAM_WEIGHT * square) ** 2 + square)
    products = rows.T @ functional.one_hot(data.train_y, data.num_classes).float()
    products += deviation * torch.randn(products.shape, generator=generator)
    # Off the diagonal an entry counts twice in the length of a symmetric matrix: half the variance on each.
    drawn = torch.randn(size, size, generator=generator)
    upper = drawn.triu(1) / math.sqrt(2)
    deviation /= GRAM_WEIGHT
    values, vectors = torch.linalg.eigh(rows.T @ rows + deviation * (upper + upper.T + drawn.diag().diag()))
    ridge = RIDGE * deviation * math.sqrt(2 * size)
    targets = products - products.mean(1, keepdim=True)
    weights = vectors @ ((vectors.T @ targets) / (values.clamp_min(0) + ridge)[:, None])
    return _accuracy(test @ weights, data)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Rows of length one, with the constant appended."""
    return torch.cat((functional.normalize(x, dim=1), torch.full((len(x), 1), CONSTANT)), 1)


def _accuracy(scores: torch.Tensor, data: HeadData) -> float:
    return 100 * scores.argmax(1).eq(data.test_y).double().mean().item()
