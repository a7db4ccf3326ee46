"""Optional CPU kernels in C++, compiled on first use; whoever calls them has a plain PyTorch way to the same result."""

from __future__ import annotations

from dpvision.kernels.compile import build as _build
from dpvision.kernels.compile import switched_off as switched_off

__all__ = ["available", "identity", "reason", "switched_off"]


def available() -> bool:
    """Whether the kernels can be used here. Asked for the first time on a machine, this compiles them."""
    return _build().library is not None


def identity() -> str:
    """Names the very code that runs: two runs with the same identity use the same kernels, or none."""
    return _build().identity


def reason() -> str:
    """Why there are no kernels, in one line; empty if there are."""
    return _build().reason
