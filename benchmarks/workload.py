"""What is timed: one model, one batch of made-up rows, one loss per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision import models
from dpvision.cli.flags import parse_options
from dpvision.errors import ArgumentError, Problems

RowLosses = Callable[[Tensor, Tensor], Tensor]
_SEGMENTATION: Final = "segmentation"


@final
@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and a batch: ``batch`` units of ``views`` rows each.

    ``image_size`` 1 means rows of ``in_channels`` cached features instead of images. ``options`` are those of the
    model, as name=value with blanks between them.
    """

    model: str
    batch: int
    image_size: int
    in_channels: int
    views: int = 1
    microbatch_size: int | None = None
    options: str = ""

    def __post_init__(self) -> None:
        problems = Problems()
        for name in ("batch", "image_size", "in_channels", "views"):
            problems.count(name, getattr(self, name))
        if self.microbatch_size is not None:
            problems.count("microbatch_size", self.microbatch_size)
        problems.raise_if_any()
        entry = models.entry(self.model)
        unknown = sorted(parse_options(self.options.split()).keys() - entry.options.keys())
        if unknown:
            raise ArgumentError(f"{self.model} has no option {', '.join(unknown)}. It has: {', '.join(entry.options)}.")

    @staticmethod
    def of(
        model: str,
        *,
        batch: int,
        image_size: int | None = None,
        in_channels: int | None = None,
        views: int = 1,
        microbatch_size: int | None = None,
        options: str = "",
    ) -> Workload:
        """A workload whose pictures are, unless said otherwise, of the size that the model's paper used."""
        entry = models.entry(model)
        return Workload(
            model=model,
            batch=batch,
            image_size=entry.image_size if image_size is None else image_size,
            in_channels=entry.in_channels if in_channels is None else in_channels,
            views=views,
            microbatch_size=microbatch_size,
            options=options,
        )

    @property
    def num_rows(self) -> int:
        """Rows that every contender runs through its model."""
        return self.batch * self.views

    @property
    def title(self) -> str:
        """The workload in a few words."""
        size = f"{self.in_channels:,} features" if self.image_size == 1 else f"{self.image_size} px"
        views = f" × {self.views} views" if self.views > 1 else ""
        options = f" ({self.options})" if self.options else ""
        return f"{self.model}{options}, {size}, batch {self.batch:,}{views}"

    @property
    def row_losses(self) -> RowLosses:
        """One loss per row: cross-entropy, or for masks its mean over a picture's pixels."""
        return _mask_losses if self._is_segmentation else _class_losses

    @property
    def _is_segmentation(self) -> bool:
        return models.entry(self.model).family == _SEGMENTATION

    def make_model(self) -> nn.Module:
        """The model in training mode, with the same weights every time."""
        entry = models.entry(self.model)
        options = parse_options(self.options.split())
        options |= {"image_size": self.image_size} if "image_size" in entry.options else {}
        model = models.create(
            self.model, num_classes=entry.num_classes, in_channels=self.in_channels, seed=0, **options
        )
        return model.train()

    def make_rows(self, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """Made-up inputs and targets, the same every time; ``rows`` of them, or the whole batch."""
        count = self.num_rows if rows is None else rows
        generator = torch.Generator().manual_seed(0)
        sides = () if self.image_size == 1 else (self.image_size, self.image_size)
        inputs = torch.randn((count, self.in_channels, *sides), generator=generator)
        classes = models.entry(self.model).num_classes
        if self._is_segmentation:
            return inputs, torch.randint(2, (count, classes, *sides), generator=generator).float()
        return inputs, torch.randint(classes, (count,), generator=generator)


def _class_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def _mask_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").flatten(1).mean(1)
