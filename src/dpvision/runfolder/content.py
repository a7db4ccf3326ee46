"""Between values and the bytes of a file: JSON, safetensors, hashes. Bytes from outside never raise anything odd."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpvision.checks import ArgumentError, DataError, TamperError
from dpvision.files import disk_errors, sha256_of

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_JSON = 64 * 2**20
_HEX_DIGEST = re.compile("[0-9a-f]{64}")


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """The one way in which JSON files of a run are written: order kept, numbers finite."""
    try:
        return (json.dumps(values, indent=2, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"not JSON: {error}.") from error


def parse_object(content: bytes | str, *, name: str) -> dict[str, Any]:
    """A JSON object, whatever the bytes are; ``TamperError`` otherwise."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TamperError(f"{name} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise TamperError(f"{name} must hold a JSON object.")
    return values


def read_file(path: Path, *, limit: int | None = LARGEST_JSON) -> bytes:
    """A regular file's content; a link, a pipe or an absurdly large file is refused."""
    with disk_errors(f"read {path}"):
        _require_ordinary(path)
        if limit is not None and path.stat().st_size > limit:
            raise DataError(f"{path} must have at most {limit} bytes.")
        return path.read_bytes()


def file_sha256(path: Path) -> str:
    """Hex digest of a regular file of any size; a link or a pipe is refused."""
    with disk_errors(f"read {path}"):
        _require_ordinary(path)
        return sha256_of(path)


def _require_ordinary(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise DataError(f"{path} must be an ordinary file.")


def sha256_hex(content: bytes) -> str:
    """Hex digest of some bytes."""
    return hashlib.sha256(content).hexdigest()


def ledger_mark(value: object) -> tuple[int, str] | None:
    """(length, head) out of a stored mark of the ledger, or None if it is not one."""
    if not isinstance(value, dict) or value.keys() != {"length", "head"}:
        return None
    length, head = value["length"], value["head"]
    if type(length) is int and length >= 1 and isinstance(head, str) and _HEX_DIGEST.fullmatch(head):
        return length, head
    return None


def weights_bytes(tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None) -> bytes:
    """Tensors as the bytes of a safetensors file; equal tensors give equal bytes."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, metadata)


def tensors_of(content: bytes, *, name: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file that was read whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise TamperError(f"{name} is not a safetensors file: {error}.") from error


def safetensors_metadata(path: Path) -> dict[str, Any]:
    """The texts in a safetensors header, without torch. The format: eight bytes of length, JSON, data."""
    with disk_errors(f"read {path}"), path.open("rb") as file:
        size = min(int.from_bytes(file.read(8), "little"), LARGEST_JSON)
        header = parse_object(file.read(size), name="the header")
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict):
        raise TamperError("the header has no metadata.")
    return metadata
