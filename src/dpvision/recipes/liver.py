"""Liver CT for recipes: the public facts of the set, and a fixed split of its small version by patient."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpvision.checks import ArgumentError
from dpvision.config import DataConfig
from dpvision.data import LoadOptions, load
from dpvision.data.known import cache_folder
from dpvision.files import disk_errors, write_atomically

FOLDER: Final = "Task03_Liver"
NEEDS: Final = (
    "the Medical Segmentation Decathlon's task 3 (liver) as a folder Task03_Liver with imagesTr/ and labelsTr/; at "
    "--scale cpu lits-liver-128/lits_liver_128.npz (images, masks, volume) among the datasets"
)
# 131 volumes with 58,638 slices; a fifth of the patients is held out.
SLICES, PATIENTS = 47_000, 105
SMALL: Final = "lits-liver-split.npz"
SMALL_SLICES, SMALL_PATIENTS = 1_700, 26
_SMALL_FILE: Final = Path("lits-liver-128") / "lits_liver_128.npz"
_EVERY: Final = 5  # every fifth patient tests
WINDOW: Final = (-150.0, 200.0)


def whole_set(**settings: Any) -> DataConfig:
    """Axial slices of the volumes at 256 pixels; liver and tumour are one class."""
    return DataConfig(
        source=f"{FOLDER}/imagesTr",
        masks=f"{FOLDER}/labelsTr",
        window=WINDOW,
        image_size=256,
        channels=1,
        holdout_fraction=0.2,
        **settings,
    )


def small_set(**settings: Any) -> DataConfig:
    """Slices that show liver, of 33 patients, split once and for all. Its test part is public, pictures and all."""
    return DataConfig(source=SMALL, test=SMALL, unit_column="volume", channels=1, **{"image_size": 32, **settings})


def make_split(*, data_dir: Path | None = None) -> Path:
    """Write the small set with its two splits below the datasets, unless it is there, and return its place."""
    path = cache_folder() / "subsets" / SMALL
    if path.exists():
        return path
    folders = [*([] if data_dir is None else [data_dir]), cache_folder()]
    found = [folder / _SMALL_FILE for folder in folders if (folder / _SMALL_FILE).is_file()]
    if not found:
        raise ArgumentError(f"{SMALL} is made of {_SMALL_FILE}, which is not among the datasets in {folders[0]}.")
    options = LoadOptions(segmentation=True, mask_classes="classes", unit_column="volume", units="rows")
    store = load(found[0], options).train
    patients = np.array(store.owners, dtype=str)
    tests = np.isin(patients, sorted(set(patients.tolist()), key=int)[1::_EVERY])
    arrays: dict[str, Any] = {}
    for start, rows in (("", ~tests), ("test_", tests)):
        arrays[f"{start}images"] = store.images.numpy()[rows]
        arrays[f"{start}masks"] = store.labels.numpy()[rows]
        arrays[f"{start}volume"] = patients[rows]
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    with disk_errors(f"write {path}"):
        write_atomically(path, content.getvalue())
    return path
