"""Who is protected: what a unit is called, how many of its rows enter a step, and how many rows an owner may have.

How many units there are, where nobody declared it: counted with noise, and charged.

From a configuration to something that can run: data loaded, open settings filled, noise calibrated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np

from dpvision.accounting import Charges, calibrate_noise_multiplier, mechanism_guarantee
from dpvision.config import DataConfig, OptimizerSettings, RunConfig, parse_config, required
from dpvision.data import (
    ImageStore,
    LoadOptions,
    Normalisation,
    dataset_names,
    dense_units,
    fixed_normalisation,
    hold_out,
    load,
    load_one,
)
from dpvision.data.image_folder import split_folders
from dpvision.errors import ArgumentError
from dpvision.privacy.mechanism import Event, rounded_up
from dpvision.privacy.noise import standard_normals
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import mismatch_note
from dpvision.release.statements import COUNTED_UNITS as COUNT
from dpvision.release.statements import PIXEL_STATISTICS, VOLUME
from dpvision.training.defaults import (
    DEFAULT_IMAGE_SIZE,
    DEFAULT_MASK_SIZE,
    Choice,
    Facts,
    fill_open_settings,
    require_fitting_model,
    two_digits,
)
from dpvision.training.lineage import resolved_transfer

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


UNITS_OF_NOISE = 45.0
"""The noise at a target of epsilon one. Whatever the target, the noise on the gradients grows by about 0.3 % for it."""
USUAL_TARGET = 3.0


def with_number_of_units(config: RunConfig, store: ImageStore, keys: Keys) -> tuple[RunConfig, tuple[Choice, ...]]:
    """The configuration with its number of units, if private units are there to be counted.

    Guarantee: sample rate, divisor, delta and all that is proposed from the number depend on the data through one
    Gaussian release, which one unit more or less moves by one, and which ``count_charges`` names. A published dataset
    has a published size, and a number that was declared is taken as it is.
    """
    privacy = config.privacy
    if privacy.count_noise_multiplier is not None and privacy.num_units is not None:
        raise ArgumentError(
            "count_noise_multiplier is for counting the units, got num_units too: a declared number needs no noise."
        )
    if not privacy.enabled or privacy.num_units is not None or config.data.source in dataset_names():
        return config, ()
    require_plan_that_fits_any(config)
    noise = privacy.count_noise_multiplier or UNITS_OF_NOISE / (privacy.target_epsilon or USUAL_TARGET)
    (normal,) = standard_normals(keys.derive("statistics", COUNT), 1)
    noisy = max(1, two_digits(max(1, round(store.num_units + noise * float(normal)))))
    # A rate above one would be refused: whether it is must not depend on the data either.
    noisy = max(noisy, math.ceil(privacy.expected_batch_size or 1))
    update = {"num_units": noisy, "count_noise_multiplier": noise}
    reason = f"counted with noise of about {noise:.0f}, which is charged; declare it to choose it"
    config = config.model_copy(update={"privacy": privacy.model_copy(update=update)})
    return config, (Choice("num_units", str(noisy), reason),)


def require_plan_that_fits_any(config: RunConfig) -> None:
    """Refuse, before anybody counts, a plan that would be refused for some numbers of units and not for others.

    A refused command charges nothing: what it says, and that it is refused, must not tell what was counted.
    """
    privacy, transfer = config.privacy, config.transfer
    if privacy.noise_multiplier is not None and privacy.target_epsilon is not None:
        raise ArgumentError(
            "noise_multiplier and target_epsilon together need num_units: whether the plan stays within the target "
            "would tell how many units were counted. Declare num_units, or leave one of the two open."
        )
    if transfer is not None and transfer.head_steps is not None and privacy.steps is None:
        raise ArgumentError(
            "head_steps needs steps where units are counted: how many are proposed depends on the count. Give steps, "
            "or declare num_units."
        )


def count_charges(config: RunConfig) -> tuple[tuple[Event, int], ...]:
    """What the number of units cost: nothing if it was declared."""
    privacy = config.privacy
    if not privacy.enabled or privacy.count_noise_multiplier is None:
        return ()
    noise = required(privacy.count_noise_multiplier, "count_noise_multiplier")
    return ((Event(sample_rate=1.0, noise_multiplier=noise, purpose=COUNT), 1),)


HEAD_CLIP_NORM, HEAD_RATE = 0.1, 4.0


@final
@dataclass(frozen=True)
class RunSplits:
    """The two splits of a run. ``train`` is private; ``test`` is declared public."""

    train: ImageStore
    test: ImageStore
    published: Normalisation | None
    held_out: bool
    skipped: tuple[tuple[str, str], ...] = ()


@final
@dataclass(frozen=True)
class Prepared:
    """A resolved configuration, its pictures, and what was chosen on the way."""

    config: RunConfig
    pictures: RunSplits
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]


def load_options(config: RunConfig) -> LoadOptions:
    """How the configuration wants the training pictures to be read."""
    return LoadOptions(**config.data.model_dump(), segmentation=config.task == "segmentation")


def load_splits(config: RunConfig, keys: Keys) -> RunSplits:
    """Both splits. Without a test split, a part of the units is held out by a keyed draw."""
    data, options = config.data, load_options(config)
    splits = load(data.source, options)
    constants = splits.normalisation if splits.normalisation.source == "published" else None
    train, test, held_out = splits.train, splits.test, False
    if data.test is not None:
        require_test_part(data, has_one=test is not None)
        others = options.with_shape(train.image_shape).model_copy(update={"masks": data.test_masks})
        test = load_one(data.test, others, class_names=train.class_names)
    elif test is None:
        train, test = hold_out(train, fraction=data.holdout_fraction, keys=keys)
        held_out = True
    skipped = splits.train.skipped + (() if held_out else test.skipped)
    return RunSplits(limited_rows(train, config), test, constants, held_out, skipped)


def require_test_part(data: DataConfig, *, has_one: bool) -> None:
    """Private pictures that are named as public test pictures too would be measured, and shown, without noise."""
    if data.test is None or data.source in dataset_names() or data.test in dataset_names():
        return
    source, test = Path(data.source).resolve(), Path(data.test).resolve()
    if source == test and has_one:
        return
    private = split_folders(source)[0].resolve() if source.is_dir() else source
    around = private.is_relative_to(test) and (test.is_file() or split_folders(test)[1] is None)
    if around or test.is_relative_to(private):
        raise ArgumentError(
            f"test must name other pictures than the private ones, got {data.test!r}, which has none or lies among "
            "them. Leave it out to hold a part of the units out."
        )


def prepare(config: RunConfig, keys: Keys) -> Prepared:
    """Load the pictures, fill what is open and calibrate the noise. Nothing is spent yet."""
    if config.data.mean is not None or config.data.std is not None:
        raise ArgumentError("mean and std are written by the run itself: choose normalisation instead.")
    choices: list[Choice] = []
    by_name = config.data.source in dataset_names()
    if config.data.image_size is None and not by_name and Path(config.data.source).is_dir():
        side = DEFAULT_MASK_SIZE if config.task == "segmentation" else DEFAULT_IMAGE_SIZE
        data = config.data.model_copy(update={"image_size": side})
        config = config.model_copy(update={"data": data})
        choices.append(Choice("image_size", str(side), "small pictures train fast; raise it for detail"))
    config, pixels = resolved_transfer(config)
    pictures = load_splits(config, keys)
    config = name_units(config, pictures.train)
    if pixels is not None:
        pictures = replace(pictures, published=pixels)  # what the weights were trained on goes first
    config, of_head = fill_for_head(config)
    facts = Facts(
        num_units=pictures.train.num_units,
        num_classes=pictures.train.num_classes,
        image_shape=pictures.train.image_shape,
    )
    config = name_normalisation(config, pictures)
    require_other_pictures(config)
    if config.model is not None:
        require_fitting_model(config.model, masks=config.task == "segmentation")
    # The first number that depends on the data, not charged yet: what is refused below does not depend on it.
    config, counted = with_number_of_units(config, pictures.train, keys)
    config, chosen = fill_open_settings(config, facts)
    require_both_phases(config)
    if config.privacy.enabled:
        config = calibrate(config)
    config = parse_config(config.model_dump())
    return Prepared(config, pictures, (*choices, *of_head, *counted, *chosen), notes(config, pictures))


def fill_for_head(config: RunConfig) -> tuple[RunConfig, tuple[Choice, ...]]:
    """What a linear head on frozen features wants, where it is left open: a small clip norm, momentum, a large rate."""
    if config.transfer is None or config.transfer.trained != "head":
        return config, ()
    choices: list[Choice] = []
    update: dict[str, object] = {}
    if config.privacy.clip_norm is None and config.privacy.enabled:
        update["privacy"] = config.privacy.model_copy(update={"clip_norm": HEAD_CLIP_NORM})
        choices.append(Choice("clip_norm", f"{HEAD_CLIP_NORM:g}", "small, with a large rate, for a head alone"))
    if config.optimizer is None:
        rate = HEAD_RATE if config.privacy.enabled else HEAD_RATE * HEAD_CLIP_NORM
        update["optimizer"] = OptimizerSettings(name="sgd", learning_rate=rate, momentum=0.9)
        choices.append(Choice("optimizer", f"sgd, learning rate {rate:g}, momentum 0.9", "for a head alone"))
    return config.model_copy(update=update), tuple(choices)


def require_both_phases(config: RunConfig) -> None:
    """Steps for the head alone must leave steps for all."""
    head_steps = None if config.transfer is None else config.transfer.head_steps
    steps = required(config.privacy.steps, "steps")
    if head_steps is not None and not head_steps < steps:
        raise ArgumentError(f"head_steps must be below steps={steps}, got {head_steps}. Lower it.")


def require_other_pictures(config: RunConfig) -> None:
    """Constants that were computed from the private pictures themselves would be released with the weights."""
    constants = None if config.model is None else config.model.options.get("constants")
    source = Path(config.data.source).name.lower()
    if config.privacy.enabled and isinstance(constants, str) and source.startswith(constants.lower()):
        raise ArgumentError(
            f"constants must come from other pictures than the private ones, got {constants!r} for {source}: they "
            "would be released without noise. Choose standardise=group."
        )


def notes(config: RunConfig, pictures: RunSplits) -> tuple[str, ...]:
    """What the user should hear before training. For the terminal only: some of it depends on the private data."""
    found = []
    if pictures.skipped:
        name, reason = pictures.skipped[0]
        found.append(f"skipped {len(pictures.skipped)} pictures that can't be read; the first is {name}: {reason}")
    if pictures.held_out:
        share = f"{config.data.holdout_fraction:.0%}"
        found.append(f"no test set was named: {share} of the units are held out for testing, and not protected.")
    if config.privacy.enabled:
        shared = set(pictures.train.names_of_units) & set(pictures.test.names_of_units)
        if shared and pictures.train.owners is not None and not pictures.held_out:
            found.append(f"{len(shared)} owners of training pictures are in the public test set too: not protected.")
        counted = bool(count_charges(config))
        mismatch = mismatch_note(pictures.train.num_units, config.mechanism, counted=counted)
        found += [] if mismatch is None else [mismatch]
    else:
        found.append("training WITHOUT privacy: this run has no guarantee.")
    return tuple(found)


def name_normalisation(config: RunConfig, pictures: RunSplits) -> RunConfig:
    """Turn ``auto`` into the published constants of a known dataset, or into fixed ones."""
    wanted = config.data.normalisation
    if wanted == "auto":
        wanted = "fixed" if pictures.published is None else "published"
    if wanted == "published" and pictures.published is None:
        raise ArgumentError(
            f"normalisation must be fixed, none or released, got published: no constants are published for "
            f"{config.data.source!r}."
        )
    if wanted == "released" and not config.privacy.enabled:
        raise ArgumentError("normalisation=released adds noise for privacy: with --no-privacy use fixed or published.")
    data = config.data.model_copy(update={"normalisation": wanted})
    return config.model_copy(update={"data": data})


def constant_normalisation(config: RunConfig, pictures: RunSplits) -> Normalisation:
    """The normalisation of a run that releases no statistics."""
    channels = pictures.train.image_shape[0]
    if config.data.normalisation == "published" and pictures.published is not None:
        return pictures.published
    if config.data.normalisation == "none":
        return fixed_normalisation(channels, mean=0.0, std=1.0)
    return fixed_normalisation(channels)


def extra_charges(config: RunConfig) -> Charges:
    """What is charged besides the training steps."""
    return (*count_charges(config), *statistics_charges(config))


def statistics_charges(config: RunConfig) -> Charges:
    """What constants for the pixels cost, if they are computed from the private pictures."""
    if config.privacy.enabled and config.data.normalisation == "released":
        noise = config.data.statistics_noise_multiplier
        return ((Event(sample_rate=1.0, noise_multiplier=noise, purpose=PIXEL_STATISTICS), 1),)
    return ()


def calibrate(config: RunConfig) -> RunConfig:
    """Set the noise so that the whole plan stays within the target; refuse a plan that would cross it."""
    privacy, extra = config.privacy, extra_charges(config)
    if privacy.delta is None:
        raise ArgumentError("delta must be given: it has no default. Choose one below 1 / num_units.")
    if privacy.noise_multiplier is None:
        noise = calibrate_noise_multiplier(
            num_units=required(privacy.num_units, "num_units"),
            expected_batch_size=required(privacy.expected_batch_size, "expected_batch_size"),
            steps=required(privacy.steps, "steps"),
            target_epsilon=required(privacy.target_epsilon, "target_epsilon"),
            delta=privacy.delta,
            adjacency=privacy.adjacency,
            extra=extra,
        )
        config = config.model_copy(update={"privacy": privacy.model_copy(update={"noise_multiplier": noise})})
    planned = mechanism_guarantee(config.mechanism, delta=privacy.delta, extra=extra)
    # The certificate gives both accountants' figures: what one of them refuses must be refused before it is spent.
    mechanism_guarantee(config.mechanism, delta=privacy.delta, extra=extra, accountant="rdp")
    if privacy.target_epsilon is not None and planned.epsilon > privacy.target_epsilon:
        raise ArgumentError(
            f"the plan would spend epsilon {rounded_up(planned.epsilon)}, more than "
            f"target_epsilon={privacy.target_epsilon:g}. Raise noise_multiplier, lower steps or expected_batch_size, "
            "or leave noise_multiplier open."
        )
    return config
