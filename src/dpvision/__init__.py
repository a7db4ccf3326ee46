"""Train image models on private pictures, with a differential-privacy guarantee that anyone can check."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpvision.config import RunConfig
    from dpvision.gradients.clipped_sum import clipped_sum
    from dpvision.privacy.mechanism import Guarantee, Mechanism
    from dpvision.privacy.values import ClippedSum
    from dpvision.training import train

__version__ = "0.1.0"
__all__ = ["ClippedSum", "Guarantee", "Mechanism", "RunConfig", "__version__", "clipped_sum", "train"]

_HOMES = {
    "ClippedSum": "dpvision.privacy.values",
    "Guarantee": "dpvision.privacy.mechanism",
    "Mechanism": "dpvision.privacy.mechanism",
    "RunConfig": "dpvision.config",
    "clipped_sum": "dpvision.gradients.clipped_sum",
    "train": "dpvision.training",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that ``import dpvision`` stays fast and free of torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in {"accounting", "data", "gradients", "models"}:
        return importlib.import_module(f"dpvision.{name}")
    raise AttributeError(f"module 'dpvision' has no attribute {name!r}")
