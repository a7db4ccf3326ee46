"""Rows of a user's own: each is read by itself, with its own random numbers, wherever it is read."""

from __future__ import annotations

import random
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpvision.config import Performance
from dpvision.data.dataset_batches import DatasetBatches, Reading, count_of_units
from dpvision.errors import ArgumentError, PrivacyError
from dpvision.gradients.clipped_sum import clipped_sum_of_batch
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys
from dpvision.privacy.values import Microbatch

X = torch.arange(40.0)[:, None].repeat(1, 3)
Y = torch.arange(40) % 2
KEYS = Keys.from_seed(3, "rows")


def draws(
    rows: Any = (X, Y), *, units: Any = None, rows_per_unit: int = 1, rate: float = 0.5, **reading: Any
) -> DatasetBatches:
    return DatasetBatches(
        rows,
        units=units,
        rows_per_unit=rows_per_unit,
        reading=Reading(**reading),
        mechanism=Mechanism(num_units=40, expected_batch_size=40 * rate, clip_norm=1.0, noise_multiplier=1.0, steps=9),
        keys=KEYS,
        device="cpu",
    )


def whole(batches: DatasetBatches, step: int = 0, units: int = 64) -> Microbatch:
    return next(batches.batch(step).microbatches(units))


def by_row(microbatch: Microbatch) -> dict[int, Any]:
    """Inputs of each real row, by the number in its first column before any noise."""
    real = microbatch.row_weights_UR.reshape(-1) > 0
    return {round(float(x[0])): x for x in microbatch.inputs[real]}


class Rows(torch.utils.data.Dataset[Any]):
    """Random in all three global generators, as transforms of other libraries are."""

    def __init__(self, count: int = 40) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        shift = torch.rand(1) + float(np.random.rand()) + random.random()
        return X[row] + shift / 10, int(Y[row])


def jitter(item: tuple[Tensor, int]) -> tuple[Tensor, int]:
    return item[0] + torch.rand(3) / 10, item[1]


def as_batch(items: list[Any]) -> Any:
    (only,) = items
    return {"pixel_values": only[0][None]}, only[1][None]


def test_the_same_step_gives_the_same_rows_and_another_step_others() -> None:
    batches = draws(Rows())
    assert torch.equal(whole(batches).inputs, whole(batches).inputs)
    both = by_row(whole(batches)).keys() & by_row(whole(batches, 1)).keys()
    assert both
    assert not any(torch.equal(by_row(whole(batches))[row], by_row(whole(batches, 1))[row]) for row in both)


@pytest.mark.parametrize("rows", [Rows(), (X, Y)], ids=["dataset", "arrays"])
@pytest.mark.parametrize("transform", [None, jitter])
@pytest.mark.parametrize("views", [1, 3])
def test_a_row_does_not_depend_on_the_others_that_were_drawn(rows: Any, transform: Any, views: int) -> None:
    """One unit more changes nothing of what the other units give."""
    fewer = Rows(39) if isinstance(rows, Rows) else (X[:39], Y[:39])
    options: dict[str, Any] = {"transform": transform, "views_per_unit": views, "rate": 1.0}
    one, other = whole(draws(rows, **options)), whole(draws(fewer, **options))
    real = 39 * views
    assert torch.equal(one.inputs[:real], other.inputs[:real])
    assert torch.equal(one.row_weights_UR[:39], other.row_weights_UR[:39])


@pytest.mark.parametrize("transform", [None, jitter])
def test_worker_processes_read_the_same_rows_in_the_same_order(transform: Any) -> None:
    alone, shared = draws(Rows(), transform=transform), draws(Rows(), transform=transform, workers=1)
    for step in range(3):
        for units in (64, 5, 1):
            pairs = zip(alone.batch(step).microbatches(units), shared.batch(step).microbatches(units), strict=True)
            for one, other in pairs:
                assert torch.equal(one.inputs, other.inputs)
                assert torch.equal(one.targets, other.targets)
                assert torch.equal(one.row_weights_UR, other.row_weights_UR)
        next(shared.batch(step).microbatches(1))  # left half read, as the engine does to see a shape


def test_two_draws_are_not_read_at_once_by_the_same_workers() -> None:
    batches = draws(Rows(), workers=1)
    first = batches.batch(0).microbatches(2)
    next(first)
    next(batches.batch(1).microbatches(2))
    with pytest.raises(PrivacyError, match="another draw"):
        next(first)


def test_reading_rows_moves_no_generator_of_the_loop() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    whole(draws(Rows(), transform=jitter, views_per_unit=2))
    seen = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert seen == (torch.rand(1).item(), np.random.rand(), random.random())


@pytest.mark.parametrize("transform", [None, jitter])
def test_views_of_a_row_differ_and_their_weights_sum_to_one(transform: Any) -> None:
    owners = [row // 4 for row in range(40)]
    found = whole(draws(Rows(), units=owners, rows_per_unit=3, transform=transform, views_per_unit=2))
    assert found.row_weights_UR.shape == (64, 6)
    sums = found.row_weights_UR.sum(1)
    assert set(sums.round(decimals=6).tolist()) == {0.0, 1.0}
    first = found.inputs.reshape(64, 3, 2, 3)[sums > 0]
    assert torch.equal(first[:, :, 0].round(), first[:, :, 1].round())
    assert not torch.equal(first[:, :, 0], first[:, :, 1])


@pytest.mark.parametrize("views", [1, 4])
def test_a_unit_with_all_its_rows_and_views_moves_the_sum_by_at_most_the_clip_norm(views: int) -> None:
    model = nn.Linear(3, 2)
    owners = [row // 4 for row in range(40)]
    sums = []
    for count in (40, 36):
        options: dict[str, Any] = {"units": owners[:count], "rows_per_unit": 4, "views_per_unit": views}
        batch = draws((100 * X[:count], Y[:count]), transform=jitter, rate=1.0, **options).batch(0)
        clipped = clipped_sum_of_batch(
            model,
            lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none"),
            batch,
            clip_norm=0.25,
            performance=Performance(),
        )
        sums.append(torch.cat([value.flatten() for value in clipped.gradients.values()]))
    moved = float((sums[0] - sums[1]).norm())
    assert 0.2 < moved <= 0.25 * (1 + 1e-6)


def test_collate_is_given_one_row_at_a_time() -> None:
    seen: list[int] = []

    def collate(items: list[Any]) -> Any:
        seen.append(len(items))
        return as_batch(items)

    found = whole(draws(collate=collate))
    assert set(seen) == {1}
    assert found.inputs["pixel_values"].shape == (64, 3)
    with pytest.raises(ArgumentError, match="one row at a time, and made 2"):
        whole(draws(collate=lambda items: (items[0][0][None].repeat(2, 1), torch.zeros(2))))


def test_rows_of_mappings_become_dicts_and_other_items_are_named() -> None:
    found = whole(draws(transform=lambda item: (UserDict(pixel_values=item[0]), {"labels": item[1]})))
    assert found.inputs["pixel_values"].shape == (64, 3)
    assert found.targets["labels"].shape == (64,)
    with pytest.raises(ArgumentError, match="got str"):
        whole(draws(transform=lambda item: ("a name", item[1])))
    with pytest.raises(ArgumentError, match="pair of inputs and targets, got dict"):
        whole(draws(transform=lambda item: {"pixel_values": item[0]}))
    with pytest.raises(ArgumentError, match="same shape"):
        whole(draws(transform=lambda item: (item[0][: 1 + int(item[1])], item[1])))


def test_a_list_of_items_is_a_dataset_and_a_list_of_two_arrays_a_pair() -> None:
    items = [(x, int(y)) for x, y in zip(X, Y, strict=True)]
    expected = whole(draws())
    for rows in (items, [X, Y], [X.numpy(), Y.numpy()], torch.utils.data.TensorDataset(X, Y)):
        assert torch.equal(whole(draws(rows)).inputs, expected.inputs)
    assert len(whole(draws(items[:2], rate=1.0), units=2).inputs) == 2
    with pytest.raises(ArgumentError, match="got 3 parts"):
        draws((X, Y, Y))


@pytest.mark.parametrize("options", [{"views_per_unit": 0}, {"workers": -1}, {"rows_per_unit": 0}])
def test_counts_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        draws(**options)


NAN = float("nan")


@pytest.mark.parametrize(
    ("owners", "saying"),
    [
        ([None, *range(39)], "got None, NaN or an empty text"),
        ([NAN, *range(39)], "got None, NaN or an empty text"),
        ([np.float64(NAN), *range(39)], "got None, NaN or an empty text"),
        (["", *map(str, range(39))], "got None, NaN or an empty text"),
        ([0.5] * 40, "got a float"),
        ([object() for _ in range(40)], "got a object"),
        ([1, "1"] * 20, "all whole numbers or all texts"),
        (np.zeros((40, 2)), "one entry for each row"),
        ("p" * 40, "a list or an array"),
        (set(range(40)), "a list or an array"),
        (dict.fromkeys(range(40)), "a list or an array"),
        ((row for row in range(40)), "a list or an array"),
        ([1] * 39, "each of 40 rows"),
    ],
)
def test_owners_of_which_it_is_not_certain_who_they_are_are_refused(owners: Any, saying: str) -> None:
    with pytest.raises(ArgumentError, match=saying):
        draws(units=owners)


@pytest.mark.parametrize(
    "owners",
    [
        [1, 1.0] * 20,
        [True, 1] * 20,
        [np.int64(3), np.float64(3)] * 20,
        [torch.tensor(2), torch.tensor(2.0)] * 20,
        ["a", np.str_("a")] * 20,
        [b"a", "a"] * 20,
    ],
)
def test_an_owner_is_the_same_however_its_number_or_text_is_stored(owners: Any) -> None:
    assert draws(units=owners).num_units == 1


def test_units_are_counted_as_they_are_drawn() -> None:
    assert count_of_units((X, Y), None) == 40
    assert count_of_units(Rows(), torch.arange(40) // 4) == 10
    with pytest.raises(ArgumentError, match="owner of each of 40 rows"):
        count_of_units((X, Y), [1, 2])
