"""Cases for everything that reads images, arrays and weights."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from dpvision.data import LoadOptions, load, load_images, load_one
from dpvision.data.features import Features, kept_features
from dpvision.data.nifti import read_volume
from dpvision.training.initial_weights import read_weights
from tools.fuzz.mutate import (
    DISGUISES,
    ODD_TEXTS,
    odd_npy,
    respoiled_zip,
    spoiled_bytes,
    spoiled_png,
    spoiled_safetensors,
    zipped,
)
from tools.fuzz.seeds import Seeds, tarred

Case = Callable[[], object]
_OFFLINE = LoadOptions(download=False)


def image(rng: Random, seeds: Seeds, box: Path) -> Case:
    """One spoiled image, read by itself."""
    name = rng.choice(sorted(seeds.images))
    data = seeds.images[name]
    shaped = name.endswith(".png") and data.startswith(b"\x89PNG") and rng.random() < 0.6
    path = box / name
    path.write_bytes(spoiled_png(rng, data) if shaped else spoiled_bytes(rng, data))
    channels = rng.choice((1, 3))
    return lambda: load_images([path], image_shape=(channels, 8, 8), squash=rng.random() < 0.5)


def folder(rng: Random, seeds: Seeds, box: Path) -> Case:
    """A folder of class folders with odd names, links, pipes and files that are none."""
    root = box / "classes"
    for label in range(rng.randint(1, 3)):
        place = root / _file_name(rng, f"class{label}")
        place.mkdir(parents=True, exist_ok=True)
        for number in range(rng.randint(0, 2)):
            name, data = rng.choice(sorted(seeds.images.items()))
            whole = data if rng.random() < 0.8 else spoiled_bytes(rng, data)
            (place / _file_name(rng, f"{number}-{name}")).write_bytes(whole)
        _add_trap(rng, place, box)
    options = LoadOptions(
        skip_bad=rng.random() < 0.5,
        image_size=rng.choice((None, 8)),
        unit_csv=_csv(rng, root, box) if rng.random() < 0.5 else None,
    )
    return lambda: load(root, options)


def _file_name(rng: Random, usual: str) -> str:
    odd = [text for text in ODD_TEXTS if text.strip() and len(os.fsencode(_plain(text))) < 200 and "/" not in text]
    return usual if rng.random() < 0.7 else _plain(rng.choice(odd)) + usual


def _plain(text: str) -> str:
    """What a file system takes: no zero byte."""
    return text.replace("\0", "")


def _add_trap(rng: Random, place: Path, box: Path) -> None:
    kind = rng.randrange(12)
    trap = place / f"trap{kind}.png"
    targets: dict[int, str | Path] = {0: "/dev/zero", 1: box, 2: trap, 3: "/etc/passwd", 4: "/nowhere"}
    if kind in targets:
        trap.symlink_to(targets[kind])
    elif kind == 5:
        os.mkfifo(trap)
    elif kind == 6:
        trap.mkdir()


def _csv(rng: Random, root: Path, box: Path) -> Path:
    files = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]
    rows = [f"{name},u{number % 2}" for number, name in enumerate(files)]
    text = "\r\n".join(["file,unit", *rows]).encode("utf-8", "surrogateescape")
    odd = (b'"', b'"a', b"\0", b"\xff\xfe", b",,,,", b"a" * 200_000, b"'x';", "\u2028".encode(), b"=cmd|' /C calc'!A0")
    if rng.random() < 0.6:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(odd) + text[at:]
    path = box / "units.csv"
    path.write_bytes(text if rng.random() < 0.7 else spoiled_bytes(rng, text))
    return path


def idx(rng: Random, seeds: Seeds, box: Path) -> Case:
    """A folder of idx files, one of which lies."""
    spoiled = rng.choice(sorted(seeds.idx))
    for name, data in seeds.idx.items():
        whole = data
        if name == spoiled and name.endswith(".gz") and rng.random() < 0.5:
            whole = gzip.compress(spoiled_bytes(rng, gzip.decompress(data)))
        elif name == spoiled:
            whole = spoiled_bytes(rng, data)
        (box / name).write_bytes(whole)
    return lambda: load(box, _OFFLINE)


def cifar(rng: Random, seeds: Seeds, box: Path) -> Case:
    """The files of a CIFAR set in a folder, one of them spoiled."""
    names = [name for name in seeds.cifar if "tar" not in name]
    spoiled = rng.choice(names)
    for name in names:
        data = seeds.cifar[name]
        (box / name).write_bytes(spoiled_bytes(rng, data) if name == spoiled else data)
    return lambda: load(box, _OFFLINE)


def archive(rng: Random, seeds: Seeds, box: Path) -> Case:
    """A CIFAR archive: spoiled, or with members that no archive should have."""
    if rng.random() < 0.5:
        data = rng.choice((_spoiled_tar, _odd_tar, _spoiled_member))(rng, seeds)
        path = box / "x.tar"
    else:
        raw = seeds.cifar["binary.tar"]
        raw = spoiled_bytes(rng, raw) if rng.random() < 0.5 else _odd_tar(rng, seeds)
        data = gzip.compress(raw, 1)
        data = spoiled_bytes(rng, data, times=1) if rng.random() < 0.2 else data
        path = box / "x.tar.gz"
    path.write_bytes(data)
    return lambda: load(path, _OFFLINE)


def _spoiled_tar(rng: Random, seeds: Seeds) -> bytes:
    return spoiled_bytes(rng, seeds.cifar["binary.tar"])


def _spoiled_member(rng: Random, seeds: Seeds) -> bytes:
    files = {name: data for name, data in seeds.cifar.items() if name.endswith((".bin", ".txt"))}
    name = rng.choice(sorted(files))
    return tarred({**files, name: spoiled_bytes(rng, files[name])})


def _odd_tar(rng: Random, seeds: Seeds) -> bytes:
    held = io.BytesIO()
    names = ("../evil", "/abs", "a/../../b", "data_batch_1", "C:\\x", "a\\..\\..\\b", "\x1b[2J", "dir", "x" * 300, "..")
    kinds = (
        tarfile.REGTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.FIFOTYPE,
        tarfile.DIRTYPE,
        b"S",
        b"?",
    )
    with tarfile.open(
        fileobj=held, mode="w", format=rng.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    ) as out:
        for _ in range(rng.randint(1, 4)):
            member = tarfile.TarInfo(rng.choice(names)[:99])
            member.type = rng.choice(kinds)
            member.linkname = rng.choice(("/etc/passwd", "../x", ""))
            out.addfile(member)
    header = bytearray(held.getvalue())
    if rng.random() < 0.5:  # a size of the wrong kind, with a right checksum
        header[124:136] = rng.choice(
            (b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0", b"-0000001000\0", b"\xff" * 10 + b"\xfe\x00")
        )
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header) + tarred({"data_batch_1.bin": seeds.cifar["data_batch_1.bin"]})


def npz(rng: Random, seeds: Seeds, box: Path) -> Case:
    """An .npz file: spoiled as a whole or member by member."""
    if rng.random() < 0.3:
        data = spoiled_bytes(rng, seeds.npz)
    elif rng.random() < 0.6:
        data = respoiled_zip(rng, seeds.npz)
    else:
        names = ("x_train", "y_train", "x_test", "y_test", "class_names", "owner", "images", "labels", "masks")
        data = zipped(rng, [(f"{name}.npy", odd_npy(rng)) for name in rng.sample(names, 4)])
    path = box / "x.npz"
    path.write_bytes(data)
    options = LoadOptions(unit_column=rng.choice((None, "owner")), image_size=rng.choice((None, 8)))
    return lambda: load(path, options)


def labels(rng: Random, seeds: Seeds, box: Path) -> Case:
    """Whole arrays with the wrong kind of values."""
    del seeds
    rows = rng.choice((0, 1, 5))
    choices = (
        np.zeros((rows, 4, 4), np.uint8),
        np.zeros((rows, 4, 4, 3), np.int64) + rng.choice((0, -1, 256)),
        np.full((rows, 3, 4, 4), rng.choice((0.5, np.nan, np.inf, -1.0)), rng.choice((np.float16, np.float64))),
        np.zeros((rows, 2, 0, 3), np.uint16),
        np.zeros(rows, "U3"),
        np.frombuffer(rng.randbytes(rows * 8), "<U2"),
        np.frombuffer(rng.randbytes(rows * 8), "S8"),
        np.arange(rows) * rng.choice((1, 9_999, 2**31, -1)),
        np.zeros((rows, 1), np.int8),
        np.full(rows, 2**63, np.uint64),
        np.ones(rows, np.complex64),
        np.array(rng.choice(("\x1b[2J", 3, 2.5))),
        np.array(["a", "a", "\x1b]0;x\x07"]),
    )
    held = {
        name: rng.choice(choices)
        for name in ("images", "labels", "x_test", "y_test", "class_names", "owner", "masks")
        if rng.random() < 0.7
    }
    path = box / "x.npz"
    np.savez(path, **held)  # pyright: ignore[reportArgumentType]
    column = rng.choice((None, "owner"))
    return lambda: (load(path, LoadOptions(unit_column=column)), load_one(path, class_names=("a", "b")))


def weights(rng: Random, seeds: Seeds, box: Path) -> Case:
    """A file of first weights."""
    name = rng.choice(sorted(seeds.weights))
    data = seeds.weights[name]
    if name.endswith(".safetensors") and rng.random() < 0.7:
        data = spoiled_safetensors(rng, data)
    elif name in ("w.pth", "w.npz") and rng.random() < 0.7:
        data = respoiled_zip(rng, data)
    else:
        data = spoiled_bytes(rng, data)
    if rng.random() < 0.05:
        data, name = rng.choice(DISGUISES), rng.choice(("x.pth", "x.bin", "x.safetensors", "x.npz", "x.txt", "x"))
    path = box / name
    path.write_bytes(data)
    return lambda: read_weights(path)


def features(rng: Random, seeds: Seeds, box: Path) -> Case:
    """A kept file of features that somebody changed: it is computed anew."""
    import torch

    del seeds
    place = box / "kept"
    place.mkdir(mode=0o700)
    fresh = Features(torch.zeros(2, 1, 3))
    held = io.BytesIO()
    np.save(held, fresh.values_NWF.numpy())
    content = rng.choice((spoiled_bytes(rng, held.getvalue()), odd_npy(rng), rng.choice(DISGUISES)))
    (place / f"k-{fresh.digest}.npy").write_bytes(content)
    return lambda: kept_features(place, "k", lambda: fresh)


def volume(rng: Random, seeds: Seeds, box: Path) -> Case:
    """A NIfTI volume, packed or not, whose header or voxels lie."""
    path = _spoiled_volume(rng, seeds, box)
    return lambda: read_volume(path)


def _spoiled_volume(rng: Random, seeds: Seeds, place: Path) -> Path:
    data = spoiled_bytes(rng, seeds.volume)
    if rng.random() < 0.5:
        path = place / "scan.nii"
    else:
        data, path = gzip.compress(data, 1), place / "scan.nii.gz"
        data = spoiled_bytes(rng, data, times=1) if rng.random() < 0.2 else data
    path.write_bytes(data)
    return path


def pairs(rng: Random, seeds: Seeds, box: Path) -> Case:
    """Images or volumes with masks of the same names, some spoiled."""
    for place in ("images", "masks"):
        (box / place).mkdir()
        for number in range(2):
            data = seeds.images["grey.png"]
            whole = data if rng.random() < 0.7 else rng.choice((spoiled_png, spoiled_bytes))(rng, data)
            (box / place / f"{number}.png").write_bytes(whole)
        if rng.random() < 0.3:
            _spoiled_volume(rng, seeds, box / place)
        _add_trap(rng, box / place, box)
    options = LoadOptions(
        segmentation=True,
        masks=box / "masks",
        mask_classes=rng.choice(("merged", "classes")),
        skip_bad=rng.random() < 0.5,
        image_size=rng.choice((None, 8)),
        unit_pattern=rng.choice((None, "(.)", r"(\d+)")),
    )
    return lambda: load(box / "images", options)
