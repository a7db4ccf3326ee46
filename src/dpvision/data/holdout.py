"""A part of the units set aside for testing, where no public test set exists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpvision.checks import DataError, Problems
from dpvision.data.draws import joins
from dpvision.data.store import ImageStore
from dpvision.keys import Keys


def hold_out(store: ImageStore, *, fraction: float, keys: Keys) -> tuple[ImageStore, ImageStore]:
    """(train, test): each unit goes to test with probability ``fraction``, with all its rows.

    Guarantee: each unit is decided alone, so that one unit more or less moves no other unit across, and neighbouring
    datasets leave neighbouring training parts. The test part is not covered by training's guarantee: what is measured
    on it must be declared.
    """
    problems = Problems()
    problems.probability("fraction", fraction)
    problems.raise_if_any()
    test = joins(keys.bits(store.num_units, "holdout"), fraction)
    parts = [store.select_units(np.flatnonzero(chosen)) for chosen in (~test, test)]
    if not all(part.num_rows for part in parts):
        raise DataError(
            f"{store.num_units} units are too few to hold out a fraction of {fraction}: one part is empty. "
            "Name a public test set instead."
        )
    return replace(parts[0], name=f"{store.name} train"), replace(parts[1], name=f"{store.name} held out")
