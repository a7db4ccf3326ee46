"""Memory that a step frees is kept for the next step, instead of coming anew from the system, page by page.

A fresh page costs more than working on it: a small network's step takes a quarter longer without this.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final, final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 1 << 29
_LARGEST_KEPT_BLOCK: Final = 1 << 25  # what glibc allows at most
_WORTH_GIVING_BACK: Final = 1 << 28


def keep_freed_memory() -> bool:
    """Let this process keep half a gibibyte of freed memory: for whoever goes on to take steps.

    Returns whether the C library knows the setting: glibc does.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = ((_TRIM_THRESHOLD, _KEPT_BYTES), (_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK))
    return all(libc.mallopt(name, value) == 1 for name, value in settings)


def give_back_freed_memory() -> None:
    """Return what was freed to the system: after work that is done once and needs more than what follows it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@final
class GivingBack:
    """Returns freed memory to the system now and then, while tensors are made that take the place of others.

    What one tensor leaves is not what the next one gets: the C library prefers holes that fit better, and both count.
    Small models never come to the point where it pays.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def replaced(self, num_bytes: int) -> None:
        """So many bytes were made, and others freed."""
        self._bytes += num_bytes
        if self._bytes >= _WORTH_GIVING_BACK:
            give_back_freed_memory()
            self._bytes = 0
