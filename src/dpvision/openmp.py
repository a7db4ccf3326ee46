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


def bound_spinning() -> bool:
    """Let idle OpenMP threads spin for less than a millisecond, in this process and those that it starts.

    The ``dpvision`` command calls it. In a program of your own, call it before torch is imported. No result depends on
    it, only the time that a step takes beside other work.

    Returns:
        Whether it was set. False if the user has set one of ``VARIABLES``, or if torch is imported already: its OpenMP
        runtime has read its settings by then.
    """
    if "torch" in sys.modules or any(name in os.environ for name in VARIABLES):
        return False
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    os.environ["KMP_BLOCKTIME"] = str(BLOCK_TIME)
    return True
