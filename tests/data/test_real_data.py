"""The real files, where they are: skipped elsewhere."""

from __future__ import annotations

import pytest

from dpvision.data import LoadOptions, Splits, load
from dpvision.errors import DataError


def real(name: str) -> Splits:
    try:
        return load(name, LoadOptions(download=False))
    except DataError as error:
        pytest.skip(f"{name} is not on this machine: {error}")


# Counts and labels: the sets' home pages and the files themselves, whose checksums equal the official ones.
@pytest.mark.parametrize(
    ("name", "rows", "test_rows", "shape", "first_labels", "first_class"),
    [
        ("mnist", 60_000, 10_000, (1, 28, 28), [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], "0"),
        ("fashionmnist", 60_000, 10_000, (1, 28, 28), [9, 0, 0, 3, 0, 2, 7, 2, 5, 5], "T-shirt/top"),
        ("cifar10", 50_000, 10_000, (3, 32, 32), [6, 9, 9, 4, 1, 1, 2, 7, 8, 3], "airplane"),
        ("cifar100", 50_000, 10_000, (3, 32, 32), [19, 29, 0, 11, 1, 86, 90, 28, 23, 31], "apple"),
    ],
)
def test_a_real_set_has_its_published_counts_labels_and_mean(
    name: str, rows: int, test_rows: int, shape: tuple[int, int, int], first_labels: list[int], first_class: str
) -> None:
    splits = real(name)
    assert splits.test is not None
    assert (splits.train.num_rows, splits.test.num_rows) == (rows, test_rows)
    assert splits.train.image_shape == splits.test.image_shape == shape
    assert splits.train.labels[:10].tolist() == first_labels
    assert splits.train.class_names[0] == first_class
    assert splits.train.labels.bincount().sum() == rows
    found = splits.train.images[::20].float().mean(dim=(0, 2, 3)) / 255
    # A twentieth of the images, whose own means have a spread of 0.1 to 0.25: five standard errors.
    assert found.tolist() == pytest.approx(splits.normalisation.mean, abs=0.025)
