"""Prepare a run: load its data, fill in what the configuration leaves open, calibrate the noise.

What is decided from what, in the order of ``prepare``:

===================================  ==================================================  ====================
decision                             decided from                                        charged
===================================  ==================================================  ====================
pretrained weights                   configuration; what is installed; an array's size   no
image shape, initial weights         configuration, public files                         no
both splits                          reads the private images; they stay in memory       no
name of the unit, rows per unit,     configuration; whether owners of rows are known     no
kind of normalisation, head
refusals of a plan                   configuration                                       no
number of units                      the private data, with Gaussian noise, or declared  ``count_charges``
delta, model, batch, steps, ...      that number; classes and image shape                no
noise multiplier, forecast           all of the above                                    no
===================================  ==================================================  ====================

Nothing is written here. ``start_run`` charges the count together with the first line of the ledger, before any file
shows it. Whatever is refused after the count must not depend on it; ``require_plan_for_any_count`` sees to that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

from dpvision.accounting import (
    AttackRisk,
    Charges,
    calibrate_noise_multiplier,
    full_profile,
    mechanism_guarantee,
    propose_delta,
)
from dpvision.accounting.charges import SMALLEST_RATE
from dpvision.config import ModelConfig, RunConfig, parse_config, required
from dpvision.data import ImageStore, dataset_names
from dpvision.data.packed_store import is_packed, with_packed_settings
from dpvision.data.splits import RunSplits, load_splits, owners_may_be_shared
from dpvision.data.table_files import is_table
from dpvision.data.units import OWNED_BY_FILE, owner_hint
from dpvision.errors import ArgumentError, PrivacyError, brief, some_of
from dpvision.models import entry
from dpvision.own_code import Kind, RunCode, code_of, is_own, named_again, place_of
from dpvision.privacy.mechanism import COUNTED_UNITS, CountedUnits, Event, rounded_up
from dpvision.privacy.noise import noisy_count
from dpvision.privacy.randomness import Keys
from dpvision.privacy.sampling import mismatch_note
from dpvision.release.statements import PIXEL_STATISTICS, VOLUME
from dpvision.training.baseline import choose_features, fill_without_privacy
from dpvision.training.defaults import (
    DEFAULT_IMAGE_SIZE,
    DEFAULT_MASK_SIZE,
    MOST_PROPOSED_STEPS,
    PRETRAINED_IMAGE_SIZE,
    Choice,
    Facts,
    add_offset,
    fill_open_settings,
    head_features,
    require_fitting_model,
    two_digits,
)
from dpvision.training.forecast import Forecast, forecast
from dpvision.training.initial_weights import resolve_initial_weights
from dpvision.training.pretrained import KNOWN_WEIGHTS, choose_pretrained, pretrained_note

SLICES_PER_PATIENT = 4
COUNT_NOISE = 45.0
"""Noise of the count at a target epsilon of one: it raises the noise on the gradients by about 0.3 %."""
USUAL_TARGET = 3.0
USUAL_UNITS = 10_000
"""Stands for the number of units where delta and the number are open and a limit on attacks is turned into epsilon."""
NEARLY_BLACK = 40
"""Images whose brightest byte is below this had 12 bits stored in 16, or the like."""
MOST_COUNTED = 10**8
"""A count is cut off here, so that what follows from it has known limits. More images do not fit into memory."""


@final
@dataclass(frozen=True)
class Prepared:
    """A resolved configuration, its data, the settings that were chosen, notes for the terminal, and a forecast."""

    config: RunConfig
    splits: RunSplits
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]
    forecast: Forecast | None = None


def prepare(config: RunConfig, keys: Keys, data: object | None = None) -> Prepared:
    """Resolve a configuration in the order of the table above.

    Args:
        config: as the user wrote it; open fields are None.
        keys: ``holdout_keys`` of the run; they also draw the noise of the count.
        data: images that are given in Python, as for ``train``.

    Returns:
        The run's configuration with every field filled in but the pixel constants.

    Raises:
        ArgumentError: the plan is impossible or would spend more than ``target_epsilon``.
        DataError: the data can't be read.
    """
    if config.data.mean is not None or config.data.std is not None:
        raise ArgumentError("mean and std are written by the run itself: choose normalisation instead.")
    if data is None:  # a packed store has the settings with which its source was read
        config = config.model_copy(update={"data": with_packed_settings(config.data)})
    asked, model_was_open = config, config.model is None
    config = _updated(config, "privacy", {"target_epsilon": epsilon_for_defaults(config)})
    folder = _holds_files(config)
    config, of_weights = choose_pretrained(config, config.data.image_size) if folder else (config, ())
    config, sized = choose_image_shape(config, model_was_open=model_was_open)
    config, constants = resolve_initial_weights(config)
    splits = load_splits(config, keys, data)
    channels, *sides = splits.train.image_shape
    if not folder:  # an array has its own size, which is declared public
        config, of_weights = choose_pretrained(config, min(sides))
        config, constants = resolve_initial_weights(config) if of_weights else (config, constants)
    if constants is not None:
        # What the weights were trained with goes first.
        splits = replace(splits, published=constants.for_channels(channels))
    config = name_normalisation(name_units(config, splits.train), splits)
    config = fit_pretrained_head(config, model_was_open=model_was_open)
    require_public_constants(config)
    if config.model is not None:
        require_fitting_model(config.model, masks=config.task == "segmentation")
    config, counted = count_units(config, splits.train, keys)
    train = splits.train
    facts = Facts(
        num_units=train.num_units,
        num_classes=train.num_classes,
        image_shape=train.image_shape,
        pretrained=bool(of_weights),
    )
    if config.data.findings is not None and config.loss is None:
        config = config.model_copy(update={"loss": "binary_cross_entropy"})
    config, offset = add_offset(config, facts) if model_was_open else (config, ())
    config, features = choose_features(config, train)
    config, ordinary = fill_without_privacy(config, facts)
    config, chosen = fill_open_settings(config, facts)
    require_both_stages(config)
    config = _updated(config, "privacy", {"target_epsilon": asked.privacy.target_epsilon})
    config = parse_config((calibrate(config) if config.privacy.enabled else config).model_dump())
    head = head_features(required(config.model, "model"), facts, config) is not None
    expected = forecast(config, num_classes=train.num_classes, linear_head=head)
    hint = pretrained_note(asked, config.data.image_size or min(sides))
    found = (*notes(config, splits), *([] if hint is None else [hint]))
    return Prepared(
        config, splits, (*of_weights, *sized, *counted, *offset, *features, *ordinary, *chosen), found, expected
    )


def load_run_code(
    config: RunConfig, *, model: object | None = None, loss: object | None = None
) -> tuple[RunConfig, RunCode]:
    """Load the model and the loss that the user wrote, from the configuration or from Python objects.

    Args:
        config: as the user wrote it; ``model.name`` and ``loss`` may be FILE.py:FUNCTION.
        model: a model in the place of the configured one, as for ``train``.
        loss: a loss in the place of the configured one.

    Returns:
        The configuration with file names instead of paths and with the hashes of the sources, and the code.

    Raises:
        ArgumentError: there is no such code, it can't be imported, or it is given twice.
        PrivacyError: the configuration names another hash.
    """
    update: dict[str, object] = {}
    own_model = own_loss = None
    if model is not None and config.model is not None:
        raise ArgumentError(f"the model is given twice: as {config.model.name} in the configuration, and beside it.")
    if loss is not None and config.loss is not None:
        raise ArgumentError(f"the loss is given twice: as {config.loss} in the configuration, and beside it.")
    if config.model is not None and is_own(config.model.name):
        model = config.model.name
    if config.loss is not None and is_own(config.loss):
        loss = config.loss
    _require_file(model, "model")
    _require_file(loss, "loss")
    if model is not None:
        own_model = code_of(model, kind="model", sha256=None if config.model is None else config.model.sha256)
        update["model"] = ModelConfig(name=own_model.name, sha256=own_model.sha256)
    if loss is not None:
        own_loss = code_of(loss, kind="loss", sha256=config.loss_sha256)
        update |= {"loss": own_loss.name, "loss_sha256": own_loss.sha256}
    return config.model_copy(update=update), RunCode(own_model, own_loss)


def _require_file(given: object, kind: Kind) -> None:
    """Refuse own code of a module that is named otherwise than by its file: it could not be hashed."""
    if isinstance(given, str) and not place_of(given, kind)[0].endswith(".py"):
        raise ArgumentError(f"{kind} must be FILE.py:FUNCTION, got {brief(given)}: write a file that imports it.")


def run_code_again(
    config: RunConfig, *, model: object | None, loss: object | None, allow_fork: bool
) -> tuple[RunConfig, RunCode]:
    """Load the own code of a run that is resumed, and compare it with what the run recorded.

    Args:
        config: the run's resolved configuration.
        model: what the user names as its model now.
        loss: what the user names as its loss now.
        allow_fork: accept other code: its hash enters the configuration, and with it the key.

    Raises:
        ArgumentError: own code is needed and not named, or named and not needed.
        PrivacyError: it is not what it was, and ``allow_fork`` is not set; nothing of it was executed.
    """
    chosen, name = required(config.model, "model"), required(config.loss, "loss")
    try:
        own_model = named_again(chosen.name, chosen.sha256, model, kind="model", may_differ=allow_fork)
        own_loss = named_again(name, config.loss_sha256, loss, kind="loss", may_differ=allow_fork)
    except PrivacyError as error:
        raise PrivacyError(
            f"{error} Or resume with --fork: with other noise, and repeated steps are charged again."
        ) from error
    update: dict[str, object] = {}
    if own_model is not None and own_model.sha256 != chosen.sha256:
        update["model"] = ModelConfig(name=own_model.name, sha256=own_model.sha256)
    if own_loss is not None and own_loss.sha256 != config.loss_sha256:
        update |= {"loss": own_loss.name, "loss_sha256": own_loss.sha256}
    return config.model_copy(update=update), RunCode(own_model, own_loss)


def choose_image_shape(config: RunConfig, *, model_was_open: bool = True) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Fill in size and channels of the images of a folder, which may have many of both: no file decides on them.

    Colour, because grey images stored in colour lose nothing by it in the default model; --channels 1 declares grey.
    """
    data, masks = config.data, config.task == "segmentation"
    if data.source in dataset_names() or not _holds_files(config):
        return config, ()
    chosen: dict[str, object] = {}
    reasons: list[str] = []
    if data.image_size is None:
        side = DEFAULT_MASK_SIZE if masks else DEFAULT_IMAGE_SIZE
        reason = "small images train fast; raise it for detail"
        if model_was_open and config.transfer is not None and config.transfer.weights in KNOWN_WEIGHTS:
            side, reason = PRETRAINED_IMAGE_SIZE, "pretrained weights read detail"
        chosen["image_size"] = side
        reasons.append(reason)
    if data.channels is None and not masks:
        chosen["channels"] = 3
        reasons.append("colour; for grey images give --channels 1")
    shown = zip(chosen.items(), reasons, strict=True)
    choices = tuple(Choice(name, str(value), reason) for (name, value), reason in shown)
    return _updated(config, "data", chosen), choices


def name_units(config: RunConfig, store: ImageStore) -> RunConfig:
    """Fill in what a unit is called and how many of its rows enter a step.

    A unit may be called by the name of a person only where rows have owners: the word alone protects no one.
    """
    data, given, masks = config.data, config.privacy.privacy_unit, config.task == "segmentation"
    grouped = store.owners is not None and data.units != "rows"
    single = {"example", "slice"} if masks else {"example"}
    if not grouped and given not in {None, *single}:
        raise ArgumentError(
            f"privacy_unit must be example where each image is a unit of its own, got {given!r}. "
            "Say who owns which image: unit_column, unit_csv, unit_folder_level or unit_pattern."
        )
    if grouped and given in single:
        raise ArgumentError(f"privacy_unit must name what owns several images (patient, user …), got {given!r}.")
    if grouped:
        named = (data.unit_column, data.unit_csv, data.unit_folder_level, data.unit_pattern)
        by_file = all(each is None for each in named)  # a patient may have several files: only the volume is known
        usual = VOLUME if by_file else "patient" if masks else "owner"
        if store.owners_from is not None:
            usual = VOLUME if store.owners_from == OWNED_BY_FILE else "owner"
            usual = "patient" if "patient" in store.owners_from.lower() else usual
    else:
        usual = "slice" if masks and store.owners is not None else "example"
    rows = data.rows_per_unit or (SLICES_PER_PATIENT if grouped and masks else 1)
    config = _updated(config, "privacy", {"privacy_unit": given or usual})
    return _updated(config, "data", {"rows_per_unit": rows, "units": "owners" if grouped else "rows"})


def name_normalisation(config: RunConfig, splits: RunSplits) -> RunConfig:
    """Turn ``auto`` into the published constants of a known dataset, or into fixed ones."""
    wanted = config.data.normalisation
    if wanted == "auto":
        wanted = "fixed" if splits.published is None else "published"
    if wanted == "published" and splits.published is None:
        raise ArgumentError(
            f"normalisation must be fixed, none or released, got published: no constants are published for "
            f"{config.data.source!r}."
        )
    if wanted == "released" and not config.privacy.enabled:
        raise ArgumentError("normalisation=released adds noise for privacy: with --no-privacy use fixed or published.")
    return _updated(config, "data", {"normalisation": wanted})


def fit_pretrained_head(config: RunConfig, *, model_was_open: bool) -> RunConfig:
    """Let a head that is trained alone start at zero, and its backbone see detail, unless the user chose a model.

    Drawn weights would put noise on every logit that a short private training does not remove.
    """
    model = config.model
    alone = config.transfer is not None and config.transfer.trained == "head"
    if not alone or not model_was_open or model is None or is_own(model.name):
        return config
    known = entry(model.name).options
    options = dict(model.options)
    options |= {"zero_head": True} if "zero_head" in known else {}
    options |= {"resize_to": PRETRAINED_IMAGE_SIZE} if "resize_to" in options else {}
    return config.model_copy(update={"model": model.model_copy(update={"options": options})})


def require_public_constants(config: RunConfig) -> None:
    """Refuse feature constants computed from the private images: they are released with the weights."""
    constants = None if config.model is None else config.model.options.get("constants")
    source = Path(config.data.source).name.lower()
    if config.privacy.enabled and isinstance(constants, str) and source.startswith(constants.lower()):
        raise ArgumentError(
            f"constants must come from other images than the private ones, got {constants!r} for {source}: they "
            "would be released without noise. Choose standardise=group."
        )


def count_units(config: RunConfig, store: ImageStore, keys: Keys) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Fill in the number of units, counted with noise unless it is declared or published.

    Guarantee: sample rate, divisor, delta and every default that follows from the number depend on the data through
    one Gaussian release of sensitivity one, which ``count_charges`` names. A published dataset has a published size,
    and a declared number is taken as it is.
    """
    privacy = config.privacy
    if privacy.count_noise_multiplier is not None and privacy.num_units is not None:
        raise ArgumentError(
            "count_noise_multiplier is for counting the units, got num_units too: a declared number needs no noise."
        )
    if not privacy.enabled or privacy.num_units is not None or config.data.source in dataset_names():
        return config, ()
    noise = privacy.count_noise_multiplier or COUNT_NOISE / (privacy.target_epsilon or USUAL_TARGET)
    require_plan_for_any_count(_updated(config, "privacy", {"count_noise_multiplier": noise}))
    key = keys.derive("statistics", COUNTED_UNITS)
    noisy = max(1, two_digits(noisy_count(store.num_units, noise_multiplier=noise, key=key)))
    # A rate above one would be refused: whether it is must not depend on the data either.
    noisy = max(min(noisy, MOST_COUNTED), math.ceil(privacy.expected_batch_size or 1))
    reason = f"counted with noise of about {noise:.0f}, which is charged; declare it to choose it"
    counted = {"num_units": noisy, "count_noise_multiplier": noise}
    return _updated(config, "privacy", counted), (Choice("num_units", str(noisy), reason),)


def require_plan_for_any_count(config: RunConfig) -> None:
    """Refuse, before counting, a plan that would be refused for some numbers of units and not for others.

    A refused command charges nothing, so neither its message nor the refusal may depend on the count.
    """
    privacy, transfer = config.privacy, config.transfer
    if privacy.noise_multiplier is not None and (privacy.target_epsilon or privacy.target_risk) is not None:
        raise ArgumentError(
            "noise_multiplier and a target together need num_units: whether the plan stays within the target "
            "would tell how many units were counted. Declare num_units, or leave one of the two open."
        )
    if transfer is not None and transfer.head_steps is not None and privacy.steps is None:
        raise ArgumentError(
            "head_steps needs steps where units are counted: how many are proposed depends on the count. Give steps, "
            "or declare num_units."
        )
    batch = privacy.expected_batch_size or 1.0
    if not SMALLEST_RATE * MOST_COUNTED <= batch <= MOST_COUNTED:
        raise ArgumentError(
            f"expected_batch_size must lie between {SMALLEST_RATE * MOST_COUNTED:g} and {MOST_COUNTED} where units are "
            f"counted, got {batch:g}. Change it, or declare num_units."
        )
    # Every unit in every step, the most steps and the smallest delta: the most that any count could ask for.
    whole = math.ceil(batch)
    worst: dict[str, object] = {
        "num_units": whole,
        "expected_batch_size": float(whole),
        "steps": privacy.steps or MOST_PROPOSED_STEPS,
        "delta": privacy.delta or propose_delta(MOST_COUNTED),
        "clip_norm": privacy.clip_norm or 1.0,
        "privacy_unit": privacy.privacy_unit or "example",
    }
    calibrate(_updated(config, "privacy", worst))


def require_both_stages(config: RunConfig) -> None:
    """Refuse steps for the head alone that leave no steps for the whole model."""
    head_steps = None if config.transfer is None else config.transfer.head_steps
    steps = required(config.privacy.steps, "steps")
    if head_steps is not None and not head_steps < steps:
        raise ArgumentError(f"head_steps must be below steps={steps}, got {head_steps}. Lower it.")


def epsilon_for_defaults(config: RunConfig) -> float | None:
    """Return the epsilon by which defaults are chosen: the target, or about that of a limit on attacks.

    The latter is that of a Gaussian release. It proves nothing; ``calibrate`` keeps the limit.
    """
    privacy = config.privacy
    if privacy.target_epsilon is not None or privacy.target_risk is None or not privacy.enabled:
        return privacy.target_epsilon
    delta = privacy.delta or propose_delta(privacy.num_units or USUAL_UNITS)
    return AttackRisk.parse(privacy.target_risk).gaussian_epsilon(delta=delta)


def calibrate(config: RunConfig) -> RunConfig:
    """Set the noise multiplier so that the whole plan stays within the target epsilon and the limit on attacks.

    Where only a limit on attacks is given, the epsilon that the plan spends becomes the target epsilon.

    Raises:
        ArgumentError: delta is open, or the given noise multiplier would spend more than the target.
    """
    privacy, extra = config.privacy, extra_charges(config)
    if privacy.delta is None:
        raise ArgumentError("delta must be given: it has no default. Choose one below 1 / num_units.")
    risk = None if privacy.target_risk is None else AttackRisk.parse(privacy.target_risk)
    if privacy.noise_multiplier is None:

        def noise_for(epsilon: float | None, risk: AttackRisk | None) -> float:
            return calibrate_noise_multiplier(
                num_units=required(privacy.num_units, "num_units"),
                expected_batch_size=required(privacy.expected_batch_size, "expected_batch_size"),
                steps=required(privacy.steps, "steps"),
                target_epsilon=epsilon,
                target_risk=risk,
                delta=required(privacy.delta, "delta"),
                adjacency=privacy.adjacency,
                extra=extra,
                accountant="pld" if epsilon is None else privacy.accountant,
                # Whether hardly any noise is needed depends on the sample rate, and so on the count.
                refuse_little_noise=not count_charges(config),
            )

        wanted = [noise_for(None, risk)] if risk is not None else []
        if privacy.target_epsilon is not None or risk is None:
            wanted.append(noise_for(required(privacy.target_epsilon, "target_epsilon"), None))
        config = _updated(config, "privacy", {"noise_multiplier": max(wanted)})
    planned = mechanism_guarantee(config.mechanism, delta=privacy.delta, extra=extra)
    # The certificate states both accountants' values: what one of them refuses must be refused before it is spent.
    mechanism_guarantee(config.mechanism, delta=privacy.delta, extra=extra, accountant="rdp")
    if privacy.target_epsilon is not None and planned.epsilon > privacy.target_epsilon:
        raise ArgumentError(
            f"the plan would spend epsilon {rounded_up(planned.epsilon)}, more than "
            f"target_epsilon={privacy.target_epsilon:g}. Raise noise_multiplier, lower steps or expected_batch_size, "
            "or leave noise_multiplier open."
        )
    if risk is not None:
        _require_risk(config, risk)
        if privacy.target_epsilon is None:
            config = _updated(config, "privacy", {"target_epsilon": planned.epsilon})
    return config


def _require_risk(config: RunConfig, risk: AttackRisk) -> None:
    """Refuse a plan whose attacks could do better than the limit."""
    mechanism, delta = config.mechanism, required(config.privacy.delta, "delta")
    charges = [(mechanism.step_event, mechanism.steps), *extra_charges(config)]
    bound = risk.bound(full_profile(charges, delta=delta, adjacency=mechanism.adjacency))
    if bound > risk.limit:
        raise ArgumentError(
            f"the plan would let attacks reach {rounded_up(bound)}, more than target_risk={risk}. Raise "
            "noise_multiplier, lower steps or expected_batch_size, or leave noise_multiplier open."
        )


def extra_charges(config: RunConfig) -> Charges:
    """List what is charged besides the training steps."""
    return (*count_charges(config), *statistics_charges(config))


def count_charges(config: RunConfig) -> Charges:
    """The charge for counting the units; nothing if their number is declared or published."""
    if not config.privacy.enabled or config.privacy.count_noise_multiplier is None:
        return ()
    counted = CountedUnits(num_units=1, noise_multiplier=config.privacy.count_noise_multiplier)
    return ((counted.event, 1),)


def statistics_charges(config: RunConfig) -> Charges:
    """The charge for pixel statistics of the private images; nothing if the constants are fixed or published."""
    if config.privacy.enabled and config.data.normalisation == "released":
        noise = config.data.statistics_noise_multiplier
        return ((Event(sample_rate=1.0, noise_multiplier=noise, purpose=PIXEL_STATISTICS), 1),)
    return ()


def notes(config: RunConfig, splits: RunSplits) -> tuple[str, ...]:
    """Notes for the terminal before training. They may depend on the private data and are written nowhere."""
    found = []
    if splits.skipped:
        name, reason = splits.skipped[0]
        found.append(f"skipped {len(splits.skipped)} images that can't be read; the first is {name}: {reason}")
    if splits.held_out:
        share = f"{config.data.holdout_fraction:.0%}"
        why = "the test set is not read" if config.data.validation else "no test set was named"
        found.append(f"{why}: {share} of the units are held out for testing, and get no epsilon.")
    elif splits.test.num_rows and config.data.test is None and config.data.source not in dataset_names():
        found.append("the test images of this data are measured without noise: they get no epsilon.")
    if owners_may_be_shared(config, splits):
        found.append("the owners of some test images are not known: they may have training images too.")
    if splits.unused:
        found.append(splits.unused)
    found += _without_images(splits)
    of_files = _holds_files(config) or is_packed(Path(config.data.source))
    hint = owner_hint(splits.train.row_names) if splits.train.owners is None and of_files else None
    found += [] if hint is None else [hint]
    if splits.train.num_rows and splits.train.brightest < NEARLY_BLACK:
        found.append(f"no pixel is brighter than {splits.train.brightest} of 255: give --window LOW HIGH.")
    if not config.privacy.enabled:
        return (*found, "training WITHOUT privacy: this run has no guarantee.")
    shared = set(splits.train.names_of_units) & set(splits.test.names_of_units)
    if shared and splits.train.owners is not None and not splits.held_out:
        found.append(f"{len(shared)} owners of training images are in the public test set too: not protected.")
    counted = bool(count_charges(config))
    mismatch = mismatch_note(splits.train.num_units, config.mechanism, counted=counted)
    return (*found, *([] if mismatch is None else [mismatch]))


def _without_images(splits: RunSplits) -> list[str]:
    """Name the classes of which there is no image, such as a folder that was left empty by mistake."""
    labels = [store.labels for store in (splits.train, splits.test) if store.num_rows]
    if not labels or any(each.dim() != 1 or each.is_floating_point() for each in labels):
        return []
    present = {number for each in labels for number in each.unique().tolist()}
    empty = [name for number, name in enumerate(splits.train.class_names) if number not in present]
    return [f"no images of {some_of(empty)}: an empty folder is a class too. Remove it if it is none."] if empty else []


def _holds_files(config: RunConfig) -> bool:
    """Whether the source is a folder or a table of image files of any size, not an array or a packed store."""
    path = Path(config.data.source)
    return (path.is_dir() and not is_packed(path)) or is_table(path)


def _updated(config: RunConfig, section: Literal["data", "privacy"], values: dict[str, object]) -> RunConfig:
    """Replace fields of one section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
