"""Cached features: what a frozen backbone computes from every image, once. Training then reads features, not images.

Shapes: N rows of the store, W orientations of an image (as it is; mirrored too), F the feature's own dimensions,
D drawn units, U units of a micro-batch, R rows per unit.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpvision.data.batches import DrawnBatch, ImageBatches, as_microbatch
from dpvision.data.normalisation import Normalisation
from dpvision.data.options import Progress
from dpvision.data.safe_read import open_regular, read_npy
from dpvision.data.store import MappedImages
from dpvision.errors import DataError
from dpvision.privacy.sampling import Sampling
from dpvision.privacy.values import Microbatch
from dpvision.ranks import ALONE, Ranks
from dpvision.storage.files import disk_errors, replacing

BATCH = 16
"""Rows at a time, always: the last batch is filled up, so that no row's bits depend on how many rows there are."""

_LARGEST_HALF = float(torch.finfo(torch.float16).max)


@final
@dataclass(frozen=True, eq=False)
class Features:
    """One row of features per image and orientation, (N, W, F). As sensitive as the images.

    Guarantee: a row is a function of its own image and of public numbers alone.
    """

    values_NWF: Tensor

    def __repr__(self) -> str:
        return "Features(sensitive)"

    @property
    def ways(self) -> int:
        """The number of orientations, and so of feature rows, of an image."""
        return self.values_NWF.shape[1]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of shape, type and bits, to which the keys of a run are bound."""
        return _digest(self.values_NWF.numpy())


def extract(
    backbone: Callable[[Tensor], Tensor],
    images: Tensor | MappedImages,
    normalisation: Normalisation,
    *,
    mirrored: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Features:
    """Compute the features of every image.

    Args:
        backbone: the frozen layers, in evaluation mode, on ``device``.
        images: uint8 (N, C, H, W).
        normalisation: of the images.
        mirrored: compute the features of the mirror image too.
        dtype: of the result; float16 is clamped to its finite range.
        device: where to compute.
        progress: called after each batch.
        ranks: processes that call this at the same time and share the work, by whole batches.

    Returns:
        The features, on the CPU. Only rank 0 has those of all images.
    """
    blank = torch.zeros((BATCH, *images.shape[1:]), dtype=torch.uint8)
    own = ranks.share(-(-len(images) // BATCH))
    with torch.no_grad(), ranks.settling():
        shape_WF = _features_of(backbone, blank, normalisation, mirrored=mirrored, device=device).shape[1:]
        values_NWF = torch.empty((len(images), *shape_WF), dtype=dtype)
        for start in range(own.start * BATCH, min(own.stop * BATCH, len(images)), BATCH):
            part = images[start : start + BATCH]
            filled = torch.cat([part, blank[len(part) :]])
            found = _features_of(backbone, filled, normalisation, mirrored=mirrored, device=device)[: len(part)]
            if dtype == torch.float16:
                found = found.clamp(-_LARGEST_HALF, _LARGEST_HALF)
            values_NWF[start : start + len(part)] = found
            if progress is not None:
                progress("features", min(ranks.size * (start + len(part)), len(images)), len(images))
    ranks.collect(values_NWF, size=BATCH)
    return Features(values_NWF)


def _features_of(
    backbone: Callable[[Tensor], Tensor],
    images: Tensor,
    normalisation: Normalisation,
    *,
    mirrored: bool,
    device: torch.device | str,
) -> Tensor:
    """Compute the features of one batch, (rows, W, F)."""
    ways = [images, images.flip(-1)] if mirrored else [images]
    return torch.stack([backbone(normalisation.apply(way.to(device))).cpu() for way in ways], dim=1)


@final
class FeatureDraws:
    """The draws of a run, over features.

    Guarantee: the same units join, with the same rows, as in ``draws``; each row gives all its ways, in equal shares.
    """

    def __init__(self, draws: ImageBatches, features: Features, labels: Tensor, device: torch.device | str) -> None:
        self._draws = draws
        self._ways = features.ways
        # The orientations of one image are neighbours.
        self._values = features.values_NWF.flatten(0, 1).to(device)
        self._labels = labels.to(device)

    @property
    def sampling(self) -> Sampling:
        """How every batch is sampled."""
        return self._draws.sampling

    def batch(self, step: int) -> DrawnBatch:
        """Return the batch of ``step``: the same every time."""
        rows_DR = self._draws.rows(step)
        return DrawnBatch(self.sampling, self._gather, rows_DR, np.zeros((*rows_DR.shape, 1, 0), dtype=np.uint64))

    def _gather(self, rows_UR: NDArray[np.int64], _words: NDArray[np.uint64]) -> Microbatch:
        """Gather the features and labels of a micro-batch."""
        images = np.repeat(np.maximum(rows_UR.reshape(-1), 0), self._ways)
        way = np.tile(np.arange(self._ways), rows_UR.size)
        of_image, of_row = (torch.from_numpy(at).to(self._values.device) for at in (images, images * self._ways + way))
        inputs = self._values.index_select(0, of_row).to(torch.float32)
        return as_microbatch(inputs, self._labels.index_select(0, of_image), rows_UR, self._ways)


def kept_features(folder: Path, key: str, compute: Callable[[], Features]) -> Features:
    """Read features from the disk, or compute and keep them.

    Args:
        folder: where they are kept; made with mode 700 if it does not exist.
        key: the name under which they are kept.
        compute: computes them.

    Returns:
        The features. A file's name carries the hash of its content; a damaged file is deleted and computed again.

    Raises:
        DataError: if others can read the folder.
    """
    _require_own(folder)
    for path in sorted(folder.glob(f"{key}-*.npy")):
        found = _read(path)
        if found is not None and path.name == f"{key}-{found.digest}.npy":
            return found
        path.unlink(missing_ok=True)
    features = compute()
    _write(folder, f"{key}-{features.digest}.npy", features)
    return features


def _require_own(folder: Path) -> None:
    """Make the folder, or refuse one that others can list or write to: features are as sensitive as images."""
    with disk_errors(f"keep features in {folder}"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise DataError(f"{folder} must be a folder of yours that is closed to others: chmod 700 it, or delete it.")


def _read(path: Path) -> Features | None:
    """Read the features of a file; None if it holds something else."""
    with disk_errors(f"read {path}"):
        try:
            with open_regular(path) as file:
                values = read_npy(file, size=os.fstat(file.fileno()).st_size, where=str(path))
        except DataError:
            return None
    if values.ndim < 2 or values.dtype not in (np.float16, np.float32):
        return None
    return Features(torch.from_numpy(values))


def _write(folder: Path, name: str, features: Features) -> None:
    """Write features to a file that only its owner can read."""
    with disk_errors(f"keep features in {folder}"), replacing(folder / name, mode=0o600) as file:
        np.save(file, features.values_NWF.numpy(), allow_pickle=False)


def _digest(values: NDArray[np.generic]) -> str:
    digest = hashlib.sha256(f"dpvision features/1 {values.shape} {values.dtype} ".encode())
    digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
