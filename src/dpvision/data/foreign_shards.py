"""Shards of other libraries: MosaicML's MDS is read by row number; WebDataset is refused, because it can't be.

Poisson sampling draws rows by number, so a source must give any row at any time. An MDS shard begins with the offsets
of its samples. A WebDataset shard is a tar archive, to be read from its beginning to its end.

An MDS shard: the number of samples n (4 bytes), n + 1 offsets from the start of the file (4 bytes each), a description
in JSON, and the samples. A sample: the size of each column of variable size (4 bytes each), then the columns' values.
Numbers are little-endian. ``index.json`` lists the shards and their columns.
"""

from __future__ import annotations

import os
import struct
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpvision.data.safe_read import open_regular
from dpvision.data.table_files import MOST_ROWS, Table
from dpvision.errors import BadFile, DataError, brief, shown, validation_message

INDEX = "index.json"
_LARGEST_INDEX = 2**26
_TAR_MEMBERS = 64
_NUMBERS = {
    "int": "<i8",
    **{f"int{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}
_TEXTS = ("str", "str_int", "str_float", "str_decimal")
_IMAGES = ("jpeg", "png", "bytes")
_LOOSE = ConfigDict(extra="ignore", frozen=True)
_WORD = 4


@final
class _RawFile(BaseModel):
    model_config = _LOOSE
    basename: Annotated[str, Field(min_length=1, max_length=255)]


@final
class _Mds(BaseModel):
    """One shard, as ``index.json`` describes it."""

    model_config = _LOOSE
    format: Literal["mds"]
    version: Literal[2]
    samples: int = Field(ge=0, le=MOST_ROWS)
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[int | None, ...]
    compression: str | None = None
    raw_data: _RawFile


@final
class _Index(BaseModel):
    model_config = _LOOSE
    shards: tuple[_Mds, ...] = Field(min_length=1)


def is_mds(folder: Path) -> bool:
    """Whether a folder holds an index of MDS shards; other programs call files index.json too."""
    try:
        with open_regular(folder / INDEX) as file:
            start = file.read(_LARGEST_INDEX)
    except (OSError, DataError):
        return False
    return b'"shards"' in start and b'"mds"' in start


def read_mds(folder: Path) -> Table:
    """Read the texts and numbers of MDS shards as a table; images are read when a row is asked for.

    Args:
        folder: holds ``index.json`` and the shards.

    Returns:
        A table with a column for each column of texts or numbers, and images by row.

    Raises:
        DataError: the index or a shard is damaged or compressed. Columns of other encodings are left out; nothing is
            unpickled.
    """
    path = folder / INDEX
    try:
        with open_regular(path) as file:
            index = _Index.model_validate_json(file.read(_LARGEST_INDEX))
    except ValidationError as error:
        raise DataError(f"{shown(path)} is no index of MDS shards: {validation_message(error, most=2)}.") from error
    first = index.shards[0]
    columns = (first.column_names, first.column_encodings)
    if any((each.column_names, each.column_encodings) != columns for each in index.shards):
        raise DataError(f"{shown(path)} has shards with different columns.")
    if any(
        not len(first.column_names) == len(first.column_encodings) == len(each.column_sizes) for each in index.shards
    ):
        raise DataError(f"{shown(path)} does not name a type and a size for each column.")
    texts = [name for name, kind in zip(*columns, strict=True) if kind in _NUMBERS or kind in _TEXTS]
    images = [name for name, kind in zip(*columns, strict=True) if kind in _IMAGES]
    if not images:
        kinds = ", ".join(f"{shown(name)} ({shown(kind)})" for name, kind in zip(*columns, strict=True))
        raise DataError(f"{shown(path)} has no column of images ({', '.join(_IMAGES)}): it has {kinds}.")
    shards = [_Shard(folder, each) for each in index.shards]
    rows = [row for shard in shards for row in shard.texts(texts)]
    ends = np.cumsum([shard.samples for shard in shards])
    if len(rows) > MOST_ROWS:
        raise DataError(f"{shown(path)} has more than {MOST_ROWS} rows.")

    def reader(column: str) -> Callable[[int], bytes]:
        def read(row: int) -> bytes:
            at = int(np.searchsorted(ends, row, side="right"))
            return shards[at].value(row - (int(ends[at - 1]) if at else 0), column)

        return read

    return Table(path, texts, rows, images={name: reader(name) for name in images})


@final
class _Shard:
    """One MDS file: any column of any sample, read from its place."""

    def __init__(self, folder: Path, facts: _Mds) -> None:
        name = facts.raw_data.basename
        self._path = folder / Path(name).name
        self._facts = facts
        self.samples = facts.samples
        if Path(name).name != name:
            raise DataError(f"{shown(folder / INDEX)} names a shard outside its folder: {shown(name)}.")
        if not self._path.exists() and facts.compression is not None:
            raise DataError(
                f"{shown(self._path)} is compressed ({shown(facts.compression)}), and rows of a compressed shard can't "
                f"be read one by one. Decompress the shards first, as in: zstd -d {shown(folder)}/*.zstd"
            )
        try:
            with open_regular(self._path) as file:
                self._size = os.fstat(file.fileno()).st_size
                head = file.read(_WORD * (self.samples + 2))
        except OSError as error:
            raise DataError(f"{shown(self._path)} can't be read: {shown(error.strerror or error)}.") from error
        words = np.frombuffer(head[: len(head) // _WORD * _WORD], dtype="<u4").astype(np.int64)
        if len(words) != self.samples + 2 or words[0] != self.samples:
            raise DataError(f"{shown(self._path)} does not hold the {self.samples} samples that {INDEX} promises.")
        self._offsets = words[1:]
        if (np.diff(self._offsets) < 0).any() or self._offsets[0] < len(head) or self._offsets[-1] > self._size:
            raise DataError(f"{shown(self._path)} is damaged: its offsets lead outside the file.")

    def texts(self, columns: Sequence[str]) -> list[list[str]]:
        """Read columns of texts and numbers of all samples."""
        encodings = dict(zip(self._facts.column_names, self._facts.column_encodings, strict=True))
        with open_regular(self._path) as file:
            return [
                [self._text(encodings[name], self._cut(file, sample, name)) for name in columns]
                for sample in range(self.samples)
            ]

    def value(self, sample: int, column: str) -> bytes:
        """Read one column of one sample."""
        with open_regular(self._path) as file:
            return self._cut(file, sample, column)

    def _cut(self, file: Any, sample: int, column: str) -> bytes:
        """Find a column in a sample: the sizes of variable columns come first."""
        start, end = int(self._offsets[sample]), int(self._offsets[sample + 1])
        open_sizes = sum(not size for size in self._facts.column_sizes)
        file.seek(start)
        head = file.read(min(_WORD * open_sizes, end - start))
        if len(head) != _WORD * open_sizes:
            raise BadFile(f"sample {sample} ends too early")
        stated = iter(struct.unpack(f"<{open_sizes}I", head))
        at = start + len(head)
        for name, size in zip(self._facts.column_names, self._facts.column_sizes, strict=True):
            length = size or next(stated)
            if at + length > end:
                raise BadFile(f"sample {sample} is damaged: its columns are longer than it is")
            if name == column:
                file.seek(at)
                return file.read(length)
            at += length
        raise BadFile(f"sample {sample} has no column {shown(column)}")

    def _text(self, encoding: str, value: bytes) -> str:
        """Decode a number or a text."""
        try:
            if encoding in _TEXTS:
                return value.decode().strip()
            number = np.frombuffer(value, dtype=_NUMBERS[encoding])[0].item()
        except (ValueError, IndexError) as error:
            raise DataError(f"{shown(self._path)} is damaged: {shown(brief(error))}.") from error
        return str(int(number)) if float(number).is_integer() else str(number)


def refuse_webdataset(path: Path) -> None:
    """Refuse WebDataset shards with the reason and the command that unpacks them.

    Raises:
        DataError: the path is a tar archive of images with their labels, or a folder of such archives.
    """
    shards = _archives(path)
    kinds = _kinds_in(shards[0]) if shards else None
    if kinds is None:
        return
    image, label = kinds
    tars = f"'{path}'/*.tar" if path.is_dir() else f"'{path}'"
    table = f'for f in FOLDER/*.{label}; do echo "$(basename "${{f%.{label}}}").{image},$(cat "$f")"; done'
    raise DataError(
        f"{shown(path)} holds WebDataset shards (.tar), which can only be read from beginning to end, and Poisson "
        "sampling draws images by number: no other draw has the guarantee. Unpack them once: mkdir FOLDER && cat "
        f"{tars} | tar -xikf - -C FOLDER && (echo file,label; {table}) > FOLDER/labels.csv && rm FOLDER/*.{label}; "
        "then: dpvision pack FOLDER STORE --classes A,B,…"
    )


def _archives(path: Path) -> list[Path]:
    """List the tar archives that a path names, or that a folder without other data holds."""
    if path.suffix == ".tar" and path.is_file():
        return [path]
    return sorted(path.glob("*.tar")) if path.is_dir() else []


def _kinds_in(archive: Path) -> tuple[str, str] | None:
    """Find the endings of images and labels in the first members of an archive; None if it is no WebDataset."""
    try:
        with open_regular(archive) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            names = [member.name for member in islice(tar, _TAR_MEMBERS) if member.isfile()]
    except (OSError, tarfile.TarError, DataError):
        return None
    split = [name.rpartition("/")[2].partition(".") for name in names]
    endings = Counter(ending for _, _, ending in split)
    image = next((each for each in ("jpg", "jpeg", "png", "webp") if each in endings), None)
    label = next((each for each in ("cls", "label", "txt", "json") if each in endings), None)
    return None if image is None or label is None else (image, label)
