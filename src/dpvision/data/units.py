"""Privacy units of image files: their owners, from folders, from file names, or from a CSV file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpvision.data.options import LoadOptions
from dpvision.data.store import dense_units
from dpvision.data.tables import FILE_HEADINGS, FileIndex, Table, file_name, read_table
from dpvision.errors import DataError, printable, shown, some_of

TRAIN_FOLDER = "train"
TEST_FOLDERS = ("test", "val", "valid", "validation")


def unit_names(files: Sequence[str], *, options: LoadOptions, also_known: Sequence[str] = ()) -> list[str] | None:
    """Find the owner of each file.

    Args:
        files: paths below the dataset's folder, such as ``cat/17.png``.
        options: one of ``unit_csv``, ``unit_folder_level`` and ``unit_pattern``, or none.
        also_known: files of the public test split, which a CSV may mention too.

    Returns:
        One owner for each file; None if nothing says who it is. Of public files the owners are known for all or for
        none:
        a CSV about private files need not mention them.

    Raises:
        DataError: if the owner of a private file is not found.
    """
    if options.unit_csv is not None:
        found = _from_csv(files, Path(options.unit_csv), options=options, also_known=also_known)
        before, after = f"{shown(options.unit_csv)} gives no unit for", "files"
    elif options.unit_folder_level is not None:
        found = _from_folders(files, options.unit_folder_level)
        before, after = f"unit_folder_level is {options.unit_folder_level}, but", "files lie in fewer folders"
    elif options.unit_pattern is not None:
        found = _from_pattern(files, options.unit_pattern)
        before, after = f"unit_pattern is {shown(options.unit_pattern)}, but", "files have no such name"
    elif options.unit_column is not None and not options.public:
        raise DataError("unit_column names a column of unit_csv when the source is a folder: give unit_csv too.")
    else:
        return None
    missing = [file for file, owner in zip(files, found, strict=True) if not owner]
    if missing and not options.public:
        raise DataError(f"{before} {len(missing)} {after}: {some_of(missing)}.")
    return None if missing else [printable(owner) for owner in found if owner]


def unit_numbers(owners: Sequence[str] | None, rows: int, options: LoadOptions) -> Tensor:
    """Number the unit of each row: its owner, or the row itself, as the options say."""
    by_owner = options.owners_are_units(owners)
    return dense_units(owners) if owners is not None and by_owner else torch.arange(rows)


def _from_folders(files: Sequence[str], level: int) -> list[str | None]:
    """Take the name of a folder: the same name in two class folders is the same unit, which errs on the safe side."""
    folders = [file.split("/")[:-1] for file in files]
    return [path[level - 1] if len(path) >= level else None for path in folders]


def _from_pattern(files: Sequence[str], pattern: str) -> list[str | None]:
    """Take the group of a regular expression that is searched in the file's name."""
    found = [re.search(pattern, file.split("/")[-1]) for file in files]
    return [None if match is None else match.group(1) for match in found]


def _from_csv(files: Sequence[str], path: Path, *, options: LoadOptions, also_known: Sequence[str]) -> list[str | None]:
    """Look the files up in a CSV file, and refuse rows about files that are not there."""
    unit_of, unknown = _resolved(_rows(path, options.unit_column), files, also_known, path)
    if unknown and not options.public:
        raise DataError(f"{shown(path)} names {len(unknown)} files which are not in the folder: {some_of(unknown)}.")
    return [unit_of.get(file) for file in files]


def _resolved(
    rows: Sequence[tuple[str, str]], files: Sequence[str], also_known: Sequence[str], path: Path
) -> tuple[dict[str, str], list[str]]:
    """Return owners by file, and names that no file has. A row gives the path below the folder, or the name of one
    file.
    """
    index = FileIndex(files, above=[TRAIN_FOLDER])
    public = FileIndex(also_known, above=TEST_FOLDERS)
    unit_of: dict[str, str] = {}
    unknown, unclear = [], []
    for name, unit in rows:
        found = index.find(name)
        if len(found) == 1:
            if unit_of.setdefault(files[found[0]], unit) != unit:
                unclear.append(name)
        elif found:
            unclear.append(name)
        elif not public.find(name):
            unknown.append(name)
    if unclear:
        raise DataError(
            f"{shown(path)} names {len(unclear)} files that fit several files or units: {some_of(unclear)}."
        )
    return unit_of, unknown


def _rows(path: Path, column: str | None) -> list[tuple[str, str]]:
    """Read (file, owner) from every row of a table."""
    file_at, unit_at, lines = _columns(read_table(path), column)
    bad = [line for line in lines if not line[file_at] or not line[unit_at]]
    if bad:
        raise DataError(f"{shown(path)}: {len(bad)} rows lack a file or a unit: {some_of([','.join(b) for b in bad])}.")
    return [(file_name(line[file_at]), line[unit_at]) for line in lines]


def _columns(table: Table, column: str | None) -> tuple[int, int, list[list[str]]]:
    """Find the columns of file and owner, and return the rows without the heading, which two columns may lack."""
    path, heading = table.path, [cell.lower() for cell in table.heading]
    if not heading:
        raise DataError(f"{shown(path)} is empty: rows of file,unit are needed.")
    file_at = next((at for at, cell in enumerate(heading) if cell in FILE_HEADINGS), None)
    if column is None and len(heading) != 2:
        raise DataError(f"{shown(path)} has {len(heading)} columns: name the one with the unit by unit_column.")
    if column is None:
        return (0, 1, [table.heading, *table.rows]) if file_at is None else (file_at, 1 - file_at, table.rows)
    if column not in table.heading or file_at is None:
        found = some_of(table.heading, limit=8)
        raise DataError(f"{shown(path)} needs a heading with 'file' and {shown(column)!r}, got {found}.")
    return file_at, table.heading.index(column), table.rows
