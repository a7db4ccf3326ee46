"""Checkpoints, from which a run resumes.

The name of a checkpoint carries the SHA-256 of its file, so a damaged one is recognised. Each holds the length and head
of the ledger at its moment, so a ledger that was cut afterwards is recognised too. The last two are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from dpvision.errors import ArgumentError, DPVisionError, TamperError
from dpvision.storage.files import (
    file_sha256,
    ledger_mark,
    parse_object,
    read_file,
    safetensors_metadata,
    sha256_hex,
    sync_folder,
    tensors_of,
    weights_bytes,
    write_atomically,
)

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 2
_NAME = re.compile(r"step-(\d{8,18})-([0-9a-f]{64})\.safetensors")


@final
@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        step: the next step to take.
        tensors: weights and optimizer state.
        values: everything else, as JSON.
        warnings: damaged checkpoints that were passed over.
    """

    step: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    warnings: tuple[str, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """A checkpoint on disk: its values and the (length, head) of the ledger in it, or what is wrong with it."""

    path: Path
    step: int
    values: dict[str, Any]
    ledger: tuple[int, str] = (0, "")
    problem: str | None = None


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Path:
    """Write a checkpoint and keep the last two.

    Args:
        folder: of the checkpoints.
        step: the next step to take.
        tensors: weights and optimizer state.
        values: everything else; ``values["ledger"]`` is the mark of the ledger.

    Returns:
        The new file. Files of the same or a later step are deleted: they were damaged, or given up when the run resumed
        from an older one.

    Raises:
        ArgumentError: if the ledger's mark is missing.
    """
    if ledger_mark(values.get("ledger")) is None:
        raise ArgumentError(f"values['ledger'] must be the ledger's mark, got {values.get('ledger')!r:.100}.")
    stored = json.dumps({"step": step, "values": dict(values)}, sort_keys=True, allow_nan=False)
    content = weights_bytes(tensors, metadata={"values": stored})
    path = folder / f"step-{step:08d}-{sha256_hex(content)}.safetensors"
    write_atomically(path, content, mode=0o600)
    older = sorted((found for found in folder.glob("*.safetensors") if _step_of(found) < step), key=_step_of)
    kept = {path, *older[len(older) - KEPT + 1 :]}
    for found in {*folder.glob("*.safetensors"), *folder.glob(".*.tmp")} - kept:
        found.unlink()
    sync_folder(folder)
    return path


def inspect_checkpoints(folder: Path) -> list[CheckpointFile]:
    """List every checkpoint, newest first: by step, then by the length of its ledger. Needs no torch."""
    found = [_inspect(path) for path in folder.glob("*.safetensors")] if folder.is_dir() else []
    return sorted(found, key=lambda file: (file.step, file.ledger, file.path.name), reverse=True)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Load the newest whole checkpoint; None if there is none, ``TamperError`` if only damaged ones are left."""
    files = inspect_checkpoints(folder)
    damaged = tuple(file.problem for file in files if file.problem is not None)
    for file in files:
        if file.problem is None:
            tensors = tensors_of(read_file(file.path, limit=None), name=str(file.path))
            return Checkpoint(step=file.step, tensors=tensors, values=file.values, warnings=damaged)
    if damaged:
        raise TamperError(f"no whole checkpoint is left in {folder}: {' '.join(damaged)} Put one back, or start again.")
    return None


def _step_of(path: Path) -> int:
    """The step in a checkpoint's name, or -1."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else -1


def _inspect(path: Path) -> CheckpointFile:
    """Check one checkpoint against its name."""
    step = _step_of(path)
    try:
        if file_sha256(path) != path.name[-76:-12]:
            raise TamperError("its content does not have the hash in its name.")
        stored = parse_object(safetensors_metadata(path)["values"], name="the metadata")
        values, mark = stored["values"], ledger_mark(stored["values"]["ledger"])
        if stored["step"] != step or mark is None:
            raise TamperError("its name and its content do not agree.")
    except (DPVisionError, KeyError, TypeError) as error:
        text = f"checkpoint {path.name} is damaged: {error}"
        return CheckpointFile(path=path, step=step, values={}, problem=text)
    return CheckpointFile(path=path, step=step, values=values, ledger=mark)
