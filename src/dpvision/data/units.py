"""Privacy units of image files: their owners, from folders, from file names, or from a CSV file."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpvision.data.options import LoadOptions
from dpvision.data.store import dense_units
from dpvision.data.table_files import FILE_HEADINGS, FileIndex, Table, file_name, read_table
from dpvision.errors import DataError, counted, printable, shown, some_of

TRAIN_FOLDER = "train"
TEST_FOLDERS = ("test", "val", "valid", "validation")
OWNED_BY_PATIENT = "the patient id of each DICOM file"
OWNED_BY_FILE = "the file that holds the frames or pages"
# What software for anonymisation, and tables with gaps, write where a person's id was.
_NO_ONE = re.compile(
    r"(?i)[\s\W_]*(anon(ym(ous|i[sz]ed|us|e)?)?|de-?identified|unknown|unspecified|undefined|unnamed|missing|removed|"
    r"not[ _](available|known|provided)|redacted|no[ _]?(name|id)|none|null|nil|nan|n/?a|x{2,})?"
    r"([\s\W_]*(patient|subject|person|name|id))*[\s\W_]*|-1"
)
_LONGEST_PLACEHOLDER = 64
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
        One owner for each file; None if nothing says who it is. The owner of a public file may be "", for not known: a
        CSV about private files need not mention it.

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
    return [printable(owner or "") for owner in found]


def require_real_owners(owners: Sequence[str], source: str, *, where: Callable[[int], str] | None = None) -> None:
    """Refuse owners who are no one in particular, so that no run protects less than it says.

    Args:
        owners: one for each row.
        source: where they come from, for the message.
        where: says where a row is.

    Raises:
        DataError: owners are empty or placeholders such as ANON, all rows have the same owner, or two owners are
            probably one, such as p7 and P07.
    """
    nameless = [row for row, owner in enumerate(owners) if _is_no_one(owner)]
    if nameless:
        first = "" if where is None else f", the first in {where(nameless[0])}"
        raise DataError(
            f"{len(nameless)} of {len(owners)} images have no owner: {source} is empty or a placeholder "
            f"({some_of(sorted({owners[row] for row in nameless}))}){first}. Restore the ids (pseudonyms will do), or "
            "name the owner otherwise."
        )
    if len(owners) > 1 and len(set(owners)) == 1:
        raise DataError(
            f"all {len(owners)} images have the same owner, {shown(owners[0])}: {source} does not tell people apart. "
            "Restore the ids (pseudonyms will do), or name the owner otherwise."
        )
    written: dict[str, set[str]] = {}
    for owner in set(owners):
        written.setdefault(person_key(owner), set()).add(owner)
    alike = sorted(min(each) for each in written.values() if len(each) > 1)
    if alike:
        one, other, *_ = sorted(written[person_key(alike[0])])
        raise DataError(
            f"{counted(len(alike), 'owner')} may be written in several ways, such as {shown(one)!r} and "
            f"{shown(other)!r} in {source}: a person who counts as two is protected less. Write each id in one way."
        )


def _is_no_one(owner: str) -> bool:
    """Whether an id is empty or a placeholder; a long one is neither, and would take long to compare."""
    return len(owner) <= _LONGEST_PLACEHOLDER and _NO_ONE.fullmatch(owner) is not None


def tells_apart(owners: Sequence[str]) -> bool:
    """Whether owners are people: none is a placeholder, and there are several."""
    return not any(map(_is_no_one, owners)) and len(set(owners)) > 1


def person_key(owner: str) -> str:
    """Return what is equal for ids that differ in capital letters, zeros before a number, ".0" or accents alone."""
    text = unicodedata.normalize("NFKC", owner).casefold().strip()
    text = re.sub(r"^(\d+)\.0+$", r"\1", text)
    return re.sub(r"(?<!\d)0+(?=\d)", "", text)


def known_owners(owners: Sequence[str] | None, options: LoadOptions) -> tuple[tuple[str, ...] | None, frozenset[str]]:
    """Return the owners of rows, and those that are known where others are not.

    Args:
        owners: one for each row, "" where it is not known; None if nothing says who it is.
        options: whether the rows are public; the owners of private rows are all known here.

    Returns:
        The owners, or None if some public rows have none, and then those of the others: the splits are compared by
        them, and nothing else uses them.
    """
    if owners is None or not options.public:
        return None if owners is None else tuple(owners), frozenset()
    known = [owner for owner in owners if not _is_no_one(owner)]
    return (tuple(owners), frozenset()) if len(known) == len(owners) else (None, frozenset(known))


def owners_on_both_sides(ours: Iterable[str], theirs: Iterable[str]) -> list[str]:
    """List the owners of the first who are among the second too, however their ids are written."""
    others = {person_key(owner) for owner in theirs}
    return sorted({owner for owner in ours if person_key(owner) in others})


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
        raise DataError(
            f"{shown(path)} names {counted(len(unknown), 'file')} that are not in the folder: {some_of(unknown)}. "
            "Correct or remove these rows."
        )
    return [unit_of.get(file) for file in files]


def _resolved(
    rows: Sequence[tuple[str, str, str]], files: Sequence[str], also_known: Sequence[str], path: Path, *, public: bool
) -> tuple[dict[str, str], list[str]]:
    """Return owners by file, and names that no file has. A row gives the path below the folder, or the name of one
    file.
    """
    above, others_above = (TEST_FOLDERS, [TRAIN_FOLDER]) if public else ([TRAIN_FOLDER], TEST_FOLDERS)
    index, other = FileIndex(files, above=above), FileIndex(also_known, above=others_above)
    unit_of: dict[str, str] = {}
    unknown, unclear = [], []
    for name, unit, place in rows:
        found = index.find(name)
        if public and other.find(name):
            continue  # a name that fits a training image is about that one
        if len(found) == 1:
            if unit_of.setdefault(files[found[0]], unit) != unit:
                unclear.append(f"{name} in {place}")
        elif found:
            unclear.append(f"{name} in {place}")
        elif not other.find(name):
            unknown.append(f"{name} in {place}")
    if unclear:
        raise DataError(
            f"{shown(path)} names {counted(len(unclear), 'file')} of several units, or that fit several files: "
            f"{some_of(unclear)}. Keep one row for each file, with its path below the folder."
        )
    return unit_of, unknown


def _rows(path: Path, column: str | None) -> list[tuple[str, str, str]]:
    """Read (file, owner, place in the table) from every row of a table."""
    table = read_table(path)
    file_at, unit_at = _columns(table, column)
    lines = [(line, table.where(row)) for row, line in enumerate(table.rows)]
    if column is None and table.heading[file_at].lower() not in FILE_HEADINGS:
        lines.insert(0, (table.heading, "the first line"))  # two columns may lack a heading
    bad = [place for line, place in lines if not line[file_at] or not line[unit_at]]
    if bad:
        raise DataError(
            f"{shown(path)}: {counted(len(bad), 'row')} without a file or a unit: {some_of(bad)}. Complete or "
            "remove them."
        )
    return [(file_name(line[file_at]), line[unit_at], place) for line, place in lines]


def _columns(table: Table, column: str | None) -> tuple[int, int]:
    """Find the columns of file and owner; of two columns without a heading the first is the file."""
    path, heading = table.path, [cell.lower() for cell in table.heading]
    if not heading:
        raise DataError(f"{shown(path)} is empty: rows of file,unit are needed.")
    file_at = next((at for at, cell in enumerate(heading) if cell in FILE_HEADINGS), None)
    if column is None and len(heading) != 2:
        raise DataError(f"{shown(path)} has {len(heading)} columns: name the one with the unit by --unit-column.")
    if column is None:
        return (0, 1) if file_at is None else (file_at, 1 - file_at)
    if column not in table.heading or file_at is None:
        found = some_of(table.heading, limit=8)
        raise DataError(f"{shown(path)} needs a heading with 'file' and {shown(column)!r}, got {found}.")
    return file_at, table.heading.index(column)
