"""Gather the images of drawn units into micro-batches of a fixed shape.

``privacy.sampling`` decides which units join a step; this file chooses their rows, makes the augmented views and pads.

Shapes: D drawn units, U units of a micro-batch, R rows per unit, K views of a row, J random words of a view.
A unit gives R·K neighbouring rows to a micro-batch: all views of its first row, then those of its second, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpvision.config import ViewsConfig
from dpvision.data.augmentation import NO_AUGMENTATION, erase_views, make_views, words_per_view
from dpvision.data.normalisation import Normalisation
from dpvision.data.store import ImageStore, MappedImages
from dpvision.errors import DataError, Problems
from dpvision.privacy.mechanism import Mechanism, OrdinarySampling
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import PoissonSampler, Sampling, choose_without_replacement, draw_holdout
from dpvision.privacy.values import Microbatch, chosen_starts

NO_ROW = -1


@final
class ImageBatches:
    """The batches of one run over an image store.

    Args:
        mechanism: gives the sample rate; the store has no influence on it.
        store: the images and their units.
        normalisation: how pixels become inputs.
        keys: the keys of the run; streams "sampling", "rows" and "augmentation" are used.
        rows_per_unit: rows that a unit gives at most.
        device: where the images are held.
        views: the augmented views of each row.

    Guarantee: units join as ``PoissonSampler`` says. A unit gives at most ``rows_per_unit`` rows, and
    ``views.count`` views of each, chosen by its own parts of the streams, so that neither its presence nor its size
    changes what the other units give. Their weights sum to one: together they are one unit, to be clipped once.
    """

    def __init__(
        self,
        *,
        mechanism: Mechanism | OrdinarySampling,
        store: ImageStore,
        normalisation: Normalisation,
        keys: Keys,
        rows_per_unit: int = 1,
        device: torch.device | str = "cpu",
        views: ViewsConfig = NO_AUGMENTATION,
    ) -> None:
        Problems().count("rows_per_unit", rows_per_unit).raise_if_any()
        self._sampler = PoissonSampler(
            num_units=store.num_units,
            sample_rate=mechanism.sample_rate,
            keys=keys,
            expected_batch_size=mechanism.expected_batch_size,
        )
        self._unit_rows = store.rows_of_units
        self._rows_per_unit = rows_per_unit
        self._views = views
        # Mapped images stay on the disk; what is drawn goes to the device.
        self._images = store.images if isinstance(store.images, MappedImages) else store.images.to(device)
        self._labels = store.labels.to(device)
        self._normalisation = normalisation.for_channels(store.image_shape[0])

    @property
    def sampling(self) -> Sampling:
        """How every batch is drawn."""
        return self._sampler.sampling

    def units(self, step: int) -> NDArray[np.int64]:
        """Return the units that join ``step``, in ascending order. Sensitive."""
        return self._sampler.units(step)

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the rows that join ``step``, R per unit; -1 where a unit has fewer. Sensitive."""
        return self._rows(self.units(step), step)

    def batch(self, step: int) -> DrawnBatch:
        """Return the draw of ``step``: the same for every call."""
        units = self.units(step)
        prefetch = self._images.prefetch if isinstance(self._images, MappedImages) else None
        return DrawnBatch(self.sampling, self._gather, self._rows(units, step), self._words(units, step), prefetch)

    def _rows(self, units: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        offsets, order = self._unit_rows
        first_D, count_D = offsets[units], offsets[units + 1] - offsets[units]
        places_DR = np.broadcast_to(np.arange(self._rows_per_unit), (len(units), self._rows_per_unit)).copy()
        crowded = count_D > self._rows_per_unit
        if crowded.any():
            # Unit u owns words u·R … u·R + R - 1 of this step, whichever others are drawn.
            words = self._sampler.keys.bits(self._sampler.num_units * self._rows_per_unit, "rows", step)
            own_words = words.reshape(-1, self._rows_per_unit)[units[crowded]]
            places_DR[crowded] = choose_without_replacement(own_words, count_D[crowded])
        there_DR = places_DR < count_D[:, None]
        rows_DR = np.full(places_DR.shape, NO_ROW, dtype=np.int64)
        rows_DR[there_DR] = order[(first_D[:, None] + places_DR)[there_DR]]
        return rows_DR

    def _words(self, units: NDArray[np.int64], step: int) -> NDArray[np.uint64]:
        """Return the words that decide the views of each drawn unit: its own, whichever others are drawn."""
        shape = (len(units), self._rows_per_unit, self._views.count, words_per_view(self._views))
        if not self._views.random:
            return np.zeros(shape, dtype=np.uint64)
        return self._sampler.keys.bits_by_unit(units, math.prod(shape[1:]), "augmentation", step).reshape(shape)

    def _gather(self, rows_UR: NDArray[np.int64], words_URKJ: NDArray[np.uint64]) -> Microbatch:
        """Make the augmented views of some rows."""
        words_NKJ = words_URKJ.reshape(rows_UR.size, *words_URKJ.shape[2:])
        index = torch.from_numpy(np.maximum(rows_UR.reshape(-1), 0)).to(self._labels.device)
        # Bytes are turned, mirrored and cropped before they become four times as large.
        drawn = self._images.index_select(0, index).to(self._labels.device)
        images = make_views(drawn, self._views, words_NKJ)
        inputs = erase_views(self._normalisation.apply(images), self._views, words_NKJ)
        targets = self._targets(self._labels.index_select(0, index), words_NKJ)
        return as_microbatch(inputs, targets, rows_UR, self._views.count)

    def _targets(self, labels: Tensor, words_NKJ: NDArray[np.uint64]) -> Tensor:
        """A class or findings for each view, or a class for each of its pixels: a mask moves with its image."""
        if labels.ndim < 3:
            return labels.repeat_interleave(self._views.count, dim=0)
        return make_views(labels[:, None], self._views, words_NKJ, classes=True)[:, 0].to(torch.int64)


@final
@dataclass(frozen=True, eq=False)
class DrawnBatch:
    """One draw, whole: it can be cut into micro-batches of any size, any number of times. Sensitive."""

    sampling: Sampling
    _gather: Callable[[NDArray[np.int64], NDArray[np.uint64]], Microbatch]
    _rows_DR: NDArray[np.int64]
    _words_DRKJ: NDArray[np.uint64]
    _prefetch: Callable[[NDArray[np.int64]], None] | None = None

    def __repr__(self) -> str:
        return f"DrawnBatch({self.sampling}, sensitive)"

    @property
    def drawn_batch_size(self) -> int:
        """The number of drawn units. Sensitive."""
        return len(self._rows_DR)

    def microbatches(self, units: int, only: range | None = None) -> Iterator[Microbatch]:
        """Yield the draw in pieces of exactly ``units`` units, the last one padded, or those of these numbers."""
        Problems().count("units", units).raise_if_any()
        for start in chosen_starts(len(self._rows_DR), units, only):
            piece = slice(start, start + units)
            missing = max(0, start + units - len(self._rows_DR))
            rows_UR = np.pad(self._rows_DR[piece], ((0, missing), (0, 0)), constant_values=NO_ROW)
            words_URKJ = np.pad(self._words_DRKJ[piece], ((0, missing), (0, 0), (0, 0), (0, 0)))
            if self._prefetch is not None:  # read from the disk while this piece is computed
                soon = self._rows_DR[start + units : start + 2 * units].reshape(-1)
                self._prefetch(soon[soon != NO_ROW])
            yield self._gather(rows_UR, words_URKJ)


def as_microbatch(inputs: Tensor, targets: Tensor, rows_UR: NDArray[np.int64], copies: int) -> Microbatch:
    """Join inputs and targets of some rows, of which each appears ``copies`` times in a row.

    Padding rows become zero, in place: they carry no image, features or label, and are never infinite. The others of a
    unit have equal weights that sum to one.
    """
    there_UR = np.repeat(rows_UR != NO_ROW, copies, axis=1)
    absent = torch.from_numpy(np.flatnonzero(~there_UR)).to(inputs.device)
    if len(absent):
        inputs, targets = inputs.index_fill_(0, absent, 0.0), targets.index_fill_(0, absent, 0)
    count_U = np.maximum(there_UR.sum(axis=1, keepdims=True), 1)
    weights_UR = torch.from_numpy((there_UR / count_U).astype(np.float32)).to(inputs.device)
    return Microbatch(inputs, targets, weights_UR)


def hold_out(store: ImageStore, *, fraction: float, keys: Keys) -> tuple[ImageStore, ImageStore]:
    """Split a store into (train, test): each unit goes to test with probability ``fraction``, with all its rows.

    Where owners are known, each owner goes with all rows, also where rows are the units: what is measured on a
    patient's slice says little if its neighbours were trained on.

    Guarantee: each unit is decided alone, by its name, so that one unit more or less moves no other unit across, and
    neighbouring datasets leave neighbouring training parts. Rows of an .npz are named by their number: there this
    holds for a row that is added at the end. The test part is not covered by training's guarantee: what is measured
    on it must be declared.
    """
    test = draw_holdout(store.names_of_units, fraction=fraction, keys=keys)
    parts = [store.select_units(np.flatnonzero(chosen)) for chosen in (~test, test)]
    if not all(part.num_rows for part in parts):
        raise DataError(
            f"there are too few units to hold out a fraction of {fraction}: one part is empty. "
            "Name a public test set instead."
        )
    return replace(parts[0], name=f"{store.name} train"), replace(parts[1], name=f"{store.name} held out")
