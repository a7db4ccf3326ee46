"""Privacy units of image files: their owners, from folders, from file names, or from a CSV file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpvision.data.options import LoadOptions
from dpvision.data.store import dense_units
from dpvision.data.table_files import FILE_HEADINGS, FileIndex, Table, file_name, read_table
from dpvision.errors import DataError, printable, shown, some_of

TRAIN_FOLDER = "train"
TEST_FOLDERS = ("test", "val", "valid", "validation")
OWNED_BY_PATIENT = "the patient id of each DICOM file"
OWNED_BY_FILE = "the file that holds the frames or pages"
# What software for anonymisation, and tables with gaps, write where a person's id was.
_NO_ONE = re.compile(
    r"(?i)[\s\W_]*(anon(ym(ous|i[sz]ed|us|e)?)?|de-?identified|unknown|unspecified|undefined|not available|missing|"
    r"removed|redacted|none|null|nil|nan|n/?a|x+)?[\s\W_]*"
)
# What file names look like that begin with a person's id: a word for a person and a number, or a number and a rest.
_PERSONS = (
    r"^((?:p|pt|pat|patient|sub|subj|subject|person|user|case|id)[-_ ]?\d+)(?!\d)",
    r"^([A-Za-z]{0,3}[-_]?\d{2,})[-_ ]",
)
_PERSON_FOLDER = re.compile(r"(?i)(p|pt|pat|patient|sub|subj|subject|person|user|case|id)?[-_ ]?\d+")


def unit_names(files: Sequence[str], *, options: LoadOptions, also_known: Sequence[str] = ()) -> list[str] | None:
    """Find the owner of each file.

    Args:
        files: paths below the dataset's folder, such as ``cat/17.png``.
        options: one of ``unit_csv``, ``unit_folder_level`` and ``unit_pattern``, or none.
        also_known: files of the other split, which a CSV may mention too.

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
    if missing:
        return None
    return [printable(owner) for owner in found if owner]


def require_real_owners(owners: Sequence[str], source: str) -> None:
    """Refuse owners who are no one in particular, so that no run protects less than it says.

    Args:
        owners: one for each row.
        source: where they come from, for the message.

    Raises:
        DataError: owners are empty or placeholders such as ANON, or all rows have the same owner.
    """
    nameless = [owner for owner in owners if _NO_ONE.fullmatch(owner)]
    if nameless:
        raise DataError(
            f"{len(nameless)} of {len(owners)} images have no owner: {source} is empty or a placeholder "
            f"({some_of(sorted(set(nameless)))}). Restore the ids (pseudonyms will do), or name the owner otherwise."
        )
    if len(owners) > 1 and len(set(owners)) == 1:
        raise DataError(
            f"all {len(owners)} images have the same owner, {shown(owners[0])}: {source} does not tell people apart. "
            "Restore the ids (pseudonyms will do), or name the owner otherwise."
        )


def owner_hint(files: Sequence[str]) -> str | None:
    """Say if the names of files look like those of people who own several, and which flag protects them.

    Args:
        files: paths below the dataset's folder, in runs where each image is a unit of its own.

    Returns:
        A sentence for the holder of the data, which repeats a file's name; None if nothing looks like that.
    """
    tried: list[tuple[str, str, list[str | None]]] = []
    for pattern in _PERSONS:
        found = _from_pattern(files, f"(?i){pattern}")
        word = next((owner.rstrip("0123456789") for owner in found if owner), "")
        tried.append((f"--unit-pattern '^({re.escape(word)}\\d+)'", "file names", found))
    depth = min((file.count("/") for file in files), default=0)
    for level in range(2, min(depth, 3) + 1):
        folders = _from_folders(files, level)
        people = [each if each and _PERSON_FOLDER.fullmatch(each) else None for each in folders]
        tried.append((f"--unit-folder-level {level}", "folder names", people))
    for flag, what, owners in tried:
        known = [owner for owner in owners if owner]
        counts = Counter(known)
        classes = {file.split("/")[0] for file in files}
        shared = sum(count for count in counts.values() if count > 1)
        if (
            10 * len(known) >= 3 * len(files)
            and 10 * shared >= len(files)
            and len(counts) > 1
            and not counts.keys() <= classes
        ):
            example = next(file for file, owner in zip(files, owners, strict=True) if owner and counts[owner] > 1)
            return (
                f"{what} look like ids of people with several images ({shown(example)}), and each image is protected "
                f"by itself. To protect the person, add {flag}, or --unit-csv."
            )
    return None


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
    unit_of, unknown = _resolved(_rows(path, options.unit_column), files, also_known, path, public=options.public)
    if unknown and not options.public:
        raise DataError(f"{shown(path)} names {len(unknown)} files which are not in the folder: {some_of(unknown)}.")
    return [unit_of.get(file) for file in files]


def _resolved(
    rows: Sequence[tuple[str, str]], files: Sequence[str], also_known: Sequence[str], path: Path, *, public: bool
) -> tuple[dict[str, str], list[str]]:
    """Return owners by file, and names that no file has. A row gives the path below the folder, or the name of one
    file.
    """
    above, others_above = (TEST_FOLDERS, [TRAIN_FOLDER]) if public else ([TRAIN_FOLDER], TEST_FOLDERS)
    index, other = FileIndex(files, above=above), FileIndex(also_known, above=others_above)
    unit_of: dict[str, str] = {}
    unknown, unclear = [], []
    for name, unit in rows:
        found = index.find(name)
        if public and other.find(name):
            continue  # a name that fits a training image is about that one
        if len(found) == 1:
            if unit_of.setdefault(files[found[0]], unit) != unit:
                unclear.append(name)
        elif found:
            unclear.append(name)
        elif not other.find(name):
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
