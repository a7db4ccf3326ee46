"""Good input to damage: small files of every kind that is read, and one finished run."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import nibabel
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save

from dicom_files import write_dicom
from dpvision.config import parse_config
from dpvision.training import train

ROWS, SIDE = 12, 8


@final
@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Bytes by kind, the configuration of a run as plain values, and the folder of that run."""

    images: Mapping[str, bytes]
    idx: Mapping[str, bytes]
    cifar: Mapping[str, bytes]
    npz: bytes
    volume: bytes
    tables: Mapping[str, bytes]
    dicom: Mapping[str, bytes]
    weights: Mapping[str, bytes]
    config: dict[str, Any]
    run: Path
    data: Path


def make_seeds(folder: Path) -> Seeds:
    """Make everything in ``folder``."""
    generator = np.random.default_rng(0)
    labels = np.arange(ROWS) % 3
    images = generator.integers(0, 256, (ROWS, SIDE, SIDE), dtype=np.uint8)
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels, "owner": labels.astype("U4")}
    data = folder / "data.npz"
    np.savez(data, **arrays, class_names=np.array(["a", "b", "c"]))  # pyright: ignore[reportArgumentType]
    config = _config(data)
    run = folder / "run"
    train(parse_config(config), run=run, seed=1)
    return Seeds(
        images=_images(),
        idx=_idx(images, labels),
        cifar=_cifar(generator),
        npz=data.read_bytes(),
        volume=_volume(),
        tables=_tables(),
        dicom=_dicom(folder),
        weights=_weights(),
        config=config,
        run=run,
        data=data,
    )


def _config(source: Path) -> dict[str, Any]:
    privacy = {"noise_multiplier": 2.0, "delta": 1e-3, "num_units": ROWS, "expected_batch_size": 4.0, "steps": 2}
    return {
        "name": "fuzz",
        "data": {"source": str(source)},
        "model": {"name": "linear", "options": {"image_size": SIDE}},
        "privacy": {**privacy, "clip_norm": 1.0},
        "optimizer": {"name": "sgd", "learning_rate": 0.5, "momentum": 0.5},
        "views": {"count": 1, "flip": 0.5},
        "evaluations": 1,
        "checkpoint_every": 1,
    }


def _images() -> dict[str, bytes]:
    generator = np.random.default_rng(1)
    colour = Image.fromarray(generator.integers(0, 256, (9, 11, 3), dtype=np.uint8))
    grey = colour.convert("L")
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = _encoded(colour, "JPEG", exif=exif.tobytes())
    return {
        "a.png": _encoded(colour, "PNG"),
        "grey.png": _encoded(grey, "PNG"),
        "alpha.png": _encoded(colour.convert("RGBA"), "PNG"),
        "palette.png": _encoded(colour.convert("P"), "PNG", transparency=3),
        "deep.png": _encoded(Image.fromarray(np.full((9, 9), 40_000, np.uint16)), "PNG"),
        "bits.png": _encoded(grey.convert("1"), "PNG"),
        "animated.png": _encoded(colour, "PNG", save_all=True, append_images=[colour.rotate(90)]),
        "a.jpg": turned,
        "cmyk.jpg": _encoded(colour.convert("CMYK"), "JPEG"),
        "a.bmp": _encoded(colour, "BMP"),
        "a.tif": _encoded(colour, "TIFF"),
        "packed.tif": _encoded(colour, "TIFF", compression="tiff_deflate"),
        "cmyk.tif": _encoded(colour.convert("CMYK"), "TIFF"),
        "float.tif": _encoded(Image.fromarray(np.ones((5, 5), np.float32)), "TIFF"),
        "pages.tif": _encoded(colour, "TIFF", save_all=True, append_images=[colour]),
        "a.webp": _encoded(colour, "WEBP", lossless=True),
        "moving.webp": _encoded(colour, "WEBP", save_all=True, append_images=[colour.rotate(90)]),
        "gif.png": _encoded(colour, "GIF"),
    }


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, kind, **options)
    return held.getvalue()


def _volume() -> bytes:
    voxels = np.random.default_rng(2).integers(-900, 900, (6, 5, 4)).astype(np.int16)
    return nibabel.Nifti1Image(voxels, np.eye(4)).to_bytes()


def _tables() -> dict[str, bytes]:
    """Tables with images inside: Parquet and both kinds of Arrow, as Hugging Face stores them. None without pyarrow."""
    if find_spec("pyarrow") is None:
        return {}
    import pyarrow as arrow
    from pyarrow import parquet

    grey = Image.fromarray(np.random.default_rng(3).integers(0, 256, (9, 11), dtype=np.uint8))
    features = {"image": {"_type": "Image"}, "label": {"names": ["ill", "well"], "_type": "ClassLabel"}}
    table: Any = arrow.table(
        {
            "image": [{"bytes": _encoded(grey, "PNG"), "path": f"{row}.png"} for row in range(4)],
            "label": [row % 2 for row in range(4)],
            "patient": [f"p{row}" for row in range(4)],
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    stored: dict[str, Any] = {name: arrow.BufferOutputStream() for name in ("a.parquet", "stream.arrow", "file.arrow")}
    parquet.write_table(table, stored["a.parquet"])
    for name, writer in (("stream.arrow", arrow.ipc.new_stream), ("file.arrow", arrow.ipc.new_file)):
        with writer(stored[name], table.schema) as file:
            file.write_table(table)
    return {name: held.getvalue().to_pybytes() for name, held in stored.items()}


def _dicom(folder: Path) -> dict[str, bytes]:
    """Grey, colour and several frames; none without pydicom."""
    if find_spec("pydicom") is None:
        return {}
    generator = np.random.default_rng(4)
    pixels = {
        "grey.dcm": generator.integers(0, 4000, (9, 11), dtype=np.uint16),
        "colour.dcm": generator.integers(0, 256, (9, 11, 3), dtype=np.uint8),
        "frames.dcm": generator.integers(-900, 900, (4, 9, 11)).astype(np.int16),
    }
    tags = {"RescaleSlope": 2.0, "RescaleIntercept": -1000.0, "WindowCenter": 40.0, "WindowWidth": 400.0}
    return {name: write_dicom(folder / name, array, **tags).read_bytes() for name, array in pixels.items()}


def _idx(images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    pixels = bytes((0, 0, 8, 3)) + np.array(images.shape, ">u4").tobytes() + images.tobytes()
    answers = bytes((0, 0, 8, 1)) + np.array(labels.shape, ">u4").tobytes() + labels.astype(np.uint8).tobytes()
    return {
        "train-images-idx3-ubyte": pixels,
        "train-labels-idx1-ubyte": answers,
        "t10k-images-idx3-ubyte.gz": gzip.compress(pixels),
        "t10k-labels-idx1-ubyte.gz": gzip.compress(answers),
    }


def _cifar(generator: np.random.Generator) -> dict[str, bytes]:
    """The files of the binary version, and an archive of them."""
    binary = {f"data_batch_{n}.bin": generator.bytes(3072 * 2) for n in range(1, 6)}
    binary = {name: b"\x01" + rows[:3072] + b"\x02" + rows[3072:] for name, rows in binary.items()}
    binary |= {
        "test_batch.bin": b"\x03" + generator.bytes(3072),
        "batches.meta.txt": b"\n".join(b"abcdefghij"[i : i + 1] for i in range(10)),
    }
    return {**binary, "binary.tar": tarred(binary)}


def tarred(files: Mapping[str, bytes]) -> bytes:
    """Files in a folder of a tar archive."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return held.getvalue()


def _weights() -> dict[str, bytes]:
    tensors = {"stem.weight": torch.ones(3, 2), "head.weight": torch.zeros(4), "head.bias": torch.zeros(4)}
    state, old, arrays = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": tensors}, state)
    torch.save(tensors, old, _use_new_zipfile_serialization=False)
    np.savez(arrays, **{name: value.numpy() for name, value in tensors.items()})  # pyright: ignore[reportArgumentType]
    return {
        "w.safetensors": save(tensors, {"format": "pt"}),
        "w.pth": state.getvalue(),
        "old.pt": old.getvalue(),
        "w.npz": arrays.getvalue(),
    }
