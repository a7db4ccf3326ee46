"""How a source is to be read. Nothing here is learned from the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from dpvision.checks import Problems
from dpvision.data.store import ImageStore

Progress = Callable[[str, int, int], None]
"""Called now and then with (what is being done, how much is done, how much there is)."""

MAX_SIDE = 4096


@final
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """``image_size``: side of a square, or (height, width): the picture is scaled to cover it and cropped in the
    middle, or squashed to it with ``squash``. None keeps the size found, see ``docs/data.md`` for folders.

    ``channels``: 1 (grey), 3 (colour) or None, as found. ``skip_bad`` leaves out pictures that can't be read.
    Units: ``unit_column`` (a key of the .npz, or a column of ``unit_csv``), ``unit_csv`` (rows of file, unit) or
    ``unit_folder_level`` (1 is the class folder, 2 the folder in it); without any, each row is its own unit.
    """

    data_dir: Path | None = None
    image_size: int | tuple[int, int] | None = None
    squash: bool = False
    channels: int | None = None
    skip_bad: bool = False
    unit_column: str | None = None
    unit_csv: Path | None = None
    unit_folder_level: int | None = None
    download: bool = True

    def __post_init__(self) -> None:
        problems = Problems()
        for side in self.size or ():
            problems.count("image_size", side)
            problems.require(not side > MAX_SIDE, f"image_size must be <= {MAX_SIDE}, got {side}.")
        problems.require(self.channels in (None, 1, 3), f"channels must be 1, 3 or left out, got {self.channels}.")
        if self.unit_folder_level is not None:
            problems.count("unit_folder_level", self.unit_folder_level)
        by_folder = self.unit_folder_level is not None
        by_name = self.unit_column is not None or self.unit_csv is not None
        problems.require(
            not (by_folder and by_name), "unit_folder_level can't be combined with unit_column or unit_csv: choose one."
        )
        problems.raise_if_any()

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width, if given."""
        if self.image_size is None or isinstance(self.image_size, tuple):
            return self.image_size
        return self.image_size, self.image_size

    @property
    def groups_rows(self) -> bool:
        """Whether several rows may belong to one unit."""
        return any(v is not None for v in (self.unit_column, self.unit_csv, self.unit_folder_level))

    def without_units(self) -> LoadOptions:
        """The same, for public data, where each row stands for itself."""
        return replace(self, unit_column=None, unit_csv=None, unit_folder_level=None)

    def like(self, store: ImageStore) -> LoadOptions:
        """The same, but giving pictures of the shape that ``store`` has."""
        channels, height, width = store.image_shape
        return replace(self, channels=channels, image_size=(height, width))
