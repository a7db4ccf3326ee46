"""The two splits of a run: the private training split and the public test split, as its configuration names them.

Training, inference and the audits load data through ``load_splits``, so that all of them see the same rows. Which units
are held out depends on the run's key alone; everything else depends on the configuration and on the files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
from torch import Tensor

from dpvision.config import DataConfig, RunConfig, required
from dpvision.data.batches import hold_out
from dpvision.data.datasets import dataset_names
from dpvision.data.image_folder import split_folders
from dpvision.data.loading import Splits, load, load_given, load_one
from dpvision.data.normalisation import Normalisation, fixed_normalisation
from dpvision.data.options import LoadOptions
from dpvision.data.packed_store import with_packed_settings
from dpvision.data.store import ImageStore, MappedImages, dense_units
from dpvision.data.table_files import is_table
from dpvision.data.units import OWNED_BY_FILE, owners_on_both_sides
from dpvision.errors import ArgumentError, DataError, counted, some_of
from dpvision.privacy.randomness import Keys


@final
@dataclass(frozen=True)
class RunSplits:
    """The two splits of a run.

    Attributes:
        train: private; only the sampler and the noisy statistics read it.
        test: declared public.
        published: constants published for the dataset or for the pretrained weights, if there are any.
        held_out: whether ``test`` was held out of the private data.
        skipped: (file, reason) of every file that could not be read.
        unused: a sentence about a part of the source that is neither trained on nor tested on; "" if there is none.
    """

    train: ImageStore
    test: ImageStore
    published: Normalisation | None
    held_out: bool
    skipped: tuple[tuple[str, str], ...] = ()
    unused: str = ""


def load_splits(config: RunConfig, keys: Keys, given: object | None = None) -> RunSplits:
    """Load both splits; without a test set, or for validation, hold out a part of the units.

    Args:
        config: names the data; its fields may still be open.
        keys: ``holdout_keys`` of the run.
        given: images in Python, as for ``load_given``, in the place of ``config.data.source``, which is their name; or
            the part of that source that a search loaded once for all its trials.

    Raises:
        DataError: a file can't be read, or a split would be empty.
        ArgumentError: the test set overlaps the private images, or ``most_rows_per_owner`` does not apply.

    Guarantee: each unit is held out independently of the others, see ``hold_out``.
    """
    if given is None:  # a packed store has the settings with which its source was read
        config = config.model_copy(update={"data": with_packed_settings(config.data)})
    data, options = config.data, load_options(config)
    if isinstance(given, Splits):
        loaded = given
    else:
        loaded = load(data.source, options) if given is None else load_given(given, data.source, options)
    train, test, held_out = loaded.train, loaded.test, False
    if data.test is not None:
        require_test_part(data, has_one=test is not None)
        others = options.with_shape(train.image_shape).model_copy(
            update={"masks": data.test_masks, "findings": data.test_findings or _findings_of_test(data)}
        )
        if data.unit_csv is not None:  # it is about the files of the source
            others = others.model_copy(update={"unit_csv": None, "unit_column": None})
        test = load_one(data.test, others, class_names=train.class_names, owners=True)
    elif test is None or data.validation:
        train, test = hold_out(train, fraction=data.holdout_fraction, keys=keys)
        held_out = True
    if not held_out and config.privacy.enabled:
        refuse_shared_owners(train, test, data)
    return RunSplits(
        train=limit_rows(train, config),
        test=test,
        published=loaded.normalisation if loaded.normalisation.source == "published" else None,
        held_out=held_out,
        skipped=loaded.train.skipped + (() if held_out else test.skipped),
        unused=loaded.unused,
    )


def _findings_of_test(data: DataConfig) -> str | None:
    """Return the table of findings for the test set that is named; an .npz file holds its own."""
    return data.test if data.findings is not None and Path(data.test or "").suffix == ".npz" else data.findings


def refuse_shared_owners(train: ImageStore, test: ImageStore, data: DataConfig) -> None:
    """Refuse owners on both sides of the split: metrics on their test images have no noise.

    Volumes that are known by the names of their files alone may share a name without being of one patient.

    Raises:
        DataError: some owners have images in both.
    """
    if train.owners is None or not _owners_are_people(train, data):
        return
    shared = owners_on_both_sides(train.owners, test.some_owners if test.owners is None else test.owners)
    if shared:
        raise DataError(
            f"images of {counted(len(shared), 'owner')} are in both train and test: {some_of(shared)}. Put all images "
            "of a person on one side."
        )


def owners_may_be_shared(config: RunConfig, splits: RunSplits) -> bool:
    """Whether owners are protected while some test images of the same holder have none that is known."""
    own = config.data.test is None and config.data.source not in dataset_names() and not config.data.public_data
    protected = config.privacy.enabled and splits.train.owners is not None and config.data.units != "rows"
    people = protected and _owners_are_people(splits.train, config.data)
    return people and own and not splits.held_out and splits.test.owners is None


def _owners_are_people(train: ImageStore, data: DataConfig) -> bool:
    """Whether owners have names that mean the same in both splits: not those of volumes and of rows."""
    named = (data.unit_column, data.unit_csv, data.unit_folder_level, data.unit_pattern, train.owners_from)
    return train.owners_from != OWNED_BY_FILE and any(each is not None for each in named)


def holdout_keys(keys: Keys, run_id: str) -> Keys:
    """Derive the key of the held-out split from the run alone, so that a resumed run holds out the same units."""
    return keys.bind("holdout", run_id)


def load_options(config: RunConfig) -> LoadOptions:
    """Say how the configuration wants the training images to be read."""
    return LoadOptions(
        **config.data.model_dump(),
        segmentation=config.task == "segmentation",
        classes_are_public=not config.privacy.enabled,
    )


def require_test_part(data: DataConfig, *, has_one: bool) -> None:
    """Refuse private images that are named as public test images too: their metrics are released without noise."""
    if data.test is None or data.source in dataset_names() or data.test in dataset_names():
        return
    source, test = Path(data.source).resolve(), Path(data.test).resolve()
    if (source == test and has_one) or (is_table(test) and source != test):
        return  # the files that a table names are compared one by one
    if is_table(source) and source != test:
        source = source.parent if data.image_folder is None else Path(data.image_folder).resolve()
    private = split_folders(source)[0].resolve() if source.is_dir() else source
    around = private.is_relative_to(test) and (test.is_file() or split_folders(test)[1] is None)
    if around or test.is_relative_to(private):
        raise ArgumentError(
            f"test must name other images than the private ones, got {data.test!r}, which has none or lies among "
            "them. Leave it out to hold a part of the units out."
        )


def limit_rows(store: ImageStore, config: RunConfig) -> ImageStore:
    """Keep at most ``most_rows_per_owner`` rows of each owner: the first ones in the order of the store.

    Guarantee: an owner's rows are chosen by that owner's rows alone, so adding or removing one owner changes no other
    owner's rows. Adding or removing one row may let another row of the same owner in or out.
    """
    most = config.privacy.most_rows_per_owner
    if most is None:
        return store
    if store.owners is None or config.data.units != "rows":
        raise ArgumentError(
            f"most_rows_per_owner is for runs whose units are rows with known owners, got {most}. Set units=rows and "
            "say who owns which image, or leave it out: where owners are the units, rows_per_unit bounds a step."
        )
    owner_of_row = dense_units(store.owners).numpy()
    order = np.argsort(owner_of_row, kind="stable")
    first = np.searchsorted(owner_of_row[order], owner_of_row[order])
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - first
    # Rows are the units here, so the remaining ones are numbered again in the order of the store.
    return replace(store.select_units(np.flatnonzero(place < most)), skipped=store.skipped)


def constant_normalisation(config: RunConfig, splits: RunSplits) -> Normalisation:
    """Return the pixel constants of a run that releases no statistics: published, none, or fixed."""
    channels = splits.train.image_shape[0]
    if config.data.normalisation == "published" and splits.published is not None:
        return splits.published
    if config.data.normalisation == "none":
        return fixed_normalisation(channels, mean=0.0, std=1.0)
    return fixed_normalisation(channels)


def stored_normalisation(config: RunConfig) -> Normalisation:
    """Return the pixel constants that the run has written into its configuration."""
    source = {"published": "published", "released": "released"}.get(config.data.normalisation, "fixed")
    mean, std = required(config.data.mean, "mean"), required(config.data.std, "std")
    return Normalisation.from_dict({"mean": mean, "std": std, "source": source})


def test_is_public(config: RunConfig) -> bool:
    """Whether the run's test images are public for any use, beyond metrics on them.

    They are if they belong to a published dataset, or were named as a test set of their own. Images that were held out
    of the private ones, or came with them, are declared public for metrics alone.
    """
    return config.data.source in dataset_names() or config.data.test is not None


def public_test_images(config: RunConfig, splits: RunSplits) -> Tensor | MappedImages | None:
    """Return the test images (uint8) if they are public for any use, see ``test_is_public``; else None."""
    return splits.test.images if test_is_public(config) and not splits.held_out else None


def may_show_images(config: RunConfig) -> bool:
    """Whether test images themselves may be released: only those of a segmentation that the user named as public.

    Units held out of the private data are declared public for metrics on them, and for nothing else; so is a test part
    that came with the data, unless it was named too.
    """
    return config.task == "segmentation" and config.data.test is not None
