"""What config.json says against what the ledger was opened for, and what it charges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpvision.certificate import (
    COUNTED_UNITS,
    PIXEL_STATISTICS,
    TRAINING_DATA,
    history_digest,
    noted_history,
    required_declared,
)
from dpvision.checks import TamperError, brief
from dpvision.ledger import TRAINING, Entry, charges_of
from dpvision.runfolder import CONFIG
from dpvision.verify.findings import Findings, Place, read_object

# Facts of a ledger's header that are no settings: its own format, and what the run drew.
_NO_SETTINGS = frozenset({"format", "run_id", "hand_seeded"})
_OF_DATA = frozenset({"units"})


def check_config(place: Place, entries: tuple[Entry, ...], findings: Findings) -> None:
    """Every setting that the ledger holds too, and what the ledger noted of the data and the first weights."""
    path = place.release / CONFIG
    if not path.exists():
        return  # named already where it must not be missing
    config = findings.attempt(lambda: read_object(path))
    if config is None:
        return
    with findings.noted():
        privacy, data = _section(config, "privacy", path), _section(config, "data", path)
        _compare_header(privacy, data, entries[0].payload, findings)
        _compare_charges(privacy, data, entries, findings)
        names = [how for what, how in required_declared(entries) if what == TRAINING_DATA]
        source = data.get("source")
        findings.require(not names or source in names, f"config: the data are {brief(source)}, the ledger's {names}.")
    with findings.noted():
        same = history_digest(config.get("transfer")) == noted_history(entries)
        findings.require(same, f"{path} tells another history of the first weights than the ledger noted.")


def _section(config: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise TamperError(f"{path} has no section {name}.")
    return section


def _compare_header(privacy: dict[str, Any], data: dict[str, Any], header: dict[str, Any], findings: Findings) -> None:
    private = header["delta"] is not None
    enabled = privacy.get("enabled")
    findings.require(enabled is private, f"config: privacy.enabled is {brief(enabled)}, the ledger's {private}.")
    for name, known in header.items():
        # Without privacy the header leaves the mechanism out, while its settings may have defaults.
        if name in _NO_SETTINGS or (known is None and not private):
            continue
        section, where = (data, "data") if name in _OF_DATA else (privacy, "privacy")
        claimed = section.get(name)
        same = claimed == known and isinstance(claimed, bool) == isinstance(known, bool)
        findings.require(same, f"config: {where}.{name} is {brief(claimed)}, the ledger's {known}.")


def _compare_charges(
    privacy: dict[str, Any], data: dict[str, Any], entries: tuple[Entry, ...], findings: Findings
) -> None:
    """What was computed from the data besides the training steps is what was configured, at its noise, once."""
    configured: dict[str, Any] = {}
    if entries[0].payload["delta"] is not None:
        if privacy.get("count_noise_multiplier") is not None:
            configured[COUNTED_UNITS] = privacy["count_noise_multiplier"]
        if data.get("normalisation") == "released":
            configured[PIXEL_STATISTICS] = data.get("statistics_noise_multiplier")
    charged = [(event, count) for event, count in charges_of(entries) if event.purpose != TRAINING]
    for event, count in charged:
        noise = configured.get(event.purpose)
        same = noise == event.noise_multiplier and (event.sample_rate, count) == (1.0, 1)
        text = f"{count} × {event.purpose} at noise {event.noise_multiplier:g}"
        findings.require(same, f"config: its noise for this is {brief(noise)}, the ledger charges {text}.")
    for purpose in configured.keys() - {event.purpose for event, _ in charged}:
        findings.require(False, f"config: it has noise for the {purpose}, and the ledger does not charge that.")
