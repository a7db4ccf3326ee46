"""Manifests, images beside a table, Hugging Face folders and Tiny ImageNet; each mistake is one line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpvision.config import parse_config
from dpvision.data import LoadOptions, load, load_one
from dpvision.data.splits import load_splits
from dpvision.errors import DataError
from dpvision.privacy.randomness import Keys

SHADES = {"a.png": 10, "b.png": 60, "c.png": 110, "d.png": 160, "e.png": 210}
LABELS = {"a.png": "well", "b.png": "ill", "c.png": "well", "d.png": "ill", "e.png": "well"}
CLASSES = "well,ill"


def write_images(folder: Path, names: Any = SHADES) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), SHADES[name.rpartition("/")[2]], np.uint8)).save(folder / name)


def private(**changes: Any) -> LoadOptions:
    """Options of a private run: its labels do not decide the classes."""
    return LoadOptions(classes_are_public=False, **{"classes": CLASSES, **changes})


def write_csv(path: Path, *rows: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Five images of three patients, the last of whom is tested on."""
    write_images(tmp_path)
    rows = ("a.png,well,p1,train", "b.png,ill,p1,train", "c.png,well,p2,train", "d.png,ill,p3,test")
    return write_csv(tmp_path / "labels.csv", "file,label,patient,split", *rows, "e.png,well,p3,test")


def shades(store: Any) -> list[int]:
    return store.images[:, 0, 0, 0].tolist()


# ---- the kinds of manifests


def test_a_csv_manifest_gives_classes_patients_and_splits(table: Path) -> None:
    splits = load(table, private())
    assert (splits.train.class_names, splits.train.labels.tolist()) == (("well", "ill"), [0, 1, 0])
    assert (splits.train.owners, splits.train.num_units) == (("p1", "p1", "p2"), 2)
    assert splits.test is not None
    assert (shades(splits.train), shades(splits.test)) == ([10, 60, 110], [160, 210])
    assert splits.train.owners_from == "the column patient of the table"


def test_flags_name_the_columns_of_a_manifest(tmp_path: Path) -> None:
    write_images(tmp_path / "data")
    rows = [f"x,{name},{label},{number % 4}" for number, (name, label) in enumerate(LABELS.items())]
    path = write_csv(tmp_path / "t.csv", "patient,scan,finding,who", *rows)
    options = private(file_column="scan", label_column="finding", unit_column="who", image_folder=tmp_path / "data")
    store = load(path, options).train
    assert (store.owners, store.num_rows) == (("0", "1", "2", "3", "0"), 5)


def test_a_parquet_manifest_is_read_as_a_csv_is(table: Path) -> None:
    arrow: Any = pytest.importorskip("pyarrow", reason="Parquet is an optional extra")
    from pyarrow import csv, parquet

    parquet.write_table(csv.read_csv(table), table.with_suffix(".parquet"))
    table.rename(table.with_name("old.csv"))
    assert arrow
    one, other = load(table.with_name("old.csv"), private()), load(table.with_suffix(".parquet"), private())
    assert one.train.fingerprint() == other.train.fingerprint()


def test_images_beside_labels_csv_are_read_as_a_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    write_csv(tmp_path / "labels.csv", "image_id,dx", *(f"{n.removesuffix('.png')},{k}" for n, k in LABELS.items()))
    store = load(tmp_path, private()).train
    assert store.labels.tolist() == [0, 1, 0, 1, 0]
    assert store.owners is None


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_hugging_face_metadata_is_read_in_each_split_folder(tmp_path: Path, kind: str) -> None:
    parts = {"train": ["a.png", "b.png", "c.png"], "test": ["d.png", "e.png"]}
    for split, names in parts.items():
        write_images(tmp_path / split, names)
        rows = [f"{name},{LABELS[name]}" for name in names]
        lines = [json.dumps({"file_name": name, "label": LABELS[name]}) for name in names]
        write_csv(tmp_path / split / f"metadata.{kind}", *(["file_name,label", *rows] if kind == "csv" else lines))
    splits = load(tmp_path, private())
    assert splits.test is not None
    assert (shades(splits.train), shades(splits.test)) == ([10, 60, 110], [160, 210])


def test_hugging_face_metadata_at_the_top_takes_splits_from_folders(tmp_path: Path) -> None:
    write_images(tmp_path, ["train/a.png", "train/b.png", "test/c.png"])
    write_csv(tmp_path / "metadata.csv", "file_name,label", "train/a.png,well", "train/b.png,ill", "test/c.png,ill")
    splits = load(tmp_path, private())
    assert splits.test is not None
    assert (splits.train.num_rows, splits.test.num_rows) == (2, 1)


def png(shade: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((8, 8), shade, np.uint8)).save(content, "PNG")
    return content.getvalue()


def embedded(names: list[str], *, owners: bool = False) -> Any:
    """Images inside a table with the numbers of their classes, as Hugging Face stores them."""
    arrow: Any = pytest.importorskip("pyarrow", reason="Arrow is an optional extra")
    features = {"image": {"_type": "Image"}, "label": {"names": ["ill", "well"], "_type": "ClassLabel"}}
    columns: dict[str, Any] = {
        "image": [{"bytes": png(SHADES[name]), "path": name} for name in names],
        "label": [["ill", "well"].index(LABELS[name]) for name in names],
    }
    columns |= {"patient": [name[0] for name in names]} if owners else {}
    return arrow.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def test_a_saved_hugging_face_dataset_is_read_with_its_own_classes(tmp_path: Path) -> None:
    arrow: Any = pytest.importorskip("pyarrow", reason="Arrow is an optional extra")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for split, names in {"train": ["a.png", "b.png", "c.png"], "test": ["d.png", "e.png"]}.items():
        table = embedded(names, owners=True)
        (tmp_path / split).mkdir()
        files = [{"filename": f"data-{n:05}-of-00002.arrow"} for n in range(2)]
        for file, part in zip(files, (table.slice(0, 1), table.slice(1)), strict=True):
            with arrow.ipc.new_stream(str(tmp_path / split / file["filename"]), table.schema) as stream:
                stream.write_table(part)
        (tmp_path / split / "state.json").write_text(json.dumps({"_data_files": files}))
        (tmp_path / split / "dataset_info.json").write_text("{}")
    splits = load(tmp_path, private(classes=None))
    assert splits.test is not None
    assert (splits.train.class_names, splits.train.labels.tolist()) == (("ill", "well"), [1, 0, 1])
    assert (shades(splits.train), shades(splits.test)) == ([10, 60, 110], [160, 210])
    assert splits.train.owners == ("a", "b", "c")


def test_parquet_files_by_split_hold_the_images_themselves(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet is an optional extra")
    from pyarrow import parquet

    (tmp_path / "data").mkdir()
    parquet.write_table(embedded(["a.png", "b.png"]), tmp_path / "data" / "train-00000-of-00002.parquet")
    parquet.write_table(embedded(["c.png"]), tmp_path / "data" / "train-00001-of-00002.parquet")
    parquet.write_table(embedded(["d.png"]), tmp_path / "data" / "validation-00000-of-00001.parquet")
    splits = load(tmp_path, private(classes=None))
    assert splits.test is not None
    assert (shades(splits.train), shades(splits.test)) == ([10, 60, 110], [160])


def test_tiny_imagenet_is_read_in_its_official_layout(tmp_path: Path) -> None:
    write_images(tmp_path / "train", ["n01/images/a.png", "n02/images/b.png"])
    write_images(tmp_path / "val" / "images", ["c.png", "d.png"])
    write_images(tmp_path / "test" / "images", ["e.png"])
    write_csv(tmp_path / "val" / "val_annotations.txt", "c.png\tn02\t0\t0\t9\t9", "d.png\tn01\t0\t0\t9\t9")
    splits = load(tmp_path, private(classes=None))
    assert splits.test is not None
    assert (splits.train.class_names, splits.train.labels.tolist()) == (("n01", "n02"), [0, 1])
    assert (splits.test.labels.tolist(), shades(splits.test)) == ([1, 0], [110, 160])
    assert "test/ have no labels" in splits.unused


def test_a_test_table_may_share_the_folder_of_the_images(tmp_path: Path) -> None:
    write_images(tmp_path)
    train = write_csv(tmp_path / "train.csv", "file,label", "a.png,well", "b.png,ill", "c.png,well")
    test = write_csv(tmp_path / "test.csv", "file,label", "d.png,ill", "e.png,well")
    assert load(train, private(test=str(test))).train.num_rows == 3
    assert load_one(test, private(), class_names=("well", "ill")).labels.tolist() == [1, 0]
    write_csv(test, "file,label", "c.png,well", "d.png,ill", "e.png,well")
    with pytest.raises(DataError, match=r"1 training images are in the test table too: c\.png"):
        load(train, private(test=str(test)))


def test_rows_of_a_validation_split_beside_a_test_split_are_not_used(table: Path) -> None:
    write_csv(table, *(line.replace("e.png,well,p3,test", "e.png,well,p4,val") for line in table.read_text().split()))
    splits = load(table, private())
    assert splits.test is not None
    assert (shades(splits.train), shades(splits.test)) == ([10, 60, 110], [160])
    assert splits.unused.startswith("the validation rows of labels.csv are neither trained on nor tested on")


# ---- which classes there are


def test_private_labels_never_decide_the_classes_unless_they_are_public(table: Path) -> None:
    with pytest.raises(DataError, match=r"declare them with --classes A,B,…, or .* public with --public-classes"):
        load(table, private(classes=None))
    assert load(table, private(classes=None, public_classes=True)).train.class_names == ("ill", "well")
    assert load(table, private(classes="ill,well,rare")).train.class_names == ("ill", "well", "rare")
    with pytest.raises(
        DataError, match=r"labels that are no class: ill, the first in line 3\. The classes are well, rare"
    ):
        load(table, private(classes="well,rare"))


# ---- mistakes

MISTAKES: dict[str, tuple[str, str]] = {
    "file,patient\na.png,p1": ("no column for the label: it has file, patient", "label column missing"),
    "scan,label\na.png,well": (r"no column for the file: it has scan, label\. Name it with --file-column", ""),
    "file,label\na.png,well\nb.png,ill\nc.png,well\nd.png,ill\ne.png,well\nf.png,ill": (
        r"names 1 image missing below .*: f\.png, in line 7\.",
        "label without image",
    ),
    "file,label\na.png,well\nb.png,ill\nc.png,well": (r"no row for 2 images below .*: d\.png, e\.png", "no label"),
    "file,label\na.png,well\na.png,well": (r"more than one row: a\.png, the first in line 2 and line 3\.", "twice"),
    "file,label\na.png,well\n./a.png,ill": (r"names 1 image in more than one row: a\.png", "duplicates that differ"),
    "file,label\na.png,\nb.png,ill": ("no label in 1 row, the first is line 2", "empty label"),
    "file,label\n../a.png,well": (r"names 1 file outside .*: \.\./a\.png, in line 2\.", "path outside"),
    "file,label\n/etc/a.png,well": (r"names 1 file outside .*: /etc/a\.png", "absolute path"),
    "file,label": ("is empty: rows of file and label are needed", "empty table"),
    "": ("is empty: rows of file and label are needed", "empty file"),
    "file,label,split\na.png,well,fold1": (
        "a split must be train, test or val, got fold1, first in line 2",
        "unknown split",
    ),
    "file,label,split\na.png,well,test": ("1|no row for|no training images", "no training rows"),
    "file,label,patient\na.png,well,p\nb.png,ill,": ("no owner in 1 row, the first is line 3", "empty id"),
    "file,label,patient\na.png,well,Anon\nb.png,ill,p1": (
        r"1 of 2 images have no owner: .*\(Anon\), the first in line 2\.",
        "",
    ),
    "file,label,patient\na.png,well,p7\nb.png,ill,P07\nc.png,ill,p1": (
        "1 owner may be written in several ways, such as 'P07' and 'p7' in the column patient",
        "one person, two spellings",
    ),
    "file,label\n\n\na.png,well\nb.png,sick": (r"no class: sick, in line 5\.", "blank lines are counted"),
    'file;label;"a, b"\na.png;well;\nf.png;ill;': (r"missing below .*: f\.png, in line 3\.", "semicolons and commas"),
    "file,label,patient\na.png,well,p\nb.png,ill,p": ("all 2 images have the same owner, p", "identical ids"),
}


@pytest.mark.parametrize("content", sorted(MISTAKES))
def test_each_mistake_in_a_manifest_gets_one_clear_line(tmp_path: Path, content: str) -> None:
    write_images(tmp_path)
    path = tmp_path / "labels.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=MISTAKES[content][0]) as caught:
        load(path, private())
    assert "\n" not in str(caught.value)


def test_an_unreadable_image_of_a_manifest_is_named(table: Path) -> None:
    table.with_name("c.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1 of 3 images can't be read: c\.png"):
        load(table, private())
    assert load(table, private(skip_bad=True)).train.num_rows == 2


def test_a_patient_on_both_sides_of_the_split_is_refused(table: Path) -> None:
    write_csv(table, *(line.replace("p3,test", "p1,test") for line in table.read_text().splitlines()))
    privacy = {"target_epsilon": 3.0}
    config = parse_config({"data": {"source": str(table), "classes": CLASSES}, "privacy": privacy})
    with pytest.raises(DataError, match="images of 1 owner are in both train and test: p1"):
        load_splits(config, Keys.from_seed(1))


def test_labels_that_differ_in_capitals_alone_are_no_public_classes(tmp_path: Path) -> None:
    write_images(tmp_path)
    path = write_csv(tmp_path / "labels.csv", "file,label", "a.png,well", "b.png,ill", "c.png,Well", "d.png,ill")
    with pytest.raises(DataError, match=r"differ in capital letters alone: Well, well \(Well first in line 4\)"):
        load(path, private(classes=None, public_classes=True, skip_bad=True))


def test_owners_of_images_inside_a_table_come_from_its_columns_alone(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is an optional extra")
    from pyarrow import parquet, table

    parquet.write_table(table({"image": [b"no image"] * 3, "label": ["well", "ill", "ill"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"name its column of owners with --unit-column"):
        load(tmp_path / "a.parquet", private(unit_pattern="(a)"))
    with pytest.raises(DataError, match=r"3 of 3 images can't be read: a\.parquet row 1 \(not an image"):
        load(tmp_path / "a.parquet", private())


@pytest.mark.parametrize("content", ['{"splits": 7}', '{"splits": ["train", 5]}', "[]", "{bad"])
def test_a_damaged_saved_dataset_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(content)
    with pytest.raises(DataError, match=r"dataset_dict\.json (must|can't)") as caught:
        load(tmp_path, private())
    assert "\n" not in str(caught.value)


def test_class_folders_with_a_table_beside_them_are_not_guessed_at(tmp_path: Path) -> None:
    write_images(tmp_path, ["x/a.png", "y/b.png"])
    path = write_csv(tmp_path / "labels.csv", "file,label", "x/a.png,well", "y/b.png,ill")
    with pytest.raises(DataError, match=r"has class folders \(.*\) and a table, labels\.csv: name the table itself"):
        load(tmp_path, private())
    assert load(path, private()).train.class_names == ("well", "ill")
    owners = private(classes=None, unit_csv=path, unit_column="label")
    assert load(tmp_path, owners).train.class_names == ("x", "y")
