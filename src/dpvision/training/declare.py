"""What a run takes as public, and which looks at data it does not charge: said in the ledger and the certificate."""

from __future__ import annotations

from pathlib import Path

from dpvision.accounting import mechanism_guarantee
from dpvision.config import RunConfig, ViewsConfig
from dpvision.training.ancestry import transfer_declarations
from dpvision.training.phases import mirrored
from dpvision.training.prepare import Pictures, extra_charges
from dpvision.transfer import KNOWN_WEIGHTS


def declarations(config: RunConfig, pictures: Pictures) -> list[tuple[str, str]]:
    """Pairs of (what, how) for everything that is declared instead of charged."""
    found = [("privacy units", units_come_from(config)), ("test split", test_split(config, pictures))]
    if config.data.normalisation == "published":
        of_weights = config.transfer is not None and config.transfer.weights in KNOWN_WEIGHTS
        what = config.transfer.weights if config.transfer is not None and of_weights else config.data.source
        found.append(("normalisation constants", f"published for {what}"))
    elif config.data.normalisation in {"fixed", "none"}:
        found.append(("normalisation constants", "fixed numbers that no data chose"))
    constants = None if config.model is None else config.model.options.get("constants")
    if constants is not None:
        found.append(("feature constants", f"computed from {constants}, which is declared public"))
    if config.schedule.kind == "plateau":
        found.append(("learning-rate schedule", "follows the loss on the test split, which is declared public"))
    if config.views != ViewsConfig():
        found.append(("views of a picture", views_text(config)))
    return [*found, *transfer_declarations(config, planned_epsilon=planned_epsilon(config))]


def planned_epsilon(config: RunConfig) -> float | None:
    """What the whole plan spends: a bound on what the run spends, because the budget is a wall."""
    if not config.privacy.enabled or config.privacy.delta is None:
        return None
    return mechanism_guarantee(config.mechanism, delta=config.privacy.delta, extra=extra_charges(config)).epsilon


def views_text(config: RunConfig) -> str:
    """How pictures are varied."""
    if mirrored(config.views) and config.cache_features != "off":
        return "each picture and its mirror image, averaged before the clip, wherever features are kept"
    return f"{config.views.count} a picture, averaged before the clip; how they vary is in the configuration"


def not_covered(pictures: Pictures) -> tuple[str, ...]:
    """What this run leaves unprotected besides what every run does."""
    if pictures.held_out:
        return ("The units held out for testing: accuracy on them is published without noise.",)
    return ()


def units_come_from(config: RunConfig) -> str:
    """Who said which rows belong together."""
    data = config.data
    if data.unit_csv is not None:
        return f"a CSV of file and unit{f', column {data.unit_column}' if data.unit_column else ''}"
    if data.unit_column is not None:
        return f"the column {data.unit_column}"
    if data.unit_folder_level is not None:
        return f"folder level {data.unit_folder_level}"
    return "each picture is a unit of its own"


def test_split(config: RunConfig, pictures: Pictures) -> str:
    """Where the test pictures come from."""
    if pictures.held_out:
        share = config.data.holdout_fraction
        return (
            f"{share:.0%} of the units, held out of training by a keyed draw and declared public: this run's epsilon "
            "does not protect them"
        )
    return f"{Path(config.data.test or config.data.source).name}, declared public"
