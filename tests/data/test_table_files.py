"""The one reader of tables: kinds of files, limits, and damaged files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from dpvision.data.table_files import FileIndex, leads_outside, read_table
from dpvision.errors import DataError

HEADING, ROWS = ["file", "label", "age"], [["a.png", "cat", "3"], ["b.png", "dog", ""]]


def test_every_kind_of_table_gives_the_same_texts(tmp_path: Path) -> None:
    arrow: Any = pytest.importorskip("pyarrow", reason="Parquet is an optional extra")
    from pyarrow import parquet

    (tmp_path / "t.csv").write_text("\ufefffile,label,age\na.png, cat ,3\n\nb.png,dog,\n", encoding="utf-8")
    (tmp_path / "t2.csv").write_text("file;label;age\na.png;cat;3\nb.png;dog\n")
    (tmp_path / "t.tsv").write_text("file\tlabel\tage\na.png\tcat\t3\nb.png\tdog\t\n")
    (tmp_path / "t.jsonl").write_text(
        '{"file": "a.png", "label": "cat", "age": 3}\n{"file": "b.png", "label": "dog"}\n'
    )
    columns = {"file": ["a.png", "b.png"], "label": ["cat", "dog"], "age": [3.0, None]}
    table = arrow.table({**columns, "boxes": [[1, 2], [3]]})
    parquet.write_table(table, tmp_path / "t.parquet")
    with arrow.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema) as stream:
        stream.write_table(table)
    with arrow.ipc.new_file(str(tmp_path / "t2.arrow"), table.schema) as file:
        file.write_table(table)
    for path in sorted(tmp_path.iterdir()):
        read = read_table(path)
        assert (read.heading, read.rows) == (HEADING, ROWS), path.name


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", b"\xff\xfe\x00file"),
        ("t.csv", b'file,label\n"a.png,cat\n'),
        ("t.jsonl", b'{"file": "a.png"\n'),
        ("t.jsonl", b"[" * 100_000),
        ("t.parquet", b"PAR1 nothing PAR1"),
        ("t.arrow", b"\x00" * 64),
        ("t.arrow", b"ARROW1" + b"\xff" * 64),
    ],
)
def test_a_damaged_table_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="can't be read as") as caught:
        read_table(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_pipe_in_place_of_a_table_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv")
    with pytest.raises(DataError, match="a pipe or a device"):
        read_table(tmp_path / "t.csv")


def test_damaged_parquet_and_arrow_files_never_crash(tmp_path: Path) -> None:
    arrow: Any = pytest.importorskip("pyarrow", reason="Parquet is an optional extra")
    from pyarrow import parquet

    table = arrow.table({"file": [f"{n}.png" for n in range(50)], "label": ["a"] * 50})
    parquet.write_table(table, tmp_path / "t.parquet")
    with arrow.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema) as stream:
        stream.write_table(table)
    for name in ("t.parquet", "t.arrow"):
        good = (tmp_path / name).read_bytes()
        for at in range(0, len(good), 7):
            (tmp_path / name).write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
            with contextlib.suppress(DataError):
                read_table(tmp_path / name)


def test_a_file_is_found_by_path_by_name_and_without_its_ending() -> None:
    index = FileIndex(["a/1.png", "b/1.png", "b/2.png"], above=["scans"])
    assert index.find("a/1.png") == index.find("scans/a/1.png") == index.find("a/1") == [0]
    assert index.find("2.png") == index.find("2") == [2]
    assert index.find("1.png") == [0, 1]
    assert index.find("c/2.png") == []


@pytest.mark.parametrize("name", ["/etc/a.png", "../a.png", "a/../../b.png", "C:/a.png"])
def test_paths_that_lead_outside_are_recognised(name: str) -> None:
    assert leads_outside(name)
    assert not leads_outside("a/..b.png")


def test_columns_that_are_no_texts_never_spoil_a_parquet_table(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    from pyarrow import parquet

    columns = {
        "file": pa.array(["a.png", "b.png"]).dictionary_encode(),
        "when": pa.array([2**62, 1], pa.timestamp("ms")),
        "image": pa.array([b"x", b"y"]).dictionary_encode(),
        "scan": pa.array([{"bytes": None, "path": "c.png"}, {"bytes": None, "path": "d.png"}]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = read_table(tmp_path / "a.parquet")
    assert (found.heading, found.rows) == (["file", "scan"], [["a.png", "c.png"], ["b.png", "d.png"]])
    assert found.images["image"](1) == b"y"
    assert found.where(1) == "row 2"


def test_a_damaged_line_of_a_text_table_is_numbered(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"file": "a.png"}\n\n{bad\n')
    with pytest.raises(DataError, match=r"a\.jsonl: line 3 can't be read as JSON"):
        read_table(tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_bytes("file,label\nä.png,x\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"it is not UTF-8\. Save it as UTF-8"):
        read_table(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text('file,label\n\n"a\nb",x\nc,y\n')
    found = read_table(tmp_path / "b.csv")
    assert [found.where(row) for row in range(2)] == ["line 4", "line 5"]


def test_letters_with_accents_are_found_in_either_form() -> None:
    assert FileIndex(["u\u0308.png"]).find("\u00fc.png") == [0]
