"""The wording of what the engine refuses: the problem, where, and the remedy, in one line."""

from __future__ import annotations

from collections.abc import Iterable

LOSS = "loss_fn"
BY_ROW_LOSS = "Return one loss per row, each from its own row alone: Dice of each picture, not summed over the batch."


def movement(names: Iterable[str]) -> str:
    """The message for buffers that a step moves."""
    return (
        f"a forward pass moves {listed(names)}: what it stores of the private rows would be released without noise. "
        "Use GroupNorm instead of BatchNorm, or put the module into evaluation mode."
    )


def mixture(place: str) -> str:
    """The message for a place that mixes units."""
    if place == LOSS:
        return (
            "loss_fn mixes units: one unit's loss depends on another unit's row, so clipping bounds nothing. "
            f"{BY_ROW_LOSS}"
        )
    return (
        f"{place} mixes units: one unit's output depends on another unit's input, so clipping bounds nothing. "
        "Replace it by a module that treats each row by itself, such as GroupNorm for BatchNorm."
    )


def wrong_gradients(names: list[str], place: str | None) -> str:
    """The message for gradients that are not those of a unit by itself."""
    cause = f"{place} mixes units" if place else "units mix, or the gradient depends on the size of the batch"
    return (
        f"per-unit gradients of {listed(names)} differ from those of a unit by itself: {cause}. "
        "Replace what mixes by a module that treats each row by itself, such as GroupNorm."
    )


def not_alone(place: str | None, error: Exception) -> str:
    """The message for a model that can't be run on a single unit."""
    reason = " ".join(str(error).split()).rstrip(".")
    return (
        f"{place or 'the model'} can't take one unit by itself, so units depend on each other ({reason}). "
        "Replace it by a module that treats each row by itself, such as GroupNorm."
    )


def listed(names: Iterable[str]) -> str:
    """Some names for a message: all of them if few."""
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
