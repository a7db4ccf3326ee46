"""Which parameters learn: the head, the last stages, or all.

Foreign weights into a model: by name, whole, or not at all.

Weights known by name: what they were trained on, under which licence, and where they lie.

Reading weight files: safetensors, torch state files and .npz, none of which may execute anything.
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
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from dpvision.data import Normalisation, cache_folder, read_member
from dpvision.data.safe_read import open_regular, require_memory
from dpvision.errors import ArgumentError, DataError, brief, shown, some_of
from dpvision.models.initialisation import mean_var, seeded
from dpvision.storage.files import disk_errors

Trained = Literal["head", "last", "all"]


def head_of(model: nn.Module) -> str:
    """The name of the module that owns the model's last parameter: what gives the scores."""
    names = [name for name, _ in model.named_parameters()]
    if not names or "." not in names[-1]:
        raise ArgumentError("the model has no last layer with parameters of its own, so there is no head to replace.")
    return names[-1].rpartition(".")[0]


def stages_of(model: nn.Module) -> list[str]:
    """Names of the model's stages in their order, the head last.

    A stage is a child of the model that has parameters. A child that is itself a chain of blocks (a Sequential whose
    parts have parts of their own) is as many stages as it has blocks.
    """
    found: list[str] = []
    for name, child in model.named_children():
        parts = list(child.named_children()) if isinstance(child, (nn.Sequential, nn.ModuleList)) else []
        blocks = any(True for _, part in parts for _ in part.children())
        names = [f"{name}.{part}" for part, _ in parts] if blocks else [name]
        found += [stage for stage in names if any(True for _ in model.get_submodule(stage).parameters())]
    return found


def trained_names(model: nn.Module, trained: Trained, *, stages: int | None = None) -> frozenset[str]:
    """Names of the parameters that learn: of the ``head``, of the ``last`` so many ``stages``, or ``all``."""
    names = [name for name, _ in model.named_parameters()]
    if trained == "all":
        return frozenset(names)
    owners = [head_of(model)]
    if trained == "last":
        known = stages_of(model)
        if stages is None or stages > len(known):
            raise ArgumentError(f"stages must be 1 to {len(known)} for this model, got {stages}.")
        owners = known[-stages:]
    return frozenset(name for name in names if any(name.startswith(f"{owner}.") for owner in owners))


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def fit(model: nn.Module, tensors: Mapping[str, Tensor], *, rename: Mapping[str, str], head: bool = False) -> None:
    """Copy ``tensors`` into the model; its head keeps its own weights unless ``head``.

    ``rename`` maps prefixes of their names to ours; the longest that fits counts. Statistics of a BatchNorm that is a
    GroupNorm here are left out.

    Guarantee: every weight below the head comes from the file and none is left over or there twice; otherwise nothing
    is copied, and the error names all that is missing, unexpected, there twice or of another shape.
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
    """The name with its longest known prefix replaced."""
    for prefix in sorted(rename, key=len, reverse=True):
        if name.startswith(prefix):
            return rename[prefix] + name[len(prefix) :]
    return name


def draw_mean_var(
    model: nn.Module, like: nn.Module, tensors: Mapping[str, Tensor], *, rename: Mapping[str, str], seed: int
) -> None:
    """Draw every layer with the mean and variance of the same layer in ``tensors``, which ``like`` is given whole."""
    fit(like, tensors, rename=rename, head=True)
    with seeded(seed):
        mean_var(model, like)


def _is_statistic(name: str, wanted: Mapping[str, Tensor]) -> bool:
    """Whether this is a running statistic of a norm that the model has with weights only."""
    owner, _, own = name.rpartition(".")
    return own in _STATISTICS and f"{owner}.weight" in wanted


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


IMAGENET = "ImageNet (ILSVRC2012)"
# Names under which pictures of ImageNet go about: ImageNette and the like are parts of it.
IMAGENET_NAMES = ("*imagenet*", "*imagewoof*", "*ilsvrc*")


@final
@dataclass(frozen=True, kw_only=True)
class KnownWeights:
    """A published file: ``model`` and ``options`` are what the catalogue makes for it where no model is named.

    ``data_names`` are patterns for the names of data that it was trained on, wholly or in part.
    """

    name: str
    model: str
    folder: str
    pattern: str
    sha256: str
    source: str
    licence: str
    normalisation: Normalisation
    data_names: tuple[str, ...]
    rename: dict[str, str] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)

    def covers(self, data: str) -> bool:
        """Whether data of that name belong to what the weights were trained on."""
        return any(fnmatchcase(data.lower(), pattern) for pattern in self.data_names)


def _constants(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalisation:
    return Normalisation(mean=mean, std=std, source="published")


def _lite_names() -> dict[str, str]:
    """The published names begin with an underscore, at the top and inside each block."""
    inside = ("expand_conv", "depthwise_conv", "project_conv", "bn0", "bn1", "bn2")
    blocks = {f"_blocks.{number}._{part}.": f"blocks.{number}.{part}." for number in range(16) for part in inside}
    top = {f"_{part}.": f"{part}." for part in ("conv_stem", "bn0", "conv_head", "bn1", "fc")}
    return {**blocks, **top}


_ALL = (
    KnownWeights(
        name="efficientnet-lite0",
        model="efficientnet_lite0",
        folder="pretrained-efficientnet-lite0",
        pattern="*.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        source=IMAGENET,
        licence="Apache-2.0",
        normalisation=_constants((127 / 255,) * 3, (128 / 255,) * 3),
        data_names=IMAGENET_NAMES,
        rename=_lite_names(),
        options={"resize_to": 128},
    ),
    KnownWeights(
        name="vgg16-conv1-3",
        model="vgg16_conv3",
        folder="pretrained-vgg16",
        pattern="*.npz",
        sha256="cf88654270b05a358e358438140a55be32d8aab0675c8c6335a4d30c58650afa",
        source=IMAGENET,
        licence="CC BY 4.0",
        normalisation=_constants((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        data_names=IMAGENET_NAMES,
    ),
)
KNOWN_WEIGHTS: dict[str, KnownWeights] = {each.name: each for each in _ALL}


def known_by_hash(sha256: str | None) -> KnownWeights | None:
    """The known set with that file, under whatever name it was given."""
    return next((known for known in KNOWN_WEIGHTS.values() if known.sha256 == sha256), None)


def find_known(known: KnownWeights, data_dir: Path | None) -> Path:
    """The file of a known set: in ``data_dir``, or where datasets are kept."""
    places = [place for place in (data_dir, cache_folder(), Path.home() / ".cache" / "dpvision") if place is not None]
    for place in dict.fromkeys(places):
        for path in sorted((place / known.folder).glob(known.pattern)):
            return path
    tried = ", ".join(str(place / known.folder) for place in dict.fromkeys(places))
    raise DataError(f"the weights {known.name} are not in {tried}. Put the file there, or give its path.")


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
