"""Hostile files: a damaged input for everything that reads images, arrays and weights."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from damage import (
    DISGUISES,
    ODD_TEXTS,
    damaged_bytes,
    damaged_png,
    damaged_safetensors,
    damaged_zip,
    mostly,
    odd_npy,
    one_in,
    one_of,
    zipped,
)
from dpvision.data import LoadOptions, load, load_images, load_one
from dpvision.data.features import Features, kept_features
from dpvision.data.nifti import read_volume
from dpvision.training.initial_weights import read_weights
from hostile_seeds import Seeds, tarred

Draw = Callable[[st.SearchStrategy[Any]], Any]
Case = Callable[[], object]
_OFFLINE = LoadOptions(download=False)


def image(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """One damaged image, read by itself."""
    name = draw(st.sampled_from(sorted(seeds.images)))
    data, path = seeds.images[name], box / name
    by_chunk = data.startswith(b"\x89PNG") and draw(st.booleans())
    path.write_bytes(draw(damaged_png(data) if by_chunk else damaged_bytes(data)))
    channels, squash = draw(one_of(1, 3)), draw(st.booleans())
    return lambda: load_images([path], image_shape=(channels, 8, 8), squash=squash)


def folder(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """A folder of class folders with odd names, links, pipes and files that are no images."""
    root = box / "classes"
    for label in range(draw(st.integers(1, 3))):
        place = root / draw(_file_names(f"class{label}"))
        place.mkdir(parents=True, exist_ok=True)
        for number in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from(sorted(seeds.images)))
            content = draw(mostly(seeds.images[name], damaged_one_in=5))
            (place / draw(_file_names(f"{number}-{name}"))).write_bytes(content)
        _add_trap(draw, place, box)
    options = LoadOptions(
        skip_bad=draw(st.booleans()),
        image_size=draw(one_of(None, 8)),
        unit_csv=_csv(draw, root, box) if draw(st.booleans()) else None,
    )
    return lambda: load(root, options)


def _file_names(usual: str) -> st.SearchStrategy[str]:
    """The usual name, sometimes with an odd beginning that a file system accepts."""
    plain = [text.replace("\0", "") for text in ODD_TEXTS if text.strip() and "/" not in text]
    odd = [text for text in plain if len(os.fsencode(text)) < 200]
    return st.sampled_from(["", "", *odd]).map(lambda prefix: prefix + usual)


def _add_trap(draw: Draw, place: Path, box: Path) -> None:
    trap = place / "trap.png"
    targets: dict[str, str | Path] = {
        "device": "/dev/zero",
        "folder": box,
        "itself": trap,
        "other file": "/etc/passwd",
        "nothing": "/nowhere",
    }
    kind = draw(one_of("none", "none", "none", "pipe", "directory", *targets))
    if kind in targets:
        trap.symlink_to(targets[kind])
    elif kind == "pipe":
        os.mkfifo(trap)
    elif kind == "directory":
        trap.mkdir()


def _csv(draw: Draw, root: Path, box: Path) -> Path:
    files = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]
    rows = [f"{name},u{number % 2}" for number, name in enumerate(files)]
    text = "\r\n".join(["file,unit", *rows]).encode("utf-8", "surrogateescape")
    odd = (b'"', b'"a', b"\0", b"\xff\xfe", b",,,,", b"a" * 200_000, b"'x';", "\u2028".encode(), b"=cmd|' /C calc'!A0")
    if draw(st.booleans()):
        at = draw(st.integers(0, len(text) - 1))
        text = text[:at] + draw(st.sampled_from(odd)) + text[at:]
    path = box / "units.csv"
    path.write_bytes(draw(mostly(text, damaged_one_in=3)))
    return path


def idx(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """A folder of idx files, one of them damaged."""
    damaged = draw(st.sampled_from(sorted(seeds.idx)))
    for name, data in seeds.idx.items():
        content = data
        if name == damaged and name.endswith(".gz") and draw(st.booleans()):
            content = gzip.compress(draw(damaged_bytes(gzip.decompress(data))))
        elif name == damaged:
            content = draw(damaged_bytes(data))
        (box / name).write_bytes(content)
    return lambda: load(box, _OFFLINE)


def cifar(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """The files of a CIFAR set in a folder, one of them damaged."""
    names = [name for name in seeds.cifar if "tar" not in name]
    damaged = draw(st.sampled_from(names))
    for name in names:
        data = seeds.cifar[name]
        (box / name).write_bytes(draw(damaged_bytes(data)) if name == damaged else data)
    return lambda: load(box, _OFFLINE)


def archive(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """A CIFAR archive: damaged, or with members that no archive should have."""
    kind = draw(one_of("whole", "member", "odd"))
    files = {name: data for name, data in seeds.cifar.items() if name.endswith((".bin", ".txt"))}
    if kind == "whole":
        data = draw(damaged_bytes(seeds.cifar["binary.tar"]))
    elif kind == "member":
        name = draw(st.sampled_from(sorted(files)))
        data = tarred({**files, name: draw(damaged_bytes(files[name]))})
    else:
        data = _odd_tar(draw) + tarred({"data_batch_1.bin": files["data_batch_1.bin"]})
    packed = draw(st.booleans())
    path = box / ("x.tar.gz" if packed else "x.tar")
    path.write_bytes(draw(mostly(gzip.compress(data, 1), damaged_one_in=5)) if packed else data)
    return lambda: load(path, _OFFLINE)


def _odd_tar(draw: Draw) -> bytes:
    names = ("../evil", "/abs", "a/../../b", "data_batch_1", "C:\\x", "a\\..\\..\\b", "\x1b[2J", "dir", "x" * 99, "..")
    links = (tarfile.SYMTYPE, tarfile.LNKTYPE)
    kinds = (tarfile.REGTYPE, *links, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"S", b"?")
    held = io.BytesIO()
    with tarfile.open(
        fileobj=held, mode="w", format=draw(one_of(tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    ) as out:
        for _ in range(draw(st.integers(1, 4))):
            member = tarfile.TarInfo(draw(st.sampled_from(names)))
            member.type = draw(st.sampled_from(kinds))
            member.linkname = draw(one_of("/etc/passwd", "../x", ""))
            out.addfile(member)
    header = bytearray(held.getvalue())
    if draw(st.booleans()):  # a size of the wrong kind, with a right checksum
        header[124:136] = draw(
            one_of(b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0", b"-0000001000\0", b"\xff" * 10 + b"\xfe\x00")
        )
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)


def npz(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """An .npz file: damaged as a whole or member by member."""
    kind = draw(one_of("whole", "member", "odd"))
    if kind == "odd":
        names = one_of("x_train", "y_train", "x_test", "y_test", "class_names", "owner", "images", "labels", "masks")
        chosen = draw(st.lists(names, min_size=4, max_size=4, unique=True))
        data = draw(zipped([(f"{name}.npy", draw(odd_npy())) for name in chosen]))
    else:
        data = draw(damaged_bytes(seeds.npz) if kind == "whole" else damaged_zip(seeds.npz))
    path = box / "x.npz"
    path.write_bytes(data)
    options = LoadOptions(unit_column=draw(one_of(None, "owner")), image_size=draw(one_of(None, 8)))
    return lambda: load(path, options)


def arrays(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """An .npz file whose arrays have the wrong kind of values."""
    del seeds
    rows = draw(one_of(0, 1, 5))
    raw = draw(st.binary(min_size=rows * 8, max_size=rows * 8))
    choices = (
        np.zeros((rows, 4, 4), np.uint8),
        np.zeros((rows, 4, 4, 3), np.int64) + draw(one_of(0, -1, 256)),
        np.full((rows, 3, 4, 4), draw(one_of(0.5, np.nan, np.inf, -1.0)), draw(one_of(np.float16, np.float64))),
        np.zeros((rows, 2, 0, 3), np.uint16),
        np.zeros(rows, "U3"),
        np.frombuffer(raw, "<U2"),
        np.frombuffer(raw, "S8"),
        np.arange(rows) * draw(one_of(1, 9_999, 2**31, -1)),
        np.zeros((rows, 1), np.int8),
        np.full(rows, 2**63, np.uint64),
        np.ones(rows, np.complex64),
        np.array(draw(one_of("\x1b[2J", 3, 2.5))),
        np.array(["a", "a", "\x1b]0;x\x07"]),
    )
    names = ("images", "labels", "x_test", "y_test", "class_names", "owner", "masks")
    chosen = {name: draw(st.integers(-5, len(choices) - 1)) for name in names}
    path = box / "x.npz"
    held: dict[str, Any] = {name: choices[number] for name, number in chosen.items() if number >= 0}
    np.savez(path, **held)
    column = draw(one_of(None, "owner"))
    return lambda: (load(path, LoadOptions(unit_column=column)), load_one(path, class_names=("a", "b")))


def weights(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """A file of pretrained weights."""
    name = draw(st.sampled_from(sorted(seeds.weights)))
    data = seeds.weights[name]
    inside = draw(st.booleans())
    if inside and name.endswith(".safetensors"):
        content = draw(damaged_safetensors(data))
    elif inside and name in ("w.pth", "w.npz"):
        content = draw(damaged_zip(data))
    else:
        content = draw(damaged_bytes(data))
    if draw(one_in(20)):
        content = draw(st.sampled_from(DISGUISES))
        name = draw(one_of("x.pth", "x.bin", "x.safetensors", "x.npz", "x.txt", "x"))
    path = box / name
    path.write_bytes(content)
    return lambda: read_weights(path)


def features(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """A damaged file of stored features, which are computed again."""
    del seeds
    place = box / "kept"
    place.mkdir(mode=0o700)
    fresh = Features(torch.zeros(2, 1, 3))
    held = io.BytesIO()
    np.save(held, fresh.values_NWF.numpy())
    content = draw(st.one_of(damaged_bytes(held.getvalue()), odd_npy(), st.sampled_from(DISGUISES)))
    (place / f"k-{fresh.digest}.npy").write_bytes(content)
    return lambda: kept_features(place, "k", lambda: fresh)


def volume(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """A NIfTI volume, packed or not, with a damaged header or damaged voxels."""
    path = _damaged_volume(draw, seeds, box)
    return lambda: read_volume(path)


def table(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """A damaged Parquet or Arrow table with images inside: by itself, by split, or as a saved dataset."""
    if not seeds.tables:
        pytest.skip("pyarrow is not installed")
    name = draw(st.sampled_from(sorted(seeds.tables)))
    content = draw(damaged_bytes(seeds.tables[name]))
    if draw(one_in(20)):
        content = draw(st.sampled_from(DISGUISES))
    options = LoadOptions(
        image_size=draw(one_of(None, 8)),
        skip_bad=draw(st.booleans()),
        unit_column=draw(one_of(None, "patient")),
        download=False,
    )
    path = box / name
    if draw(st.booleans()):
        path.write_bytes(content)
        return lambda: load(path, options)
    if name.endswith(".parquet"):
        for split, data in (("train", content), ("test", seeds.tables[name])):
            (box / f"{split}-00000-of-00001.parquet").write_bytes(data)
        return lambda: load(box, options)
    for split, data in (("train", content), ("test", seeds.tables[name])):
        (box / split).mkdir()
        (box / split / "data.arrow").write_bytes(data)
        state = b'{"_data_files": [{"filename": "data.arrow"}]}'
        (box / split / "state.json").write_bytes(draw(mostly(state, damaged_one_in=5)))
        (box / split / "dataset_info.json").write_text("{}")
    (box / "dataset_dict.json").write_bytes(draw(mostly(b'{"splits": ["train", "test"]}', damaged_one_in=5)))
    return lambda: load(box, options)


def dicom(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """Class folders of DICOM files, some damaged, in their header or in their pixels."""
    if not seeds.dicom:
        pytest.skip("pydicom is not installed")
    for label in ("ill", "well"):
        (box / label).mkdir()
        for number in range(draw(st.integers(1, 2))):
            name = draw(st.sampled_from(sorted(seeds.dicom)))
            data = seeds.dicom[name].replace(b"P1", b"P%d" % (number + 2 * (label == "well")))
            ending = draw(one_of("", ".dcm"))
            (box / label / f"{number}{ending}").write_bytes(draw(mostly(data, damaged_one_in=2)))
        _add_trap(draw, box / label, box)
    options = LoadOptions(
        skip_bad=draw(st.booleans()), image_size=draw(one_of(None, 8)), squash=draw(st.booleans()), download=False
    )
    return lambda: load(box, options)


def damaged_source(draw: Draw, seeds: Seeds, box: Path) -> Path:
    """A damaged table with images inside, or class folders of DICOM files of which one is damaged."""
    name = draw(st.sampled_from(sorted({**seeds.tables, **seeds.dicom})))
    if name in seeds.tables:
        (box / name).write_bytes(draw(mostly(seeds.tables[name], damaged_one_in=2)))
        return box / name
    root = box / "scans"
    for number in range(6):
        place = root / ("ill", "well")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        content = seeds.dicom[name].replace(b"P1", b"P%d" % number)
        (place / f"{number}.dcm").write_bytes(draw(mostly(content, damaged_one_in=2)) if not number else content)
    return root


def _damaged_volume(draw: Draw, seeds: Seeds, place: Path) -> Path:
    data, packed = draw(damaged_bytes(seeds.volume)), draw(st.booleans())
    path = place / ("scan.nii.gz" if packed else "scan.nii")
    path.write_bytes(draw(mostly(gzip.compress(data, 1), damaged_one_in=5)) if packed else data)
    return path


def pairs(draw: Draw, seeds: Seeds, box: Path) -> Case:
    """Images or volumes with masks of the same names, some damaged."""
    good = seeds.images["grey.png"]
    contents = st.one_of(st.just(good), st.just(good), damaged_png(good), damaged_bytes(good))
    for place in ("images", "masks"):
        (box / place).mkdir()
        for number in range(2):
            (box / place / f"{number}.png").write_bytes(draw(contents))
        if draw(one_in(3)):
            _damaged_volume(draw, seeds, box / place)
        _add_trap(draw, box / place, box)
    options = LoadOptions(
        segmentation=True,
        masks=box / "masks",
        mask_classes=draw(one_of("merged", "classes")),
        skip_bad=draw(st.booleans()),
        image_size=draw(one_of(None, 8)),
        unit_pattern=draw(one_of(None, "(.)", r"(\d+)")),
    )
    return lambda: load(box / "images", options)
