"""What a recipe is: a configuration with its source and its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dpvision.config import RunConfig


@final
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named configuration. ``paper`` and ``ours`` say what was reached, by whom, with which n."""

    config: RunConfig
    summary: str
    paper: str
    ours: str

    @property
    def name(self) -> str:
        """The name under which ``dpvision train --recipe`` finds it."""
        return self.config.name
