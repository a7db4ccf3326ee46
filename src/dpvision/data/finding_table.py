"""Findings of images: labels of which several, or none, can hold, from a table with one column per finding.

A cell is 1 (present), 0 (absent), or unknown: empty, or -1 for uncertain, as in CheXpert. Unknown labels are NaN. They
are masked in the loss and in each metric, and change no divisor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpvision.data.image_folder import Listing, files_below
from dpvision.data.images import SUFFIXES, is_readable
from dpvision.data.options import LoadOptions
from dpvision.data.table_files import FILE_HEADINGS, FileIndex, file_name, read_table
from dpvision.errors import DataError, counted, shown, some_of

_PRESENT = frozenset({"1", "1.0"})
_ABSENT = frozenset({"0", "0.0"})
_UNKNOWN = frozenset({"", "-1", "-1.0", "nan", "na", "u"})


def list_findings(
    root: Path, options: LoadOptions, *, names: Sequence[str] | None = None, other: Path | None = None
) -> Listing:
    """List the images below a folder with their findings.

    Args:
        root: folder of images, in any folders below it.
        options: ``findings`` is the CSV file; ``findings_columns`` and ``unit_column`` name columns of it.
        names: the findings of a model, in order; by default those of the file.
        other: folder of another split, whose images the CSV may mention too.

    Returns:
        The files, the names of the findings, and their labels, float32 (files, findings).

    Raises:
        DataError: the CSV can't be read, names an unknown file, lacks an image, or has another value than 1, 0, -1 or
            nothing.
    """
    path = Path(options.findings or "")
    found_names, rows = _table(path, options, names)
    files = _images_below(root)
    if not files:
        raise DataError(f"{shown(root)} has no images ({', '.join(sorted(SUFFIXES))}).")
    index = FileIndex(files, above=_folders_above(root))
    elsewhere = FileIndex(
        () if other is None else _images_below(other), above=() if other is None else _folders_above(other)
    )
    labels = np.full((len(files), len(found_names)), np.nan, dtype=np.float32)
    seen: set[int] = set()
    unknown: list[str] = []
    for name, place, values in rows:
        at = index.find(name)
        if len(at) > 1 or (at and at[0] in seen):
            raise DataError(
                f"{shown(path)} names {shown(name)} again in {place}, or the name fits several files. Keep one row for "
                "each file, with its path below the folder."
            )
        if at:
            seen.add(at[0])
            labels[at[0]] = values
        elif not elsewhere.find(name):
            unknown.append(f"{name} in {place}")
    if unknown and not options.public:
        raise DataError(
            f"{shown(path)} names {counted(len(unknown), 'file')} that are not in the folder: {some_of(unknown)}. "
            "Correct or remove these rows."
        )
    missing = [file for number, file in enumerate(files) if number not in seen]
    if missing:
        raise DataError(
            f"{shown(path)} has no row for {counted(len(missing), 'image')}: {some_of(missing)}. Add rows, or remove "
            "these images."
        )
    return Listing(root=root, class_names=found_names, files=tuple(files), given_labels=_tensor(labels))


def _tensor(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels)


def _images_below(root: Path) -> list[str]:
    return sorted(file for file in files_below(root) if is_readable(root / file))


def _folders_above(root: Path) -> tuple[str, str]:
    """Folders by which a table may begin the name of a file: its folder, or that one with the folder above it."""
    folder = root.resolve()
    return folder.name, f"{folder.parent.name}/{folder.name}"


def _table(
    path: Path, options: LoadOptions, names: Sequence[str] | None
) -> tuple[tuple[str, ...], list[tuple[str, str, list[float]]]]:
    """Read the names of the findings, and (file, place in the table, values) of every row."""
    table = read_table(path)
    heading, lines = table.heading, table.rows
    file_at = next((at for at, cell in enumerate(heading) if cell.lower() in FILE_HEADINGS), None)
    if file_at is None or len(set(heading)) < len(heading):
        raise DataError(f"{shown(path)} needs a heading of different names with 'file' and one column per finding.")
    wanted = list(names or options.finding_list or ()) or [
        cell for cell in heading if cell not in (heading[file_at], options.unit_column)
    ]
    absent = [name for name in wanted if name not in heading]
    if absent or not wanted:
        raise DataError(f"{shown(path)} has no column for {some_of(absent) or 'a finding'}.")
    columns = [heading.index(name) for name in wanted]
    rows: list[tuple[str, str, list[float]]] = []
    for number, line in enumerate(lines):
        place = table.where(number)
        if not line[file_at]:
            raise DataError(f"{shown(path)}: {place} names no file. Complete or remove it.")
        values = [_value(line[at], path, place, heading[at]) for at in columns]
        rows.append((file_name(line[file_at]), place, values))
    return tuple(wanted), rows


def _value(cell: str, path: Path, place: str, column: str) -> float:
    """1, 0, or NaN for an unknown label."""
    text = cell.lower()
    if text in _UNKNOWN:
        return float("nan")
    if text in _PRESENT or text in _ABSENT:
        return float(text in _PRESENT)
    raise DataError(
        f"{shown(path)}: {shown(column)} in {place} must be 1, 0, -1 (uncertain) or empty, got {shown(cell)}. Name "
        "the columns of the findings with findings_columns."
    )
