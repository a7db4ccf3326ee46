"""Train image models on private images, with a differential-privacy guarantee that anyone can check.

The names below are the public interface; everything else may move. Each is imported on first use, so that
``import dpvision`` is fast and does not import torch. The packages (``dpvision.accounting``, ``dpvision.models``, …)
are attributes too, and list their own public names.

Imported before torch, dpvision bounds how long idle threads spin (``dpvision.openmp``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpvision.openmp import bound_spinning

if TYPE_CHECKING:
    from dpvision.config import RunConfig
    from dpvision.exports.formats import export
    from dpvision.gradients.clipped_sum import clipped_sum
    from dpvision.gradients.plan import check_model
    from dpvision.inference.load import load_model as load
    from dpvision.privacy.ledger import Ledger
    from dpvision.privacy.mechanism import Guarantee, Mechanism
    from dpvision.privacy.private_step import Privatizer
    from dpvision.privacy.randomness import Keys
    from dpvision.privacy.sampling import PoissonSampler
    from dpvision.privacy.sharded_step import ShardedOptimizer
    from dpvision.privacy.values import ClippedSum, PrivateGrad
    from dpvision.release.verify import verify
    from dpvision.training import resume_training, train
    from dpvision.training.private_run import PrivateRun, count_units
    from dpvision.tune import SearchSettings, tune

bound_spinning()  # without effect if torch is imported already, or if the user has decided
__version__ = "0.1.0"
__all__ = [
    "ClippedSum",
    "Guarantee",
    "Keys",
    "Ledger",
    "Mechanism",
    "PoissonSampler",
    "PrivateGrad",
    "PrivateRun",
    "Privatizer",
    "RunConfig",
    "SearchSettings",
    "ShardedOptimizer",
    "__version__",
    "check_model",
    "clipped_sum",
    "count_units",
    "export",
    "load",
    "resume_training",
    "train",
    "tune",
    "verify",
]

_HOMES = {
    "ClippedSum": "privacy.values",
    "Guarantee": "privacy.mechanism",
    "Keys": "privacy.randomness",
    "Ledger": "privacy.ledger",
    "Mechanism": "privacy.mechanism",
    "PoissonSampler": "privacy.sampling",
    "PrivateGrad": "privacy.values",
    "PrivateRun": "training.private_run",
    "Privatizer": "privacy.private_step",
    "RunConfig": "config",
    "SearchSettings": "tune.search_plan",
    "ShardedOptimizer": "privacy.sharded_step",
    "check_model": "gradients.plan",
    "clipped_sum": "gradients.clipped_sum",
    "count_units": "training.private_run",
    "export": "exports.formats",
    "load": "inference.load:load_model",
    "load_model": "inference.load",  # the former public name: still works
    "resume_training": "training",
    "train": "training",
    "verify": "release.verify",
}
_PACKAGES = (
    "accounting",
    "analyze",
    "audit",
    "compat",
    "data",
    "exports",
    "gradients",
    "inference",
    "models",
    "papers",
    "privacy",
    "release",
    "training",
    "tune",
)


def __getattr__(name: str) -> Any:
    """Import a public name or a package on first use."""
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(":")
        return getattr(importlib.import_module(f"dpvision.{module}"), attribute or name)
    if name in _PACKAGES:
        return importlib.import_module(f"dpvision.{name}")
    raise AttributeError(f"module 'dpvision' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names and packages, also those that are not imported yet."""
    return sorted([*__all__, *_PACKAGES])
