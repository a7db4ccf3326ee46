"""The study of the defaults: its one-shot heads and its tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.own_data import one_shot
from benchmarks.own_data.heads import HeadData
from benchmarks.own_data.page import merged, tables


def clusters(classes: int = 3, units: int = 200, width: int = 20) -> HeadData:
    """Rows around one centre per class, far from zero."""
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(classes, width, generator=generator) + 1
    labels = torch.arange(2 * units) % classes
    rows = centres[labels] + torch.randn(2 * units, width, generator=generator)
    return HeadData(rows[:units], labels[:units], rows[units:], labels[units:], classes)


@pytest.mark.parametrize("head", [one_shot.class_means, one_shot.least_squares])
def test_a_one_shot_head_learns_clusters_and_only_without_much_noise(head: Any) -> None:
    data = clusters()
    assert head(data, noise=0.1, seed=0) > 95
    assert head(data, noise=1e6, seed=0) < 70


def test_the_noise_of_least_squares_follows_the_joint_length_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(one_shot.math, "sqrt", lambda value: drawn.append(value) or value**0.5)
    data = clusters()
    one_shot.least_squares(data, noise=1.0, seed=0)
    rows = torch.cat((torch.nn.functional.normalize(data.train_x), torch.full((200, 1), one_shot.CONSTANT)), 1)
    gram = torch.einsum("ni,nj->nij", rows, rows).flatten(1)
    joint = (one_shot.GRAM_WEIGHT * gram).square().sum(1) + rows.square().sum(1)
    assert joint.max().item() == pytest.approx(drawn[0], rel=1e-5)


def row(**values: Any) -> dict[str, Any]:
    found = {"key": "a 300 1 own", "part": "kept_out", "source": "a", "num_units": 300, "epsilon": 1.0, "classes": 2}
    found |= {
        "pretrained": False,
        "majority": 50.0,
        "test_rows": 100,
        "curve": [60.0, 70.0],
        "default": [69.0, 71.0, 70.0],
    }
    return found | values


def test_a_cell_that_was_run_again_shows_both_defaults() -> None:
    joined = merged([row(grid_best=[75.0, 75.0, 75.0]), row(default=[73.0, 73.0, 73.0])])
    assert len(joined) == 1
    text = tables(joined)
    assert "| 73.0 ± 0.0 | 70.0 ± 1.0 |" in text
    assert "2.0 points on average" in text


def test_one_table_has_pretrained_weights_and_the_better_one_shot_head_beside_the_default() -> None:
    pretrained = row(key="a 300 1 pretrained", pretrained=True, default=[80.0, 80.0, 80.0])
    heads = {"class_means": [55.0, 55.0, 55.0], "least_squares": [61.0, 61.0, 61.0]}
    text = tables(merged([row(), pretrained, {"key": "a 300 1 own one_shot", "of": "a 300 1 own", **heads}]))
    assert "| 70.0 ± 1.0 | - | 80.0 ± 0.0 | 61.0 ± 0.0 |" in text
