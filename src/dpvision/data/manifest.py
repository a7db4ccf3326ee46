"""Manifests: tables that name the class of each image, and perhaps its owner and its split.

A manifest is a table by itself, a table beside its images (``labels.csv`` and ``images/``), a Hugging Face folder
(``metadata.csv`` or ``.jsonl``, Parquet files by split, or a folder that ``save_to_disk`` wrote), a folder of MDS
shards, or Tiny ImageNet's list of its validation images. Every mistake is one line for the holder of the data, before
anything is spent.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import torch

from dpvision.data.foreign_shards import INDEX, is_mds, read_mds
from dpvision.data.image_folder import Listing, files_below, list_classes
from dpvision.data.images import is_readable
from dpvision.data.options import LoadOptions
from dpvision.data.safe_read import open_regular
from dpvision.data.table_files import (
    FILE_HEADINGS,
    TABLE_SUFFIXES,
    FileIndex,
    Table,
    classes_of_features,
    file_name,
    is_table,
    leads_outside,
    read_table,
)
from dpvision.data.units import TEST_FOLDERS, TRAIN_FOLDER, require_real_owners, unit_names
from dpvision.errors import DataError, brief, counted, printable, shown, some_of

LABEL_HEADINGS = ("label", "labels", "class", "target", "diagnosis", "dx", "category")
UNIT_HEADINGS = (
    *("patient", "patient_id", "patientid", "patient id", "subject", "subject_id", "subjectid"),
    *("person", "person_id", "user", "user_id", "owner", "unit"),
)
SPLIT_HEADINGS = ("split", "set", "partition", "subset")
_FILE_HEADINGS = (
    "file",
    "file_name",
    "filename",
    "path",
    "image",
    *sorted(FILE_HEADINGS),
    "image_id",
    "filepath",
    "id",
)
# Tables that say what the images beside them are, without being named.
_TABLE_NAMES = ("metadata", "labels", "manifest")
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
}
_LARGEST_JSON = 2**24
_MOST_CLASSES = 10_000


@final
@dataclass(frozen=True)
class _Part:
    """Tables about the images below one folder; ``split`` is None where a column says it, or nothing."""

    tables: tuple[Path, ...]
    root: Path
    split: str | None = None
    class_names: tuple[tuple[str, tuple[str, ...]], ...] = ()


@final
@dataclass(frozen=True)
class _Rows:
    """The rows of one part: file, label, owner and split of each."""

    part: _Part
    files: list[str]
    labels: list[str]
    owners: list[str] | None
    owners_from: str | None
    splits: list[str]
    class_names: tuple[str, ...] | None
    content: Callable[[int], bytes] | None
    where: Callable[[int], str]

    def first(self, rows: Sequence[int]) -> str:
        """Say where the first of some rows is, for the end of a message."""
        return f"{'the first in ' if len(rows) > 1 else 'in '}{self.where(rows[0])}"


def list_manifest(
    source: Path, options: LoadOptions, *, class_names: Sequence[str] | None = None
) -> tuple[Listing, Listing | None] | None:
    """List the images of a manifest.

    Args:
        source: a table, or a folder.
        options: ``file_column``, ``label_column``, ``unit_column`` and ``split_column`` name columns; ``classes`` or
            ``public_classes`` says which classes there are; ``image_folder`` is where the files lie.
        class_names: the classes of a model, in order.

    Returns:
        The training images, and the test images if a column or a folder names any; rows of a validation split are
        the test images where there is no test split, and are not used otherwise. None for a folder without a manifest.

    Raises:
        DataError: a column is missing, rows and images do not match, or nothing says which classes there are.

    Guarantee: which classes there are follows from what is declared, never from private labels.
    """
    parts = _parts(source, options)
    if not parts:
        return None
    rows = [_read(part, options) for part in parts]
    names = _classes(rows, options, class_names, source)
    listings = [_listing(each, names, options) for each in rows]
    train = _of_split(listings, "train")
    test = _of_split(listings, "test") or _of_split(listings, "val")
    if train is None and not options.public:
        raise DataError(f"{shown(source)} has no training images: its split says train in no row.")
    if train is not None and any(set(splits) >= {"test", "val"} for _, splits in listings):
        rows_of = f"the validation rows of {shown(source.name)}"
        train = replace(train, unused=f"{rows_of} are neither trained on nor tested on: the test rows are measured.")
    first = train or test
    if first is None:
        raise DataError(f"{shown(source)} names no images.")
    return first, None if train is None else test


def _parts(source: Path, options: LoadOptions) -> list[_Part]:
    """Find the tables of a source; none where a folder has no manifest."""
    if not source.is_dir():
        root = Path(options.image_folder) if options.image_folder is not None else source.absolute().parent
        if not root.is_dir():
            raise DataError(f"{shown(root)} is not a folder: image_folder must be one.")
        return [_Part((source,), root)]
    saved = _saved_datasets(source) or _mds(source)
    if saved:
        return saved
    folders = [name for name in (TRAIN_FOLDER, *TEST_FOLDERS) if (source / name).is_dir()]
    tables = {name: _table_in(source / name, options) for name in folders}
    if TRAIN_FOLDER in tables and tables[TRAIN_FOLDER] is not None:
        return [_Part((path,), source / name, name) for name, path in tables.items() if path is not None]
    shards = _shards(source)
    if shards:
        return shards
    table = _table_in(source, options)
    if table is None:
        return []
    found = [each.name for each in source.iterdir() if each.is_dir() and not each.name.startswith(".")]
    classes = [name for name in found if name not in (*folders, "images", "imgs", "data")]
    if len(classes) > 1 and any(is_readable(source / file) for file in files_below(source / classes[0])):
        raise DataError(
            f"{shown(source)} has class folders ({some_of(classes)}) and a table, {shown(table.name)}: name the table "
            "itself as the source to use it, or move it elsewhere to use the folders."
        )
    return [_Part((table,), Path(options.image_folder) if options.image_folder is not None else source)]


def _table_in(folder: Path, options: LoadOptions) -> Path | None:
    """Find the table of a folder by its name; tables that an option names are about something else."""
    other = {Path(path).resolve() for path in (options.unit_csv, options.findings, options.test_findings) if path}
    names = [f"{name}{suffix}" for name in _TABLE_NAMES for suffix in TABLE_SUFFIXES]
    found = [folder / name for name in names if (folder / name).is_file() and (folder / name).resolve() not in other]
    if len(found) > 1:
        raise DataError(
            f"{shown(folder)} has several tables: {some_of([each.name for each in found])}. Name one of them."
        )
    return found[0] if found else None


def _saved_datasets(source: Path) -> list[_Part]:
    """Find the Arrow files of a folder that Hugging Face's ``save_to_disk`` wrote."""
    if (source / "dataset_dict.json").is_file():
        names = _listed(source / "dataset_dict.json", "splits", str)
        return [part for name in names for part in _saved(source / Path(name).name, name)]
    return _saved(source, None) if (source / "state.json").is_file() else []


def _mds(source: Path) -> list[_Part]:
    """Find MDS shards: in the folder itself, or in folders of splits."""
    if is_mds(source):
        return [_Part((source / INDEX,), source)]
    found = [name for name in (TRAIN_FOLDER, *TEST_FOLDERS) if is_mds(source / name)]
    return [_Part((source / name / INDEX,), source / name, name) for name in found] if TRAIN_FOLDER in found else []


def _saved(folder: Path, split: str | None) -> list[_Part]:
    files = _listed(folder / "state.json", "_data_files", dict)
    named = [each.get("filename") for each in files]
    tables = tuple(folder / Path(name).name for name in named if isinstance(name, str))
    info = folder / "dataset_info.json"
    stated = classes_of_features(_json(info).get("features")) if info.is_file() else {}
    if not tables:
        raise DataError(f"{shown(folder)} names no Arrow files in its state.json.")
    return [_Part(tables, folder, split, tuple(stated.items()))]


def _shards(source: Path) -> list[_Part]:
    """Find Parquet files whose names begin with a split, as the Hugging Face hub stores them."""
    by_split: dict[str, list[Path]] = {}
    for folder in (source, source / "data"):
        for path in sorted(folder.glob("*.parquet")):
            split = re.split(r"[-._]", path.name)[0]
            if split in _SPLITS:
                by_split.setdefault(split, []).append(path)
    return [_Part(tuple(paths), source, split) for split, paths in by_split.items()] if "train" in by_split else []


def is_tiny_imagenet(source: Path) -> bool:
    """Whether a folder has the official layout of Tiny ImageNet."""
    return (source / "val" / "val_annotations.txt").is_file() and (source / "train").is_dir()


def list_tiny_imagenet(source: Path, *, class_names: Sequence[str] | None = None) -> tuple[Listing, Listing]:
    """List Tiny ImageNet in its official layout.

    Args:
        source: a folder with ``train/CLASS/images``, ``val/images`` and ``val/val_annotations.txt``. The images of
            ``test/`` have no published labels and are not used.
        class_names: the classes of a model, in order.

    Raises:
        DataError: images and annotations do not match.
    """
    train = list_classes(source / "train", class_names=class_names)
    notes, root = source / "val" / "val_annotations.txt", source / "val" / "images"
    with open_regular(notes) as file:
        lines = [line.split("\t") for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    if any(len(line) < 2 for line in lines):
        raise DataError(f"{shown(notes)} must have a file and a class in each line.")
    table = Table(notes, ["file", "label"], [line[:2] for line in lines], lines=tuple(range(1, len(lines) + 1)))
    rows = _rows_of(_Part((notes,), root, "val"), table, LoadOptions(public=True))
    return train, _listing(rows, train.class_names, LoadOptions(public=True))[0]


def _read(part: _Part, options: LoadOptions) -> _Rows:
    """Read the tables of a part as one."""
    tables = [read_mds(path.parent) if path.name == INDEX else read_table(path) for path in part.tables]
    first = tables[0]
    if any(set(table.heading) != set(first.heading) for table in tables):
        raise DataError(f"{shown(part.tables[-1])} has other columns than {shown(first.path.name)}.")
    lines = [[row[table.heading.index(name)] for name in first.heading] for table in tables for row in table.rows]
    stated = {**first.class_names, **dict(part.class_names)}
    whole = replace(first, rows=lines, class_names=stated)
    ends = list(accumulate(len(table.rows) for table in tables))

    def place(row: int) -> tuple[Table, int]:
        at = bisect_right(ends, row)
        return tables[at], row - (ends[at - 1] if at else 0)

    def where(row: int) -> str:
        table, local = place(row)
        return table.where(local) + (f" of {shown(table.path.name)}" if len(tables) > 1 else "")

    column = _image_column(tables, options)

    def content(row: int) -> bytes:
        table, local = place(row)
        return table.images[column or ""](local)

    return _rows_of(part, whole, options, content=None if column is None else content, where=where)


def _image_column(tables: Sequence[Table], options: LoadOptions) -> str | None:
    """Choose the column of images that the tables hold themselves; None where they hold none."""
    named = options.file_column
    columns = list(tables[0].images)
    if not columns or (named is not None and named not in columns):
        return None
    column = named or ("image" if "image" in columns else columns[0])
    if any(column not in table.images for table in tables):
        raise DataError(f"{shown(tables[-1].path)} has no images in its column {shown(column)}.")
    return column


def _rows_of(
    part: _Part,
    table: Table,
    options: LoadOptions,
    *,
    content: Callable[[int], bytes] | None = None,
    where: Callable[[int], str] | None = None,
) -> _Rows:
    """Take the columns of a table, and refuse rows that lack something."""
    path, where = table.path, where or table.where
    if not table.rows:
        raise DataError(f"{shown(path)} is empty: rows of file and label are needed.")
    label = _column(table, options.label_column, LABEL_HEADINGS, "label", "--label-column")
    split = _column(table, options.split_column, SPLIT_HEADINGS, "split", "--split-column", needed=False)
    unit = None
    if options.unit_csv is None:
        by_name = options.unit_pattern is not None or options.unit_folder_level is not None
        headings = () if by_name else UNIT_HEADINGS
        unit = _column(
            table, options.unit_column, headings, "owner", "--unit-column", needed=False, lenient=options.public
        )
    if content is None:
        at = _column(table, options.file_column, _FILE_HEADINGS, "file", "--file-column")
        files = [file_name(cell) for cell in table.column(at or "")]
    else:
        name = shown(path.name)
        files = [f"{name} {where(row)}" if len(part.tables) == 1 else where(row) for row in range(len(table.rows))]
    columns = {"file": files, "label": table.column(label or ""), "split": table.column(split) if split else files}
    columns |= {"owner": table.column(unit) if unit and not options.public else files}
    for what, cells in columns.items():
        empty = [row for row, cell in enumerate(cells) if not cell]
        if empty:
            raise DataError(
                f"{shown(path)} has no {what} in {counted(len(empty), 'row')}, the first is {where(empty[0])}. "
                "Complete or remove them."
            )
    owners_from = None if unit is None else f"the column {unit} of the table"
    owners = None if unit is None else [printable(cell) for cell in table.column(unit)]
    if owners is not None and not options.public:
        require_real_owners(owners, f"the column {shown(unit)} of {shown(path.name)}", where=where)
    return _Rows(
        part,
        files,
        columns["label"],
        owners,
        owners_from,
        _split_of_rows(part, table, split, files, where),
        table.class_names.get(label or ""),
        content,
        where,
    )


def _column(
    table: Table,
    named: str | None,
    usual: Sequence[str],
    what: str,
    flag: str,
    *,
    needed: bool = True,
    lenient: bool = False,
) -> str | None:
    """Find a column: as named by a flag, or by a usual heading."""
    if named is not None:
        if named in table.heading:
            return named
        if lenient:
            return None
        raise DataError(f"{shown(table.path)} has no column {shown(named)}: it has {some_of(table.heading, limit=8)}.")
    lower = [cell.lower() for cell in table.heading]
    found = next((table.heading[lower.index(each)] for each in usual if each in lower), None)
    if found is None and needed:
        raise DataError(
            f"{shown(table.path)} has no column for the {what}: it has {some_of(table.heading, limit=8)}. Name it with "
            f"{flag}."
        )
    if table.heading.count(found or "") > 1:
        raise DataError(f"{shown(table.path)} has several columns {shown(found)}.")
    return found


def _split_of_rows(
    part: _Part, table: Table, column: str | None, files: Sequence[str], where: Callable[[int], str]
) -> list[str]:
    """Say which split each row belongs to: by its folder, by a column, by the first folder of its file, or train."""
    if part.split is not None:
        found = [part.split.lower()] * len(files)
    elif column is not None:
        found = [cell.lower() for cell in table.column(column)]
    else:
        first = [file.split("/")[0].lower() for file in files]
        found = first if "train" in first and set(first) <= _SPLITS.keys() else ["train"] * len(files)
    unknown = sorted(set(found) - _SPLITS.keys())
    if unknown:
        first_row = next(row for row, split in enumerate(found) if split not in _SPLITS)
        raise DataError(
            f"{shown(table.path)}: a split must be train, test or val, got {some_of(unknown)}, first in "
            f"{where(first_row)}. Rename it, or name another column with --split-column."
        )
    return found


def _classes(rows: Sequence[_Rows], options: LoadOptions, given: Sequence[str] | None, source: Path) -> tuple[str, ...]:
    """Say which classes there are, without a look at private labels unless they are declared public."""
    declared = tuple(given) if given is not None else options.class_list
    if declared is not None:
        return declared
    stated = {each.class_names for each in rows}
    if len(stated) == 1 and (names := next(iter(stated))) is not None:
        return names
    if not (options.public_classes or options.public or options.classes_are_public):
        raise DataError(
            f"{shown(source)} does not say which classes there are, and private labels must not decide it: declare "
            "them with --classes A,B,…, or read them off the labels and declare them public with --public-classes."
        )
    found = {label for each in rows for label in each.labels}
    alike = [each for each, count in Counter(map(str.casefold, found)).items() if count > 1]
    if alike:
        ways = sorted(label for label in found if label.casefold() == min(alike))
        at = next((each, row) for each in rows for row, label in enumerate(each.labels) if label == ways[0])
        raise DataError(
            f"{shown(source)} has labels that differ in capital letters alone: {some_of(ways)} ({shown(ways[0])} first "
            f"in {at[0].where(at[1])}). Write them in one way, or declare the classes with --classes."
        )
    if not 2 <= len(found) <= _MOST_CLASSES and not options.public:
        raise DataError(f"{shown(source)} has {len(found)} different labels: 2 to {_MOST_CLASSES} classes are needed.")
    numbers = all(label.isdecimal() for label in found)
    return tuple(sorted(found, key=lambda label: (int(label), label) if numbers else (0, label)))


def _listing(rows: _Rows, names: tuple[str, ...], options: LoadOptions) -> tuple[Listing, list[str]]:
    """Match the rows of a part with the files below its folder, number their classes, and return their splits too."""
    number = {name: index for index, name in enumerate(names)}
    if rows.class_names is not None:  # Hugging Face stores the numbers of the classes
        number |= {str(index): number[name] for index, name in enumerate(rows.class_names) if name in number}
    table = rows.part.tables[0]
    unknown = sorted(set(rows.labels) - number.keys())
    if unknown:
        where = rows.first([row for row, label in enumerate(rows.labels) if label not in number])
        raise DataError(
            f"{shown(table)} has labels that are no class: {some_of(unknown)}, {where}. The classes are "
            f"{some_of(names)}. Correct the labels or --classes."
        )
    labels, kept, files = [number[label] for label in rows.labels], list(range(len(rows.files))), rows.files
    if rows.content is None:
        places = _matched(rows, options)
        kept = [row for row, place in enumerate(places) if place is not None]
        files = [place for place in places if place is not None]
    owners = None if rows.owners is None else [rows.owners[row] for row in kept]
    by_name = [name for name in ("unit_pattern", "unit_folder_level", "unit_csv") if getattr(options, name) is not None]
    if rows.content is not None and by_name and not options.public:
        raise DataError(
            f"{shown(table)} holds the images itself, without names of files for {by_name[0]}: name its column of "
            "owners with --unit-column."
        )
    if owners is None:
        of_table = {} if options.unit_csv is not None else {"unit_column": None}
        owners = unit_names(files, options=options.model_copy(update=of_table))
    listing = Listing(
        root=rows.part.root,
        class_names=names,
        files=tuple(files),
        given_labels=torch.tensor([labels[row] for row in kept], dtype=torch.int64),
        owners=None if owners is None else tuple(owners),
        owners_from=rows.owners_from,
        content=rows.content,
    )
    return listing, [_SPLITS[rows.splits[row]] for row in kept]


def _matched(rows: _Rows, options: LoadOptions) -> list[str | None]:
    """Find the file of each row below the folder; None for rows that are left out."""
    root, table = rows.part.root, rows.part.tables[0]
    base = root.resolve().as_posix()
    names = [name.removeprefix(f"{base}/") for name in rows.files]
    outside = [row for row, name in enumerate(names) if leads_outside(name)]
    if outside:
        raise DataError(
            f"{shown(table)} names {counted(len(outside), 'file')} outside {shown(root)}: {_some(names, outside)}, "
            f"{rows.first(outside)}. Name the folder of the images with --image-folder."
        )
    files = sorted(file for file in files_below(root) if is_readable(root / file))
    index = FileIndex(files, above=[root.resolve().name])
    found = [index.find(name) for name in names]
    unclear = [row for row, at in enumerate(found) if len(at) > 1]
    if unclear:
        raise DataError(
            f"{shown(table)} names {counted(len(unclear), 'file')} that fit several below {shown(root)}: "
            f"{_some(names, unclear)}, {rows.first(unclear)}. Give the path below that folder."
        )
    missing = [row for row, at in enumerate(found) if not at]
    if missing and not options.skip_bad:
        raise DataError(
            f"{shown(table)} names {counted(len(missing), 'image')} missing below {shown(root)}: "
            f"{_some(names, missing)}, {rows.first(missing)}. Correct the names, give their folder by --image-folder, "
            "or leave them out with --skip-bad."
        )
    at = [place[0] for place in found if place]
    twice = [place for place, count in Counter(at).items() if count > 1]
    if twice:
        both = [rows.where(row) for row, place in enumerate(found) if place == [twice[0]]]
        raise DataError(
            f"{shown(table)} names {counted(len(twice), 'image')} in more than one row: {_some(files, twice)}, the "
            f"first in {' and '.join(both[:2])}. Keep one row for each."
        )
    unlisted = [file for place, file in enumerate(files) if place not in set(at)]
    if unlisted and not (options.public or options.skip_bad):
        other = files_of_test(options)
        unlisted = [file for file in unlisted if (root / file).resolve() not in other]
    if unlisted and not (options.public or options.skip_bad):
        raise DataError(
            f"{shown(table)} has no row for {counted(len(unlisted), 'image')} below {shown(root)}: {some_of(unlisted)}."
            " Add or remove them, or leave them out with --skip-bad."
        )
    return [files[place[0]] if place else None for place in found]


def _some(names: Sequence[str], rows: Sequence[int]) -> str:
    """List the names of the first of some rows."""
    return some_of([names[row] for row in rows])


def files_of_test(options: LoadOptions) -> set[Path]:
    """Return the files that a table names which is given as the test set; none without such a table."""
    if options.public or options.test is None or not is_table(Path(options.test)):
        return set()
    public = options.without_units()
    (part,) = _parts(Path(options.test), public)
    rows = _read(part, public)
    if rows.content is not None:
        return set()
    return {(part.root / place).resolve() for place in _matched(rows, public) if place is not None}


def refuse_test_files(listing: Listing, options: LoadOptions) -> None:
    """Refuse private images that a table given as the test set names too: metrics on them have no noise."""
    other = set() if listing.content is not None else files_of_test(options)
    both = [file for file in listing.files if other and (listing.root / file).resolve() in other]
    if both:
        raise DataError(f"{len(both)} training images are in the test table too: {some_of(both)}.")


def _of_split(listings: Sequence[tuple[Listing, list[str]]], wanted: str) -> Listing | None:
    """Take the rows of one split; None if there are none."""
    found = []
    for listing, splits in listings:
        rows = [row for row, split in enumerate(splits) if split == wanted]
        if rows:
            found.append(_taken(listing, rows))
    if len(found) > 1:
        raise DataError(f"two folders hold the same split: {some_of([each.root.name for each in found])}. Keep one.")
    return found[0] if found else None


def _taken(listing: Listing, rows: list[int]) -> Listing:
    """Take some rows, in the order of their files."""
    rows = sorted(rows, key=lambda row: listing.files[row]) if listing.content is None else rows
    content: Any = listing.content
    return replace(
        listing,
        files=tuple(listing.files[row] for row in rows),
        given_labels=listing.labels[rows],
        owners=None if listing.owners is None else tuple(listing.owners[row] for row in rows),
        content=None if content is None else lambda n: content(rows[n]),
    )


def _listed(path: Path, name: str, kind: type) -> list[Any]:
    """Read a list of texts or objects from a small JSON object."""
    found = _json(path).get(name)
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise DataError(f"{shown(path)} must have a list named {name}, as save_to_disk writes it.")
    return found


def _json(path: Path) -> dict[str, Any]:
    """Read a small JSON object."""
    try:
        with open_regular(path) as file:
            found = json.loads(file.read(_LARGEST_JSON))
    except OSError as error:
        raise DataError(f"{shown(path)} can't be read: {brief(error.strerror or error)}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{shown(path)} can't be read as JSON: {brief(error)}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{shown(path)} must be a JSON object.")
    return found
