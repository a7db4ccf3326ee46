"""Data that ships inside a Python package: nothing to download."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpvision.checks import DataError
from dpvision.data.known import DIGITS
from dpvision.data.normalisation import Normalisation, fixed_normalisation
from dpvision.data.store import ImageStore, store_of_arrays

DIGITS_TEST_ROWS = 360


def load_digits() -> tuple[ImageStore, ImageStore, Normalisation]:
    """scikit-learn's 1,797 digits of 8×8 pixels: the first 1,437 to train, the last 360 to test.

    The split is fixed and follows the order of the set. Values 0..16 become 0..255. The normalisation constants are
    fixed too: nobody publishes customary ones for this set.
    """
    try:
        from sklearn.datasets import load_digits as packaged_digits
    except ImportError as error:
        raise DataError("digits comes with scikit-learn, which is not installed: pip install scikit-learn.") from error
    data: Any = packaged_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = data.target
    train, test = (
        store_of_arrays(images=images[rows].copy(), labels=labels[rows], class_names=DIGITS, name=f"digits {split}")
        for split, rows in (("train", slice(None, -DIGITS_TEST_ROWS)), ("test", slice(-DIGITS_TEST_ROWS, None)))
    )
    return train, test, fixed_normalisation(1)
