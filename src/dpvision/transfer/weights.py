"""Reading weight files: safetensors, torch state files and .npz, none of which may execute anything."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from dpvision.checks import DataError
from dpvision.files import disk_errors

_WRAPPERS = ("state_dict", "model", "model_state_dict")
_KINDS = ".safetensors, .pt, .pth, .bin, .npz"


def read_weights(path: Path) -> tuple[dict[str, Tensor], bytes]:
    """The tensors of a file by name, and the bytes that they were read from.

    Guarantee: nothing in the file is executed: torch files are read with ``weights_only``, arrays without pickle.
    """
    with disk_errors(f"read {path}"):
        content = path.read_bytes()
    try:
        found = _parse(content, kind=path.suffix.lower())
    except (SafetensorError, pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, ValueError) as error:
        raise DataError(f"{path} can't be read as weights: {_first_line(error)}") from error
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
        raise DataError(f"{path} is damaged or not a file of weights ({type(error).__name__}).") from error
    if found is None:
        raise DataError(f"{path} must be a file of weights by name ({_KINDS}). Save a model's state_dict().")
    return found, content


def _parse(content: bytes, *, kind: str) -> dict[str, Tensor] | None:
    if kind == ".safetensors":
        return load_safetensors(content)
    if kind == ".npz":
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: torch.from_numpy(np.asarray(arrays[name])) for name in arrays.files}
    if kind not in (".pt", ".pth", ".bin"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other pickle protocols: it works, or it is an error
        return _state_of(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def _state_of(found: Any) -> dict[str, Tensor] | None:
    """A mapping of names to tensors, also where it is wrapped in a checkpoint of other things."""
    for wrapper in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        return None
    return dict(found) if found and all(isinstance(value, Tensor) for value in found.values()) else None


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return f"{lines[0].rstrip('.')}."
