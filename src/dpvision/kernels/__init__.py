"""Optional C++ kernels for the CPU, compiled on first use.

Every kernel has an equivalent in plain PyTorch or numpy, and its callers use that where there is no compiler or where
a tensor does not fit. ``compile`` builds and loads the library; ``ops`` holds the table of C functions and the class of
all kernels; ``channels_last`` is the memory layout of images; ``winograd``, ``conv_gradients``, ``norm_act``,
``unit_sums``, ``scatter`` and ``normals`` are the kernels by subject; ``memory`` sets up the C library's allocator.
"""

from __future__ import annotations

from dpvision.kernels.compile import build as _build
from dpvision.kernels.compile import switched_off as switched_off

__all__ = ["available", "identity", "reason", "switched_off"]


def available() -> bool:
    """Return whether the kernels can be used here. The first call on a machine compiles them (half a minute)."""
    return _build().library is not None


def identity() -> str:
    """Name the code that runs: equal identities mean the same kernels; "plain" means none."""
    return _build().identity


def reason() -> str:
    """Say in one line why there are no kernels; empty if there are."""
    return _build().reason
