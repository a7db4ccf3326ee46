"""Folders of images: classes, splits, shapes, privacy units, and what happens to bad files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpvision.data import LoadOptions, load, load_one
from dpvision.errors import DataError


def write_picture(path: Path, value: int = 0, *, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Path:
    """A flat image; ``size`` is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, value, value)).save(path)
    return path


def write_classes(root: Path, classes: tuple[str, ...] = ("cat", "dog"), *, each: int = 3, mode: str = "RGB") -> Path:
    for number, name in enumerate(classes):
        for image in range(each):
            write_picture(root / name / f"{image}.png", 10 * number + image, mode=mode)
    return root


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    assert str(error.value).isprintable()
    return str(error.value)


def test_class_folders_become_classes_in_sorted_order(tmp_path: Path) -> None:
    splits = load(str(write_classes(tmp_path / "pets", ("dog", "cat"))))
    assert splits.train.class_names == ("cat", "dog")
    assert splits.train.row_names == ("cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/1.png", "dog/2.png")
    assert splits.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert splits.train.images[:, 0, 0, 0].tolist() == [10, 11, 12, 0, 1, 2]
    assert splits.test is None
    assert splits.normalisation.to_dict() == {"mean": [0.5] * 3, "std": [0.5] * 3, "source": "fixed"}


def test_folders_of_archivers_are_no_classes_and_images_beside_classes_are_counted(tmp_path: Path) -> None:
    write_classes(tmp_path / "pets")
    (tmp_path / "pets" / "__MACOSX").mkdir()
    (tmp_path / "pets" / "notes.txt").write_text("no image")
    assert load(tmp_path / "pets").unused == ""
    write_picture(tmp_path / "pets" / "lost.png")
    splits = load(tmp_path / "pets")
    assert splits.train.class_names == ("cat", "dog")
    assert splits.unused == "1 image beside the class folders, in none of them: not used."


def test_the_order_of_files_does_not_depend_on_the_order_on_disk(tmp_path: Path) -> None:
    names = ["b/2.png", "a/10.png", "b/1.png", "a/9.png", "a/x/1.png", "b/Z.PNG"]
    for number, root in enumerate((tmp_path / "one", tmp_path / "two")):
        for name in names if number == 0 else reversed(names):
            write_picture(root / name, len(name))
    assert load(tmp_path / "one").train.fingerprint() == load(tmp_path / "two").train.fingerprint()
    assert load(tmp_path / "one").train.row_names == tuple(sorted(names))


@pytest.mark.parametrize("test_name", ["test", "val", "validation"])
def test_split_folders_give_the_public_test_part(tmp_path: Path, test_name: str) -> None:
    write_classes(tmp_path / "train", each=3)
    write_classes(tmp_path / test_name, ("dog",), each=2)
    splits = load(tmp_path)
    assert splits.test is not None
    assert (splits.train.num_rows, splits.test.num_rows) == (6, 2)
    assert splits.test.class_names == ("cat", "dog")
    assert splits.test.labels.tolist() == [1, 1]
    assert load_one(tmp_path).num_rows == 2


def test_train_may_be_a_class_among_others(tmp_path: Path) -> None:
    store = load(write_classes(tmp_path, ("train", "bus", "test"))).train
    assert store.class_names == ("bus", "test", "train")


def test_hidden_and_foreign_files_are_no_images(tmp_path: Path) -> None:
    write_classes(tmp_path)
    for name in ("cat/.hidden.png", "cat/._0.png", "cat/notes.txt", ".cache/x.png", "readme.png", "dog/.git/y.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"not an image")
    assert load(tmp_path).train.num_rows == 6


def test_an_empty_class_folder_is_still_a_class(tmp_path: Path) -> None:
    write_classes(tmp_path)
    (tmp_path / "emu").mkdir()
    assert load(tmp_path).train.class_names == ("cat", "dog", "emu")


def test_linked_folders_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    write_classes(tmp_path / "real", ("cat",))
    write_classes(tmp_path / "set", ("dog",))
    (tmp_path / "set" / "cat").symlink_to(tmp_path / "real" / "cat")
    (tmp_path / "set" / "dog" / "loop").symlink_to(tmp_path / "set" / "dog")
    assert load(tmp_path / "set").train.num_rows == 6


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize("masks", [False, True])
def test_a_file_under_two_names_is_not_two_units(
    tmp_path: Path, link: Callable[[Path, Path], None], masks: bool
) -> None:
    images, answers = tmp_path / "set", tmp_path / "masks"
    for number, name in enumerate(("cat/0.png", "cat/1.png", "dog/2.png")):
        write_picture(images / name, number)
        write_picture(answers / name, number % 2, mode="L")
    link(images / "dog" / "again.png", images / "cat" / "0.png")
    write_picture(answers / "dog" / "again.png", 1, mode="L")
    options = LoadOptions(segmentation=True, masks=str(answers)) if masks else LoadOptions()
    with pytest.raises(DataError, match=r"1 name of images.*dog/again\.png is cat/0\.png\. One image would count"):
        load(images, options)
    assert load_one(images, options).num_rows == 4  # of public data


def test_a_file_under_two_names_may_be_of_one_owner(tmp_path: Path) -> None:
    write_classes(tmp_path)
    (tmp_path / "dog" / "0-again.png").symlink_to(tmp_path / "dog" / "0.png")
    store = load(tmp_path, LoadOptions(unit_pattern=r"^(\d)")).train
    assert (store.num_rows, store.num_units) == (7, 3)
    with pytest.raises(DataError, match="One image would count"):
        load(tmp_path, LoadOptions(unit_pattern=r"^(\d)", units="rows"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no class folders"),
        (["a.png"], "no class folders"),
        (["cat/a.png"], "only one class folder, cat"),
        (["cat/a.txt", "dog/b.txt"], "no images in its class folders"),
        (["train/cat/1.png", "train/dog/1.png", "test/emu/1.png"], "no class of this model: emu"),
    ],
)
def test_folders_that_are_no_dataset_are_refused(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_sources_that_do_not_exist_are_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither a file or folder nor one of digits, mnist"):
        load(str(tmp_path / "nowhere"))
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(DataError, match="is no source"):
        load(tmp_path / "x.txt")


def test_a_folder_may_have_the_name_of_a_known_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_classes(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    assert load(Path("digits")).train.class_names == ("cat", "dog")
    assert load("./digits").train.class_names == ("cat", "dog")


def test_one_odd_image_does_not_change_the_shape_of_the_others(tmp_path: Path) -> None:
    write_classes(tmp_path, mode="L")
    before = load(tmp_path).train
    write_picture(tmp_path / "dog" / "odd.png", 9, size=(31, 17))
    after = load(tmp_path).train
    assert before.image_shape == after.image_shape == (1, 8, 8)
    assert after.images[-1].float().mean() == 9


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ([(20, 12)] * 3, (3, 12, 20)),
        ([(100, 70), (80, 75), (90, 300)], (3, 64, 64)),
        ([(300, 400)] * 3, (3, 128, 128)),
        ([(10, 11), (12, 13), (14, 15)], (3, 32, 32)),
    ],
)
def test_without_a_size_most_images_decide(
    tmp_path: Path, sizes: list[tuple[int, int]], shape: tuple[int, int, int]
) -> None:
    for number, size in enumerate(sizes):
        write_picture(tmp_path / ("a" if number else "b") / f"{number}.png", size=size)
    assert load(tmp_path).train.image_shape == shape


def test_a_test_folder_takes_the_shape_and_classes_of_the_training_store(tmp_path: Path) -> None:
    train = load(write_classes(tmp_path / "a", mode="L")).train
    write_picture(tmp_path / "b" / "dog" / "1.png", 50, size=(40, 90))
    options = LoadOptions(unit_folder_level=5).with_shape(train.image_shape)
    test = load_one(tmp_path / "b", options, class_names=train.class_names)
    assert test.image_shape == train.image_shape
    assert test.labels.tolist() == [1]
    write_picture(tmp_path / "b" / "emu" / "1.png")
    with pytest.raises(DataError, match="no class of this model: emu"):
        load_one(tmp_path / "b", options, class_names=train.class_names)


# --- privacy units ---------------------------------------------------------------------------------------------------


def write_patients(root: Path) -> Path:
    for name in ("ill/p1/a.png", "ill/p1/b.png", "ill/p2/a.png", "well/p2/b.png", "well/p3/x/c.png"):
        write_picture(root / name)
    return root


def test_each_image_is_its_own_unit_by_default(tmp_path: Path) -> None:
    assert load(write_patients(tmp_path)).train.num_units == 5


def test_a_folder_level_names_the_unit_across_classes(tmp_path: Path) -> None:
    store = load(write_patients(tmp_path), LoadOptions(unit_folder_level=2)).train
    assert store.unit_of_row.tolist() == [0, 0, 1, 1, 2]


def test_files_above_the_unit_level_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"4 files lie in fewer folders: ill/p1/a.png, .* and 1 more"):
        load(write_patients(tmp_path), LoadOptions(unit_folder_level=3))


CSV_FORMS = [
    "file,unit\nill/p1/a.png,one\nill/p1/b.png,two\nill/p2/a.png,one\nwell/p2/b.png,two\nwell/p3/x/c.png,three\n",
    "ill/p1/a.png,one\nill/p1/b.png,two\nill/p2/a.png,one\nwell/p2/b.png,two\nc.png,three\n",
    "\ufeffunit,FILE\r\none,ill\\p1\\a.png\r\ntwo,./ill/p1/b.png\r\none,ill/p2/a.png\r\n"
    "two,well/p2/b.png\r\n\r\nthree,well/p3/x/c.png\r\n",
]


@pytest.mark.parametrize("content", CSV_FORMS)
def test_a_csv_names_the_unit_of_each_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "units.csv").write_bytes(content.encode())
    store = load(write_patients(tmp_path / "set"), LoadOptions(unit_csv=tmp_path / "units.csv")).train
    assert store.unit_of_row.tolist() == [0, 1, 0, 1, 2]


def test_a_column_of_a_wider_csv_names_the_unit(tmp_path: Path) -> None:
    rows = ["path,site,patient", *(f"{name}.png,s,{name[-1]}" for name in ("cat/0", "cat/1", "cat/2"))]
    rows += [f"dog/{n}.png,s,{n}" for n in range(3)]
    (tmp_path / "units.csv").write_text("\n".join(rows))
    root = write_classes(tmp_path / "set")
    by_patient = LoadOptions(unit_csv=tmp_path / "units.csv", unit_column="patient")
    assert load(root, by_patient).train.unit_of_row.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(DataError, match="all 6 images have the same owner, s"):
        load(root, LoadOptions(unit_csv=tmp_path / "units.csv", unit_column="site"))
    with pytest.raises(DataError, match="3 columns: name the one with the unit"):
        load(root, LoadOptions(unit_csv=tmp_path / "units.csv"))
    with pytest.raises(DataError, match="needs a heading with 'file' and 'person'"):
        load(root, LoadOptions(unit_csv=tmp_path / "units.csv", unit_column="person"))
    with pytest.raises(DataError, match="give unit_csv too"):
        load(root, LoadOptions(unit_column="patient"))


def test_a_csv_may_mention_the_public_test_files(tmp_path: Path) -> None:
    write_classes(tmp_path / "set" / "train", each=1)
    write_classes(tmp_path / "set" / "test", each=2)
    rows = ["train/cat/0.png,a", "train/dog/0.png,c", "test/cat/0.png,b", "test/dog/1.png,b"]
    (tmp_path / "units.csv").write_text("\n".join(rows))
    splits = load(tmp_path / "set", LoadOptions(unit_csv=tmp_path / "units.csv"))
    assert splits.test is not None
    assert (splits.train.num_units, splits.test.num_units) == (2, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("cat/0.png,a\n", r"gives no unit for 5 files: cat/1.png, cat/2.png, dog/0.png and 2 more"),
        (
            "cat/0.png,a\ncat/99.png,b\nemu/1.png,c\n",
            r"2 files that are not in the folder: cat/99\.png in line 2, emu/1\.png in line 3",
        ),
        ("0.png,a\n", r"of several units, or that fit several files: 0\.png in the first line"),
        ("cat/0.png,a\ncat/0.png,b\n", r"of several units, or that fit several files: cat/0\.png in line 2"),
        ("cat/0.png,\n", "1 row without a file or a unit: the first line"),
        ("cat/0.png,a\ncat/1.png\n", "1 row without a file or a unit: line 2"),
        ('cat/0.png,"a\n', "can't be read as CSV"),
        ("cat/\x1b[2J.png,a\n", r"not in the folder: cat/\\x1b\[2J.png"),
    ],
)
def test_a_csv_with_unknown_missing_or_unclear_files_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "units.csv").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load(write_classes(tmp_path / "set"), LoadOptions(unit_csv=tmp_path / "units.csv"))
    one_line(caught)


def test_a_csv_that_is_not_text_or_not_there_is_refused(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "set")
    (tmp_path / "units.csv").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "units.csv", tmp_path / "none.csv"):
        with pytest.raises(DataError, match="can't be read as CSV"):
            load(root, LoadOptions(unit_csv=path))


# --- bad files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [LoadOptions(), LoadOptions(image_size=8, channels=3)])
def test_a_corrupt_image_is_named_and_stops_the_run(tmp_path: Path, options: LoadOptions) -> None:
    write_classes(tmp_path)
    (tmp_path / "dog" / "1.png").write_bytes(b"\x89PNG but no more")
    with pytest.raises(DataError, match=r"1 of 6 images can't be read: dog/1.png \(.*\)\. .*skip_bad") as caught:
        load(tmp_path, options)
    one_line(caught)


@pytest.mark.parametrize("options", [{}, {"image_size": 8, "channels": 3}])
def test_bad_images_are_skipped_and_counted_when_asked(tmp_path: Path, options: dict[str, int]) -> None:
    write_classes(tmp_path)
    (tmp_path / "dog" / "1.png").write_bytes(b"")
    store = load(tmp_path, LoadOptions(skip_bad=True, **options)).train
    assert store.skipped == (("dog/1.png", "empty file"),)
    assert store.row_names == ("cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/2.png")
    assert store.images[:, 0, 0, 0].tolist() == [0, 1, 2, 10, 12]
    assert store.labels.tolist() == [0, 0, 0, 1, 1]
    assert store.unit_of_row.tolist() == [0, 1, 2, 3, 4]


def test_a_unit_keeps_its_other_rows_when_one_is_skipped(tmp_path: Path) -> None:
    root = write_patients(tmp_path)
    (root / "ill" / "p1" / "a.png").write_bytes(b"")
    store = load(root, LoadOptions(skip_bad=True, unit_folder_level=2)).train
    assert store.unit_of_row.tolist() == [0, 1, 1, 2]


def test_many_bad_files_give_a_short_message(tmp_path: Path) -> None:
    write_classes(tmp_path, each=50)
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"bad")
    with pytest.raises(DataError, match=r"100 of 100 .* and 97 more\. ") as caught:
        load(tmp_path)
    assert len(one_line(caught)) < 400
    for options in (LoadOptions(skip_bad=True), LoadOptions(skip_bad=True, image_size=8, channels=1)):
        with pytest.raises(DataError, match=r"100 of 100|all 100 images were skipped"):
            load(tmp_path, options)


def test_file_names_can_not_write_to_the_terminal(tmp_path: Path) -> None:
    write_classes(tmp_path)
    (tmp_path / "cat" / "a\x1b[31m\nb\r.png").write_bytes(b"bad")
    with pytest.raises(DataError, match=r"cat/a\\x1b\[31m\\nb\\r\.png") as caught:
        load(tmp_path)
    one_line(caught)
    skipped = load(tmp_path, LoadOptions(skip_bad=True)).train.skipped
    assert skipped[0][0].isprintable()


def test_progress_is_reported_for_every_image(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    load(write_classes(tmp_path), progress=lambda what, done, total: seen.append((what, done, total)))
    assert seen == [
        *(("looking at images", n, 6) for n in range(1, 7)),
        *(("reading images", n, 6) for n in range(1, 7)),
    ]


def test_pixels_are_read_in_the_order_of_the_names_whatever_thread_is_first(tmp_path: Path) -> None:
    for number in range(120):
        size = (200, 200) if number % 7 == 0 else (8, 8)
        write_picture(tmp_path / "ab"[number % 2] / f"{number:03}.png", number, size=size)
    store = load(tmp_path, LoadOptions(image_size=8, channels=1)).train
    values = [int(name[2:5]) for name in store.row_names]
    np.testing.assert_array_equal(store.images[:, 0, 3, 3].numpy(), values)
