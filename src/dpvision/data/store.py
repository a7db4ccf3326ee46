"""A dataset: uint8 images, their labels or masks, and the privacy unit that owns each row.

The images are in memory (a tensor), or in shard files that are mapped into memory (``MappedImages``, see
``packed_store``). Everything else works on an ``ImageStore`` and does not know which.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpvision.errors import DataError, some_of

DIGEST_BYTES = 32


class UnitRows(NamedTuple):
    """Rows grouped by unit: unit ``u`` owns the rows ``order[offsets[u]:offsets[u + 1]]``."""

    offsets: NDArray[np.int64]
    order: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of rows that each unit owns."""
        return np.diff(self.offsets)


def row_digests(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The SHA-256 of each image of (rows, …), as uint8 (rows, 32)."""
    rows = np.ascontiguousarray(images).reshape(len(images), math.prod(images.shape[1:]))
    found = b"".join(hashlib.sha256(row.data).digest() for row in rows)
    return np.frombuffer(found, dtype=np.uint8).reshape(len(images), DIGEST_BYTES)


@final
class MappedImages:
    """Images in shard files that are mapped into memory; a selection of their rows.

    It has those methods of a uint8 tensor (rows, channels, height, width) that readers of a store need. Reading copies
    the rows that are asked for, and nothing else: the system holds file pages as long as there is room for them.

    Args:
        shards: the images of each file, uint8 (rows, channels, height, width), mapped read-only.
        digests: the SHA-256 of each image, uint8 (rows, 32), in the order of the shards.
        brightest: the largest byte of all images.
        places: the stored numbers of the selected rows; all rows if None.

    Guarantee: a row that is returned has the SHA-256 that ``digests`` names, to which the keys of a run are bound. A
    file that changed after it was packed stops the program instead of entering a step.
    """

    dtype = torch.uint8
    ndim = 4

    def __init__(
        self,
        shards: Sequence[NDArray[np.uint8]],
        digests: NDArray[np.uint8],
        *,
        brightest: int,
        places: NDArray[np.int64] | None = None,
    ) -> None:
        self._shards = tuple(shards)
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)
        self._digests = digests
        self._places = np.arange(len(digests), dtype=np.int64) if places is None else places
        self.brightest = brightest
        if not self._shards or len(digests) != self._ends[-1] or digests.shape[1:] != (DIGEST_BYTES,):
            raise DataError(f"shards must hold as many images as there are digests, got {digests.shape}.")

    def __repr__(self) -> str:
        return f"MappedImages({self.shape}, sensitive)"

    def __len__(self) -> int:
        return len(self._places)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Rows, channels, height, width."""
        _, channels, height, width = self._shards[0].shape
        return len(self), channels, height, width

    @property
    def digests(self) -> NDArray[np.uint8]:
        """The SHA-256 of each selected image, (rows, 32)."""
        return self._digests[self._places]

    def __getitem__(self, rows: int | slice | Tensor | NDArray[np.int64] | list[int]) -> Tensor:
        """Copy rows into memory: one image for a number, else (rows, channels, height, width).

        Raises:
            DataError: an image is not the one that was packed.
        """
        if isinstance(rows, int):
            return self._read(self._places[[rows]])[0]
        return self._read(self._places[rows.numpy() if isinstance(rows, Tensor) else rows])

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Copy the rows that ``index`` numbers; ``dim`` is 0."""
        if dim != 0:
            raise DataError(f"rows are selected along dimension 0, got {dim}.")
        return self[index.cpu()]

    def split(self, count: int) -> Iterator[Tensor]:
        """Copy all rows, ``count`` at a time."""
        return (self[start : start + count] for start in range(0, len(self), count))

    def select(self, rows: NDArray[np.int64]) -> MappedImages:
        """Select rows without reading them."""
        return MappedImages(self._shards, self._digests, brightest=self.brightest, places=self._places[rows])

    def prefetch(self, rows: NDArray[np.int64]) -> None:
        """Let the system begin to read rows that are needed soon. Nothing waits for it, and no result depends on it."""
        for shard, _, local in self._by_shard(self._places[rows]):
            _will_need(shard, local)

    def _by_shard(
        self, places: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (shard, positions in ``places``, rows of the shard), shard by shard."""
        of_row = np.searchsorted(self._ends, places, side="right")
        for number in np.unique(of_row).tolist():
            at = np.flatnonzero(of_row == number)
            first = self._ends[number - 1] if number else 0
            yield self._shards[number], at, places[at] - first

    def _read(self, places: NDArray[np.int64]) -> Tensor:
        """Copy stored rows and compare each with its digest."""
        found = np.empty((len(places), *self.shape[1:]), dtype=np.uint8)
        for shard, at, local in self._by_shard(places):
            _will_need(shard, local)
            found[at] = shard[local]
        wrong = np.flatnonzero((row_digests(found) != self._digests[places]).any(axis=1))
        if len(wrong):
            raise DataError(
                f"{len(wrong)} images of the packed store are not what was packed: its files changed or are damaged. "
                "Pack the source again; a run on it continues with --fork."
            )
        return torch.from_numpy(found)


def _will_need(shard: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
    """Ask the system to read these rows of a mapped file: all at once instead of page by page."""
    mapped = getattr(shard, "_mmap", None)
    if not isinstance(mapped, mmap.mmap) or not isinstance(shard, np.memmap) or not hasattr(mmap, "MADV_WILLNEED"):
        return
    offset, size = shard.offset % mmap.ALLOCATIONGRANULARITY, shard[:1].nbytes
    chosen = np.unique(rows)
    for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1):
        first = (offset + int(run[0]) * size) // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, first, offset + (int(run[-1]) + 1) * size - first)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ImageStore:
    """Images of one shape with labels and privacy units. Sensitive, unless the user declares it public.

    Attributes:
        images: uint8 (rows, channels, height, width), in memory or mapped.
        labels: int64 (rows,), one class per image; uint8 (rows, height, width), one class per pixel; or float32
            (rows, findings), 1, 0 or NaN where a finding holds, does not hold or is not known.
        class_names: one name for each class, also for classes without an image.
        unit_of_row: int64 (rows,); units are numbered from 0 in the order in which they first appear.
        name: what the dataset is called.
        row_names: one name for each row, such as its file.
        owners: the owner of each row, if known, also where rows are the units.
        owners_from: where the owners come from if no option names them, for the certificate.
        some_owners: owners of public rows where those of other rows are not known; the splits are compared by them.
        skipped: (name, reason) of files that were left out.
        unused: a sentence about rows that are neither trained on nor tested on; "" if there are none.
    """

    images: Tensor | MappedImages
    labels: Tensor
    class_names: tuple[str, ...]
    unit_of_row: Tensor
    name: str
    row_names: Sequence[str]
    owners: Sequence[str] | None = None
    owners_from: str | None = None
    some_owners: frozenset[str] = frozenset()
    skipped: tuple[tuple[str, str], ...] = ()
    unused: str = ""

    def __post_init__(self) -> None:
        rows = len(self.images)
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise DataError(f"images must be uint8 (N, C, H, W), got {self.images.dtype} {tuple(self.images.shape)}.")
        per_row, per_pixel = (torch.int64, (rows,)), (torch.uint8, (rows, *self.images.shape[2:]))
        several = (torch.float32, (rows, len(self.class_names)))
        for name, values, allowed in (
            ("labels", self.labels, (per_row, per_pixel, several)),
            ("unit_of_row", self.unit_of_row, (per_row,)),
        ):
            if (values.dtype, tuple(values.shape)) not in allowed:
                rule = " or ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for dtype, shape in allowed)
                raise DataError(f"{name} must be {rule}, got {values.dtype} {tuple(values.shape)}.")
        if len({*self.class_names}) != self.num_classes:
            raise DataError(f"class_names must differ from each other, got {some_of(self.class_names, limit=8)}.")
        for name, texts in (("row_names", self.row_names), ("owners", self.owners)):
            if texts is not None and len(texts) != rows:
                raise DataError(f"{name} must name {rows} rows, got {len(texts)}.")
        if self.multi_label:
            known = self.labels[~self.labels.isnan()]
            if not ((known == 0) | (known == 1)).all():
                raise DataError("labels of findings must be 0, 1 or NaN for unknown.")
        elif rows and not (int(self.labels.min()) >= 0 and int(self.labels.max()) < self.num_classes):
            low, high = int(self.labels.min()), int(self.labels.max())
            raise DataError(f"labels must lie in 0..{self.num_classes - 1}, got {low}..{high}.")
        if rows and int(self.unit_of_row.min()) < 0:
            raise DataError(f"unit_of_row must be >= 0, got {int(self.unit_of_row.min())}.")

    def __repr__(self) -> str:
        return f"ImageStore({self.name!r}, {self.num_rows} rows of {self.image_shape}, {self.num_units} units)"

    @property
    def num_rows(self) -> int:
        """The number of images."""
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """The number of classes, those without an image included."""
        return len(self.class_names)

    @property
    def per_pixel(self) -> bool:
        """Whether every pixel has a class of its own."""
        return self.labels.ndim == 3

    @property
    def multi_label(self) -> bool:
        """Whether several classes, or none, can hold for an image: its labels are findings."""
        return self.labels.ndim == 2

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @cached_property
    def brightest(self) -> int:
        """The largest byte of the images, or of the packed store that they come from. Sensitive."""
        if isinstance(self.images, MappedImages):
            return self.images.brightest
        return int(self.images.max()) if self.num_rows else 0

    @cached_property
    def num_units(self) -> int:
        """The number of privacy units that own rows. Private: the mechanism has its own, declared number."""
        return int(self.unit_of_row.max()) + 1 if self.num_rows else 0

    @cached_property
    def rows_of_units(self) -> UnitRows:
        """The rows of each unit, in the order of the store."""
        units = self.unit_of_row.numpy()
        offsets = np.zeros(self.num_units + 1, dtype=np.int64)
        np.cumsum(np.bincount(units, minlength=self.num_units), out=offsets[1:])
        return UnitRows(offsets, np.argsort(units, kind="stable"))

    @cached_property
    def names_of_units(self) -> tuple[str, ...]:
        """The name of each unit: its owner, or its first row. It does not depend on the other units.

        Where rows are the units, the units of one owner share a name.
        """
        names = self.row_names if self.owners is None else self.owners
        offsets, order = self.rows_of_units
        first_rows: list[int] = order[offsets[:-1]].tolist()
        return tuple(names[row] for row in first_rows)

    @property
    def image_digests(self) -> NDArray[np.uint8]:
        """The SHA-256 of each image, uint8 (rows, 32). Sensitive."""
        images = self.images
        return images.digests if isinstance(images, MappedImages) else row_digests(images.numpy())

    def fingerprint(self) -> str:
        """SHA-256 over shape, pixels, labels and units, to which the keys of a run are bound.

        Pixels enter by the SHA-256 of each image, so that equal data has one fingerprint, in memory or mapped. Of
        mapped images the recorded digests are taken: no image is read for them, and none is used that differs.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        kind = "pixels " if self.per_pixel else "findings " if self.multi_label else ""
        digest = hashlib.sha256(f"dpvision store/2 {tuple(self.images.shape)} {self.num_classes} {kind}".encode())
        digest.update(np.ascontiguousarray(self.image_digests).data)
        for values in (self.labels, self.unit_of_row):
            digest.update(np.ascontiguousarray(values.numpy()).data)
        return digest.hexdigest()

    def select_units(self, ids: Sequence[int] | NDArray[np.int64]) -> ImageStore:
        """Select the rows of some units, in the order of the store; unit ``ids[i]`` becomes unit ``i``."""
        wanted = np.asarray(ids, dtype=np.int64)
        new_id = np.full(self.num_units, -1, dtype=np.int64)
        new_id[wanted] = np.arange(len(wanted))
        units = new_id[self.unit_of_row.numpy()]
        rows = np.flatnonzero(units >= 0)
        return self._taken(rows, torch.from_numpy(units[rows]))

    def select_rows(self, rows: Sequence[int] | NDArray[np.int64]) -> ImageStore:
        """Select rows; their units are numbered again, in the order in which they first appear."""
        chosen = np.asarray(rows, dtype=np.int64)
        return self._taken(chosen, dense_units(self.unit_of_row.numpy()[chosen]))

    def _taken(self, rows: NDArray[np.int64], unit_of_row: Tensor) -> ImageStore:
        """Copy the rows with other unit numbers; mapped images are selected, not read."""
        index, images = torch.from_numpy(rows), self.images
        return replace(
            self,
            images=images.select(rows) if isinstance(images, MappedImages) else images[index],
            labels=self.labels[index],
            unit_of_row=unit_of_row,
            row_names=tuple(self.row_names[row] for row in rows.tolist()),
            owners=None if self.owners is None else tuple(self.owners[row] for row in rows.tolist()),
            skipped=(),
        )


def dense_units(names: Sequence[object] | NDArray[Any]) -> Tensor:
    """Number units by name, in order of first appearance, so that a new unit at the end changes no other number."""
    _, first, inverse = np.unique(np.asarray(names), return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return torch.from_numpy(rank[inverse.reshape(-1)])


def numbered_rows(count: int) -> tuple[str, ...]:
    """Name rows that have no names."""
    return tuple(f"row {row}" for row in range(count))


def store_of_arrays(
    *,
    images: NDArray[np.uint8],
    labels: NDArray[Any],
    class_names: Sequence[str],
    name: str,
    unit_names: Sequence[object] | NDArray[Any] | None = None,
    rows_are_units: bool = False,
) -> ImageStore:
    """Make a store of arrays.

    Args:
        images: uint8 (rows, channels, height, width).
        labels: classes (rows,), findings (rows, findings) or masks (rows, height, width).
        class_names: names of the classes.
        name: what the dataset is called.
        unit_names: the owner of each row; by default each row is its own unit.
        rows_are_units: each row is a unit although owners are known.

    Raises:
        DataError: if the arrays do not match.
    """
    rows, classes = len(images), np.asarray(labels)
    if classes.ndim == 3 and classes.size and not (classes.min() >= 0 and classes.max() <= 255):
        raise DataError(f"masks must lie in 0..255, got {classes.min()}..{classes.max()}.")
    return ImageStore(
        images=torch.from_numpy(np.require(images, np.uint8, ["C", "W"])),
        labels=torch.from_numpy(classes.astype({3: np.uint8, 2: np.float32}.get(classes.ndim, np.int64))),
        class_names=tuple(class_names),
        unit_of_row=torch.arange(rows) if unit_names is None or rows_are_units else dense_units(unit_names),
        name=name,
        row_names=numbered_rows(rows),
        owners=None if unit_names is None else tuple(map(str, unit_names)),
    )
