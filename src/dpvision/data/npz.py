"""Images and labels, masks or owners from the arrays of an .npz file.

Layouts and types are told apart by shape and type, never by the values. ``safe_read`` reads the arrays.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dpvision.data.images import mask_bytes, mask_class_names, windowed
from dpvision.data.options import LoadOptions
from dpvision.data.safe_read import open_regular, read_member, reading
from dpvision.data.store import ImageStore, store_of_arrays
from dpvision.data.units import require_real_owners
from dpvision.errors import DataError, brief, printable, shown, some_of

IMAGE_KEYS = {"train": ("images", "x_train", "train_images", "X", "x"), "test": ("x_test", "test_images")}
LABEL_KEYS = {"train": ("labels", "y_train", "train_labels", "Y", "y"), "test": ("y_test", "test_labels")}
MASK_KEYS = {"train": ("masks", "train_masks", "masks_train"), "test": ("test_masks", "masks_test")}
CLASS_NAMES_KEY = "class_names"
_IMAGES_AT_ONCE = 256


@final
@dataclass(frozen=True)
class _Part:
    """One split as it is in the file: images, labels or masks, and owners if there are any."""

    images: NDArray[Any]
    answers: NDArray[Any]
    owners: NDArray[Any] | None


def load_npz(
    path: Path, options: LoadOptions | None = None, *, class_names: Sequence[str] | None = None
) -> tuple[ImageStore, ImageStore | None]:
    """Load the splits of an .npz file.

    Args:
        path: the file.
        options: ``unit_column`` names the array of owners; that of the test split has ``test_`` before its name.
        class_names: the classes of a model; by default those of the file.

    Returns:
        The training split, and the test split if the file has one.

    Raises:
        DataError: if arrays are missing, do not match, or are not what they should be.
    """
    options = options or LoadOptions()
    return splits_of_arrays(_open(path, options.unit_column), path, options, class_names=class_names)


def has_val_arrays(path: Path) -> bool:
    """Whether an .npz file that could be loaded has a validation part too, as MedMNIST's have."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        return not {"val_images.npy", "x_val.npy"}.isdisjoint(archive.namelist())


def arrays_of(data: object) -> dict[str, NDArray[Any]]:
    """Bring images that are given in Python to the arrays of an .npz file.

    Args:
        data: a dict of arrays or tensors, by the names that an .npz file uses; a pair of images and labels; or a
            map-style Dataset of such pairs, which is read as a whole and may name its classes in ``classes``.

    Raises:
        DataError: it is none of these, or its items do not have the same shape.
    """
    if isinstance(data, Mapping):
        return {str(name): np.atleast_1d(np.asarray(values)) for name, values in data.items()}
    if isinstance(data, tuple) and len(data) == 2:
        return {"images": np.asarray(data[0]), "labels": np.atleast_1d(np.asarray(data[1]))}
    rows: Any = data
    if isinstance(data, (str, bytes)) or not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise DataError(
            f"data must be a pair of images and labels, a dict of arrays or a map-style Dataset, got "
            f"{type(data).__name__}."
        )
    items = [rows[row] for row in range(len(rows))]
    if not all(isinstance(item, (tuple, list)) and len(item) == 2 for item in items):
        raise DataError("each item of the data must be a pair of an image and its label.")
    try:
        images, labels = (np.stack([np.asarray(part) for part in parts]) for parts in zip(*items, strict=True))
    except ValueError as error:
        raise DataError(f"the images or labels of the data do not have the same shape: {shown(error)}.") from error
    names = {CLASS_NAMES_KEY: np.asarray(rows.classes, dtype=np.str_)} if hasattr(rows, "classes") else {}
    return {"images": images, "labels": labels, **names}


def splits_of_arrays(
    arrays: dict[str, NDArray[Any]], path: Path, options: LoadOptions, *, class_names: Sequence[str] | None = None
) -> tuple[ImageStore, ImageStore | None]:
    """Make the splits of arrays that are named as in an .npz file; ``path`` is where they come from, for messages.

    Raises:
        DataError: as for ``load_npz``.
    """
    splits = ["train", *(["test"] if any(key in arrays for key in IMAGE_KEYS["test"]) else [])]
    parts = [_part(arrays, split, options, path) for split in splits]
    if options.findings is not None:
        names = _finding_names(arrays, class_names or options.finding_list, parts[0].answers.shape[1], path)
        parts = [replace(part, answers=_findings(part.answers, names, path)) for part in parts]
        return _stores(parts, names, path, options)
    labels = [part.answers for part in parts if part is not parts[0] or options.public or options.classes_are_public]
    names = _class_names(arrays, labels, class_names, options, path)
    return _stores(parts, names, path, options)


def _stores(
    parts: Sequence[_Part], names: tuple[str, ...], path: Path, options: LoadOptions
) -> tuple[ImageStore, ImageStore | None]:
    """Make the stores of both splits, or of the one that there is."""
    train = _store(parts[0], names, name=f"{path.stem} train", path=path, options=options)
    if len(parts) == 1:
        return train, None
    return train, _store(parts[1], names, name=f"{path.stem} test", path=path, options=options.without_units())


def _part(arrays: dict[str, NDArray[Any]], split: str, options: LoadOptions, path: Path) -> _Part:
    """Pick the arrays of a split. Owners of private rows must be there; a public split may lack them."""
    images = _pick(arrays, IMAGE_KEYS[split], path)
    answers = _pick(arrays, (MASK_KEYS if options.segmentation else LABEL_KEYS)[split], path)
    if options.segmentation:
        answers = _masks(answers, options, path)
    elif options.findings is not None:
        answers = answers[:, None] if answers.ndim == 1 else answers
        if answers.ndim != 2:
            raise DataError(f"{shown(path)}: findings must be (N, findings), got {answers.shape}.")
    if len(answers) != len(images):  # before anything as long as one of them is made
        what = f"{'masks' if options.segmentation else 'labels'} {answers.shape}"
        raise DataError(f"{shown(path)}: {what} don't match {len(images)} images {images.shape[1:]}.")
    owners, column = None, options.unit_column
    if column is not None and split == "test":
        column = f"test_{column}"
    # Training without its owners is refused; a public part without them is measured as one.
    if column is not None and (column in arrays or not (options.public or split == "test")):
        owners = _units(_pick(arrays, (column,), path), column, path)
        if split == "train" and not options.public:
            require_real_owners(
                _texts(owners.reshape(-1)), f"the array {shown(column)}", where=lambda row: f"row {row} (from 0)"
            )
    part = _Part(images, answers, owners)
    if options.frames == "all" and images.ndim == 4 and not {1, 3} & {images.shape[1], images.shape[3]}:
        if options.segmentation or len(images) != len(answers) or 0 in images.shape:
            return part  # refused later, as what it is
        names = owners if options.unit_column else [f"{split} volume {number}" for number in range(len(images))]
        return _slices_of(part, names, options.volume_axis)
    return part


def _slices_of(part: _Part, owners: Any, axis: int) -> _Part:
    """Cut volumes (N, D, H, W) into slices: each has the label of its volume, and the same owner."""
    slices = np.moveaxis(part.images, 1 + axis, 1)
    count = slices.shape[1]
    each = None if owners is None else np.repeat(np.asarray(owners), count)
    return _Part(slices.reshape(-1, *slices.shape[2:]), np.repeat(part.answers, count, axis=0), each)


def _store(part: _Part, names: tuple[str, ...], *, name: str, path: Path, options: LoadOptions) -> ImageStore:
    """Check that the arrays of a split match and make a store of them."""
    pixels = image_bytes(part.images, options.window, path)
    answers, owners, rows = part.answers, part.owners, len(pixels)
    wanted = (rows, *pixels.shape[2:]) if options.segmentation else (rows,)
    wanted = wanted if options.findings is None else (rows, len(names))
    for what, values, shape in (("labels", answers, wanted), ("units", owners, (rows,))):
        if values is not None and values.shape != shape:
            what = "masks" if len(shape) > 1 else what
            if what == "labels" and values.ndim == 2 and len(values) == rows:
                raise DataError(
                    f"{shown(path)}: labels {values.shape} are several findings an image: train on them with "
                    f"--findings {shown(path)}, and name them with --findings-columns A,B,…"
                )
            raise DataError(f"{shown(path)}: {what} {values.shape} don't match {rows} images {pixels.shape[2:]}.")
    if not options.segmentation and options.findings is None:
        answers = _numbered(answers, names, path)
    texts = None if owners is None else _texts(owners)
    by_row = not options.owners_are_units(texts)
    return store_of_arrays(
        images=pixels, labels=answers, class_names=names, name=name, unit_names=texts, rows_are_units=by_row
    )


def _masks(values: NDArray[Any], options: LoadOptions, path: Path) -> NDArray[np.uint8]:
    """Bring masks to (N, H, W) and to classes."""
    if values.ndim == 4 and 1 in (values.shape[1], values.shape[3]):
        values = values[..., 0] if values.shape[3] == 1 else values[:, 0]
    if values.ndim != 3:
        raise DataError(f"{shown(path)}: masks must be (N, H, W), got {values.shape}.")
    with reading(path):
        return mask_bytes(values, options.mask_classes)


def _open(path: Path, unit_column: str | None) -> dict[str, NDArray[Any]]:
    """Read the arrays of the file whose names are known here, without pickle."""
    named = (key for keys in (IMAGE_KEYS, LABEL_KEYS, MASK_KEYS) for split in keys.values() for key in split)
    wanted = {*named, CLASS_NAMES_KEY, unit_column, f"test_{unit_column}"}
    try:
        with reading(path), open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist() if m.filename.endswith(".npy")}
            arrays = {key: np.atleast_1d(read_member(archive, members[key])) for key in members if key in wanted}
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise DataError(f"{shown(path)} can't be read as .npz: {shown(error)}.") from error
    if not arrays:
        raise DataError(f"{shown(path)} has no images: its arrays are {some_of(sorted(members), limit=8) or 'none'}.")
    return arrays


def _pick(arrays: dict[str, NDArray[Any]], keys: Sequence[str], path: Path) -> NDArray[Any]:
    """Return the first array of these names; a column (N, 1) becomes (N,)."""
    for key in keys:
        if key in arrays:
            return arrays[key].reshape(-1) if arrays[key].ndim == 2 and arrays[key].shape[1] == 1 else arrays[key]
    raise DataError(f"{shown(path)} has no array named {shown(' or '.join(keys))} beside {some_of(sorted(arrays))}.")


def image_bytes(images: NDArray[Any], window: tuple[float, float] | None, path: Path) -> NDArray[np.uint8]:
    """Bring images to uint8 (N, C, H, W), by a window if there is one; ``path`` says where they are from."""
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[1:]:
        raise DataError(
            f"{shown(path)}: images must be (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W), got {images.shape}. Of "
            "volumes (N, D, H, W) --frames all takes the slices: then a volume is the privacy unit."
        )
    if window is None:
        return np.ascontiguousarray(_bytes(images, path))
    with reading(path):
        return windowed(images, window)


def _bytes(images: NDArray[Any], path: Path) -> NDArray[np.uint8]:
    """Scale values to bytes by the range of their type: 8 and 16 bits, booleans, floats in 0..1, whole numbers in
    0..255.
    """
    kind, width = images.dtype.kind, images.dtype.itemsize
    if kind == "u" and width == 1:
        return images
    if kind == "u" and width == 2:
        return _by_piece(images, lambda piece: (piece.astype(np.uint32) * 255 + 32767) // 65535)
    if kind == "b":
        return _by_piece(images, lambda piece: piece * np.uint8(255))
    top = {"f": 1, "i": 255, "u": 255}.get(kind)
    if top is None or (images.size and not (images.min() >= 0 and images.max() <= top)):
        raise DataError(
            f"{shown(path)}: {images.dtype} images must be numbers in 0..{top or 255}. Store them as uint8, 0..255, "
            "or give the window of intensities to be seen."
        )
    return _by_piece(images, lambda piece: np.rint(piece.astype(np.float64) * (255 / top)))


def _by_piece(images: NDArray[Any], change: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[np.uint8]:
    """Change some images at a time: all at once would take up to eight times the memory of the file's own array."""
    found = np.empty(images.shape, dtype=np.uint8)
    for start in range(0, len(images), _IMAGES_AT_ONCE):
        found[start : start + _IMAGES_AT_ONCE] = change(images[start : start + _IMAGES_AT_ONCE])
    return found


def _class_names(
    arrays: dict[str, NDArray[Any]],
    labels: Sequence[NDArray[Any]],
    given: Sequence[str] | None,
    options: LoadOptions,
    path: Path,
) -> tuple[str, ...]:
    """Name the classes: as given, as the file says, or as those labels say that are public."""
    declared = given if given is not None else options.class_list
    if declared is not None:
        return tuple(declared)
    if CLASS_NAMES_KEY in arrays and not (options.segmentation and options.mask_classes == "merged"):
        return tuple(_texts(arrays[CLASS_NAMES_KEY].reshape(-1)))
    if options.segmentation and (labels or options.mask_classes == "merged"):
        return mask_class_names(labels, options.mask_classes)
    if not labels:
        raise DataError(
            f"{shown(path)} does not say which classes there are, and has no public test part that shows them: private "
            "labels must not decide it. Declare them with --classes A,B,…, or add an array of texts named class_names."
        )
    if len({each.dtype.kind in "US" for each in labels}) > 1:
        raise DataError(f"{shown(path)}: labels are texts in one split and numbers in the other.")
    values = np.concatenate([each.reshape(-1) for each in labels])
    if values.dtype.kind in "US":
        return tuple(sorted(set(_texts(values))))
    top = int(_whole(values, path).max(initial=-1))
    if top >= 10_000:
        raise DataError(f"{shown(path)}: labels up to {top} without class_names are taken for a mistake.")
    return tuple(str(label) for label in range(top + 1))


def _finding_names(
    arrays: dict[str, NDArray[Any]], given: Sequence[str] | None, count: int, path: Path
) -> tuple[str, ...]:
    """Name the findings: as given, as the file says, or by number."""
    stated = _texts(arrays[CLASS_NAMES_KEY].reshape(-1)) if CLASS_NAMES_KEY in arrays else None
    names = tuple(given or stated or map(str, range(count)))
    if len(names) != count:
        raise DataError(
            f"{shown(path)} has {count} findings an image, and {len(names)} names for them: {some_of(names)}. Name all "
            "of them in their order with --findings-columns."
        )
    return names


def _findings(labels: NDArray[Any], names: Sequence[str], path: Path) -> NDArray[np.float32]:
    """Read findings: 1, 0, or unknown (-1 or NaN), which becomes NaN."""
    if labels.dtype.kind not in "biuf" or labels.shape[1:] != (len(names),):
        raise DataError(
            f"{shown(path)}: findings must be numbers (N, {len(names)}), got {labels.dtype} {labels.shape}."
        )
    found = labels.astype(np.float32)
    found[found == -1] = np.nan
    wrong = np.argwhere(~np.isnan(found) & (found != 0) & (found != 1))
    if len(wrong):
        row, column = wrong[0].tolist()
        raise DataError(
            f"{shown(path)}: findings must be 1, 0, or -1 or NaN (unknown), got {brief(labels[row, column])} in row "
            f"{row} (from 0) for {shown(names[column])}."
        )
    return found


def _numbered(labels: NDArray[Any], names: tuple[str, ...], path: Path) -> NDArray[np.int64]:
    """Number the labels by their class."""
    if labels.dtype.kind not in "US":
        numbers = _whole(labels, path)
        if numbers.size and numbers.max() >= len(names):
            row = int(np.argmax(numbers >= len(names)))
            raise DataError(
                f"{shown(path)}: labels must lie in 0..{len(names) - 1}, the numbers of the classes, got {numbers[row]}"
                f" in row {row} (from 0). Name all classes with --classes, or in an array class_names."
            )
        return numbers
    number = {name: index for index, name in enumerate(names)}
    unknown = [row for row, label in enumerate(_texts(labels)) if label not in number]
    if unknown:
        names_of = some_of(sorted({_texts(labels)[row] for row in unknown[:1]}))
        raise DataError(f"{shown(path)} has labels that are no class: {names_of} in row {unknown[0]} (from 0).")
    return np.array([number[label] for label in _texts(labels)], dtype=np.int64)


def _whole(values: NDArray[Any], path: Path) -> NDArray[np.int64]:
    """Require whole numbers from 0 to 2³¹."""
    if values.dtype.kind not in "iub":
        raise DataError(f"{shown(path)}: labels must be whole numbers >= 0 or texts, got {values.dtype}.")
    if values.size and (values.min() < 0 or values.max() > 2**31):
        row = int(np.argmax((values < 0) | (values > 2**31)))
        raise DataError(f"{shown(path)}: labels must be whole numbers >= 0, got {values[row]} in row {row} (from 0).")
    return values.astype(np.int64)


def _units(units: NDArray[Any], column: str, path: Path) -> NDArray[Any]:
    """Require an owner for each row, as a whole number or a text."""
    if units.dtype.kind not in "iubUS":
        raise DataError(f"{shown(path)}: {shown(column)} must hold whole numbers or texts, got {units.dtype}.")
    if units.dtype.kind in "US" and not all(_texts(units.reshape(-1))):
        raise DataError(f"{shown(path)}: {shown(column)} is empty in some rows. Each row needs its unit.")
    return units


def _texts(values: NDArray[Any]) -> list[str]:
    """Decode values to printable texts."""
    return [printable(v.decode("utf-8", "replace") if isinstance(v, bytes) else v) for v in values.tolist()]
