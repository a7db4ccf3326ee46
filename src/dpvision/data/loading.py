"""From the name of a source to stores: the one place that knows all kinds of sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpvision.data.cifar import has_cifar, load_cifar, open_files
from dpvision.data.datasets import KNOWN, load_digits, locate
from dpvision.data.idx import has_idx, load_idx
from dpvision.data.image_folder import list_classes, load_listing, shape_for, split_folders
from dpvision.data.images import fit
from dpvision.data.masks import load_pairs, with_foreground
from dpvision.data.normalisation import Normalisation, fixed_normalisation
from dpvision.data.npz import load_npz
from dpvision.data.options import LoadOptions, Progress
from dpvision.data.safe_read import reading
from dpvision.data.store import ImageStore, Splits
from dpvision.errors import DataError, shown, some_of

EMBEDDED = "digits"
Loaded = tuple[ImageStore, ImageStore | None, Normalisation | None]


def known_sources() -> tuple[str, ...]:
    """The names that ``load`` knows besides paths."""
    return (EMBEDDED, *KNOWN)


def load(source: str | Path, options: LoadOptions | None = None, *, progress: Progress | None = None) -> Splits:
    """A dataset by name (digits, mnist, fashionmnist, cifar10, cifar100), .npz file, archive, folder or volume.

    The training part is private. The test part, where a source has one, is declared public by whoever uses it.
    """
    options = options or LoadOptions()
    with reading(source):
        train, test, constants = _loaded(source, options, progress)
    normalisation = constants or fixed_normalisation(train.image_shape[0])
    return Splits(
        train=train,
        test=test,
        normalisation=normalisation.for_channels(train.image_shape[0]),
        public_facts=_public_facts(source, train, test, options),
    )


def load_one(
    source: str | Path,
    options: LoadOptions | None = None,
    *,
    class_names: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> ImageStore:
    """A single public set, such as a test folder: each row stands for itself, whatever the options say of units.

    A source with a test part gives that part. With ``class_names`` the classes are those of a trained model, and
    a class that the model does not know is refused.
    """
    plain = (options or LoadOptions()).without_units()
    with reading(source):
        path = Path(source)
        if plain.segmentation:
            train_store, test_store = _segmented(source, plain, class_names, progress)
            return test_store or train_store
        if not _is_name(source) and path.is_dir() and not _is_known_folder(path):
            train, test = split_folders(path)
            listing = list_classes(test or train, class_names=class_names, least=1)
            shape = shape_for(listing, plain, progress=progress)
            return load_listing(listing, image_shape=shape, options=plain, name=_name_of(path), progress=progress)
        train_store, test_store, _ = _loaded(source, plain, progress)
        return _with_classes(test_store or train_store, class_names)


def inspect(
    source: str | Path, options: LoadOptions | None = None, *, progress: Progress | None = None
) -> dict[str, Any]:
    """What there is, for printing before a run: rows, units, classes, shape. It reads everything and keeps nothing."""
    splits = load(source, options, progress=progress)
    facts = dict(splits.public_facts)
    facts["normalisation"] = splits.normalisation.to_dict()
    facts["skipped"] = len(splits.train.skipped) + (len(splits.test.skipped) if splits.test else 0)
    facts["most_rows_of_a_unit"] = int(splits.train.rows_of_units.counts.max(initial=0))
    return facts


def _loaded(source: str | Path, options: LoadOptions, progress: Progress | None) -> Loaded:
    name, path = str(source), Path(source)
    if options.segmentation:
        return *_segmented(source, options, None, progress), None
    if _is_name(source):
        return _load_known(name, options, progress)
    _require_path(source)
    if options.window is not None and path.suffix != ".npz":
        raise DataError(f"{shown(path)} has no intensities for a window: that is for .npz files and volumes.")
    if path.is_dir():
        return _load_folder(path, options, progress)
    if path.suffix == ".npz":
        _refuse_units(options, npz=True)
        return *_fitted(*load_npz(path, options), options), None
    if path.suffix in (".gz", ".tgz", ".tar"):
        return _load_archive(path, options)
    raise DataError(f"{shown(path)} is not a source: give a folder of class folders, an .npz file or a CIFAR archive.")


def _segmented(
    source: str | Path, options: LoadOptions, class_names: Sequence[str] | None, progress: Progress | None
) -> tuple[ImageStore, ImageStore | None]:
    path = Path(source)
    if _is_name(source) or _is_known_folder(path):
        raise DataError(f"{shown(source)} has one class an image and no masks: it is no source for segmentation.")
    _require_path(source)
    if class_names is not None and options.mask_classes == "merged" and len(class_names) != 2:
        raise DataError(f"merged masks have 2 classes, the model has {len(class_names)}: take mask_classes=classes.")
    if path.suffix != ".npz":
        return load_pairs(path, options, class_names=class_names, progress=progress)
    _refuse_units(options, npz=True)
    if options.masks is not None:
        raise DataError(f"{shown(path)} must hold its masks itself, as an array named masks: leave the option out.")
    train, test = _fitted(*load_npz(path, options, class_names=class_names), options)
    if not options.only_foreground:
        return train, test
    return with_foreground(train), None if test is None else with_foreground(test)


def _require_path(source: str | Path) -> None:
    if not Path(source).exists():
        raise DataError(f"{shown(source)} is neither a file or folder nor one of {', '.join(known_sources())}.")


def _load_known(name: str, options: LoadOptions, progress: Progress | None) -> Loaded:
    _refuse_units(options)
    if name == EMBEDDED:
        train, test, constants = load_digits()
    else:
        known = KNOWN[name]
        place = locate(known, options, progress=progress)
        train, test = _read_known(place, name)
        constants = known.normalisation
    return *_fitted(train, test, options), constants


def _load_folder(path: Path, options: LoadOptions, progress: Progress | None) -> Loaded:
    if _is_known_folder(path):
        _refuse_units(options)
        name = next((name for name in ("cifar10", "cifar100") if has_cifar(path, name)), "")
        return *_fitted(*_read_known(path, name), options), KNOWN[name].normalisation if name else None
    train_folder, test_folder = split_folders(path)
    listing = list_classes(train_folder)
    test_listing = None if test_folder is None else list_classes(test_folder, class_names=listing.class_names)
    shape = shape_for(listing, options, progress=progress)
    test_files = () if test_listing is None else test_listing.files
    train = load_listing(
        listing, image_shape=shape, options=options, name=_name_of(path), also_known=test_files, progress=progress
    )
    if test_listing is None:
        return train, None, None
    test = load_listing(
        test_listing,
        image_shape=shape,
        options=options.without_units(),
        name=f"{_name_of(path)} test",
        progress=progress,
    )
    return train, test, None


def _load_archive(path: Path, options: LoadOptions) -> Loaded:
    _refuse_units(options)
    files = open_files(path)
    name = "cifar10" if any(each.startswith("data_batch") for each in files.names) else "cifar100"
    return *_fitted(*load_cifar(files, name), options), KNOWN[name].normalisation


def _is_known_folder(path: Path) -> bool:
    return has_idx(path) or has_cifar(path, "cifar10") or has_cifar(path, "cifar100")


def _read_known(place: Path, name: str) -> tuple[ImageStore, ImageStore | None]:
    if name and KNOWN[name].kind == "cifar":
        return load_cifar(open_files(place), name)
    class_names = KNOWN[name].class_names if name else None
    title = name or _name_of(place)
    train = load_idx(place, "train", name=title, class_names=class_names)
    if train is None:
        raise DataError(f"{shown(place)} has no training files.")
    test = load_idx(place, "test", name=title, class_names=class_names or train.class_names)
    return train, test


def _fitted(train: ImageStore, test: ImageStore | None, options: LoadOptions) -> tuple[ImageStore, ImageStore | None]:
    fitted = fit(train, options)
    return fitted, None if test is None else fit(test, options.like(fitted))


def _with_classes(store: ImageStore, class_names: Sequence[str] | None) -> ImageStore:
    if class_names is None or tuple(class_names) == store.class_names:
        return store
    unknown = [name for name in store.class_names if name not in class_names]
    if unknown:
        raise DataError(f"{shown(store.name)} has classes that the model does not know: {some_of(unknown)}.")
    number = store.labels.new_tensor([list(class_names).index(name) for name in store.class_names])
    return replace(store, labels=number[store.labels], class_names=tuple(class_names))


def _refuse_units(options: LoadOptions, *, npz: bool = False) -> None:
    if options.public:
        return  # what names the owners of private rows need not fit public ones
    named = [name for name in ("unit_csv", "unit_folder_level", "unit_pattern") if getattr(options, name) is not None]
    if not npz and options.unit_column is not None:
        named.append("unit_column")
    if named:
        raise DataError(f"this source has no {' and no '.join(named)}: " + (_NPZ_HINT if npz else _ROW_HINT))


_NPZ_HINT = "name the array of unit ids by unit_column."
_ROW_HINT = "each of its rows is a unit of its own."


def _public_facts(
    source: str | Path, train: ImageStore, test: ImageStore | None, options: LoadOptions
) -> dict[str, Any]:
    """What a run declares as public about its data. Counts are of what was read; a run declares its own num_units."""
    return {
        # The name alone: a path tells more about its owner than a certificate should.
        "source": source if _is_name(source) else _name_of(Path(source)),
        "rows": train.num_rows,
        "units": train.num_units,
        "unit": "group" if options.owners_are_units(train.owners) else "row",
        "classes": train.num_classes,
        "class_names": list(train.class_names),
        "image_shape": list(train.image_shape),
        "image_shape_from": _shape_origin(source, options),
        "test_rows": None if test is None else test.num_rows,
    }


def _shape_origin(source: str | Path, options: LoadOptions) -> str:
    if options.size and options.channels:
        return "options"
    return "source" if _is_name(source) or not Path(source).is_dir() else "most of the images"


def _is_name(source: str | Path) -> bool:
    """Whether a known set is meant. A ``Path`` never is: a folder may be called digits."""
    return isinstance(source, str) and source in known_sources()


def _name_of(path: Path) -> str:
    return shown(path.resolve().name)
