"""Initial weights from elsewhere: a file, a known pretrained set, or the release of an earlier run.

``resolve_initial_weights`` completes the configuration before the data are loaded; ``draw_weights`` fills the model
when its key is known. Files are safetensors, torch state files or .npz; none of them can execute anything. What earlier
runs spent, and what the certificate says about it, is in ``training.lineage``.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from dpvision.config import ModelConfig, PriorRelease, RunConfig, TransferConfig
from dpvision.data import Normalisation, read_member
from dpvision.data.safe_read import open_regular
from dpvision.data.splits import RunSplits
from dpvision.errors import ArgumentError, DataError, TamperError, brief, require_memory, shown, some_of
from dpvision.models.initialisation import mean_var, seeded
from dpvision.own_code import NO_CODE, RunCode
from dpvision.privacy.randomness import Keys
from dpvision.storage.files import disk_errors, sha256_hex
from dpvision.training.lineage import read_earlier_run, require_outside_runs
from dpvision.training.pretrained import KNOWN_WEIGHTS
from dpvision.training.stages import create_model, head_of

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_WRAPPERS = ("state_dict", "model", "model_state_dict")
_KINDS = ".safetensors, .pt, .pth, .bin, .npz"
# Trained weights hardly shrink when they are packed: what grows by more than this is meant to fill the memory.
MAX_GROWTH = 100


@final
@dataclass(frozen=True)
class InitialWeights:
    """Weights from elsewhere, and what is known about them; ``prior`` describes the run that released them."""

    tensors: Mapping[str, Tensor]
    sha256: str
    source: str | None
    licence: str | None
    rename: Mapping[str, str]
    model: ModelConfig | None = None
    normalisation: Normalisation | None = None
    prior: PriorRelease | None = None


def resolve_initial_weights(config: RunConfig) -> tuple[RunConfig, Normalisation | None]:
    """Complete ``transfer`` and ``model`` with what the weights say about themselves.

    Returns:
        The configuration, and the pixel constants that the weights were trained with, if known.

    Raises:
        ArgumentError: there are no such weights, or nothing says what they were trained on.
        TamperError: the file does not have the expected checksum, or an earlier run does not verify.
    """
    if config.transfer is None:
        return config, None
    found = load_initial_weights(config, config.transfer)
    facts = {"sha256": found.sha256, "source": found.source, "licence": found.licence, "prior": found.prior}
    update: dict[str, object] = {"transfer": config.transfer.model_copy(update=facts)}
    if config.model is None and found.model is not None:
        update["model"] = found.model
    return config.model_copy(update=update), found.normalisation


def draw_weights(model: nn.Module, config: RunConfig, splits: RunSplits, keys: Keys, code: RunCode = NO_CODE) -> None:
    """Fill the model with the run's initial weights: drawn from the key, then loaded where configured."""
    drawn = create_model(config, splits, seed=keys.seed("init"), code=code)
    if config.transfer is not None:
        found = load_initial_weights(config, config.transfer)
        if config.transfer.initialisation == "mean_var":
            like = create_model(config, splits, seed=0, code=code)
            fit(like, found.tensors, rename=found.rename, head=True)
            # Initial weights need no secrecy: a numbered draw is the same in every run.
            seed = config.transfer.draw
            with seeded(keys.seed("init", "mean_var") if seed is None else seed):
                mean_var(drawn, like)
        else:
            fit(drawn, found.tensors, rename=found.rename)
    model.load_state_dict(drawn.state_dict())


def load_initial_weights(config: RunConfig, transfer: TransferConfig) -> InitialWeights:
    """Read the weights and what is known about them. What the configuration says itself goes first."""
    known = KNOWN_WEIGHTS.get(transfer.weights)
    data_dir = None if config.data.data_dir is None else Path(config.data.data_dir)
    path = Path(transfer.weights) if known is None else known.find(data_dir)
    if path.is_dir():
        tensors, sha256, prior = read_earlier_run(path)
        source = transfer.source or ", ".join(prior.data)
        found = InitialWeights(tensors, sha256, source, transfer.licence, transfer.rename, prior=prior)
    elif not path.is_file():
        names = ", ".join(KNOWN_WEIGHTS)
        raise ArgumentError(f"weights must be a file, a run's folder or one of {names}, got {transfer.weights!r}.")
    else:
        require_outside_runs(path)
        tensors, content = read_weights(path)
        found = InitialWeights(tensors, sha256_hex(content), transfer.source, transfer.licence, transfer.rename)
        if known is not None:
            found = replace(
                found,
                source=transfer.source or known.source,
                licence=transfer.licence or known.licence,
                rename={**known.rename, **transfer.rename},
                model=ModelConfig(name=known.model, options=dict(known.options)),
                normalisation=known.normalisation,
            )
    expected = transfer.sha256 or (None if known is None else known.sha256)
    if expected not in (None, found.sha256):
        raise TamperError(f"{path} is not the file that was meant: its SHA-256 is {found.sha256}, not {expected}.")
    if found.source is None:
        raise ArgumentError("source must say what the weights were trained on: the certificate declares it public.")
    return found


def fit(model: nn.Module, tensors: Mapping[str, Tensor], *, rename: Mapping[str, str], head: bool = False) -> None:
    """Copy tensors into the model by name: all of them, or none.

    Statistics of a BatchNorm that is a GroupNorm in the model are left out.

    Args:
        model: receives the weights.
        tensors: weights by the names of their file.
        rename: prefixes of those names, and the model's for them; the longest match counts.
        head: whether the head is copied too; otherwise it keeps its own weights.

    Raises:
        ArgumentError: names every weight that is missing, unexpected, given twice or of another shape. Nothing has
            been copied then.
    """
    head_name = f"{head_of(model)}."
    wanted = {name: value for name, value in model.state_dict().items() if head or not name.startswith(head_name)}
    times = Counter(renamed(name, rename) for name in tensors)
    given = {renamed(name, rename): value for name, value in tensors.items()}
    given = {
        name: value
        for name, value in given.items()
        if (head or not name.startswith(head_name)) and not (name not in wanted and _is_statistic(name, wanted))
    }
    twice = [name for name in given if times[name] > 1]
    missing = [name for name in wanted if name not in given and not name.endswith(".num_batches_tracked")]
    unexpected = [name for name in given if name not in wanted]
    misshapen = [
        f"{name} ({_shape(given[name])} in the file, {_shape(value)} in the model)"
        for name, value in wanted.items()
        if name in given and given[name].shape != value.shape
    ]
    if missing or unexpected or twice or misshapen:
        parts = (
            ("missing", missing),
            ("unexpected", unexpected),
            ("there twice, once renamed", twice),
            ("of another shape", misshapen),
        )
        found = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)
        raise ArgumentError(f"the weights don't fit the model; {found}. Choose their own model, or rename.")
    own = model.state_dict()
    with torch.no_grad():
        for name, value in given.items():
            own[name].copy_(value)


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Replace the longest known prefix of a name."""
    for prefix in sorted(rename, key=len, reverse=True):
        if name.startswith(prefix):
            return rename[prefix] + name[len(prefix) :]
    return name


def _is_statistic(name: str, wanted: Mapping[str, Tensor]) -> bool:
    """Whether this is a running statistic of a norm layer that has only weights in the model."""
    owner, _, own = name.rpartition(".")
    return own in _STATISTICS and f"{owner}.weight" in wanted


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def read_weights(path: Path) -> tuple[dict[str, Tensor], bytes]:
    """Read a weight file.

    Args:
        path: a .safetensors, .pt, .pth, .bin or .npz file.

    Returns:
        The tensors by name, and the bytes that they were read from.

    Raises:
        DataError: the file can't be read, is damaged, or holds something else than plain real tensors.

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
    """Parse the content of a file with that suffix; None if it is no mapping of names to tensors."""
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
    """Refuse an archive that unpacks to more than ``MAX_GROWTH`` times its size."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > MAX_GROWTH * len(content):
        raise ValueError(f"it would unpack to {size} bytes, more than {MAX_GROWTH} times what it is")


def _arrays(content: bytes) -> dict[str, Tensor]:
    """Read the arrays of an .npz file without pickle."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        found = {m.filename.removesuffix(".npy"): torch.from_numpy(read_member(archive, m)) for m in members}
    if len(found) < len(members):
        raise ValueError("two of its arrays have one name")
    return found


def _state_of(found: Any) -> dict[str, Tensor] | None:
    """Find the mapping of names to tensors, also inside a checkpoint with other entries."""
    for wrapper in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        return None
    return dict(found) if found and all(isinstance(value, Tensor) for value in found.values()) else None


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense and real and owns all its values (no sparse, quantised, meta or expanded one)."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.is_nested or tensor.is_complex():
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return f"{brief(lines[0].rstrip('.'))}."
