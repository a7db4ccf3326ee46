"""Hyper-parameter search that counts its own cost, on Optuna (extra ``tune``).

``tune`` searches and releases the winner with the epsilon of the whole search; ``resume_search`` continues a search, or
joins one that other processes work on. Names are imported on first use: checking a search needs no torch.

``dpvision.tune`` is this package and, since users write ``dpvision.tune(...)`` as they write ``dpvision.train(...)``,
it can be called: that is ``dpvision.tune.tune``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpvision.tune.search import SearchEnded, SearchResult, resume_search, tune
    from dpvision.tune.search_plan import SearchLimits, SearchSettings
    from dpvision.tune.space import SearchSpace, parse_space, read_space
    from dpvision.tune.trial_table import TrialRow

__all__ = [
    "SearchEnded",
    "SearchLimits",
    "SearchResult",
    "SearchSettings",
    "SearchSpace",
    "TrialRow",
    "parse_space",
    "read_space",
    "resume_search",
    "tune",
]
_HOMES = {
    "SearchEnded": "search",
    "SearchLimits": "search_plan",
    "SearchResult": "search",
    "SearchSettings": "search_plan",
    "SearchSpace": "space",
    "TrialRow": "trial_table",
    "parse_space": "space",
    "read_space": "space",
    "resume_search": "search",
    "tune": "search",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"dpvision.tune.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'dpvision.tune' has no attribute {name!r}")


class _CallablePackage(ModuleType):
    """This package, which is called as ``tune``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return __getattr__("tune")(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
