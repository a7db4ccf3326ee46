"""Which test images a segmentation run stores as examples: best, median and worst, and only public ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dpvision.config import parse_config
from dpvision.data import store_of_arrays
from dpvision.data.splits import may_show_images
from dpvision.training.write_release import choose_rows, example_file


def store_with(masks: np.ndarray, owners: list[str] | None = None) -> Any:
    return store_of_arrays(
        images=np.zeros((len(masks), 1, 4, 4), dtype=np.uint8),
        labels=masks,
        class_names=("background", "foreground"),
        name="made up",
        unit_names=owners,
        rows_are_units=True,
    )


def full_masks(count: int) -> np.ndarray:
    return np.ones((count, 4, 4), dtype=np.uint8)


def test_best_median_and_worst_are_what_they_say() -> None:
    dice = torch.linspace(0.1, 0.9, 21, dtype=torch.float64)
    chosen = choose_rows(dice, store_with(full_masks(21)))
    assert chosen == [
        *(("best", row) for row in (20, 19, 18)),
        *(("median", row) for row in (11, 10, 9)),
        *(("worst", row) for row in (0, 1, 2)),
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9])
def test_no_picture_is_chosen_twice(count: int) -> None:
    rows = [row for _, row in choose_rows(torch.rand(count, dtype=torch.float64), store_with(full_masks(count)))]
    assert len(rows) == len(set(rows)) == min(count, 3 * max(1, min(3, count // 3)))


def test_empty_masks_are_no_examples_while_there_are_others() -> None:
    masks = full_masks(9)
    masks[::2] = 0
    dice = torch.ones(9, dtype=torch.float64)
    assert all(masks[row].any() for _, row in choose_rows(dice, store_with(masks)))
    assert choose_rows(dice, store_with(np.zeros((9, 4, 4), dtype=np.uint8)))


def test_examples_come_from_different_patients_where_they_can() -> None:
    owners = [f"p{row // 10}" for row in range(40)]
    chosen = choose_rows(torch.linspace(1, 0, 40, dtype=torch.float64), store_with(full_masks(40), owners))
    assert len({owners[row] for rank, row in chosen if rank == "median"}) == 2
    best = [row for rank, row in chosen if rank == "best"]
    assert best[0] == 0


@pytest.mark.parametrize(
    ("task", "test", "shown"),
    [
        ("segmentation", "elsewhere.npz", True),
        ("segmentation", None, False),
        ("classification", "elsewhere.npz", False),
    ],
)
def test_pictures_are_shown_only_where_the_user_named_them(task: str, test: str | None, shown: bool) -> None:
    config = parse_config(
        {"task": task, "data": {"source": "scans", "test": test}, "privacy": {"noise_multiplier": 1.0}}
    )
    assert may_show_images(config) is shown


def test_held_out_patients_never_become_examples() -> None:
    config = parse_config(
        {
            "task": "segmentation",
            "data": {"source": "scans", "test": "elsewhere"},
            "privacy": {"noise_multiplier": 1.0},
        }
    )
    splits = SimpleNamespace(test=store_with(full_masks(3)), held_out=True)
    session: Any = SimpleNamespace(config=config, splits=splits)
    assert example_file(session) is None
