"""Folders of images: one folder per class, or train/ and test/ (or val/) folders of class folders.

A class is the name of a folder. The shape of the images is the one asked for or follows from most of the headers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, final

import numpy as np
import torch

from dpvision.data.images import (
    SUFFIXES,
    BadFiles,
    FrameList,
    Place,
    decode_all,
    expand_frames,
    is_readable,
    read_each,
    read_header,
    usable,
)
from dpvision.data.options import LoadOptions, Progress
from dpvision.data.store import ImageStore, MappedImages
from dpvision.data.units import (
    OWNED_BY_FILE,
    OWNED_BY_PATIENT,
    TEST_FOLDERS,
    TRAIN_FOLDER,
    known_owners,
    require_real_owners,
    tells_apart,
    unit_names,
    unit_numbers,
)
from dpvision.errors import DataError, counted, printable, shown, some_of

# Sides tried, largest first, when images have no common size and none is asked for.
USUAL_SIDES = (128, 96, 64, 32)
MAX_COMMON_SIDE = 256
# Folders that archivers and file servers put beside those of a user.
_OF_SYSTEMS = frozenset({"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"})


class Decoder(Protocol):
    """A function like ``decode_all``: decodes images into memory, or into the shards of a store."""

    def __call__(
        self,
        paths: Sequence[Place],
        names: Sequence[str],
        *,
        image_shape: tuple[int, int, int],
        squash: bool = False,
        skip_bad: bool = False,
        progress: Progress | None = None,
        frames: Sequence[int | None] | None = None,
        window: tuple[float, float] | None = None,
    ) -> tuple[torch.Tensor | MappedImages, list[int], BadFiles]: ...


@final
@dataclass(frozen=True, kw_only=True)
class Listing:
    """The image files below a folder of class folders.

    Attributes:
        root: the folder.
        class_names: the classes, in the order of their numbers.
        files: paths below ``root``, sorted.
        given_labels: the class number of each file, or labels (files, findings) where several classes, or none, can
            hold; None takes the class from the first folder.
        owners: who owns each file, where a table says so.
        owners_from: which column of which table that is, for the certificate.
        unused: a sentence about rows that are neither trained on nor tested on.
        content: a function from the number of a file to its bytes, where a table holds the images itself.
    """

    root: Path
    class_names: tuple[str, ...]
    files: tuple[str, ...]
    given_labels: torch.Tensor | None = None
    owners: tuple[str, ...] | None = None
    owners_from: str | None = None
    unused: str = ""
    content: Callable[[int], bytes] | None = None

    @property
    def labels(self) -> torch.Tensor:
        """The findings of each file, or its class number, given or from its first folder."""
        if self.given_labels is not None:
            return self.given_labels
        number = {name: index for index, name in enumerate(self.class_names)}
        return torch.tensor([number[file.split("/")[0]] for file in self.files], dtype=torch.int64)

    @property
    def places(self) -> list[Place]:
        """Where the image of each file is."""
        content = self.content
        if content is not None:
            return [partial(content, number) for number in range(len(self.files))]
        return [self.root / file for file in self.files]


def split_folders(root: Path) -> tuple[Path, Path | None]:
    """Find the folders of the training images and of the public test images.

    Args:
        root: a folder that holds nothing but split folders (train, and test, val, valid or validation), or class
            folders.
            A folder with others beside "train" is one of classes: "train" may be a class of vehicles.

    Returns:
        The training folder, which is ``root`` itself if it has no split folders, and the test folder if there is one.
    """
    folders = _folders(root)
    if TRAIN_FOLDER not in folders or not set(folders) <= {TRAIN_FOLDER, *TEST_FOLDERS}:
        return root, None
    test = next((name for name in TEST_FOLDERS if name in folders), None)
    return root / TRAIN_FOLDER, None if test is None else root / test


def list_classes(root: Path, *, class_names: Sequence[str] | None = None, least: int = 2) -> Listing:
    """List the images of a folder of class folders.

    Args:
        root: the folder.
        class_names: the classes of a model, in order; by default the names of the folders, with or without images.
        least: smallest number of class folders, without ``class_names``.

    Raises:
        DataError: if there are too few class folders, unknown ones, or no images.
    """
    found = _folders(root)
    if not found:
        raise DataError(f"{shown(root)} has no class folders: put the images of each class into a folder of its own.")
    if class_names is None and len(found) < least:
        raise DataError(f"{shown(root)} has only one class folder, {shown(found[0])}: at least {least} are needed.")
    unknown = [name for name in found if class_names is not None and name not in class_names]
    if unknown:
        raise DataError(f"{shown(root)} has folders that are no class of this model: {some_of(unknown)}.")
    below = (file for name in found for file in files_below(root / name, prefix=name))
    files = sorted(file for file in below if is_readable(root / file))
    if not files:
        raise DataError(f"{shown(root)} has no images in its class folders ({', '.join(sorted(SUFFIXES))}, DICOM).")
    names = tuple(found if class_names is None else class_names)
    return Listing(root=root, class_names=names, files=tuple(files), unused=_beside_classes(root))


def _beside_classes(root: Path) -> str:
    """Say how many images lie beside the class folders, in none of them."""
    files = [each for each in root.iterdir() if each.is_file() and not each.name.startswith(".") and is_readable(each)]
    return f"{counted(len(files), 'image')} beside the class folders, in none of them: not used." if files else ""


def load_listing(
    listing: Listing,
    *,
    image_shape: tuple[int, int, int],
    options: LoadOptions,
    name: str,
    also_known: Sequence[str] = (),
    progress: Progress | None = None,
    decode: Decoder = decode_all,
) -> ImageStore:
    """Decode the images of a listing into one store.

    Args:
        listing: from ``list_classes``.
        image_shape: channels, height and width of every image.
        options: what is a unit, and whether bad images are skipped.
        name: the store's name.
        also_known: files of the test split, which a CSV of owners may mention too.
        progress: called after each file.
        decode: decodes the images: into memory, unless a store is packed.

    Raises:
        DataError: if images can't be decoded or the owner of a file is not known.
    """
    found, owned_by = listing.owners, listing.owners_from
    if found is None:
        found = unit_names(listing.files, options=options, also_known=also_known)
    names = [printable(file) for file in listing.files]
    images = expand_frames(
        listing.places, names, first_only=options.frames == "first", skip_bad=options.skip_bad, progress=progress
    )
    units = None if found is None else tuple(found[file] for file in images.files)
    if units is None:
        units, owned_by = _owners_of_frames(images, listing, options)
    units, some_owners = known_owners(units, options)
    if units is not None and not options.public:
        require_real_owners(units, owned_by or "the named unit")
    places = listing.places
    if not options.public:
        of_file = None if units is None else dict(zip(images.files, units, strict=True))
        apart = of_file is None or units is None or not options.owners_are_units(units)
        require_each_file_once(places, names, owners=None if apart else of_file)
    pixels, good, bad = decode(
        [places[file] for file in images.files],
        images.names,
        image_shape=image_shape,
        squash=options.squash,
        skip_bad=options.skip_bad,
        progress=progress,
        frames=images.frames,
        window=options.window,
    )
    owners = None if units is None else tuple(units[row] for row in good)
    return ImageStore(
        images=pixels,
        labels=listing.labels[[images.files[row] for row in good]],
        class_names=tuple(printable(each) for each in listing.class_names),
        unit_of_row=unit_numbers(owners, len(good), options),
        owners=owners,
        owners_from=owned_by,
        some_owners=some_owners,
        name=name,
        row_names=tuple(images.names[row] for row in good),
        skipped=images.bad + bad,
        unused=listing.unused,
    )


def require_each_file_once(places: Sequence[Place], names: Sequence[str], *, owners: Mapping[int, str] | None) -> None:
    """Refuse a file that links bring into the data under several names: one image would be several units.

    Args:
        places: where the images are.
        names: their names, for the message.
        owners: the unit of each place by its number, if units own several.

    Raises:
        DataError: one file is at places of different units.
    """
    first: dict[tuple[int, int], int] = {}
    several: list[str] = []
    for number, place in enumerate(places):
        if not isinstance(place, Path):
            continue
        try:
            found = place.stat()
        except OSError:
            continue  # what can't be read is named where it is read
        other = first.setdefault((found.st_dev, found.st_ino), number)
        if other != number and (owners is None or owners.get(other) != owners.get(number)):
            several.append(f"{names[number]} is {names[other]}")
    if several:
        raise DataError(
            f"{counted(len(several), 'name')} of images lead to a file that has another name too: {some_of(several)}. "
            "One image would count as several units. Remove the links."
        )


def _owners_of_frames(
    images: FrameList, listing: Listing, options: LoadOptions
) -> tuple[tuple[str, ...] | None, str | None]:
    """Find owners that no option names: the patient of a DICOM file, or with ``frames=all`` the file of each frame.

    Raises:
        DataError: only some files name a patient, or a file has several frames and nothing says who owns them.
    """
    if any(patient is not None for patient in images.patients):
        missing = [name for name, patient in zip(images.names, images.patients, strict=True) if not patient]
        if missing and not options.public and options.units != "rows":
            raise DataError(
                f"{len(missing)} of {len(images.names)} images have no DICOM patient id: {some_of(missing)}. Name the "
                "owner with --unit-csv, --unit-pattern or --unit-folder-level, or protect single images: --units rows."
            )
        patients = tuple(printable(patient or "") for patient in images.patients)
        if options.units == "rows" and not options.public and not tells_apart(patients):
            return None, None  # by an explicit choice; who the people are is not known
        return patients, OWNED_BY_PATIENT
    if options.frames == "all":
        return tuple(printable(listing.files[file]) for file in images.files), OWNED_BY_FILE
    several = [listing.files[file] for file, frame in zip(images.files, images.frames, strict=True) if frame == 1]
    if several and not options.public:
        raise DataError(
            f"{len(several)} files have several frames or pages: {some_of(several)}. "
            "Name their owner, take --frames all (then a file is the privacy unit), or take --frames first."
        )
    return None, None


def shape_for(
    root: Path,
    files: Sequence[str],
    options: LoadOptions,
    *,
    places: Sequence[Place] | None = None,
    progress: Progress | None = None,
) -> tuple[int, int, int]:
    """Choose the shape of the images: as the options say, or as most of the headers say.

    Most, not all, so that one odd image among many does not change what everyone can see of the run.

    Args:
        root: the folder.
        files: image files below it.
        options: the shape asked for, and whether bad images are skipped.
        places: where the images are, if not below ``root``.
        progress: called after each file.

    Returns:
        Channels, height and width.
    """
    if options.size is not None and options.channels is not None:
        return options.channels, *options.size
    places = places or [root / file for file in files]
    results = read_each(
        lambda n: read_header(places[n], frames=True), len(files), what="looking at images", progress=progress
    )
    headers, _, _ = usable(results, files, skip_bad=options.skip_bad)
    grey = 2 * sum(each.grey for each in headers) > len(headers)
    size = options.size or usual_size([(each.height, each.width) for each in headers])
    return options.channels or (1 if grey else 3), *size


def usual_size(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Choose the size of more than half of the images, or else the largest usual square that half of them fill."""
    size, count = Counter(sizes).most_common(1)[0]
    if 2 * count > len(sizes) and max(size) <= MAX_COMMON_SIDE:
        return size
    typical = float(np.median([min(each) for each in sizes]))
    side = next((side for side in USUAL_SIDES if side <= typical), USUAL_SIDES[-1])
    return side, side


def _folders(root: Path) -> list[str]:
    """List the visible folders in ``root``, sorted, without those of archivers and file servers."""
    if not root.is_dir():
        raise DataError(f"{shown(root)} is not a folder.")
    try:
        names = (each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))
        return sorted(name for name in names if name not in _OF_SYSTEMS)
    except OSError as error:
        raise DataError(f"{shown(root)} can't be listed: {shown(error)}.") from error


def files_below(folder: Path, *, prefix: str = "") -> list[str]:
    """List all visible files below ``folder`` as POSIX paths after ``prefix``; linked folders are followed once
    each.
    """
    files: list[str] = []
    seen: set[str] = set()
    for here, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(here)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = Path(here).relative_to(folder)
        files += [(Path(prefix) / below / name).as_posix() for name in names if not name.startswith(".")]
    return files


def _refuse(error: OSError) -> None:
    """Turn an error of ``os.walk`` into a ``DataError``."""
    raise DataError(f"a folder can't be listed: {shown(error)}.") from error
