"""Downloads with a checksum: a file is whole and right, or it is not there."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

from dpvision.data.options import Progress
from dpvision.errors import DataError, shown
from dpvision.storage.files import sha256_of, sync_folder

TIMEOUT_SECONDS = 30.0
BLOCK_BYTES = 1 << 20


@final
@dataclass(frozen=True)
class Remote:
    """One file of a public dataset: its addresses in order of preference, its size and its SHA-256."""

    file: str
    addresses: tuple[str, ...]
    size: int
    sha256: str


class _Failed(Exception):
    """Why one address did not give the file."""


def download(remote: Remote, folder: Path, *, progress: Progress | None = None) -> Path:
    """The file in ``folder``, taken from its first address that has it; nothing is done if it is there and right.

    Guarantee: on any failure or interruption no part of the file is left behind.
    """
    target = folder / remote.file
    if target.is_file() and sha256_of(target) == remote.sha256:
        return target
    failures: list[str] = []
    for address in remote.addresses:
        try:
            _fetch(remote, address, target, progress)
        except _Failed as error:
            failures.append(f"{address} ({error})")
        else:
            return target
    raise DataError(
        f"{remote.file} can't be downloaded: {'; '.join(shown(each) for each in failures)}. "
        f"Check the network, or put the file into {shown(folder)}."
    )


def _fetch(remote: Remote, address: str, target: Path, progress: Progress | None) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as error:
        raise DataError(f"{shown(target.parent)} can't be written: {shown(error)}.") from error
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _copy(remote, address, file, progress)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(target)
        sync_folder(target.parent)
    finally:
        part.unlink(missing_ok=True)


def _copy(remote: Remote, address: str, file: BinaryIO, progress: Progress | None) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        # The addresses are constants of this package, and the checksum decides, whoever answers.
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310
            while block := response.read(BLOCK_BYTES):
                done += len(block)
                if done > remote.size:
                    raise _Failed(f"more than the {remote.size} bytes that the file has")
                digest.update(block)
                file.write(block)
                if progress is not None:
                    progress(f"downloading {remote.file}", done, remote.size)
    except urllib.error.HTTPError as error:
        error.close()
        raise _Failed(str(error)) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise _Failed(str(getattr(error, "reason", error)) or type(error).__name__) from error
    if done != remote.size or digest.hexdigest() != remote.sha256:
        raise _Failed(f"checksum {digest.hexdigest()[:16]}… of {done} bytes, expected {remote.sha256[:16]}…")
