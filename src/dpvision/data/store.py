"""A dataset in memory: uint8 images, their labels or masks, and the privacy unit that owns each row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpvision.errors import DataError, some_of


class UnitRows(NamedTuple):
    """Rows grouped by unit: unit ``u`` owns the rows ``order[offsets[u]:offsets[u + 1]]``."""

    offsets: NDArray[np.int64]
    order: NDArray[np.int64]

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of rows that each unit owns."""
        return np.diff(self.offsets)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ImageStore:
    """Images of one shape with labels and privacy units. Sensitive, unless the user declares it public.

    Attributes:
        images: uint8 (rows, channels, height, width).
        labels: int64 (rows,), one class per image; uint8 (rows, height, width), one class per pixel; or float32
            (rows, findings), 1, 0 or NaN where a finding holds, does not hold or is not known.
        class_names: one name for each class, also for classes without an image.
        unit_of_row: int64 (rows,); units are numbered from 0 in the order in which they first appear.
        name: what the dataset is called.
        row_names: one name for each row, such as its file.
        owners: the owner of each row, if known, also where rows are the units.
        owners_from: where the owners come from if no option names them, for the certificate.
        skipped: (name, reason) of files that were left out.
        unused: a sentence about rows that are neither trained on nor tested on; "" if there are none.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    unit_of_row: Tensor
    name: str
    row_names: Sequence[str]
    owners: Sequence[str] | None = None
    owners_from: str | None = None
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

    def fingerprint(self) -> str:
        """SHA-256 over shape, pixels, labels and units, to which the keys of a run are bound."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        kind = "pixels " if self.per_pixel else "findings " if self.multi_label else ""
        digest = hashlib.sha256(f"dpvision store/1 {tuple(self.images.shape)} {self.num_classes} {kind}".encode())
        for values in (self.images, self.labels, self.unit_of_row):
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
        """Copy the rows with other unit numbers."""
        index = torch.from_numpy(rows)
        return replace(
            self,
            images=self.images[index],
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
        labels: classes (rows,) or masks (rows, height, width).
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
        labels=torch.from_numpy(classes.astype(np.uint8 if classes.ndim == 3 else np.int64)),
        class_names=tuple(class_names),
        unit_of_row=torch.arange(rows) if unit_names is None or rows_are_units else dense_units(unit_names),
        name=name,
        row_names=numbered_rows(rows),
        owners=None if unit_names is None else tuple(map(str, unit_names)),
    )
