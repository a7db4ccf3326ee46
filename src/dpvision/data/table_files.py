"""Tables about images: CSV, TSV, JSON lines, Parquet and Arrow files, and the image files that their rows name.

Every table of this package (manifests, findings, owners) is read here, as texts. Tables are untrusted: they are regular
files, have limits, and nothing in them is executed. Parquet and Arrow need pyarrow (the extra ``tables``).
"""

from __future__ import annotations

import csv
import io
import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, final

from dpvision.data.safe_read import open_regular
from dpvision.errors import BadFile, DataError, brief, require_memory, shown, some_of

TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl")
TABLE_SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".arrow")
FILE_HEADINGS = frozenset({"file", "filename", "file_name", "path", "image", "name"})
MOST_ROWS = 20_000_000
_BYTES_OF_A_CELL = 16
"""A text of one letter takes up to this many times its size in a list of Python texts."""
_ROWS_AT_ONCE = 256


@final
@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        path: its file, for messages.
        heading: the names of the columns.
        rows: one text per column, without blanks around it; "" where the file has nothing.
        lines: the line of each row in a text file; none where the file has no lines.
        class_names: names of the classes, by column, where the file itself states them.
        images: by column, a function from row to the bytes of an image that the table itself holds.
    """

    path: Path
    heading: list[str]
    rows: list[list[str]]
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    images: dict[str, Callable[[int], bytes]] = field(default_factory=dict[str, Callable[[int], bytes]])
    lines: tuple[int, ...] = ()

    def where(self, row: int) -> str:
        """Say where the holder of the file finds a row: "line 7", or "row 6" of a file without lines."""
        return f"line {self.lines[row]}" if self.lines else f"row {row + 1}"

    def column(self, name: str) -> list[str]:
        """Return the cells of a column."""
        at = self.heading.index(name)
        return [row[at] for row in self.rows]


def is_table(path: Path) -> bool:
    """Whether the name ends like that of a table."""
    return path.suffix.lower() in TABLE_SUFFIXES


def read_table(path: Path) -> Table:
    """Read a table whose first line is the heading.

    Args:
        path: a .csv, .tsv, .jsonl, .parquet or .arrow file; any other name is read as CSV.

    Returns:
        The table; a CSV file without a line has no heading and no rows.

    Raises:
        DataError: the file can't be read as what its name says, or is too large.
    """
    suffix = path.suffix.lower()
    kind = {".parquet": "Parquet", ".arrow": "Arrow", ".jsonl": "JSON lines"}.get(suffix, "CSV")
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if kind in ("Parquet", "Arrow"):
                return _from_arrow(path, file, kind)
            require_memory(size * _BYTES_OF_A_CELL, path, remedy="Use a smaller table.")
            with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
                return _from_json(path, text) if kind == "JSON lines" else _from_csv(path, text)
    except UnicodeDecodeError as error:
        raise DataError(f"{shown(path)} can't be read as {kind}: it is not UTF-8. Save it as UTF-8.") from error
    except OSError as error:
        raise DataError(f"{shown(path)} can't be read as {kind}: {brief(error.strerror or error)}.") from error
    except (ValueError, csv.Error, RecursionError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{shown(path)} can't be read as {kind}: {brief(error).rstrip('.')}.") from error


def _from_csv(path: Path, text: io.TextIOWrapper) -> Table:
    """Read lines of cells, separated by what divides the first line into most cells: commas, semicolons or tabs."""
    first = text.readline()
    text.seek(0)
    delimiter = "\t"
    if path.suffix.lower() != ".tsv":
        delimiter = max(",;\t", key=lambda each: len(next(csv.reader([first], delimiter=each), ())))
    reader = csv.reader(text, strict=True, delimiter=delimiter)
    found: list[list[str]] = []
    numbers: list[int] = []
    try:
        for cells in reader:
            if any(cells):
                found.append([cell.strip() for cell in cells])
                numbers.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{shown(path)}: line {reader.line_num} can't be read as CSV: {brief(error)}.") from error
    if not found:
        return Table(path, [], [])
    width = len(found[0])
    rows = [cells + [""] * (width - len(cells)) for cells in found[1:]]
    return Table(path, found[0], rows, lines=tuple(numbers[1:]))


def _from_json(path: Path, text: io.TextIOWrapper) -> Table:
    """Read one object of texts and numbers a line."""
    found: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, line in enumerate(text, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{shown(path)}: line {number} can't be read as JSON: {brief(error)}.") from error
            if not isinstance(row, dict):
                raise DataError(f"{shown(path)}: line {number} is no object of columns and values.")
            found.append(row)
            numbers.append(number)
    heading = list(dict.fromkeys(str(name) for row in found for name in row))
    rows = [[_text(row.get(name)) for name in heading] for row in found]
    return Table(path, heading, rows, lines=tuple(numbers))


def _from_arrow(path: Path, file: Any, kind: str) -> Table:
    """Read the columns of a Parquet or Arrow file that hold texts, numbers or images; leave others out."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{shown(path)} needs pyarrow: pip install 'dpvision[tables]'.") from error
    if kind == "Parquet":
        opened = parquet.ParquetFile(file)
        schema, batches = opened.schema_arrow, opened.iter_batches(batch_size=_ROWS_AT_ONCE)
        promised = opened.metadata.num_rows
    else:
        magic = file.read(6)
        file.seek(0)
        source = arrow.memory_map(str(path))
        streamed: Any = arrow.ipc.open_file(source) if magic == b"ARROW1" else arrow.ipc.open_stream(source)
        schema, promised = streamed.schema, 0
        batches = (
            (streamed.get_batch(n) for n in range(streamed.num_record_batches)) if magic == b"ARROW1" else streamed
        )
    if promised > MOST_ROWS:
        raise DataError(f"{shown(path)} promises {promised} rows, more than {MOST_ROWS}.")
    kept, size, rows = [], 0, 0
    for batch in batches:
        batch.validate(full=True)  # offsets that lead outside the file
        size, rows = size + batch.nbytes, rows + batch.num_rows
        require_memory(size, path, remedy="Use a smaller table.")
        if rows > MOST_ROWS:
            raise DataError(f"{shown(path)} has more than {MOST_ROWS} rows.")
        kept.append(batch)
    whole = arrow.Table.from_batches(kept, schema=schema)
    if len(set(schema.names)) < len(schema.names):
        raise DataError(f"{shown(path)} needs columns of different names, got {some_of(schema.names, limit=8)}.")
    texts: dict[str, list[str]] = {}
    images: dict[str, Callable[[int], bytes]] = {}
    for name, column in zip(whole.column_names, whole.columns, strict=True):
        kind_of = column.type.value_type if arrow.types.is_dictionary(column.type) else column.type
        if arrow.types.is_struct(kind_of) and {"bytes", "path"} <= {each.name for each in kind_of}:
            parts = (
                [chunk.field("bytes") for chunk in column.chunks] if not arrow.types.is_dictionary(column.type) else ()
            )
            if parts and all(part.null_count == len(part) for part in parts):  # only the names of files elsewhere
                paths = (path for chunk in column.chunks for path in chunk.field("path"))
                texts[name] = [_text(path.as_py()) for path in paths]
            else:
                images[name] = _bytes_in(column, lambda cell: cell["bytes"])
        elif any(holds(kind_of) for holds in _binary_types(arrow)):
            images[name] = _bytes_in(column, lambda cell: cell)
        elif any(holds(kind_of) for holds in _text_types(arrow)):
            texts[name] = _texts_of(column, arrow)
    count = whole.num_rows
    lines = [list(row) for row in zip(*texts.values(), strict=True)] if texts else [[] for _ in range(count)]
    return Table(path, list(texts), lines, _stated_classes(schema.metadata), images)


def _binary_types(arrow: Any) -> tuple[Callable[[Any], bool], ...]:
    """Tests for types of bytes, which may hold the file of an image."""
    types = arrow.types
    return types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary


def _text_types(arrow: Any) -> tuple[Callable[[Any], bool], ...]:
    """Tests for types whose values are written as texts."""
    types = arrow.types
    strings = (types.is_string, types.is_large_string, types.is_string_view)
    return *strings, types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null


def _texts_of(column: Any, arrow: Any) -> list[str]:
    """Write the cells of a column; those of a dictionary share their texts, as they did in the file."""
    if not arrow.types.is_dictionary(column.type):
        return [_text(cell) for cell in column.to_pylist()]
    found: list[str] = []
    for chunk in column.chunks:
        values = [_text(cell) for cell in chunk.dictionary.to_pylist()]
        found += ["" if at is None else values[at] for at in chunk.indices.to_pylist()]
    return found


def _bytes_in(column: Any, content: Callable[[Any], object]) -> Callable[[int], bytes]:
    """Return a reader of the image in a row."""

    def read(row: int) -> bytes:
        cell = column[row].as_py()
        found = None if cell is None else content(cell)
        if not isinstance(found, bytes):
            raise BadFile("holds no image")
        return found

    return read


def _stated_classes(metadata: dict[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Read the names of classes that Hugging Face datasets write beside a table, by column."""
    stated = json.loads((metadata or {}).get(b"huggingface", b"{}"))
    info = stated.get("info") if isinstance(stated, dict) else None
    return classes_of_features(info.get("features") if isinstance(info, dict) else None)


def classes_of_features(features: object) -> dict[str, tuple[str, ...]]:
    """Return the class names in the features of a Hugging Face dataset, by column."""
    named = (
        {name: each.get("names") for name, each in features.items() if isinstance(each, dict)}
        if isinstance(features, dict)
        else {}
    )
    return {name: tuple(map(str, names)) for name, names in named.items() if isinstance(names, list) and names}


def _text(value: object) -> str:
    """Write a cell as CSV would; a whole number that became a float beside empty cells is whole again."""
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


@final
class FileIndex:
    """The files below a folder, by every name that a table may give them.

    Exact names go first: the path below the folder, with or without the folders above it. A bare name, and a name
    without its ending, count where they fit one file.
    """

    def __init__(self, files: Sequence[str], *, above: Iterable[str] = ()) -> None:
        """Index files.

        Args:
            files: paths below the folder, with ``/``.
            above: folders that may stand before such a path, such as ``train``.
        """
        self._exact: dict[str, list[int]] = {}
        self._loose: dict[str, list[int]] = {}
        folders = tuple(above)
        for number, file in enumerate(map(_composed, files)):
            for name in {file, *(f"{folder}/{file}" for folder in folders)}:
                self._exact.setdefault(name, []).append(number)
            bare = file.rpartition("/")[2]
            for name in {bare, bare.rpartition(".")[0] or bare, file.rpartition(".")[0] or file}:
                self._loose.setdefault(name, []).append(number)

    def find(self, name: str) -> list[int]:
        """Return the numbers of the files that a name fits."""
        name = _composed(name)
        return self._exact.get(name) or self._loose.get(name, [])


def _composed(name: str) -> str:
    """Write letters with accents in one form: some systems store them as two characters each."""
    return unicodedata.normalize("NFC", name)


def file_name(cell: str) -> str:
    """Write a file's name with ``/`` and without a ``./`` before it."""
    return cell.replace("\\", "/").removeprefix("./")


def leads_outside(name: str) -> bool:
    """Whether a path is absolute, or has ``..`` in it."""
    return name.startswith("/") or name[1:2] == ":" or ".." in PurePosixPath(name).parts
