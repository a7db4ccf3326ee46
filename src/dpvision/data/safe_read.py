"""The boundary against hostile files: every reader of this package opens and unpacks files through it.

It enforces three rules. A source is a regular file, so that no pipe or device blocks the program. No memory is
allocated for more bytes than the file can hold, so that a header that lies and a decompression bomb are refused before
they do harm. Nothing is unpickled. A reader raises ``BadFile`` with the reason; ``reading`` turns it into the one-line
``DataError`` that a user sees.
"""

from __future__ import annotations

import gzip
import math
import os
import stat
import sys
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dpvision.errors import BadFile, DataError, require_memory, shown

MAX_DEFLATE_RATIO = 1100
"""Deflate compresses by 1 : 1032 at most, so a header that promises more than this lies."""
MAX_LARGE_RATIO, LARGE_ARRAY = 256, 2**28
"""Arrays of more bytes than this must not be compressed by more than this: masks hardly are, but zeros are."""
_CHUNK = 2**24
_MAX_DIMENSIONS = 32
_ZIP_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_BAD_HEADER = (ValueError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError, TypeError, OverflowError)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: the file; symbolic links are followed.

    Returns:
        The open file, which the caller closes.

    Raises:
        DataError: if the path is a pipe or a device. It is not waited for.
        OSError: if the system refuses the path.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DataError(f"{shown(path)} is a pipe or a device, not a file.")
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def open_unpacked(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file and unpack it if its name ends in ``.gz`` or ``.tgz``.

    Args:
        path: the file.

    Yields:
        The unpacked stream, and an upper bound on the number of bytes in it.

    Raises:
        BadFile: if the file can't be read or unpacked, also when that happens inside the ``with`` block.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if path.suffix.lower() not in (".gz", ".tgz"):
                yield file, size
                return
            with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
                yield unpacked, size * MAX_DEFLATE_RATIO  # pyright: ignore[reportReturnType]
    except (OSError, EOFError, zlib.error) as error:
        raise BadFile(f"can't be read: {shown(error)}") from error
    except MemoryError as error:
        raise BadFile("does not fit into memory") from error


def read_exactly(file: BinaryIO, count: int) -> bytearray:
    """Read ``count`` bytes in chunks, or raise ``BadFile`` if the file ends before."""
    found = bytearray()
    while len(found) < count:
        piece = file.read(min(_CHUNK, count - len(found)))
        if not piece:
            raise BadFile(f"ends too early: {count} bytes were promised, {len(found)} are there")
        found += piece
    return found


@contextmanager
def reading(source: object) -> Iterator[None]:
    """Turn what goes wrong with ``source`` inside the ``with`` block into a one-line ``DataError``."""
    try:
        yield
    except BadFile as error:
        raise DataError(f"{shown(source)}: {error}.") from error
    except OSError as error:
        raise DataError(f"{shown(source)} can't be read: {shown(error.strerror or error)}.") from error
    except MemoryError as error:
        raise DataError(f"{shown(source)} does not fit into memory. Use smaller or fewer images.") from error


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Read one array of an .npz file.

    Args:
        archive: the open file.
        member: which of its members; its stated size is checked against its compressed size.

    Returns:
        The array.

    Raises:
        DataError: if the member is not a plain array of the size that it states.
    """
    where = f"{shown(archive.filename or 'the file')}/{shown(member.filename)}"
    most = member.compress_size * MAX_DEFLATE_RATIO + 1024
    if member.compress_type not in _ZIP_COMPRESSIONS or member.file_size > most:
        raise DataError(f"{where} is refused: its compression is not what .npz files use.")
    if member.file_size > max(LARGE_ARRAY, member.compress_size * MAX_LARGE_RATIO):
        raise DataError(
            f"{where} is refused: {member.compress_size} bytes would become {member.file_size}. If that is meant, save "
            "the file without compression (numpy.savez)."
        )
    with archive.open(member) as file:
        return read_npy(file, size=member.file_size, where=where)


def read_npy(file: IO[bytes], *, size: int, where: str) -> NDArray[Any]:
    """Read an array of numbers or texts in .npy format.

    Args:
        file: an open, seekable file at its start.
        size: its length in bytes.
        where: its name, for messages.

    Returns:
        The array.

    Raises:
        DataError: if it is not such an array.

    Guarantee: nothing is unpickled, and no more than ``size`` bytes are allocated: the header must agree with the
    length to the byte before numpy reads the values.
    """
    shape, dtype, _ = _checked_header(file, size=size, where=where)
    promised = math.prod(shape) * dtype.itemsize
    require_memory(promised, where)
    file.seek(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers that Python 2 wrote
            values: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{where} ends too early: {promised} bytes were promised.") from error
    if dtype.kind == "U" and not _are_characters(values):
        raise DataError(f"{where} is refused: it holds texts with characters that don't exist.")
    return values


def map_npy(path: Path) -> NDArray[Any]:
    """Map an array of numbers in .npy format into memory, read-only.

    Args:
        path: the file. It must not become shorter while it is mapped: the system then ends the program.

    Returns:
        The array; its pages are read when they are used.

    Raises:
        DataError: if the file is missing or not such an array; its header must agree with its length to the byte.
    """
    try:
        with open_regular(path) as file:
            shape, dtype, fortran = _checked_header(file, size=os.fstat(file.fileno()).st_size, where=shown(path))
            if fortran or 0 in shape or not shape:
                raise DataError(f"{shown(path)} is refused: only arrays in C order that are not empty are mapped.")
            return np.memmap(file, dtype=dtype, mode="r", offset=file.tell(), shape=shape)
    except OSError as error:
        raise DataError(f"{shown(path)} can't be read: {shown(error.strerror or error)}.") from error


def _checked_header(file: IO[bytes], *, size: int, where: str) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Read shape, type and order, and compare them with the length of the file; nothing is allocated."""
    shape, dtype, fortran = _header(file, where)
    if dtype.hasobject:
        raise DataError(f"{where} is refused: it holds pickled objects. Save plain numbers or texts.")
    whole = all(type(side) is int and 0 <= side < 2**63 for side in shape)  # the header may say True
    if dtype.itemsize == 0 or dtype.subdtype is not None or len(shape) > _MAX_DIMENSIONS or not whole:
        raise DataError(f"{where} is refused: {dtype} of shape {shape} is no array of numbers or texts.")
    promised = math.prod(shape) * dtype.itemsize
    if promised != size - file.tell():
        raise DataError(f"{where} is refused: its header promises {shape} {dtype}, its size says otherwise.")
    return shape, dtype, fortran


def _are_characters(texts: NDArray[np.str_]) -> bool:
    """Return whether all numbers in an array of texts are characters of Unicode; numpy does not check it."""
    codes = np.ascontiguousarray(texts.reshape(-1), texts.dtype.newbyteorder("=")).view(np.uint32)
    return not bool(((codes > sys.maxunicode) | ((codes >= 0xD800) & (codes <= 0xDFFF))).any())


def _header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Read the shape, the type and whether the order is Fortran's from the header of an .npy file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers that Python 2 wrote
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, fortran, dtype = read(file)
            return shape, dtype, fortran
    except _BAD_HEADER as error:
        raise DataError(f"{where} is refused: it has no header of an array ({type(error).__name__}).") from error
