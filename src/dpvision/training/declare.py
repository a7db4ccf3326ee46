"""What a run takes as public, and which looks at data it does not charge: said in the ledger and the certificate."""

from __future__ import annotations

from dpvision.config import RunConfig
from dpvision.training.prepare import Pictures

NOT_COVERED = (
    "The choice of hyper-parameters, architecture and clip norm, and any earlier run on the same data: each further "
    "run composes with this one.",
)


def declarations(config: RunConfig, pictures: Pictures) -> list[tuple[str, str]]:
    """Pairs of (what, how) for everything that is declared instead of charged."""
    found = [
        ("num_units, class names and picture shape", "declared public by whoever configured the run"),
        ("test split", test_split(config, pictures)),
    ]
    if config.data.normalisation == "published":
        found.append(("normalisation constants", f"published for {config.data.source}"))
    elif config.data.normalisation in {"fixed", "none"}:
        found.append(("normalisation constants", "fixed numbers that no data chose"))
    if config.schedule.kind == "plateau":
        found.append(("learning-rate schedule", "follows the loss on the test split, which is declared public"))
    return found


def test_split(config: RunConfig, pictures: Pictures) -> str:
    """Where the test pictures come from."""
    if pictures.held_out:
        share = config.data.holdout_fraction
        return (
            f"{share:.0%} of the units, held out of training by a keyed draw and declared public: this run's epsilon "
            "does not protect them"
        )
    return f"{config.data.test or config.data.source}, declared public"
