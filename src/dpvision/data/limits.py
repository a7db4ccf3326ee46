"""What is asked of a file before it is believed: that it is a file, and that what it promises fits into the machine."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dpvision.checks import DataError
from dpvision.data.wording import shown


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. A pipe or a device is refused instead of waited for."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DataError(f"{shown(path)} is a pipe or a device, not a file.")
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def require_memory(size: int, what: object) -> None:
    """Refuse what would not fit into this machine: the system may end the whole process instead of saying no."""
    if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise DataError(f"{shown(what)} needs {size} bytes, more than this machine has. Use smaller or fewer pictures.")


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Word what the system says about a path, or about too little memory, as one line about ``source``."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{shown(source)} can't be read: {shown(error.strerror or error)}.") from error
    except MemoryError as error:
        raise DataError(f"{shown(source)} does not fit into memory. Use smaller or fewer pictures.") from error
