"""Writes models/constants/dead_leaves.json: how scattering paths vary in synthetic images.

``python -m benchmarks.own_data.dead_leaves`` draws 4,000 images of overlapping ellipses in all sizes ("dead leaves",
the usual model of natural images: edges at every scale, occlusion), computes their standardised scattering features,
and writes mean and covariance of the paths, for brightness and for a colour channel.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpvision.models.scattering import OpponentColours, Scattering, unit_contrast

IMAGES, SIDE, POOL = 4000, 32, 4
FILE = Path(__file__).parents[2] / "src/dpvision/models/constants/dead_leaves.json"


def leaves(count: int, *, seed: int) -> NDArray[np.float32]:
    """Draw images (N, 3, SIDE, SIDE) in 0..1: soft ellipses of log-uniform size and nearly grey colours, and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    images = np.zeros((count, 3, SIDE, SIDE))
    for image in images:
        image += rng.random(3)[:, None, None]
        for _ in range(rng.integers(5, 60)):
            radius = np.exp(rng.uniform(np.log(1.5), np.log(16)))
            centre, angle, aspect = rng.uniform(-4, SIDE + 4, 2), rng.uniform(0, np.pi), np.exp(rng.uniform(-1, 1))
            along = (y - centre[0]) * np.cos(angle) + (x - centre[1]) * np.sin(angle)
            across = (x - centre[1]) * np.cos(angle) - (y - centre[0]) * np.sin(angle)
            distance = np.sqrt((along * aspect) ** 2 + (across / aspect) ** 2)
            inside = 1 / (1 + np.exp(np.clip(2 * (distance - radius), -50, 50)))
            colour = np.clip(rng.random() + rng.normal(0, 0.12, 3), 0, 1)
            image *= 1 - inside
            image += colour[:, None, None] * inside
        image += rng.normal(0, 0.02, image.shape)
    return np.clip(images, 0, 1).astype(np.float32)


def statistics(images: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean (2, P) and covariance (2, P, P) of brightness and of the two colour channels together."""
    scattering = Scattering((SIDE, SIDE))
    first_order = scattering.scales * scattering.angles
    orders = (1, first_order, scattering.paths - 1 - first_order)
    parts = []
    with torch.no_grad():
        for some in torch.from_numpy(images).split(100):
            # Pixels from -1 to 1, as in a run on one's own images.
            scattered = scattering(OpponentColours()(2 * some - 1))
            parts.append(unit_contrast(scattered, colours=3, orders=orders, pool=POOL))
    rows = torch.cat(parts).permute(1, 0, 3, 4, 2).flatten(1, 3).double().numpy()
    groups = rows[0], np.concatenate((rows[1], rows[2]))
    return np.stack([each.mean(0) for each in groups]), np.stack([np.cov(each.T) for each in groups])


def main() -> None:
    """Write the file."""
    mean, covariance = statistics(leaves(IMAGES, seed=0))
    upper = np.triu_indices(mean.shape[1])
    table = {
        "source": "synthetic dead leaves, python -m benchmarks.own_data.dead_leaves",
        "mean": [[float(f"{value:.4g}") for value in row] for row in mean],
        "covariance_upper": [[float(f"{value:.4g}") for value in each[upper]] for each in covariance],
    }
    FILE.write_text(json.dumps(table) + "\n")


if __name__ == "__main__":
    main()
