"""Who owns each picture: privacy units from folders or from a CSV of (file, unit)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from dpvision.checks import DataError
from dpvision.data.options import LoadOptions
from dpvision.data.wording import shown, some_of

TRAIN_FOLDER = "train"
TEST_FOLDERS = ("test", "val", "valid", "validation")
FILE_HEADINGS = frozenset({"file", "filename", "file_name", "path", "image", "name"})


def unit_names(files: Sequence[str], *, options: LoadOptions, also_known: Sequence[str] = ()) -> list[str] | None:
    """The unit of each file (paths below the folder, such as ``cat/17.png``); None if each is its own unit.

    ``also_known`` are files of the public test part, which a CSV may mention too.
    """
    if options.unit_csv is not None:
        return _from_csv(files, options.unit_csv, column=options.unit_column, also_known=also_known)
    if options.unit_folder_level is not None:
        return _from_folders(files, options.unit_folder_level)
    if options.unit_column is not None:
        raise DataError("unit_column names a column of unit_csv when the source is a folder: give unit_csv too.")
    return None


def _from_folders(files: Sequence[str], level: int) -> list[str]:
    """The name alone counts: the same name in two class folders is the same unit, which errs on the safe side."""
    folders = [file.split("/")[:-1] for file in files]
    shallow = [file for file, path in zip(files, folders, strict=True) if len(path) < level]
    if shallow:
        raise DataError(
            f"unit_folder_level is {level}, but {len(shallow)} files lie in fewer folders: {some_of(shallow)}."
        )
    return [path[level - 1] for path in folders]


def _from_csv(files: Sequence[str], path: Path, *, column: str | None, also_known: Sequence[str]) -> list[str]:
    unit_of = _resolved(_rows(path, column), files, also_known, path)
    missing = [file for file in files if file not in unit_of]
    if missing:
        raise DataError(f"{shown(path)} gives no unit for {len(missing)} files: {some_of(missing)}.")
    return [unit_of[file] for file in files]


def _resolved(
    rows: Sequence[tuple[str, str]], files: Sequence[str], also_known: Sequence[str], path: Path
) -> dict[str, str]:
    """Units by file. A row may give the path below the folder, or only a name that no two files share."""
    by_name: dict[str, list[str]] = {}
    for file in files:
        for name in {file, f"{TRAIN_FOLDER}/{file}", file.split("/")[-1]}:
            by_name.setdefault(name, []).append(file)
    public = {
        name for file in also_known for name in (file, file.split("/")[-1], *(f"{t}/{file}" for t in TEST_FOLDERS))
    }
    unit_of: dict[str, str] = {}
    unknown, unclear = [], []
    for name, unit in rows:
        found = by_name.get(name, [])
        if len(found) == 1:
            if unit_of.setdefault(found[0], unit) != unit:
                unclear.append(name)
        elif found:
            unclear.append(name)
        elif name not in public:
            unknown.append(name)
    for names, problem in ((unknown, "which are not in the folder"), (unclear, "which fit several files or units")):
        if names:
            raise DataError(f"{shown(path)} names {len(names)} files {problem}: {some_of(names)}.")
    return unit_of


def _rows(path: Path, column: str | None) -> list[tuple[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file, strict=True) if any(line)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{shown(path)} can't be read as CSV: {shown(error)}.") from error
    file_at, unit_at, lines = _columns(lines, column, path)
    needed = max(file_at, unit_at)
    bad = [line for line in lines if len(line) <= needed or not line[file_at] or not line[unit_at]]
    if bad:
        raise DataError(
            f"{shown(path)}: {len(bad)} rows have no file or no unit: {some_of([','.join(b) for b in bad])}."
        )
    return [(line[file_at].replace("\\", "/").removeprefix("./"), line[unit_at]) for line in lines]


def _columns(lines: list[list[str]], column: str | None, path: Path) -> tuple[int, int, list[list[str]]]:
    """Where file and unit stand, and the rows without the heading."""
    if not lines:
        raise DataError(f"{shown(path)} is empty: rows of file,unit are needed.")
    heading = [cell.lower() for cell in lines[0]]
    file_at = next((at for at, cell in enumerate(heading) if cell in FILE_HEADINGS), None)
    if column is None and len(heading) != 2:
        raise DataError(f"{shown(path)} has {len(heading)} columns: name the one with the unit by unit_column.")
    if column is None:
        return (0, 1, lines) if file_at is None else (file_at, 1 - file_at, lines[1:])
    if column not in lines[0] or file_at is None:
        raise DataError(
            f"{shown(path)} needs a heading with 'file' and {shown(column)!r}, got {some_of(lines[0], limit=8)}."
        )
    return file_at, lines[0].index(column), lines[1:]
