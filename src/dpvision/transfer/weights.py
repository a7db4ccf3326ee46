"""Reading weight files: safetensors, torch state files and .npz, none of which may execute anything."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from dpvision.checks import DataError, brief
from dpvision.data import read_member
from dpvision.data.limits import open_regular, require_memory
from dpvision.data.wording import shown, some_of
from dpvision.files import disk_errors

_WRAPPERS = ("state_dict", "model", "model_state_dict")
_KINDS = ".safetensors, .pt, .pth, .bin, .npz"
# Trained weights hardly shrink when they are packed: what grows by more than this is meant to fill the memory.
MAX_GROWTH = 100


def read_weights(path: Path) -> tuple[dict[str, Tensor], bytes]:
    """The tensors of a file by name, and the bytes that they were read from.

    Guarantee: nothing in the file is executed: torch files are read with ``weights_only``, arrays without pickle.
    """
    try:
        with disk_errors(f"read {path}"), open_regular(path) as file:
            require_memory(os.fstat(file.fileno()).st_size, path)
            content = file.read()
        found = _parse(content, kind=path.suffix.lower())
    except MemoryError as error:
        raise DataError(f"{shown(path)} does not fit into memory.") from error
    except (SafetensorError, pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, ValueError) as error:
        raise DataError(f"{shown(path)} can't be read as weights: {_first_line(error)}") from error
    except (
        struct.error,
        zlib.error,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        AssertionError,
    ) as error:
        raise DataError(f"{shown(path)} is damaged or not a file of weights ({type(error).__name__}).") from error
    if found is None:
        raise DataError(f"{shown(path)} must be a file of weights by name ({_KINDS}). Save a model's state_dict().")
    odd = [name for name, value in found.items() if not _is_plain(value)]
    if odd:
        raise DataError(f"{shown(path)} must hold plain real tensors, got others: {some_of(odd)}.")
    return found, content


def _parse(content: bytes, *, kind: str) -> dict[str, Tensor] | None:
    if kind == ".safetensors":
        return load_safetensors(content)
    _refuse_growth(content)
    if kind == ".npz":
        return _arrays(content)
    if kind not in (".pt", ".pth", ".bin"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other pickle protocols: it works, or it is an error
        return _state_of(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def _refuse_growth(content: bytes) -> None:
    """Refuse an archive that unpacks to far more than it is."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > MAX_GROWTH * len(content):
        raise ValueError(f"it would unpack to {size} bytes, more than {MAX_GROWTH} times what it is")


def _arrays(content: bytes) -> dict[str, Tensor]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        found = {m.filename.removesuffix(".npy"): torch.from_numpy(read_member(archive, m)) for m in members}
    if len(found) < len(members):
        raise ValueError("two of its arrays have one name")
    return found


def _state_of(found: Any) -> dict[str, Tensor] | None:
    """A mapping of names to tensors, also where it is wrapped in a checkpoint of other things."""
    for wrapper in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        return None
    return dict(found) if found and all(isinstance(value, Tensor) for value in found.values()) else None


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has its own numbers: no sparse, quantised or merely described tensor, none that repeats a few."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.is_nested or tensor.is_complex():
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return f"{brief(lines[0].rstrip('.'))}."
