"""Keep freed memory in the process for the next step, instead of asking the system for new pages.

A new page costs more than the work on it: a small network's step takes a quarter longer without this. Only glibc has
these settings; elsewhere the functions do nothing.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final, final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 1 << 29
_LARGEST_KEPT_BLOCK: Final = 1 << 25  # the most that glibc allows
_WORTH_GIVING_BACK: Final = 1 << 28


def keep_freed_memory() -> bool:
    """Let this process keep half a gibibyte of freed memory, for the steps that follow.

    Returns:
        Whether the C library has the setting.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = ((_TRIM_THRESHOLD, _KEPT_BYTES), (_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK))
    return all(libc.mallopt(name, value) == 1 for name, value in settings)


def give_back_freed_memory() -> None:
    """Return freed memory to the system: after work that is done once and needs more than the work after it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@final
class GivingBack:
    """Returns freed memory to the system from time to time, while tensors replace others.

    A new tensor does not always get the memory of the one it replaces: the C library prefers holes that fit better, and
    both stay allocated. Small models never reach the number of bytes at which it pays.
    """

    def __init__(self) -> None:
        self._bytes = 0

    def replaced(self, num_bytes: int) -> None:
        """Count bytes of a new tensor that replaces another; return memory after every 256 MiB."""
        self._bytes += num_bytes
        if self._bytes >= _WORTH_GIVING_BACK:
            give_back_freed_memory()
            self._bytes = 0
