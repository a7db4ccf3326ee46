"""How a source is to be read. Nothing here is learned from the data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final, get_args

from dpvision.data.store import ImageStore
from dpvision.errors import DataError, Problems

Progress = Callable[[str, int, int], None]
"""Called now and then with (what is being done, how much is done, how much there is)."""

MaskClasses = Literal["merged", "classes"]
Units = Literal["auto", "rows", "owners"]
MAX_SIDE = 4096


@final
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """``image_size``: side of a square, or (height, width): the image is scaled to cover it and cropped in the
    middle, or squashed to it with ``squash``. None keeps the size found, see ``docs/reference/data.md`` for folders.

    ``channels``: 1 (grey), 3 (colour) or None, as found. ``skip_bad`` leaves out images that can't be read.

    Owners: ``unit_column`` (a key of the .npz, or a column of ``unit_csv``), ``unit_csv`` (rows of file, unit),
    ``unit_folder_level`` (1 is the class folder, 2 the folder in it) or ``unit_pattern`` (a regular expression with one
    group, searched in the file's name); without any, a volume is its own owner, and an image's owner is not known.
    ``units``: owners where they are known ("auto"), each row by itself ("rows"), or owners, which must be known.

    ``segmentation``: every pixel has a class. It stands in ``masks``, a folder beside that of the images or a file,
    or in the .npz itself; any value but 0 is foreground ("merged"), or values are classes. ``only_foreground`` leaves
    out rows whose mask is empty. Volumes are cut along ``volume_axis``. Intensities from ``window`` become bytes.

    ``public``: nobody is protected in this data. Set by ``without_units``.
    """

    data_dir: Path | None = None
    image_size: int | tuple[int, int] | None = None
    squash: bool = False
    channels: int | None = None
    skip_bad: bool = False
    unit_column: str | None = None
    unit_csv: Path | None = None
    unit_folder_level: int | None = None
    unit_pattern: str | None = None
    units: Units = "auto"
    segmentation: bool = False
    masks: Path | None = None
    mask_classes: MaskClasses = "merged"
    only_foreground: bool = False
    volume_axis: int = 2
    window: tuple[float, float] | None = None
    download: bool = True
    public: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        for side in self.size or ():
            problems.count("image_size", side)
            problems.require(not side > MAX_SIDE, f"image_size must be <= {MAX_SIDE}, got {side}.")
        problems.require(self.channels in (None, 1, 3), f"channels must be 1, 3 or left out, got {self.channels}.")
        self._check_units(problems)
        self._check_masks(problems)
        problems.raise_if_any()

    def _check_units(self, problems: Problems) -> None:
        if self.unit_folder_level is not None:
            problems.count("unit_folder_level", self.unit_folder_level)
        by_name = self.unit_column is not None or self.unit_csv is not None
        ways = (by_name, self.unit_folder_level is not None, self.unit_pattern is not None)
        problems.require(
            sum(ways) <= 1,
            "unit_folder_level, unit_pattern and unit_column or unit_csv can't be combined: choose one.",
        )
        kinds = get_args(Units)
        problems.require(self.units in kinds, f"units must be one of {kinds}, got {self.units!r}.")
        if self.unit_pattern is not None:
            problems.require(
                _groups(self.unit_pattern) == 1,
                f"unit_pattern must be a regular expression with one group, got {self.unit_pattern!r}.",
            )

    def _check_masks(self, problems: Problems) -> None:
        problems.require(
            self.segmentation or not (self.masks or self.only_foreground),
            "masks and only_foreground belong to segmentation: say so, or leave them out.",
        )
        kinds = get_args(MaskClasses)
        problems.require(self.mask_classes in kinds, f"mask_classes must be one of {kinds}, got {self.mask_classes!r}.")
        problems.require(self.volume_axis in (0, 1, 2), f"volume_axis must be 0, 1 or 2, got {self.volume_axis}.")
        if self.window is not None:
            low, high = self.window
            problems.require(
                math.isfinite(low) and math.isfinite(high) and low < high,
                f"window must be two finite numbers, the lower one first, got {low} and {high}.",
            )

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width, if given."""
        if self.image_size is None or isinstance(self.image_size, tuple):
            return self.image_size
        return self.image_size, self.image_size

    def owners_are_units(self, owners: Sequence[str] | None) -> bool:
        """Whether the units are the owners of rows. Decided by the options, never by how many rows anybody has."""
        if self.units == "owners" and owners is None:
            raise DataError(
                "units=owners needs to know who owns each row: give unit_column, unit_csv, unit_folder_level or "
                "unit_pattern, as the source allows."
            )
        return owners is not None and self.units != "rows"

    def without_units(self) -> LoadOptions:
        """The same, for public data, where each row stands for itself; masks are still measured owner by owner."""
        if self.segmentation:
            return replace(self, units="rows", public=True)
        nobody = {"unit_column": None, "unit_csv": None, "unit_folder_level": None, "unit_pattern": None}
        return replace(self, **nobody, units="rows", public=True)

    def like(self, store: ImageStore) -> LoadOptions:
        """The same, but giving images of the shape that ``store`` has."""
        channels, height, width = store.image_shape
        return replace(self, channels=channels, image_size=(height, width))


def _groups(pattern: str) -> int:
    """How many groups a regular expression has; -1 if it is none."""
    try:
        return re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError):
        return -1
