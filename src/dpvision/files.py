"""Files that are either whole or absent: written beside, flushed to disk, then renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpvision.checks import DPVisionError

_REMEDIES = {
    errno.ENOSPC: "Free some space and try again.",
    errno.EDQUOT: "Free some space and try again.",
    errno.EFBIG: "Raise the limit on the size of files and try again.",
    errno.EIO: "The disk may be failing: copy what is there to another one and try again.",
    errno.EROFS: "Choose a folder that can be written.",
    errno.EACCES: "Check who may read and write there.",
    errno.EPERM: "Check who may read and write there.",
}


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn an operating-system error into one line that says what could not be done, why, and what helps."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise DPVisionError(f"can't {doing}: {reason}. {remedy}".rstrip()) from error


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write ``content`` so that a crash leaves the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def synced(path: Path) -> Iterator[int]:
    """A descriptor for appending; what the block did to the file is on disk afterwards."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make renames and new files in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
