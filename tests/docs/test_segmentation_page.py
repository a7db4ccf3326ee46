"""docs/guides/segmentation.md gives losses and metrics their names, and its Python runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from dpvision.inference import MaskMetrics
from dpvision.models.losses import LOSSES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "segmentation.md").read_text()


def test_losses_and_metrics_have_the_names_that_the_page_gives_them() -> None:
    table = PAGE[PAGE.index("## Metrics") : PAGE.index("## Masks")]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == {field.name for field in fields(MaskMetrics)} - {"loss", "count", "dice_interval"}
    losses = re.findall(r"^    (\w+) {2,}", PAGE, re.MULTILINE)
    assert sorted(losses) == sorted(set(LOSSES) - {"binary_cross_entropy"})  # that is for findings
