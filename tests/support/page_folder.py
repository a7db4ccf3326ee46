"""A folder with everything that the commands of the documentation name: images, tables, masks, volumes, datasets."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from PIL import Image

from dicom_files import write_dicom
from tiny_masks import discs

SIDE = 16
UNITS = 80
CLASSES = ("healthy", "ill")


def write_scans(folder: Path, *, patients: int, seed: int, first: int = 0) -> list[str]:
    """Two classes of images that differ in brightness, two of each patient; their names below the folder."""
    generator = np.random.default_rng(seed)
    names: list[str] = []
    for patient in range(first, first + patients):
        for number in range(2):
            kind = patient % 2
            name = f"{CLASSES[kind]}/p{patient}_{number}.png"
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(100 * kind, 100 * kind + 120, size=(SIDE, SIDE), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
            names.append(name)
    return names


def write_page_folder(folder: Path) -> None:
    """Write the files that the pages' commands name into the current folder of a test."""
    names = write_scans(folder / "scans", patients=UNITS // 2, seed=0)
    write_scans(folder / "public-scans", patients=6, seed=1, first=100)
    for number, name in enumerate(("scan1.png", "scan2.png", "new-scan.png")):
        (folder / name).write_bytes((folder / "scans" / names[number]).read_bytes())
    _write_tables(folder, names)
    _write_masks(folder)
    _write_datasets(folder / "data")


def _write_tables(folder: Path, names: list[str]) -> None:
    table, owners, findings = ["file,label,patient,split"], ["file,unit"], ["file,Edema,Fracture"]
    for number, name in enumerate(names):
        path = folder / "study" / "a" / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((folder / "scans" / name).read_bytes())
        patient = name.split("/")[1].split("_")[0]
        split = "test" if number >= len(names) - 12 else "train"
        table.append(f"a/{number:03}.png,{('malignant', 'benign')[number // 2 % 2]},{patient},{split}")
        owners.append(f"{name},{patient}")
        findings.append(f"{name},{number % 2},{(1, 0, -1, '')[number % 4]}")
    for name, lines in (("study/labels.csv", table), ("owners.csv", owners), ("findings.csv", findings)):
        (folder / name).write_text("\n".join(lines) + "\n")
    generator = np.random.default_rng(5)
    for number in range(UNITS):
        pixels = generator.integers(-200, 300, size=(SIDE, SIDE)).astype(np.int16)
        write_dicom(folder / "dicom" / CLASSES[number % 2] / f"{number}.dcm", pixels, patient=f"P{number}")


def _write_masks(folder: Path) -> None:
    """Slices with masks, and volumes with labels, private and public."""
    import nibabel

    images, masks = discs(60)
    for number, (image, mask) in enumerate(zip(images, masks, strict=True)):
        for place, pixels in (("slices", image), ("masks", mask * 255), ("images", image)):
            path = folder / place / f"patient{number // 2}_{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(pixels).save(path)
    for part, labels, count, seed in (("volumes", "labels", 8, 2), ("public", "public-labels", 3, 3)):
        for number in range(count):
            images, masks = discs(4, seed=10 * seed + number)
            for place, voxels in ((part, images.astype(np.int16) * 2 - 150), (labels, masks.astype(np.int16))):
                (folder / place).mkdir(exist_ok=True)
                volume = nibabel.Nifti1Image(np.moveaxis(voxels, 0, 2), np.eye(4))
                volume.to_filename(str(folder / place / f"{part}{number}.nii.gz"))
    (folder / "more-scans").mkdir()
    (folder / "scan.nii.gz").write_bytes((folder / "public" / "public0.nii.gz").read_bytes())
    (folder / "more-scans" / "other.nii.gz").write_bytes((folder / "public" / "public1.nii.gz").read_bytes())


def _write_datasets(folder: Path) -> None:
    """MNIST and CIFAR-10 in their own forms, with a few random images."""
    generator = np.random.default_rng(7)
    mnist = folder / "mnist"
    mnist.mkdir(parents=True)
    for part, number in (("train", 50), ("t10k", 20)):
        images, labels = struct.pack(">IIII", 2051, number, 28, 28), struct.pack(">II", 2049, number)
        mnist.joinpath(f"{part}-images-idx3-ubyte").write_bytes(images + generator.bytes(number * 784))
        mnist.joinpath(f"{part}-labels-idx1-ubyte").write_bytes(labels + bytes(i % 10 for i in range(number)))
    place = folder / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        place.joinpath(name).write_bytes(b"".join(bytes([i % 10]) + generator.bytes(3072) for i in range(12)))
    (place / "batches.meta.txt").write_text("\n".join("abcdefghij"))
