"""docs/evidence/defaults.md from the log of the study."""

from __future__ import annotations

from pathlib import Path


def write_page(log: Path, output: Path) -> None:
    """Write the page."""
    raise NotImplementedError
