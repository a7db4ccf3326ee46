"""Files of a run: written atomically, read with limits, and their formats (JSON, safetensors, hashes).

A file is either whole or absent: it is written beside its place, flushed to disk, then renamed. Whatever bytes a file
holds, reading it ends in a value or in an error of dpvision. Torch is imported only where tensors are made.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dpvision.errors import ArgumentError, DataError, DPVisionError, TamperError, brief, shown

_START_OF_A_PAGE = 512
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
    """Turn an ``OSError`` of the ``with`` block into a ``DPVisionError``: what could not be done, why, and what
    helps.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise DPVisionError(f"can't {doing}: {reason}. {remedy}".rstrip()) from error


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace a file by ``content``, so that a crash leaves the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode=mode) as file:
        file.write(content)


def write_page(path: Path, content: bytes) -> None:
    """Write a page of HTML, in the place of an older one at most.

    Raises:
        ArgumentError: the path is a file of another kind, such as an image.
        DPVisionError: it can't be written.
    """
    with disk_errors(f"write {shown(path)}"):
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(_START_OF_A_PAGE).lstrip().lower()
            if start and not start.startswith((b"<!doctype html", b"<html", b"<!--")):
                raise ArgumentError(f"{shown(path)} is no page of HTML, and is not replaced. Choose another --output.")
        write_atomically(path, content)


@contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the place of ``path`` at the end of the ``with`` block.

    Args:
        path: the file to replace or to make, in a folder that exists.
        mode: its permissions.

    Raises:
        ArgumentError: the path is a device, a pipe or a socket.

    Guarantee: after a crash or an exception ``path`` is what it was before, and no temporary file stays after an
    exception. After the block the new file survives a power cut.
    """
    kept = path.exists() and not path.is_file() and not path.is_dir()
    if kept or path.parent.resolve() == Path("/dev"):
        raise ArgumentError(f"{shown(path)} is a device or a pipe, which a file would replace. Choose another path.")
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
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
    """Open a file for appending and yield its descriptor; what the block writes is on disk afterwards."""
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
    """The hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if TYPE_CHECKING:
    from torch import Tensor

LARGEST_JSON = 64 * 2**20
_HEX_DIGEST = re.compile("[0-9a-f]{64}")


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Write JSON as every JSON file of a run is written: order kept, numbers finite."""
    try:
        return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"not JSON: {error}.") from error


def parse_object(content: bytes | str, *, name: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        content: any bytes or text.
        name: what it is, for the message.

    Raises:
        TamperError: if it is not a JSON object.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TamperError(f"{name} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise TamperError(f"{name} must hold a JSON object.")
    return values


def read_file(path: Path, *, limit: int | None = LARGEST_JSON) -> bytes:
    """Read a regular file.

    Args:
        path: the file; a link or a pipe is refused.
        limit: most bytes; None allows any size.

    Raises:
        DataError: if it is not a regular file or too large.
        DPVisionError: if the system can't read it.
    """
    with disk_errors(f"read {path}"):
        _require_ordinary(path)
        if limit is not None and path.stat().st_size > limit:
            raise DataError(f"{path} must have at most {limit} bytes.")
        return path.read_bytes()


def file_sha256(path: Path) -> str:
    """The hex digest of a regular file of any size; a link or a pipe is refused."""
    with disk_errors(f"read {path}"):
        _require_ordinary(path)
        return sha256_of(path)


def _require_ordinary(path: Path) -> None:
    """Refuse links, pipes, folders and devices."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise DataError(f"{path} must be an ordinary file.")


def sha256_hex(content: bytes) -> str:
    """The hex digest of some bytes."""
    return hashlib.sha256(content).hexdigest()


def ledger_mark(value: object) -> tuple[int, str] | None:
    """Return (length, head) of a stored mark of the ledger, or None if the value is not one."""
    if not isinstance(value, dict) or value.keys() != {"length", "head"}:
        return None
    length, head = value["length"], value["head"]
    if type(length) is int and length >= 1 and isinstance(head, str) and _HEX_DIGEST.fullmatch(head):
        return length, head
    return None


def weights_bytes(tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None) -> bytes:
    """Write tensors as a safetensors file; equal tensors give equal bytes."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, metadata)


def tensors_of(content: bytes, *, name: str) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file that is in memory; ``TamperError`` if it is not one."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise TamperError(f"{name} is not a safetensors file: {brief(error)}.") from error


def safetensors_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata of a safetensors file without torch: eight bytes of length, a JSON header, then data."""
    with disk_errors(f"read {path}"), path.open("rb") as file:
        size = min(int.from_bytes(file.read(8), "little"), LARGEST_JSON)
        header = parse_object(file.read(size), name="the header")
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict):
        raise TamperError("the header has no metadata.")
    return metadata
