"""How a source is read: the data section of a run's configuration, and what only the caller of a loader knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, final

from pydantic import Field, model_validator

from dpvision.config import DataConfig
from dpvision.errors import DataError

Progress = Callable[[str, int, int], None]
"""Called now and then with (what is being done, how much is done, how much there is)."""

MaskClasses = Literal["merged", "classes"]
MAX_SIDE = 4096
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]


@final
class LoadOptions(DataConfig):
    """The options of ``load``: every field of ``DataConfig`` that concerns reading, and these.

    Without a unit option a volume is its own owner, and the owner of an image is not known.
    """

    source: str = ""
    """Not used: ``load`` takes the source as an argument."""
    image_size: Side | tuple[Side, Side] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Side of a square, or (height, width), in pixels: images are scaled to cover it and cropped in the middle. None
    keeps the size found."""
    squash: bool = False
    """Scale to ``image_size`` without cropping, whatever becomes of the proportions."""
    segmentation: bool = False
    """Whether every pixel has a class: in ``masks``, or in the .npz file itself."""
    download: bool = True
    """Whether a missing public dataset may be downloaded."""
    public: bool = False
    """Whether this data is public, so that no one is protected in it. Set by ``without_units``."""
    classes_are_public: bool = True
    """Whether the classes of an .npz file may follow from all its labels. Not where the training part is private: its
    largest label would decide the shape of the released model."""

    @model_validator(mode="before")
    @classmethod
    def _accept_paths(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Take a ``Path`` where the configuration has its text."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @model_validator(mode="after")
    def _check_masks(self) -> Self:
        if not self.segmentation and (self.masks or self.only_foreground):
            raise ValueError("masks and only_foreground need segmentation")
        return self

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width in pixels, if given."""
        if self.image_size is None or isinstance(self.image_size, tuple):
            return self.image_size
        return self.image_size, self.image_size

    def owners_are_units(self, owners: Sequence[str] | None) -> bool:
        """Whether the privacy units are the owners of rows.

        Args:
            owners: who owns each row; None if that is not known.

        Raises:
            DataError: if ``units`` is "owners" and they are not known.

        Guarantee: the options decide, never how many rows an owner has.
        """
        if self.units == "owners" and owners is None:
            raise DataError(
                "units=owners needs to know who owns each row: give unit_column, unit_csv, unit_folder_level or "
                "unit_pattern, as the source allows."
            )
        return owners is not None and self.units != "rows"

    def without_units(self, *, owners: bool = False) -> LoadOptions:
        """Return options for data that is not trained on, where each row is by itself.

        Args:
            owners: find out who owns each row all the same; masks are always measured owner by owner.
        """
        names = () if self.segmentation or owners else ("unit_column", "unit_csv", "unit_folder_level", "unit_pattern")
        return self.model_copy(update={**dict.fromkeys(names), "units": "rows", "public": True})

    def with_shape(self, image_shape: tuple[int, int, int]) -> LoadOptions:
        """Return options that give images of this shape: channels, height, width."""
        channels, height, width = image_shape
        return self.model_copy(update={"channels": channels, "image_size": (height, width)})
