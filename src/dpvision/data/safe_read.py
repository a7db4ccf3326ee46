"""What is asked of a file before it is believed: that it is a file, and that what it promises fits into the machine.

One array of numbers or texts in .npy form, from bytes that may say anything.
"""

from __future__ import annotations

import math
import os
import stat
import tokenize
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpvision.errors import DataError, shown


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
        raise DataError(f"{shown(what)} needs {size} bytes, more than this machine has. Use smaller or fewer images.")


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Word what the system says about a path, or about too little memory, as one line about ``source``."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{shown(source)} can't be read: {shown(error.strerror or error)}.") from error
    except MemoryError as error:
        raise DataError(f"{shown(source)} does not fit into memory. Use smaller or fewer images.") from error


_LARGEST_CHARACTER = 0x10FFFF
_MAX_DIMENSIONS = 32


def read_npy(file: IO[bytes], *, size: int, where: str) -> NDArray[Any]:
    """The array in the next ``size`` bytes of ``file``.

    Guarantee: nothing is unpickled, and no more memory is taken than ``size``: the header must agree to the byte.
    """
    shape, fortran, dtype = _header(file, where)
    if dtype.hasobject:
        raise DataError(f"{where} is refused: it holds pickled objects. Save plain numbers or texts.")
    whole = all(type(side) is int and side >= 0 for side in shape)  # the header may say True
    if dtype.itemsize == 0 or dtype.subdtype is not None or len(shape) > _MAX_DIMENSIONS or not whole:
        raise DataError(f"{where} is refused: {dtype} of shape {shape} is no array of numbers or texts.")
    promised = math.prod(shape) * dtype.itemsize
    if promised != size - file.tell():
        raise DataError(f"{where} is refused: its header promises {shape} {dtype}, its size says otherwise.")
    require_memory(promised, where)
    content = bytearray(promised)
    view, done = memoryview(content), 0
    while done < promised and (piece := file.read(min(promised - done, 1 << 24))):
        view[done : done + len(piece)] = piece
        done += len(piece)
    if done < promised:
        raise DataError(f"{where} ends too early: {promised} bytes were promised, {done} are there.")
    values = np.frombuffer(content, dtype=dtype).reshape(shape, order="F" if fortran else "C")
    if dtype.kind == "U" and not _are_texts(np.frombuffer(content, np.dtype("u4").newbyteorder(dtype.byteorder))):
        raise DataError(f"{where} is refused: it holds texts with characters that don't exist.")
    return values


def _header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers as Python 2 wrote them
            version = npy.read_magic(file)
            if version == (1, 0):
                return npy.read_array_header_1_0(file)
            return npy.read_array_header_2_0(file)
    except (
        ValueError,
        SyntaxError,
        tokenize.TokenError,
        RecursionError,
        MemoryError,
        TypeError,
        OverflowError,
    ) as error:
        raise DataError(f"{where} is refused: it has no header of an array ({type(error).__name__}).") from error


def _are_texts(characters: NDArray[np.uint32]) -> bool:
    """Whether these are characters of Unicode, and no halves of one."""
    halves = (characters >= 0xD800) & (characters <= 0xDFFF)
    return not bool(halves.any()) and int(characters.max(initial=0)) <= _LARGEST_CHARACTER
