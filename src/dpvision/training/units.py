"""Who is protected: what a unit is called, how many of its rows enter a step, and how many rows an owner may have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpvision.certificate import VOLUME
from dpvision.checks import ArgumentError
from dpvision.config import RunConfig
from dpvision.data import ImageStore, dense_units

SLICES_PER_PATIENT = 4


def name_units(config: RunConfig, store: ImageStore) -> RunConfig:
    """What a unit is called. A word for a person needs ids of persons: a word alone protects nobody."""
    data, given, masks = config.data, config.privacy.privacy_unit, config.task == "segmentation"
    grouped = store.owners is not None and data.units != "rows"
    single = {"example", "slice"} if masks else {"example"}
    if not grouped and given not in {None, *single}:
        raise ArgumentError(
            f"privacy_unit must be example where each picture is a unit of its own, got {given!r}. "
            "Say who owns which picture: unit_column, unit_csv, unit_folder_level or unit_pattern."
        )
    if grouped and given in single:
        raise ArgumentError(f"privacy_unit must name what owns several pictures (patient, user …), got {given!r}.")
    if grouped:
        told = (data.unit_column, data.unit_csv, data.unit_folder_level, data.unit_pattern)
        by_file = all(each is None for each in told)  # a patient may have several files: a volume is what is known
        usual = VOLUME if by_file else "patient" if masks else "owner"
    else:
        usual = "slice" if masks and store.owners is not None else "example"
    rows = data.rows_per_unit or (SLICES_PER_PATIENT if grouped and masks else 1)
    return config.model_copy(
        update={
            "privacy": config.privacy.model_copy(update={"privacy_unit": given or usual}),
            "data": data.model_copy(update={"rows_per_unit": rows, "units": "owners" if grouped else "rows"}),
        }
    )


def limited_rows(store: ImageStore, config: RunConfig) -> ImageStore:
    """The store with at most ``most_rows_per_owner`` rows of each owner: the first ones in the order of the store.

    Guarantee: an owner's rows are chosen by that owner's rows alone, so that an owner more or less moves nobody
    else's. One row more or less may let another row of the same owner in or out.
    """
    most = config.privacy.most_rows_per_owner
    if most is None:
        return store
    if store.owners is None or config.data.units != "rows":
        raise ArgumentError(
            f"most_rows_per_owner is for runs whose units are rows with known owners, got {most}. Set units=rows and "
            "say who owns which picture, or leave it out: where owners are the units, rows_per_unit bounds a step."
        )
    owner_of_row = dense_units(store.owners).numpy()
    order = np.argsort(owner_of_row, kind="stable")
    first = np.searchsorted(owner_of_row[order], owner_of_row[order])
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - first
    # Rows are the units here, so that what is left is numbered anew in the order of the store.
    return replace(store.select_units(np.flatnonzero(place < most)), skipped=store.skipped)
