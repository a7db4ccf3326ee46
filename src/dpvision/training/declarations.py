"""What a run declares public instead of charging it. Each declaration is written into the ledger.

The certificate copies the declarations, and ``verify`` compares them with the ledger. Names that other code looks for
are in release/statements.py.
"""

from __future__ import annotations

from pathlib import Path

from dpvision.accounting import mechanism_guarantee
from dpvision.config import Precision, RunConfig, ViewsConfig
from dpvision.data.datasets import dataset_names
from dpvision.data.splits import RunSplits, may_show_images, owners_may_be_shared
from dpvision.privacy.ledger import Ledger
from dpvision.release.statements import (
    HELD_OUT,
    OWN_TEST,
    PRECISION,
    PROCESSES,
    SEVERAL_PROCESSES,
    SHOWN_IMAGES,
    TEST_SPLIT,
    own_code_declarations,
)
from dpvision.training.lineage import note_lineage, transfer_declarations
from dpvision.training.prepare import extra_charges
from dpvision.training.pretrained import KNOWN_WEIGHTS
from dpvision.training.stages import mirrored


def declarations(config: RunConfig, splits: RunSplits) -> list[tuple[str, str]]:
    """Return pairs of (what, how) for everything that is declared instead of charged."""
    found = [("privacy units", units_come_from(config, splits)), (TEST_SPLIT, test_split(config, splits))]
    if owners_may_be_shared(config, splits):
        how = "not known for all of them: those who are known have no training images, the others may have some"
        found.append(("owners of test images", how))
    found += rows_of_owners(config)
    if may_show_images(config):
        found.append(
            (
                SHOWN_IMAGES,
                "a few, with their masks, their owners' names and the model's masks: naming them as test data declares "
                "them public, and the metrics of each owner too",
            )
        )
    if config.data.findings is not None:
        found.append(
            (
                "findings",
                "their names; a label that is missing or uncertain has no loss, and every sum is divided by the number "
                "of findings, not of known labels",
            )
        )
    if config.data.public_classes:
        found.append(("classes", "read off all labels of the data, and declared public"))
    if config.data.public_data:
        found.append(
            (
                "training images",
                "declared public by the person who configured the run: results of training on them without privacy may "
                "be shown beside this run, and no epsilon covers those",
            )
        )
    if config.data.normalisation == "published":
        of_weights = config.transfer is not None and config.transfer.weights in KNOWN_WEIGHTS
        what = config.transfer.weights if config.transfer is not None and of_weights else config.data.source
        found.append(("normalisation constants", f"published for {what}"))
    elif config.data.normalisation in {"fixed", "none"}:
        found.append(("normalisation constants", "fixed numbers that do not depend on the data"))
    constants = None if config.model is None else config.model.options.get("constants")
    if constants is not None:
        found.append(("feature constants", f"computed from {constants}, which is declared public"))
    if config.schedule.kind == "plateau":
        found.append(("learning-rate schedule", "follows the loss on the test split, which is declared public"))
    if config.views != ViewsConfig():
        found.append(("augmented views", views_text(config)))
    if config.performance.partial_sums is not None:
        found.append((PROCESSES, SEVERAL_PROCESSES))
    if config.performance.precision != "float32":
        found.append((PRECISION, precision_text(config.performance.precision)))
    found += own_code_declarations(config.public().model_dump(mode="json"))
    return [*found, *transfer_declarations(config, planned_epsilon=planned_epsilon(config))]


def note_declarations(ledger: Ledger, config: RunConfig, splits: RunSplits) -> None:
    """Write every declaration into the ledger; one that is already there is not written again."""
    for what, how in declarations(config, splits):
        ledger.note("declare", {"what": what, "how": how})
    note_lineage(ledger, config)


def precision_text(precision: Precision) -> str:
    """How layers of low precision are computed, and what is not."""
    return (
        f"layers are computed in {precision} (autocast), norms in float32 and sums in float64: a unit is clipped by "
        "the norm of what is summed"
    )


def planned_epsilon(config: RunConfig) -> float | None:
    """Return the epsilon of the whole plan. It bounds what the run spends, because the budget is a hard limit."""
    if not config.privacy.enabled or config.privacy.delta is None:
        return None
    return mechanism_guarantee(config.mechanism, delta=config.privacy.delta, extra=extra_charges(config)).epsilon


def views_text(config: RunConfig) -> str:
    """How images are augmented."""
    if mirrored(config.views) and config.cache_features != "off":
        return "each image and its mirror image, averaged before clipping, wherever features are cached"
    return f"{config.views.count} per image, averaged before clipping; the transformations are in the configuration"


def units_come_from(config: RunConfig, splits: RunSplits) -> str:
    """Where it is defined which rows belong to one unit."""
    data, alone = config.data, "each image is a unit of its own"
    if splits.train.owners is None:
        return alone
    if splits.train.owners_from is not None:
        owners = splits.train.owners_from
    elif data.unit_csv is not None:
        owners = f"a CSV of file and unit{f', column {data.unit_column}' if data.unit_column else ''}"
    elif data.unit_column is not None:
        owners = f"the column {data.unit_column}"
    elif data.unit_folder_level is not None:
        owners = f"folder level {data.unit_folder_level}"
    elif data.unit_pattern is not None:
        owners = f"the pattern {data.unit_pattern} in a file's name"
    else:
        owners = "the name of each volume"
    return owners if data.units != "rows" else f"{alone}, also where one owner has several (owners: {owners})"


def rows_of_owners(config: RunConfig) -> list[tuple[str, str]]:
    """How many rows an owner may have, where that is bounded."""
    most = config.privacy.most_rows_per_owner
    if most is None:
        return []
    return [("rows of an owner", f"at most {most}, the first in the order of the data; the others are not trained on")]


def test_split(config: RunConfig, splits: RunSplits) -> str:
    """Where the test images come from."""
    name = Path(config.data.test or config.data.source).name
    if splits.held_out:
        return f"{config.data.holdout_fraction:.0%} of the units, {HELD_OUT}"
    return f"{name}, {OWN_TEST}" if own_test_images(config, splits) else f"{name}, declared public"


def own_test_images(config: RunConfig, splits: RunSplits) -> bool:
    """Whether the test images are the data holder's own: held out, or a part of a source that is not a public one."""
    public = config.data.test is not None or config.data.source in dataset_names() or config.data.public_data
    return splits.held_out or not public
