"""Packed stores: a folder of uint8 shards that ``dpvision pack`` wrote once and that training maps into memory.

A store holds the images of both splits at one shape, labels, class names, row names and owners, and the settings with
which its source was read. A run on the store takes those settings over, so that units, hold-out, declarations and
inference are those of a run on the source.

What is checked, and when. Labels, names, owners and the SHA-256 of every image are small: they are read whole and
compared with the checksums in ``store.json`` whenever the store is opened. Images are compared one by one with their
SHA-256 whenever they are read (``MappedImages``). So the fingerprint of the data, to which a run's keys are bound,
needs no pass over the images, and no image enters a step that differs from the one in the fingerprint.
"""

from __future__ import annotations

import io
import json
import mmap
import os
from pathlib import Path
from typing import Annotated, Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpvision.config import DataConfig
from dpvision.data.normalisation import Normalisation
from dpvision.data.options import LoadOptions
from dpvision.data.safe_read import map_npy, open_regular, read_npy
from dpvision.data.store import DIGEST_BYTES, ImageStore, MappedImages, numbered_rows
from dpvision.data.units import require_real_owners, unit_numbers
from dpvision.errors import ArgumentError, DataError, require_memory, shown, validation_message
from dpvision.storage.files import read_file, sha256_hex

HEADER = "store.json"
FORMAT = "dpvision store/1"
SETTINGS = (
    *("image_size", "channels", "file_column", "label_column", "split_column", "image_folder", "classes"),
    *("public_classes", "frames", "findings", "findings_columns", "mask_classes", "volume_axis", "window"),
    *("only_foreground", "unit_column", "unit_csv", "unit_folder_level", "unit_pattern", "units", "masks"),
)
"""Settings of reading that a store keeps. Paths are kept by their last part."""
_LABELS = (np.int64, np.uint8, np.float32)
_PATHS = frozenset({"image_folder", "findings", "unit_csv", "masks"})
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
_FileName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@final
class ListedFile(BaseModel):
    """A small file of a store, and its checksum."""

    model_config = _STRICT
    file: _FileName
    sha256: _Sha256


@final
class Shard(BaseModel):
    """A file of images, its checksum, and its brightest byte."""

    model_config = _STRICT
    file: _FileName
    sha256: _Sha256
    rows: int = Field(ge=1)
    brightest: int = Field(ge=0, le=255)


@final
class PackedSplit(BaseModel):
    """The files of one split."""

    model_config = _STRICT
    name: str
    rows: int = Field(ge=1)
    shards: tuple[Shard, ...]
    labels: ListedFile
    digests: ListedFile
    row_names: ListedFile | None = None
    owners: ListedFile | None = None
    owners_from: str | None = None
    some_owners: ListedFile | None = None
    skipped: tuple[tuple[str, str], ...] = ()


@final
class Header(BaseModel):
    """What ``store.json`` says."""

    model_config = _STRICT
    format: Literal["dpvision store/1"] = FORMAT
    packed_from: _Sha256
    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    settings: dict[str, Any]
    normalisation: dict[str, Any]
    unused: str = ""
    train: PackedSplit
    test: PackedSplit | None = None


def is_packed(path: Path) -> bool:
    """Whether a folder is a packed store."""
    return (path / HEADER).is_file()


def read_header(store: Path) -> Header:
    """Read what a store says of itself.

    Args:
        store: the folder.

    Raises:
        DataError: it is not a packed store of this version.
    """
    try:
        return Header.model_validate_json(read_file(store / HEADER))
    except ValidationError as error:
        why = validation_message(error, whole=HEADER, most=2)
        raise DataError(f"{shown(store)} is no packed store of this version of dpvision: {why}.") from error


def kept_settings(data: DataConfig) -> dict[str, Any]:
    """Return the settings of reading that a store keeps: those that differ from their defaults."""
    values = {name: getattr(data, name) for name in SETTINGS if getattr(data, name) != _default(name)}
    named = {name: Path(value).name for name, value in values.items() if name in _PATHS}
    return json.loads(json.dumps({**values, **named}))


def with_packed_settings(data: DataConfig) -> DataConfig:
    """Add the settings with which a packed source was read; other sources are left as they are.

    Raises:
        DataError: a setting is given that differs from the one that the store was packed with.
    """
    if not _names_store(data.source):
        return data
    header = read_header(Path(data.source))
    require_packed_settings(data, header, Path(data.source))
    kept = {name: value for name, value in header.settings.items() if getattr(data, name) == _default(name)}
    try:
        return DataConfig.model_validate({**data.model_dump(), **kept})
    except ValidationError as error:
        raise DataError(f"{shown(data.source)}: {validation_message(error, whole=HEADER, most=2)}.") from error


def require_packed_settings(data: DataConfig, header: Header, store: Path) -> None:
    """Refuse settings of reading that differ from those that the store was packed with; units may be chosen again.

    Raises:
        DataError: with the name of the first setting that differs.
    """
    unknown = sorted(header.settings.keys() - set(SETTINGS))
    if unknown:
        raise DataError(f"{shown(store)} has unknown settings in its {HEADER}: {', '.join(map(shown, unknown))}.")
    channels, height, width = header.image_shape
    known = {"channels": channels, "classes": ",".join(header.class_names)}
    known |= {"image_size": height} if height == width else {}
    for name in SETTINGS:
        given: Any = getattr(data, name)
        packed = header.settings.get(name, known.get(name, _default(name)))
        if name == "units" or given == _default(name):
            continue
        given = Path(given).name if name in _PATHS else given
        if name == "classes":
            given = ",".join(data.class_list or ())
            packed = known["classes"]
        if json.loads(json.dumps(given)) != packed:
            was = "without it" if packed == _default(name) else f"with {shown(packed)}"
            raise DataError(
                f"{shown(store)} was packed {was}, and {name} is given as {shown(given)}: leave it out, or pack the "
                "source again with it."
            )


def open_packed(store: Path, options: LoadOptions) -> tuple[ImageStore, ImageStore | None, Normalisation]:
    """Open a packed store.

    Args:
        store: the folder.
        options: how it is used: ``units`` may be chosen again; other settings must be those of packing.

    Returns:
        The training split, the test split if the source had one, and the pixel constants of the source.

    Raises:
        DataError: the store is damaged, or was packed with other settings.

    Guarantee: see the top of this file. No more memory is taken than for labels, names, owners and 32 bytes an image.
    """
    header = read_header(store)
    if not options.public:
        require_packed_settings(options, header, store)
    try:
        constants = Normalisation.from_dict(header.normalisation)
    except ArgumentError as error:
        raise DataError(f"{shown(store)} is damaged: {error}") from error
    train = _open_split(store, header.train, header, options)
    test = None if header.test is None else _open_split(store, header.test, header, options.without_units(owners=True))
    return train, test, constants


def _open_split(store: Path, part: PackedSplit, header: Header, options: LoadOptions) -> ImageStore:
    """Map the shards of a split and read what belongs to its rows."""
    shards: list[NDArray[np.uint8]] = []
    for shard in part.shards:
        mapped = map_npy(store / shard.file)
        if mapped.dtype != np.uint8 or mapped.shape != (shard.rows, *header.image_shape):
            raise DataError(f"{shown(store / shard.file)} is not what {HEADER} says: {mapped.dtype} {mapped.shape}.")
        _read_at_random(mapped)
        shards.append(mapped)
    digests = _array(store, part.digests)
    if sum(len(each) for each in shards) != part.rows or digests.shape != (part.rows, DIGEST_BYTES):
        raise DataError(f"{shown(store)} is damaged: its shards and digests do not have {part.rows} rows.")
    owners = None if part.owners is None else _texts(store, part.owners)
    if owners is not None and not options.public:
        require_real_owners(owners, part.owners_from or "the named unit")
    labels = _array(store, part.labels)
    if labels.dtype not in _LABELS:
        raise DataError(f"{shown(store / part.labels.file)} has labels of type {labels.dtype}, which no store has.")
    return ImageStore(
        images=MappedImages(shards, digests, brightest=max(shard.brightest for shard in part.shards)),
        labels=torch.from_numpy(labels),
        class_names=header.class_names,
        unit_of_row=unit_numbers(owners, part.rows, options),
        name=part.name,
        row_names=numbered_rows(part.rows) if part.row_names is None else _texts(store, part.row_names),
        owners=owners,
        owners_from=part.owners_from,
        some_owners=frozenset(() if part.some_owners is None else _texts(store, part.some_owners)),
        skipped=part.skipped,
        unused=header.unused,
    )


def _read_at_random(shard: NDArray[np.uint8]) -> None:
    """Tell the system that rows are read at random: it must not read their neighbours too."""
    mapped = getattr(shard, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)


def _checked(store: Path, listed: ListedFile) -> bytes:
    """Read a small file and compare it with its checksum."""
    path = store / listed.file
    with open_regular(path) as file:
        require_memory(os.fstat(file.fileno()).st_size, path)
        content = file.read()
    if sha256_hex(content) != listed.sha256:
        raise DataError(f"{shown(path)} is not what was packed: its SHA-256 differs. Pack the source again.")
    return content


def _array(store: Path, listed: ListedFile) -> NDArray[Any]:
    content = _checked(store, listed)
    return read_npy(io.BytesIO(content), size=len(content), where=str(store / listed.file))


def _texts(store: Path, listed: ListedFile) -> tuple[str, ...]:
    try:
        found = json.loads(_checked(store, listed))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{shown(store / listed.file)} is not JSON.") from error
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise DataError(f"{shown(store / listed.file)} must be a list of texts.")
    return tuple(found)


def _names_store(source: str) -> bool:
    try:
        return is_packed(Path(source))
    except (OSError, ValueError):
        return False


def _default(name: str) -> Any:
    return DataConfig.model_fields[name].default
