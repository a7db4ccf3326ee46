"""Segmentation data: images or volumes and their masks, matched by file name, as one store with a class for each pixel.

A mask holds class numbers: it is resized by the nearest pixel and never mixed. Volumes are cut into slices, which are
the rows; their owner is the volume unless the options name another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dpvision.data.image_folder import files_below, require_each_file_once, shape_for, split_folders, usual_size
from dpvision.data.images import (
    MAX_WORKERS,
    SIXTEEN_BIT,
    decode,
    is_image,
    mask_bytes,
    mask_class_names,
    opened,
    read_each,
    read_header,
    scaled,
    upright,
    usable,
)
from dpvision.data.nifti import SUFFIXES as VOLUME_SUFFIXES
from dpvision.data.nifti import (
    is_volume,
    open_volume,
    require_nibabel,
    require_same_place,
    volume_images,
    volume_masks,
    volume_shape,
)
from dpvision.data.options import LoadOptions, MaskClasses, Progress
from dpvision.data.store import ImageStore
from dpvision.data.units import known_owners, require_real_owners, unit_names, unit_numbers
from dpvision.errors import BadFile, DataError, printable, require_memory, shown, some_of

# Compression blurs the edges of a mask: from here up a JPEG's pixel is foreground.
JPEG_THRESHOLD = 128


def decode_mask(path: Path, size: tuple[int, int], options: LoadOptions) -> NDArray[np.uint8]:
    """Decode one mask file as its image is decoded.

    Args:
        path: the file; PNG, TIFF and BMP keep class numbers, JPEG only foreground and background.
        size: height and width of the result.
        options: how to scale, and whether classes are merged.

    Returns:
        uint8 classes (H, W).

    Raises:
        BadFile: if the file does not hold class numbers.
    """
    with opened(path) as image:
        image.load()
        classes = mask_bytes(_numbers(image, options.mask_classes), options.mask_classes)
        flat = upright(Image.fromarray(classes), image)
    return np.asarray(scaled(flat, size, squash=options.squash, method=Image.Resampling.NEAREST))


def with_foreground(store: ImageStore) -> ImageStore:
    """Keep the rows whose mask is not empty; each row is decided by itself."""
    rows = np.flatnonzero(store.labels.flatten(1).any(1).numpy())
    if not len(rows):
        raise DataError(f"{shown(store.name)}: every mask is empty, so only_foreground leaves nothing.")
    return store if len(rows) == store.num_rows else replace(store.select_rows(rows), skipped=store.skipped)


def _numbers(image: Image.Image, mask_classes: MaskClasses) -> NDArray[Any]:
    """Read the values of a mask: palette indices as they are, those of a lossy file by a threshold."""
    if image.format in ("JPEG", "MPO"):
        if mask_classes != "merged":
            raise BadFile("a JPEG does not keep the numbers of classes; store the mask as PNG or TIFF")
        return np.asarray(image.convert("L")) >= JPEG_THRESHOLD
    if image.format == "WEBP":
        raise BadFile("a WebP may have lost numbers; store the mask as PNG or TIFF")
    if image.mode in ("1", "L", "P") or image.mode in SIXTEEN_BIT:
        return np.asarray(image)
    if image.mode == "RGB" and mask_classes == "merged":
        return np.asarray(image).max(axis=2)
    raise BadFile(f"a mask needs one channel of whole numbers, got {image.mode}; store it grey or with a palette")


MASK_ENDINGS = ("_mask", "_seg", "_label")
# Volumes are large: few at a time.
VOLUME_WORKERS = 2
Shape = tuple[int, int, int]


@final
@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Image or volume files below ``root``, sorted by name, and the mask of each below ``mask_root``."""

    root: Path
    mask_root: Path
    files: tuple[str, ...]
    masks: tuple[str, ...]

    @property
    def volumes(self) -> bool:
        """Whether the files are volumes; all are of one kind."""
        return is_volume(Path(self.files[0]))


class _Rows(NamedTuple):
    """The rows of one file: images, masks and names."""

    images_NCHW: Tensor
    masks_NHW: Tensor
    names: tuple[str, ...]


def load_pairs(
    source: Path,
    options: LoadOptions,
    *,
    class_names: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> tuple[ImageStore, ImageStore | None]:
    """Load a folder of images or volumes with masks, or one volume with its mask.

    Args:
        source: the images.
        options: ``masks`` says where the masks are. Of public data only the test split is read, if there is one.
        class_names: the classes of a model; by default they follow from the masks.
        progress: called after each file.

    Returns:
        The training split, and the test split if the folder has train/ and test/.

    Raises:
        DataError: if files do not match, can't be used, or the units would depend on each other.
    """
    if options.masks is None:
        raise DataError(f"{shown(source)} needs masks: name the folder, or the file, where they are.")
    folders = _splits(source, Path(options.masks))
    # Of public data the test part is wanted, if there is one.
    first, *rest = [find_pairs(*each) for each in (folders[-1:] if options.public else folders)]
    if first.volumes:
        require_nibabel()
    elif options.window is not None:
        raise DataError(f"{shown(source)} has no intensities for a window: that is for .npz files and volumes.")
    shape = _shape_for(first, options, progress)
    name = shown(source.resolve().name)
    owners = _owners(first, options, also_known=[file for part in rest for file in part.files])
    train = _store(first, owners, shape, options, name=name, class_names=class_names, progress=progress)
    if not rest:
        return train, None
    public, names = options.without_units(), train.class_names
    owners = _owners(rest[0], public)
    return train, _store(rest[0], owners, shape, public, name=f"{name} test", class_names=names, progress=progress)


def find_pairs(images: Path, masks: Path) -> Pairs:
    """Match every image with the mask of its name.

    Args:
        images: a folder or a file.
        masks: a folder or a file, of the same kind.

    Raises:
        DataError: if an image or a mask has no partner, or images and volumes are mixed.
    """
    if images.is_file() and masks.is_file():
        return Pairs(root=images.parent, mask_root=masks.parent, files=(images.name,), masks=(masks.name,))
    if not (images.is_dir() and masks.is_dir()):
        raise DataError(f"{shown(images)} and {shown(masks)} must be two folders or two files that exist.")
    files, answers = _files(images), _files(masks)
    if images.samefile(masks):
        files = [file for file in files if _bare(_stem(file)) == _stem(file)]
        answers = [file for file in answers if file not in files]
    if not files:
        raise DataError(f"{shown(images)} has no images and no volumes (.nii, .nii.gz).")
    volumes = {is_volume(Path(file)) for file in files}
    if len(volumes) > 1:
        raise DataError(f"{shown(images)} has images and volumes: keep them in folders of their own.")
    answers = [file for file in answers if is_volume(Path(file)) in volumes]
    return Pairs(root=images, mask_root=masks, files=tuple(files), masks=_matched(files, answers))


def _matched(files: Sequence[str], answers: Sequence[str]) -> tuple[str, ...]:
    """Find the mask of each file: the file of its name, or of its name and an ending such as _mask."""
    stems = {_stem(file) for file in files}
    key_of = {file: stem if (stem := _stem(file)) in stems else _bare(stem) for file in answers}
    problems = []
    for what, keys in (("images", list(map(_stem, files))), ("masks", list(key_of.values()))):
        twice = [key for key, count in Counter(keys).items() if count > 1]
        problems += [f"{len(twice)} names belong to several {what}: {some_of(twice)}."] if twice else []
    mask_of = {key: file for file, key in key_of.items()}
    alone = [file for file in files if _stem(file) not in mask_of]
    problems += [f"{len(alone)} images have no mask: {some_of(alone)}."] if alone else []
    alone = [file for file, key in key_of.items() if key not in stems]
    problems += [f"{len(alone)} masks have no image: {some_of(alone)}."] if alone else []
    if problems:
        problems.append("A mask has its image's name, or that and _mask, _seg or _label.")
        raise DataError(" ".join(problems))
    return tuple(mask_of[_stem(file)] for file in files)


def _splits(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    """List the folders of images and masks of each split: train/ and test/ must be in both folders, or in none."""
    if not images.is_dir():
        return [(images, masks)]
    train, test = split_folders(images)
    if train == images:
        return [(images, masks)]
    return [(part, masks / part.name) for part in (train, test) if part is not None]


def _files(root: Path) -> list[str]:
    """List the images and volumes below a folder, sorted."""
    return sorted(file for file in files_below(root) if is_image(Path(file)) or is_volume(Path(file)))


def _stem(file: str) -> str:
    """Cut off the suffix, .nii.gz included."""
    suffix = next((each for each in VOLUME_SUFFIXES if file.lower().endswith(each)), Path(file).suffix)
    return file[: len(file) - len(suffix)]


def _bare(stem: str) -> str:
    """Cut off the ending of a mask's name."""
    ending = next((each for each in MASK_ENDINGS if stem.lower().endswith(each)), "")
    return stem[: len(stem) - len(ending)]


def _owners(
    pairs: Pairs, options: LoadOptions, *, also_known: Sequence[str] = ()
) -> tuple[tuple[str, ...] | None, frozenset[str]]:
    """Find the owner of each file, if known, and those that are known where others are not; a volume shows one patient,
    named by the file unless the options say otherwise.
    """
    found, some_owners = known_owners(unit_names(pairs.files, options=options, also_known=also_known), options)
    if found is not None and not options.public:
        require_real_owners(found, "the named unit")
    if not options.public:
        own = found is not None and options.owners_are_units(found)
        names = [printable(file) for file in pairs.files]
        of_file = dict(enumerate(found)) if own and found is not None else None
        require_each_file_once([pairs.root / file for file in pairs.files], names, owners=of_file)
    if not pairs.volumes:
        return found, some_owners
    found = found or tuple(printable(_stem(file)) for file in pairs.files)
    slices_are_units = not options.public and not options.owners_are_units(found)
    if slices_are_units and options.window is None:
        # A volume's own range would make each of its slices depend on the others.
        raise DataError(
            "volumes whose slices are the units need a window: intensities that are public, such as -160 240 for the "
            "liver in CT. Without it a volume is scaled by its own values, which only its owner as the unit allows."
        )
    if slices_are_units and options.skip_bad:
        raise DataError(
            "skip_bad must be off for volumes whose slices are the units: one bad slice would take the others with it."
        )
    return found, some_owners


def _shape_for(pairs: Pairs, options: LoadOptions, progress: Progress | None) -> Shape:
    """Choose the shape of the rows: as the options say, or as most of the headers say."""
    if not pairs.volumes:
        return shape_for(pairs.root, pairs.files, options, progress=progress)
    if options.size is not None:
        return options.channels or 1, *options.size

    def slice_size(n: int) -> tuple[int, int]:
        sides = list(volume_shape(pairs.root / pairs.files[n]))
        del sides[options.volume_axis]
        return sides[0], sides[1]

    found = read_each(slice_size, len(pairs.files), what="looking at volumes", progress=progress)
    sizes = [size for size in found if not isinstance(size, str)]
    # Without any size every volume is bad, and reading them will say why.
    height, width = usual_size(sizes) if sizes else (1, 1)
    return options.channels or 1, height, width


def _store(
    pairs: Pairs,
    known: tuple[tuple[str, ...] | None, frozenset[str]],
    shape: Shape,
    options: LoadOptions,
    *,
    name: str,
    class_names: Sequence[str] | None,
    progress: Progress | None,
) -> ImageStore:
    """Read all pairs into one store of this shape. A file that can't be used is an error, or skipped and counted."""
    names, (owners, some_owners) = [printable(file) for file in pairs.files], known
    # A volume has at least one slice.
    require_memory(len(names) * math.prod(shape), f"{len(names)} images with masks")
    results = read_each(
        lambda n: (_read_volume if pairs.volumes else _read_image)(pairs, n, shape, options),
        len(names),
        what="reading images and masks",
        progress=progress,
        workers=VOLUME_WORKERS if pairs.volumes else MAX_WORKERS,
    )
    found, good, bad = usable(results, names, skip_bad=options.skip_bad, what="images or their masks can't be used")
    masks_NHW = torch.cat([rows.masks_NHW for rows in found])
    of_rows = owners and tuple(owners[n] for n, rows in zip(good, found, strict=True) for _ in rows.names)
    store = ImageStore(
        images=torch.cat([rows.images_NCHW for rows in found]),
        labels=masks_NHW,
        class_names=tuple(class_names or mask_class_names([masks_NHW.numpy()], options.mask_classes)),
        unit_of_row=unit_numbers(of_rows, len(masks_NHW), options),
        owners=of_rows,
        some_owners=some_owners,
        name=name,
        row_names=tuple(each for rows in found for each in rows.names),
        skipped=bad,
    )
    return with_foreground(store) if options.only_foreground else store


def _read_image(pairs: Pairs, n: int, shape: Shape, options: LoadOptions) -> _Rows:
    """Read an image and its mask."""
    path, mask_path = pairs.root / pairs.files[n], pairs.mask_root / pairs.masks[n]
    image = decode(path, image_shape=shape, squash=options.squash)
    with _about(mask_path):
        here, there = read_header(path), read_header(mask_path)
        if (here.height, here.width) != (there.height, there.width):
            raise BadFile(f"{there.height}×{there.width}, but its image is {here.height}×{here.width}")
        mask = decode_mask(mask_path, shape[1:], options)
    # Copies: Pillow's own memory is read-only.
    images, masks = (torch.from_numpy(each.copy())[None] for each in (image, mask))
    return _Rows(images, masks, (printable(pairs.files[n]),))


def _read_volume(pairs: Pairs, n: int, shape: Shape, options: LoadOptions) -> _Rows:
    """Read a volume and its mask, slice by slice."""
    volume, mask_path = open_volume(pairs.root / pairs.files[n]), pairs.mask_root / pairs.masks[n]
    images = volume_images(volume, image_shape=shape, options=options)
    with _about(mask_path):
        mask = open_volume(mask_path)
        require_same_place(volume, mask)
        masks = volume_masks(mask, size=shape[1:], options=options)
    kept = torch.arange(len(masks))
    if options.only_foreground:
        kept = kept[(masks > 0).flatten(1).any(1)]
    names = tuple(f"{printable(pairs.files[n])} slice {index}" for index in kept.tolist())
    return _Rows(images[kept], masks[kept], names)


@contextmanager
def _about(mask: Path) -> Iterator[None]:
    """Name the mask in whatever goes wrong inside the ``with`` block."""
    try:
        yield
    except (BadFile, OSError, ValueError, SyntaxError) as error:
        raise BadFile(f"mask {shown(mask.name)}: {error}") from error
