"""MDS shards: any row by its number, and no byte outside a sample."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpvision.data import LoadOptions, load
from dpvision.data.foreign_shards import is_mds, read_mds
from dpvision.data.packing import pack
from dpvision.errors import DataError

COLUMNS = {"image": "png", "label": "int", "patient": "str", "size": "uint16"}
SIZES = {"png": None, "int": 8, "str": None, "uint16": 2}


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 6), (number, 2 * number, 255 - number)).save(buffer, "png")
    return buffer.getvalue()


def write_mds(folder: Path, rows: list[int], *, columns: dict[str, str] | None = None, per_shard: int = 3) -> Path:
    """Write shards as the format describes them."""
    columns = columns or COLUMNS
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    shared: dict[str, Any] = {
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [SIZES.get(columns[name]) for name in names],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 2**26,
        "version": 2,
    }
    shards = []
    for number, start in enumerate(range(0, len(rows), per_shard)):
        samples = []
        for row in rows[start : start + per_shard]:
            values = {
                "image": png(row),
                "label": np.int64(row % 2).tobytes(),
                "patient": f"patient {row // 2}".encode(),
                "size": np.uint16(row).tobytes(),
            }
            parts = [values[name] for name in names]
            open_sizes = [len(part) for part, size in zip(parts, shared["column_sizes"], strict=True) if size is None]
            samples.append(np.array(open_sizes, np.uint32).tobytes() + b"".join(parts))
        text = json.dumps(shared).encode()
        offsets = np.cumsum([0, *map(len, samples)]) + 4 + 4 * (len(samples) + 1) + len(text)
        content = np.uint32(len(samples)).tobytes() + offsets.astype(np.uint32).tobytes() + text + b"".join(samples)
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(content)
        raw = {"basename": name, "bytes": len(content), "hashes": {}}
        shards.append(shared | {"raw_data": raw, "samples": len(samples), "zip_data": None})
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


def test_rows_of_mds_shards_are_read_by_number(tmp_path: Path) -> None:
    table = read_mds(write_mds(tmp_path / "m", list(range(8))))
    assert table.heading == ["label", "patient", "size"]
    assert table.rows[5] == ["1", "patient 2", "5"]
    for row in (7, 0, 3, 2):
        assert table.images["image"](row) == png(row)


def test_mds_folders_are_trained_on_and_packed_like_tables(tmp_path: Path) -> None:
    source = tmp_path / "m"
    write_mds(source / "train", list(range(8)))
    write_mds(source / "val", list(range(20, 24)))
    with pytest.raises(DataError, match="does not say which classes"):
        load(source, LoadOptions(classes_are_public=False))
    options = LoadOptions(classes="0,1", image_size=6, channels=3, classes_are_public=False)
    loaded = load(source, options)
    assert loaded.train.num_rows == 8
    assert loaded.train.num_units == 4
    assert loaded.train.labels.tolist() == [0, 1] * 4
    assert loaded.test is not None
    assert loaded.test.num_rows == 4
    assert loaded.train.images[3, :, 0, 0].tolist() == [3, 6, 252]
    pack(source, tmp_path / "store", options)
    packed = load(tmp_path / "store", options)
    assert packed.train.fingerprint() == loaded.train.fingerprint()
    assert packed.train.owners == loaded.train.owners


def test_pickled_columns_are_never_read(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "m", [1, 2], columns={**COLUMNS, "patient": "pkl"})
    assert "patient" not in read_mds(folder).heading
    folder = write_mds(tmp_path / "n", [1, 2], columns={**COLUMNS, "image": "pkl"})
    with pytest.raises(DataError, match="no column of images"):
        read_mds(folder)


def test_other_files_called_index_json_are_no_mds(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"pages": []}')
    assert not is_mds(tmp_path)
    assert not is_mds(tmp_path / "none")


def changed(folder: Path, **values: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= values
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"samples": 99}, "does not hold the 99 samples"),
        ({"version": 1}, "no index of MDS shards"),
        ({"raw_data": {"basename": "../shard.00000.mds"}}, "outside its folder"),
        ({"raw_data": {"basename": "gone.mds"}, "compression": "zstd"}, "zstd -d"),
        ({"raw_data": {"basename": "gone.mds"}}, "can't be read"),
        ({"column_names": ["a"]}, "different columns"),
    ],
)
def test_an_index_that_lies_is_one_line(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = write_mds(tmp_path / "m", list(range(5)))
    changed(folder, **values)
    with pytest.raises(DataError, match=message) as caught:
        load(folder, LoadOptions(classes="0,1"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [{"column_names": ["image"]}, {"column_sizes": [None, 8, 8, 8, 8, 8]}])
def test_columns_without_a_type_and_a_size_are_one_line(tmp_path: Path, values: dict[str, Any]) -> None:
    folder = write_mds(tmp_path / "m", list(range(5)))
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        shard |= values
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="a type and a size for each column"):
        read_mds(folder)


def test_offsets_and_sizes_that_lead_outside_are_refused(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "m", list(range(5)))
    path = folder / "shard.00000.mds"
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + np.uint32(2**31).tobytes() + whole[8:])
    with pytest.raises(DataError, match="outside the file"):
        read_mds(folder)
    first = int(np.frombuffer(whole[4:8], np.uint32)[0])
    path.write_bytes(whole[:first] + np.uint32(2**30).tobytes() + whole[first + 4 :])
    with pytest.raises(DataError, match="longer than it is"):
        load(folder, LoadOptions(classes="0,1"))
    path.write_bytes(whole[:-200])
    with pytest.raises(DataError):
        read_mds(folder)
