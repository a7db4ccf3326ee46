"""Write a packed store: read a source once, shard by shard, and keep what training needs (see ``packed_store``).

A shard is decoded in parallel, hashed, written beside its place and renamed; a note with its checksum follows. When
``pack`` is interrupted, the next call checks the shards that are there and continues behind them. ``store.json`` comes
last: a folder without it is no store.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from dpvision import __version__
from dpvision.data.image_folder import Decoder
from dpvision.data.images import BadFiles, Place, decode_rows, usable
from dpvision.data.loading import Splits, load
from dpvision.data.options import LoadOptions, Progress
from dpvision.data.packed_store import (
    FORMAT,
    HEADER,
    Header,
    ListedFile,
    PackedSplit,
    Shard,
    is_packed,
    kept_settings,
    read_header,
)
from dpvision.data.safe_read import map_npy
from dpvision.data.store import ImageStore, MappedImages, numbered_rows, row_digests
from dpvision.errors import DataError, TamperError, shown
from dpvision.storage.files import (
    disk_errors,
    json_bytes,
    parse_object,
    read_file,
    replacing,
    sha256_hex,
    write_atomically,
)

SHARD_BYTES = 2**27
_JOURNAL, _LOCK = "packing.json", "packing.lock"
_PRIVATE = 0o600


@final
@dataclass(frozen=True)
class Packed:
    """What ``pack`` wrote, for the holder of the data: counts here are those of the private rows.

    Attributes:
        store: the folder.
        train_rows: rows of the training split.
        test_rows: rows of the test split, 0 if the source has none.
        image_shape: channels, height and width.
        class_names: the classes.
        shards: files of images.
        resumed: shards that an earlier call had written.
        skipped: images that were left out.
        complete: the store was there before, of the same source and settings: nothing was done.
    """

    store: Path
    train_rows: int
    test_rows: int
    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    shards: int
    resumed: int
    skipped: int
    complete: bool = False


def pack(
    source: str | Path,
    store: Path,
    options: LoadOptions | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Packed:
    """Write a packed store of a source, or continue one that was interrupted.

    Args:
        source: as for ``load``.
        store: the folder to write; it must not exist, be empty, or hold an unfinished pack of the same source.
        options: how to read the source.
        shard_bytes: size of a shard in bytes, about; also the memory that decoding takes at a time.
        progress: called after each image.

    Returns:
        What was written.

    Raises:
        DataError: the source can't be read, or the folder holds something else.

    Guarantee: the classes follow from what is declared, as in training. The folder is as sensitive as the images, and
    closed to others (mode 700).
    """
    options = options or LoadOptions()
    facts = {
        "format": FORMAT,
        "dpvision": __version__,
        "shard_bytes": shard_bytes,
        "settings": kept_settings(options) | {"skip_bad": options.skip_bad, "segmentation": options.segmentation},
        "source": _digest_of_files([source, *_other_files(options)]),
    }
    packed_from = sha256_hex(json.dumps(facts, sort_keys=True).encode())
    if is_packed(store):
        return _complete(store, packed_from)
    with _unfinished(store, packed_from):
        writer = StoreWriter(store, shard_bytes)
        splits = load(source, options, progress=progress, decoders=writer.decoder)
        header = Header(
            packed_from=packed_from,
            image_shape=splits.train.image_shape,
            class_names=splits.train.class_names,
            settings=kept_settings(options),
            normalisation=splits.normalisation.to_dict(),
            unused=splits.unused,
            train=writer.finish("train", splits.train),
            test=None if splits.test is None else writer.finish("test", splits.test),
        )
        writer.remove_other_files(header)
        with disk_errors(f"write {store}"):
            write_atomically(store / HEADER, json_bytes(header.model_dump(mode="json")), mode=_PRIVATE)
            for path in (*store.glob("*.part.json"), store / _JOURNAL):
                path.unlink(missing_ok=True)
    return _result(store, splits, header, writer.resumed)


def check_packed(store: Path, *, progress: Progress | None = None) -> int:
    """Compare every file of a store with its checksum.

    Args:
        store: the folder.
        progress: called after each file.

    Returns:
        The number of files.

    Raises:
        DataError: a file is missing or differs.
    """
    header = read_header(store)
    listed: list[ListedFile | Shard] = []
    for part in (header.train, header.test):
        if part is not None:
            named = (part.labels, part.digests, part.row_names, part.owners, part.some_owners)
            listed += [*part.shards, *(each for each in named if each is not None)]
    for done, each in enumerate(listed, 1):
        with disk_errors(f"read {store / each.file}"), (store / each.file).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != each.sha256:
            raise DataError(f"{shown(store / each.file)} is not what was packed: its SHA-256 differs.")
        if progress is not None:
            progress("checking files", done, len(listed))
    return len(listed)


def _result(store: Path, splits: Splits, header: Header, resumed: int) -> Packed:
    test_rows = 0 if header.test is None else header.test.rows
    parts = [part for part in (header.train, header.test) if part is not None]
    return Packed(
        store=store,
        train_rows=splits.train.num_rows,
        test_rows=test_rows,
        image_shape=header.image_shape,
        class_names=header.class_names,
        shards=sum(len(part.shards) for part in parts),
        resumed=resumed,
        skipped=sum(len(part.skipped) for part in parts),
    )


def _complete(store: Path, packed_from: str) -> Packed:
    """Say what a finished store holds, if it is the one that would be written."""
    header = read_header(store)
    if header.packed_from != packed_from:
        raise DataError(
            f"{shown(store)} is a packed store of another source, or files or settings changed since. Delete it, or "
            "choose another folder."
        )
    parts = [part for part in (header.train, header.test) if part is not None]
    shards = sum(len(part.shards) for part in parts)
    return Packed(
        store=store,
        train_rows=header.train.rows,
        test_rows=0 if header.test is None else header.test.rows,
        image_shape=header.image_shape,
        class_names=header.class_names,
        shards=shards,
        resumed=shards,
        skipped=sum(len(part.skipped) for part in parts),
        complete=True,
    )


@contextmanager
def _unfinished(store: Path, packed_from: str) -> Iterator[None]:
    """Hold the lock of a folder that is empty or has an unfinished pack of the same source; remove a new one again
    where nothing was written into it.
    """
    with disk_errors(f"write {store}"):
        if store.exists() and not store.is_dir():
            raise DataError(f"{shown(store)} is a file: name a folder for the packed store.")
        others = {path.name for path in store.iterdir()} - {_LOCK} if store.exists() else set()
        if others and _JOURNAL not in others:
            raise DataError(f"{shown(store)} is not empty, and no unfinished pack: choose another folder.")
        was_there = store.exists()
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(store / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _PRIVATE)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{shown(store)} is being written by another process.") from error
        with disk_errors(f"write {store}"):
            journal = store / _JOURNAL
            if journal.exists() and _journal(journal) != packed_from:
                raise DataError(
                    f"{shown(store)} has an unfinished pack of another source, or files or settings changed since. "
                    "Delete it, or choose another folder."
                )
            write_atomically(journal, json_bytes({"packed_from": packed_from}), mode=_PRIVATE)
        try:
            yield
        except BaseException:
            if not any(store.glob("*.npy")):  # nothing that a next call could use
                (store / _JOURNAL).unlink(missing_ok=True)
            raise
    finally:
        (store / _LOCK).unlink(missing_ok=True)
        os.close(descriptor)
        if not was_there and not any(store.iterdir()):
            store.rmdir()


def _journal(path: Path) -> str:
    try:
        return str(parse_object(read_file(path), name=_JOURNAL).get("packed_from"))
    except TamperError:
        return ""


@final
@dataclass
class _Written:
    """The shards of one split so far, with the digests of their rows."""

    shards: list[Shard] = field(default_factory=list[Shard])
    mapped: list[NDArray[np.uint8]] = field(default_factory=list[NDArray[np.uint8]])
    digests: list[NDArray[np.uint8]] = field(default_factory=list[NDArray[np.uint8]])


@final
class StoreWriter:
    """Writes the shards of a store and what belongs to their rows.

    Args:
        store: an empty folder, or one with an unfinished pack of the same source.
        shard_bytes: size of a shard in bytes, about.
    """

    def __init__(self, store: Path, shard_bytes: int) -> None:
        self._store = store
        self._shard_bytes = shard_bytes
        self._written: dict[str, _Written] = {}
        self.resumed = 0

    def decoder(self, split: str) -> Decoder:
        """Return a decoder that writes what it decodes into the shards of ``split``."""

        def decode_into_shards(
            paths: Sequence[Place],
            names: Sequence[str],
            *,
            image_shape: tuple[int, int, int],
            squash: bool = False,
            skip_bad: bool = False,
            progress: Progress | None = None,
            frames: Sequence[int | None] | None = None,
            window: tuple[float, float] | None = None,
        ) -> tuple[Tensor | MappedImages, list[int], BadFiles]:
            self._written[split] = _Written()
            results: list[str | None] = []
            size = self._rows_per_shard(image_shape)
            for number, start in enumerate(range(0, len(paths), size)):
                part = slice(start, start + size)
                reasons = self._resume(split, number, image_shape, len(paths[part]))
                if reasons is None:
                    pixels, reasons = decode_rows(
                        paths[part],
                        image_shape=image_shape,
                        squash=squash,
                        progress=_later(progress, start, len(paths)),
                        frames=None if frames is None else frames[part],
                        window=window,
                    )
                    if not skip_bad:
                        usable(reasons, names[part], skip_bad=False)
                    self.add(split, number, pixels[[reason is None for reason in reasons]], reasons)
                elif progress is not None:
                    progress("reading images", start + len(reasons), len(paths))
                results += reasons
            _, good, bad = usable(results, names, skip_bad=skip_bad)
            return self.mapped(split), good, bad

        return decode_into_shards

    def mapped(self, split: str) -> MappedImages:
        """Map the images of a split that are written so far."""
        written = self._written[split]
        brightest = max(shard.brightest for shard in written.shards)
        return MappedImages(written.mapped, np.concatenate(written.digests), brightest=brightest)

    def finish(self, split: str, images: ImageStore) -> PackedSplit:
        """Write the rest of a split: labels, digests, names and owners, and images that are still in memory."""
        if split not in self._written:
            size = self._rows_per_shard(images.image_shape)
            for number, start in enumerate(range(0, images.num_rows, size)):
                pixels = images.images[start : start + size].numpy()
                self.add(split, number, pixels, [None] * len(pixels))
        written = self._written[split]
        named = None if images.row_names == numbered_rows(images.num_rows) else images.row_names
        return PackedSplit(
            name=images.name,
            rows=images.num_rows,
            shards=tuple(written.shards),
            labels=self._save(f"{split}-labels.npy", images.labels.numpy()),
            digests=self._save(f"{split}-digests.npy", np.concatenate(written.digests)),
            row_names=self._save_texts(f"{split}-names.json", named),
            owners=self._save_texts(f"{split}-owners.json", images.owners),
            owners_from=images.owners_from,
            some_owners=self._save_texts(f"{split}-some-owners.json", sorted(images.some_owners) or None),
            skipped=images.skipped,
        )

    def remove_other_files(self, header: Header) -> None:
        """Remove shards of an earlier call that do not belong to the store."""
        parts = [part for part in (header.train, header.test) if part is not None]
        kept = {shard.file for part in parts for shard in part.shards}
        kept |= {each.file for part in parts for each in (part.labels, part.digests)}
        with disk_errors(f"write {self._store}"):
            for path in self._store.glob("*.npy"):
                if path.name not in kept:
                    path.unlink()

    def _rows_per_shard(self, image_shape: tuple[int, int, int]) -> int:
        return max(1, self._shard_bytes // math.prod(image_shape))

    def add(self, split: str, number: int, pixels: NDArray[np.uint8], reasons: Sequence[str | None]) -> None:
        """Write one shard, then the note that it is whole.

        Args:
            split: "train" or "test".
            number: the number of the shard, from 0.
            pixels: the images that could be read, uint8 (rows, channels, height, width).
            reasons: for each image None, or why it can't be read.
        """
        file, shard = f"{split}-{number:05}.npy", None
        if len(pixels):
            sha256 = self._save(file, pixels).sha256
            shard = Shard(file=file, sha256=sha256, rows=len(pixels), brightest=int(pixels.max()))
            self._add(split, shard, pixels)
        bad = {str(row): reason for row, reason in enumerate(reasons) if reason is not None}
        note = {"images": len(reasons), "bad": bad, "shard": None if shard is None else shard.model_dump()}
        with disk_errors(f"write {self._store}"):
            write_atomically(self._store / f"{split}-{number:05}.part.json", json_bytes(note), mode=_PRIVATE)

    def _add(self, split: str, shard: Shard, pixels: NDArray[np.uint8]) -> None:
        written = self._written.setdefault(split, _Written())
        written.shards.append(shard)
        written.digests.append(row_digests(pixels))
        written.mapped.append(map_npy(self._store / shard.file))

    def _resume(
        self, split: str, number: int, image_shape: tuple[int, int, int], images: int
    ) -> list[str | None] | None:
        """Take a shard that an earlier call wrote, if it is whole; return the reasons of its bad images."""
        note = self._store / f"{split}-{number:05}.part.json"
        if not note.exists():
            return None
        try:
            values = parse_object(read_file(note), name=note.name)
            reasons: list[str | None] = [values["bad"].get(str(row)) for row in range(images)]
            if values["images"] != images:
                return None
            if values["shard"] is None:
                return reasons
            shard = Shard.model_validate(values["shard"])
            content = read_file(self._store / shard.file, limit=None)
            if sha256_hex(content) != shard.sha256:
                return None
            pixels = map_npy(self._store / shard.file)
        except (TamperError, DataError, KeyError, AttributeError, ValueError):
            return None  # it is decoded again
        if pixels.shape != (shard.rows, *image_shape):
            return None
        self._add(split, shard, np.asarray(pixels))
        self.resumed += 1
        return reasons

    def _save(self, file: str, values: NDArray[Any]) -> ListedFile:
        """Write an array as .npy, and digest it on the way."""
        whole, header = np.ascontiguousarray(values), io.BytesIO()
        npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(whole))
        return self._save_bytes(file, header.getvalue(), whole.data)

    def _save_texts(self, file: str, texts: Sequence[str] | None) -> ListedFile | None:
        if texts is None:
            return None
        return self._save_bytes(file, json.dumps(list(texts), ensure_ascii=False).encode("utf-8", "replace"))

    def _save_bytes(self, file: str, *parts: bytes | memoryview) -> ListedFile:
        digest = hashlib.sha256()
        with disk_errors(f"write {self._store / file}"), replacing(self._store / file, mode=_PRIVATE) as opened:
            for part in parts:
                digest.update(part)
                opened.write(part)
        return ListedFile(file=file, sha256=digest.hexdigest())


def _later(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Count the images of earlier shards too."""
    if progress is None:
        return None
    return lambda what, done, _: progress(what, before + done, total)


def _other_files(options: LoadOptions) -> Iterable[str]:
    """List the paths besides the source that decide what is packed."""
    named = (options.unit_csv, options.findings, options.masks, options.image_folder)
    return [path for path in named if path is not None]


def _digest_of_files(paths: Iterable[str | Path]) -> str:
    """Digest the names, sizes and times of all files of some paths: whether a source changed since a pack began."""
    digest = hashlib.sha256()
    for path in map(Path, paths):
        digest.update(f"{path.absolute()}\0".encode(errors="surrogateescape"))
        for file in sorted(_files_of(path)):
            found = os.stat(file)
            digest.update(f"{file}\0{found.st_size}\0{found.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files_of(path: Path) -> list[str]:
    if not path.is_dir():
        return [str(path)] if path.exists() else []
    return [os.path.join(here, name) for here, _, names in os.walk(path, followlinks=False) for name in names]
