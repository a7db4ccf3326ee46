"""npz files: plain arrays only, headers checked, units by column."""

from __future__ import annotations

import io
import resource
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpvision.data import LoadOptions, load, load_one
from dpvision.errors import DataError

GREY = np.random.default_rng(0).integers(0, 256, (6, 4, 5), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)
LABELS = np.array([0, 2, 1, 1, 0, 2])


def write(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def test_grey_and_colour_images_are_read_in_either_layout(tmp_path: Path) -> None:
    grey = load(write(tmp_path / "a.npz", images=GREY, labels=LABELS))
    assert grey.train.image_shape == (1, 4, 5)
    assert (grey.test, grey.normalisation.source, grey.train.name) == (None, "fixed", "a train")
    last = load(write(tmp_path / "b.npz", images=COLOUR, labels=LABELS)).train
    first = load(write(tmp_path / "c.npz", images=COLOUR.transpose(0, 3, 1, 2), labels=LABELS)).train
    assert last.fingerprint() == first.fingerprint()
    np.testing.assert_array_equal(last.images.numpy().transpose(0, 2, 3, 1), COLOUR)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("x_train", "y_train"), ("x_test", "y_test")),
        (("train_images", "train_labels"), ("test_images", "test_labels")),
    ],
)
def test_a_test_split_is_taken_along(tmp_path: Path, train: tuple[str, str], test: tuple[str, str]) -> None:
    arrays = dict(zip((*train, *test), (GREY, LABELS[:, None], GREY[:2], np.array([3, 0])), strict=True))
    splits = load(write(tmp_path / "a.npz", **arrays), LoadOptions(image_size=8))
    assert splits.test is not None
    assert (splits.train.num_classes, splits.test.num_classes) == (4, 4)
    assert splits.test.image_shape == (1, 8, 8)
    assert load_one(tmp_path / "a.npz").num_rows == 2


def test_text_labels_and_class_names_become_classes(tmp_path: Path) -> None:
    texts = np.array(["cat", "dog", "ant", "ant", "cat", "dog"])
    store = load(write(tmp_path / "a.npz", images=GREY, labels=texts)).train
    assert store.class_names == ("ant", "cat", "dog")
    assert store.labels.tolist() == [1, 2, 0, 0, 1, 2]
    named = load(write(tmp_path / "b.npz", images=GREY, labels=LABELS, class_names=np.array(["x", "y", "z"]))).train
    assert named.class_names == ("x", "y", "z")
    renamed = load_one(tmp_path / "a.npz", class_names=["dog", "cat", "ant", "emu"])
    assert renamed.labels.tolist() == [1, 0, 2, 2, 1, 0]
    with pytest.raises(DataError, match="does not know: cat"):
        load_one(tmp_path / "a.npz", class_names=["dog", "ant"])


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (GREY.astype(np.uint16) * 257, GREY),
        (GREY.astype(np.int64), GREY),
        (GREY.astype(np.float32) / 255, GREY),
        (GREY > 127, np.where(GREY > 127, 255, 0)),
    ],
)
def test_other_number_types_become_bytes_by_their_type_and_not_by_their_values(
    tmp_path: Path, images: Any, expected: Any
) -> None:
    store = load(write(tmp_path / "a.npz", images=images, labels=LABELS)).train
    np.testing.assert_array_equal(store.images[:, 0].numpy(), expected)


@pytest.mark.parametrize("units", [np.array([8, 8, 5, 8, 5, 1]), np.array(["p8", "p8", "p5", "p8", "p5", "p1"])])
def test_a_unit_column_groups_rows(tmp_path: Path, units: Any) -> None:
    path = write(tmp_path / "a.npz", images=GREY, labels=LABELS, patient=units)
    splits = load(path, LoadOptions(unit_column="patient"))
    assert splits.train.unit_of_row.tolist() == [0, 0, 1, 0, 1, 2]
    assert load(path).train.num_units == 6
    assert load_one(path, LoadOptions(unit_column="patient")).num_units == 6


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": GREY}, "no array named labels"),
        ({"volume": GREY}, "has no images: its arrays are volume"),
        ({"labels": LABELS}, "no array named images"),
        ({"images": GREY[:5], "labels": LABELS}, "don't match 5 images"),
        ({"images": GREY, "labels": LABELS - 1}, "labels must be whole numbers >= 0"),
        ({"images": GREY, "labels": LABELS * 0.5}, "labels must be whole numbers >= 0"),
        ({"images": GREY, "labels": LABELS * 10**6}, "taken for a mistake"),
        ({"images": GREY[:, 0], "labels": LABELS}, "images must be"),
        ({"images": GREY[..., None].repeat(4, -1), "labels": LABELS}, "images must be"),
        ({"images": GREY.astype(np.float32), "labels": LABELS}, "must be numbers in"),
        ({"images": np.full((6, 4, 5), np.nan), "labels": LABELS}, "must be numbers in"),
        ({"images": GREY.astype(np.int64) - 1, "labels": LABELS}, "must be numbers in"),
        ({"images": GREY.astype(np.complex64), "labels": LABELS}, "must be numbers in"),
        ({"images": GREY, "labels": LABELS, "class_names": np.array(["a"])}, "labels must lie in"),
        ({"images": GREY, "labels": np.array(["z"] * 6), "class_names": np.array(["a"])}, "no class: z"),
        ({"x_train": GREY, "y_train": LABELS, "x_test": GREY}, "no array named y_test"),
        ({"x_train": GREY, "y_train": LABELS, "x_test": GREY, "y_test": np.array(["a"] * 6)}, "texts in one split"),
    ],
)
def test_arrays_that_make_no_dataset_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(write(tmp_path / "a.npz", **arrays))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (np.array([1.0, 2, 3, 4, 5, np.nan]), "must hold whole numbers or texts"),
        (np.array(["a", "", "c", "d", "e", "f"]), "empty in some rows"),
        (np.arange(5), "don't match 6 images"),
    ],
)
def test_unusable_unit_columns_are_refused(tmp_path: Path, units: Any, message: str) -> None:
    path = write(tmp_path / "a.npz", images=GREY, labels=LABELS, unit=units)
    with pytest.raises(DataError, match=message):
        load(path, LoadOptions(unit_column="unit"))
    with pytest.raises(DataError, match="no array named nobody"):
        load(path, LoadOptions(unit_column="nobody"))
    with pytest.raises(DataError, match="this source has no unit_folder_level"):
        load(path, LoadOptions(unit_folder_level=2))


def npy_bytes(array: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    file = io.BytesIO()
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": shape or array.shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + array.tobytes()


@pytest.mark.parametrize("shape", [(10**6, 10**6, 10**3), (6, 4, 6), (6, 4, 4), (2**62, 4, 5)])
def test_a_header_that_lies_is_refused_before_memory_is_taken(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", npy_bytes(GREY, shape))
        archive.writestr("labels.npy", npy_bytes(LABELS))
    with pytest.raises(DataError, match="its header promises"):
        load(tmp_path / "a.npz")


def test_pickled_objects_are_refused_unopened(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self) -> Any:
            return open, (str(canary), "w")

    path = write(tmp_path / "a.npz", images=GREY, labels=np.array([Bomb()] * 6, dtype=object))
    with pytest.raises(DataError, match="holds pickled objects"):
        load(path)
    assert not canary.exists()


def test_files_that_are_no_npz_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.npz", images=GREY, labels=LABELS).read_bytes()
    flipped = bytearray(whole)
    flipped[60] ^= 0xFF
    for content in (b"", b"no zip", whole[: len(whole) // 2], bytes(flipped)):
        (tmp_path / "b.npz").write_bytes(content)
        with pytest.raises(DataError, match="can't be read as"):
            load(tmp_path / "b.npz")
    with zipfile.ZipFile(tmp_path / "c.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("images.npy", npy_bytes(GREY))
    with pytest.raises(DataError, match="compression"):
        load(tmp_path / "c.npz")


def private(**more: Any) -> LoadOptions:
    return LoadOptions(classes_are_public=False, **more)


def test_private_labels_do_not_decide_which_classes_there_are(tmp_path: Path) -> None:
    """PITFALLS 38: one unit with the largest label would change the shape of the released model."""
    public = {"x_test": GREY[:3], "y_test": np.array([2, 0, 1])}
    for last in (0, 2):
        labels = np.array([0, 1, 1, 1, 0, last])
        store = load(write(tmp_path / f"{last}.npz", x_train=GREY, y_train=labels, **public), private()).train
        assert store.class_names == ("0", "1", "2")
    beyond = write(tmp_path / "beyond.npz", x_train=GREY, y_train=LABELS + 7, **public)
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.2, the numbers of the classes, got 7 in row 0"):
        load(beyond, private())
    alone = write(tmp_path / "alone.npz", images=GREY, labels=LABELS)
    with pytest.raises(DataError, match="Declare them with --classes"):
        load(alone, private())
    named = write(tmp_path / "named.npz", images=GREY, labels=LABELS, class_names=np.array(["a", "b", "c", "d"]))
    assert load(named, private()).train.class_names == ("a", "b", "c", "d")
    assert load(alone).train.num_classes == 3


def test_texts_of_private_labels_do_not_decide_it_either(tmp_path: Path) -> None:
    texts = np.array(["cat", "dog", "cat", "cat", "dog", "rare disease"])
    path = write(tmp_path / "a.npz", x_train=GREY, y_train=texts, x_test=GREY[:2], y_test=texts[:2])
    with pytest.raises(DataError, match="no class"):
        load(path, private())


def test_a_small_file_that_would_become_a_large_array_is_refused_before_it_does(tmp_path: Path) -> None:
    """A megabyte of zeros became gigabytes. The stated sizes decide, so that nothing is allocated."""
    path, shape = tmp_path / "zeros.npz", (300, 1, 1024, 1024)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
        archive.open("images.npy", "w", force_zip64=True) as file,
    ):
        file.write(header.getvalue())
        for _ in range(300):
            file.write(bytes(1024 * 1024))
    assert path.stat().st_size < 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"would become 3145\d+\. If that is meant, save the file without compression"):
        load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # kibibytes


def test_labels_that_are_more_than_the_images_are_refused_before_they_are_copied(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"labels \(7,\) don't match 6 images"):
        load(write(tmp_path / "a.npz", images=GREY, labels=np.arange(7)))


# ---- several findings, and volumes


def test_labels_of_several_findings_are_read_when_the_file_is_named_again(tmp_path: Path) -> None:
    labels = np.array([[1, 0], [0, 1], [1, 1], [0, 0], [1, -1], [0, 0]], dtype=np.int8)
    path = write(tmp_path / "a.npz", train_images=GREY, train_labels=labels, test_images=GREY, test_labels=labels[::-1])
    with pytest.raises(DataError, match=r"\(6, 2\) are several findings an image: train on them with --findings"):
        load(path, LoadOptions(classes="a,b"))
    splits = load(path, LoadOptions(findings=path, findings_columns="edema,mass"))
    assert splits.train.class_names == ("edema", "mass")
    assert splits.train.multi_label
    np.testing.assert_array_equal(splits.train.labels, np.where(labels < 0, np.nan, labels))
    assert splits.test is not None
    np.testing.assert_array_equal(splits.test.labels, np.where(labels < 0, np.nan, labels)[::-1])


@pytest.mark.parametrize(
    ("labels", "columns", "message"),
    [
        (np.array([[0, 1]] * 5 + [[0, 7]]), "a,b", r"findings must be 1, 0, .* got 7 in row 5 \(from 0\) for b"),
        (np.zeros((6, 2)), "a,b,c", r"has 2 findings an image, and 3 names for them"),
        (np.array([["a", "b"]] * 6), "a,b", r"findings must be numbers \(N, 2\)"),
        (np.zeros((6, 2, 2)), "a,b", r"findings must be \(N, findings\)"),
        (np.zeros((5, 2)), "a,b", r"don't match 6 images"),
    ],
)
def test_impossible_findings_are_one_line(tmp_path: Path, labels: Any, columns: str, message: str) -> None:
    path = write(tmp_path / "a.npz", images=GREY, labels=labels)
    with pytest.raises(DataError, match=message):
        load(path, LoadOptions(findings=path, findings_columns=columns))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_of_a_volume_belong_to_one_unit_and_are_taken_on_request_alone(tmp_path: Path, axis: int) -> None:
    volumes = np.arange(2 * 4 * 5 * 6, dtype=np.uint8).reshape(2, 4, 5, 6)
    path = write(tmp_path / "a.npz", images=volumes, labels=np.array([1, 0]))
    with pytest.raises(DataError, match=r"Of volumes .* --frames all takes"):
        load(path, LoadOptions(classes="a,b"))
    train = load(path, LoadOptions(classes="a,b", frames="all", volume_axis=axis)).train
    count = volumes.shape[1 + axis]
    assert train.unit_of_row.tolist() == [0] * count + [1] * count
    assert train.labels.tolist() == [1] * count + [0] * count
    np.testing.assert_array_equal(train.images[count, 0], np.take(volumes[1], 0, axis=axis))
    named = write(tmp_path / "b.npz", images=volumes, labels=np.array([1, 0]), patient=np.array(["p1", "p2"]))
    owners = load(named, LoadOptions(classes="a,b", frames="all", unit_column="patient")).train.owners
    assert owners == ("p1",) * 6 + ("p2",) * 6
