"""How long idle OpenMP threads spin before they sleep: a bound that keeps a busy machine from stalling.

A step has thousands of short parallel regions, with a barrier after each. By default libgomp, the OpenMP runtime that
torch's Linux wheels bring and that the kernels share, lets a waiting thread spin for milliseconds. On idle cores that
is right. Where other processes need the cores, the spinning thread holds the core that the thread it waits for needs.
A thread that never spins has the opposite problem: every region pays for waking it.

The runtime reads its settings once, when torch is imported. This module therefore imports nothing of torch.
"""

from __future__ import annotations

import os
import sys
from typing import Final

VARIABLES: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Settings of a user about waiting threads; where one is set, nothing is changed."""
SPIN_COUNT: Final = 20_000
"""Turns of libgomp's waiting loop: a fraction of a millisecond, instead of 300,000 turns."""
BLOCK_TIME: Final = 1
"""Milliseconds for runtimes of Intel and LLVM, instead of 200; libgomp ignores it."""


_BOUNDS: Final = {"GOMP_SPINCOUNT": str(SPIN_COUNT), "KMP_BLOCKTIME": str(BLOCK_TIME)}


def bound_spinning() -> bool:
    """Let idle OpenMP threads spin for less than a millisecond, in this process and those that it starts.

    ``import dpvision`` calls it. A program that imports torch first keeps torch's own setting. No result depends on it,
    only the time that a step takes beside other work.

    Returns:
        Whether the bound is in force. False if the user has set one of ``VARIABLES`` to something else, or if torch is
        imported already: its OpenMP runtime has read its settings by then.
    """
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if "torch" in sys.modules or given not in ({}, _BOUNDS):
        return False
    os.environ.update(_BOUNDS)
    return True


def is_bounded() -> bool:
    """Return whether the settings of this process are those of ``bound_spinning``."""
    return all(os.environ.get(name) == value for name, value in _BOUNDS.items())
