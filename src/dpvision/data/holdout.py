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

    Where owners are known, each owner goes with all rows, also where rows are the units: what is measured on a
    patient's slice says little if its neighbours were trained on.

    Guarantee: each unit is decided alone, by its name, so that one unit more or less moves no other unit across, and
    neighbouring datasets leave neighbouring training parts. Rows of an .npz are named by their number: there this
    holds for a row that is added at the end. The test part is not covered by training's guarantee: what is measured
    on it must be declared.
    """
    problems = Problems()
    problems.probability("fraction", fraction)
    problems.raise_if_any()
    words = [int.from_bytes(keys.derive("holdout", name)[:8], "little") for name in store.names_of_units]
    test = joins(np.array(words, dtype=np.uint64), fraction)
    parts = [store.select_units(np.flatnonzero(chosen)) for chosen in (~test, test)]
    if not all(part.num_rows for part in parts):
        raise DataError(
            f"{store.num_units} units are too few to hold out a fraction of {fraction}: one part is empty. "
            "Name a public test set instead."
        )
    return replace(parts[0], name=f"{store.name} train"), replace(parts[1], name=f"{store.name} held out")
