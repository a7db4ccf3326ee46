"""Packed stores: what is packed is what is read, and nothing else can be."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.config import parse_config
from dpvision.data import ImageBatches, ImageStore, LoadOptions, load
from dpvision.data.batches import hold_out
from dpvision.data.loading import load_one
from dpvision.data.packed_store import HEADER, is_packed, read_header, with_packed_settings
from dpvision.data.packing import check_packed, pack
from dpvision.data.splits import load_splits
from dpvision.data.store import MappedImages
from dpvision.errors import DataError
from dpvision.privacy.mechanism import Mechanism
from dpvision.privacy.randomness import Keys

SHAPE = {"image_size": 8, "channels": 3}
KEYS = Keys.from_seed(0)


def write_images(root: Path, *, count: int = 20, side: int = 10) -> Path:
    rng = np.random.default_rng(0)
    for number in range(count):
        folder = root / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"p{number // 4}_{number}.png")
    return root


def options(**values: Any) -> LoadOptions:
    return LoadOptions(**SHAPE, **values)


def both(tmp_path: Path, *, shard_bytes: int = 600, **values: Any) -> tuple[ImageStore, ImageStore]:
    """A folder, loaded and packed."""
    source = write_images(tmp_path / "images")
    pack(source, tmp_path / "store", options(**values), shard_bytes=shard_bytes)
    return load(source, options(**values)).train, load(tmp_path / "store", options(**values)).train


def change_shard(store: Path, at: int = -1) -> None:
    path = store / "train-00000.npy"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("values", [{}, {"unit_pattern": r"^(p\d+)"}, {"unit_pattern": r"^(p\d+)", "units": "rows"}])
def test_a_packed_folder_has_everything_that_the_folder_has(tmp_path: Path, values: dict[str, Any]) -> None:
    loaded, packed = both(tmp_path, **values)
    assert isinstance(packed.images, MappedImages)
    assert isinstance(loaded.images, torch.Tensor)
    assert torch.equal(packed.images[:], loaded.images)
    assert torch.equal(packed.labels, loaded.labels)
    assert torch.equal(packed.unit_of_row, loaded.unit_of_row)
    for name in ("class_names", "row_names", "owners", "owners_from", "name", "skipped", "unused", "brightest"):
        assert getattr(packed, name) == getattr(loaded, name), name
    assert packed.names_of_units == loaded.names_of_units


def test_packed_and_loaded_images_have_one_fingerprint(tmp_path: Path) -> None:
    loaded, packed = both(tmp_path, unit_pattern=r"^(p\d+)")
    assert packed.fingerprint() == loaded.fingerprint()
    some = np.array([3, 1])
    assert packed.select_units(some).fingerprint() == loaded.select_units(some).fingerprint() != loaded.fingerprint()
    assert replace(packed, labels=1 - packed.labels).fingerprint() != packed.fingerprint()


def test_the_same_units_are_held_out_and_no_image_is_copied_for_it(tmp_path: Path) -> None:
    loaded, packed = both(tmp_path, unit_pattern=r"^(p\d+)")
    parts = zip(hold_out(packed, fraction=0.3, keys=KEYS), hold_out(loaded, fraction=0.3, keys=KEYS), strict=True)
    for ours, theirs in parts:
        assert isinstance(ours.images, MappedImages)
        assert ours.row_names == theirs.row_names
        assert torch.equal(ours.images[:], theirs.images[:])
        assert ours.fingerprint() == theirs.fingerprint()


@pytest.mark.parametrize("micro", [1, 3, 64])
def test_packed_and_loaded_images_give_the_same_batches_bit_for_bit(tmp_path: Path, micro: int) -> None:
    stores = both(tmp_path, unit_pattern=r"^(p\d+)")
    mechanism = Mechanism(num_units=5, expected_batch_size=3, clip_norm=1.0, noise_multiplier=1.0, steps=9)
    constants = load(tmp_path / "store", options(unit_pattern=r"^(p\d+)")).normalisation
    draws = [
        ImageBatches(mechanism=mechanism, store=store, normalisation=constants, keys=KEYS, rows_per_unit=2)
        for store in stores
    ]
    for step in range(4):
        pieces = [list(each.batch(step).microbatches(micro)) for each in draws]
        for one, other in zip(*pieces, strict=True):
            assert torch.equal(one.inputs, other.inputs)
            assert torch.equal(one.targets, other.targets)


def test_rows_are_read_in_any_order_from_any_shard(tmp_path: Path) -> None:
    loaded, packed = both(tmp_path)
    rows = np.array([19, 0, 7, 7, 3])
    assert torch.equal(packed.images[rows], loaded.images[rows])
    assert torch.equal(packed.images[torch.tensor([5])], loaded.images[[5]])
    assert torch.equal(packed.images[-1], loaded.images[-1])
    assert torch.equal(torch.cat(list(packed.images.split(7))), loaded.images[:])
    assert packed.images[4:4].shape == (0, 3, 8, 8)


def test_one_changed_byte_of_a_shard_stops_every_read_of_that_image(tmp_path: Path) -> None:
    _, packed = both(tmp_path)
    before = packed.fingerprint()
    change_shard(tmp_path / "store")
    again = load(tmp_path / "store", options()).train
    last = read_header(tmp_path / "store").train.shards[0].rows - 1
    for store in (packed, again):  # also while it is open
        with pytest.raises(DataError, match="not what was packed"):
            store.images[last]
        with pytest.raises(DataError, match="not what was packed"):
            store.select_rows([last]).images[:]
        store.images[0]
    assert again.fingerprint() == before  # of what was packed: nothing else is ever read
    with pytest.raises(DataError, match="SHA-256 differs"):
        check_packed(tmp_path / "store")


@pytest.mark.parametrize("file", ["train-labels.npy", "train-digests.npy", "train-names.json", "train-owners.json"])
def test_a_changed_label_name_owner_or_digest_is_refused_at_the_start(tmp_path: Path, file: str) -> None:
    both(tmp_path, unit_pattern=r"^(p\d+)")
    path = tmp_path / "store" / file
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="SHA-256 differs"):
        load(tmp_path / "store", options(unit_pattern=r"^(p\d+)"))


def test_other_images_give_another_fingerprint(tmp_path: Path) -> None:
    both(tmp_path)
    before = load(tmp_path / "store", options()).train.fingerprint()
    Image.new("RGB", (10, 10), (1, 2, 3)).save(tmp_path / "images" / "a" / "p0_0.png")
    pack(tmp_path / "images", tmp_path / "other", options())
    assert load(tmp_path / "other", options()).train.fingerprint() != before


def test_a_shortened_or_missing_shard_is_refused(tmp_path: Path) -> None:
    both(tmp_path)
    path = tmp_path / "store" / "train-00001.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="its size says otherwise"):
        load(tmp_path / "store")
    path.unlink()
    with pytest.raises(DataError, match="can't be read"):
        load(tmp_path / "store")


def test_an_interrupted_pack_continues_behind_the_whole_shards(tmp_path: Path) -> None:
    source, store = write_images(tmp_path / "images"), tmp_path / "store"

    def stop(_: str, done: int, total: int) -> None:
        if done == 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, store, options(), shard_bytes=600, progress=stop)
    assert not is_packed(store)
    with pytest.raises(DataError):
        load(store)
    (store / "train-00002.npy").write_bytes(b"half")  # and its note says otherwise
    packed = pack(source, store, options(), shard_bytes=600)
    # Three images a shard: shards 0 to 3 were whole; of those, one is damaged by hand.
    assert (packed.resumed, packed.shards) == (3, 7)
    assert torch.equal(load(store, options()).train.images[:], load(source, options()).train.images[:])
    assert not list(store.glob("*.part.json"))
    assert not (store / "packing.json").exists()
    check_packed(store)


def test_an_unfinished_pack_of_changed_files_is_refused(tmp_path: Path) -> None:
    source, store = write_images(tmp_path / "images"), tmp_path / "store"

    def stop(_: str, done: int, total: int) -> None:
        if done == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, store, options(), shard_bytes=600, progress=stop)
    with pytest.raises(DataError, match="another source, or files or settings changed"):
        pack(source, store, options(skip_bad=True), shard_bytes=600)
    Image.new("RGB", (10, 10)).save(source / "a" / "new.png")
    with pytest.raises(DataError, match="another source, or files or settings changed"):
        pack(source, store, options(), shard_bytes=600)


def test_packing_twice_writes_once(tmp_path: Path) -> None:
    both(tmp_path)
    assert pack(tmp_path / "images", tmp_path / "store", options(), shard_bytes=600).complete
    with pytest.raises(DataError, match="another source"):
        pack(tmp_path / "images", tmp_path / "store", options(unit_pattern=r"^(p\d+)"), shard_bytes=600)


def test_bad_images_are_named_or_skipped_and_kept_in_the_store(tmp_path: Path) -> None:
    source = write_images(tmp_path / "images")
    (source / "a" / "p0_0.png").write_bytes(b"no image")
    for number in range(4, 10, 2):
        (source / "a" / f"p{number // 4}_{number}.png").write_bytes(b"")
    with pytest.raises(DataError, match="can't be read"):
        pack(source, tmp_path / "store", options(), shard_bytes=400)
    assert not (tmp_path / "store").exists()
    packed = pack(source, tmp_path / "store", options(skip_bad=True), shard_bytes=400)
    assert (packed.skipped, packed.train_rows) == (4, 16)
    loaded = load(source, options(skip_bad=True)).train
    found = load(tmp_path / "store", options(skip_bad=True)).train
    assert found.skipped == loaded.skipped
    assert found.fingerprint() == loaded.fingerprint()


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    source, other = write_images(tmp_path / "images"), tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty"):
        pack(source, other, options())
    with pytest.raises(DataError, match="is a file"):
        pack(source, other / "mine.txt", options())
    assert [path.name for path in other.iterdir()] == ["mine.txt"]


def test_a_store_is_closed_to_others(tmp_path: Path) -> None:
    both(tmp_path)
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "store").iterdir())


def test_a_run_takes_over_the_settings_of_packing_and_refuses_others(tmp_path: Path) -> None:
    both(tmp_path, unit_pattern=r"^(p\d+)")
    where = {"source": str(tmp_path / "store"), "holdout_fraction": 0.5}
    config = parse_config({"data": where, "privacy": {"target_epsilon": 1}})
    data = with_packed_settings(config.data)
    assert (data.unit_pattern, data.image_size, data.channels) == (r"^(p\d+)", 8, 3)
    assert with_packed_settings(data) == data
    splits = load_splits(config, KEYS)
    assert splits.train.owners is not None
    assert splits.held_out
    for name, value in (("unit_pattern", "^(x)"), ("image_size", 16), ("channels", 1), ("window", (0.0, 1.0))):
        with pytest.raises(DataError, match=name):
            with_packed_settings(data.model_copy(update={name: value}))
    with pytest.raises(DataError, match="image_size"):
        load(tmp_path / "store", LoadOptions(image_size=16))


def test_classes_must_be_declared_for_a_table_as_in_training(tmp_path: Path) -> None:
    source = write_images(tmp_path / "images" / "x")
    files = sorted(path.relative_to(tmp_path / "images").as_posix() for path in source.rglob("*.png"))
    lines = [
        "file,label,patient,split",
        *(f"{f},{f.split('/')[1]},{f[6:8]},{'test' if 'p4' in f else 'train'}" for f in files),
    ]
    table = tmp_path / "images" / "labels.csv"
    table.write_text("\n".join(lines))
    private = {"classes_are_public": False}
    with pytest.raises(DataError, match="does not say which classes"):
        pack(table, tmp_path / "store", options(**private))
    pack(table, tmp_path / "store", options(**private, public_classes=True))
    found = load(tmp_path / "store", options(**private))
    loaded = load(table, options(**private, public_classes=True))
    assert found.train.fingerprint() == loaded.train.fingerprint()
    assert found.test is not None
    assert loaded.test is not None
    assert found.test.fingerprint() == loaded.test.fingerprint()
    assert found.train.owners_from == loaded.train.owners_from is not None
    config = parse_config({"data": {"source": str(tmp_path / "store")}, "privacy": {"target_epsilon": 1}})
    assert with_packed_settings(config.data).public_classes  # so the certificate declares it


def test_arrays_and_their_test_part_can_be_packed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "a.npz",
        images=rng.integers(0, 256, (9, 6, 5), dtype=np.uint8),
        labels=np.arange(9) % 3,
        owner=np.arange(9) // 2,
        x_test=rng.integers(0, 256, (4, 6, 5), dtype=np.uint8),
        y_test=np.arange(4) % 3,
    )
    pack(tmp_path / "a.npz", tmp_path / "store", LoadOptions(unit_column="owner"), shard_bytes=60)
    loaded, packed = load(tmp_path / "a.npz", LoadOptions(unit_column="owner")), load(tmp_path / "store")
    assert packed.train.fingerprint() == loaded.train.fingerprint()
    assert packed.train.owners == loaded.train.owners
    assert packed.test is not None
    assert loaded.test is not None
    assert packed.test.fingerprint() == loaded.test.fingerprint()
    assert load_one(tmp_path / "store").fingerprint() == load_one(tmp_path / "a.npz").fingerprint()


def test_masks_can_be_packed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 2, (5, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=rng.integers(0, 256, (5, 8, 8), dtype=np.uint8), masks=masks)
    task = LoadOptions(segmentation=True)
    pack(tmp_path / "a.npz", tmp_path / "store", task)
    assert load(tmp_path / "store", task).train.fingerprint() == load(tmp_path / "a.npz", task).train.fingerprint()
    with pytest.raises(DataError, match="task=segmentation"):
        load(tmp_path / "store")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "dpvision store/9"}, "no packed store of this version"),
        ({"image_shape": [3, 8, 9]}, "is not what store.json says"),
        ({"settings": {"sourcery": 1}}, "unknown settings"),
        ({"normalisation": {"mean": [0.5]}}, "damaged"),
        ({"extra": 1}, "no packed store of this version"),
    ],
)
def test_a_header_that_lies_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    both(tmp_path)
    path = tmp_path / "store" / HEADER
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path / "store")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("labels", [np.array(["a"] * 40), np.zeros(40, "M8[s]"), np.zeros(40), np.ones(40, "?")])
def test_labels_of_another_type_are_refused_whatever_their_checksum(tmp_path: Path, labels: np.ndarray) -> None:
    both(tmp_path)
    store = tmp_path / "store"
    np.save(store / "train-labels.npy", labels)
    header = json.loads((store / HEADER).read_text())
    header["train"]["labels"]["sha256"] = hashlib.sha256((store / "train-labels.npy").read_bytes()).hexdigest()
    (store / HEADER).write_text(json.dumps(header))
    with pytest.raises(DataError, match="labels of type"):
        load(store)


def test_a_header_can_not_lead_outside_the_store(tmp_path: Path) -> None:
    both(tmp_path)
    path = tmp_path / "store" / HEADER
    path.write_text(path.read_text().replace("train-labels.npy", "../labels.npy"))
    with pytest.raises(DataError, match="no packed store of this version"):
        load(tmp_path / "store")


def jpeg(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 9), (number * 20, 5, 200 - number)).save(buffer, "png")
    return buffer.getvalue()


def test_webdataset_is_refused_and_its_command_converts_it(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard in range(2):
        with tarfile.open(shards / f"{shard:06}.tar", "w") as tar:
            for number in range(3):
                for ending, content in (("png", jpeg(3 * shard + number)), ("cls", str(number % 2).encode())):
                    member = tarfile.TarInfo(f"{shard}{number:04}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    with pytest.raises(DataError, match="draws images by number") as caught:
        pack(shards, tmp_path / "store", options())
    with pytest.raises(DataError, match="WebDataset"):
        load(shards / "000000.tar")
    found = re.search(r"Unpack them once: (.*); then: dpvision pack", str(caught.value))
    assert found is not None
    subprocess.run(["bash", "-c", found[1].replace("FOLDER", str(tmp_path / "out"))], check=True)  # noqa: S607
    packed = pack(tmp_path / "out", tmp_path / "store", options(classes="0,1", classes_are_public=False))
    assert packed.train_rows == 6
    assert load(tmp_path / "store").train.labels.tolist() == [0, 1, 0, 0, 1, 0]
