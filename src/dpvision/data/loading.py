"""Load a dataset from its name or its path: the one place that knows every kind of source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from dpvision.data.datasets import DATASETS, DIGITS, dataset_names, load_digits, locate
from dpvision.data.downsampled_imagenet import is_downsampled_imagenet, load_downsampled_imagenet
from dpvision.data.finding_table import list_findings
from dpvision.data.foreign_shards import refuse_webdataset
from dpvision.data.image_folder import Decoder, Listing, list_classes, load_listing, shape_for, split_folders
from dpvision.data.images import decode_all, fit
from dpvision.data.manifest import is_tiny_imagenet, list_manifest, list_tiny_imagenet, refuse_test_files
from dpvision.data.masks import load_pairs, with_foreground
from dpvision.data.mnist_cifar import has_cifar, has_idx, load_cifar, load_idx, open_cifar, refuse_pickled_cifar
from dpvision.data.normalisation import Normalisation, fixed_normalisation
from dpvision.data.npz import arrays_of, has_val_arrays, load_npz, splits_of_arrays
from dpvision.data.options import LoadOptions, Progress
from dpvision.data.packed_store import is_packed, open_packed
from dpvision.data.safe_read import reading
from dpvision.data.store import ImageStore
from dpvision.data.table_files import is_table
from dpvision.data.units import TEST_FOLDERS
from dpvision.errors import DataError, shown, some_of

Pair = tuple[ImageStore, ImageStore | None]
Decoders = Callable[[str], Decoder]
"""From the name of a split to what decodes its image files."""


@final
@dataclass(frozen=True, kw_only=True)
class Splits:
    """What a source holds.

    Attributes:
        train: the private training split.
        test: the test split, public by declaration of the user; None if the source has none.
        normalisation: published constants of a public dataset, fixed ones otherwise.
        unused: a sentence about a validation part that is neither trained on nor tested on; "" if there is none.
    """

    train: ImageStore
    test: ImageStore | None
    normalisation: Normalisation
    unused: str = ""


def load(
    source: str | Path,
    options: LoadOptions | None = None,
    *,
    progress: Progress | None = None,
    decoders: Decoders | None = None,
) -> Splits:
    """Load a dataset.

    Args:
        source: a name (digits, mnist, fashionmnist, cifar10, cifar100), or the path of an .npz file, a CIFAR archive,
            a table of files and labels, a folder, a packed store or a volume. A ``Path`` is never a name.
        options: how to read it.
        progress: called while files are read.
        decoders: from the name of a split ("train" or "test") to what decodes its image files; into memory by default.

    Returns:
        The splits. The training split is private; who uses the test split declares it public.

    Raises:
        DataError: if the source does not exist or can't be read as what it should be.
    """
    with reading(source):
        train, test, constants = _load(source, options or LoadOptions(), None, progress, decoders)
    channels = train.image_shape[0]
    normalisation = (constants or fixed_normalisation(channels)).for_channels(channels)
    part = "" if _is_name(source) else unused_part(Path(source), has_test=test is not None)
    unused = " ".join(text for text in (train.unused, part) if text)
    return Splits(train=train, test=test, normalisation=normalisation, unused=unused)


def load_given(data: object, name: str, options: LoadOptions | None = None) -> Splits:
    """Make the splits of images that are given in Python.

    Args:
        data: as for ``arrays_of``.
        name: what the data is called; not the name of a public dataset, whose size is published, and not a path.
        options: how to read it.

    Raises:
        DataError: the data can't be used, or ``name`` means another source.
    """
    options = options or LoadOptions()
    if name in dataset_names() or Path(name).exists():
        raise DataError(f"the data is given in Python, and {shown(name)} names another source: call it otherwise.")
    _refuse_units(options, npz=True)
    with reading(name):
        train, test = _fitted(*splits_of_arrays(arrays_of(data), Path(name), options), options)
    return Splits(train=train, test=test, normalisation=fixed_normalisation(train.image_shape[0]))


def require_given(data: object) -> None:
    """Refuse splits that were loaded from a source: a run on them names that source, and would not know which it is.

    Raises:
        DataError: ``data`` is of that kind.
    """
    if isinstance(data, Splits):
        raise DataError("data must be arrays or tensors, got splits that were loaded: name their source instead.")


def load_one(
    source: str | Path,
    options: LoadOptions | None = None,
    *,
    class_names: Sequence[str] | None = None,
    owners: bool = False,
    progress: Progress | None = None,
) -> ImageStore:
    """Load one public dataset, such as a test folder.

    Args:
        source: as for ``load``. Of a source with a test split, that split is loaded.
        options: how to read it. Each row is by itself, whatever they say of units.
        class_names: the classes of a trained model; by default those of the source.
        owners: find out who owns each row, as the options say, where that can be found out.
        progress: called while files are read.

    Returns:
        The images.

    Raises:
        DataError: as for ``load``, and if the source has a class that the model does not have.
    """
    with reading(source):
        train, test, _ = _load(source, (options or LoadOptions()).without_units(owners=owners), class_names, progress)
    return _with_classes(test or train, class_names)


def _load(
    source: str | Path,
    options: LoadOptions,
    class_names: Sequence[str] | None,
    progress: Progress | None,
    decoders: Decoders | None = None,
) -> tuple[ImageStore, ImageStore | None, Normalisation | None]:
    """Load both splits, and the published constants if the dataset has any."""
    path = Path(source)
    if not _is_name(source) and is_packed(path):
        return _load_packed(path, options)
    if not _is_name(source):
        refuse_webdataset(path)
    if options.segmentation:
        return *_load_segmentation(source, options, class_names, progress), None
    if _is_name(source):
        _refuse_units(options)
        if options.findings is not None:
            raise DataError(f"{source} has one class an image: findings belong to a folder of images.")
        if options.classes is not None and not options.public:
            raise DataError(f"{source} has known classes: --classes is for your own images.")
        if source == DIGITS:
            train, test, constants = load_digits()
            return *_fitted(train, test, options), constants
        dataset = DATASETS[str(source)]
        return *_load_dataset(locate(dataset, options, progress=progress), dataset.name, options), dataset.normalisation
    _require_path(source)
    if options.findings is not None and not path.is_dir():
        if path.suffix != ".npz":
            raise DataError(f"findings belong to a folder of images or an .npz file, got {shown(path)}.")
        if Path(options.findings).resolve() != path.resolve():
            raise DataError(f"{shown(path)} holds its findings itself: give --findings {shown(path)}.")
    if is_table(path):
        return *_load_folder(path, options, class_names, progress, decoders), None
    if is_downsampled_imagenet(path):
        _refuse_units(options)
        return *_fitted(*load_downsampled_imagenet(path), options), None
    if path.is_dir() and not _is_dataset_folder(path):
        refuse_pickled_cifar(open_cifar(path))
        return *_load_folder(path, options, class_names, progress, decoders), None
    if path.suffix == ".npz":
        _refuse_units(options, npz=True)
        of_model = class_names if options.findings is not None else None
        return *_fitted(*load_npz(path, options, class_names=of_model), options), None
    if options.window is not None and not options.public:
        raise DataError(f"{shown(path)} has no intensities for a window.")
    if path.is_dir() and has_idx(path):
        name = ""
    elif path.is_dir() or path.suffix in (".gz", ".tgz", ".tar"):
        name = "cifar10" if any(each.startswith("data_batch") for each in open_cifar(path).names) else "cifar100"
    else:
        raise DataError(
            f"{shown(path)} is no source: give a folder, a table (.csv, .jsonl, .parquet), an .npz file or a CIFAR "
            "archive."
        )
    _refuse_units(options)
    return *_load_dataset(path, name, options), DATASETS[name].normalisation if name else None


def _load_segmentation(
    source: str | Path, options: LoadOptions, class_names: Sequence[str] | None, progress: Progress | None
) -> Pair:
    """Load images with one class for each pixel."""
    path = Path(source)
    if _is_name(source) or _is_dataset_folder(path):
        raise DataError(f"{shown(source)} has one class an image and no masks: it can't be used for segmentation.")
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


def _load_packed(path: Path, options: LoadOptions) -> tuple[ImageStore, ImageStore | None, Normalisation | None]:
    """Open a packed store; what was packed decides on the task and the shape."""
    train, test, constants = open_packed(path, options)
    if train.per_pixel != options.segmentation:
        found, task = ("masks", "segmentation") if train.per_pixel else ("one class an image", "classification")
        raise DataError(f"{shown(path)} is packed with {found}: it is for task={task}.")
    train, test = _fitted(train, test, options)
    return train, test, constants if constants.source == "published" else None


def _load_folder(
    path: Path,
    options: LoadOptions,
    class_names: Sequence[str] | None,
    progress: Progress | None,
    decoders: Decoders | None = None,
) -> Pair:
    """Load a folder (class folders, train/ and test/, images with a table) or a table; of public data one part."""
    name, names = _name_of(path), class_names or options.class_list
    listing, test_listing = _list_parts(path, options, names)
    if options.public:
        listing, test_listing = test_listing or listing, None
    else:
        refuse_test_files(listing, options)
    shape = shape_for(listing.root, listing.files, options, places=listing.places, progress=progress)
    known = () if test_listing is None else test_listing.files
    into = decoders or (lambda _: decode_all)
    train = load_listing(
        listing,
        image_shape=shape,
        options=options,
        name=name,
        also_known=known,
        progress=progress,
        decode=into("train"),
    )
    if test_listing is None:
        return train, None
    public = options.without_units(owners=True)
    name, known = f"{name} test", listing.files
    test = load_listing(
        test_listing,
        image_shape=shape,
        options=public,
        name=name,
        also_known=known,
        progress=progress,
        decode=into("test"),
    )
    return train, test


def _list_parts(path: Path, options: LoadOptions, names: Sequence[str] | None) -> tuple[Listing, Listing | None]:
    """List the training images of a folder or a table, and the test images if it has any."""
    if options.findings is None and path.is_dir() and is_tiny_imagenet(path):
        return list_tiny_imagenet(path, class_names=names)
    found = list_manifest(path, options, class_names=names) if options.findings is None else None
    if found is not None:
        return found
    given = [name for name in ("file_column", "label_column", "split_column") if getattr(options, name) is not None]
    if given and not options.public:
        raise DataError(f"{shown(path)} has no table for {' and '.join(given)}: name the table itself as the source.")
    train_folder, test_folder = split_folders(path)
    if options.public:
        train_folder, test_folder = test_folder or train_folder, None
    if options.findings is not None:
        return _list_both(train_folder, test_folder, options, names)
    listing = list_classes(train_folder, class_names=names, least=1 if options.public else 2)
    return listing, None if test_folder is None else list_classes(test_folder, class_names=listing.class_names)


def _list_both(
    train: Path, test: Path | None, options: LoadOptions, names: Sequence[str] | None
) -> tuple[Listing, Listing | None]:
    """List the images of both folders with their findings, from one CSV file or from two."""
    listing = list_findings(train, options, names=names, other=test)
    if test is None:
        return listing, None
    public = options.without_units(owners=True).model_copy(
        update={"findings": options.test_findings or options.findings}
    )
    return listing, list_findings(test, public, names=listing.class_names)


def unused_part(path: Path, *, has_test: bool) -> str:
    """Say which validation part of a source is neither trained on nor tested on: one beside a test part."""
    found = ""
    if path.suffix == ".npz":
        found = "val_images" if has_val_arrays(path) else ""
    elif path.is_dir() and is_tiny_imagenet(path):
        return "Tiny ImageNet: val/ is the test split; the images of test/ have no labels and are not used."
    elif path.is_dir() and has_test and (path / "train").is_dir():
        folders = [name for name in TEST_FOLDERS if (path / name).is_dir()]
        found = f"{folders[1]}/" if len(folders) > 1 else ""
    return f"{found} is neither trained on nor tested on: the test part is measured." if found and has_test else ""


def _load_dataset(place: Path, name: str, options: LoadOptions) -> Pair:
    """Load idx or CIFAR files; ``name`` is that of a registered dataset, or empty for other idx files."""
    if name and DATASETS[name].kind == "cifar":
        return _fitted(*load_cifar(open_cifar(place), name), options)
    class_names = DATASETS[name].class_names if name else None
    title = name or _name_of(place)
    train = load_idx(place, "train", name=title, class_names=class_names)
    if train is None:
        raise DataError(f"{shown(place)} has no training files.")
    test = load_idx(place, "test", name=title, class_names=class_names or train.class_names)
    return _fitted(train, test, options)


def _is_dataset_folder(path: Path) -> bool:
    return has_idx(path) or has_cifar(path, "cifar10") or has_cifar(path, "cifar100")


def _require_path(source: str | Path) -> None:
    if not Path(source).exists():
        raise DataError(f"{shown(source)} is neither a file or folder nor one of {', '.join(dataset_names())}.")


def _fitted(train: ImageStore, test: ImageStore | None, options: LoadOptions) -> Pair:
    """Bring both splits to the shape that the options ask for, or the test split to that of the training split."""
    fitted = fit(train, options)
    return fitted, None if test is None else fit(test, options.with_shape(fitted.image_shape))


def _with_classes(store: ImageStore, class_names: Sequence[str] | None) -> ImageStore:
    """Number the classes as a model does."""
    if class_names is None or tuple(class_names) == store.class_names:
        return store
    unknown = [name for name in store.class_names if name not in class_names]
    if unknown:
        raise DataError(f"{shown(store.name)} has classes that the model does not know: {some_of(unknown)}.")
    number = store.labels.new_tensor([list(class_names).index(name) for name in store.class_names])
    return replace(store, labels=number[store.labels], class_names=tuple(class_names))


def _refuse_units(options: LoadOptions, *, npz: bool = False) -> None:
    """Refuse options that name owners in a way that the source does not have."""
    if options.public:
        return  # what names the owners of private rows need not fit public ones
    names = ("unit_csv", "unit_folder_level", "unit_pattern", *(() if npz else ("unit_column",)))
    given = [name for name in names if getattr(options, name) is not None]
    if given:
        hint = "name the array of unit ids by unit_column." if npz else "each of its rows is a unit of its own."
        raise DataError(f"this source has no {' and no '.join(given)}: {hint}")


def _is_name(source: str | Path) -> bool:
    """Whether a registered dataset is meant. A ``Path`` never is: a folder may be called digits."""
    return isinstance(source, str) and source in dataset_names()


def _name_of(path: Path) -> str:
    """The name of a source without its folder: a path tells more about its owner than a certificate should."""
    return shown(path.resolve().name)
